"""Recurrent networks: packed rows, steps of a search, attention, dropout, counts."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packed_pairs import pack, random_pairs
from scipy.special import softmax

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream, keep_at
from bert_jax.model.seq2seq import recurrent, recurrent_layers
from bert_jax.model.seq2seq.network import Side
from bert_jax.model.seq2seq.recurrent import RecurrentNetwork
from bert_jax.model.seq2seq.recurrent_layers import Alignment, Places, RecurrentConfig

MODEL = ModelConfig(
    vocab_size=21, embedding_dim=6, hidden_dim=8, num_layers=2, num_heads=1, mlp_dim=8,
    init_std=0.3, hidden_dropout_rate=0.0, dtype="float32",
)  # fmt: skip
PAIRS = random_pairs(4, MODEL.vocab_size, seed=3)
PACKED, APART = [[], PAIRS[:2], [], PAIRS[2:]], [[pair] for pair in PAIRS]
"""The pairs in two rows, behind rows of padding, and in four."""
SOURCE, TARGET = 13, 11


def network(layers=2, **settings):
    return RecurrentNetwork(replace(MODEL, num_layers=layers), RecurrentConfig(**settings))


CASES = {
    "bahdanau": network(1),
    "gnmt": network(3, cell="lstm", residual_from=3),
    "luong": network(cell="lstm", attention="dot", wiring="after"),
    "window": network(cell="gru", attention="multiplicative", wiring="after", window=1),
    "deep luong": network(3, cell="tanh", attention="additive", wiring="after", residual_from=2),
    "dot before": network(cell="tanh", attention="dot", bidirectional=False, tying="output"),
    "bilinear before": network(1, attention="multiplicative", window=2, num_decoder_layers=2),
    "cho": network(1, attention="none", num_decoder_layers=2),
    "sutskever": network(
        cell="lstm", attention="none", wiring="after", bidirectional=False, tying="none"
    ),
    "tanh after": network(1, cell="tanh", attention="none", wiring="after"),
}


def random_params(net):
    """Parameters of which none is zero."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(net.init, jax.random.key(0))
    return jax.tree.map(lambda p: random.normal(0, 0.3, p.shape).astype(np.float32), shapes)


@partial(jax.jit, static_argnums=0)
def learn(net, params, source, target, stream=None):
    """Loss of some labels, its gradient, and logits."""

    def loss(params):
        logits = net.logits(params, source, target, stream)
        labels = (target.tokens.astype(jnp.int32) * 7 + 3) % MODEL.vocab_size
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
        return -jnp.sum(picked * (target.segment_ids > 0)), logits

    (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, grads, logits


@partial(jax.jit, static_argnums=0)
def forward(net, params, source, target, stream=None):
    return net.logits(params, source, target, stream)


@partial(jax.jit, static_argnums=0)
def stepped(net, params, source, tokens):
    """Logits of all places, step by step, of two beams each."""

    def step(cache, tokens):
        logits, cache = net.step(params, cache, tokens)
        return cache, logits

    cache = net.start(params, source, 2, tokens.shape[1])
    return jax.lax.scan(step, cache, jnp.repeat(tokens.T[..., None], 2, axis=2))[1]


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_learn_what_rows_of_one_pair_do(name):
    net = CASES[name]
    params = random_params(net)
    packed, apart = (learn(net, params, *pack(rows, SOURCE, TARGET)) for rows in (PACKED, APART))
    assert packed[0] == pytest.approx(float(apart[0]), rel=1e-6)
    for ours, theirs in zip(*(map(jax.tree.leaves, (packed[1], apart[1]))), strict=True):
        assert np.linalg.norm(theirs) > 0
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_a_place_of_the_whole_row(name):
    net = CASES[name]
    params = random_params(net)
    source, target = pack(APART, SOURCE, TARGET)
    expected = np.asarray(learn(net, params, source, target)[2])
    found = np.asarray(stepped(net, params, source, target.tokens))  # (T, B, K, V)
    real = target.segment_ids > 0
    for beam in found.transpose(2, 1, 0, 3):
        np.testing.assert_allclose(beam[real], expected[real], atol=1e-5)


def test_a_place_sees_its_pair_and_nothing_after_it():
    net = CASES["window"]
    params, (source, target) = random_params(net), pack(PACKED, SOURCE, TARGET)
    second = np.flatnonzero(target.segment_ids[1] == 2)  # places of the row's second pair
    before = np.asarray(learn(net, params, source, target)[2])[1]

    def changed(side, place):
        tokens = side.tokens.copy()
        tokens[1, place] = 20 if tokens[1, place] != 20 else 19
        return side._replace(tokens=tokens)

    later = np.asarray(learn(net, params, source, changed(target, second[2]))[2])[1]
    np.testing.assert_array_equal(later[: second[2]], before[: second[2]])
    assert (later[second[2:]] != before[second[2:]]).any(-1).all()
    other = changed(source, np.flatnonzero(source.segment_ids[1] == 2)[2])
    after = np.asarray(learn(net, params, other, target)[2])[1]
    np.testing.assert_array_equal(after[: second[0]], before[: second[0]])
    assert (after[second] != before[second]).any(-1).all()


def dots(jaxpr):
    """Operations of the matrix products of a program, those of loops as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            factors = [shape[axis] for axis in contracted] + list(equation.outvars[0].aval.shape)
            total += 2 * int(np.prod(factors))
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += times * dots(inner)
    return total


@pytest.mark.parametrize(
    ("cell", "attention", "wiring"),
    list(itertools.product(("gru", "lstm"), ("none", "dot", "additive"), ("before", "after"))),
)
def test_products_are_as_many_as_counted(cell, attention, wiring):
    """W1 h of the additive score is made once for a source, not at each target place."""
    for layers, bidirectional in ((1, True), (3, False)):
        net = network(
            layers, cell=cell, attention=attention, wiring=wiring, bidirectional=bidirectional,
            num_decoder_layers=2,
        )  # fmt: skip
        sides = pack(PACKED, SOURCE, TARGET)
        params = jax.eval_shape(net.init, jax.random.key(0))
        program = jax.make_jaxpr(net.logits)(params, *sides)
        assert dots(program.jaxpr) * 3 == len(PAIRS) * net.flops(SOURCE, TARGET)


@pytest.mark.parametrize("name", ["bahdanau", "luong"])
def test_weights_lie_on_the_source_of_the_pair(name):
    net, sides = CASES[name], pack(PACKED, SOURCE, TARGET)
    found = jax.jit(net.weights)(random_params(net), *sides)
    assert found.encoder is None
    assert found.decoder is None
    cross = np.asarray(found.cross)
    assert cross.shape == (1, len(PAIRS), 1, TARGET, SOURCE)
    np.testing.assert_allclose(cross.sum(-1), 1, atol=1e-6)
    source, target = sides
    same = target.segment_ids[:, :, None] == source.segment_ids[:, None]
    real = target.segment_ids > 0
    assert not cross[0, :, 0][real & True][~same[real]].any()
    assert jax.jit(CASES["cho"].weights)(random_params(CASES["cho"]), *sides).cross is None


def test_a_window_follows_the_target():
    """Target place t looks around the source's t + 1, which [CLS] precedes, or around its end."""
    net, sides = CASES["window"], pack(APART, SOURCE, TARGET)
    cross = np.asarray(jax.jit(net.weights)(random_params(net), *sides).cross)[0, :, 0]
    for row, (source, target) in enumerate(PAIRS):
        last = len(source) + 1
        for place in range(len(target) + 1):
            centre = min(place + 1, last)
            seen = [i for i in (centre - 1, centre, centre + 1) if i <= last]
            assert list(np.flatnonzero(cross[row, place])) == seen


def test_the_summary_is_the_last_state_of_each_direction():
    """Of rows without padding: the last place of the way on, the first of the way back."""
    net = network(1, attention="none")
    params, source = random_params(net), pack(APART, SOURCE, TARGET)[0]
    padded = jax.jit(net.start, static_argnums=(2, 3))(params, source, 1, 1)
    for row, (text, _) in enumerate(PAIRS):
        own = Side(*(x[row : row + 1, : len(text) + 2] for x in source))
        cache = jax.jit(net.start, static_argnums=(2, 3))(params, own, 1, 1)
        np.testing.assert_allclose(cache.shared[0], padded.shared[row], atol=1e-6)


def test_dropout_depends_on_the_row_and_not_on_its_place_in_the_batch():
    for name in ("gnmt", "deep luong"):
        net = CASES[name]
        net = replace(net, model=replace(net.model, hidden_dropout_rate=0.5))
        params, sides = random_params(net), pack(PACKED, SOURCE, TARGET)
        stream = DropoutStream(np.uint32(3), np.arange(4, dtype=np.uint32))
        plain, dropped = (np.asarray(forward(net, params, *sides, s)) for s in (None, stream))
        turned = [Side(*(x[::-1] for x in side)) for side in sides]
        stream = stream._replace(row_index=stream.row_index[::-1])
        again = np.asarray(forward(net, params, *turned, stream))[::-1]
        np.testing.assert_allclose(again, dropped, atol=1e-6)
        real = sides[1].segment_ids > 0
        assert (np.abs(dropped - plain)[real].max(-1) > 1e-3).mean() > 0.8


@pytest.mark.parametrize("name", ["gnmt", "deep luong"])
def test_every_dropout_has_a_site_of_its_own_and_the_rate_of_its_part(name, monkeypatch):
    sites, used = [], []

    def recording(function):
        def run(x, rate, stream, site):
            sites.append(site)
            used.append(rate)
            return function(x, rate, stream, site)

        return run

    def keep(rate, seed, site, *rest):
        sites.append(site)
        used.append(rate)
        return keep_at(rate, seed, site, *rest)

    monkeypatch.setattr(recurrent, "dropout", recording(recurrent.dropout))
    monkeypatch.setattr(recurrent_layers, "keep_at", keep)
    rates = {"hidden_dropout_rate": 0.5, "embedding_dropout_rate": 0.1}
    net = replace(CASES[name], model=replace(CASES[name].model, **rates))
    stream = DropoutStream(np.uint32(3), np.arange(4, dtype=np.uint32))
    sides = pack(PACKED, SOURCE, TARGET)
    params = jax.eval_shape(net.init, jax.random.key(0))
    jax.eval_shape(net.logits, params, *sides, stream)
    # Two tables, the readout, and what lies between three layers of either side.
    assert sorted(used) == [0.1, 0.1, *[0.5] * 5]
    assert len(set(sites)) == len(sites), sites


@pytest.mark.parametrize("score", ["dot", "multiplicative", "additive"])
def test_scores_are_those_of_the_papers(score):
    random = np.random.default_rng(0)
    states, query = (jnp.float32(random.normal(size=(1, n, 8))) for n in (5, 1))

    @jax.jit
    def run():
        module = Alignment(MODEL, score, 0, nnx.Rngs(params=0))
        memory = module.remember(states, jnp.ones((1, 5), jnp.int32))
        at = Places(jnp.ones((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))
        return module.reader(memory)(query, at), nnx.to_pure_dict(nnx.state(module, nnx.Param))

    (context, weights), params = run()
    h, s = np.asarray(states[0]), np.asarray(query[0, 0])
    if score == "dot":
        scores = h @ s
    elif score == "multiplicative":
        scores = h @ params["key"]["kernel"] @ s
    else:
        sums = h @ params["key"]["kernel"] + s @ params["query"]["kernel"]
        scores = np.tanh(sums) @ params["vector"]
    expected = softmax(scores)
    np.testing.assert_allclose(weights[0, 0], expected, atol=1e-6)
    np.testing.assert_allclose(context[0, 0], expected @ h, atol=1e-5)


def test_bfloat16_is_near_float32():
    net, sides = CASES["luong"], pack(PACKED, SOURCE, TARGET)
    half = replace(net, model=replace(net.model, dtype="bfloat16"))
    params = random_params(net)
    expected, found = (np.asarray(forward(n, params, *sides)) for n in (net, half))
    assert found.dtype == np.float32
    real, tokens = sides[1].segment_ids > 0, slice(MODEL.vocab_size)
    error = np.abs(found - expected)[real][:, tokens].max()
    assert 0 < error < 0.1 * np.abs(expected[real][:, tokens]).max()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"residual_from": 1}, "objective.residual_from is 1; it must be at least 2"),
        ({"window": -1}, "objective.window is -1; it must be at least 0"),
        ({"window": 2, "attention": "none"}, "objective.attention is 'none'; expected window 0"),
        ({"num_decoder_layers": -1}, "objective.num_decoder_layers is -1"),
    ],
)
def test_settings_that_make_no_network_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        network(**settings)


def test_a_width_that_two_directions_cannot_share_is_refused():
    with pytest.raises(UserError, match=r"hidden_dim is 7; with objective.bidirectional"):
        RecurrentNetwork(replace(MODEL, hidden_dim=7))

"""The Transformer that translates: look-ahead, packing, cached steps, weights, tying, vectors."""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_pairs import SPECIAL, pack, random_pairs

from bert_jax.errors import UserError
from bert_jax.model import encoder
from bert_jax.model.attention.attend import attend
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream, dropout
from bert_jax.model.heads import init_params
from bert_jax.model.seq2seq import decoder
from bert_jax.model.seq2seq.network import Side
from bert_jax.model.seq2seq.search import SearchConfig, search
from bert_jax.model.seq2seq.transformer import TransformerNetwork

V, S, T = 40, 20, 16
BERT = ModelConfig(
    vocab_size=V, num_positions=20, hidden_dim=16, num_layers=2, num_heads=4, mlp_dim=24,
    init_std=0.2, dtype="float32",
)  # fmt: skip
VASWANI = replace(
    BERT, positions="sinusoidal", scale_embeddings=True, num_types=0, embedding_norm=False,
    activation="relu", head_transform=False, norm_eps=1e-6,
)  # fmt: skip
MODERN = replace(
    VASWANI, positions="rope", norm_order="pre", first_norm=False, gated=True, num_kv_heads=2,
    norm="rms", attention_bias=False, mlp_bias=False, activation="silu", attention_pattern="GL",
    local_window=2,
)  # fmt: skip
NETWORKS = {
    "bert": TransformerNetwork(BERT, num_decoder_layers=1, tying="output"),
    "vaswani": TransformerNetwork(VASWANI),
    "modern": TransformerNetwork(MODERN, num_decoder_layers=3, tying="none"),
}
PAIRS = random_pairs(6, V)
ROWS = [PAIRS[:2], PAIRS[2:4], PAIRS[4:]]
logits = jax.jit(lambda network, *rest: network.logits(*rest), static_argnums=0)


@pytest.fixture(scope="module")
def all_params():
    return {name: network.init(jax.random.key(0)) for name, network in NETWORKS.items()}


@pytest.fixture(params=NETWORKS)
def network(request, all_params):
    return NETWORKS[request.param], all_params[request.param]


def test_a_target_token_changes_no_logits_before_its_own_place(network):
    network, params = network
    source, target = pack(ROWS, S, T)
    before = np.asarray(logits(network, params, source, target))
    assert before.dtype == np.float32
    assert (before[..., V:] < -1e29).all()
    for place in (3, 6):
        tokens = target.tokens.copy()
        tokens[:, place] = (tokens[:, place] + 1) % V
        after = np.asarray(logits(network, params, source, target._replace(tokens=tokens)))
        np.testing.assert_array_equal(after[:, :place], before[:, :place])
        assert (after[:, place, :V] != before[:, place, :V]).any(-1).all()


def test_packed_pairs_are_pairs_of_their_own(network):
    network, params = network
    packed = pack(ROWS, S, T)
    together = np.asarray(logits(network, params, *packed))
    alone = pack([[pair] for pair in PAIRS], S, T)  # of the same shape: padded
    apart = np.asarray(logits(network, params, *(Side(*(x[:3] for x in side)) for side in alone)))
    for row in range(3):
        number, place = divmod(row, 2)
        here = packed[1].segment_ids[number] == place + 1
        np.testing.assert_allclose(
            together[number, here], apart[row, : here.sum()], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("side", [0, 1])
def test_a_pair_does_not_see_the_other_of_its_row(network, side):
    network, params = network
    sides = list(pack(ROWS, S, T))
    before = np.asarray(logits(network, params, *sides))
    tokens, segments = sides[side]
    sides[side] = Side(np.where(segments == 2, (tokens + 1) % V, tokens), segments)
    after = np.asarray(logits(network, params, *sides))
    first = pack(ROWS, S, T)[1].segment_ids == 1
    np.testing.assert_array_equal(after[first], before[first])
    assert (after[~first][:, :V] != before[~first][:, :V]).any()


def test_steps_with_a_cache_are_the_parallel_pass(network):
    network, params = network
    sources = [pair[0] for pair in PAIRS[:2]]
    # Two beams for each source: four targets of the same length.
    targets = np.array([[[2, 7, 9, 11], [2, 8, 8, 30]], [[2, 12, 5, 6], [2, 39, 20, 10]]])
    source, _ = pack([[(text, [])] for text in sources], S, T)

    @jax.jit
    def decode(params, source, targets):
        cache = network.start(params, source, 2, 6)
        tiled = jax.tree.map(lambda x: x.shape[:2], cache.beams)
        assert set(jax.tree.leaves(tiled, is_leaf=lambda x: x == (2, 2))) == {(2, 2)}
        found = []
        for place in range(4):
            step, cache = network.step(params, cache, targets[:, :, place])
            found.append(step)
        return jnp.stack(found, 2)

    found = np.asarray(decode(params, source, targets))
    flat = Side(targets.reshape(4, 4), np.ones((4, 4), np.uint8))
    doubled = Side(*(np.repeat(x, 2, 0) for x in source))
    whole = np.asarray(logits(network, params, doubled, flat)).reshape(found.shape)
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)


def test_beams_are_reordered_along_their_axis():
    network = NETWORKS["vaswani"]
    params = network.init(jax.random.key(1))
    source, _ = pack([[PAIRS[0]]], S, T)
    step = jax.jit(network.step)
    cache = jax.jit(partial(network.start, num_beams=2, max_length=3))(params, source)
    _, cache = step(params, cache, np.array([[2, 2]]))
    _, cache = step(params, cache, np.array([[7, 9]]))
    expected, _ = step(params, cache, np.array([[5, 6]]))
    swapped = cache._replace(beams=jax.tree.map(lambda x: x[:, ::-1], cache.beams))
    found, _ = step(params, swapped, np.array([[6, 5]]))
    np.testing.assert_allclose(found, expected[:, ::-1], atol=1e-5)


def test_weights_are_those_of_the_pass(network):
    network, params = network
    source, target = pack(ROWS, S, T)
    weights = jax.jit(network.weights)(params, source, target)
    layers = network.model.num_layers, network.decoder.num_layers
    assert weights.encoder.shape == (layers[0], 3, 4, S, S)
    assert weights.decoder.shape == (layers[1], 3, 4, T, T)
    assert weights.cross.shape == (layers[1], 3, 4, T, S)
    for each in weights:
        np.testing.assert_allclose(np.asarray(each).sum(-1), 1, atol=1e-5)
    real = target.segment_ids > 0
    unseen = target.segment_ids[:, :, None] != source.segment_ids[:, None]
    assert not np.asarray(weights.cross)[:, (unseen & real[..., None])[:, None].repeat(4, 1)].any()
    later = np.triu(np.ones((T, T), bool), 1) & real[..., None]
    assert not np.asarray(weights.decoder)[:, later[:, None].repeat(4, 1)].any()


def test_tying_decides_which_tables_there_are(all_params):
    def tables(params):
        return (
            "token" in params["encoder"]["embeddings"],
            "token" in params["decoder"].get("embeddings", {}),
            "decoder" in params["output"],
        )

    found = {name: tables(params) for name, params in all_params.items()}
    assert found == {
        "vaswani": (True, False, False), "bert": (True, True, False), "modern": (True, True, True)
    }  # fmt: skip


def test_the_encoder_is_the_one_of_masked_words(all_params):
    for name, network in NETWORKS.items():
        pretrained = init_params(replace(network.model, pooler=False), jax.random.key(0))["encoder"]
        ours = all_params[name]["encoder"]
        assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, pretrained)


def test_axes_name_every_axis(all_params):
    for name, network in NETWORKS.items():
        axes = network.axes()
        assert jax.tree.map(lambda x, axes: x.ndim == len(axes), all_params[name], axes)
        assert axes["decoder"]["layers"]["cross"]["query"]["kernel"][:2] == ("layers", "embed")


def test_logits_begin_with_unit_scale_under_a_scaled_table():
    network = TransformerNetwork(replace(VASWANI, hidden_dim=64, mlp_dim=64, init_std=0.02))
    params = network.init(jax.random.key(0))
    table = np.asarray(params["encoder"]["embeddings"]["token"])[:V]
    assert 0.7 < table.std() * 8 < 1.0  # the root of 64 times the truncated normal's 0.88
    found = np.asarray(logits(network, params, *pack(ROWS, S, T)))[..., :V]
    assert 0.5 < found.std() < 1.5


def test_dropout_differs_between_the_sides_and_by_row():
    model = replace(VASWANI, hidden_dropout_rate=0.5, attention_dropout_rate=0.5)
    network = TransformerNetwork(model)
    params = network.init(jax.random.key(0))
    sides = pack([PAIRS[:2]] * 2, S, T)
    stream = DropoutStream(jnp.uint32(3), jnp.array([0, 1], jnp.uint32))
    dropped = np.asarray(logits(network, params, *sides, stream))
    assert (dropped[0] != dropped[1]).any()
    again = np.asarray(logits(network, params, *sides, stream))
    np.testing.assert_array_equal(again, dropped)


def test_every_dropout_has_a_site_of_its_own_and_the_rate_of_its_part(monkeypatch):
    sites, used = [], []

    def dropping(x, rate, stream, site):
        sites.append(site)
        used.append(rate)
        return dropout(x, rate, stream, site)

    def attending(asked, *options):
        sites.append(asked.site)
        used.append(asked.dropout_rate)
        return attend(asked, *options)

    for module in (encoder, decoder):
        monkeypatch.setattr(module, "dropout", dropping)
    monkeypatch.setattr(encoder, "attend", attending)
    model = replace(
        VASWANI, embedding_dropout_rate=0.1, attention_dropout_rate=0.2, hidden_dropout_rate=0.3,
        mlp_dropout_rate=0.4, scan_unroll=VASWANI.num_layers,  # no loop
    )  # fmt: skip
    network = TransformerNetwork(model)
    params, sides = jax.eval_shape(network.init, jax.random.key(0)), pack([PAIRS[:2]], S, T)
    stream = DropoutStream(np.uint32(3), np.zeros(1, np.uint32))
    jax.eval_shape(network.logits, params, *sides, stream)
    # Embeddings of both sides; weights and output of each attention, and the output of each MLP.
    layers = VASWANI.num_layers
    assert Counter(used) == {0.1: 2, 0.2: 3 * layers, 0.3: 3 * layers, 0.4: 2 * layers}
    assert len({*map(int, sites)}) == len(sites), sites


def test_vectors_in_place_of_tokens():
    network = TransformerNetwork(VASWANI, tying="output", feature_dim=6)
    params = network.init(jax.random.key(0))
    assert params["features"]["kernel"].shape == (6, 16)
    assert "embeddings" not in params["encoder"]
    _, target = pack([[pair] for pair in PAIRS[:2]], S, T)
    pictures = np.random.default_rng(0).normal(size=(2, 9, 6)).astype(np.float32)
    segments = np.ones((2, 9), np.uint8)
    segments[1, 5:] = 0
    found = np.asarray(logits(network, params, Side(pictures, segments), target))
    assert found.shape == (2, T, network.model.padded_vocab_size)
    hidden = np.where(segments[..., None] > 0, pictures, pictures + 1)
    np.testing.assert_allclose(
        logits(network, params, Side(hidden, segments), target)[:, :4], found[:, :4], atol=1e-5
    )
    cache = network.start(params, Side(pictures, segments), 1, T)
    first, _ = network.step(params, cache, jnp.full((2, 1), SPECIAL.cls))
    np.testing.assert_allclose(first[:, 0], found[:, 0], rtol=1e-4, atol=1e-5)


def test_an_output_without_parameters():
    """Tied, without transform and bias: the entry is in no tree, and was asked for."""
    network = TransformerNetwork(replace(VASWANI, num_layers=1, decoder_bias=False))
    params = jax.eval_shape(network.init, jax.random.key(0))
    assert params.keys() == {"encoder", "decoder"}
    source, target = pack([[pair] for pair in PAIRS[:2]], S, T)
    step = jax.grad(lambda params, *sides: network.logits(params, *sides).sum())
    assert jax.eval_shape(step, params, source, target).keys() == params.keys()
    how = {"settings": SearchConfig(), "max_length": 4, "begin": SPECIAL.cls, "end": SPECIAL.sep}
    found = jax.eval_shape(partial(search, network, **how), params, source, np.full(2, 4))
    assert found.tokens.shape == (2, 5, 4)


def test_networks_that_cannot_be_built_are_refused():
    said = r"TransformerNetwork\.feature_dim is 6.* set tying to 'output' or 'none'"
    with pytest.raises(UserError, match=said):
        TransformerNetwork(BERT, feature_dim=6)
    with pytest.raises(UserError, match=r"model\.embedding_dim is 8.*head_transform"):
        TransformerNetwork(replace(VASWANI, embedding_dim=8))
    network = NETWORKS["vaswani"]
    source, _ = pack([[PAIRS[0]]], S, T)
    with pytest.raises(UserError, match=r"target length 21 is beyond model\.num_positions 20"):
        jax.eval_shape(lambda: network.start(network.init(jax.random.key(0)), source, 1, 21))

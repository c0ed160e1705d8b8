"""Positions, packing, padding, the ways to run the stack, precision and sharding of the model."""

import dataclasses
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pretraining import apply_pretraining

from bert_jax.errors import UserError
from bert_jax.model import encoder
from bert_jax.model.attention import xla
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream, dropout, keep_mask
from bert_jax.model.heads import encode, init_params, logical_axes, pool

B, L = 8, 16
CONFIG = ModelConfig(
    vocab_size=100, num_positions=L, hidden_dim=32, num_layers=2, num_heads=4, mlp_dim=64,
    init_std=0.2, dtype="float32",
)  # fmt: skip
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 100, (B, L)).astype(np.uint16)
TYPES = RNG.integers(0, 2, (B, L)).astype(np.uint8)
ROWS = np.arange(B, dtype=np.uint32)
# Rows packed 5 + 7 + 3 with one token of padding, and a last row of padding alone.
PACKED = np.repeat([[1] * 5 + [2] * 7 + [3] * 3 + [0]], B, 0).astype(np.uint8)
PACKED[-1] = 0
ARRAYS = jax.device_put((TOKENS, PACKED))


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


def score(config, params, tokens, segment_ids, seed):
    """A scalar that depends on every logit of real tokens, and the logits."""
    stream = None if seed is None else DropoutStream(seed, jnp.asarray(ROWS))
    logits = apply_pretraining(config, params, tokens, jnp.asarray(TYPES), segment_ids, stream)
    real = segment_ids > 0
    log_p = jax.nn.log_softmax(logits.vocabulary)[..., 7] * real
    return -log_p.sum() / real.sum() + logits.pairs[:, 0].mean(), logits


value_and_grad = jax.jit(jax.value_and_grad(score, argnums=1, has_aux=True), static_argnums=0)
logits = jax.jit(partial(apply_pretraining, CONFIG))


def test_packed_segments_do_not_see_each_other(params):
    before = np.asarray(logits(params, TOKENS, TYPES, PACKED).vocabulary)
    second = PACKED == 2
    changed = np.where(second, (TOKENS + 1) % 100, TOKENS)
    after = np.asarray(logits(params, changed, TYPES, PACKED).vocabulary)
    np.testing.assert_array_equal(after[~second], before[~second])
    assert not np.isclose(after[second], before[second]).all(-1).any()


def test_a_packed_segment_is_what_it_is_alone(params):
    packed = np.asarray(logits(params, TOKENS, TYPES, PACKED).vocabulary)[0, 5:12]
    alone = np.asarray(
        logits(params, TOKENS[:1, 5:12], TYPES[:1, 5:12], PACKED[:1, 5:12]).vocabulary
    )[0]
    np.testing.assert_allclose(packed, alone, atol=1e-5)


def test_padding_tokens_do_not_matter(params):
    real = PACKED > 0
    before = jax.device_get(logits(params, TOKENS, TYPES, PACKED))
    changed = np.where(real, TOKENS, np.uint16(3))
    after = jax.device_get(logits(params, changed, TYPES, PACKED))
    np.testing.assert_array_equal(after.vocabulary[real], before.vocabulary[real])
    np.testing.assert_array_equal(after.pairs[:-1], before.pairs[:-1])


@pytest.mark.parametrize("seed", [None, np.uint32(1)])
def test_rows_of_padding_alone_are_finite(params, seed):
    (value, heads), gradients = value_and_grad(CONFIG, params, TOKENS, PACKED, seed)
    for array in jax.device_get((value, *heads, *jax.tree.leaves(gradients))):
        assert np.isfinite(array).all()


def test_a_model_of_one_type_learns_it_from_every_token():
    config = dataclasses.replace(CONFIG, num_types=1)
    params, segments = init_params(config, jax.random.key(0)), np.ones((B, L), np.int32)

    def states(params, types):
        hidden = encode(config, params, jnp.asarray(TOKENS), types, jnp.asarray(segments))
        return (hidden**3).sum(), hidden

    run = jax.jit(jax.value_and_grad(states, has_aux=True))
    (_, marked), gradient = run(params, TYPES)
    (_, plain), wanted = run(params, np.zeros_like(TYPES))
    np.testing.assert_array_equal(marked, plain)
    found, wanted = (tree["encoder"]["embeddings"]["type"] for tree in (gradient, wanted))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
def test_the_pooler_has_the_activation_of_the_configuration(params, activation):
    config = dataclasses.replace(CONFIG, pooler_activation=activation)

    @jax.jit
    def run(params, *rows):
        hidden = encode(config, params, *rows)
        return hidden, pool(config, params, hidden)

    hidden, pooled = jax.device_get(run(params, TOKENS, TYPES, np.ones((B, L), np.int32)))
    dense = params["encoder"]["pooler"]["dense"]
    x = hidden[:, 0] @ np.asarray(dense["kernel"]) + np.asarray(dense["bias"])
    normal = 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    wanted = {"tanh": np.tanh(x), "relu": np.maximum(x, 0), "gelu": x * normal}[activation]
    np.testing.assert_allclose(pooled, wanted, atol=1e-5)


def test_positions_beyond_the_trained_are_refused(params):
    short = dataclasses.replace(CONFIG, num_positions=L - 1)
    with pytest.raises(UserError, match=r"length 16 .*num_positions 15"):
        jax.eval_shape(partial(apply_pretraining, short), params, TOKENS, TYPES, PACKED)


@pytest.mark.parametrize(
    "changes",
    [{"scan_unroll": 1}, {"scan_unroll": 1, "remat": "dots"}, {"remat": "full"}],
    ids=str,
)
def test_ways_to_run_the_stack_agree(params, changes):
    other = dataclasses.replace(CONFIG, **changes)
    expected = value_and_grad(CONFIG, params, TOKENS, PACKED, np.uint32(1))
    actual = value_and_grad(other, params, TOKENS, PACKED, np.uint32(1))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), actual, expected)


def test_a_scan_over_periods_equals_straight_code():
    config = dataclasses.replace(  # the first layer, a period, and one layer that is left
        CONFIG, num_layers=4, norm_order="pre", first_norm=False, gated=True,
        positions="rope", attention_pattern="GL", local_window=2, attention_dropout_rate=0.0,
    )  # fmt: skip
    params = init_params(config, jax.random.key(0))
    expected = value_and_grad(config, params, TOKENS, PACKED, np.uint32(1))
    scanned = dataclasses.replace(config, scan_unroll=1)
    actual = value_and_grad(scanned, params, TOKENS, PACKED, np.uint32(1))
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), actual, expected)


def test_recomputing_saves_memory(params):
    def saved(config):
        def pull_back(params):
            return jax.vjp(lambda p: score(config, p, *ARRAYS, None)[0], params)[1]

        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(pull_back, params)))

    none, dots, full = (
        saved(dataclasses.replace(CONFIG, remat=remat)) for remat in ("none", "dots", "full")
    )
    assert none > dots > full


def test_bfloat16_is_close_to_float32(params):
    # Weights of the size that BERT starts from; nothing but the initialiser reads init_std.
    params = jax.tree.map(lambda leaf: np.asarray(leaf) * np.float32(0.1), params)
    low = dataclasses.replace(CONFIG, dtype="bfloat16")
    (expected, _), _ = value_and_grad(CONFIG, params, TOKENS, PACKED, None)
    (actual, heads), gradients = value_and_grad(low, params, TOKENS, PACKED, None)
    assert float(actual) == pytest.approx(float(expected), rel=1e-2)
    assert heads.vocabulary.dtype == heads.pairs.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradients))
    hidden = jax.eval_shape(partial(encode, low), params, TOKENS, TYPES, PACKED)
    pooled = jax.eval_shape(partial(pool, low), params, hidden)
    assert hidden.dtype == pooled.dtype == jnp.bfloat16


def test_bfloat16_multiplies_in_bfloat16_forward_and_backward(params):
    low = dataclasses.replace(CONFIG, dtype="bfloat16")
    gradient = jax.jit(jax.grad(lambda p: score(low, p, *ARRAYS, None)[0]))
    products = [line for line in gradient.lower(params).as_text().split("\n") if "dot_gen" in line]
    assert len(products) > 40
    for line in products:
        operands = line.rsplit(": (", 1)[1].split("->")[0]
        # On a CPU, the gradient of the logits' bias is a product with a row of ones.
        assert operands.count("bf16>") == 2 or operands.startswith(f"tensor<1x{B}x"), line


def test_dropout_follows_the_row_not_the_place_in_the_batch(params):
    types = jnp.asarray(TYPES[0:1].repeat(B, 0))
    run = jax.jit(
        lambda tokens, segments, rows, seed: apply_pretraining(
            CONFIG, params, tokens, types, segments,
            DropoutStream(seed, rows),
        ).pairs
    )  # fmt: skip
    order = np.random.default_rng(1).permutation(B)
    whole = np.asarray(run(TOKENS, PACKED, ROWS, np.uint32(1)))
    shuffled = run(TOKENS[order], PACKED[order], ROWS[order], np.uint32(1))
    np.testing.assert_allclose(shuffled, whole[order], atol=1e-5)
    assert not np.isclose(run(TOKENS, PACKED, ROWS, np.uint32(2)), whole).any()
    assert not np.isclose(run(TOKENS, PACKED, ROWS + np.uint32(B), np.uint32(1)), whole).any()


@pytest.mark.parametrize("scan_unroll", [1, CONFIG.num_layers])
def test_every_dropout_has_a_mask_of_its_own(params, monkeypatch, scan_unroll):
    found = []

    def recording(x, rate, stream, site):
        mask = keep_mask(x.shape, rate, stream.seed, site, stream.row_index)
        jax.debug.callback(lambda *pair: found.append(pair), site, mask)
        return dropout(x, rate, stream, site)

    monkeypatch.setattr(encoder, "dropout", recording)
    monkeypatch.setattr(xla, "dropout", recording)
    rates = {"hidden_dropout_rate": 0.5, "attention_dropout_rate": 0.5}
    config = dataclasses.replace(CONFIG, scan_unroll=scan_unroll, **rates)
    run = jax.jit(partial(encode, config))
    run(params, TOKENS, TYPES, PACKED, DropoutStream(np.uint32(1), ROWS))
    jax.effects_barrier()
    sites = [int(site) for site, _ in found]
    # Embeddings, and of each layer the attention's weights, its output and the MLP's.
    assert len(sites) == 1 + 3 * CONFIG.num_layers
    assert len(set(sites)) == len(sites), sites
    for (_, one), (_, other) in itertools.combinations(found, 2):
        if one.shape == other.shape:  # fair coins agree half the time
            assert abs((one == other).mean() - 0.5) < 2.5 / np.sqrt(one.size)


def test_sharded_over_eight_devices_with_dropout(params):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    rules = {"embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
    axes = logical_axes(CONFIG)
    shardings = jax.tree.map(
        lambda names: NamedSharding(mesh, PartitionSpec(*(rules.get(name) for name in names))),
        axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    by_row = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    placed = jax.device_put(params, shardings)
    tokens, segments = jax.device_put((TOKENS, PACKED), by_row)
    expected = value_and_grad(CONFIG, params, TOKENS, PACKED, np.uint32(1))
    actual = value_and_grad(CONFIG, placed, tokens, segments, np.uint32(1))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), actual, expected)

"""Disentangled attention against its formula, written with an array of all distances."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bert_jax.errors import UserError
from bert_jax.model.attention.relative import Relative, RelativeMaps, relative_scores, rows_of
from bert_jax.model.attention.xla import Asked, xla_attention
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream
from bert_jax.model.encoder import Layer
from bert_jax.model.heads import encode, init_params, layer_outputs, with_params

B, L, H, K = 2, 12, 2, 8
MODEL = ModelConfig(
    vocab_size=50, num_positions=L, hidden_dim=16, num_layers=2, num_heads=H, mlp_dim=24,
    positions="relative", relative_buckets=6, num_types=0, pooler=False, dtype="float32",
)  # fmt: skip
ROWS = rows_of(MODEL)
TERMS = ("c2p", "p2c", "c2p|p2c")


def arrays(seed=0):
    random = np.random.default_rng(seed)
    q, k, v = (random.normal(size=(B, L, H, K)).astype(np.float32) for _ in range(3))
    keys, queries = (random.normal(size=(12, H, K)).astype(np.float32) for _ in range(2))
    return q, k, v, keys, queries


def relative_of(terms, keys, queries):
    return Relative(keys if "c2p" in terms else None, queries if "p2c" in terms else None, ROWS)


def formula(terms, segments, q, k, v, keys, queries):
    """Attention by its definition: entry (i, j) reads the row of the table for i - j."""
    distance = np.arange(L)[:, None] - np.arange(L)
    rows = ROWS[distance + L - 1]
    scores = jnp.einsum("blhk,bshk->bhls", q, k)
    if "c2p" in terms:
        scores += jnp.einsum("blhk,lshk->bhls", q, keys[rows])
    if "p2c" in terms:
        scores += jnp.einsum("bshk,lshk->bhls", k, queries[rows])
    scores /= math.sqrt(K * (2 + terms.count("|")))
    visible = segments[:, None, :, None] == segments[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return jnp.einsum("bhls,bshk->blhk", weights, v)


def ours(terms, segments, q, k, v, keys, queries):
    return xla_attention(
        Asked(q, k, v, segments, segments, relative=relative_of(terms, keys, queries))
    )


@pytest.mark.parametrize("terms", TERMS)
def test_values_and_gradients_are_the_formula(terms):
    given, weights = arrays(), np.random.default_rng(1).normal(size=(B, L, H, K))
    segments = jnp.asarray([[1] * 7 + [2] * 5, [1] * 9 + [0] * 3])
    counts = (np.asarray(segments) > 0)[..., None, None]

    def total(attention, *given):
        return jnp.sum(attention(terms, segments, *given) * weights * counts)

    both = [
        jax.jit(jax.value_and_grad(partial(total, each), argnums=(0, 1, 2, 3, 4)))(*given)
        for each in (ours, formula)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *both)
    assert all(np.any(leaf) for leaf in both[0][1][:3])


@pytest.mark.parametrize("terms", TERMS)
def test_some_queries_have_the_scores_of_all(terms):
    q, k, _, keys, queries = (jnp.asarray(each) for each in arrays())
    q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    places = jnp.asarray([[3, 0, 11], [5, 6, 7]])
    some = jnp.take_along_axis(q, places[:, None, :, None], axis=2)
    relative = relative_of(terms, keys, queries)
    wanted = jnp.take_along_axis(relative_scores(q, k, relative), places[:, None, :, None], axis=2)
    found = relative_scores(some, k, relative, places)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_no_array_has_a_vector_for_each_pair():
    length, width = 96, 64
    rows = rows_of(replace(MODEL, num_positions=length))
    x, vectors = jnp.zeros((1, 1, length, width)), jnp.zeros((12, 1, width))

    def total(x, vectors):
        return relative_scores(x, x, Relative(vectors, vectors, rows)).sum()

    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(x, vectors)
    sizes = [math.prod(out.aval.shape) for each in jaxpr.eqns for out in each.outvars]
    assert 2 * length * length <= max(sizes) <= 3 * length * length < length * length * width


def test_near_distances_have_rows_of_their_own_and_far_ones_share():
    """Eight buckets on each side of 64 positions."""
    rows = rows_of(replace(MODEL, num_positions=64, relative_buckets=8)) - 8
    assert rows[63 - 4 : 63 + 5].tolist() == list(range(-4, 5))
    assert rows[63:].tolist() == sorted(rows[63:].tolist())
    assert rows[:63].tolist() == (-rows[64:][::-1]).tolist()
    assert rows[63 + np.array([5, 10, 11, 25, 26, 63])].tolist() == [5, 5, 6, 6, 7, 7]
    plain = rows_of(replace(MODEL, relative_buckets=0, relative_distance=3)) - 3
    assert plain.tolist() == [-3] * 9 + [-2, -1, 0, 1, 2] + [2] * 9


@pytest.mark.parity
@pytest.mark.parametrize(
    ("positions", "buckets", "distance"),
    [(512, 256, 0), (140, 16, 0), (512, 32, 128), (100, 48, 0), (1024, 256, 512), (64, 256, 0)],
)
def test_rows_are_those_of_transformers(positions, buckets, distance):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    x = torch.zeros(1, positions, 1)
    found = theirs.build_relative_position(x, x, buckets, distance or positions)[0]
    sizes = {"num_positions": positions, "relative_buckets": buckets, "relative_distance": distance}
    wanted = torch.clamp(found + buckets, 0, 2 * buckets - 1).numpy()
    steps = np.arange(positions)[:, None] - np.arange(positions)
    np.testing.assert_array_equal(rows_of(replace(MODEL, **sizes))[steps + positions - 1], wanted)


def test_weights_of_every_layer_read_the_table():
    params = init_params(MODEL, jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(5, 50, (B, L)))
    inputs = tokens, tokens * 0, jnp.ones_like(tokens)
    found = layer_outputs(MODEL, params, *inputs, with_weights=True)
    np.testing.assert_allclose(found.states[-1], encode(MODEL, params, *inputs), atol=1e-6)
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    table = params["encoder"]["embeddings"]["relative"]["table"]
    params["encoder"]["embeddings"]["relative"]["table"] = jnp.zeros_like(table)
    without = layer_outputs(MODEL, params, *inputs, with_weights=True)
    assert np.abs(found.weights - without.weights).max(axis=(1, 2, 3, 4)).min() > 1e-4


def test_the_table_has_dropout_and_each_layer_drops_other_elements():
    maps, params = RelativeMaps(MODEL, nnx.Rngs(0)), init_params(MODEL, jax.random.key(0))
    key = with_params(jax.tree.map(lambda leaf: leaf[0], params["encoder"]["layers"]), Layer, MODEL)
    table, stream = jnp.ones((12, 16)), DropoutStream(jnp.uint32(1), jnp.zeros(2, jnp.uint32))
    made = [
        maps(table, key.attention.key, key.attention.query, given, site).keys
        for given, site in ((stream, 0), (stream, 3), (None, 0))
    ]
    assert np.any(made[0] != made[1])
    assert np.all(made[2] == made[2][:1])


def refused(fields):
    model, params = replace(MODEL, **fields), init_params(MODEL, jax.random.key(0))
    encode(model, params, *[jnp.ones((B, L), jnp.int32)] * 3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_kv_heads": 1}, "as many key heads as query heads, but model.num_kv_heads is 1"),
        ({"relative_buckets": 1}, "model.relative_buckets is 1"),
        ({"relative_distance": 4}, "model.relative_distance is 4"),
        ({"attention_impl": "fused"}, "needs attention without relative positions"),
    ],
)
def test_what_is_refused(fields, said):
    with pytest.raises(UserError, match=said):
        refused(fields)

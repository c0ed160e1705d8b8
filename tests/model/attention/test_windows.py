"""Local attention: what a query sees, in every implementation, and what is not computed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import asked_of, attend
from test_attention_impls import B, H, K, dropout_of, inputs, jitted, value_and_gradients

from bert_jax.errors import UserError
from bert_jax.model.attention import fused_plan
from bert_jax.model.attention.attend import choose
from bert_jax.model.attention.library import block_sizes
from bert_jax.model.attention.xla import Asked, banded_attention, is_banded, visible_keys
from bert_jax.model.rotation import restarting_positions, rotate, rotation

WINDOW = 20


def by_hand(q, k, v, segments, window):
    """Attention of a row, query by query, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for row, i, head in np.ndindex(*q.shape[:3]):
        seen = [
            j
            for j in range(k.shape[1])
            if segments[row, j] == segments[row, i] and abs(i - j) <= window
        ]
        scores = k[row, seen, head] @ q[row, i, head] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[row, i, head] = weights / weights.sum() @ v[row, seen, head]
    return out


def test_a_query_sees_as_many_tokens_on_both_sides_and_no_other_segment():
    ids = jnp.array([[1, 1, 1, 1, 2, 2, 2, 0]])
    seen = np.asarray(visible_keys(ids, ids, 2))[0, 0]
    assert [np.flatnonzero(row).tolist() for row in seen] == [
        [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3], [4, 5, 6], [4, 5, 6], [4, 5, 6], [7],
    ]  # fmt: skip


@pytest.mark.parametrize("length", [96, 128])
@pytest.mark.parametrize("window", [5, WINDOW])
def test_blocks_compute_the_formula(length, window):
    (q, k, v, _), ids = inputs(length, length)
    assert is_banded(asked_of(length, length, 16, jnp.float32, window=window))
    out = jitted(q, k, v, **ids, window=window)
    expected = by_hand(q, k, v, np.asarray(ids["q_segment_ids"]), window)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_blocks_have_the_gradients_of_all_scores():
    arrays, ids = inputs(100, 100)
    banded = value_and_gradients(arrays, **ids, window=WINDOW)
    # Places of queries that are given take the way with all scores.
    everything = value_and_gradients(
        arrays, **ids, window=WINDOW, q_places=jnp.broadcast_to(jnp.arange(100), (B, 100))
    )
    for ours, theirs in zip(banded, everything, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize(
    ("impl", "rate", "window"),
    [
        ("fused", 0.0, WINDOW), ("fused", 0.3, WINDOW), ("splash", 0.0, WINDOW),
        ("long", 0.3, WINDOW), ("long", 0.0, 128), ("long", 0.3, 150), ("long", 0.0, 300),
    ],
)  # fmt: skip
def test_kernels_equal_xla(impl, rate, window, monkeypatch):
    if impl == "long":
        monkeypatch.setattr(fused_plan, "SHORT_LENGTH", 0)
        impl = "fused"
    arrays, ids = inputs(512, 512)
    ours = value_and_gradients(arrays, **ids, window=window, impl=impl, **dropout_of(rate))
    theirs = value_and_gradients(arrays, **ids, window=window, impl="xla", **dropout_of(rate))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


@pytest.mark.parametrize(("window", "block"), [(20, 128), (64, 128), (65, 256), (None, 512)])
def test_blocks_of_splash_are_as_wide_as_what_a_query_sees(window, block):
    sizes = block_sizes(1024, 1024, window)
    assert (sizes.block_q, sizes.block_kv_compute) == (block, block)


@pytest.mark.parametrize("impl", ["fused", "long", "splash"])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_kernels_rotate_as_the_model_does(impl, window, monkeypatch):
    if impl == "long":
        monkeypatch.setattr(fused_plan, "SHORT_LENGTH", 0)
        impl = "fused"
    arrays, ids = jax.tree.map(jnp.asarray, inputs(256, 256))
    angles = rotation(restarting_positions(ids["q_segment_ids"]), 100.0, K)
    *qkv, gradient = arrays

    @partial(jax.jit, static_argnames="impl")
    def run(qkv, impl):
        def attended(q, k, v):
            if impl == "xla":  # turned outside
                return attend(rotate(q, *angles), rotate(k, *angles), v, **ids, window=window)
            return attend(q, k, v, **ids, window=window, impl=impl, angles=angles)

        out, pull_back = jax.vjp(attended, *qkv)
        return out, *pull_back(gradient)

    for ours, theirs in zip(run(qkv, impl), run(qkv, "xla"), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-5)


@pytest.mark.parametrize(("window", "blocks"), [(64, 3), (63, 3), (65, 3), (129, 5), (4, 3)])
def test_fused_computes_the_blocks_that_a_chunk_sees(window, blocks):
    plan = fused_plan.Plan(1, 512, 512, 1, 64, 0.0, window)
    sizes = [(end - first) // 128 for first, end in map(plan.reach, range(0, 512, 128))]
    assert max(sizes) == blocks if blocks < 4 else 4
    assert plan.scores == 128 * 128 * sum(sizes)
    for start in range(0, 512, 128):
        first, end = plan.reach(start)
        assert first <= max(0, start - window)
        assert end >= min(512, start + 128 + window)


@pytest.mark.parametrize(("window", "blocks"), [(64, 2), (63, 2), (65, 3), (129, 4), (4, 2)])
def test_a_long_row_lies_in_a_frame_that_fits_the_window(window, blocks):
    plan = fused_plan.Plan(1, 1024, 1024, 1, 64, 0.0, window)
    assert plan.scores == 1024 * 128 * blocks
    assert plan.block >= plan.chunk + 2 * window
    assert plan.frame >= max(1024 - plan.chunk + plan.block, 1024 + plan.front)


@pytest.mark.parametrize(
    ("length", "heads", "at_once"), [(128, 12, 12), (256, 12, 6), (512, 12, 2), (512, 3, 1)]
)
def test_a_program_has_the_heads_whose_scores_it_holds(length, heads, at_once):
    plan = fused_plan.Plan(1, length, length, heads, 64, 0.0, None)
    assert plan.heads == at_once
    assert plan.heads * length**2 <= 2 * fused_plan.SCORES_PER_CHUNK


def test_the_keys_of_a_long_row_are_copied_in_whole_pieces():
    assert fused_plan.Plan(1, 4096, 4096, 1, 64, 0.0, None).piece == 512


def test_scores_of_a_row_grow_with_its_length_alone():
    def largest(length: int) -> int:
        """Count the numbers of the largest array of the program."""
        shapes = jax.ShapeDtypeStruct((1, length, H, K), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        jaxpr = jax.make_jaxpr(
            lambda q, k, v, i: banded_attention(Asked(q, k, v, i, i, window=16))
        )(shapes, shapes, shapes, ids)
        found = []

        def visit(jaxpr):
            for equation in jaxpr.eqns:
                found.extend(v.aval.size for v in equation.outvars)
                for value in equation.params.values():
                    if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                        visit(inner)

        visit(jaxpr.jaxpr)
        return max(found)

    assert largest(4096) == 2 * largest(2048)


def test_auto_and_refusals():
    asked = asked_of(512, 512, 64, jnp.bfloat16, window=64)
    assert choose("gpu", asked) == "xla"
    assert choose("tpu", asked) == "fused"
    assert choose("tpu", asked_of(8192, 8192, 64, jnp.bfloat16, window=64)) == "fused"
    (q, k, v, _), ids = inputs()
    with pytest.raises(UserError, match="'cudnn'"):
        jitted(q, k, v, **ids, window=4, impl="cudnn")


def test_heads_of_queries_share_keys():
    (q, k, v, _), ids = inputs(heads=4)
    shared = jitted(q, k[:, :, :2], v[:, :, :2], **ids)
    repeated = jitted(
        q, *(np.stack([x[:, :, 0], x[:, :, 0], x[:, :, 1], x[:, :, 1]], 2) for x in (k, v)), **ids
    )
    np.testing.assert_array_equal(shared, repeated)

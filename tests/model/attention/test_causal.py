"""Attention to a token's own place and those before, in every implementation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import asked_of, attend
from test_attention_impls import STATIC, assert_all_close, inputs

from bert_jax.errors import UserError
from bert_jax.model.attention import library
from bert_jax.model.attention.attend import choose
from bert_jax.model.attention.xla import Asked, visible_keys


@partial(jax.jit, static_argnames=(*STATIC, "causal"))
def value_and_gradients(arrays, **options):
    *qkv, gradient = arrays
    out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, **options), *qkv)
    return out, *pull_back(gradient)


def attended(q, k, v, causal=False):
    """One head without batch; q and k are scaled so that scores are their products."""
    q, k, v = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k, v))
    ones = (jnp.ones((1, x.shape[1]), jnp.int32) for x in (q, k))
    return np.asarray(attend(q, k, v, *ones, causal=causal))[0, :, 0]


def test_the_worked_example_of_two_scores():
    # Scores 112 and 96 of heads of 64: 14 and 12 after the scale.
    query = np.zeros((1, 64))
    query[0, :2] = 1
    keys = np.zeros((2, 64))
    keys[:, 0] = [112, 96]
    found = attended(query, keys, np.eye(2, 64))
    np.testing.assert_allclose(found[0, :2], [0.8808, 0.1192], atol=1e-4)


def test_the_worked_example_of_look_ahead():
    scores = [[0.7, 9, 9, 9], [0.1, 0.6, 9, 9], [0.1, 0.3, 0.6, 9], [0.1, 0.3, 0.3, 0.3]]
    found = attended(2 * np.array(scores), np.eye(4), np.eye(4), causal=True)
    expected = [
        [1, 0, 0, 0],
        [0.3775, 0.6225, 0, 0],
        [0.2584, 0.3156, 0.4260, 0],
        [0.2144, 0.2619, 0.2619, 0.2619],
    ]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert not found[np.triu_indices(4, 1)].any()


@pytest.mark.parametrize(
    ("query", "expected"),
    [([0, 10, 0], [10, 0]), ([0, 0, 10], [550, 5.5]), ([10, 10, 0], [5.5, 0])],
)
def test_the_worked_example_of_keys_and_values(query, expected):
    keys = 10 * np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]])
    values = np.array([[1, 0], [10, 0], [100, 5], [1000, 6]])
    padded = np.pad(values, ((0, 0), (0, 1)))
    found = attended(np.array([query]), keys, padded)
    np.testing.assert_allclose(found[0, :2], expected, atol=1e-3)


def test_a_query_sees_its_own_place_and_those_before_in_its_segment():
    ids = jnp.array([[1, 1, 1, 2, 2, 0]])
    seen = np.asarray(visible_keys(ids, ids, causal=True))[0, 0]
    assert [np.flatnonzero(row).tolist() for row in seen] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [3],
        [3, 4],
        [5],
    ]
    near = np.asarray(visible_keys(ids, ids, 1, causal=True))[0, 0]
    assert np.flatnonzero(near[2]).tolist() == [1, 2]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("impl", ["xla", "splash"])
def test_values_and_gradients_are_the_formula(impl, window):
    arrays, ids = inputs()
    ours = value_and_gradients(arrays, **ids, impl=impl, window=window, causal=True)
    # Places that are given take the way with all scores; autodiff of the formula in float64.
    segments, places = ids["q_segment_ids"], np.arange(128)
    visible = segments[:, :, None] == segments[:, None]
    visible &= (places[:, None] >= places)[None]
    if window is not None:
        visible &= (places[:, None] - places <= window)[None]
    q, k, v, gradient = (np.asarray(x, np.float64) for x in arrays)
    scores = np.where(visible[:, None], np.einsum("blhk,bshk->bhls", q, k) / 4, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhls,bshk->blhk", weights, v)
    dweights = np.einsum("blhk,bshk->bhls", gradient, v)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) / 4
    expected = (
        out,
        np.einsum("bhls,bshk->blhk", dscores, k),
        np.einsum("bhls,blhk->bshk", dscores, q),
        np.einsum("bhls,blhk->bshk", weights, gradient),
    )
    assert_all_close(ours, [x.astype(np.float32) for x in expected], 5e-6)


def test_the_call_of_cudnn():
    (*qkv, _), ids = inputs()
    run = jax.jit(lambda *arrays: library.cudnn_attention(Asked(*arrays, causal=True), "xla"))
    found = run(*qkv, *ids.values())
    expected = jax.jit(partial(attend, causal=True))(*qkv, **ids)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_fused_is_refused_by_name_and_passed_over():
    (*qkv, _), ids = inputs()
    with pytest.raises(
        UserError, match=r"'fused', which needs .* not the causal queries of a decoder"
    ):
        jax.eval_shape(partial(attend, impl="fused", causal=True), *qkv, **ids)
    asked = asked_of(128, 128, 64, jnp.bfloat16)
    assert choose("tpu", asked) == "fused"
    assert choose("tpu", asked._replace(causal=True)) == "splash"
    assert choose("tpu", asked._replace(causal=True, dropout_rate=0.1)) == "xla"

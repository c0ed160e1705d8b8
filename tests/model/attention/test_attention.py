"""Attention against float64, segments, padding and dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import attend as attention

from bert_jax.model.dropout import DropoutStream
from bert_jax.model.dropout import keep_mask as dropout_mask

B, L, S, H, K = 3, 5, 7, 2, 8


@pytest.fixture
def qkv():
    random = np.random.default_rng(0)
    return [np.float32(random.normal(size=(B, n, H, K))) for n in (L, S, S)]


Q_SEGMENTS = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], np.int32)
KV_SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 0, 0, 0, 0, 0], [0] * 7], np.int32)
SEGMENTS = {"q_segment_ids": Q_SEGMENTS, "kv_segment_ids": KV_SEGMENTS}
NAMES = ("dropout_rate", "site", "impl")
attend = jax.jit(attention, static_argnames=NAMES)
keep_mask = jax.jit(dropout_mask, static_argnums=(0, 1, 3))


def reference(q, k, v, keep=1.0):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("blhk,bshk->bhls", q, k) / np.sqrt(K)
    visible = Q_SEGMENTS[:, None, :, None] == KV_SEGMENTS[:, None, None, :]
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * visible
    weights = weights / weights.sum(-1, keepdims=True)
    return np.einsum("bhls,bshk->blhk", weights * keep, v)


def test_values_against_float64(qkv):
    np.testing.assert_allclose(attend(*qkv, **SEGMENTS), reference(*qkv), atol=1e-6)


def test_softmax_is_float32_in_bfloat16(qkv):
    # Scores of about 20: rounded to bfloat16 they would be off by 0.06, the weights by 6%.
    q, k, v = (x.astype(jnp.bfloat16) for x in (8 * qkv[0], *qkv[1:]))
    out = attend(q, k, v, **SEGMENTS)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), reference(q, k, v), atol=1.5e-2)


def test_dropout_zeroes_probabilities_and_rescales(qkv):
    rows = np.arange(B, dtype=np.uint32)
    seed = np.uint32(4)
    out = attend(*qkv, **SEGMENTS, dropout_rate=0.25, stream=DropoutStream(seed, rows), site=2)
    keep = np.asarray(keep_mask((B, H, L, S), 0.25, seed, 2, rows)) / 0.75
    np.testing.assert_allclose(out, reference(*qkv, keep=keep), atol=1e-6)


def test_queries_without_keys_and_padding_are_finite(qkv):
    lonely = {**SEGMENTS, "q_segment_ids": np.full((B, L), 9)}
    for segments in (SEGMENTS, lonely):

        def total(qkv, segments=segments):
            return attend(*qkv, **segments).sum()

        value, gradients = jax.jit(jax.value_and_grad(total))(qkv)
        assert np.isfinite(value)
        assert all(np.isfinite(np.asarray(g)).all() for g in gradients)


def test_unseen_keys_change_no_bit(qkv):
    q, k, v = qkv
    hidden = (KV_SEGMENTS != 1)[..., None, None]
    k_other = np.where(hidden, np.float32(50), k)
    v_other = np.where(hidden, np.float32(-50), v)
    other = np.asarray(attend(q, k_other, v_other, **SEGMENTS))
    out = np.asarray(attend(*qkv, **SEGMENTS))
    seen = Q_SEGMENTS == 1
    np.testing.assert_array_equal(other[seen], out[seen])
    assert not np.array_equal(other[~seen], out[~seen])


def test_unknown_implementation_is_refused(qkv):
    with pytest.raises(Exception, match=r"flash|impl"):
        attend(*qkv, **SEGMENTS, impl="flash")


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_gradients_are_those_of_the_plain_formula(qkv, rate):
    rows, seed = np.arange(B, dtype=np.uint32), np.uint32(4)
    drop = {"dropout_rate": rate, "stream": DropoutStream(seed, rows), "site": 2}
    keep = np.asarray(keep_mask((B, H, L, S), rate, seed, 2, rows)) / np.float32(1 - rate)
    # Row 0 only has queries that see a key; elsewhere the two may differ.
    visible = Q_SEGMENTS[:, None, :, None] == KV_SEGMENTS[:, None, None, :]
    cotangent = np.float32(np.random.default_rng(1).normal(size=(B, L, H, K)))

    def plain(q, k, v):
        scores = jnp.where(visible, jnp.einsum("blhk,bshk->bhls", q, k) / np.sqrt(K), -jnp.inf)
        return jnp.einsum("bhls,bshk->blhk", jax.nn.softmax(scores) * keep, v)

    def ours(q, k, v):
        return attend(q, k, v, **SEGMENTS, **drop, impl="xla")

    wanted, got = (
        jax.device_get(jax.jit(lambda g, *qkv, f=f: jax.vjp(f, *qkv)[1](g))(cotangent, *qkv))
        for f in (plain, ours)
    )
    for name, a, b in zip("qkv", wanted, got, strict=True):
        np.testing.assert_allclose(b, a, atol=2e-6, err_msg=name)


def test_a_query_without_keys_gives_no_gradient_to_queries_and_keys(qkv):
    def total(q, k, v):
        return attend(q, k, v, **{**SEGMENTS, "q_segment_ids": np.full((B, L), 9)}).sum()

    dq, dk, dv = jax.device_get(jax.jit(jax.grad(total, (0, 1, 2)))(*qkv))
    assert not dq.any()
    assert not dk.any()
    assert dv.any()

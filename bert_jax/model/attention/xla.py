"""Attention in plain XLA operations: the reference, and the fastest for short rows on a TPU.

The derivative is written out, so that a TPU runs the backward pass in five fusions around the five
matrix products. Left to JAX, the gradient of the softmax is a pass of its own over (B, H, L, S):
150 thousand cycles of a v5e for 32 rows of BERT-base at L=128, out of 1.0 million that all matrix
products of the layer's attention take.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from bert_jax.model.dropout import DropoutStream, dropout
from bert_jax.model.layers import einsum_float32

MASKED_SCORE = -1e30
"""Score of a key that a query must not see: finite, so that no row is ever 0/0, and far enough
below any real score that its probability is exactly 0 in float32."""


def visible_keys(
    q_segment_ids: Integer[Array, "B L"], kv_segment_ids: Integer[Array, "B S"]
) -> Bool[Array, "B 1 L S"]:
    """Say which keys each query sees: those of its own segment; the same for all heads."""
    return q_segment_ids[:, None, :, None] == kv_segment_ids[:, None, None, :]


def xla_attention(
    q: Float[Array, "B L H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    q_segment_ids: Integer[Array, "B L"],
    kv_segment_ids: Integer[Array, "B S"],
    *,
    dropout_rate: float,
    stream: DropoutStream | None,
    site: int | Integer[Array, ""],
    when_kept: Callable[[], None] | None = None,
) -> Float[Array, "B L H K"]:
    """Attend as `attention.attend` does, keeping float32 scores for the backward pass.

    `when_kept` is called where a trace is differentiated, and therefore keeps them.
    """
    # Heads in front of positions by hand: left to the einsums, XLA on CPU chooses transposed
    # operands (forward 7.5 against 5.1 ms at B=16, L=128, H=4, K=64); on TPU it is free.
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    visible = visible_keys(q_segment_ids, kv_segment_ids)
    drop = (stream, jnp.asarray(site, jnp.uint32))
    return _attention(q, k, v, visible, drop, dropout_rate, when_kept).swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(q, k, v, visible, drop, rate, when_kept):
    """Attend with heads in front: q (B, H, L, K), k and v (B, H, S, K), visible (B, 1, L, S).

    `drop` names the masks of the dropout: stream and site.
    """
    return _forward(q, k, v, visible, drop, rate)[0]


def _forward(q, k, v, visible, drop, rate, when_kept=None):
    if when_kept is not None:
        when_kept()
    # Scores, their scale, softmax and its sums in float32 whatever the compute type.
    scores = einsum_float32("BHLK,BHSK->BHLS", q, k) * _scale(q)
    scores = jnp.where(visible, scores, MASKED_SCORE)
    # The difference is kept, not the scores: a TPU writes it where it adds the powers up, which
    # takes a quarter of the cycles that adding them up alone would.
    scores = scores - scores.max(-1, keepdims=True)
    inverse = 1 / jnp.exp(scores).sum(-1, keepdims=True)
    weights = dropout((jnp.exp(scores) * inverse).astype(v.dtype), rate, *drop)
    out = jnp.einsum("BHLS,BHSK->BHLK", weights, v)
    # A query that sees no key has a mean of values that depends on no score.
    slope = jnp.where(visible.any(-1, keepdims=True), _scale(q), 0.0)
    return out, (q, k, v, slope, drop, scores, inverse, out)


def _backward(rate, when_kept, residuals, gradient):
    q, k, v, slope, drop, scores, inverse, out = residuals
    # The barrier keeps XLA from recognising the forward mask here and storing it in between.
    drop = jax.lax.optimization_barrier(drop)
    weights = jnp.exp(scores) * inverse
    dv = jnp.einsum("BHLS,BHLK->BHSK", dropout(weights.astype(v.dtype), rate, *drop), gradient)
    dweights = dropout(einsum_float32("BHLK,BHSK->BHLS", gradient, v), rate, *drop)
    # The sum over keys of weight times its gradient, from the output (Dao et al. 2022, appendix
    # B.2): a pass over (L, K) in place of one over (L, S).
    mean = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)
    dscores = (weights * (dweights - mean) * slope).astype(q.dtype)
    dq = jnp.einsum("BHLS,BHSK->BHLK", dscores, k)
    dk = jnp.einsum("BHLS,BHLK->BHSK", dscores, q)
    return dq, dk, dv, None, None


_attention.defvjp(_forward, _backward)


def _scale(q: Float[Array, "B H L K"]) -> float:
    return 1 / math.sqrt(q.shape[-1])

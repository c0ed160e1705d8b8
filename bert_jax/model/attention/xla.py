"""Attention in plain XLA operations: the reference, and the fastest for short rows on a TPU.

The backward pass is written by hand. With JAX's automatic derivative, a TPU would compute the
softmax's gradient in a separate pass over (B, H, L, S). For 32 rows of BERT-base at L=128 on a v5e,
this pass takes 150 thousand cycles per layer; all matrix products of attention take 1.0 million.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from bert_jax.model.attention.relative import Relative, relative_scores, scale_of
from bert_jax.model.dropout import Number, Stream, dropout
from bert_jax.model.layers import einsum_float32
from bert_jax.model.rotation import Rotation

MASKED_SCORE = -1e30
"""Score of a key that a query must not see. The score is finite because a row of -inf would make
the softmax 0/0. It is low enough that the key's probability is exactly 0 in float32."""
_SMALLEST_BLOCK = 16
"""Smallest number of queries in a block of `banded_attention`; smaller blocks would be slower."""


class Asked(NamedTuple):
    """Arguments of one call of scaled dot-product attention with L queries and S keys.

    A query that sees no key gets a finite, meaningless output: a mean of values (not in `cudnn`).
    """

    q: Float[Array, "B L H K"]
    k: Float[Array, "B S G K"]
    """Keys of G heads; H / G query heads share each key head."""
    v: Float[Array, "B S G K"]
    q_segment_ids: Integer[Array, "B L"]
    """Segment of each query. Padding has segment 0, so a padding query sees only padding."""
    kv_segment_ids: Integer[Array, "B S"]
    dropout_rate: float = 0.0
    """Dropout rate of the attention probabilities."""
    stream: Stream = None
    site: Number = 0
    """Dropout site: an integer that identifies this dropout operation in the model."""
    window: int | None = None
    """Largest distance at which a query sees a key; None means no limit."""
    causal: bool = False
    """Whether a query sees only its own position and earlier positions."""
    q_places: Integer[Array, "B L"] | None = None
    """Position of each query in its row, which only `xla` supports; None means 0, 1, 2, ..."""
    angles: Rotation | None = None
    """Rotation to apply to queries and keys before the product; None means no rotation."""
    relative: Relative | None = None
    """Keys and queries of relative positions, which only `xla` supports."""


def visible_keys(
    q_segment_ids: Integer[Array, "B L"],
    kv_segment_ids: Integer[Array, "B S"],
    window: int | None = None,
    q_places: Integer[Array, "B L"] | None = None,
    causal: bool = False,
) -> Bool[Array, "B 1 L S"]:
    """Return the mask of keys that each query sees: keys of its segment, at most `window` away.

    The arguments are as in `Asked`. Segments must be contiguous, or distances would be wrong.
    """
    visible = q_segment_ids[:, None, :, None] == kv_segment_ids[:, None, None, :]
    if window is None and not causal:
        return visible
    places = jnp.arange(q_segment_ids.shape[1])[None] if q_places is None else q_places
    distance = places[:, :, None] - jnp.arange(kv_segment_ids.shape[1])
    if window is not None:
        visible = visible & (jnp.abs(distance) <= window)[:, None]
    return visible & (distance >= 0)[:, None] if causal else visible


def xla_attention(
    asked: Asked, when_kept: Callable[[], None] | None = None, keeps_half: bool = False
) -> Float[Array, "B L H K"]:
    """Compute attention; the keys must have as many heads as the queries.

    For the backward pass, the forward pass stores scores in float32 or, with `keeps_half`,
    probabilities in the type of `v`. `when_kept` is called when JAX traces such a forward pass.
    """
    # Moving heads before positions here keeps XLA on CPU from transposing the einsums' operands (a
    # forward pass of 5.1 instead of 7.5 ms at B=16, L=128, H=4, K=64); on TPU it costs nothing.
    q, k, v = (x.swapaxes(1, 2) for x in asked[:3])
    segments = asked.q_segment_ids, asked.kv_segment_ids
    visible = visible_keys(*segments, asked.window, asked.q_places, asked.causal)
    drop = (asked.stream, jnp.asarray(asked.site, jnp.uint32))
    relative, scale = asked.relative, scale_of(q.shape[-1], asked.relative)
    bias = None if relative is None else relative_scores(q, k, relative, asked.q_places)
    how = asked.dropout_rate, scale, when_kept, keeps_half
    return _attention(q, k, v, bias, visible, drop, *how).swapaxes(1, 2)


def attention_weights(
    query: Float[Array, "B L H K"], key: Float[Array, "B S G K"], visible: Bool[Array, "B 1 L S"],
    relative: Relative | None = None,
) -> Float[Array, "B H L S"]:  # fmt: skip
    """Compute attention probabilities in float32: how much each query attends to each key."""
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    query, key = query.swapaxes(1, 2), key.swapaxes(1, 2)
    scores = einsum_float32("BHLK,BHSK->BHLS", query, key)
    scores = scores if relative is None else scores + relative_scores(query, key, relative)
    scores = scores * scale_of(query.shape[-1], relative)
    return jax.nn.softmax(jnp.where(visible, scores, MASKED_SCORE), axis=-1)


def is_banded(asked: Asked) -> bool:
    """Return true if `banded_attention` applies and saves work; false if L or S is symbolic."""
    queries, keys, window = asked.q.shape[1], asked.k.shape[1], asked.window
    if window is None or asked.dropout_rate or asked.q_places is not None:
        return False
    if asked.relative is not None:
        return False
    is_known = isinstance(queries, int) and isinstance(keys, int)
    return is_known and queries == keys and 3 * max(window, _SMALLEST_BLOCK) < keys


def banded_attention(asked: Asked, keeps_half: bool = False) -> Float[Array, "B L H K"]:
    """Attend within a window, block by block, without dropout; q, k and v have the same shape.

    A block has `window` positions, at least 16. Its queries attend to the keys of the same block
    and both neighbours. From window 16 on, this takes 3 * L * window scores instead of L * L.
    """
    assert asked.window is not None
    rows, length = asked.q.shape[:2]
    block = max(asked.window, _SMALLEST_BLOCK)
    count = -(-length // block)

    def blocks(x: Array, fill: int = 0) -> Array:
        pads = ((0, 0), (0, count * block - length)) + ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, pads, constant_values=fill).reshape(rows, count, block, *x.shape[2:])

    def own(x: Array, fill: int = 0) -> Array:
        return blocks(x, fill).reshape(-1, block, *x.shape[2:])

    def neighbours(x: Array, fill: int = 0) -> Array:
        middle = blocks(x, fill)
        edge = jnp.full_like(middle[:, :1], fill)
        before = jnp.concatenate((edge, middle[:, :-1]), 1)
        after = jnp.concatenate((middle[:, 1:], edge), 1)
        return jnp.concatenate((before, middle, after), 2).reshape(-1, 3 * block, *x.shape[2:])

    # Padding forms separate segments: -1 for queries, -2 for keys.
    places = jnp.broadcast_to(jnp.arange(block, 2 * block), (rows * count, block))
    segments = own(asked.q_segment_ids, -1), neighbours(asked.kv_segment_ids, -2)
    visible = visible_keys(*segments, asked.window, places, asked.causal)
    arrays = own(asked.q), neighbours(asked.k), neighbours(asked.v)
    q, k, v = (x.swapaxes(1, 2) for x in arrays)
    how = 0.0, scale_of(q.shape[-1], None), None, keeps_half
    out = _attention(q, k, v, None, visible, (None, jnp.uint32(0)), *how).swapaxes(1, 2)
    return out.reshape(rows, count * block, *out.shape[2:])[:, :length]


def _over_queries(
    weights: Float[Array, "B H L S"], x: Float[Array, "B H L K"]
) -> Float[Array, "B H S K"]:
    """Sum weight times `x` over the queries. On a CPU, the smaller operand is transposed first."""

    def on_cpu(weights: Array, x: Array) -> Array:
        turned = jax.lax.optimization_barrier(x.swapaxes(2, 3))
        return jax.lax.optimization_barrier(turned @ weights).swapaxes(2, 3)

    sums = partial(jnp.einsum, "BHLS,BHLK->BHSK")
    return jax.lax.platform_dependent(weights, x, cpu=on_cpu, default=sums)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def _attention(q, k, v, bias, visible, drop, rate, scale, when_kept, keeps_half):
    """Compute attention for q (B, H, L, K), k and v (B, H, S, K) and visible (B, 1, L, S).

    `bias` (B, H, L, S), float32 or None, is added to the products before they are scaled.
    """
    return _forward(q, k, v, bias, visible, drop, rate, scale)[0]


def _forward(q, k, v, bias, visible, drop, rate, scale, when_kept=None, keeps_half=False):
    if when_kept is not None:
        when_kept()
    # Scores, their scaling, the softmax and its sums are float32 whatever the compute type.
    scores = einsum_float32("BHLK,BHSK->BHLS", q, k)
    scores = (scores if bias is None else scores + bias) * scale
    scores = jnp.where(visible, scores, MASKED_SCORE)
    # Keep the scores minus their maximum: a TPU writes these differences in the pass that sums the
    # exponentials, and that pass takes a quarter of the cycles of a pass that only sums.
    scores = scores - scores.max(-1, keepdims=True)
    inverse = 1 / jnp.exp(scores).sum(-1, keepdims=True)
    weights = (jnp.exp(scores) * inverse).astype(v.dtype)
    out = jnp.einsum("BHLS,BHSK->BHLK", dropout(weights, rate, *drop), v)
    # A query that sees no key outputs a mean of values, which depends on no score.
    slope = jnp.where(visible.any(-1, keepdims=True), scale, 0.0)
    kept = (weights, None) if keeps_half else (scores, inverse)
    return out, (q, k, v, slope, drop, kept, out, None if bias is None else ())


def _backward(rate, scale, when_kept, keeps_half, residuals, gradient):
    q, k, v, slope, drop, (kept, inverse), out, biased = residuals
    # The barrier keeps XLA from recognising the forward mask and storing it until this pass.
    drop = jax.lax.optimization_barrier(drop)
    weights = kept.astype(jnp.float32) if keeps_half else jnp.exp(kept) * inverse
    dv = _over_queries(dropout(weights.astype(v.dtype), rate, *drop), gradient)
    dweights = dropout(einsum_float32("BHLK,BHSK->BHLS", gradient, v), rate, *drop)
    # The sum over keys of weight times gradient follows from the output, in a pass over (L, K)
    # instead of (L, S) (Dao et al. 2022, appendix B.2).
    mean = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)
    dbias = weights * (dweights - mean) * slope
    dscores = dbias.astype(q.dtype)
    dq = jnp.einsum("BHLS,BHSK->BHLK", dscores, k)
    dk = _over_queries(dscores, q)
    return dq, dk, dv, None if biased is None else dbias, None, None


_attention.defvjp(_forward, _backward)

"""Attention with dropout as two TPU kernels, one for the forward and one for the backward pass.

BERT applies dropout to attention probabilities. No library kernel supports this, and plain XLA
writes several (B, H, L, S) arrays to memory. Here each kernel program holds the keys and values of
one row for a group of heads, and nothing of size L x S leaves the chip's VMEM. The backward pass
recomputes the probabilities from the log of the softmax's denominator, and hashes the mask again.

Two decisions shape the code:

- Positions lie along the lanes: the arrays are (B, H*K, L). If heads are narrower than 128 lanes,
  XLA's projections produce queries, keys and values in this layout, so that no array is transposed
  before or after the kernel. A head is a range of sublanes, which costs nothing to select.
- Scores are computed transposed: (S, L). The softmax then reduces over sublanes, which is plain
  vector arithmetic, and the statistics of queries lie along the lanes. Four of the five products of
  the backward pass then have only K rows.

Source: Dao et al. 2022 (FlashAttention), whose loop over keys only `fused_long` (L > 512) needs.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, UInt32

from bert_jax.model.attention import fused_long
from bert_jax.model.attention.fused_plan import (
    LANES,
    LOG2_E,
    MAX_LENGTH,
    NN,
    NT,
    Plan,
    kept,
    product,
    visible_keys,
)
from bert_jax.model.attention.xla import MASKED_SCORE, Asked
from bert_jax.model.layers import differentiable
from bert_jax.model.rotation import rotate

MAX_HEAD_DIM = 256
_LONG_VMEM = 64 * 2**20
"""VMEM limit in bytes for a head of a long row: 8 double-buffered arrays, scores, `Plan.frame`."""


def unsupported(queries: int, keys: int, head_dim: int) -> str | None:
    """Name the requirement that these sizes do not meet; None if all are met."""
    if queries % LANES or keys % LANES:
        return f"lengths that are multiples of {LANES}, not {queries} and {keys}"
    if max(queries, keys) > MAX_LENGTH:
        return f"at most {MAX_LENGTH} positions, not {max(queries, keys)}"
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        return f"a head_dim that is a multiple of 16 up to {MAX_HEAD_DIM}, not {head_dim}"
    return None


def fused_attention(asked: Asked, head_index: UInt32[Array, " H"]) -> Float[Array, "B L H K"]:
    """Attend on one device; `unsupported` must return None, and keys and values must have H heads.

    `head_index` has each head's index in the model, because a device of a mesh has only some heads.
    """
    q, k, v, q_segment_ids, kv_segment_ids, dropout_rate, stream, site, window, *_ = asked
    assert stream is not None
    angles = asked.angles or ()
    rows, queries, num_heads, head_dim = q.shape
    plan = Plan(rows, queries, k.shape[1], num_heads, head_dim, dropout_rate, window)
    if angles and plan.is_long:
        plan = plan._replace(rotates=True)
    elif angles:
        q, k = rotate(q, *angles), rotate(k, *angles)
    q_ids, kv_ids = (x.astype(jnp.int32)[:, None, :] for x in (q_segment_ids, kv_segment_ids))
    # One vector of words for the scalar memory: [seed, site, heads..., rows...].
    words = [stream.seed[None], jnp.asarray(site)[None], head_index, stream.row_index]
    packed = jnp.concatenate(words).astype(jnp.uint32)
    kv_ids = fused_long.framed_ids(plan, kv_ids) if plan.is_long else kv_ids
    arrays = (jnp.moveaxis(x, 1, 3).reshape(plan.rows, -1, x.shape[1]) for x in (q, k, v))
    turns = (x.swapaxes(1, 2) for x in angles if plan.rotates)
    out = _attention(plan, *arrays, q_ids, kv_ids, packed, *turns)
    return jnp.moveaxis(out.reshape(plan.rows, plan.num_heads, plan.head_dim, -1), 3, 1)


def _forward(plan: Plan, q, k, v, q_ids, kv_ids, words, *angles):
    """Return the attended values (B, H*K, L) and the residuals; `angles` are cos, sin (B, J, L)."""
    shapes = [
        jax.ShapeDtypeStruct(q.shape, v.dtype),
        jax.ShapeDtypeStruct((plan.rows, plan.num_heads, 1, plan.queries), jnp.float32),
    ]
    operands = [q, k, v, q_ids, kv_ids, *angles]
    call = partial(_call, plan, name="attention_forward", num_products=2, out_shapes=shapes)
    # The second output is log2 of each query's sum of exponentials.
    if plan.is_long:
        scratch = fused_long.frame(plan, k.dtype)
        out, log_sum = call(fused_long.forward_kernel, operands, words, scratch)
        return out, (operands, words, log_sum, out)
    out, log_sum = call(_forward_kernel, operands, words)
    return out, (operands, words, log_sum, None)


def _backward(plan: Plan, residuals, gradient):
    operands, words, log_sum, out = residuals
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:3]]
    not_learned = (None,) * (len(operands) - 2)  # ids, words and angles
    operands = [*operands, log_sum, gradient]
    call = partial(_call, plan, name="attention_backward", num_products=5, out_shapes=shapes)
    if plan.is_long:
        sums = pltpu.VMEM((plan.head_dim, plan.frame), jnp.float32)  # gradients over chunks
        scratch = [*fused_long.frame(plan, shapes[1].dtype), sums, sums]
        grads = call(fused_long.backward_kernel, [*operands, out], words, scratch)
    else:
        grads = call(_backward_kernel, operands, words)
    return *grads, *not_learned


_attention = differentiable(_forward, _backward, static=(0,))


def _call(
    plan: Plan, kernel, operands, words, scratch=(), *, name: str, num_products: int, out_shapes
):
    """Run a kernel on a grid of (rows, groups of heads); without a TPU, Pallas interprets it."""

    def spec(shape: tuple[int, ...]) -> pl.BlockSpec:
        if len(shape) == 4:  # (B, H, 1, L)
            return pl.BlockSpec((1, plan.heads, 1, shape[3]), lambda b, g, _: (b, g, 0, 0))
        if shape[1] != plan.num_heads * plan.head_dim:  # segment ids and angles, for all heads
            return pl.BlockSpec((1, *shape[1:]), lambda b, g, _: (b, 0, 0))
        return pl.BlockSpec((1, plan.heads * plan.head_dim, shape[2]), lambda b, g, _: (b, g, 0))

    scores = plan.rows * plan.num_heads * plan.scores
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(plan.rows, plan.num_heads // plan.heads),
        in_specs=[spec(x.shape) for x in operands],
        out_specs=[spec(x.shape) for x in out_shapes],
        scratch_shapes=scratch,
    )
    cost = pl.CostEstimate(
        flops=2 * num_products * scores * plan.head_dim,
        transcendentals=scores,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *out_shapes, words)),
    )
    about = {"grid_spec": grid, "out_shape": out_shapes, "name": name, "cost_estimate": cost}
    call = partial(pl.pallas_call, partial(kernel, plan), **about)
    # Choose at lowering, because a step compiled ahead of time for a TPU is traced elsewhere.
    limit = _LONG_VMEM if plan.is_long else None
    params = pltpu.CompilerParams(dimension_semantics=("parallel",) * 2, vmem_limit_bytes=limit)
    on_tpu, elsewhere = call(compiler_params=params), call(interpret=True)
    return jax.lax.platform_dependent(words, *operands, tpu=on_tpu, default=elsewhere)


def _visible(plan: Plan, start: int, q_ids_ref, kv_ids_ref):
    """Return the mask (reach, chunk) of the keys that a chunk of queries sees in every head."""
    first, end = plan.reach(start)
    q_ids = q_ids_ref[0, :, start : start + plan.chunk]
    return visible_keys(plan, q_ids, kv_ids_ref[0, :, first:end], start, first)


def _kept(plan: Plan, words_ref, head: int, start: int):
    """Return the dropout mask (reach, chunk) of head `head` of this program; true means kept."""
    first, end = plan.reach(start)
    row, first_head = pl.program_id(0), pl.program_id(1) * plan.heads
    return kept(plan, words_ref, row, first_head + head, start, first, (end - first, plan.chunk))


def _forward_kernel(
    plan: Plan, words_ref, q_ref, k_ref, v_ref, q_ids_ref, kv_ids_ref, out_ref, log_sum_ref
):
    factor = LOG2_E / math.sqrt(plan.head_dim)  # scores are base-2 logarithms, for exp2
    for start in range(0, plan.queries, plan.chunk):
        visible = _visible(plan, start, q_ids_ref, kv_ids_ref)
        chunk = slice(start, start + plan.chunk)
        first, end = plan.reach(start)
        for head in range(plan.heads):
            q = plan.head(q_ref, head, start, plan.chunk)
            k = plan.head(k_ref, head, first, end - first)
            v = plan.head(v_ref, head, first, end - first)
            scores = jnp.where(visible, product(k.T, q, NN) * factor, MASKED_SCORE)
            largest = scores.max(0, keepdims=True)
            weights = jnp.exp2(scores - largest)
            total = weights.sum(0, keepdims=True)
            log_sum_ref[0, head, :, chunk] = largest + jnp.log2(total)
            if plan.dropout_rate:
                weights = jnp.where(_kept(plan, words_ref, head, start), weights, 0.0)
            out = product(v, weights.astype(v.dtype), NN)
            out = out * (1 / (total * (1 - plan.dropout_rate)))
            rows = slice(head * plan.head_dim, (head + 1) * plan.head_dim)
            out_ref[0, rows, chunk] = out.astype(out_ref.dtype)


def _backward_kernel(
    plan: Plan, words_ref, q_ref, k_ref, v_ref, q_ids_ref, kv_ids_ref, log_sum_ref, gradient_ref,
    dq_ref, dk_ref, dv_ref,
):  # fmt: skip
    scale = 1 / math.sqrt(plan.head_dim)
    kept_share = 1 - plan.dropout_rate
    for head in range(plan.heads):
        rows = slice(head * plan.head_dim, (head + 1) * plan.head_dim)
        sums = _Sums(plan)
        for start in range(0, plan.queries, plan.chunk):
            chunk = slice(start, start + plan.chunk)
            first, end = plan.reach(start)
            k = plan.head(k_ref, head, first, end - first)
            v = plan.head(v_ref, head, first, end - first)
            visible = _visible(plan, start, q_ids_ref, kv_ids_ref)
            q = plan.head(q_ref, head, start, plan.chunk)
            gradient = plan.head(gradient_ref, head, start, plan.chunk)
            log_sum = log_sum_ref[0, head, :, chunk]
            # A query that sees no key has equal weights, as in the forward pass. Its scores are set
            # to 0 instead of -1e30, because -1e30 + log2 S would round to -1e30 in float32.
            alone = log_sum < MASKED_SCORE / 2
            masked = jnp.where(alone, 0.0, MASKED_SCORE)
            log_sum = jnp.where(alone, math.log2(end - first), log_sum)
            scores = product(k.T, q, NN) * (scale * LOG2_E)
            # Divide the probabilities by 1 - rate in the exponent, where this costs nothing.
            weights = jnp.exp2(
                jnp.where(visible, scores, masked) - (log_sum + math.log2(kept_share))
            )
            dweights = product(v.T, gradient, NN)
            dropped = weights
            if plan.dropout_rate:
                survives = _kept(plan, words_ref, head, start)
                dropped = jnp.where(survives, weights, 0.0)
                dweights = jnp.where(survives, dweights, 0.0)
            mean = (weights * dweights).sum(0, keepdims=True) * kept_share
            dscores = (weights * (dweights - mean)).astype(q.dtype)
            # The scores of a query that sees no key are constants, so they have no gradient.
            q = jnp.where(alone, 0.0, q.astype(jnp.float32)).astype(q.dtype)
            dq = jnp.where(alone, 0.0, product(k, dscores, NN) * scale)
            dq_ref[0, rows, chunk] = dq.astype(dq_ref.dtype)
            dk = product(q, dscores, NT)
            dv = product(gradient, dropped.astype(q.dtype), NT)
            sums.add(first, dk, dv)
        dk, dv = sums.total()
        dk_ref[0, rows] = (dk * scale).astype(dk_ref.dtype)
        dv_ref[0, rows] = dv.astype(dv_ref.dtype)


class _Sums:
    """Gradients of keys and values, added up over the chunks of queries that see them."""

    def __init__(self, plan: Plan):
        """Start with a zero sum per block of keys; a chunk sees a block in full or not at all."""
        self.width = plan.keys if plan.window is None else LANES
        zeros = jnp.zeros((plan.head_dim, self.width), jnp.float32)
        self.blocks: list[tuple[Array, ...]] = [(zeros, zeros)] * (plan.keys // self.width)

    def add(self, first: int, *grads: Float[Array, "K S"]) -> None:
        """Add gradients of keys and of values, for the keys from index `first` on."""
        for start in range(0, grads[0].shape[1], self.width):
            here, part = (first + start) // self.width, slice(start, start + self.width)
            both = zip(self.blocks[here], grads, strict=True)
            self.blocks[here] = tuple(old + new[:, part] for old, new in both)

    def total(self) -> list[Array]:
        """Return the summed gradients (K, S) of keys and of values."""
        return [jnp.concatenate(blocks, axis=1) for blocks in zip(*self.blocks, strict=True)]

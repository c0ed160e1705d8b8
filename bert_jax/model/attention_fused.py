"""Attention for short rows as one TPU kernel: scores, softmax, dropout and values in VMEM.

With dropout on the attention probabilities, which BERT has, no library kernel applies, and plain
XLA writes several (B, H, L, S) arrays to memory. Here a program holds the keys and values of one
row for a group of heads; nothing of size L x S leaves the chip's VMEM, and the backward pass
recomputes the probabilities and the dropout mask from the log of the softmax's denominator.

Two decisions shape the code:

- Scores are computed transposed, (S, L): the softmax then reduces over sublanes, which is plain
  vector arithmetic, the statistics of a query are a row along the lanes, and in the backward pass
  all but one of the five products read their large operand as it lies.
- Heads stay side by side on the lanes, (B, L, H*K), as the projections produce them. A tile of 128
  lanes holds 128 / K heads. A head is picked by zeroing the other heads' lanes of one operand; the
  matrix unit would pad a depth of 64 to 128 anyway, so this costs no extra pass over it.

Source of the method: Dao et al. 2022 (FlashAttention), without its loop over keys.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Integer, UInt32

from bert_jax.model.dropout import keep_at

LANES = 128
MAX_LENGTH = 1024
"""Longest row whose scores against all its keys fit VMEM in chunks of 128 queries."""
MASKED_SCORE = -1e30
_SCORES_PER_CHUNK = 512 * 512
"""Scores held at a time (1 MiB in float32; the backward pass holds about four such arrays)."""
_NT = (((1,), (1,)), ((), ()))
_NN = (((1,), (0,)), ((), ()))


class _Plan(NamedTuple):
    """Static shape of the work of one kernel call."""

    rows: int  # B
    queries: int  # L
    keys: int  # S
    num_heads: int  # H
    head_dim: int  # K
    dropout_rate: float

    @property
    def heads_per_tile(self) -> int:
        return max(1, LANES // self.head_dim)

    @property
    def tile(self) -> int:
        """Lanes that are worked on together."""
        return self.heads_per_tile * self.head_dim

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def chunk(self) -> int:
        """Queries worked on together."""
        limit = max(LANES, _SCORES_PER_CHUNK // self.keys)
        return max(
            c for c in range(LANES, self.queries + 1, LANES) if self.queries % c == 0 and c <= limit
        )

    @property
    def block(self) -> int:
        """Lanes of one program: as many tiles as make about one full chunk of scores."""
        if self.width % LANES:
            return self.width
        tiles = self.width // self.tile
        limit = max(1, _SCORES_PER_CHUNK // (self.queries * self.keys))
        return self.tile * max(n for n in range(1, tiles + 1) if tiles % n == 0 and n <= limit)


def unsupported(queries: int, keys: int, head_dim: int) -> str | None:
    """Why these sizes cannot be run, in words; None if they can."""
    if queries % LANES or keys % LANES:
        return f"lengths that are multiples of {LANES}, not {queries} and {keys}"
    if max(queries, keys) > MAX_LENGTH:
        return f"at most {MAX_LENGTH} positions, not {max(queries, keys)}"
    if (LANES % head_dim if head_dim < LANES else head_dim % LANES) or head_dim < 16:
        return f"a head_dim of 16, 32, 64 or a multiple of {LANES}, not {head_dim}"
    return None


def fused_attention(
    q: Float[Array, "B L H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    q_segment_ids: Integer[Array, "B L"],
    kv_segment_ids: Integer[Array, "B S"],
    head_index: UInt32[Array, " H"],
    dropout_seed: UInt32[Array, ""],
    dropout_site: UInt32[Array, ""],
    row_index: UInt32[Array, " B"],
    *,
    dropout_rate: float,
) -> Float[Array, "B L H K"]:
    """`attention.attend` on one device, for sizes of which `unsupported` says None.

    Args:
      q: queries.
      k: keys.
      v: values.
      q_segment_ids: as in `attend`.
      kv_segment_ids: as in `attend`.
      head_index: number of each head in the model: under a mesh a device has some of them only.
      dropout_seed: as in `attend`; unused at rate 0.
      dropout_site: likewise.
      row_index: likewise.
      dropout_rate: 0 for none.
    """
    plan = _Plan(*q.shape[:2], k.shape[1], *q.shape[2:], dropout_rate)
    flat = (x.reshape(*x.shape[:2], plan.width) for x in (q, k, v))
    # One vector of words for the scalar memory: [seed, site, heads..., rows...].
    words = jnp.concatenate(
        [dropout_seed[None], dropout_site[None], head_index, row_index]
    ).astype(jnp.uint32)
    ids = (x.astype(jnp.int32)[:, None, :] for x in (q_segment_ids, kv_segment_ids))
    return _attention(plan, *flat, *ids, words).reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan, q, k, v, q_ids, kv_ids, words):
    return _forward(plan, q, k, v, q_ids, kv_ids, words)[0]


def _attention_forward(plan, q, k, v, q_ids, kv_ids, words):
    out, log_sum = _forward(plan, q, k, v, q_ids, kv_ids, words)
    return out, (q, k, v, q_ids, kv_ids, words, log_sum)


def _attention_backward(plan, residuals, gradient):
    return *_backward(plan, *residuals, gradient), None, None, None


_attention.defvjp(_attention_forward, _attention_backward)


def _forward(plan: _Plan, q, k, v, q_ids, kv_ids, words):
    """(out (B, L, HK), log of each query's sum of exponentials (B, H, L) float32)."""
    shapes = [
        jax.ShapeDtypeStruct(q.shape, v.dtype),
        jax.ShapeDtypeStruct((plan.rows, plan.num_heads, 1, plan.queries), jnp.float32),
    ]
    return _call(plan, _forward_kernel, "attention_forward", 2, 1, shapes, [q, k, v, q_ids, kv_ids], words)


def _backward(plan: _Plan, q, k, v, q_ids, kv_ids, words, log_sum, gradient):
    """(dq, dk, dv), each in its operand's shape and type."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    operands = [q, k, v, q_ids, kv_ids, log_sum, gradient]
    return _call(plan, _backward_kernel, "attention_backward", 5, 1, shapes, operands, words)


def _call(plan: _Plan, kernel, name: str, products: int, exps: int, out_shapes, operands, words):
    """The kernel over a grid of (rows, groups of heads), interpreted where there is no TPU."""
    heads = plan.block // plan.head_dim

    def spec(shape: tuple[int, ...]) -> pl.BlockSpec:
        if len(shape) == 4:  # (B, H, 1, L)
            return pl.BlockSpec((1, heads, 1, plan.queries), lambda b, g, *_: (b, g, 0, 0))
        if shape[1] == 1:  # segment ids
            return pl.BlockSpec((1, 1, shape[2]), lambda b, g, *_: (b, 0, 0))
        return pl.BlockSpec((1, shape[1], plan.block), lambda b, g, *_: (b, 0, g))

    scores = plan.rows * plan.num_heads * plan.queries * plan.keys
    call = partial(
        pl.pallas_call,
        partial(kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.rows, plan.width // plan.block),
            in_specs=[spec(x.shape) for x in operands],
            out_specs=[spec(x.shape) for x in out_shapes],
        ),
        out_shape=out_shapes,
        name=name,
        cost_estimate=pl.CostEstimate(
            flops=2 * products * scores * plan.head_dim,
            transcendentals=exps * scores,
            bytes_accessed=sum(
                x.size * x.dtype.itemsize for x in (*operands, *out_shapes, words)
            ),
        ),
    )
    # Chosen when lowering: a step compiled ahead of time for a TPU is traced on another machine.
    return jax.lax.platform_dependent(
        words,
        *operands,
        tpu=call(
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"))
        ),
        default=call(interpret=True),
    )


def _each_tile(plan: _Plan, chunk_start: int, q_ids_ref, kv_ids_ref):
    """Which keys a chunk of queries sees, (S, chunk) bool, shared by all heads."""
    column = jnp.broadcast_to(kv_ids_ref[0], (LANES, plan.keys)).T[:, :1]
    return column == q_ids_ref[0, :, pl.ds(chunk_start, plan.chunk)]


def _head_lanes(plan: _Plan, x, head: int):
    """`x` (rows, tile) with the lanes of other heads zero."""
    if plan.heads_per_tile == 1:
        return x
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
    own = (lane >= head * plan.head_dim) & (lane < (head + 1) * plan.head_dim)
    # On 32-bit words: two bfloat16 at a time, and the compiler aborts on a select of bfloat16 here.
    words = pltpu.bitcast(x, jnp.int32) & jnp.where(own, -1, 0)
    return pltpu.bitcast(words, x.dtype)


def _tiles(plan: _Plan):
    """(first lane, lanes, heads) of each tile of a program; the last may be narrower."""
    for start in range(0, plan.block, plan.tile):
        width = min(plan.tile, plan.block - start)
        yield start, width, width // plan.head_dim


def _kept(plan: _Plan, words_ref, head: int, chunk_start: int):
    """The dropout mask of one head, (S, chunk), equal to `dropout.keep_mask`'s transposed."""
    row = words_ref[2 + plan.num_heads + pl.program_id(0)]
    first = pl.program_id(1) * (plan.block // plan.head_dim)
    query = jax.lax.broadcasted_iota(jnp.uint32, (1, plan.chunk), 1) + np.uint32(chunk_start)
    key = jax.lax.broadcasted_iota(jnp.uint32, (plan.keys, 1), 0)
    return keep_at(
        plan.dropout_rate, words_ref[0], words_ref[1], row, words_ref[2 + first + head], query, key
    )


def _forward_kernel(
    plan: _Plan, words_ref, q_ref, k_ref, v_ref, q_ids_ref, kv_ids_ref, out_ref, log_sum_ref
):
    scale = 1 / math.sqrt(plan.head_dim)
    for start in range(0, plan.queries, plan.chunk):
        chunk = pl.ds(start, plan.chunk)
        visible = _each_tile(plan, start, q_ids_ref, kv_ids_ref)
        for lane, width, heads in _tiles(plan):
            lanes = pl.ds(lane, width)
            q, k = q_ref[0, chunk, lanes], k_ref[0, :, lanes]
            values = v_ref[0, :, lanes].T
            outs = []
            for n in range(heads):
                head = lane // plan.head_dim + n
                scores = _product(_head_lanes(plan, k, n), q, _NT) * scale
                scores = jnp.where(visible, scores, MASKED_SCORE)
                largest = scores.max(0, keepdims=True)
                weights = jnp.exp(scores - largest)
                total = weights.sum(0, keepdims=True)
                log_sum_ref[0, head, :, chunk] = largest + jnp.log(total)
                if plan.dropout_rate:
                    weights = jnp.where(_kept(plan, words_ref, head, start), weights, 0.0)
                own = values[n * plan.head_dim : (n + 1) * plan.head_dim]
                out = _product(own, weights.astype(own.dtype), _NN)
                outs.append(out / (total * (1 - plan.dropout_rate)))
            out_ref[0, chunk, lanes] = jnp.concatenate(outs, 0).T.astype(out_ref.dtype)


def _backward_kernel(
    plan: _Plan,
    words_ref,
    q_ref,
    k_ref,
    v_ref,
    q_ids_ref,
    kv_ids_ref,
    log_sum_ref,
    gradient_ref,
    dq_ref,
    dk_ref,
    dv_ref,
):
    scale = 1 / math.sqrt(plan.head_dim)
    kept_share = 1 - plan.dropout_rate
    for lane, width, heads in _tiles(plan):
        lanes = pl.ds(lane, width)
        k, v = k_ref[0, :, lanes], v_ref[0, :, lanes]
        keys = k.T
        dk = dv = jnp.zeros((plan.keys, width), jnp.float32)
        for start in range(0, plan.queries, plan.chunk):
            chunk = pl.ds(start, plan.chunk)
            visible = _each_tile(plan, start, q_ids_ref, kv_ids_ref)
            q, gradient = q_ref[0, chunk, lanes], gradient_ref[0, chunk, lanes]
            dqs = []
            for n in range(heads):
                head = lane // plan.head_dim + n
                log_sum = log_sum_ref[0, head, :, chunk]
                # A query that sees no key has equal weights, as in the forward pass. -1e30 + log S
                # is -1e30 in float32, so its scores are taken relative to 0 instead.
                alone = log_sum < MASKED_SCORE / 2
                masked = jnp.where(alone, 0.0, MASKED_SCORE)
                log_sum = jnp.where(alone, math.log(plan.keys), log_sum)
                scores = _product(_head_lanes(plan, k, n), q, _NT) * scale
                # Probabilities / (1 - rate): dropout's factor costs nothing in the exponent.
                weights = jnp.exp(
                    jnp.where(visible, scores, masked) - (log_sum + math.log(kept_share))
                )
                dweights = _product(_head_lanes(plan, v, n), gradient, _NT)
                dropped = weights
                if plan.dropout_rate:
                    kept = _kept(plan, words_ref, head, start)
                    dropped = jnp.where(kept, weights, 0.0)
                    dweights = jnp.where(kept, dweights, 0.0)
                mean = (weights * dweights).sum(0, keepdims=True) * kept_share
                dscores = jnp.where(visible, weights * (dweights - mean), 0.0)
                dscores = (dscores * scale).astype(q.dtype)
                dv += _product(dropped.astype(q.dtype), _head_lanes(plan, gradient, n), _NN)
                dk += _product(dscores, _head_lanes(plan, q, n), _NN)
                own = keys[n * plan.head_dim : (n + 1) * plan.head_dim]
                dqs.append(_product(own, dscores, _NN))
            dq_ref[0, chunk, lanes] = jnp.concatenate(dqs, 0).T.astype(dq_ref.dtype)
        dk_ref[0, :, lanes] = dk.astype(dk_ref.dtype)
        dv_ref[0, :, lanes] = dv.astype(dv_ref.dtype)


def _product(a, b, dimensions):
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)

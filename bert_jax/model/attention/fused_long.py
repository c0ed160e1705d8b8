"""Kernels of `fused` for rows of more than 512 positions, as loops over queries and keys.

A program holds one head (K, L) of one row, with positions along the lanes as in `fused`. The outer
loop is over chunks of queries, the inner loop over blocks of keys, with a running maximum (Dao et
al. 2022, FlashAttention, algorithm 1). With a narrow window the inner loop has only one block, with
all keys that the chunk can see; keys and values are then copied into a longer array, the frame (see
`Plan.is_framed`). A kernel that applies RoPE rotates all keys before the loops, and queries chunk
by chunk. The backward pass sums the gradients of keys and values in VMEM, in float32.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Integer

from bert_jax.model.attention.fused_plan import (
    LANES,
    LOG2_E,
    NN,
    NT,
    Plan,
    is_near,
    kept,
    product,
    same_segment,
    visible_keys,
)
from bert_jax.model.attention.xla import MASKED_SCORE


def frame(plan: Plan, dtype) -> list:
    """List the scratch arrays: one if keys are rotated or framed, one more if values are framed."""
    array = pltpu.VMEM((plan.head_dim, plan.frame), dtype)
    return [array] * ((plan.rotates or plan.is_framed) + plan.is_framed)


def framed_ids(plan: Plan, ids: Integer[Array, "B 1 S"]) -> Integer[Array, "B 1 F"]:
    """Pad the segment ids of keys to the length of the frame with -1, which is not a segment id."""
    around = plan.front, plan.frame - plan.keys - plan.front
    return jnp.pad(ids, ((0, 0), (0, 0), around), constant_values=-1)


def forward_kernel(plan: Plan, words_ref, q_ref, k_ref, v_ref, q_ids_ref, kv_ids_ref, *others):
    """Write the attended values and log2 of each query's sum of exponentials."""
    *angles, out_ref, log_sum_ref = others[: 2 * plan.rotates + 2]
    laid = others[2 * plan.rotates + 2 :]
    factor = LOG2_E / math.sqrt(plan.head_dim)
    place = pl.program_id(0), pl.program_id(1)
    keys, values = _laid(plan, k_ref, v_ref, angles, laid)
    seen = _visible_keys(plan)

    def chunk(number, _):
        here = _part(number, plan.chunk)
        q, left = _query(plan, q_ref, angles, here, factor)
        q_ids = q_ids_ref[0, :, here]

        def block(number, sums):
            largest, total, out = sums
            there = _keys(plan, here, number)
            visible = seen(q_ids, kv_ids_ref[0, :, there], here.start, there.start)
            scores = product(keys(there).T, q, NN)
            scores = scores if left is None else scores * left
            scores = jnp.where(visible, scores, MASKED_SCORE)
            new = jnp.maximum(largest, scores.max(0, keepdims=True))
            weights, shrink = jnp.exp2(scores - new), jnp.exp2(largest - new)
            total = total * shrink + weights.sum(0, keepdims=True)
            if plan.dropout_rate:
                weights = jnp.where(_kept(plan, words_ref, place, here, there), weights, 0.0)
            attended = product(values(there), weights.astype(v_ref.dtype), NN)
            return new, total, out * shrink + attended

        start = (
            jnp.full((1, plan.chunk), -jnp.inf, jnp.float32),
            jnp.zeros((1, plan.chunk), jnp.float32),
            jnp.zeros((plan.head_dim, plan.chunk), jnp.float32),
        )
        largest, total, out = _loop(plan.blocks, block, start)
        log_sum_ref[0, 0, :, here] = largest + jnp.log2(total)
        out_ref[0, :, here] = (out / (total * (1 - plan.dropout_rate))).astype(out_ref.dtype)

    _loop(plan.queries // plan.chunk, chunk, None)


def backward_kernel(plan: Plan, words_ref, q_ref, k_ref, v_ref, q_ids_ref, kv_ids_ref, *others):
    """Write the gradients of queries, keys and values."""
    angles, others = others[: 2 * plan.rotates], others[2 * plan.rotates :]
    log_sum_ref, gradient_ref, out_ref, dq_ref, dk_ref, dv_ref, *laid, dk_sums, dv_sums = others
    scale = 1 / math.sqrt(plan.head_dim)
    kept_share = 1 - plan.dropout_rate
    place = pl.program_id(0), pl.program_id(1)
    keys, values = _laid(plan, k_ref, v_ref, angles, laid)
    seen = _visible_keys(plan)
    dk_sums[...] = jnp.zeros_like(dk_sums)
    dv_sums[...] = jnp.zeros_like(dv_sums)

    def chunk(number, _):
        here = _part(number, plan.chunk)
        q, left = _query(plan, q_ref, angles, here, scale * LOG2_E)
        q_ids, gradient = q_ids_ref[0, :, here], gradient_ref[0, :, here]
        # The sum over keys of weight times gradient follows from the output (see `xla`).
        mean = gradient.astype(jnp.float32) * out_ref[0, :, here].astype(jnp.float32)
        mean = mean.sum(0, keepdims=True) * kept_share
        log_sum = log_sum_ref[0, 0, :, here]
        # A query that sees no key has equal weights and constant scores (see `fused`).
        alone = log_sum < MASKED_SCORE / 2
        masked = jnp.where(alone, 0.0, MASKED_SCORE)
        log_sum = jnp.where(alone, math.log2(plan.blocks * plan.block), log_sum)
        log_sum = log_sum + math.log2(kept_share)
        learning = jnp.where(alone, 0.0, q.astype(jnp.float32)).astype(q.dtype)

        def block(number, dq):
            there = _keys(plan, here, number)
            k, v = keys(there), values(there)
            visible = seen(q_ids, kv_ids_ref[0, :, there], here.start, there.start)
            scores = product(k.T, q, NN)
            scores = scores if left is None else scores * left
            weights = jnp.exp2(jnp.where(visible, scores, masked) - log_sum)
            dweights = product(v.T, gradient, NN)
            dropped = weights
            if plan.dropout_rate:
                survives = _kept(plan, words_ref, place, here, there)
                dropped = jnp.where(survives, weights, 0.0)
                dweights = jnp.where(survives, dweights, 0.0)
            dscores = (weights * (dweights - mean)).astype(q.dtype)
            dk_sums[:, there] += product(learning, dscores, NT)
            dv_sums[:, there] += product(gradient, dropped.astype(q.dtype), NT)
            return dq + product(k, dscores, NN)

        zeros = jnp.zeros((plan.head_dim, plan.chunk), jnp.float32)
        dq = jnp.where(alone, 0.0, _loop(plan.blocks, block, zeros) * scale)
        dq_ref[0, :, here] = _turned(plan, dq, angles, here, back=True).astype(dq_ref.dtype)

    _loop(plan.queries // plan.chunk, chunk, None)
    # Rotated queries already include the scores' factor; queries that are not rotated do not.
    left = 1 / LOG2_E if plan.rotates else scale

    def write(number, _):
        here = _part(number, plan.piece)
        dk = _turned(plan, _unlaid(plan, dk_sums, number) * left, angles, here, back=True)
        dk_ref[0, :, here] = dk.astype(dk_ref.dtype)
        dv_ref[0, :, here] = _unlaid(plan, dv_sums, number).astype(dv_ref.dtype)

    _loop(plan.keys // plan.piece, write, None)


def _loop(count: int, body, start):
    return body(0, start) if count == 1 else lax.fori_loop(0, count, body, start)


def _part(number, size: int) -> Any:
    return pl.ds(pl.multiple_of(number * size, LANES), size)


def _keys(plan: Plan, chunk: Any, number) -> Any:
    """Return the slice of key block `number`; in a frame, the block starts where `chunk` starts."""
    return pl.ds(chunk.start, plan.block) if plan.is_framed else _part(number, plan.block)


def _visible_keys(plan: Plan):
    """Return the function `visible_keys` or, in a frame, a cheaper one with a fixed window mask."""
    if not plan.is_framed:
        return partial(visible_keys, plan)
    near = is_near(plan.front, (plan.block, plan.chunk), -plan.front)
    return lambda q_ids, kv_ids, *_: same_segment(q_ids, kv_ids) & near


def _kept(plan: Plan, words_ref, place: tuple[Any, Any], chunk: Any, keys: Any) -> jax.Array:
    """Return a block's dropout mask (block, chunk), true for kept; `place` is (row, head)."""
    first = keys.start - plan.front
    return kept(plan, words_ref, *place, chunk.start, first, (keys.size, chunk.size))


def _query(plan: Plan, q_ref, angles, here, factor: float):
    """Return a chunk of queries and the scores' factor (None if the rotation applied it)."""
    q = q_ref[0, :, here]
    if not plan.rotates:
        return q, factor
    return _turned(plan, q, angles, here, factor=factor).astype(q.dtype), None


def _turned(plan: Plan, x, angles, here, *, factor: float | None = None, back: bool = False):
    """Convert `x` (K, n) to float32; if the plan rotates, also rotate `x` and scale it by `factor`.

    With `back`, the rotation is the inverse.
    """
    x = x.astype(jnp.float32)
    if not plan.rotates:
        return x
    cos, sin = (ref[0, :, here] for ref in angles)
    if factor is not None:
        cos, sin = cos * factor, sin * factor
    sin = -sin if back else sin
    first, second = x[: x.shape[0] // 2], x[x.shape[0] // 2 :]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), 0)


def _laid(plan: Plan, k_ref, v_ref, angles, laid):
    """Fill the scratch arrays; return functions that read slices of (rotated) keys and values."""
    keys = values = None
    if laid:
        keys = laid[0]
        _lay(plan, keys, lambda here: _turned(plan, k_ref[0, :, here], angles, here))
    if plan.is_framed:
        values = laid[1]
        _lay(plan, values, lambda here: v_ref[0, :, here].astype(jnp.float32))

    def reader(ref, laid_ref):
        return lambda there: ref[0, :, there] if laid_ref is None else laid_ref[:, there]

    return reader(k_ref, keys), reader(v_ref, values)


def _lay(plan: Plan, frame_ref, piece):
    """Copy a row into a scratch array, in 32-bit pieces, shifted right by `plan.front` lanes."""
    if not plan.is_framed:

        def copy(number, _):
            here = _part(number, plan.piece)
            frame_ref[:, here] = piece(here).astype(frame_ref.dtype)

        _loop(plan.keys // plan.piece, copy, None)
        return
    whole, part = divmod(plan.front, LANES)
    frame_ref[...] = jnp.zeros_like(frame_ref)

    def shifted(before, x):
        """Move a piece `part` lanes right; the last lanes of the previous piece fill the gap."""
        wide = jnp.concatenate((before, x), 1)
        return pltpu.roll(wide, x.shape[1] + part, 1)[:, : x.shape[1]].astype(frame_ref.dtype)

    def write(number, before):
        x = piece(_part(number, plan.piece))
        start = pl.multiple_of(whole * LANES + number * plan.piece, LANES)
        frame_ref[:, pl.ds(start, plan.piece)] = shifted(before, x)
        return x[:, -LANES:]

    nothing = jnp.zeros((plan.head_dim, LANES), jnp.float32)
    last = _loop(plan.keys // plan.piece, write, nothing)
    frame_ref[:, pl.ds(whole * LANES + plan.keys, LANES)] = shifted(last, nothing)


def _unlaid(plan: Plan, frame_ref, number):
    """Read piece `number` of a row from a 32-bit array with the layout that `_lay` writes."""
    if not plan.is_framed:
        return frame_ref[:, _part(number, plan.piece)]
    whole, part = divmod(plan.front, LANES)
    start = pl.multiple_of(whole * LANES + number * plan.piece, LANES)
    wide = frame_ref[:, pl.ds(start, plan.piece + LANES)]
    return pltpu.roll(wide, plan.piece + LANES - part, 1)[:, : plan.piece]

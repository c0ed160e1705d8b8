"""Kernels of `fused` for rows beyond 1,024: loops over chunks of queries and blocks of keys.

A program holds one head of one row, (K, L) with positions along the lanes as in `fused`. Without a
window each chunk of queries meets all blocks of keys, with a running maximum (Dao et al. 2022,
FlashAttention, algorithm 1); with a window it meets one block, the keys that it can see. The
backward pass adds the gradients of keys and values up in VMEM, in float32.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.attention.fused_plan import (
    LANES,
    LOG2_E,
    NN,
    NT,
    Plan,
    kept,
    product,
    visible_keys,
)
from bert_jax.model.attention.xla import MASKED_SCORE


def backward_scratch(plan: Plan) -> list:
    """Return the arrays in which gradients of keys and values are added up."""
    return [pltpu.VMEM((plan.head_dim, plan.keys), jnp.float32)] * 2


def forward_kernel(
    plan: Plan, words_ref, q_ref, k_ref, v_ref, q_ids_ref, kv_ids_ref, out_ref, log_sum_ref
):
    """Write the attended values and log2 of each query's sum of exponentials."""
    factor = LOG2_E / math.sqrt(plan.head_dim)
    place = pl.program_id(0), pl.program_id(1)

    def chunk(number, _):
        here = _part(number, plan.chunk)
        q, q_ids = q_ref[0, :, here], q_ids_ref[0, :, here]

        def block(number, sums):
            largest, total, out = sums
            there = _keys(plan, here, number)
            visible = visible_keys(plan, q_ids, kv_ids_ref[0, :, there], here.start, there.start)
            scores = product(k_ref[0, :, there].T, q, NN) * factor
            scores = jnp.where(visible, scores, MASKED_SCORE)
            new = jnp.maximum(largest, scores.max(0, keepdims=True))
            weights, shrink = jnp.exp2(scores - new), jnp.exp2(largest - new)
            total = total * shrink + weights.sum(0, keepdims=True)
            if plan.dropout_rate:
                weights = jnp.where(_kept(plan, words_ref, place, here, there), weights, 0.0)
            attended = product(v_ref[0, :, there], weights.astype(v_ref.dtype), NN)
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


def backward_kernel(
    plan: Plan, words_ref, q_ref, k_ref, v_ref, q_ids_ref, kv_ids_ref, log_sum_ref, gradient_ref,
    out_ref, dq_ref, dk_ref, dv_ref, dk_sums, dv_sums,
):  # fmt: skip
    """Write the gradients of queries, keys and values."""
    scale = 1 / math.sqrt(plan.head_dim)
    kept_share = 1 - plan.dropout_rate
    place = pl.program_id(0), pl.program_id(1)
    dk_sums[...] = jnp.zeros_like(dk_sums)
    dv_sums[...] = jnp.zeros_like(dv_sums)

    def chunk(number, _):
        here = _part(number, plan.chunk)
        q, q_ids, gradient = (ref[0, :, here] for ref in (q_ref, q_ids_ref, gradient_ref))
        # The sum over keys of weight times its gradient, from the output.
        mean = gradient.astype(jnp.float32) * out_ref[0, :, here].astype(jnp.float32)
        mean = mean.sum(0, keepdims=True) * kept_share
        log_sum = log_sum_ref[0, 0, :, here]
        # A query that sees no key has equal weights, and scores that are constants (see `fused`).
        alone = log_sum < MASKED_SCORE / 2
        masked = jnp.where(alone, 0.0, MASKED_SCORE)
        log_sum = jnp.where(alone, math.log2(plan.blocks * plan.block), log_sum)
        log_sum = log_sum + math.log2(kept_share)
        learning = jnp.where(alone, 0.0, q.astype(jnp.float32)).astype(q.dtype)

        def block(number, dq):
            there = _keys(plan, here, number)
            k, v = k_ref[0, :, there], v_ref[0, :, there]
            visible = visible_keys(plan, q_ids, kv_ids_ref[0, :, there], here.start, there.start)
            scores = product(k.T, q, NN) * (scale * LOG2_E)
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
        dq_ref[0, :, here] = dq.astype(dq_ref.dtype)

    _loop(plan.queries // plan.chunk, chunk, None)
    dk_ref[0] = (dk_sums[...] * scale).astype(dk_ref.dtype)
    dv_ref[0] = dv_sums[...].astype(dv_ref.dtype)


def _loop(count: int, body, start):
    return body(0, start) if count == 1 else lax.fori_loop(0, count, body, start)


def _part(number, size: int) -> Any:
    return pl.ds(pl.multiple_of(number * size, LANES), size)


def _keys(plan: Plan, chunk: Any, number) -> Any:
    """Return the keys of a block: with a window, those around the chunk, inside the row."""
    if plan.window is None:
        return _part(number, plan.block)
    first = jnp.clip(chunk.start - plan.halo, 0, plan.keys - plan.block)
    return pl.ds(pl.multiple_of(first, LANES), plan.block)


def _kept(plan: Plan, words_ref, place: tuple[Any, Any], chunk: Any, keys: Any) -> jax.Array:
    """Return the dropout mask of a block, (block, chunk), for the row and the head at `place`."""
    return kept(plan, words_ref, *place, chunk.start, keys.start, (keys.size, chunk.size))

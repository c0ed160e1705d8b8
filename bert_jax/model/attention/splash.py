"""JAX's own TPU kernel for attention, `splash_attention`: any length, no dropout.

Source: jax.experimental.pallas.ops.tpu.splash_attention, part of JAX.
"""

import math
from functools import partial

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jaxtyping import Array, Float

from bert_jax.model.attention.xla import Asked

_LANES, _LONGEST_BLOCK = 128, 512


def unsupported(queries: int, keys: int) -> str | None:
    """Why these lengths cannot be run, in words; None if they can."""
    if queries % _LANES or keys % _LANES:
        return f"lengths that are multiples of {_LANES}, not {queries} and {keys}"
    return None


def block_sizes(
    queries: int, keys: int, window: int | None = None
) -> splash_attention_kernel.BlockSizes:
    """Return the largest blocks of at most 512 that divide the lengths, in all passes.

    One block is a whole row at L=512: no running softmax, and the fused backward pass (one kernel
    for dq, dk and dv) needs no sum over blocks afterwards. For longer rows, up to four blocks of
    keys are in memory together, so that fewer parts of dq are written and added up. With a window
    blocks are about as wide as what a query sees, as they are computed or skipped whole; the fused
    backward pass would skip none.
    """
    longest = _LONGEST_BLOCK
    if window is not None:
        longest = min(longest, -(-2 * window // _LANES) * _LANES)
    block_q, block_kv = (
        max(b for b in range(_LANES, longest + 1, _LANES) if n % b == 0) for n in (queries, keys)
    )
    held = max(n for n in range(1, 5) if keys % (n * block_kv) == 0) if window is None else 1
    return splash_attention_kernel.BlockSizes(
        block_q=block_q, block_kv=held * block_kv, block_kv_compute=block_kv,
        block_q_dkv=block_q, block_kv_dkv=held * block_kv, block_kv_dkv_compute=block_kv,
        block_q_dq=None if window is None else block_q,
        block_kv_dq=None if window is None else block_kv,
        use_fused_bwd_kernel=window is None,
    )  # fmt: skip


def splash_attention(asked: Asked) -> Float[Array, "B L H K"]:
    """Attend on one device, without dropout, for lengths of 128 n; heads of keys are not shared."""
    _, queries, heads, head_dim = asked.q.shape
    window, causal = asked.window, asked.causal
    shape = (queries, asked.k.shape[1])
    one_head: splash_attention_mask.Mask = splash_attention_mask.FullMask(shape)
    if window is not None:
        after = 0 if causal else window
        one_head = splash_attention_mask.LocalMask(shape, (window, after), offset=0)
    elif causal:
        one_head = splash_attention_mask.CausalMask(shape)
    mask = splash_attention_mask.MultiHeadMask([one_head] * heads)

    def run(q, k, v, q_ids, kv_ids, *, interpret: bool):
        kernel = splash_attention_kernel.make_splash_mha(
            mask,
            block_sizes=block_sizes(*shape, window),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        segments = splash_attention_kernel.SegmentIds(q=q_ids, kv=kv_ids)
        # The kernel takes heads in front of positions and queries that are already scaled.
        q, k, v = (x.swapaxes(1, 2) for x in (q * (1 / math.sqrt(head_dim)), k, v))
        return jax.vmap(kernel)(q, k, v, segments).swapaxes(1, 2)

    # Chosen when lowering: a step compiled ahead of time for a TPU is traced on another machine.
    ids = asked.q_segment_ids.astype("int32"), asked.kv_segment_ids.astype("int32")
    on_tpu, elsewhere = (partial(run, interpret=interpret) for interpret in (False, True))
    return jax.lax.platform_dependent(*asked[:3], *ids, tpu=on_tpu, default=elsewhere)

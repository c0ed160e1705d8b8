"""Attention kernels of libraries, without dropout: JAX's splash attention (TPU), cuDNN's (GPU).

Sources: jax.experimental.pallas.ops.tpu.splash_attention; `jax.nn.dot_product_attention`.
"""

import math
import re
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jaxtyping import Array, Float

from bert_jax.model.attention.fused_plan import LANES, largest, up_to_lanes
from bert_jax.model.attention.xla import Asked, visible_keys

_LONGEST_BLOCK = 512
_MAX_HEAD_DIM = 128
_AMPERE = (8, 0)
_LEAST_VERSION: dict[tuple[int, int] | None, int] = {(10, 3): 91100}
"""Oldest cuDNN that works, by compute capability. JAX's own check accepts older versions, too."""


class Gpu(NamedTuple):
    """Properties of a GPU that decide whether cuDNN's attention runs."""

    capability: tuple[int, int] | None
    """CUDA's compute capability; None on a GPU without CUDA."""
    cudnn: int | None
    """Version of cuDNN (9.11 is 91100); None if JAX finds no cuDNN."""


def local_gpu() -> Gpu:
    """Return the properties of the first GPU of this process."""
    # This module is private, but JAX's own check reads it, too, and raises only inside a trace.
    from jax._src.lib import cuda_versions

    said = str(getattr(jax.local_devices(backend="gpu")[0], "compute_capability", ""))
    match = re.fullmatch(r"(\d+)\.(\d+)", said)
    return Gpu(
        (int(match[1]), int(match[2])) if match else None,
        cuda_versions.cudnn_get_version() if cuda_versions else None,
    )


def before_ampere(capability: tuple[int, int] | None) -> str | None:
    """Return the requirement of our GPU kernels that `capability` does not meet, or None."""
    if capability is not None and capability >= _AMPERE:
        return None
    has = "" if capability is None else f", not {capability[0]}.{capability[1]}"
    return f"an NVIDIA GPU of compute capability 8.0 (Ampere) or later{has}"


def cudnn_unsupported(queries: int, keys: int, head_dim: int, dtype: np.dtype) -> str | None:
    """Name the requirement that the arrays or the local GPU do not meet; None if all are met.

    JAX has the same requirements for training with a mask (`check_is_flash_attention`). In
    addition, this function checks the compute capability, which JAX does not check.
    """
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"model.dtype 'bfloat16', not {np.dtype(dtype).name}"
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        return f"a head_dim that is a multiple of 8 up to {_MAX_HEAD_DIM}, not {head_dim}"
    if queries % 2 or keys % 2:
        return f"even lengths, not {queries} and {keys}"
    capability, version = local_gpu()
    if reason := before_ampere(capability):
        return reason
    least = _LEAST_VERSION.get(capability, 0)
    if version is None or version < least:
        return "cuDNN, which JAX does not find" if version is None else f"cuDNN {least} or later"
    return None


def cudnn_attention(
    asked: Asked, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> Float[Array, "B L H K"]:
    """Attend on one device, without dropout. Tests without a GPU set `implementation` to "xla"."""
    # All heads share one mask (B, 1, L, S). If rows were only padded, cuDNN could take lengths
    # instead, but segment ids are data, so that compilation cannot rule out packed rows.
    mask = visible_keys(asked.q_segment_ids, asked.kv_segment_ids, asked.window)
    return jax.nn.dot_product_attention(
        *asked[:3], mask=mask, is_causal=asked.causal, implementation=implementation
    )


def splash_unsupported(queries: int, keys: int) -> str | None:
    """Name the requirement that these lengths do not meet; None if all are met."""
    if queries % LANES or keys % LANES:
        return f"lengths that are multiples of {LANES}, not {queries} and {keys}"
    return None


def block_sizes(
    queries: int, keys: int, window: int | None = None
) -> splash_attention_kernel.BlockSizes:
    """Return the largest blocks of at most 512 that divide the lengths, for all passes.

    At L=512 one block is a full row. There is then no running softmax, and the fused backward pass
    (one kernel for dq, dk and dv) needs no sum over blocks. For longer rows, up to four blocks of
    keys are in memory together, so that fewer partial sums of dq are written. With a window, blocks
    are at most about as wide as the range that a query sees, because a block cannot be skipped in
    part. The backward pass is then not fused, because the fused kernel would skip no block.
    """
    longest = _LONGEST_BLOCK
    if window is not None:
        longest = min(longest, up_to_lanes(2 * window))
    block_q, block_kv = (largest(length, longest) for length in (queries, keys))
    held = max(n for n in range(1, 5) if keys % (n * block_kv) == 0) if window is None else 1
    return splash_attention_kernel.BlockSizes(
        block_q=block_q, block_kv=held * block_kv, block_kv_compute=block_kv,
        block_q_dkv=block_q, block_kv_dkv=held * block_kv, block_kv_dkv_compute=block_kv,
        block_q_dq=None if window is None else block_q,
        block_kv_dq=None if window is None else block_kv,
        use_fused_bwd_kernel=window is None,
    )  # fmt: skip


def splash_attention(asked: Asked) -> Float[Array, "B L H K"]:
    """Attend without dropout on one device; lengths are multiples of 128, and keys have H heads."""
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
        make, blocks = splash_attention_kernel.make_splash_mha, block_sizes(*shape, window)
        kernel = make(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=interpret)
        segments = splash_attention_kernel.SegmentIds(q=q_ids, kv=kv_ids)
        # The kernel expects heads before positions, and queries that are already scaled.
        q, k, v = (x.swapaxes(1, 2) for x in (q * (1 / math.sqrt(head_dim)), k, v))
        return jax.vmap(kernel)(q, k, v, segments).swapaxes(1, 2)

    # Choose at lowering, because a step compiled ahead of time for a TPU is traced elsewhere.
    ids = asked.q_segment_ids.astype("int32"), asked.kv_segment_ids.astype("int32")
    on_tpu, elsewhere = (partial(run, interpret=interpret) for interpret in (False, True))
    return jax.lax.platform_dependent(*asked[:3], *ids, tpu=on_tpu, default=elsewhere)

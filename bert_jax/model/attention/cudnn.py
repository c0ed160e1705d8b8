"""cuDNN's attention for GPUs, through `jax.nn.dot_product_attention`: no dropout."""

import re
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bert_jax.model.attention.xla import Asked, visible_keys

_MAX_HEAD_DIM = 128
_AMPERE = (8, 0)
_LEAST_VERSION = {(10, 3): 91100}
"""cuDNN that a compute capability needs beyond what JAX's CUDA plugin asks for."""


class Gpu(NamedTuple):
    """A GPU as far as cuDNN is concerned."""

    capability: tuple[int, int] | None
    """CUDA's compute capability; None on other GPUs."""
    cudnn: int | None
    """Version of cuDNN, 91100 for 9.11; None where there is none."""


def local_gpu() -> Gpu:
    """Return the first GPU of this process."""
    # Private, but the same place as JAX's own check, which raises in the middle of a trace.
    from jax._src.lib import cuda_versions

    said = str(getattr(jax.local_devices(backend="gpu")[0], "compute_capability", ""))
    match = re.fullmatch(r"(\d+)\.(\d+)", said)
    return Gpu(
        (int(match[1]), int(match[2])) if match else None,
        cuda_versions.cudnn_get_version() if cuda_versions else None,
    )


def unsupported(queries: int, keys: int, head_dim: int, dtype: np.dtype) -> str | None:
    """Why these arrays cannot be run on the GPU at hand, in words; None if they can.

    The same constraints as JAX's `check_is_flash_attention`, with a mask and in training, and the
    compute capability, which JAX leaves to cuDNN to refuse.
    """
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"model.dtype 'bfloat16', not {np.dtype(dtype).name}"
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        return f"a head_dim that is a multiple of 8 up to {_MAX_HEAD_DIM}, not {head_dim}"
    if queries % 2 or keys % 2:
        return f"even lengths, not {queries} and {keys}"
    capability, version = local_gpu()
    if capability is None or capability < _AMPERE:
        has = "" if capability is None else f", not {capability[0]}.{capability[1]}"
        return f"an NVIDIA GPU of compute capability 8.0 (Ampere) or later{has}"
    least = _LEAST_VERSION.get(capability, 0)
    if version is None or version < least:
        return "cuDNN, which JAX does not find" if version is None else f"cuDNN {least} or later"
    return None


def cudnn_attention(
    asked: Asked, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> Float[Array, "B L H K"]:
    """Attend on one device, without dropout; heads of keys are not shared.

    The implementation "xla" runs the same call without a GPU, for tests.
    """
    # One mask for all heads, (B, 1, L, S): segment ids are data, and whether a row is packed or
    # merely padded (for which cuDNN could take lengths) is not known when compiling.
    mask = visible_keys(asked.q_segment_ids, asked.kv_segment_ids, asked.window)
    return jax.nn.dot_product_attention(
        *asked[:3], mask=mask, is_causal=asked.causal, implementation=implementation
    )

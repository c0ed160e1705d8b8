"""cuDNN's attention for GPUs, through `jax.nn.dot_product_attention`: no dropout."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

_MAX_HEAD_DIM = 128


def unsupported(head_dim: int, dtype: np.dtype) -> str | None:
    """Why these heads cannot be run, in words; None if they can."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"model.dtype 'bfloat16', not {np.dtype(dtype).name}"
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        return f"a head_dim that is a multiple of 8 up to {_MAX_HEAD_DIM}, not {head_dim}"
    return None


def cudnn_attention(
    q: Float[Array, "B L H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    q_segment_ids: Integer[Array, "B L"],
    kv_segment_ids: Integer[Array, "B S"],
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B L H K"]:
    """`attention.attend` on one device, without dropout.

    Args:
      q: queries.
      k: keys.
      v: values.
      q_segment_ids: as in `attend`.
      kv_segment_ids: as in `attend`.
      implementation: "xla" runs the same call without a GPU, for tests.
    """
    # One mask for all heads, (B, 1, L, S): segment ids are data, and whether a row is packed or
    # merely padded (for which cuDNN could take lengths) is not known when compiling.
    mask = q_segment_ids[:, None, :, None] == kv_segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

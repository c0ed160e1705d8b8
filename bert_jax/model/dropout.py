"""Dropout whose mask is a pure function of (seed, site, row of the stream, position in the row).

There is no generator state and no key: the mask is a hash of integers (`counter_hash`), computed
where it is used. A row of the example stream gets the same mask on any mesh, with any accumulation
and after a restart; under SPMD every device hashes only its own elements.

Source: Srivastava et al. 2014 (inverted scaling, as BERT's `hidden_dropout_prob`).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, UInt32

from bert_jax.model.counter_hash import hash_u32, threshold_u32

Number = int | Integer[Array, ""]
"""Integer that JAX may trace, such as a layer's number."""


class DropoutStream(NamedTuple):
    """Numbers that determine a step's dropout masks; the model takes them instead of a key."""

    seed: UInt32[Array, ""]
    """Seed of the step's masks; no two steps share one."""
    row_index: UInt32[Array, " B"]
    """Position of each row in the stream of examples."""


Stream = DropoutStream | None
"""Stream of dropout masks; None: nothing is dropped, as in evaluations."""


def keep_mask(
    shape: tuple[int, ...],
    rate: float,
    seed: UInt32[Array, ""],
    site: Number,
    row_index: UInt32[Array, " B"],
) -> Bool[Array, "..."]:
    """Return the mask of elements that dropout keeps; axis 0 of `shape` is the batch."""
    expanded = row_index.reshape(row_index.shape + (1,) * (len(shape) - 1))
    positions = jnp.indices(shape[1:], jnp.uint32, sparse=True)
    return keep_at(rate, seed, site, expanded, *positions)


def keep_at(
    rate: float,
    seed: UInt32[Array, ""],
    site: Number,
    row_index: UInt32[Array, "..."],
    *positions: UInt32[Array, "..."],
) -> Bool[Array, "..."]:
    """Compute `keep_mask` at broadcast positions, by integer operations that kernels also have."""
    # One round per axis, smallest shapes first: only the last costs a round per element. With one
    # linear position, rows whose 32-bit states agree in the high bits would share a sequence.
    bits = jnp.asarray(hash_u32(seed, site, row_index, *positions))
    return bits >= np.uint32(threshold_u32(rate))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _dropout(x, rate, seed, site, row_index):
    mask = keep_mask(x.shape, rate, seed, site, row_index)
    # Scale in float32: bfloat16 would round the factor itself, 1.1111 to 1.1094, for all elements.
    scaled = (x.astype(jnp.float32) * np.float32(1 / (1 - rate))).astype(x.dtype)
    return jnp.where(mask, scaled, jnp.zeros((), x.dtype))


def _dropout_backward(rate, residuals, gradient):
    # The barrier keeps XLA from recognising the forward mask and storing it until this pass.
    seed, site, row_index = jax.lax.optimization_barrier(residuals)
    return _dropout(gradient, rate, seed, site, row_index), None, None, None


_dropout.defvjp(lambda x, rate, *names: (_dropout(x, rate, *names), names), _dropout_backward)


def dropout(
    x: Float[Array, "B ..."], rate: float, stream: Stream, site: Number
) -> Float[Array, "B ..."]:
    """Zero elements with probability `rate`, and scale the others; the mask is never stored."""
    if stream is None or rate == 0.0:
        return x
    return _dropout(x, rate, stream.seed, jnp.asarray(site, jnp.uint32), stream.row_index)

"""Dropout whose mask is a pure function of (seed, site, row index, position in the row).

The site identifies one dropout operation of the model. The row index is the row's position in the
stream of examples. There is no generator state and no key: the mask is a hash of these integers
(`counter_hash`), computed where it is used. An example therefore gets the same mask on any mesh,
with any gradient accumulation and after a restart. Every device hashes only its own elements.

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
"""Python integer or traced integer scalar, such as the index of a layer."""


class DropoutStream(NamedTuple):
    """Integers that determine the dropout masks of a step; they take the place of a JAX key."""

    seed: UInt32[Array, ""]
    """Seed of the step's masks; every step has a different seed."""
    row_index: UInt32[Array, " B"]
    """Position of each row in the stream of examples."""


Stream = DropoutStream | None
"""Stream of dropout masks; None switches dropout off, as in evaluations."""


def keep_mask(
    shape: tuple[int, ...],
    rate: float,
    seed: UInt32[Array, ""],
    site: Number,
    row_index: UInt32[Array, " B"],
) -> Bool[Array, "..."]:
    """Compute the mask of elements that dropout keeps at `site`; axis 0 of `shape` is the batch."""
    expanded = row_index.reshape(row_index.shape + (1,) * (len(shape) - 1))
    return keep_at(rate, seed, site, expanded, *jnp.indices(shape[1:], jnp.uint32, sparse=True))


def keep_at(
    rate: float,
    seed: UInt32[Array, ""],
    site: Number,
    row_index: UInt32[Array, "..."],
    *positions: UInt32[Array, "..."],
) -> Bool[Array, "..."]:
    """Compute `keep_mask` at `row_index` and `positions`, which broadcast against each other.

    Attention kernels call this function, too: it uses only integer operations that they support.
    """
    # Each axis is hashed in its own round, smallest shapes first, so that only the last round runs
    # once per element. If one linear position were hashed instead, rows whose 32-bit states agree
    # in the high bits would share a sequence of bits.
    bits = jnp.asarray(hash_u32(seed, site, row_index, *positions))
    return bits >= np.uint32(threshold_u32(rate))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _dropout(x, rate, seed, site, row_index):
    mask = keep_mask(x.shape, rate, seed, site, row_index)
    # Scale in float32: bfloat16 would round the factor itself, for example 1.1111 to 1.1094.
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
    """Zero elements with probability `rate`, scale the rest; the gradient recomputes the mask."""
    if stream is None or rate == 0.0:
        return x
    return _dropout(x, rate, stream.seed, jnp.asarray(site, jnp.uint32), stream.row_index)

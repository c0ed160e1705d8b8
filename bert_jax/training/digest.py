"""A digest per array that does not depend on how the array is laid out over devices.

Orbax loads a flipped bit without a word, so a checkpoint carries a digest of every array. A CRC
runs over bytes in order, which a sharded array does not have in one place; this digest is a sum
over elements, so every device sums its own and one all-reduce ends it: the same number on any mesh
and any number of processes, with nothing gathered to the host.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from bert_jax.model.counter_hash import hash_u32

_ODD = 0x9E3779B9  # spreads neighbouring indices over the word
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def _digest(array: jax.Array) -> jax.Array:
    bits = array.view(jnp.uint8) if array.dtype == jnp.bool_ else array
    bits = jax.lax.bitcast_convert_type(bits, _UNSIGNED[array.dtype.itemsize]).astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        stride = math.prod(bits.shape[axis + 1 :]) & 0xFFFFFFFF
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * np.uint32(stride)
    # One changed element always changes the sum, since the hash is a bijection of its bits; changes
    # in several elements cancel with probability 2^-32.
    return jnp.asarray(hash_u32(bits ^ index * np.uint32(_ODD))).sum(dtype=jnp.uint32)


@jax.jit
def _digests(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_digest(leaf) for leaf in leaves])


def leaf_digests(leaves: dict[str, Any]) -> dict[str, str]:
    """Digests of named arrays, 8 hexadecimal digits each.

    Collective: with several processes all must call it, and all get the same answer. Waits for the
    arrays.
    """
    if not leaves:
        return {}
    summed = _digests(list(leaves.values()))
    if not summed.is_fully_addressable:  # parts of it lie with other processes
        summed = multihost_utils.process_allgather(summed, tiled=True)
    values = np.asarray(summed)
    return {name: f"{value:08x}" for name, value in zip(leaves, values, strict=True)}

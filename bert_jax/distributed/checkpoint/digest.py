"""A digest of an array that does not depend on how the array is sharded over devices.

Orbax does not notice a flipped bit, so a checkpoint records a digest of every array. A CRC needs
the bytes in order, but the bytes of a sharded array are on several devices. This digest is a sum
over elements: each device sums its own elements, and one all-reduce adds these sums. The result is
the same on any mesh and any number of processes, and nothing is gathered to the host.

digest(x) = sum over i of hash(bits(x[i]) ^ i * ODD)   mod 2^32,   i: row-major index

If one element changes, the sum always changes, because the hash is a bijection of 32-bit words.
Changes of several elements cancel out with probability 2^-32.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from bert_jax.model.counter_hash import hash_u32

_ODD = np.uint32(0x9E3779B9)  # spreads neighbouring indices over all bits of a word
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}
_PIECE = 1 << 20  # elements
_MAX_PIECES = 32


def leaf_digests(leaves: dict[str, jax.Array]) -> dict[str, str]:
    """Compute a digest of 8 hexadecimal digits for each named array. Collective and blocking."""
    by_mesh: dict[Mesh | None, dict[str, jax.Array]] = {}
    for name, leaf in leaves.items():
        mesh = getattr(leaf.sharding, "mesh", None)
        by_mesh.setdefault(mesh if isinstance(mesh, Mesh) else None, {})[name] = leaf
    digests: dict[str, str] = {}
    for mesh, group in by_mesh.items():
        specs = tuple(getattr(leaf.sharding, "spec", None) for leaf in group.values())
        values = np.asarray(_digests(list(group.values()), mesh, specs))
        digests.update({name: text(value) for name, value in zip(group, values, strict=True)})
    return {name: digests[name] for name in leaves}


def text(digest: int | np.integer) -> str:
    """Format a digest as 8 hexadecimal digits."""
    return f"{int(digest) & 0xFFFFFFFF:08x}"


def block_digest(block: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> int:
    """Compute, on the host, the digest contribution of the block that begins at index `start`."""
    words = np.ascontiguousarray(block).reshape(block.shape)
    if block.dtype.itemsize == 8:  # add an axis with two words, as `bitcast_convert_type` does
        words = words[..., None]
    words = words.view(_UNSIGNED[block.dtype.itemsize])
    strides = _strides((*shape, *words.shape[block.ndim :]))
    first = sum(index * stride for index, stride in zip(start, strides, strict=False))
    return _host_sum(words, first, strides) & 0xFFFFFFFF


def _host_sum(words: np.ndarray, offset: int, strides: Sequence[int]) -> int:
    if words.size > _PIECE // 8:  # smaller pieces stay in the cache
        axis = next(axis for axis, size in enumerate(words.shape) if size > 1)
        length = max(1, words.shape[axis] * (_PIECE // 8) // words.size)
        pieces = np.split(words, range(length, words.shape[axis], length), axis)
        step = length * strides[axis]
        return sum(_host_sum(piece, offset + n * step, strides) for n, piece in enumerate(pieces))
    index = np.full((1,) * words.ndim, offset & 0xFFFFFFFF, np.uint32)
    for axis, size in enumerate(words.shape):
        along = np.arange(size, dtype=np.uint32) * np.uint32(strides[axis] & 0xFFFFFFFF)
        index = index + along.reshape([-1 if a == axis else 1 for a in range(words.ndim)])
    hashed = np.asarray(hash_u32(words.astype(np.uint32) ^ index * _ODD))
    return int(hashed.sum(dtype=np.uint32))


@partial(jax.jit, static_argnames=("mesh", "specs"))
def _digests(leaves: list[jax.Array], mesh: Mesh | None, specs: tuple[Any, ...]) -> jax.Array:
    if mesh is None:
        return jnp.stack([_local_sum(leaf, np.uint32(0), leaf.shape) for leaf in leaves])

    def local(parts: list[jax.Array]) -> jax.Array:
        sums = []
        for leaf, part, spec in zip(leaves, parts, specs, strict=True):
            offset, first_copy = jnp.uint32(0), jnp.uint32(1)
            strides, used = _strides(leaf.shape), set()
            for axis, names in enumerate(spec):
                names = () if names is None else (names,) if isinstance(names, str) else names
                used |= set(names)
                number = jnp.uint32(0)  # index of this device's part along the axis
                for name in names:
                    index = jax.lax.axis_index(name).astype(jnp.uint32)
                    number = number * np.uint32(mesh.shape[name]) + index
                offset += number * np.uint32(strides[axis] * part.shape[axis] & 0xFFFFFFFF)
            for name in mesh.axis_names:
                if name not in used:  # if devices hold copies, only the first copy counts
                    first_copy *= (jax.lax.axis_index(name) == 0).astype(jnp.uint32)
            sums.append(_local_sum(part, offset, leaf.shape) * first_copy)
        return jax.lax.psum(jnp.stack(sums), mesh.axis_names)

    return jax.shard_map(
        local, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(), check_vma=False
    )(leaves)


def _local_sum(part: jax.Array, offset: Any, shape: Sequence[int]) -> jax.Array:
    """Compute the digest contribution of the part at row-major index `offset` of an array."""
    words = part.view(jnp.uint8) if part.dtype == jnp.bool_ else part
    words = jax.lax.bitcast_convert_type(words, _UNSIGNED[part.dtype.itemsize])
    strides = _strides((*shape, *words.shape[part.ndim :]))
    if words.ndim == 0:
        words, strides = words[None], [1]
    # For one large sum, XLA's CPU backend first writes all hashes to memory, which takes ten times
    # as long (measured). XLA fuses the sum of several pieces, which is as small as one piece.
    pieces = min(_MAX_PIECES, max(1, words.size // _PIECE))
    longest = int(np.argmax(words.shape))
    axis = next((a for a, size in enumerate(words.shape) if size >= pieces), longest)
    length = max(1, words.shape[axis] // pieces)
    ends = [min((n + 1) * length, words.shape[axis]) for n in range(pieces)]

    def hashes(first: int, end: int) -> jax.Array:
        piece = jax.lax.slice_in_dim(words, first, end, axis=axis).astype(jnp.uint32)
        index = jnp.full(piece.shape, offset + np.uint32(first * strides[axis] & 0xFFFFFFFF))
        for a in range(piece.ndim):
            along = jax.lax.broadcasted_iota(jnp.uint32, piece.shape, a)
            index += along * np.uint32(strides[a] & 0xFFFFFFFF)
        return jnp.asarray(hash_u32(piece ^ index * _ODD))

    total = hashes(0, ends[0])
    for first, end in itertools.pairwise(ends):
        if end - first == length:
            total += hashes(first, end)
    result = total.sum(dtype=jnp.uint32)
    if ends[-1] < words.shape[axis]:
        result += hashes(ends[-1], words.shape[axis]).sum(dtype=jnp.uint32)
    return result


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]

"""Static plan of one `fused` attention call, and functions that the `fused` kernels share."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bert_jax.model.dropout import keep_at

LANES = 128
SHORT_LENGTH = 512
"""Longest row whose kernel is unrolled. For longer rows, loops are as fast and compile faster."""
MAX_LENGTH = 8192
"""Longest row for which VMEM holds one head and its gradients."""
LOG2_E = math.log2(math.e)
SCORES_PER_CHUNK = 512 * 512
"""Number of scores held at a time: 1 MiB in float32; backward holds about four such arrays."""
NT = (((1,), (1,)), ((), ()))  # a @ b.T, for `lax.dot_general`
NN = (((1,), (0,)), ((), ()))  # a @ b


class Plan(NamedTuple):
    """Sizes of one kernel call, and its division into chunks of queries and blocks of keys."""

    rows: int  # B
    queries: int  # L
    keys: int  # S
    num_heads: int  # H
    head_dim: int  # K
    dropout_rate: float
    window: int | None
    rotates: bool = False
    """Whether the kernel itself rotates queries and keys; for long rows only."""

    @property
    def is_long(self) -> bool:
        """Whether the kernel loops over chunks and blocks instead of unrolling them."""
        return max(self.queries, self.keys) > SHORT_LENGTH

    @property
    def is_framed(self) -> bool:
        """Whether a chunk of queries in a long row is compared only with the keys in its window.

        Keys and values are then copied into a longer array, the frame. There, the first key that a
        chunk sees has the index of the chunk's first query in the row, a multiple of `LANES`.
        """
        reach = up_to_lanes(LANES + 2 * (self.window or 0))
        return self.is_long and self.window is not None and reach < self.keys

    @property
    def chunk(self) -> int:
        """Number of queries that are computed together."""
        narrow = self.is_framed if self.is_long else self.window is not None
        if narrow:  # so that few scores outside the window are computed
            return LANES
        return largest(self.queries, SCORES_PER_CHUNK // (512 if self.is_long else self.keys))

    @property
    def block(self) -> int:
        """Number of keys per block in a long row. In a frame, one block has all keys of a chunk."""
        if self.is_framed:
            return up_to_lanes(self.chunk + 2 * self.front)
        return largest(self.keys, SCORES_PER_CHUNK // self.chunk)

    @property
    def blocks(self) -> int:
        """Number of blocks of keys with which each chunk of a long row is compared."""
        return 1 if self.is_framed else self.keys // self.block

    @property
    def piece(self) -> int:
        """Number of keys of a long row that are rotated, or copied into a frame, at a time."""
        return largest(self.keys, SCORES_PER_CHUNK // 512)

    @property
    def front(self) -> int:
        """Number of empty positions before the first key in a frame."""
        return (self.window or 0) if self.is_framed else 0

    @property
    def frame(self) -> int:
        """Length of the array with a long row's keys, including empty positions of a frame."""
        if not self.is_framed:
            return self.keys
        around = self.front // LANES * LANES + LANES
        return max(self.queries - self.chunk + self.block, self.keys + around)

    @property
    def heads(self) -> int:
        """Number of heads per program: 1 for a long row, else limited by the number of scores."""
        limit = 1 if self.is_long else max(1, 2 * SCORES_PER_CHUNK // self.scores)
        divisors = (n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
        return max(n for n in divisors if n <= limit)

    @property
    def scores(self) -> int:
        """Number of scores computed for one row and head."""
        if self.is_long:
            return self.queries * self.blocks * self.block
        sizes = (range(*self.reach(start)) for start in range(0, self.queries, self.chunk))
        return self.chunk * sum(map(len, sizes))

    def reach(self, start: int) -> tuple[int, int]:
        """Return the range (first, end) of keys that a short row's chunk at `start` may see."""
        if self.window is None:
            return 0, self.keys
        last = start + self.chunk + self.window
        first = min(max(0, start - self.window), self.keys - LANES)
        return first // LANES * LANES, min(self.keys, -(-last // LANES) * LANES)

    def head(self, ref, head: int, start: int, size: int):
        """Read positions `start` to `start + size` of one of the program's heads: (K, size)."""
        return ref[0, head * self.head_dim : (head + 1) * self.head_dim, start : start + size]


def up_to_lanes(length: int) -> int:
    """Round a length up to a multiple of `LANES`."""
    return -(-length // LANES) * LANES


def largest(length: int, limit: int) -> int:
    """Return the largest multiple of `LANES`, up to the limit, that divides a length."""
    limit = max(LANES, limit)
    return max(n for n in range(LANES, length + 1, LANES) if length % n == 0 and n <= limit)


def visible_keys(plan: Plan, q_ids, kv_ids, query, key):
    """Return the bool mask (keys, queries) of the keys that each query sees in every head.

    The segment ids `q_ids` (1, queries) begin at position `query`, `kv_ids` (1, keys) at `key`.
    """
    visible = same_segment(q_ids, kv_ids)
    if plan.window is None:
        return visible
    return visible & is_near(plan.window, visible.shape, key - query)


def same_segment(q_ids, kv_ids):
    """Return the bool mask (keys, queries) of the keys in each query's segment."""
    return jnp.broadcast_to(kv_ids, (LANES, kv_ids.shape[1])).T[:, :1] == q_ids


def is_near(window: int, shape: tuple[int, int], offset):
    """Return the mask (keys, queries) of keys in `window`; `offset` is first key - first query."""
    keys, queries = (jax.lax.broadcasted_iota(jnp.int32, shape, n) for n in (0, 1))
    return jnp.abs(keys + offset - queries) <= window


def kept(plan: Plan, words_ref, row, head, query, key, shape: tuple[int, int]):
    """Return a head's dropout mask (keys, queries) from `key` and `query` on; true means kept."""
    keys, queries = (jax.lax.broadcasted_iota(jnp.int32, dims, axis) for axis, dims in (
        (0, (shape[0], 1)), (1, (1, shape[1]))
    ))  # fmt: skip
    keys, queries = ((x + n).astype(jnp.uint32) for x, n in ((keys, key), (queries, query)))
    row, head = words_ref[2 + plan.num_heads + row], words_ref[2 + head]
    return keep_at(plan.dropout_rate, words_ref[0], words_ref[1], row, head, queries, keys)


def product(a, b, dimensions):
    """Return a matrix product with a float32 result."""
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)

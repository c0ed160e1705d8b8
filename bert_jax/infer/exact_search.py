"""Exact nearest-neighbour search by inner product, computed in blocks on all local devices."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int, Int64

from bert_jax.infer.predictor import check_count

BLOCK = 1 << 14
"""Number of documents that a device holds at a time."""
QUERIES = 256
"""Number of queries that are compared with a block at a time. Their scores take 16 MiB."""


def top_k(
    queries: Float[np.ndarray, "Q D"],
    documents: Float[np.ndarray, "N D"],
    k: int,
) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
    """Find, for each query, the documents with the largest inner products.

    Returns the inner products in float32, largest first, and the indices of the documents. K is the
    smaller of k and N. Documents with equal products are in the order of their indices.

    The documents are read in blocks, of which two are on the devices at most. The rows of a block
    are divided among the devices, and the best documents of each are merged with the best so far.
    Raise a UserError if `k` is below 1.
    """
    check_count("k", k)
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("documents",))
    rows, whole = NamedSharding(mesh, P("documents")), NamedSharding(mesh, P())
    size = min(QUERIES, 1 << max(len(queries) - 1, 0).bit_length())
    parts: list[Array] = []
    best: list[tuple[Array, Array]] = []
    for at in range(0, len(queries), size):
        part = _padded(queries[at : at + size], size)
        parts.append(jax.device_put(part, whole))
        empty = np.full((size, k), -np.inf, np.float32), np.full((size, k), -1, np.int32)
        best.append(jax.device_put(empty, whole))
    step = BLOCK * mesh.size
    for at in range(0, len(documents), step):
        block = documents[at : at + step]
        each = mesh.size << max(-(-len(block) // mesh.size) - 1, 0).bit_length()
        on_devices = jax.device_put(_padded(block, each), rows)
        limits = np.int32(at), np.int32(len(block))
        jax.block_until_ready(best)  # frees the previous block
        merge = _merge(mesh, k)
        best = [
            merge(part, on_devices, *limits, *found)
            for part, found in zip(parts, best, strict=True)
        ]
    k = min(k, len(documents))
    if not best:
        return np.zeros((0, k), np.float32), np.zeros((0, k), np.int64)
    scores, indices = map(np.concatenate, zip(*jax.device_get(best), strict=True))
    kept = np.s_[: len(queries), :k]
    return scores[kept], indices[kept].astype(np.int64)


def _padded(vectors: np.ndarray, rows: int) -> np.ndarray:
    missing = rows - len(vectors)
    return np.pad(np.asarray(vectors, np.float32), ((0, missing), (0, 0)))


@cache
def _merge(mesh: jax.sharding.Mesh, k: int) -> Callable[..., tuple[Array, Array]]:
    """Return a compiled function that searches a block and merges the results with the best so far.

    Ties stay in document order: blocks come in order, and `jax.lax.top_k` keeps the order of ties.
    """

    def own(
        queries: Float[Array, "q D"], block: Float[Array, "n D"], first: Int[Array, ""],
        count: Int[Array, ""],
    ) -> tuple[Float[Array, "q K"], Int[Array, "q K"]]:  # fmt: skip
        begin = jax.lax.axis_index("documents") * len(block)
        scores = jnp.matmul(queries, block.T, precision="highest")
        there = begin + jnp.arange(len(block)) < count
        found, places = jax.lax.top_k(jnp.where(there, scores, -jnp.inf), min(k, len(block)))
        return found, (first + begin + places).astype(jnp.int32)

    search = partial(jax.shard_map, mesh=mesh, out_specs=P(None, "documents"))(
        own, in_specs=(P(), P("documents"), P(), P())
    )

    @partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def merge(
        queries: Array, block: Array, first: Array, count: Array, scores: Array, indices: Array
    ) -> tuple[Array, Array]:
        found, places = search(queries, block, first, count)
        scores = jnp.concatenate([scores, found], axis=1)
        indices = jnp.concatenate([indices, places], axis=1)
        best, order = jax.lax.top_k(scores, k)
        return best, jnp.take_along_axis(indices, order, axis=1)

    return merge

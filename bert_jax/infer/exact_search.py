"""Exact nearest-neighbour search by inner product, computed in blocks on one device."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int64

from bert_jax.infer.predictor import check_count

BLOCK = 1 << 14
"""Number of documents that the device holds at a time."""
QUERIES = 256
"""Number of queries that are compared with a block at a time. The scores take 16 MiB."""


def top_k(
    queries: Float[np.ndarray, "Q D"], documents: Float[np.ndarray, "N D"], k: int
) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
    """Find, for each query, the documents with the largest inner products.

    Returns the inner products in float32, largest first, and the indices of the documents. K is the
    smaller of k and N. Documents with equal products are in the order of their indices. The best
    documents of each block are merged with the best so far. Raise a UserError if `k` is below 1.
    """
    check_count("k", k)
    k = min(k, len(documents))
    size = min(QUERIES, 1 << max(len(queries) - 1, 0).bit_length())
    parts = [_padded(queries[at : at + size], size) for at in range(0, len(queries), size)]
    best = [(jnp.full((size, k), -jnp.inf), jnp.full((size, k), -1)) for _ in parts]
    for at in range(0, len(documents), BLOCK):
        block = documents[at : at + BLOCK]
        rows = _padded(block, 1 << (len(block) - 1).bit_length())
        limits = np.int32(at), np.int32(len(block))
        jax.block_until_ready(best)  # frees the previous block
        best = [
            _merged(part, rows, *limits, *found) for part, found in zip(parts, best, strict=True)
        ]
    if not best:
        return np.zeros((0, k), np.float32), np.zeros((0, k), np.int64)
    scores, indices = map(np.concatenate, zip(*jax.device_get(best), strict=True))
    kept = np.s_[: len(queries), :k]
    return scores[kept], indices[kept].astype(np.int64)


def _padded(vectors: np.ndarray, rows: int) -> jax.Array:
    return jnp.asarray(np.pad(np.asarray(vectors, np.float32), ((0, rows - len(vectors)), (0, 0))))


@jax.jit
def _merged(
    queries: Float[Array, "q D"], block: Float[Array, "n D"], first: Int[Array, ""],
    count: Int[Array, ""], scores: Float[Array, "q K"], indices: Int[Array, "q K"],
) -> tuple[Float[Array, "q K"], Int[Array, "q K"]]:  # fmt: skip
    """Search a block, and merge the results with the best so far.

    Ties stay in document order: blocks come in order, and `jax.lax.top_k` keeps the order of ties.
    """
    k = scores.shape[1]
    products = jnp.matmul(queries, block.T, precision="highest")
    there = jnp.arange(len(block)) < count
    found, places = jax.lax.top_k(jnp.where(there, products, -jnp.inf), min(k, len(block)))
    scores = jnp.concatenate([scores, found], axis=1)
    indices = jnp.concatenate([indices, (first + places).astype(indices.dtype)], axis=1)
    best, order = jax.lax.top_k(scores, k)
    return best, jnp.take_along_axis(indices, order, axis=1)

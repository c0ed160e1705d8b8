"""Disentangled attention: scores of contents against relative positions.

The score of query i and key j is the sum of up to three products over sqrt(terms K): contents
q_i k_j, content to position (c2p) q_i a_r, and position to content (p2c) b_r k_j. Here a_r and b_r
are the key and the query computed from the embedding of relative position r, the bucket of i - j.

Sources: He et al. 2021 (DeBERTa), section 3.1; buckets and shared maps as in its version 2 (He et
al. 2023, DeBERTaV3, section 3).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream, Number, Stream, dropout
from bert_jax.model.layers import (
    Affine,
    AxisSizes,
    Norm,
    compute_dtype,
    einsum_float32,
    parameter,
    truncated_normal,
)

_SITE = 1 << 20
"""Offset from a layer's first dropout site to the dropout site of its relative positions."""


class Relative(NamedTuple):
    """Keys and queries of relative positions in one layer; None for a term that the layer lacks."""

    keys: Float[Array, "R H K"] | None
    queries: Float[Array, "R H K"] | None
    rows: Integer[np.ndarray, " M"]
    """Row of the table for each distance from 1 - N to N - 1, where N is `num_positions`."""

    @property
    def terms(self) -> int:
        """Number of products in a score, including the product of contents."""
        return 1 + (self.keys is not None) + (self.queries is not None)


def span_of(config: ModelConfig) -> int:
    """Return the number of relative positions per direction; the table has twice as many rows."""
    return config.relative_buckets or config.relative_distance or config.num_positions


def rows_of(config: ModelConfig) -> Integer[np.ndarray, " M"]:
    """Return the row of the table for each distance, query minus key, from 1 - N to N - 1.

    With buckets, distances up to half the number of buckets have a row each. Farther distances
    share rows: the row is linear in the logarithm of the distance.
    """
    span, middle = span_of(config), config.relative_buckets // 2
    distance = np.arange(1 - config.num_positions, config.num_positions)
    far = np.abs(distance) > middle
    if middle and far.any():
        ratio = np.log(np.abs(distance[far]) / middle)
        ratio /= np.log(((config.relative_distance or config.num_positions) - 1) / middle)
        bucket = np.ceil(ratio * (middle - 1)).astype(int) + middle
        distance[far] = np.sign(distance[far]) * bucket
    return np.clip(distance + span, 0, 2 * span - 1).astype(np.int32)


class RelativePositions(nnx.Module):
    """Table of the embeddings of relative positions, which all layers share, and its norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        shape = 2 * span_of(config), config.hidden_dim
        table = truncated_normal(rngs.params(), shape, config.init_std)
        self.table = parameter(table, "length", "embed")
        if config.relative_norm:
            self.norm = Norm(config)

    def __call__(self) -> Float[Array, "R D"]:
        """Return the embeddings, in the compute type."""
        table = self.norm(self.table[...]) if self.config.relative_norm else self.table[...]
        return table.astype(compute_dtype(self.config))


class RelativeMaps(nnx.Module):
    """Maps of distance embeddings to keys and queries; empty if the maps of contents are shared."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        embed: AxisSizes = {"embed": config.hidden_dim}
        heads: AxisSizes = {"heads": config.num_heads, "head_dim": config.head_dim}
        for name, term in (("key", "c2p"), ("query", "p2c")):
            if term in config.relative_terms and not config.relative_shared:
                setattr(self, name, Affine(config, embed, heads, rngs))

    def __call__(
        self, table: Float[Array, "R D"], key: Affine, query: Affine, stream: Stream, site: Number
    ) -> Relative:
        """Make keys and queries; `key` and `query` are the maps of contents in the layer."""
        config = self.config
        if stream is not None:  # all rows of a batch share the table, so they share its mask
            stream = DropoutStream(stream.seed, jnp.zeros(1, jnp.uint32))
        table = dropout(table[None], config.hidden_dropout_rate, stream, site + _SITE)[0]
        key, query = getattr(self, "key", key), getattr(self, "query", query)
        return Relative(
            key(table) if "c2p" in config.relative_terms else None,
            query(table) if "p2c" in config.relative_terms else None,
            rows_of(config),
        )


def relative_scores(
    q: Float[Array, "B H L K"], k: Float[Array, "B H S K"], relative: Relative,
    places: Integer[Array, "B L"] | None = None,
) -> Float[Array, "B H L S"]:  # fmt: skip
    """Compute the products with relative positions, in float32, not divided by sqrt(terms K).

    `places` are the positions of the queries; None means 0, 1, 2, ..., and then L = S. No array
    has the shape (L, S, K): each content vector is multiplied with the vectors of all 2 L - 1
    distances, and `_moved` then shifts the products of row i by i.
    """
    length, middle = k.shape[2], len(relative.rows) // 2
    found = []
    for x, vectors, sign in ((q, relative.keys, -1), (k, relative.queries, 1)):
        if vectors is None:
            continue
        if places is None:
            steps = jnp.arange(1 - length, length)
            each = vectors[jnp.asarray(relative.rows)[middle + sign * steps]]
            y = _moved(einsum_float32("BHLK,MHK->BHLM", x, each))
        else:
            distances = places[:, None, :, None] - jnp.arange(length)
            rows = jnp.asarray(relative.rows)[middle + distances]
            y = einsum_float32("BHLK,RHK->BHLR", x, vectors)
            rows = rows if sign < 0 else rows.swapaxes(2, 3)
            y = jnp.take_along_axis(y, rows, axis=-1)
        found.append(y if sign < 0 else y.swapaxes(2, 3))
    return sum(found[1:], found[0])


def _moved(y: Float[Array, "B H L M"]) -> Float[Array, "B H L L"]:
    """Shift each row i, so that its entry j - i + L - 1 becomes entry j; M = 2 L - 1."""
    rows, heads, length, width = y.shape
    flat = jnp.pad(y, ((0, 0),) * 3 + ((0, 1),)).reshape(rows, heads, length * (width + 1))
    flat = flat[..., length - 1 : length - 1 + length * width]
    return flat.reshape(rows, heads, length, width)[..., :length]


def scale_of(width: int, relative: Relative | None) -> float:
    """Return the factor of attention scores: 1 / sqrt(width x number of terms in a score)."""
    return 1 / math.sqrt(width * (1 if relative is None else relative.terms))

"""Masked-LM losses apart by position in the document, of rows with masking rates of their own."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bert_jax.model.heads import encode, vocabulary_projection
from bert_jax.model.layout import Layout
from bert_jax.model.rotation import restarting_positions
from bert_jax.objectives.masked_lm import MaskedLM, projected_cross_entropy
from bert_jax.objectives.objective import Batch, Forward


@dataclass(frozen=True)
class MaskedLMByPosition(MaskedLM):
    """Masked LM for evaluation, which tells where in their segments the masked tokens are.

    Batches have one more array, `masking_rates`: (B,) float32, at most `masking.rate`. A program
    thus serves all rates. A token that is masked at one rate is masked at higher ones, too; with
    `masking.whole_word` it need not be.
    """

    edges: tuple[int, ...] = (0,)
    """Borders of K buckets, ascending: bucket k has the positions `edges[k]` to `edges[k + 1]` - 1.
    A position is the number of tokens before it in its segment, [CLS] included."""

    def forward(
        self, params: Any, rows: Batch, seed: Array | None, layout: Layout | None
    ) -> Forward:
        """Return losses (nats), right answers and counts of each row and bucket, (B, K) each.

        Sums over rows are left to the host, which adds in float64, in one order on any mesh.
        """
        states = encode(self.model, params, *self.inputs(rows, seed), layout)
        projection = vocabulary_projection(self.model, params, states, rows["positions"])
        loss, correct = projected_cross_entropy(projection, rows["labels"], layout)
        position = jnp.take_along_axis(
            restarting_positions(rows["segment_ids"]), rows["positions"], axis=1
        )[..., None]
        edges = np.array(self.edges)
        inside = (position >= edges[:-1]) & (position < edges[1:])
        weights = jnp.where(inside, rows["weights"][..., None], 0.0)
        values = {"loss": loss, "correct": correct, "count": jnp.ones_like(loss)}
        return Forward({}, {n: jnp.sum(v[..., None] * weights, 1) for n, v in values.items()})


def position_buckets(length: int, first: int = 128) -> tuple[int, ...]:
    """Return the borders 0, 128, 256, 512, ... of buckets of positions in rows of `length`."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(2 * edges[-1] or first, length))
    return tuple(edges)

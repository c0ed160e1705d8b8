"""Loss of dependency arcs, and what a parser reads of their scores."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from bert_jax.model.heads import PADDED_LOGIT
from bert_jax.objectives.losses import cross_entropy


def arc_losses(
    logits: Float[Array, "B L L C"],
    labels: Integer[Array, "B L"],
    segment_ids: Integer[Array, "B L"],
    *_: Any,
) -> Float[Array, "B L"]:
    """Compute for each position the cross entropy of its head and of the relation to that head.

    A label is the position of the head times the number of relations, plus the number of the
    relation. All positions but padding may be heads; a label below 0 is not counted.
    """
    heads, relations = jnp.divmod(jnp.maximum(labels, 0), logits.shape[-1] - 1)
    arcs = jnp.where(segment_ids[:, None, :] > 0, logits[..., 0], PADDED_LOGIT)
    at = heads[:, :, None, None]
    of_head = jnp.take_along_axis(logits[..., 1:], at, axis=2)[:, :, 0]
    return cross_entropy(arcs, heads)[0] + cross_entropy(of_head, relations)[0]


def arcs_and_best_relations(logits: Float[Array, "B L L C"]) -> Float[Array, "B L L 2"]:
    """Return the scores of arcs, and of each arc the number of its best relation."""
    best = jnp.argmax(logits[..., 1:], axis=-1).astype(logits.dtype)
    return jnp.stack([logits[..., 0], best], axis=-1)

"""The loss of each objective, as a sum and a count that add up over rows and devices."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bert_jax.model.heads import PADDED_LOGIT
from bert_jax.objectives.losses import cross_entropy
from bert_jax.tasks.task import Objective


def num_labelled(
    objective: Objective, labels: Array, weights: Float[Array, " B"]
) -> Float[Array, ""]:
    """What the loss is a mean over: labelled tokens of the objective `tags`, else rows."""
    if objective == "tags":
        return jnp.sum((labels >= 0) * weights[:, None])
    return jnp.sum(weights)


def loss_sum(
    objective: Objective,
    logits: Array,
    labels: Array,
    weights: Float[Array, " B"],
    segment_ids: Int[Array, "B L"],
) -> Float[Array, ""]:
    """Sum of the losses of rows, or of labelled tokens; in nats, of scores squared errors.

    They are the losses of Transformers' `BertForSequenceClassification` (its three problem types),
    `BertForTokenClassification` and `BertForQuestionAnswering`, but for one point: padding can be
    no answer here, so that the loss of a row does not depend on how far it is padded.

    Args:
        objective: What is predicted.
        logits: (B, C); of `tags` and `span` (B, L, C).
        labels: `class` (B,) numbers; `classes` (B, C) 0 and 1; `score` (B,); `tags` (B, L) numbers,
            below 0 where there is no label; `span` (B, 2) positions of the first and last token.
        weights: 0 for rows that do not count.
        segment_ids: 0 is padding.
    """
    if objective == "class":
        return jnp.sum(cross_entropy(logits, labels)[0] * weights)
    if objective == "classes":
        # log(1 + e^x) - x y: the cross entropy of a sigmoid, meant over the classes.
        each = jax.nn.softplus(logits) - logits * labels
        return jnp.sum(jnp.mean(each, axis=-1) * weights)
    if objective == "score":
        return jnp.sum(jnp.square(logits[:, 0] - labels) * weights)
    if objective == "tags":
        each, _ = cross_entropy(logits, jnp.maximum(labels, 0))
        return jnp.sum(each * (labels >= 0) * weights[:, None])
    places = jnp.where(segment_ids[..., None] > 0, logits, PADDED_LOGIT)
    each, _ = cross_entropy(jnp.moveaxis(places, -1, 1), labels)  # (B, 2, L) and (B, 2)
    return jnp.sum(jnp.mean(each, axis=-1) * weights)

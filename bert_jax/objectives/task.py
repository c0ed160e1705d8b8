"""Fine-tuning: a head on a pretrained encoder, trained on labelled rows.

A kind of head is an entry of `HEADS`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from bert_jax.model.flops import task_flops
from bert_jax.model.heads import PADDED_LOGIT, logical_axes
from bert_jax.model.layout import Layout
from bert_jax.model.lora import LoraConfig, init_lora, lora_axes, merged
from bert_jax.model.task_heads import TaskHeadConfig, TaskModel, apply_task, init_task_params
from bert_jax.objectives.losses import cross_entropy, ratio
from bert_jax.objectives.objective import Batch, Forward, Metric, Objective, Scalars, Shown
from bert_jax.tasks.task import HeadKind


@dataclass(frozen=True)
class Head:
    """A kind of prediction: its network, its loss, and which labels count."""

    network: Literal["classification", "tagging", "span"]
    """Network of the head (see `model.task_heads`)."""
    losses: Callable[[Array, Array, Array], Array]
    """Loss of each row (B,), or each token (B, L), from logits, labels and segment ids."""
    unit: str = "nats per row"
    """Unit of the loss."""
    per_token: bool = False
    """Whether each token has a label; a label below 0 pads."""

    def counted(self, labels: Array, weights: Float[Array, " B"]) -> Float[Array, "*counted"]:
        """Return the weight of each loss: 0 for rows that fill the batch, and for padding."""
        return (labels >= 0) * weights[:, None] if self.per_token else weights


def _single_label_losses(
    logits: Float[Array, "B C"], labels: Integer[Array, " B"], _: Array
) -> Array:
    return cross_entropy(logits, labels)[0]


def _multi_label_losses(
    logits: Float[Array, "B C"], labels: Float[Array, "B C"], _: Array
) -> Array:
    # log(1 + e^x) - x y: the cross entropy of a sigmoid, meant over the classes.
    return jnp.mean(jax.nn.softplus(logits) - logits * labels, axis=-1)


def _regression_losses(logits: Float[Array, "B 1"], labels: Float[Array, " B"], _: Array) -> Array:
    return jnp.square(logits[:, 0] - labels)


def _tag_losses(logits: Float[Array, "B L C"], labels: Integer[Array, "B L"], _: Array) -> Array:
    return cross_entropy(logits, jnp.maximum(labels, 0))[0]


def _span_losses(
    logits: Float[Array, "B L 2"], labels: Integer[Array, "B 2"], segment_ids: Integer[Array, "B L"]
) -> Array:
    # Padding is no answer, so that the loss of a row does not depend on the row's padded length.
    places = jnp.where(segment_ids[..., None] > 0, logits, PADDED_LOGIT)
    each, _ = cross_entropy(jnp.moveaxis(places, -1, 1), labels)  # (B, 2, L) and (B, 2)
    return jnp.mean(each, axis=-1)


HEADS: dict[HeadKind, Head] = {
    "single_label": Head("classification", _single_label_losses),
    "multi_label": Head("classification", _multi_label_losses),
    "regression": Head("classification", _regression_losses, "squared error"),
    "tags": Head("tagging", _tag_losses, "nats per token", per_token=True),
    "span": Head("span", _span_losses),
}
"""Heads by what they predict. The losses are those of Transformers' classes of the same task, but
for padding, which is no answer of a span here. Adding a head is an entry here."""


@dataclass(frozen=True)
class TaskObjective(Objective):
    """Prediction of the labels of rows, or of their tokens, by a head on the encoder.

    Batches are those of `tasks.rows.Batch`. Outputs are logits in float32: (B, C), of tags and
    spans (B, L, C).
    """

    config: TaskHeadConfig
    """Sizes of the head."""
    kind: HeadKind
    """Entry of `HEADS`."""
    lora: LoraConfig = field(default=LoraConfig(), kw_only=True)
    """Low-rank updates, an entry `lora` of the parameters, to which `encoder` is frozen."""

    @property
    def head(self) -> Head:
        """Head of this kind."""
        return HEADS[self.kind]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of the objective; those of the task need all rows (see `tasks.task.Split`)."""
        return (Metric("loss", "loss", "loss", "count", self.head.unit, short="loss"),)

    def init(self, key: Array) -> Any:
        """Make fresh parameters: encoder, head."""
        params = init_task_params(self.model, self.config, key)
        if not self.lora.rank:
            return params
        axes = logical_axes(self.model, TaskModel, self.config)
        return {**params, "lora": init_lora(self.lora, key, params, axes)}

    def axes(self) -> Any:
        """Name the logical axes of each parameter."""
        axes = logical_axes(self.model, TaskModel, self.config)
        return {**axes, "lora": lora_axes(self.lora, axes)} if self.lora.rank else axes

    def counts(self, rows: Batch) -> Scalars:
        """Count the labels."""
        if "labels" not in rows:
            return {"count": jnp.float32(0)}
        return {"count": jnp.sum(self.head.counted(rows["labels"], rows["weights"]))}

    def forward(
        self, params: Any, rows: Batch, seed: Array | None, layout: Layout | None
    ) -> Forward:
        """Compute logits, and the sum of losses where rows have labels."""
        params = merged(self.lora, params) if self.lora.rank else params
        logits = apply_task(self.model, self.config, params, *self.inputs(rows, seed), layout)
        return self.judged(logits, rows)

    def judged(self, logits: Array, rows: Batch) -> Forward:
        """Compare logits with the labels, where rows have some."""
        if "labels" not in rows:
            return Forward({"loss": jnp.float32(0), "count": jnp.float32(0)}, logits)
        counted = self.head.counted(rows["labels"], rows["weights"])
        losses = self.head.losses(logits, rows["labels"], rows["segment_ids"])
        return Forward({"loss": jnp.sum(losses * counted), "count": jnp.sum(counted)}, logits)

    def loss(self, sums: Scalars, counts: Scalars) -> Float[Array, ""]:
        """Return the mean loss of the labels; 0 in a batch without any."""
        return ratio(sums["loss"], counts["count"])

    def has_dropout(self) -> bool:
        """Say whether training draws random numbers for dropout."""
        return bool(self.config.dropout_rate) or super().has_dropout()

    def flops(self, rows: Batch) -> int:
        """Count the operations of one row in a training step (see `model.flops`)."""
        length = rows["tokens"].shape[-1]
        return task_flops(self.model, length, self.head.network, self.config.num_labels)

    def shown(self, rows: Batch) -> Shown:
        """Show the tokens; those with a label of their own are predicted."""
        tokens = jnp.asarray(rows["tokens"])
        predicted = jnp.zeros(tokens.shape, bool)
        if self.head.per_token and "labels" in rows:
            predicted = jnp.asarray(rows["labels"]) >= 0
        return Shown(tokens, predicted)

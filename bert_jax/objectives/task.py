"""Fine-tuning: a head (an entry of `HEADS`) on a pretrained encoder, trained on labelled rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from bert_jax.model.dropout import Stream
from bert_jax.model.flops import task_flops
from bert_jax.model.heads import PADDED_LOGIT, Build
from bert_jax.model.task_heads import HeadNetwork, TaskHeadConfig, TaskModel, head_logits
from bert_jax.objectives.losses import binary_divergences, cross_entropy, divergences, list_losses
from bert_jax.objectives.objective import Adapted, Batch, Forward, Metric, Scalars, Teachable
from bert_jax.tasks.retrieval.metrics import ListLoss
from bert_jax.tasks.task import HeadKind


@dataclass(frozen=True)
class ClassLoss:
    """Options of the loss for rare classes, uncertain labels (`tasks.skew.SkewConfig`) or lists."""

    weights: tuple[float, ...] = ()
    """Weight of each class (in multi-label tasks, of its positive labels). Empty means 1."""
    focal_gamma: float = 0.0
    """Exponent gamma of the focal loss (see `focal`). With 0, the loss is cross entropy."""
    label_smoothing: float = 0.0
    """Share of a label's probability that is spread over all classes."""
    lists: ListLoss = "contrast"
    """Loss of a reranker (see `list_losses`)."""

    def of(self, labels: Integer[Array, "*rows"]) -> Float[Array, "*rows"]:
        """Return the class weight of each label."""
        return jnp.array(self.weights, jnp.float32)[labels]

    def focal(self, losses: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
        """Lower the losses of easy labels: (1 - p) ** gamma * -log p (Lin et al. 2017)."""
        if not self.focal_gamma:
            return losses
        # The lower limit keeps the gradient finite if p is 1 and gamma is below 1.
        wrong = jnp.maximum(-jnp.expm1(-losses), 1e-12)
        return wrong**self.focal_gamma * losses


_PLAIN = ClassLoss()


@dataclass(frozen=True)
class Head:
    """A kind of prediction: a network, a loss and a rule for counting labels."""

    network: HeadNetwork
    """Network of the head (see `model.task_heads`)."""
    losses: Callable[[Array, Array, Array, ClassLoss], Array]
    """Function from (logits, labels, segment ids, options) to the losses of rows or tokens."""
    unit: str = "nats per row"
    """Unit of the loss."""
    per_token: bool = False
    """Whether each token has a label. Labels below 0 are padding."""
    one_class: bool = False
    """Whether labels are class indices. If so, the denominator of the loss sums class weights."""
    outputs: Callable[[Array], Array] = lambda logits: logits
    """Function from the logits to the model's outputs, which are then decoded to predictions."""

    def counted(self, labels: Array, weights: Float[Array, " B"]) -> Float[Array, "*counted"]:
        """Return the weight of each loss: 0 for padding tokens and for rows that pad the batch."""
        return (labels >= 0) * weights[:, None] if self.per_token else weights

    def count(
        self, labels: Array, counted: Float[Array, "*counted"], options: ClassLoss
    ) -> Float[Array, ""]:
        """Return the denominator of the mean loss. `counted` has the weight of each label."""
        if self.one_class and options.weights:
            counted = counted * options.of(jnp.maximum(labels, 0))
        return jnp.sum(counted)


def _class_losses(
    logits: Float[Array, "*rows C"], labels: Array, _: Array, options: ClassLoss = _PLAIN
) -> Array:
    """Return weighted losses like torch's CrossEntropyLoss. `Head.counted` drops labels below 0."""
    labels = jnp.maximum(labels, 0)
    if not options.label_smoothing:
        losses = options.focal(cross_entropy(logits, labels)[0])
        return losses * options.of(labels) if options.weights else losses
    each = -jax.nn.log_softmax(logits.astype(jnp.float32))
    if options.weights:
        each *= jnp.array(options.weights, jnp.float32)
    own = jnp.take_along_axis(each, labels[..., None], axis=-1)[..., 0]
    spread = options.label_smoothing
    return (1 - spread) * own + spread * jnp.mean(each, axis=-1)


def _multi_label_losses(
    logits: Float[Array, "B C"], labels: Float[Array, "B C"], _: Array, options: ClassLoss = _PLAIN
) -> Array:
    """Return the binary cross entropy of each row, averaged over the classes."""
    if options == _PLAIN:  # log(1 + e^x) - x y
        return jnp.mean(jax.nn.softplus(logits) - logits * labels, axis=-1)
    labels = labels + options.label_smoothing * (0.5 - labels)
    yes, no = (options.focal(jax.nn.softplus(sign * logits)) for sign in (-1, 1))
    if options.weights:
        yes *= jnp.array(options.weights, jnp.float32)
    return jnp.mean(labels * yes + (1 - labels) * no, axis=-1)


def _span_losses(
    logits: Float[Array, "B L 2"], labels: Integer[Array, "B 2"], segment_ids: Array, *_: Any
) -> Array:
    # Exclude padding as an answer, so that the loss does not depend on the length of the padding.
    places = jnp.where(segment_ids[..., None] > 0, logits, PADDED_LOGIT)
    each = cross_entropy(jnp.moveaxis(places, -1, 1), labels)[0]  # of (B, 2, L) and (B, 2)
    return jnp.mean(each, axis=-1)


def _arc_losses(
    logits: Float[Array, "B L L C"], labels: Integer[Array, "B L"], segment_ids: Array, *_: Any
) -> Float[Array, "B L"]:
    """Return for each word the sum of two cross entropies: of its syntactic head and its relation.

    A label is head position * number of relations + relation index. The softmax over heads
    excludes padding tokens. `Head.counted` gives labels below 0 the weight 0.
    """
    heads, relations = jnp.divmod(jnp.maximum(labels, 0), logits.shape[-1] - 1)
    arcs = jnp.where(segment_ids[:, None, :] > 0, logits[..., 0], PADDED_LOGIT)
    of_head = jnp.take_along_axis(logits[..., 1:], heads[:, :, None, None], axis=2)[:, :, 0]
    return cross_entropy(arcs, heads)[0] + cross_entropy(of_head, relations)[0]


def _arcs_and_best_relations(logits: Float[Array, "B L L C"]) -> Float[Array, "B L L 2"]:
    """Return the score of each arc and the index of its best relation."""
    best = jnp.argmax(logits[..., 1:], axis=-1).astype(logits.dtype)
    return jnp.stack([logits[..., 0], best], axis=-1)


HEADS: dict[HeadKind, Head] = {
    "single_label": Head("classification", _class_losses, one_class=True),
    "multi_label": Head("classification", _multi_label_losses),
    "regression": Head(
        "classification", lambda x, labels, *_: jnp.square(x[:, 0] - labels), "squared error"
    ),
    "tags": Head("tagging", _class_losses, "nats per token", per_token=True, one_class=True),
    "span": Head("span", _span_losses),
    "choice": Head(
        "classification",
        lambda x, labels, *_: cross_entropy(x[..., 0], labels)[0],
        outputs=lambda logits: logits[..., 0],
    ),
    "ranking": Head(
        "classification",
        lambda x, wanted, segment_ids, options: list_losses(
            options.lists, x[..., 0], wanted, jnp.any(segment_ids > 0, axis=-1)
        ),
        outputs=lambda logits: logits[..., 0],
    ),
    "arcs": Head(
        "parsing", _arc_losses, "nats per word", per_token=True, outputs=_arcs_and_best_relations
    ),
}
"""Heads by kind of prediction, with the losses of the Transformers class for the same task, except
that the softmax of a span's start and end excludes padding. To add a head, add an entry."""


@dataclass(frozen=True)
class TaskObjective(Adapted, Teachable):
    """Prediction of the labels of rows or tokens by a head on the encoder.

    Batches have the type `tasks.rows.Batch`. Outputs are float32. They are logits of shape (B, C)
    for rows, (B, L, C) for tags and spans, and (B, G) for G choices or documents. For arcs, the
    outputs (B, L, L, 2) are the score of each arc and the index of its best relation.
    """

    config: TaskHeadConfig
    """Kind of the network, number of labels, dropout rate and pooling of the head."""
    kind: HeadKind
    """Entry of `HEADS`."""
    classes: ClassLoss = _PLAIN
    """Options of the loss, for heads with classes."""

    @property
    def head(self) -> Head:
        """Entry of `HEADS` for this kind."""
        return HEADS[self.kind]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics: only the loss. Other metrics need all rows' outputs (see `tasks.task.Split`)."""
        return (Metric("loss", "loss", "loss", "count", self.head.unit, short="loss"),)

    def parts(self) -> tuple[Build, Any]:
        """Return the module class of encoder and head, and the module's settings."""
        return TaskModel, self.config

    def counts(self, rows: Batch) -> Scalars:
        """Count the labels, each with the weight of its class."""
        if "labels" not in rows:
            return {"count": jnp.float32(0)}
        counted = self.head.counted(rows["labels"], rows["weights"])
        return {"count": self.head.count(rows["labels"], counted, self.classes)}

    def finish(
        self, params: Any, states: Array, rows: Batch, stream: Stream
    ) -> tuple[Float[Array, "B ..."], Forward]:
        """Compute logits, and the sum of losses if the rows have labels."""
        *size, length = rows["tokens"].shape
        segments = rows["segment_ids"].reshape(-1, length)
        logits = head_logits(self.model, self.config, params, states, segments, stream)
        if len(size) == 2:  # groups of rows
            logits = logits.reshape(*size, *logits.shape[1:])
        loss = jnp.float32(0)
        if "labels" in rows:
            counted = self.head.counted(rows["labels"], rows["weights"])
            losses = self.head.losses(logits, rows["labels"], rows["segment_ids"], self.classes)
            loss = jnp.sum(losses * counted)
        return logits, Forward({"loss": loss, **self.counts(rows)}, self.head.outputs(logits))

    def soft_losses(
        self, logits: Array, wanted: Array, rows: Batch, temperature: float
    ) -> Float[Array, "*counted"]:
        """Compute losses against the logits of a teacher: (B,) for rows, (B, L) for tags."""
        if self.kind == "regression":  # scores are not logits
            return jnp.square(logits - wanted)[:, 0]
        if self.kind == "multi_label":
            return jnp.mean(binary_divergences(logits, wanted, temperature), axis=-1)
        if self.kind == "span":  # distributions of start and end over all tokens except padding
            real = rows["segment_ids"][..., None] > 0
            logits, wanted = (
                jnp.moveaxis(jnp.where(real, x, PADDED_LOGIT), -1, 1) for x in (logits, wanted)
            )
            return jnp.mean(divergences(logits, wanted, temperature), axis=-1)
        return divergences(logits, wanted, temperature)

    def soft_weights(self, rows: Batch) -> Float[Array, "*counted"]:
        """Return the weight of each labelled row or token."""
        return self.head.counted(rows["labels"], rows["weights"])

    def token_weights(self, rows: Batch) -> Float[Array, "B L"]:
        """Return the weight of each token: the weight of its row, or 0 for padding."""
        return super().token_weights(rows) * rows["weights"][:, None]

    def for_evaluation(self) -> "TaskObjective":
        """Return the objective with a plain loss of classes."""
        return replace(self, classes=ClassLoss(lists=self.classes.lists))

    def has_dropout(self) -> bool:
        """Tell whether training uses dropout, in the model or in the head."""
        return bool(self.config.dropout_rate) or super().has_dropout()

    def flops(self, rows: Batch) -> int:
        """Count the operations of one row in a training step (see `model.flops`)."""
        length = rows["tokens"].shape[-1]
        whole = task_flops(self.model, length, self.head.network, self.config.num_labels)
        return whole - self.spared_flops(length)

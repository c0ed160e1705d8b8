"""Distillation: a student learns from the labels of rows and from a teacher's outputs for the rows.

Sources: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2 (predictions
at a temperature); Jiao et al. 2020, "TinyBERT", section 3.1 (hidden states, a map of layers); Wang
et al. 2021, "MiniLMv2", section 3 (relations of queries, keys and values).

The parameters have the teacher as the entry `teacher`, which training does not change. Teacher and
student read the same rows, so they share a tokenizer. Their widths and depths may differ.
"""

import math
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from bert_jax.config.bounds import Bounded, Fraction, Natural, NonNegative, Positive
from bert_jax.errors import UserError
from bert_jax.model.attention.xla import MASKED_SCORE, visible_keys
from bert_jax.model.config import ModelConfig
from bert_jax.model.flops import TRAIN_OVER_FORWARD
from bert_jax.model.heads import (
    LinearHead,
    encode_layers,
    init_params,
    layer_projections,
    logical_axes,
    with_params,
)
from bert_jax.model.layers import einsum_float32
from bert_jax.model.layout import OnMesh
from bert_jax.objectives.losses import divergences, ratio
from bert_jax.objectives.objective import (
    Batch,
    Forward,
    Metric,
    Objective,
    Scalars,
    Shown,
    Teachable,
)

TEACHER, PROJECTION = "teacher", "projection"
"""Entries of the parameters: the teacher, and the layer from student width to teacher width."""

_SOFT = Metric("soft_loss", "loss against the teacher", "soft_loss", "soft_count", "nats",
               short="soft loss")  # fmt: skip
_HIDDEN = Metric(
    "hidden_loss", "distance of the hidden states from the teacher's", "hidden_loss", "token_count",
    "squared error", short="hidden loss",
)  # fmt: skip
_ATTENTION = Metric(
    "attention_loss", "loss against the teacher's attention", "attention_loss", "token_count",
    "nats per token", short="attention loss",
)  # fmt: skip


@dataclass(frozen=True)
class DistillationConfig(Bounded, section="distil"):
    """Losses that compare a student with a teacher, and the weights of these losses."""

    teacher: str | None = None
    """Directory of the teacher: a run, or a model in Hugging Face's format, with the same tokenizer
    and a head of the same kind. None means no distillation."""
    temperature: Positive = 2.0
    """Temperature by which the logits of both models are divided before they are compared."""
    hard_weight: Fraction = 0.5
    """Weight of the loss against the labels. The loss against the teacher has 1 - hard_weight."""
    hidden_weight: NonNegative = 0.0
    """Factor of the mean squared error between the states of student and teacher, after the
    embeddings and after each layer. 0 means no such loss. If the widths differ, a learned linear
    layer maps student states to the teacher's width."""
    attention_weight: NonNegative = 0.0
    """Factor of the KL divergence between the query, key and value relations (MiniLMv2) of the
    student's last layer and of the corresponding teacher layer. 0 means no such loss."""
    relation_heads: Natural = 0
    """Number of heads of the relations of both models. 0 means model.num_heads."""
    layers: tuple[int, ...] = ()
    """Teacher layer, counted from 1, for each student layer. If empty, layers are evenly spaced."""

    def check_section(self) -> None:
        """Raise a UserError if a field is set although `teacher` is not."""
        if not self.teacher and any(getattr(self, f.name) != f.default for f in fields(self)):
            raise UserError(
                "the section distil is set, but distil.teacher is empty; set "
                "--config.distil.teacher=DIR to the work directory of a run or a model in Hugging "
                "Face's format, or leave the section out"
            )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of the losses against the teacher; empty without a teacher."""
        has = bool(self.teacher), bool(self.hidden_weight), bool(self.attention_weight)
        return tuple(compress((_SOFT, _HIDDEN, _ATTENTION), has))

    def layer_map(self, student: ModelConfig, teacher: ModelConfig) -> tuple[int, ...]:
        """Return the teacher layer, from 1, for each student layer; check the field `layers`."""
        count, most = student.num_layers, teacher.num_layers
        if not self.layers:
            return tuple(-(-n * most // count) for n in range(1, count + 1))
        if len(self.layers) != count or not all(1 <= n <= most for n in self.layers):
            raise UserError(
                f"distil.layers is {self.layers}; expected one teacher layer from 1 to {most} for "
                f"each of the student's {count} layers"
            )
        return self.layers

    def heads_of_relations(self, student: ModelConfig, teacher: ModelConfig) -> int:
        """Return the number of relation heads. If it does not divide a width, raise a UserError."""
        count = self.relation_heads or student.num_heads
        widths = {
            heads * model.head_dim
            for model in (student, teacher)
            for heads in (model.num_heads, model.num_kv_heads or model.num_heads)
        }
        if any(width % count for width in widths):
            raise UserError(
                f"distil.relation_heads is {count}; it must divide all widths of queries and keys "
                f"in the student and the teacher: {', '.join(map(str, sorted(widths)))}"
            )
        return count


@dataclass(frozen=True)
class Distilled(Objective):
    """Objective of a student: its loss against labels, plus losses against a teacher."""

    model: ModelConfig = field(init=False)
    baseline: float | None = field(init=False)
    frozen: frozenset[str] = field(init=False)
    frozen_layers: int = field(init=False)
    student: Teachable
    """Objective of the student, which makes the labels and the loss against the labels."""
    teacher: Teachable
    """Objective of the same class as `student`, with the teacher's architecture and head."""
    config: DistillationConfig
    """Weights of the losses, temperature and layers."""

    def __post_init__(self) -> None:
        """Freeze the teacher, copy the student's compute settings to it, check layers and heads."""
        student = self.student
        settings = "dtype", "attention_impl", "scan_unroll"
        computes = {n: getattr(student.model, n) for n in settings}
        taught = {n: getattr(student, n) for n in ("model", "baseline", "frozen_layers")}
        taught["frozen"] = student.frozen | {TEACHER}
        taught["teacher"] = replace(self.teacher, model=replace(self.teacher.model, **computes))
        for name, value in taught.items():
            object.__setattr__(self, name, value)
        self.config.layer_map(self.model, self.teacher.model)
        if self.config.attention_weight:
            self.config.heads_of_relations(self.model, self.teacher.model)

    def for_evaluation(self) -> Objective:
        """Return the student's objective for evaluation, without the teacher."""
        return self.student.for_evaluation()

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of the student's objective and of the losses against the teacher."""
        return (*self.student.metrics, *self.config.metrics)

    @property
    def projects(self) -> bool:
        """Whether a learned layer maps student states to the teacher's width."""
        other_width = self.model.hidden_dim != self.teacher.model.hidden_dim
        return bool(self.config.hidden_weight) and other_width

    def init(self, key: Array) -> Any:
        """Initialise parameters. The student's parameters are the same as without a teacher."""
        params = self.student.init(key)
        if self.projects:
            made = jax.random.fold_in(key, 1)
            width = self.teacher.model.hidden_dim
            params = {**params, PROJECTION: init_params(self.model, made, LinearHead, width)}
        return {**params, TEACHER: self.teacher.init(jax.random.fold_in(key, 2))}

    def axes(self) -> Any:
        """Name the logical axes of each parameter."""
        axes = self.student.axes()
        if self.projects:
            projection = logical_axes(self.model, LinearHead, self.teacher.model.hidden_dim)
            axes = {**axes, PROJECTION: projection}
        return {**axes, TEACHER: self.teacher.axes()}

    def prepare(self, batch: Batch, seed: int | Array) -> Batch:
        """Prepare the batch for the student. The teacher reads the same rows."""
        return self.student.prepare(batch, seed)

    def counts(self, rows: Batch) -> Scalars:
        """Compute the denominators of the losses: numbers of labels, predictions and tokens."""
        return {
            **self.student.counts(rows),
            "soft_count": jnp.sum(self.student.soft_weights(rows)),
            "token_count": jnp.sum(self.student.token_weights(rows)),
        }

    def loss(self, sums: Scalars, counts: Scalars) -> Float[Array, ""]:
        """Return the weighted sum of the losses against labels and against the teacher."""
        config = self.config
        hard = self.student.loss(sums, counts)
        soft = ratio(sums["soft_loss"], counts["soft_count"])
        total = config.hard_weight * hard + (1 - config.hard_weight) * soft
        for name in ("hidden", "attention"):
            if weight := getattr(config, f"{name}_weight"):
                total += weight * ratio(sums[f"{name}_loss"], counts["token_count"])
        return total

    def forward(self, params: Any, rows: Batch, seed: Array | None, layout: OnMesh) -> Forward:
        """Sum the losses against labels and teacher over the rows. Outputs are the student's."""
        student, teacher = self.student, self.teacher
        inputs, mine = self.inputs(rows, seed), student.computing(params)
        states = self.run(student.model, mine, inputs, layout)
        logits, found = student.finish(mine, states[-1], rows, inputs[-1])
        tokens, types, segments, none = self.inputs(rows, None)  # no dropout in the teacher
        types = jnp.minimum(types, max(teacher.model.num_types, 1) - 1)
        inside = None if layout is None else layout.of(TEACHER)
        theirs = self.run(teacher.model, params[TEACHER], (tokens, types, segments, none), inside)
        wanted, _ = teacher.finish(params[TEACHER], theirs[-1], rows, None)
        losses = student.soft_losses(logits, wanted, rows, self.config.temperature)
        weights = student.soft_weights(rows)
        sums = {
            **found.sums,
            "soft_loss": jnp.sum(losses * weights),
            "soft_count": jnp.sum(weights),
            "token_count": jnp.sum(student.token_weights(rows)),
            **self.compare_layers(mine, states, theirs, rows, layout),
        }
        return Forward(sums, found.outputs)

    def run(
        self, model: ModelConfig, params: Any, inputs: tuple[Any, ...], layout: OnMesh
    ) -> tuple[Float[Array, "B L D"], ...]:
        """Compute the last states and, if a loss compares layers, also the input of each layer."""
        every = bool(self.config.hidden_weight or self.config.attention_weight)
        return encode_layers(model, params, *inputs, layout=layout, every=every)

    def compare_layers(
        self, params: Any, student: Any, teacher: Any, rows: Batch, layout: OnMesh
    ) -> Scalars:
        """Sum the hidden-state and attention losses over tokens. The states come from `run`."""
        config, sums, model = self.config, {}, self.teacher.model
        numbers = (0, *config.layer_map(self.model, model))
        weights = self.student.token_weights(rows)
        if config.hidden_weight:
            project: Any = lambda x: x.astype(jnp.float32)  # noqa: E731
            if self.projects:
                project = with_params(params[PROJECTION], LinearHead, self.model, model.hidden_dim)
            each = [
                jnp.mean(jnp.square(project(x) - teacher[n].astype(jnp.float32)), axis=-1)
                for x, n in zip(student, numbers, strict=True)
            ]
            sums["hidden_loss"] = jnp.sum(sum(each) / len(each) * weights)
        if config.attention_weight:
            inside = None if layout is None else layout.of(TEACHER)
            segments, last = rows["segment_ids"], self.model.num_layers - 1
            mine = layer_projections(self.model, params, student[-2], last, segments, layout)
            theirs = layer_projections(
                model, params[TEACHER], teacher[numbers[-1] - 1], numbers[-1] - 1, segments, inside
            )
            heads = config.heads_of_relations(self.model, model)
            found = relation_losses(mine, theirs, segments, heads)
            sums["attention_loss"] = jnp.sum(found * weights)
        return sums

    def flops(self, rows: Batch) -> int:
        """Count the operations per row in a training step of the student and its teacher."""
        config, length = self.config, rows["tokens"].shape[-1]
        mine, theirs = self.model.hidden_dim, self.teacher.model.hidden_dim
        total = self.student.flops(rows) + self.teacher.flops(rows) // TRAIN_OVER_FORWARD
        if self.projects:
            states = self.model.num_layers + 1
            total += TRAIN_OVER_FORWARD * states * 2 * length * mine * theirs
        if config.attention_weight:
            total += 3 * 2 * length**2 * (TRAIN_OVER_FORWARD * mine + theirs)
        return total

    def has_dropout(self) -> bool:
        """Return true if the student's training uses dropout."""
        return self.student.has_dropout()

    def shown(self, rows: Batch) -> Shown:
        """Return the student's rows for display."""
        return self.student.shown(rows)


def relation_losses(
    student: tuple[Array, Array, Array],
    teacher: tuple[Array, Array, Array],
    segment_ids: Integer[Array, "B L"],
    num_heads: int,
) -> Float[Array, "B L"]:
    """Compute KL(teacher || student) of each token in nats, summed over three kinds of relations.

    `student` and `teacher` are queries, keys and values (B, L, H, K). The relations are attention
    of queries to queries, keys to keys and values to values inside segments (Wang et al. 2021).
    Vectors are split anew into `num_heads` heads (a divisor of H * K), whose losses are averaged.
    """
    visible = visible_keys(segment_ids, segment_ids)

    def scores(x: Float[Array, "B L H K"]) -> Float[Array, "B R L L"]:
        x = x.reshape(*x.shape[:2], num_heads, -1)
        found = einsum_float32("BLHK,BSHK->BHLS", x, x) / math.sqrt(x.shape[-1])
        return jnp.where(visible, found, MASKED_SCORE)

    of_kinds = [
        divergences(scores(mine), scores(theirs)).mean(axis=1)
        for mine, theirs in zip(student, teacher, strict=True)
    ]
    return sum(of_kinds[1:], of_kinds[0])

"""Distillation: a student learns the labels of its rows, and what a trained teacher makes of them.

Sources: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2 (predictions
at a temperature); Jiao et al. 2020, "TinyBERT", section 3.1 (hidden states, a map of layers); Wang
et al. 2021, "MiniLMv2", section 3 (relations of queries, keys and values).

The teacher is the entry `teacher` of the parameters, which no step changes. Teacher and student
read the same rows: their tokenizers are the same, their widths and depths need not be.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from bert_jax.config.bounds import Bounded, Fraction, Natural, NonNegative, Positive
from bert_jax.errors import UserError
from bert_jax.model.attention.xla import MASKED_SCORE, visible_keys
from bert_jax.model.config import ModelConfig
from bert_jax.model.flops import TRAIN_OVER_FORWARD, encoder_flops
from bert_jax.model.heads import (
    LinearHead,
    encode,
    encode_layers,
    end_norm,
    init_params,
    layer_projections,
    logical_axes,
    with_params,
)
from bert_jax.model.layers import einsum_float32
from bert_jax.model.layout import Layout
from bert_jax.objectives.losses import ratio
from bert_jax.objectives.objective import Batch, Metric, Objective, Scalars

TEACHER, PROJECTION = "teacher", "projection"
"""Entries of the parameters: the teacher, and the map of the student's states to its width."""
Plain = TypeVar("Plain", bound=Objective)

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
    """Parts of the loss that a student has from a teacher, and their weights."""

    teacher: str = ""
    """Directory of the teacher: a run, or a model in Hugging Face's format, with the same tokenizer
    and a head of the same kind. Empty: no teacher."""
    temperature: Positive = 2.0
    """Divisor of both models' logits before they are compared."""
    hard_weight: Fraction = 0.5
    """Share of the loss that the labels have; the teacher's predictions have the rest."""
    hidden_weight: NonNegative = 0.0
    """Factor of the mean squared error of the hidden states, after the embeddings and after each
    layer; 0: they are not compared. Other widths than the teacher's get a learned map."""
    attention_weight: NonNegative = 0.0
    """Factor of the divergence of the relations of queries, keys and values in the student's last
    layer and the teacher's layer for it (MiniLMv2); 0: they are not compared."""
    relation_heads: Natural = 0
    """Number of heads into which both models' relations are cut; 0: model.num_heads."""
    layers: tuple[int, ...] = ()
    """Teacher's layer, counted from 1, for each layer of the student; empty: evenly spaced."""

    def layer_map(self, student: ModelConfig, teacher: ModelConfig) -> tuple[int, ...]:
        """Return the teacher's layer, counted from 1, for each layer of the student.

        Raises:
            UserError: `layers` has another number of layers, or one that the teacher lacks.
        """
        count, most = student.num_layers, teacher.num_layers
        if not self.layers:
            return tuple(-(-n * most // count) for n in range(1, count + 1))
        if len(self.layers) != count or not all(1 <= n <= most for n in self.layers):
            raise UserError(
                f"{self.SECTION}.layers is {self.layers}; it must have {count} numbers from 1 to "
                f"{most}: a layer of the teacher for each layer of the student"
            )
        return self.layers

    def heads_of_relations(self, student: ModelConfig, teacher: ModelConfig) -> int:
        """Return the number of heads of relations.

        Raises:
            UserError: The number does not divide a width of queries or keys.
        """
        count = self.relation_heads or student.num_heads
        widths = {
            heads * model.head_dim
            for model in (student, teacher)
            for heads in (model.num_heads, model.num_kv_heads or model.num_heads)
        }
        if any(width % count for width in widths):
            raise UserError(
                f"{self.SECTION}.relation_heads is {count}; it must divide the widths of queries "
                f"and keys of student and teacher: {', '.join(map(str, sorted(widths)))}"
            )
        return count


@dataclass(frozen=True)
class Distilled(Objective):
    """Base of the objectives with a teacher, before the plain objective among their bases.

    The plain objective gives labels, heads and the loss against labels.
    """

    distillation: DistillationConfig = field(default=DistillationConfig(), kw_only=True)
    """Weights of the parts of the loss."""
    teacher: ModelConfig = field(default=ModelConfig(), kw_only=True)
    """Architecture of the teacher."""

    def __post_init__(self) -> None:
        """Freeze the teacher, and refuse layers and heads that cannot be compared."""
        object.__setattr__(self, "frozen", self.frozen | {TEACHER})
        self.distillation.layer_map(self.model, self.teacher)
        if self.distillation.attention_weight:
            self.distillation.heads_of_relations(self.model, self.teacher)

    def as_plain(self, kind: type[Plain]) -> Plain:
        """Return the objective without the teacher."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(kind)}
        return kind(**values | {"frozen": self.frozen - {TEACHER}})

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of the plain objective, and those of the comparison."""
        return (*super().metrics, *parts_of(self.distillation))  # type: ignore[safe-super]

    def teacher_init(self, key: Array) -> Any:
        """Make fresh parameters of a teacher, whose place those of the real one take."""
        raise NotImplementedError

    def teacher_axes(self) -> Any:
        """Name the logical axes of the teacher's parameters."""
        raise NotImplementedError

    @property
    def projects(self) -> bool:
        """Whether the student's states go through a learned map."""
        return bool(self.distillation.hidden_weight) and (
            self.model.hidden_dim != self.teacher.hidden_dim
        )

    def init(self, key: Array) -> Any:
        """Make fresh parameters of student and teacher; the student's are as without a teacher."""
        params = super().init(key)  # type: ignore[safe-super]
        if self.projects:
            made = jax.random.fold_in(key, 1)
            width = self.teacher.hidden_dim
            params = {**params, PROJECTION: init_params(self.model, made, LinearHead, width)}
        return {**params, TEACHER: self.teacher_init(jax.random.fold_in(key, 2))}

    def axes(self) -> Any:
        """Name the logical axes of each parameter."""
        axes = super().axes()  # type: ignore[safe-super]
        if self.projects:
            projection = logical_axes(self.model, LinearHead, self.teacher.hidden_dim)
            axes = {**axes, PROJECTION: projection}
        return {**axes, TEACHER: self.teacher_axes()}

    def soft_weights(self, rows: Batch) -> Float[Array, "*predicted"]:
        """Return the weight of each prediction that is compared."""
        raise NotImplementedError

    def token_weights(self, rows: Batch) -> Float[Array, "B L"]:
        """Return the weight of each token whose states are compared."""
        return (rows["segment_ids"] > 0).astype(jnp.float32)

    def counts(self, rows: Batch) -> Scalars:
        """Count labels, predictions and tokens."""
        return {
            **super().counts(rows),  # type: ignore[safe-super]
            "soft_count": jnp.sum(self.soft_weights(rows)),
            "token_count": jnp.sum(self.token_weights(rows)),
        }

    def loss(self, sums: Scalars, counts: Scalars) -> Float[Array, ""]:
        """Add the loss of the plain objective and the losses against the teacher, weighted."""
        config = self.distillation
        hard = super().loss(sums, counts)  # type: ignore[safe-super]
        soft = ratio(sums["soft_loss"], counts["soft_count"])
        total = config.hard_weight * hard + (1 - config.hard_weight) * soft
        for name in ("hidden", "attention"):
            if weight := getattr(config, f"{name}_weight"):
                total += weight * ratio(sums[f"{name}_loss"], counts["token_count"])
        return total

    def run(
        self, model: ModelConfig, params: Any, inputs: Any, layout: Layout | None
    ) -> tuple[Float[Array, "B L D"], tuple[Float[Array, "B L D"], ...]]:
        """Compute the last states of a model, and the states of all layers if they are compared."""
        tokens, types, segments, stream = inputs
        if not (self.distillation.hidden_weight or self.distillation.attention_weight):
            return encode(model, params, tokens, types, segments, stream, layout), ()
        states = encode_layers(model, params, tokens, types, segments, stream, layout)
        last = end_norm(model, params, states[-1])
        return last, (*states[:-1], last)

    def run_teacher(
        self, params: Any, rows: Batch, layout: Layout | None
    ) -> tuple[Float[Array, "B L D"], tuple[Float[Array, "B L D"], ...]]:
        """Compute the states of the teacher, without dropout (see `run`)."""
        tokens, types, segments, _ = self.inputs(rows, None)
        types = jnp.minimum(types, max(self.teacher.num_types, 1) - 1)
        inside = None if layout is None else layout.of(TEACHER)
        return self.run(self.teacher, params[TEACHER], (tokens, types, segments, None), inside)

    def compare_layers(
        self, params: Any, student: Any, teacher: Any, rows: Batch, layout: Layout | None
    ) -> Scalars:
        """Sum the losses of hidden states and of attention over the tokens.

        `student` and `teacher` are the states of all layers, from `run`.
        """
        config, sums = self.distillation, {}
        numbers = (0, *config.layer_map(self.model, self.teacher))
        weights = self.token_weights(rows)
        if config.hidden_weight:
            project: Any = lambda x: x.astype(jnp.float32)  # noqa: E731
            if self.projects:
                width = self.teacher.hidden_dim
                project = with_params(params[PROJECTION], LinearHead, self.model, width)
            each = [
                jnp.mean(jnp.square(project(x) - teacher[n].astype(jnp.float32)), axis=-1)
                for x, n in zip(student, numbers, strict=True)
            ]
            sums["hidden_loss"] = jnp.sum(sum(each) / len(each) * weights)
        if config.attention_weight:
            inside = None if layout is None else layout.of(TEACHER)
            segments = rows["segment_ids"]
            found = relation_losses(
                layer_projections(
                    self.model, params, student[-2], self.model.num_layers - 1, segments, layout
                ),
                layer_projections(
                    self.teacher, params[TEACHER], teacher[numbers[-1] - 1], numbers[-1] - 1,
                    segments, inside,
                ),
                segments,
                config.heads_of_relations(self.model, self.teacher),
            )  # fmt: skip
            sums["attention_loss"] = jnp.sum(found * weights)
        return sums

    def comparison_flops(self, length: int) -> int:
        """Count the operations of one row for the teacher's layers and the comparison of layers."""
        config, total = self.distillation, encoder_flops(self.teacher, length)
        mine, theirs = self.model.hidden_dim, self.teacher.hidden_dim
        if self.projects:
            states = self.model.num_layers + 1
            total += TRAIN_OVER_FORWARD * states * 2 * length * mine * theirs
        if config.attention_weight:
            total += 3 * 2 * length**2 * (TRAIN_OVER_FORWARD * mine + theirs)
        return total


def parts_of(config: DistillationConfig) -> tuple[Metric, ...]:
    """List the metrics of a comparison with a teacher."""
    hidden = (_HIDDEN,) if config.hidden_weight else ()
    return (_SOFT, *hidden, *((_ATTENTION,) if config.attention_weight else ()))


def divergences(
    student: Float[Array, "*rows C"], teacher: Float[Array, "*rows C"], temperature: float = 1.0
) -> Float[Array, "*rows"]:
    """Return T² KL(teacher || student) in nats, of softmax(logits / T); without teacher's gradient.

    The factor keeps the size of the gradient when T changes (Hinton et al. 2015, section 2).
    """
    mine, theirs = (
        jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
        for logits in (student, jax.lax.stop_gradient(teacher))
    )
    return temperature**2 * jnp.sum(jnp.exp(theirs) * (theirs - mine), axis=-1)


def binary_divergences(
    student: Float[Array, "*rows"], teacher: Float[Array, "*rows"], temperature: float = 1.0
) -> Float[Array, "*rows"]:
    """Return `divergences` of single yes-or-no logits, of sigmoid(logits / T)."""
    mine, theirs = (jnp.stack([jnp.zeros_like(x), x], axis=-1) for x in (student, teacher))
    return divergences(mine, theirs, temperature)


def relation_losses(
    student: tuple[Array, Array, Array],
    teacher: tuple[Array, Array, Array],
    segment_ids: Integer[Array, "B L"],
    num_heads: int,
) -> Float[Array, "B L"]:
    """Return KL(teacher || student) of the relations of each token, summed over the three kinds.

    Relations are the attention of queries to queries, of keys to keys and of values to values, in
    `num_heads` heads whatever the models have; the losses of heads are averaged (Wang et al. 2021).

    Args:
        student: Queries, keys and values (B, L, H, K).
        teacher: The same of the teacher.
        segment_ids: A token is related to those of its own segment.
        num_heads: Number of heads; divides H * K of all.
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

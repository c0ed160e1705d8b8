"""Masked language modelling and fine-tuning with a teacher (see `objectives.distillation`)."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from bert_jax.model.config import ModelConfig
from bert_jax.model.flops import task_head_flops, vocabulary_flops
from bert_jax.model.heads import (
    PADDED_LOGIT,
    init_params,
    logical_axes,
    pair_logits,
    vocabulary_logits,
)
from bert_jax.model.layout import Layout
from bert_jax.model.lora import merged
from bert_jax.model.task_heads import TaskHeadConfig, TaskModel, head_logits, init_task_params
from bert_jax.objectives.distillation import TEACHER, Distilled, binary_divergences, divergences
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.masked_lm import MaskedLM, masked_sums, pair_sums
from bert_jax.objectives.objective import Batch, Forward, Objective
from bert_jax.objectives.task import TaskObjective
from bert_jax.tasks.task import HeadKind


@dataclass(frozen=True)
class DistilledMaskedLM(Distilled, MaskedLM):
    """Masked language modelling by a student that also learns the predictions of a teacher."""

    def for_evaluation(self) -> Objective:
        """Return the objective without the teacher."""
        return self.as_plain(MaskedLM)

    def _teacher(self) -> ModelConfig:
        """Return the teacher without a pooler, which nothing reads."""
        return dataclasses.replace(self.teacher, pooler=False)

    def teacher_init(self, key: Array) -> Any:
        """Make fresh parameters of a teacher: encoder, mlm."""
        return init_params(self._teacher(), key)

    def teacher_axes(self) -> Any:
        """Name the logical axes of the teacher's parameters."""
        return logical_axes(self._teacher())

    def soft_weights(self, rows: Batch) -> Float[Array, "B P"]:
        """Return 1 for each masked position."""
        return jnp.asarray(rows["weights"])

    def forward(
        self, params: Any, rows: Batch, seed: Array | None, layout: Layout | None
    ) -> Forward:
        """Sum the losses against labels and teacher, right answers and counts over the rows."""
        last, states = self.run(self.model, params, self.inputs(rows, seed), layout)
        logits = vocabulary_logits(self.model, params, last, rows["positions"])
        sums = masked_sums(*cross_entropy(logits, rows["labels"]), rows["weights"])
        if self.model.pooler:
            pairs = pair_logits(self.model, params, last)
            sums |= pair_sums(pairs, rows["pair_labels"])
        last, theirs = self.run_teacher(params, rows, layout)
        wanted = vocabulary_logits(self.teacher, params[TEACHER], last, rows["positions"])
        if wanted.shape != logits.shape:  # other padding of the same vocabulary
            count = self.model.vocab_size
            logits, wanted = logits[..., :count], wanted[..., :count]
        losses = divergences(logits, wanted, self.distillation.temperature)
        weights = self.soft_weights(rows)
        sums |= {"soft_loss": jnp.sum(losses * weights), "soft_count": jnp.sum(weights)}
        sums |= {"token_count": jnp.sum(self.token_weights(rows))}
        return Forward(sums | self.compare_layers(params, states, theirs, rows, layout))

    def flops(self, rows: Batch) -> int:
        """Count the operations of one row in a training step, the teacher's included."""
        length = rows["tokens"].shape[-1]
        head = vocabulary_flops(self.teacher, self.masking.num_predictions(length))
        return super().flops(rows) + self.comparison_flops(length) + head


@dataclass(frozen=True)
class DistilledTask(Distilled, TaskObjective):
    """Fine-tuning of a student that also learns the predictions of a fine-tuned teacher."""

    teacher_head: TaskHeadConfig = field(default=TaskHeadConfig("classification"), kw_only=True)
    """Sizes of the teacher's head, with the student's kind and labels."""

    def for_evaluation(self) -> Objective:
        """Return the objective without the teacher."""
        return self.as_plain(TaskObjective)

    def teacher_init(self, key: Array) -> Any:
        """Make fresh parameters of a teacher: encoder, head."""
        return init_task_params(self.teacher, self.teacher_head, key)

    def teacher_axes(self) -> Any:
        """Name the logical axes of the teacher's parameters."""
        return logical_axes(self.teacher, TaskModel, self.teacher_head)

    def soft_weights(self, rows: Batch) -> Float[Array, "*counted"]:
        """Return the weight of each labelled row or token."""
        return self.head.counted(rows["labels"], rows["weights"])

    def token_weights(self, rows: Batch) -> Float[Array, "B L"]:
        """Return 1 for the tokens of rows that do not fill the batch."""
        return super().token_weights(rows) * rows["weights"][:, None]

    def forward(
        self, params: Any, rows: Batch, seed: Array | None, layout: Layout | None
    ) -> Forward:
        """Compute logits, and the sums of the losses against labels and teacher."""
        student = merged(self.lora, params)
        inputs, segments = self.inputs(rows, seed), rows["segment_ids"]
        last, states = self.run(self.model, student, inputs, layout)
        logits = head_logits(self.model, self.config, student, last, segments, inputs[-1])
        found = self.judged(logits, rows)
        last, theirs = self.run_teacher(params, rows, layout)
        wanted = head_logits(self.teacher, self.teacher_head, params[TEACHER], last, segments)
        losses = soft_losses(self.kind, logits, wanted, segments, self.distillation.temperature)
        weights = self.soft_weights(rows)
        sums = {
            **found.sums,
            "soft_loss": jnp.sum(losses * weights),
            "soft_count": jnp.sum(weights),
            "token_count": jnp.sum(self.token_weights(rows)),
            **self.compare_layers(student, states, theirs, rows, layout),
        }
        return Forward(sums, logits)

    def flops(self, rows: Batch) -> int:
        """Count the operations of one row in a training step, the teacher's included."""
        length, network = rows["tokens"].shape[-1], self.head.network
        head = task_head_flops(self.teacher, length, network, self.config.num_labels)
        return super().flops(rows) + self.comparison_flops(length) + head


def soft_losses(
    kind: HeadKind,
    logits: Float[Array, "*outputs"],
    wanted: Float[Array, "*outputs"],
    segment_ids: Array,
    temperature: float,
) -> Float[Array, "*counted"]:
    """Return the loss against a teacher's logits, of each row (B,) or each token of tags (B, L).

    Scores, which are no logits, have their squared difference.
    """
    if kind == "regression":
        return jnp.square(logits - wanted)[:, 0]
    if kind == "multi_label":
        return jnp.mean(binary_divergences(logits, wanted, temperature), axis=-1)
    if kind == "span":  # start and end, over the tokens that are no padding
        logits, wanted = (
            jnp.moveaxis(jnp.where(segment_ids[..., None] > 0, x, PADDED_LOGIT), -1, 1)
            for x in (logits, wanted)
        )
        return jnp.mean(divergences(logits, wanted, temperature), axis=-1)
    return divergences(logits, wanted, temperature)

"""The teacher of a fine-tuning run: a fine-tuned model with the labels of the task."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.objectives.distillation import DistillationConfig
from bert_jax.objectives.distilled import DistilledTask
from bert_jax.objectives.objective import Objective
from bert_jax.objectives.task import TaskObjective
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.task import Task
from bert_jax.training.finetune.start.weights import kept_head

_UNTAUGHT = ("arcs", "choice")


class Teacher(NamedTuple):
    """A teacher whose head has the outputs of the task, in their order."""

    model: ModelConfig
    head: TaskHeadConfig
    params: Any
    """Entries encoder, head, and transform where the head begins with one."""
    name: str
    """Name for messages."""

    def taught(self, objective: TaskObjective, config: DistillationConfig) -> DistilledTask:
        """Return the objective of a student of this teacher."""
        values = {
            each.name: getattr(objective, each.name) for each in dataclasses.fields(objective)
        }
        how = ("dtype", "attention_impl", "scan_unroll")
        computed = {name: getattr(objective.model, name) for name in how}
        return DistilledTask(
            **values, distillation=config, teacher=dataclasses.replace(self.model, **computed),
            teacher_head=dataclasses.replace(self.head, dropout_rate=0.0),
        )  # fmt: skip


def with_teacher(
    config: DistillationConfig, objective: Objective, initial: SavedModel, task: Task
) -> tuple[DistilledTask, Any]:
    """Return the objective of a student, and the parameters of the teacher.

    Args:
        config: Section `distil`.
        objective: Objective of the student, without a teacher.
        initial: Model that gives the tokenizer.
        task: Task of the run.

    Raises:
        UserError: The task has no teachers, and what `read_teacher` raises.
    """
    if not isinstance(objective, TaskObjective) or objective.kind in _UNTAUGHT:
        raise UserError(
            f"distil.teacher is {config.teacher!r}, and task.kind is {task.config.kind!r}; only "
            "classes, scores, tags and spans are learned from a teacher"
        )
    teacher = read_teacher(config, initial, task, objective.config, task.train_split().rows)
    return teacher.taught(objective, config), teacher.params


def read_teacher(
    config: DistillationConfig, initial: SavedModel, task: Task, head: TaskHeadConfig, rows: Rows
) -> Teacher:
    """Read the teacher of a student that starts from `initial`.

    Args:
        config: Section `distil`.
        initial: Model that gives the tokenizer.
        task: Task of the run.
        head: Head of the student.
        rows: Training rows.

    Raises:
        UserError: The teacher has another tokenizer, another head, other labels, or too few
            positions for the longest row.
    """
    saved = read_model(config.teacher)
    ours, theirs = initial.tokenizer.fingerprint, saved.tokenizer.fingerprint
    if ours != theirs:
        raise UserError(
            f"distil.teacher: the tokenizer of {saved.name} ({theirs[:12]}) is not that of "
            f"{initial.name} ({ours[:12]}); teacher and student must read the same tokens"
        )
    try:
        kept = kept_head(saved, head, task)
    except UserError as error:
        raise UserError(
            f"distil.teacher: {error}; give a model that was fine-tuned on the same labels"
        ) from error
    assert saved.outputs is not None  # else it has no head
    model, longest = saved.config, int(np.max(rows.lengths))
    if longest > model.num_positions:
        if model.positions != "rope":
            raise UserError(
                f"distil.teacher: {saved.name} has {model.num_positions} positions, and the "
                f"longest row has {longest} tokens; set task.max_length to at most "
                f"{model.num_positions}"
            )
        model = dataclasses.replace(model, num_positions=longest)
    parts = ("encoder", "transform")
    params = {name: tree for name, tree in saved.complete_params().items() if name in parts}
    if not model.pooler:
        encoder = {n: part for n, part in params["encoder"].items() if n != "pooler"}
        params = {**params, "encoder": encoder}
    return Teacher(model, saved.outputs.head, {**params, "head": kept}, saved.name)

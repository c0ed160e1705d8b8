"""The teacher of a fine-tuning run: a fine-tuned model with the labels of the task."""

import dataclasses
from typing import Any

import numpy as np

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import UserError
from bert_jax.objectives.distillation import DistillationConfig, Distilled
from bert_jax.objectives.objective import Objective
from bert_jax.objectives.task import TaskObjective
from bert_jax.tasks.task import Task
from bert_jax.training.finetune.start.weights import kept_head

_UNTAUGHT = ("arcs", "choice")


def with_teacher(
    config: DistillationConfig, objective: Objective, initial: SavedModel, task: Task
) -> tuple[Distilled, Any]:
    """Return the objective of a student, and the parameters of its teacher.

    The parameters are the encoder, the head, with its outputs in the order of the task's labels,
    and the transform, where the head begins with one.

    Args:
        config: Section `distil`, which names a teacher.
        objective: Objective of the student without a teacher.
        initial: Model that gives the tokenizer.
        task: Task of the run.

    Raises:
        UserError: The task has no teachers, or the teacher has another tokenizer, another head,
            other labels, or too few positions for the longest row.
    """
    assert config.teacher
    if not isinstance(objective, TaskObjective) or objective.kind in _UNTAUGHT:
        raise UserError(
            f"distil.teacher is {config.teacher!r}, and task.kind is {task.config.kind!r}; only "
            "classes, scores, tags and spans are learned from a teacher"
        )
    saved = read_model(config.teacher)
    ours, theirs = initial.tokenizer.fingerprint, saved.tokenizer.fingerprint
    if ours != theirs:
        raise UserError(
            f"distil.teacher: the tokenizer of {saved.name} ({theirs[:12]}) is not that of "
            f"{initial.name} ({ours[:12]}); teacher and student must read the same tokens"
        )
    try:
        kept = kept_head(saved, objective.config, task)
    except UserError as error:
        raise UserError(
            f"distil.teacher: {error}; give a model that was fine-tuned on the same labels"
        ) from error
    assert saved.outputs is not None  # else it has no head
    model, longest = saved.config, int(np.max(task.train_split().rows.lengths))
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
    head = dataclasses.replace(saved.outputs.head, dropout_rate=0.0)
    teacher = TaskObjective(model, head, objective.kind)
    return Distilled(objective, teacher, config), {**params, "head": kept}

"""Opening a task from a configuration or from a saved model."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.tasks.choice import ChoiceTask
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.embedding import EmbeddingTask
from bert_jax.tasks.overlap import deal, example_key, joined
from bert_jax.tasks.parsing.task import ParsingTask
from bert_jax.tasks.rerank import RerankTask
from bert_jax.tasks.squad.task import SpanTask
from bert_jax.tasks.tagging.task import TaggingTask
from bert_jax.tasks.task import LabelSpec, Split, Task
from bert_jax.tasks.text.task import TextTask
from bert_jax.tokenization.tokenizer import Tokenizer

TASKS: Mapping[str, type[Task[Any]]] = {
    "glue": TextTask, "table": TextTask, "tagging": TaggingTask, "squad": SpanTask,
    "embedding": EmbeddingTask, "rerank": RerankTask,
    "choice": ChoiceTask, "parsing": ParsingTask,
}  # fmt: skip
"""Task classes by `TaskConfig.kind`."""


def open_task(config: TaskConfig, tokenizer: Tokenizer, max_positions: int) -> Task:
    """Open a task and read its data.

    The default length of rows is lowered to `max_positions`, the model's number of positions. Raise
    a UserError if a file is missing, unreadable or invalid; the labels cannot be learned, such as a
    single class; rows exceed `max_positions`; or the folds cannot be made (see `fold_parts`).
    """
    config = config.fitted(max_positions)
    if config.length > max_positions:
        raise UserError(
            f"task.max_length is {config.length}, but the model has {max_positions} positions; set "
            f"task.max_length to {max_positions} or less"
        )
    if not config.folds:
        return TASKS[config.kind].open(config, tokenizer)
    task = TASKS[config.kind].open(config.with_folds(), tokenizer)
    if config.fold:
        task.hold_out(fold_parts(task.train_split(), config.folds), config.fold)
    return task


def fold_parts(split: Split, count: int) -> np.ndarray:
    """Divide the examples into `count` folds, and return each example's fold (N,), from 1.

    The folds depend only on texts, labels and groups. Raise a UserError if groups are too few, or
    all scores of a fold are equal.
    """
    groups = joined(*split.group_keys())
    if (there := len(np.unique(groups))) < count:
        raise UserError(
            f"task.folds is {count}, but the training data have only {there} groups to hold out; "
            f"set task.folds to {there} or less"
        )
    keys = [example_key(texts) for texts in split.texts()]
    parts, labels = 1 + deal(split.strata(), groups, keys, [1 / count] * count), split.truth()
    if all(isinstance(label, float) for label in labels):
        scores = np.array(labels)
        for fold in range(1, count + 1):
            if len(np.unique(scores[parts == fold])) < 2:
                raise UserError(
                    f"fold {fold} has equal scores, so their correlation is undefined; use fewer "
                    "folds, or add rows with other scores"
                )
    return parts


def restore_task(description: Mapping[str, Any], tokenizer: Tokenizer) -> Task:
    """Rebuild a task, without its data, from the output of `Task.describe`.

    Raise a UserError if the description is not an output of `Task.describe`.
    """
    where = "the description of the task"
    if unknown := [name for name in ("task", "learned") if name not in description]:
        raise UserError(f"{where}: {unknown[0]!r} is missing; use a model from bert-jax finetune")
    config = build(TaskConfig, description["task"], where)
    return TASKS[config.kind](config, build(LabelSpec, description["learned"], where), tokenizer)

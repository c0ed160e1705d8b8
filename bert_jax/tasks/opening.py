"""Choice of the task that a configuration or a saved model names."""

import logging
from collections.abc import Mapping
from typing import Any

from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.squad.task import SpanTask
from bert_jax.tasks.tagging.task import TaggingTask
from bert_jax.tasks.task import LabelSpec, Task
from bert_jax.tasks.text.task import TextTask
from bert_jax.tokenization.tokenizer import Tokenizer

_log = logging.getLogger("bert_jax")

TASKS: Mapping[str, type[Task]] = {
    "glue": TextTask, "table": TextTask, "tagging": TaggingTask, "squad": SpanTask,
}  # fmt: skip
"""Tasks by `TaskConfig.kind`."""


def open_task(config: TaskConfig, tokenizer: Tokenizer, max_positions: int) -> Task:
    """Read training and dev data.

    Args:
        config: the task; its default length is lowered to `max_positions`.
        tokenizer: of the model.
        max_positions: longest row that the model can take.

    Raises:
        UserError: a file that is missing, cannot be read or is wrong, see the readers; labels from
            which nothing can be learned; rows longer than `max_positions`.
    """
    config = config.fitted(max_positions)
    if config.kind == "table" and config.table.metric:
        _log.warning(
            "task.table.metric is now task.metric; the old name works in this version only"
        )
    if config.length > max_positions:
        raise UserError(
            f"task.max_length is {config.length}, but the model has {max_positions} positions; set "
            f"task.max_length to {max_positions} or less"
        )
    return TASKS[config.kind].open(config, tokenizer)


def restore_task(description: Mapping[str, Any], tokenizer: Tokenizer) -> Task:
    """Return the task that `Task.describe` described; it has nothing to train on.

    Raises:
        UserError: not such a description.
    """
    where = "the description of the task"
    unknown = [name for name in ("task", "learned") if name not in description]
    if unknown:
        raise UserError(f"{where}: {unknown[0]!r} is missing; was it made by bert-jax finetune?")
    config = build(TaskConfig, description["task"], where)
    spec = build(LabelSpec, description["learned"], where)
    return TASKS[config.kind](config, spec, tokenizer)

"""Choice of the task that a configuration or a saved model names."""

from collections.abc import Mapping
from typing import Any

from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.task import Learned, Task
from bert_jax.tokenization.tokenizer import Tokenizer


def open_task(config: TaskConfig, tokenizer: Tokenizer, max_positions: int) -> Task:
    """Read training and dev data.

    Args:
        config: the task; its default length is lowered to `max_positions`.
        tokenizer: of the model.
        max_positions: of the model: the longest row it can take.

    Raises:
        UserError: a file that is missing, cannot be read or is wrong, see the readers; labels from
            which nothing can be learned; rows longer than `max_positions`.
    """
    config = config.fitted(max_positions)
    if config.length > max_positions:
        raise UserError(
            f"task.max_length is {config.length}, but the model has {max_positions} positions; set "
            f"task.max_length to {max_positions} or less"
        )
    return _kind(config).open(config, tokenizer)


def restore_task(description: Mapping[str, Any], tokenizer: Tokenizer) -> Task:
    """Return a task as its run described it; it predicts and scores, and has nothing to train on.

    Args:
        description: what `Task.describe` gave.
        tokenizer: of the model.

    Raises:
        UserError: not such a description.
    """
    where = "the description of the task"
    unknown = [name for name in ("task", "learned") if name not in description]
    if unknown:
        raise UserError(f"{where}: {unknown[0]!r} is missing; was it made by bert-jax finetune?")
    config = build(TaskConfig, description["task"], where)
    return _kind(config)(config, build(Learned, description["learned"], where), tokenizer)


def _kind(config: TaskConfig) -> Any:
    """Return the class of a task; imported late because each of them imports this module."""
    if config.kind == "tagging":
        from bert_jax.tasks.tagging.task import TaggingTask

        return TaggingTask
    if config.kind == "squad":
        from bert_jax.tasks.squad.task import SpanTask

        return SpanTask
    from bert_jax.tasks.text.task import TextTask

    return TextTask

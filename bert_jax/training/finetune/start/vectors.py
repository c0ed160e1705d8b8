"""The objective of an embedding model, for training and for a saved model."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.embedding import EmbeddingConfig
from bert_jax.objectives.embedding import Comparison, EmbeddingObjective
from bert_jax.tasks.config import EmbeddingTaskConfig, PairKind, TaskConfig
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.task import Task
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.start.weights import frozen_by

_COMPARISONS: dict[PairKind, Comparison] = {
    "pairs": "ranking", "texts": "ranking", "scores": "scores", "classes": "classes",
}  # fmt: skip
_MULTIPLE = 8


def with_vectors(
    config: FinetuneConfig, model: ModelConfig, task: Task, given: Sequence[SavedModel | None]
) -> tuple[EmbeddingObjective, tuple[Any, ...]]:
    """Return the objective of vectors, and the parameters that each initialisation provides.

    Args:
        config: Configuration of the run.
        model: Architecture with the settings of the run.
        task: The task, with its data.
        given: Model of each initialisation; None for random weights.

    Raises:
        UserError: A setting does not fit the kind of the rows, or the width of the model.
    """
    contrast, section = config.embedding, config.task
    assert isinstance(section, EmbeddingTaskConfig)  # of an EmbeddingTask
    comparison = _COMPARISONS[section.rows]
    if config.pooling != "auto":
        raise UserError(
            f"pooling is {config.pooling!r}, which is for classes; say embedding.pooling (mean, "
            "cls, last or weighted)"
        )
    if config.head != "auto":
        raise UserError(
            f"head is {config.head!r}, which is for tasks with a head; vectors have none"
        )
    if contrast.symmetric and comparison != "ranking":
        raise UserError(
            f"embedding.symmetric is set, and task.rows is {section.rows!r}; only pairs "
            "and texts have two sides"
        )
    kept = contrast.of_model(section.query_prefix, section.document_prefix)
    kept.check_width(model.hidden_dim)
    train = task.train_split().rows
    length = query_length([train, *(split.rows for split in task.dev_splits())])
    objective = EmbeddingObjective(
        model, kept, comparison, train.group, contrast, length, lora=config.lora
    )
    if section.rows == "texts" and not objective.has_dropout():
        raise UserError(
            "task.rows is 'texts', which compares a text with itself under other "
            "dropout, and the model has none; set training.dropout_rate above 0"
        )
    frozen = frozen_by(config, model)
    objective = replace(objective, frozen=frozen.entries, frozen_layers=frozen.layers)
    starts = ({} if each is None else starting_vectors(kept, each.params) for each in given)
    return objective, tuple(starts)


def saved_objective(
    config: EmbeddingConfig, model: ModelConfig, task: TaskConfig, rows: Rows
) -> EmbeddingObjective:
    """Make the objective with which a saved model computes the vectors of rows."""
    assert isinstance(task, EmbeddingTaskConfig)
    comparison = _COMPARISONS[task.rows]
    length = query_length([rows])
    return EmbeddingObjective(model, config, comparison, rows.group, query_length=length)


def starting_vectors(config: EmbeddingConfig, params: Any) -> Any:
    """Return the parts of a model's parameters with which the training of vectors begins."""
    encoder = {name: entry for name, entry in params["encoder"].items() if name != "pooler"}
    start = {"encoder": encoder}
    if config.pooling == "weighted" and "pooling" in params:
        start["pooling"] = params["pooling"]
    return start


def query_length(splits: Iterable[Rows]) -> int:
    """Return the padded length of each group's first row; 0: as the other rows."""
    several = [rows for rows in splits if rows.group > 1]
    longest = [int(rows.row_lengths.reshape(-1, rows.group)[:, 0].max()) for rows in several]
    return -(-max(longest, default=0) // _MULTIPLE) * _MULTIPLE

"""The interface of fine-tuning tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from bert_jax.config.mapping import to_dict
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.rows import Rows

Objective = Literal["class", "classes", "score", "tags", "span"]
"""Kind of prediction: one class, any number of classes, a number, a tag for each word, a span."""

Outputs = Sequence[np.ndarray] | np.ndarray
"""float32 logits of the rows in their order: (N, C); for tags and spans N times (n, C), where what
follows the row's tokens is padding and not read."""


@runtime_checkable
class Split(Protocol):
    """The examples of one file and their rows."""

    rows: Rows
    warnings: tuple[str, ...]
    """Counts of examples that were cut, skipped or kept with a fault, with file and lines."""
    name: str
    """For messages and the names of metrics: train, dev, dev_mismatched, the name of a file."""

    @property
    def constant_score(self) -> float:
        """Score of the best constant prediction in the task's metric; NaN without labels.

        A run that is not above it has failed (Mosbach et al. 2021).
        """
        ...

    def score(self, outputs: Outputs, saved: Mapping[str, float] | None = None) -> dict[str, float]:
        """Metrics by name.

        Args:
            outputs: logits.
            saved: scores of the dev split, where another split is scored with what was found there
                (`null_threshold`); None finds it on this split.

        Raises:
            UserError: the file has no labels.
        """
        ...

    def write_predictions(
        self, outputs: Outputs, out: Path, scores: Mapping[str, float]
    ) -> list[Path]:
        """Write what is predicted into the directory `out`.

        Args:
            outputs: logits.
            out: made where it is missing; files of the same name in it are replaced.
            scores: those of the dev split, which hold the null threshold.

        Returns:
            The files.

        Raises:
            UserError: the disk is full or the directory cannot be written.
        """
        ...


@runtime_checkable
class Task(Protocol):
    """A task, with its labels known."""

    objective: Objective
    num_outputs: int
    """Columns of the logits."""
    metric: str
    """Metric that chooses the best checkpoint, a key of `Split.score`; more is better."""

    def train_split(self) -> Split:
        """Return the training data.

        Raises:
            UserError: the task was restored and has none.
        """
        ...

    def dev_splits(self) -> list[Split]:
        """Return the splits that score checkpoints; the first chooses the best checkpoint.

        Raises:
            UserError: the task was restored and has none.
        """
        ...

    def open_split(self, source: str, *, labelled: bool = True) -> Split:
        """Another file with the same columns, with or without labels; of GLUE also a split's name.

        Args:
            source: the file or split.
            labelled: False where labels are not needed, so that wrong ones do no harm.

        Raises:
            UserError: it cannot be read, or has a label that is not among those learned.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return everything that `restore_task` needs as JSON, without the training data."""
        ...


@dataclass(frozen=True)
class Learned:
    """Knowledge of a task from its training data."""

    labels: tuple[str, ...] = ()
    """Names of the classes or tags, in the order of the outputs."""
    mean: float = 0.0
    """Mean of the training scores; the model predicts (score - mean) / deviation."""
    deviation: float = 1.0
    """Deviation of the training scores."""
    scheme: Literal["iob2", "plain"] = "iob2"
    """Scheme of the tags."""
    rules: Literal["v1.1", "v2.0"] = "v2.0"
    """Rules by which answers are scored; only v2.0 knows questions without answer."""


def describe(config: TaskConfig, learned: Learned) -> dict[str, Any]:
    """Return a task as JSON; `restore_task` reads it."""
    return {"task": to_dict(config), "learned": to_dict(learned)}

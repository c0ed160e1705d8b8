"""The shape of a fine-tuning task: labels, splits, and scores and predictions from logits."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bert_jax.config.mapping import to_dict
from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.rows import Rows
from bert_jax.tokenization.tokenizer import Tokenizer

HeadKind = Literal["single_label", "multi_label", "regression", "tags", "span", "embedding"]
"""Kind of prediction: one class, any number of classes, a number, a tag for each word, a span; or
the vector of a text."""

Outputs = Sequence[np.ndarray] | np.ndarray
"""float32 logits of the rows in their order: (N, C); for tags and spans N times (n, C), where what
follows the row's tokens is padding and not read; vectors (D,) or, of a group, (G, D)."""


class Split(ABC):
    """Examples of one file and their rows.

    Args:
        name: name in messages and metrics: train, dev, dev_mismatched, the name of a file.
        rows: rows of the examples.
        warnings: counts of examples that were cut, skipped or kept with a fault, with file and
            lines.
        score_names: names of the scores.
    """

    def __init__(
        self, name: str, rows: Rows, warnings: Sequence[str], score_names: Sequence[str]
    ) -> None:
        self.name = name
        self.rows = rows
        self.warnings = tuple(warnings)
        self._score_names = score_names

    @property
    @abstractmethod
    def constant_score(self) -> float:
        """Score of the best constant prediction in the task's metric; NaN without labels.

        A run that is not above it has failed (Mosbach et al. 2021).
        """

    def score(self, outputs: Outputs, saved: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the metrics by name; all are NaN where a logit is not finite.

        Args:
            outputs: logits.
            saved: scores of the dev split, where another split is scored with what was found there
                (`null_threshold`); None finds it on this split.

        Raises:
            UserError: the file has no labels.
        """
        if not self._is_finite(outputs):
            return dict.fromkeys(self._score_names, math.nan)
        return self._score(outputs, saved)

    def write_predictions(
        self, outputs: Outputs, out: Path, scores: Mapping[str, float]
    ) -> list[Path]:
        """Write the predictions into the directory `out`, and return the files.

        Args:
            outputs: logits.
            out: made where it is missing; files of the same name in it are replaced.
            scores: scores of the dev split, which hold the null threshold.

        Raises:
            UserError: a logit is not finite, the disk is full or the directory cannot be written.
        """
        if not self._is_finite(outputs):
            raise UserError(f"{self.name}: outputs are not finite; the model has diverged")
        paths = []
        for name, text in self._prediction_files(outputs, scores):
            paths.append(Path(out) / name)
            replace_file(paths[-1], text.encode())
        return paths

    @abstractmethod
    def texts(self) -> list[tuple[str, ...]]:
        """Return the texts of each example, without labels and answers."""

    @abstractmethod
    def select(self, examples: Sequence[int]) -> "tuple[Split, np.ndarray]":
        """Return a split of some examples, by their numbers, ascending, and its rows in this one.

        Nothing is cut anew: the rows are (n,) numbers of rows of this split.
        """

    @abstractmethod
    def _score(self, outputs: Outputs, saved: Mapping[str, float] | None) -> dict[str, float]:
        """Score finite logits."""

    @abstractmethod
    def _prediction_files(
        self, outputs: Outputs, scores: Mapping[str, float]
    ) -> Iterator[tuple[str, str]]:
        """Yield names and contents of the files of predictions."""

    def _is_finite(self, outputs: Outputs) -> bool:
        rows = zip(self.rows.tokens, outputs, strict=True)
        return all(np.isfinite(logits[: len(ids)]).all() for ids, logits in rows)


@dataclass(frozen=True)
class LabelSpec:
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


class Task(ABC):
    """A task whose labels are known.

    Args:
        config: the task.
        spec: knowledge from the training data.
        tokenizer: of the model.
    """

    objective: HeadKind
    num_outputs: int
    """Columns of the logits."""
    metric: str
    """Metric that chooses the best checkpoint, a key of `Split.score`; more is better."""

    def __init__(self, config: TaskConfig, spec: LabelSpec, tokenizer: Tokenizer) -> None:
        self.config = config
        self.spec = spec
        self.tokenizer = tokenizer
        self._train: Split | None = None
        self._devs: list[Split] = []

    @classmethod
    @abstractmethod
    def open(cls, config: TaskConfig, tokenizer: Tokenizer) -> "Task":
        """Read training and dev data; see `opening.open_task`."""

    @abstractmethod
    def open_split(self, source: str, *, labelled: bool = True) -> Split:
        """Read another file with the same columns.

        Args:
            source: the file; of GLUE also the name of a split.
            labelled: False where labels are not needed, so that wrong ones do no harm.

        Raises:
            UserError: it cannot be read, or has a label that is not among those learned.
        """

    def _with_splits(self, train: Split, devs: Sequence[Split]) -> "Task":
        self._train, self._devs = train, list(devs)
        return self

    def train_split(self) -> Split:
        """Return the training data; a `UserError` if the task was restored."""
        if self._train is None:
            raise UserError("a task read from a checkpoint has no training data")
        return self._train

    def dev_splits(self) -> list[Split]:
        """Return the splits that score checkpoints; the first chooses the best checkpoint.

        Raises:
            UserError: the task was restored.
        """
        if not self._devs:
            raise UserError("a task read from a checkpoint has no dev data; name a file")
        return self._devs

    def describe(self) -> dict[str, Any]:
        """Return everything that `restore_task` needs as JSON, without the training data."""
        return {"task": to_dict(self.config), "learned": to_dict(self.spec)}

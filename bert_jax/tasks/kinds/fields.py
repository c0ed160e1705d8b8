"""The fields that all kinds of tasks have, and the questions that a run asks of any task."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from bert_jax.config.bounds import AtLeast, Bounded, Natural, Or
from bert_jax.errors import UserError
from bert_jax.files.urls import scheme
from bert_jax.tasks.long_texts import CUT, LongTexts
from bert_jax.tasks.skew import SkewConfig


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Bounded, section="task"):
    """The data of a task, and the way they are written; each kind has fields of its own."""

    CHOSEN_BY: ClassVar[str] = "kind"
    VARIANTS: ClassVar[Mapping[str, "type[TaskConfig]"]] = {}
    """Kinds by name, those of `tasks.config`."""
    LENGTH: ClassVar[int] = 128
    """Default of `max_length`."""
    FILES: ClassVar[str] = ""
    """Description of a file of the kind."""
    PATHS: ClassVar[Sequence[str]] = ("train", "dev", "test")
    """Fields that name files."""

    kind: str = "table"
    """Kind of the data: a table of texts, a task of GLUE, tagged words, questions about texts
    (squad), multiple choice, dependency trees (parsing), or texts that belong together."""
    max_length: Annotated[int, AtLeast(8), Or(0)] = 0
    """Tokens in a row, special tokens included; 0: 128, for squad 384, for embedding 256, or the
    model's positions where they are fewer. Longer texts are cut and counted in a warning; tagged
    sentences and the contexts of squad are read in windows."""
    folds: Annotated[int, AtLeast(2), Or(0)] = 0
    """Number of folds of the training data; each is held out of a run once, with the same mixture
    of labels and with groups kept together. 0: no folds."""
    fold: Natural = 0
    """Fold that a run holds out, from 1; 0: a run for each fold, one after another."""
    metric: str = ""
    """Metric that chooses the best checkpoint; empty: the first of the task's. glue: as the
    leaderboard. table: single_label has accuracy, f1 (of the second of two labels), macro_f1 and
    matthews; multi_label f1 (micro), macro_f1 and accuracy; regression pearson and spearman.
    tagging: entities have f1, precision, recall and accuracy, other tags accuracy. squad: f1 and
    exact. parsing: las and uas. embedding: rows of scores have spearman and pearson, other rows
    ndcg@10, mrr@10, recall@100 and map."""
    test: str = ""
    """File, or of GLUE a split with labels, that is scored once, after training; empty: none."""

    def __post_init__(self) -> None:
        """Refuse a fold and a metric that the task does not have."""
        super().__post_init__()
        if self.fold > self.folds:
            raise UserError(
                f"task.fold is {self.fold}, and task.folds {self.folds}; fold must be one of the "
                "folds from 1, or 0 for all"
            )
        if self.metrics:
            self.choose_metric(self.metrics)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that are known before the data are read, the default first."""
        return ()

    def choose_metric(self, metrics: Sequence[str]) -> str:
        """Return the metric that is asked for; the first of the task's metrics by default.

        Raises:
            UserError: The task has no such metric.
        """
        metric = self.metric or metrics[0]
        if metric not in metrics:
            hint = "; f1 is for two labels" if metric == "f1" and "macro_f1" in metrics else ""
            raise UserError(
                f"task.metric is {metric!r}; the metrics of this task are "
                f"{', '.join(metrics)}{hint}"
            )
        return metric

    @property
    def skew(self) -> SkewConfig:
        """Treatment of rare classes; without options where the kind has none."""
        return self if isinstance(self, SkewConfig) else SkewConfig()

    @property
    def long_texts(self) -> LongTexts:
        """Treatment of texts with more tokens than a row."""
        return CUT

    @property
    def length(self) -> int:
        """Largest number of tokens in a row, special tokens included."""
        return self.max_length or self.LENGTH

    def fitted(self, max_positions: int) -> "TaskConfig":
        """Lower the default length to the positions of a model."""
        if self.max_length or self.length <= max_positions:
            return self
        return replace(self, max_length=max_positions)

    @property
    def sources(self) -> dict[str, str]:
        """Files that a run reads, or data sets as tfds:NAME, by the field that names them."""
        return {f"task.{name}": getattr(self, name) for name in self.PATHS if getattr(self, name)}

    @property
    def dev_sources(self) -> dict[str, str]:
        """Dev data by the name of the split; none where rows of the training file are held out."""
        return {}

    @property
    def test_sources(self) -> dict[str, str]:
        """Test data by the name of the split; none where no test data are named."""
        return {"test": self.test} if self.test else {}

    def with_folds(self) -> "TaskConfig":
        """Return the task with all training data, for folds to be held out.

        Raises:
            UserError: The task names dev data, or its scores need all dev data at once.
        """
        return self

    def located(self) -> "TaskConfig":
        """Return the configuration with absolute paths, for another working directory."""
        named = {name: getattr(self, name) for name in self.PATHS}
        paths: Any = {n: os.path.abspath(v) for n, v in named.items() if v and not self._is_name(v)}
        return replace(self, **paths)

    def _is_name(self, source: str) -> bool:
        """Say whether a source is no local path."""
        return source.startswith("tfds:") or scheme(source) is not None

    def source(self, field: str) -> str:
        """Return a field that must not be empty, such as "train"."""
        value: str = getattr(self, field)
        if not value:
            what = self.FILES
            if field == "dev":
                what = (
                    what.replace("a file", "a second file") + ", to choose the best checkpoint by"
                )
            raise UserError(f"task.{field} is empty; name {what}")
        return value


@dataclass(frozen=True, kw_only=True)
class FileTaskConfig(TaskConfig):
    """The fields of all kinds whose data are files of the user."""

    train: str = ""
    """File to train on."""
    dev: str = ""
    """File to choose the best checkpoint by; empty (table, embedding): rows of the training file
    are held out."""

    @property
    def dev_sources(self) -> dict[str, str]:
        """Dev data by the name of the split; none where rows of the training file are held out."""
        return {"dev": self.dev} if self.dev and not self.folds else {}

    def with_folds(self) -> TaskConfig:
        """Return the task with all training data; see `TaskConfig.with_folds`."""
        if self.dev:
            raise UserError(
                f"task.dev is set, and task.folds is {self.folds}: each fold is held out of the "
                "training file; leave dev out"
            )
        return replace(self, dev=self.source("train"))

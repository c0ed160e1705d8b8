"""Configuration fields that all kinds of tasks share, and properties that training runs read."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from bert_jax.config.bounds import Above, AtLeast, Below, Bounded, Natural, Or
from bert_jax.errors import UserError
from bert_jax.files.urls import scheme
from bert_jax.tasks.long_texts import CUT, LongTexts
from bert_jax.tasks.skew import SkewConfig
from bert_jax.tasks.tables import TableFormat

ProblemType = Literal["single_label", "multi_label", "regression"]


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Bounded, section="task"):
    """Settings that all kinds of tasks share; each kind adds its own fields."""

    CHOSEN_BY: ClassVar[str] = "kind"
    VARIANTS: ClassVar[Mapping[str, "type[TaskConfig]"]] = {}
    """Configuration classes by kind; `tasks.config` fills the mapping."""
    LENGTH: ClassVar[int] = 128
    """Default of `max_length`."""
    METRICS: ClassVar[tuple[str, ...]] = ()
    FILES: ClassVar[str] = ""
    """Description of the files of this kind, for messages."""
    PATHS: ClassVar[Sequence[str]] = ("train", "dev", "test")
    """Names of the fields that name files."""

    kind: str = "table"
    """Kind of task: table (texts with labels), glue, tagging (words with tags), squad (questions
    about texts), choice (multiple choice), parsing (dependency trees), embedding (vectors), or
    rerank (scores of queries with documents)."""
    max_length: Annotated[int, AtLeast(8), Or(0)] = 0
    """Largest number of tokens in a row, including special tokens. 0 means 128 (384 for squad, 256
    for embedding and rerank), or the model's number of positions if that is lower. Longer texts are
    cut, and a warning counts them. Tagged sentences and squad contexts are split into windows."""
    folds: Annotated[int, AtLeast(2), Or(0)] = 0
    """Number of folds of the training data for cross-validation, each held out in one run. Folds
    have the same mix of labels and keep groups together. 0 means no cross-validation."""
    fold: Natural = 0
    """Number of the fold to hold out; the first fold is 1. 0 means one run for each fold."""
    metric: str = ""
    """Metric that selects the best checkpoint; if empty, the first metric listed here. glue: the
    leaderboard's metrics. table: accuracy, f1 (of the second label, if there are two), macro_f1 or
    matthews for single_label; f1 (micro), macro_f1 or accuracy for multi_label; pearson or spearman
    for regression. choice: accuracy. tagging: f1, precision, recall or accuracy for entity tags;
    accuracy for plain tags. squad: f1 or exact. parsing: las or uas. embedding: spearman or pearson
    for rows of scores; ndcg@10, mrr@10, recall@100 or map for other rows."""
    test: str = ""
    """File (for GLUE, a split with labels) to score once, after training. Empty means none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fold > self.folds:
            right = f"a fold from 1 to {self.folds}, or 0 for all" if self.folds else "0"
            raise UserError(
                f"task.fold is {self.fold}, but task.folds is {self.folds}; expected {right}"
            )
        if self.metrics:
            self.choose_metric(self.metrics)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that are known before the data are read, the default first."""
        return self.METRICS

    def choose_metric(self, metrics: Sequence[str]) -> str:
        """Return the configured metric (default: the first). Raise a UserError if it is unknown."""
        metric = self.metric or metrics[0]
        if metric not in metrics:
            hint = "; f1 needs two labels" if metric == "f1" and "macro_f1" in metrics else ""
            raise UserError(
                f"task.metric is {metric!r}; the metrics of this task are "
                f"{', '.join(metrics)}{hint}"
            )
        return metric

    @property
    def skew(self) -> SkewConfig:
        """Options for rare classes; the defaults if this kind of task has no such options."""
        return self if isinstance(self, SkewConfig) else SkewConfig()

    @property
    def long_texts(self) -> LongTexts:
        """Treatment of texts that do not fit in a row."""
        return CUT

    @property
    def length(self) -> int:
        """Largest number of tokens in a row, including special tokens."""
        return self.max_length or self.LENGTH

    def fitted(self, max_positions: int) -> "TaskConfig":
        """Lower the default `max_length` if the model has only `max_positions` positions."""
        if self.max_length or self.length <= max_positions:
            return self
        return replace(self, max_length=max_positions)

    @property
    def sources(self) -> dict[str, str]:
        """Files or data sets (tfds:NAME) that a run reads, by configuration field."""
        return {f"task.{name}": getattr(self, name) for name in self.PATHS if getattr(self, name)}

    @property
    def dev_sources(self) -> dict[str, str]:
        """Dev data by the name of the split; empty if rows of the training file are held out."""
        return {}

    @property
    def test_sources(self) -> dict[str, str]:
        """Test data by the name of the split; empty if no test data are named."""
        return {"test": self.test} if self.test else {}

    def with_folds(self) -> "TaskConfig":
        """Return a configuration that reads all training data, from which folds are held out later.

        Raise a UserError if dev data are named, or this kind of task cannot be scored in folds.
        """
        return self

    def located(self) -> "TaskConfig":
        """Return the configuration with absolute paths, for use from any working directory."""
        named = {name: getattr(self, name) for name in self.PATHS}
        paths: Any = {n: os.path.abspath(v) for n, v in named.items() if v and not self._is_name(v)}
        return replace(self, **paths)

    def _is_name(self, source: str) -> bool:
        """Return true if a source names a data set, a split or a URL, not a local file."""
        return source.startswith("tfds:") or scheme(source) is not None

    def source(self, field: str) -> str:
        """Return the value of a field such as "train". Raise a UserError if it is empty."""
        value: str = getattr(self, field)
        if not value:
            what = self.FILES
            if field == "dev":
                second = what.replace("a file", "a second file")
                what = f"{second}, which selects the best checkpoint"
            raise UserError(f"task.{field} is empty; set it to {what}")
        return value


@dataclass(frozen=True, kw_only=True)
class FileTaskConfig(TaskConfig):
    """Settings of tasks that read the user's files."""

    train: str = ""
    """File to train on."""
    dev: str = ""
    """File that selects the best checkpoint. If it is empty, the kinds table and embedding hold out
    rows of the training file. With `folds`, it must be empty."""

    @property
    def dev_sources(self) -> dict[str, str]:
        """Dev data by the name of the split; empty if rows of the training file are held out."""
        return {"dev": self.dev} if self.dev and not self.folds else {}

    def with_folds(self) -> TaskConfig:
        """Return a configuration that reads all training data (see `TaskConfig.with_folds`)."""
        if self.dev:
            raise UserError(
                f"task.dev is set, but task.folds is {self.folds}, so the dev data are folds of "
                "the training file; leave task.dev out"
            )
        return replace(self, dev=self.source("train"))


@dataclass(frozen=True, kw_only=True)
class WrittenConfig(TableFormat, FileTaskConfig):
    """Settings of tasks that read tables in any format."""

    id: str = ""
    """Column of the rows' ids. If empty, rows are numbered from 0."""
    dev_rate: Annotated[float, Above(0), Below(1)] = 0.1
    """Share of the distinct texts (of the distinct documents, for embedding pairs) to hold out if
    dev is empty. Rows with the same text stay together."""

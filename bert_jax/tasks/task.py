"""The interface of a fine-tuning task: labels, splits, scores and predictions from logits."""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from bert_jax.config.mapping import to_dict
from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.examples import Data
from bert_jax.tasks.overlap import example_key, joined
from bert_jax.tasks.reports.intervals import Grounds, intervals, unweighted
from bert_jax.tasks.rows import Rows
from bert_jax.tokenization.tokenizer import Tokenizer

HeadKind = Literal[
    "single_label", "multi_label", "regression", "tags", "span", "arcs", "choice", "embedding"
]
"""Kind of prediction, in the order above: one class, any number of classes, a score, a tag for each
word, an answer span, a head and a relation for each word, one of several choices, a vector."""

Outputs = Sequence[np.ndarray] | np.ndarray
"""Model outputs, float32, for N rows or groups in order: logits (N, C), or (N, G) for choices;
vectors (N, D) for embeddings, or (N, G, D) in groups; N arrays (n, C) for tags and spans, or
(n, n, 2) for arcs, in which entries after the row's tokens are padding."""

SplitScores = Mapping[str, float]
"""Scores of a split by name, with the thresholds and the temperature that predictions need."""


class Examined(NamedTuple):
    """Data for the confidence intervals of a split's scores, and the details of its report."""

    grounds: Grounds
    details: Callable[[], dict[str, Any]] = dict
    """Function that computes the details, JSON values; reports call it, evaluations do not."""


class Split(ABC):
    """Examples of one file and their rows.

    Args:
        data: examples of the file; `data.name` names the split in messages and metrics: train, dev,
            dev_mismatched, or a file's name.
        rows: rows of the examples.
        owners: number of each row's example; None: each example has one row.
        warnings: messages that count examples cut to fit in a row, with file and lines.
        score_names: names of the scores.
    """

    _task: "Task[Any]"
    PER_TOKEN: ClassVar[bool] = False
    """Whether outputs have an entry for each token of a row."""
    LABELS: ClassVar[str] = "labels"
    """Noun for the labels in messages."""

    def __init__(
        self,
        data: Data[Any],
        rows: Rows,
        score_names: Sequence[str],
        warnings: Iterable[str] = (),
        owners: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        self.name = data.name
        self.rows = rows
        self.warnings = (*data.warnings, *warnings)
        self._data = data
        self._examples = data.examples
        self._owners = range(len(data.examples)) if owners is None else owners
        self._score_names = score_names

    @cached_property
    def constant_score(self) -> float:
        """Score of the best constant prediction in the task's metric; NaN without labels.

        A run whose score is no higher has failed (Mosbach et al. 2021).
        """
        return math.nan if self._data.truth is None else self._best_constant(self._data.truth)

    def _best_constant(self, gold: list[Any]) -> float:
        """Compute `constant_score` from the labels of all examples."""
        raise NotImplementedError

    @property
    def _gold(self) -> list[Any]:
        """Labels of all examples; a `UserError` if an example has no label."""
        if self._data.truth is None:
            raise UserError(f"{self.name} has no {self.LABELS}, so it cannot be scored; predict it")
        return self._data.truth

    @property
    def num_scored(self) -> int:
        """Number of predictions that a score averages over."""
        return len(self.rows)

    def score(self, outputs: Outputs, saved: SplitScores | None = None) -> dict[str, float]:
        """Return the metrics by name; all are NaN if a logit is not finite.

        Thresholds and temperature come from the `saved` scores of the dev split; if `saved` is
        None, they are fitted to this split.

        Raises:
            UserError: the file has no labels.
        """
        if not self._is_finite(outputs):
            return dict.fromkeys(self._score_names, math.nan)
        return self._score(outputs, saved)

    @property
    def unit_names(self) -> tuple[str, Sequence[Hashable]]:
        """Plural noun for the units of confidence intervals, and the key of each example's unit."""
        return "examples", range(len(self._examples))

    @cached_property
    def units(self) -> np.ndarray:
        """Numbers (N,) of the examples' units."""
        return joined(self.unit_names[1])

    def grounds(self, outputs: Outputs, saved: SplitScores | None = None) -> Grounds | None:
        """Return the data for confidence intervals; None if a logit is not finite. See `score`."""
        if not self._is_finite(outputs):
            return None
        return self._examine(outputs, self._score(outputs, saved)).grounds

    def report(self, outputs: Outputs, saved: SplitScores | None = None) -> Mapping[str, Any]:
        """Return scores, their intervals and the details behind them, as JSON values.

        The keys are `examples`, `scores`, `intervals` (95%) and, if all logits are finite,
        `no_intervals` (reasons), `units` (name and number of the resampled units), `constant` and
        the task's own keys (see `reports.lines`). Arguments and errors are as in `score`.
        """
        if not self._is_finite(outputs):
            nothing: dict[str, float | None] = dict.fromkeys(self._score_names)
            return {"examples": len(self._examples), "scores": nothing, "intervals": {}}
        scores = self._score(outputs, saved)
        grounds, details = self._examine(outputs, scores)
        found = intervals(grounds)
        return {
            "examples": len(self._examples),
            "scores": {name: _null(value) for name, value in scores.items()},
            "intervals": {name: ends for name, ends in found.found.items() if name in scores},
            "no_intervals": {name: why for name, why in found.missing.items() if name in scores},
            "units": [self.unit_names[0], len(set(self.units.tolist()))],
            "constant": _null(self.constant_score),
            **details(),
        }

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the examples' texts and labels; the tokenizer does not matter."""
        digest = hashlib.sha256()
        for each in zip(self.texts(), self.truth(), strict=True):
            digest.update(json.dumps(each).encode())
        return digest.hexdigest()

    def write_predictions(self, outputs: Outputs, out: Path, scores: SplitScores) -> list[Path]:
        """Write the predictions into the directory `out`, and return the files.

        The directory is created if needed; files of the same name are replaced. `scores` are the
        dev split's scores, with its temperature and thresholds.

        Raises:
            UserError: a logit is not finite, or the files cannot be written.
        """
        if not self._is_finite(outputs):
            raise UserError(f"{self.name}: outputs are not finite; the model has diverged")
        paths = []
        for name, text in self._prediction_files(outputs, scores):
            paths.append(Path(out) / name)
            replace_file(paths[-1], text.encode())
        return paths

    def texts(self) -> list[tuple[str, ...]]:
        """Return the texts of each example, without labels and answers."""
        return [each.texts for each in self._examples]

    def truth(self) -> Sequence[Any]:
        """Return the label of each example as a JSON value, None for an example without a label."""
        return [each.label for each in self._examples]

    def strata(self) -> Sequence[Hashable]:
        """Return each example's stratum for stratified folds; one stratum by default."""
        return [0] * len(self._examples)

    def group_keys(self) -> list[Sequence[Hashable]]:
        """Return lists with a key for each example; examples that share a key stay in one fold."""
        return [[example_key(texts) for texts in self.texts()]]

    def select(
        self, examples: Sequence[int], *, trains: bool = False
    ) -> "tuple[Split, np.ndarray]":
        """Return a new split of the examples with these ascending numbers, and row numbers (n,).

        The row numbers are positions of its rows in this split; for `trains` see `Data`.
        """
        some = tuple(self._examples[number] for number in examples)
        split = self._task.SPLIT(self._task, replace(self._data, examples=some, trains=trains))
        return split, np.flatnonzero(np.isin(self._owners, examples))

    def _score(self, outputs: Outputs, saved: SplitScores | None) -> dict[str, float]:
        """Compute the scores of finite outputs (see `score`), by default from `_examine`."""
        grounds = self._examine(outputs, {}).grounds
        found = unweighted(grounds.score, len(grounds.units))
        return {name: found[name] for name in self._score_names}

    @abstractmethod
    def _examine(self, outputs: Outputs, scores: SplitScores) -> Examined:
        """Return, for finite outputs, the data for intervals and the details of the report."""

    def _prediction_files(self, outputs: Outputs, scores: SplitScores) -> Iterator[tuple[str, str]]:
        """Yield names and contents of prediction files; by default predictions.jsonl."""
        entries = zip(self._examples, self._entries(outputs, scores), strict=True)
        lines = [json.dumps({"id": each.id, **e}, ensure_ascii=False) for each, e in entries]
        yield "predictions.jsonl", "\n".join(lines) + "\n"

    def _entries(self, outputs: Outputs, scores: SplitScores) -> Iterable[Mapping[str, Any]]:
        """Return the prediction of each example as JSON values."""
        raise NotImplementedError

    def _is_finite(self, outputs: Outputs) -> bool:
        if not self.PER_TOKEN:
            return bool(np.isfinite(outputs).all())
        rows = zip(self.rows.tokens, outputs, strict=True)
        return all(np.isfinite(logits[: len(ids)]).all() for ids, logits in rows)

    def _stacked(self, outputs: Outputs, *shape: int, dtype: Any = np.float64) -> np.ndarray:
        """Return the outputs as an array; a `ValueError` unless its first axes have `shape`."""
        found = np.asarray(outputs, dtype)
        if found.shape[: len(shape)] != shape:
            raise ValueError(f"{self.name}: outputs {found.shape}; expected {shape}")
        return found


@dataclass(frozen=True)
class LabelSpec:
    """Facts about a task that its training data determine."""

    labels: tuple[str, ...] = ()
    """Names of the classes or tags, in the order of the outputs."""
    mean: float = 0.0
    """Mean of the training scores; the model predicts (score - mean) / deviation."""
    deviation: float = 1.0
    """Standard deviation of the training scores."""
    scheme: Literal["iob2", "plain"] = "iob2"
    """Scheme of the tags: entities in IOB2, or plain tags."""
    rules: Literal["v1.1", "v2.0"] = "v2.0"
    """Rules for scoring answers; only v2.0 allows questions without an answer."""


Config = TypeVar("Config", bound=TaskConfig)


class Task(ABC, Generic[Config]):
    """A task with known labels, which reads data, encodes rows and scores outputs."""

    SPLIT: Callable[[Any, Any], Split]
    """Class of the task's splits; called with the task and the data of a file."""
    objective: HeadKind
    metrics: Sequence[str]
    """Metrics of `Split.score` that can select the best checkpoint; higher is better."""

    def __init__(self, config: Config, spec: LabelSpec, tokenizer: Tokenizer) -> None:
        self.config = config
        self.spec = spec
        self.tokenizer = tokenizer
        self.metrics = self._metrics()
        self.metric = config.choose_metric(self.metrics)
        self._train: Split | None = None
        self._devs: list[Split] = []

    @property
    def num_outputs(self) -> int:
        """Columns of the logits: one for each label, or one if there are no labels."""
        return len(self.spec.labels) or 1

    def _metrics(self) -> Sequence[str]:
        return self.config.metrics

    @classmethod
    def open(cls, config: Config, tokenizer: Tokenizer) -> "Task[Config]":
        """Make the task, with its training and dev data (see `opening.open_task`)."""
        spec, [train, *devs] = cls._read(config)
        task = cls(config, spec, tokenizer)
        task._train = cls.SPLIT(task, replace(train, name="train", trains=True))
        for dev in devs:
            name = "dev" if len(devs) == 1 else dev.name
            task._devs.append(cls.SPLIT(task, replace(dev, name=name)))
        return task

    @classmethod
    @abstractmethod
    def _read(cls, config: Config) -> tuple[LabelSpec, Sequence[Data[Any]]]:
        """Read the training and dev data; return the training data's `LabelSpec`, and all data."""

    def open_split(self, source: str, *, labelled: bool = True) -> Split:
        """Read another file with the same columns, or a split of GLUE by its name.

        Raises:
            UserError: the file cannot be read or, if `labelled`, has a label that was not learned.
        """
        return self.SPLIT(self, self._read_other(source, labelled))

    @abstractmethod
    def _read_other(self, source: str, labelled: bool) -> Data[Any]:
        """Read the examples of another file (see `open_split`)."""

    def hold_out(self, parts: np.ndarray, fold: int) -> None:
        """Use as dev data the training examples whose entry in `parts` (N,) equals `fold`."""
        whole = self.train_split()
        self._train, dev = (
            whole.select(np.flatnonzero((parts == fold) == held).tolist(), trains=not held)[0]
            for held in (False, True)
        )
        dev.name, self._devs = "dev", [dev]

    def train_split(self) -> Split:
        """Return the training data; a `UserError` if the task was restored."""
        if self._train is None:
            raise UserError("a task read from a checkpoint has no training data")
        return self._train

    def dev_splits(self) -> list[Split]:
        """Return the splits that score checkpoints; the first selects the best checkpoint.

        Raises:
            UserError: the task was restored, without data.
        """
        if not self._devs:
            raise UserError("a task read from a checkpoint has no dev data; name a file")
        return self._devs

    def test_splits(self) -> list[Split]:
        """Read the test data that the configuration names; a UserError if they have no labels."""
        found = []
        for name, source in self.config.test_sources.items():
            split = self.open_split(source)
            if math.isnan(split.constant_score):
                raise UserError(
                    f"task.test is {source!r}, which has no labels; name data "
                    "with labels, or predict it after training"
                )
            split.name = name
            found.append(split)
        return found

    def units(self, scores: SplitScores) -> tuple[float, float]:
        """Return the (shift, factor) that turn logits into predictions, given the dev scores."""
        return 0.0, 1.0

    def thresholds(self, scores: SplitScores) -> tuple[float, ...]:
        """Return the probability above which each label is predicted; () means one half for all."""
        return ()

    def describe(self) -> dict[str, Any]:
        """Return all that `restore_task` needs, as JSON values."""
        return {"task": to_dict(self.config), "learned": to_dict(self.spec)}


def _null(value: float) -> float | None:
    return value if math.isfinite(value) else None

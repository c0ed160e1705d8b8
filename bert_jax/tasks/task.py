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
    "single_label", "multi_label", "regression", "tags", "span", "arcs", "choice", "ranking",
    "embedding",
]  # fmt: skip
"""Kind of prediction. single_label: one class. multi_label: any number of classes. regression: a
score. tags: a tag for each word. span: an answer span. arcs: a head and a relation for each word.
choice: one of several choices. ranking: a score of each document. embedding: a vector."""

Outputs = Sequence[np.ndarray] | np.ndarray
"""Model outputs in float32 for N rows, or for N groups of G rows, in the order of the rows.

Classes and scores have logits (N, C), choices and rankings logits (N, G). Embeddings have vectors
(N, G, D). Tags and spans have N arrays of logits (n, C). Arcs have N arrays (n, n, 2): the score
and the best relation for each pair of token and head. Entries after a row's tokens are padding."""

CONSTANT = "a constant prediction"
SplitScores = Mapping[str, float]
"""Scores of a split by name, including the temperature and thresholds that predictions need."""


class Examined(NamedTuple):
    """Data for the confidence intervals of a split's scores, and the details of its report."""

    grounds: Grounds
    details: Callable[[], dict[str, Any]] = dict
    """Function that computes the details as JSON values; only `Split.report` calls it."""


class Split(ABC):
    """Examples of one file and their rows.

    Args:
        data: the file's examples; `data.name`, such as dev, is the split in messages and metrics.
        owners: index of each row's example; None means that each example has one row.
        warnings: messages to the user, for example about texts that were cut to fit in a row.
    """

    _task: "Task[Any]"
    PER_TOKEN: ClassVar[bool] = False
    """Whether outputs have an entry for each token of a row."""
    LABELS: ClassVar[str] = "labels"
    """Name of the labels in messages, such as "tags"."""
    is_collection = False
    """Whether each example is ranked among all others, so that a smaller set scores higher."""
    baseline = CONSTANT
    """Name, for messages, of the baseline whose score is `constant_score`."""

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
        """Score, in the task's metric, of the best prediction that is the same for all examples.

        The score is NaN without labels. A run that scores no higher failed (Mosbach et al. 2021).
        """
        return math.nan if self._data.truth is None else self._best_constant(self._data.truth)

    def linear_score(self, train: "Split") -> float | None:
        """Return a linear model's score; NaN if the task has none, None without scikit-learn."""
        return math.nan

    def _best_constant(self, gold: list[Any]) -> float:
        """Compute `constant_score` from the labels of all examples."""
        raise NotImplementedError

    @property
    def _gold(self) -> list[Any]:
        if self._data.truth is None:
            raise UserError(
                f"{self.name} has no {self.LABELS}, so it cannot be scored; name a file that has "
                "them, or only predict this file"
            )
        return self._data.truth

    @property
    def num_scored(self) -> int:
        """Number of examples, which may have several rows each."""
        return len(self._examples)

    def score(self, outputs: Outputs, saved: SplitScores | None = None) -> dict[str, float]:
        """Return the metrics by name; all are NaN if a logit is not finite.

        Thresholds and temperature are taken from `saved`, the scores of the dev split. If `saved`
        is None, they are fitted to this split. Raise a UserError if the file has no labels.
        """
        if not self._is_finite(outputs):
            return dict.fromkeys(self._score_names, math.nan)
        return self._score(outputs, saved)

    @property
    def unit_names(self) -> tuple[str, Sequence[Hashable]]:
        """Plural noun for the resampled units, and each example's key; equal keys form one unit."""
        return "examples", range(len(self._examples))

    @cached_property
    def units(self) -> np.ndarray:
        """Index (N,) of each example's unit; confidence intervals resample these units."""
        return joined(self.unit_names[1])

    def grounds(self, outputs: Outputs, saved: SplitScores | None = None) -> Grounds | None:
        """Return data for confidence intervals (see `score`); None if a logit is not finite."""
        if not self._is_finite(outputs):
            return None
        return self._examine(outputs, self._score(outputs, saved)).grounds

    def report(self, outputs: Outputs, saved: SplitScores | None = None) -> Mapping[str, Any]:
        """Return the scores, their confidence intervals and the task's details, as JSON values.

        The report always has `examples` (how many), `scores` and `intervals` (95%). If all logits
        are finite, it also has `no_intervals` (why a score has no interval), `units` (what is
        resampled, and how many), `constant` (see `constant_score`) and the details, whose keys
        depend on the task (see `reports.lines`). Arguments and errors are as in `score`.
        """
        if not self._is_finite(outputs):
            nothing: dict[str, float | None] = dict.fromkeys(self._score_names)
            return {"examples": len(self._examples), "scores": nothing, "intervals": {}}
        scores = self._score(outputs, saved)
        grounds, details = self._examine(outputs, scores)
        found = intervals(grounds)
        return {
            "examples": len(self._examples),
            "scores": {name: null(value) for name, value in scores.items()},
            "intervals": {name: ends for name, ends in found.found.items() if name in scores},
            "no_intervals": {name: why for name, why in found.missing.items() if name in scores},
            "units": [self.unit_names[0], len(set(self.units.tolist()))],
            "constant": null(self.constant_score),
            "baseline": self.baseline,
            **details(),
        }

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the examples' texts and labels; it does not depend on the tokenizer."""
        digest = hashlib.sha256()
        for each in zip(self.texts(), self.truth(), strict=True):
            digest.update(json.dumps(each).encode())
        return digest.hexdigest()

    def write_predictions(self, outputs: Outputs, out: Path, scores: SplitScores) -> list[Path]:
        """Write the predictions into the directory `out`, and return the files' paths.

        The directory is created if needed; files of the same name are replaced. `scores` are the
        dev split's scores, which include the fitted temperature and thresholds. Raise a UserError
        if a logit is not finite, or the files cannot be written.
        """
        if not self._is_finite(outputs):
            raise UserError(
                f"{self.name}: outputs are not finite, so the model has diverged; use another model"
            )
        paths = []
        for name, text in self._prediction_files(outputs, scores):
            paths.append(Path(out) / name)
            replace_file(paths[-1], text.encode())
        return paths

    def label_noise(self, outputs: Outputs, scores: SplitScores) -> list[str]:
        """Return the lines of a TSV table of contradicted labels; [] unless rows have one class."""
        return []

    def texts(self) -> list[tuple[str, ...]]:
        """Return the texts of each example, without labels and answers."""
        return [each.texts for each in self._examples]

    def truth(self) -> Sequence[Any]:
        """Return the label of each example as a JSON value, None for an example without a label."""
        return [each.label for each in self._examples]

    def strata(self) -> Sequence[Hashable]:
        """Return each example's stratum (default: one for all); folds get equal mixes of strata."""
        return [0] * len(self._examples)

    def group_keys(self) -> list[Sequence[Hashable]]:
        """Return lists of one key per example; examples with equal keys in a list share a fold."""
        return [[example_key(texts) for texts in self.texts()]]

    def select(
        self, examples: Sequence[int], *, trains: bool = False
    ) -> "tuple[Split, np.ndarray]":
        """Return a new split of some examples, and the positions (n,) of their rows in this split.

        `examples` are ascending indices; `trains` says whether a model is trained on the new split.
        """
        some = tuple(self._examples[number] for number in examples)
        split = self._task.SPLIT(self._task, replace(self._data, examples=some, trains=trains))
        return split, np.flatnonzero(np.isin(self._owners, examples))

    def _score(self, outputs: Outputs, saved: SplitScores | None) -> dict[str, float]:
        """Compute the scores of finite outputs; by default, with `_examine`'s score function."""
        grounds = self._examine(outputs, {}).grounds
        found = unweighted(grounds.score, len(grounds.units))
        return {name: found[name] for name in self._score_names}

    @abstractmethod
    def _examine(self, outputs: Outputs, scores: SplitScores) -> Examined:
        """Return the data for confidence intervals and the report's details. Outputs are finite."""

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
        """Return the outputs as an array; raise a ValueError if its first axes are not `shape`."""
        found = np.asarray(outputs, dtype)
        if found.shape[: len(shape)] != shape:
            raise ValueError(
                f"{self.name}: outputs have the shape {found.shape}; the first axes must be {shape}"
            )
        return found


@dataclass(frozen=True)
class LabelSpec:
    """Facts about a task that are known once its data have been read."""

    labels: tuple[str, ...] = ()
    """Names of the classes or tags, in the order of the outputs."""
    mean: float = 0.0
    """Mean of the training scores; the model predicts (score - mean) / deviation."""
    deviation: float = 1.0
    """Standard deviation of the training scores."""
    scheme: Literal["iob2", "plain"] = "iob2"
    """Scheme of the tags: iob2 for entities, plain for other tags such as parts of speech."""
    rules: Literal["v1.1", "v2.0"] = "v2.0"
    """Version of SQuAD's scoring rules; only v2.0 allows questions without an answer."""


Config = TypeVar("Config", bound=TaskConfig)


class Task(ABC, Generic[Config]):
    """A fine-tuning task, which reads data, encodes texts as rows and scores a model's outputs."""

    SPLIT: Callable[[Any, Any], Split]
    """Class of the task's splits; its arguments are the task and the data of a file."""
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
        """Number of columns of the logits: one for each label, or 1 if there are no labels."""
        return len(self.spec.labels) or 1

    @property
    def predicts(self) -> HeadKind:
        """Kind of prediction of a saved model's head."""
        return "regression" if self.objective == "ranking" else self.objective

    def _metrics(self) -> Sequence[str]:
        return self.config.metrics

    @classmethod
    def open(cls, config: Config, tokenizer: Tokenizer) -> "Task[Config]":
        """Make the task and read its training and dev data (see `opening.open_task`)."""
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
        """Read the training and dev data; return a `LabelSpec` and the data, training first."""

    def open_split(self, source: str, *, labelled: bool = True) -> Split:
        """Read another file with the same columns, or a split of GLUE by its name.

        Raise a UserError if the file cannot be read or, if `labelled`, has a class that was not
        learned. Tags and relations that were not learned raise no error; they count as misses.
        """
        return self.SPLIT(self, self._read_other(source, labelled))

    @abstractmethod
    def _read_other(self, source: str, labelled: bool) -> Data[Any]:
        """Read the examples of another file (see `open_split`)."""

    def hold_out(self, parts: np.ndarray, fold: int) -> None:
        """Replace the dev data by one fold of the training examples, and train on the rest.

        `parts` (N,) has the fold of each training example; `fold` is the fold to hold out.
        """
        whole = self.train_split()
        self._train, dev = (
            whole.select(np.flatnonzero((parts == fold) == held).tolist(), trains=not held)[0]
            for held in (False, True)
        )
        dev.name, self._devs = "dev", [dev]

    def train_split(self) -> Split:
        """Return the training data; raise a UserError if the task was restored without data."""
        if self._train is None:
            raise UserError("a task read from a checkpoint has no training data")
        return self._train

    def dev_splits(self) -> list[Split]:
        """Return the splits that score checkpoints; the first selects the best checkpoint.

        Raise a UserError if the task was restored without data.
        """
        if not self._devs:
            raise UserError("a task read from a checkpoint has no dev data; name a file to score")
        return self._devs

    def test_splits(self) -> list[Split]:
        """Read the configured test data; raise a UserError if the data have no labels."""
        found = []
        for name, source in self.config.test_sources.items():
            split = self.open_split(source)
            if math.isnan(split.constant_score):
                raise UserError(
                    f"task.test is {source!r}, which has no labels; name a file with labels, or "
                    "leave task.test out and predict the file after training"
                )
            split.name = name
            found.append(split)
        return found

    def units(self, scores: SplitScores) -> tuple[float, float]:
        """Return (shift, factor). Scores, or calibrated logits, are shift + factor * logits."""
        return 0.0, 1.0

    def thresholds(self, scores: SplitScores) -> tuple[float, ...]:
        """Return each label's decision threshold (a probability); () means one half for all."""
        return ()

    def describe(self) -> dict[str, Any]:
        """Return all that `restore_task` needs, as JSON values."""
        return {"task": to_dict(self.config), "learned": to_dict(self.spec)}


def null(value: float) -> float | None:
    """Return a value for JSON: the value itself, or None if it is not finite."""
    return value if math.isfinite(value) else None

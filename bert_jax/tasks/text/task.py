"""Classes, several labels or scores of texts and pairs: tables, and the tasks of GLUE."""

import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.tasks.config import GlueConfig, TableConfig
from bert_jax.tasks.examples import LabelSet
from bert_jax.tasks.folds import strata
from bert_jax.tasks.glue import submission_file
from bert_jax.tasks.task import Examined, LabelSpec, Outputs, Split, Task
from bert_jax.tasks.text import metrics
from bert_jax.tasks.text.decisions import PLAIN, Decisions
from bert_jax.tasks.text.report import text_details, text_grounds
from bert_jax.tasks.text.rows import text_rows
from bert_jax.tasks.text.sources import group_keys, open_glue, open_table, read_glue_source
from bert_jax.tasks.text.tables import TextData, read_other_texts
from bert_jax.tokenization.tokenizer import Tokenizer, num_special

_NAME_GROUPS = "name the column that such rows share in task.group, or intervals are short"


class TextTask(Task[GlueConfig | TableConfig]):
    """A task about texts, configured by kind glue or table."""

    def __init__(
        self, config: GlueConfig | TableConfig, spec: LabelSpec, tokenizer: Tokenizer
    ) -> None:
        super().__init__(config, spec, tokenizer)
        self.objective = config.problem_type
        self.metrics = config.metrics
        if self.objective == "single_label" and len(spec.labels) != 2:
            self.metrics = tuple(name for name in self.metrics if name != "f1")
        self.num_outputs = len(spec.labels) or 1
        self.long = config.long_texts
        self.fits = {"calibrate": config.calibrate, "tune": config.thresholds == "tuned"}
        self.metric = config.choose_metric(self.metrics)

    @classmethod
    def open(cls, config: GlueConfig | TableConfig, tokenizer: Tokenizer) -> Task:
        """Read training and dev data."""
        train, devs = open_glue(config) if isinstance(config, GlueConfig) else open_table(config)
        if train.labels is not None:
            spec = LabelSpec(train.labels.names)
        else:
            scores = _scores(train, "nothing can be learned from them")
            for dev in devs:
                _scores(dev, "a correlation with them is not defined")
            spec = LabelSpec(mean=float(scores.mean()), deviation=float(scores.std()))
        task = cls(config, spec, tokenizer)
        return task._with_splits(TextSplit(task, train), [TextSplit(task, dev) for dev in devs])

    def open_split(self, source: str, *, labelled: bool = True) -> "TextSplit":
        """Read another file; see `Task.open_split`."""
        if isinstance(self.config, GlueConfig):
            return TextSplit(self, read_glue_source(self.config, source, labelled=labelled))
        labels = LabelSet(self.spec.labels) if self.spec.labels else None
        found = read_other_texts(source, self.config, labels, labelled=labelled)
        return TextSplit(self, found)

    # The meaning of outputs

    def units(self, scores: Mapping[str, float]) -> tuple[float, float]:
        """Return mean and deviation of scores; for classes, 0 and 1 / temperature."""
        if self.objective == "regression":
            return self.spec.mean, self.spec.deviation
        return 0.0, 1 / self.decisions(scores).temperature

    def thresholds(self, scores: Mapping[str, float]) -> tuple[float, ...]:
        """Return the tuned thresholds."""
        return self.decisions(scores).thresholds

    def decisions(self, scores: Mapping[str, float]) -> Decisions:
        """Read the conversion of logits to probabilities and labels from scores of the dev data."""
        return Decisions.saved(scores, self.spec.labels)

    def predicted(self, logits: np.ndarray, decisions: Decisions = PLAIN) -> np.ndarray:
        """Return (N,) classes or scores, (N, K) bool for several labels."""
        if self.objective == "single_label":
            return logits.argmax(axis=1)
        if self.objective == "multi_label":
            return decisions.held(logits)
        return logits[:, 0] * self.spec.deviation + self.spec.mean

    def scores(self, labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
        """Return all metrics of the task."""
        if self.objective != "multi_label":
            return {name: metrics.METRICS[name](labels, predicted) for name in self.metrics}
        micro, macro = metrics.multi_label_f1(labels, predicted)
        same = float((labels == predicted).all(axis=1).mean())
        return {"f1": micro, "macro_f1": macro, "accuracy": same}

    def best_constant(self, labels: np.ndarray) -> float:
        """Return the best constant prediction's score in the task's metric."""
        rows = len(labels)
        if self.objective == "single_label":
            # The majority class, except for the F1, which scores class 1.
            best = 1 if self.metric == "f1" else int(np.bincount(labels).argmax())
            return self.scores(labels, np.full_like(labels, best))[self.metric]
        if self.objective == "regression":
            return 0.0
        if self.metric == "accuracy":  # the most frequent set of labels
            _, counts = np.unique(np.packbits(labels, axis=1), axis=0, return_counts=True)
            return float(counts.max() / rows)
        held = np.sort(labels.sum(axis=0))[::-1]
        if self.metric == "macro_f1":  # all labels: no label lowers the F1 of another
            return float(np.mean(2 * held / (rows + held)))
        # Among sets of one size, the set of the most frequent labels has the most hits.
        hits, predicted = held.cumsum(), rows * np.arange(1, len(held) + 1)
        return float(np.max(2 * hits / (predicted + held.sum())))


class TextSplit(Split):
    """Texts of one file."""

    def __init__(self, task: TextTask, data: TextData) -> None:
        self._task = task
        self._data = data
        self._examples = data.examples
        self._submission = data.submission
        self._labels = labels = self._true_labels()
        if labels is not None:
            if task.objective == "regression":
                labels = (labels - task.spec.mean) / task.spec.deviation
            labels = labels.astype(np.int32 if task.objective == "single_label" else np.float32)
        length = task.config.length
        self._rows = text_rows(self._examples, task.tokenizer, length, labels, task.long)
        room = length - num_special(task.tokenizer, self._examples[0].text_pair is not None)
        cut = self._rows.warnings(self._examples, room, task.long)
        count = len({each.text for each in self._examples})
        grouped = isinstance(task.config, GlueConfig) or task.config.group or data.name == "train"
        if not grouped and 5 * count < 4 * len(self._examples):
            cut += (
                f"{data.name}: {len(self._examples):,} rows have {count:,} texts; {_NAME_GROUPS}",
            )
        names = [*task.metrics, *Decisions.score_names(task.spec.labels, **task.fits)]
        super().__init__(data.name, self._rows.rows, [*data.warnings, *cut], names)

    @cached_property
    def constant_score(self) -> float:
        """Score of the best constant prediction; NaN without labels."""
        return math.nan if self._labels is None else self._task.best_constant(self._labels)

    @property
    def num_scored(self) -> int:
        """Number of texts; a text may have several rows."""
        return len(self._examples)

    def texts(self) -> list[tuple[str, ...]]:
        """Return the text or the two texts of each example."""
        return [tuple(filter(None, (each.text, each.text_pair))) for each in self._examples]

    def truth(self) -> list[Any]:
        """Return the class or score of each example, or the numbers of its labels."""
        return [example.label for example in self._examples]

    def strata(self) -> Sequence[Hashable]:
        """Return each example's label, or the quintile of its score."""
        return strata([example.label for example in self._examples])

    def group_keys(self) -> list[Sequence[Hashable]]:
        """Return the texts of each example, and its group where the table has groups."""
        return group_keys(self._examples)

    @property
    def unit_names(self) -> tuple[str, Sequence[Hashable]]:
        """Groups of the table, where there are groups."""
        groups = [each.group for each in self._examples]
        return super().unit_names if None in groups else ("groups", groups)

    def select(self, examples: Sequence[int]) -> tuple[Split, np.ndarray]:
        """Return a split of some examples, and their rows; see `Split.select`."""
        some = tuple(self._examples[number] for number in examples)
        split = TextSplit(self._task, replace(self._data, examples=some))
        return split, np.flatnonzero(np.isin(self._rows.owners, examples))

    def _score(self, outputs: Outputs, saved: Mapping[str, float] | None) -> dict[str, float]:
        task, labels = self._task, self._labels
        if labels is None:
            raise UserError(f"{self.name} has no labels, so it cannot be scored; predict it")
        logits = self._logits(outputs)
        if saved is None:
            decisions = Decisions.fitted(logits, labels, **task.fits)
        else:
            decisions = task.decisions(saved)
        scores = task.scores(labels, task.predicted(logits, decisions))
        return scores | decisions.scores(logits, labels, task.spec.labels, **task.fits)

    def _examine(self, outputs: Outputs, scores: Mapping[str, float]) -> Examined:
        """Return classes, confusion, residuals and mistakes, and the metrics of resamples."""
        assert self._labels is not None  # scored before
        task, logits = self._task, self._logits(outputs)
        decisions = task.decisions(scores)
        predicted = task.predicted(logits, decisions)
        found = text_grounds(task.objective, self._labels, predicted, self.units)
        details = text_details(
            task.objective, task.spec.labels, self._examples, self._labels,
            logits / decisions.temperature, predicted,
        )  # fmt: skip
        if task.fits["calibrate"]:
            details["calibration"] = decisions.calibration(logits, self._labels)
        return Examined(found, details)

    def _prediction_files(
        self, outputs: Outputs, scores: Mapping[str, float]
    ) -> Iterator[tuple[str, str]]:
        """Yield predictions.jsonl and, for a test set of GLUE, the leaderboard's file."""
        logits, decisions = self._logits(outputs), self._task.decisions(scores)
        predicted = self._task.predicted(logits, decisions)
        ids = [example.id for example in self._examples]
        entries = zip(ids, self._entries(logits, predicted, decisions), strict=True)
        lines = [json.dumps({"id": id, **entry}, ensure_ascii=False) for id, entry in entries]
        yield "predictions.jsonl", "\n".join(lines) + "\n"
        if self._submission is not None:
            yield submission_file(*self._submission, ids, predicted)

    def _entries(
        self, logits: np.ndarray, predicted: np.ndarray, decisions: Decisions
    ) -> list[dict[str, Any]]:
        if self._task.objective == "regression":
            return [{"score": score} for score in predicted.tolist()]
        names, several = self._task.spec.labels, self._task.objective == "multi_label"
        if several:
            answers = [{"labels": [names[n] for n in np.flatnonzero(held)]} for held in predicted]
        else:
            answers = [{"label": names[number]} for number in predicted.tolist()]
        listed = np.round(decisions.shares(logits, several=several), 6).tolist()
        return [
            {**answer, "probabilities": dict(zip(names, row, strict=True))}
            for answer, row in zip(answers, listed, strict=True)
        ]

    def _is_finite(self, outputs: Outputs) -> bool:
        return bool(np.isfinite(self._logits(outputs)).all())

    def _logits(self, outputs: Outputs) -> np.ndarray:
        """Return (N, C) logits of the examples from the logits of their rows."""
        logits = np.asarray(outputs, np.float64)
        expected = (len(self.rows), self._task.num_outputs)
        if logits.shape != expected:
            raise ValueError(f"{self.name}: outputs {logits.shape}, {expected} are needed")
        return self._task.long.pooled(logits, self._rows.owners)

    def _true_labels(self) -> np.ndarray | None:
        """Return the labels as the file has them: (N,) classes or scores, (N, K) bool."""
        labels: list[Any] = [example.label for example in self._examples]
        if labels[0] is None:  # none of them has one
            return None
        if self._task.objective != "multi_label":
            return np.array(labels, np.int64 if self._task.objective == "single_label" else float)
        held = np.zeros((len(labels), self._task.num_outputs), bool)
        for row, numbers in zip(held, labels, strict=True):
            row[list(numbers)] = True
        return held


def _scores(data: TextData, consequence: str) -> np.ndarray:
    """Return the scores of a file, which must not be all the same."""
    scores: np.ndarray = np.array([example.label for example in data.examples], np.float64)
    if scores.min() == scores.max():
        raise UserError(
            f"{data.examples[0].origin.path} ({data.name}): all {len(scores):,} scores "
            f"are {scores[0]:g}; {consequence}"
        )
    return scores

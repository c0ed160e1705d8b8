"""Classes, several labels or scores of texts and pairs: tables, and the tasks of GLUE."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from scipy.special import expit, softmax

from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.tasks.config import METRICS, TaskConfig
from bert_jax.tasks.examples import LabelSet
from bert_jax.tasks.glue import glue_task, write_submission
from bert_jax.tasks.task import Learned, Objective, Outputs, describe
from bert_jax.tasks.text import metrics
from bert_jax.tasks.text.rows import text_rows
from bert_jax.tasks.text.sources import (
    TextSource,
    open_glue,
    open_table,
    read_glue_source,
    read_table,
)
from bert_jax.tokenization.tokenizer import Tokenizer


class TextTask:
    """A task about texts; see `task.Task`.

    Args:
        config: of kind glue or table.
        learned: labels, or mean and deviation of scores.
        tokenizer: of the model.
        train: training data; None for a task that was restored.
        devs: dev data.
    """

    def __init__(
        self,
        config: TaskConfig,
        learned: Learned,
        tokenizer: Tokenizer,
        train: TextSource | None = None,
        devs: tuple[TextSource, ...] = (),
    ) -> None:
        self.config = config
        self.learned = learned
        self.tokenizer = tokenizer
        self.labels = LabelSet(learned.labels) if learned.labels else None
        if config.kind == "glue":
            glue = glue_task(config.glue.name)
            self.objective: Objective = "class" if glue.labels else "score"
            self.metrics = glue.metrics
        else:
            self.objective = config.table.kind
            self.metrics = METRICS[config.table.kind]
            if self.objective == "class" and len(learned.labels) != 2:
                self.metrics = tuple(name for name in self.metrics if name != "f1")
        self.num_outputs = len(learned.labels) or 1
        self.metric = config.table.metric or self.metrics[0]
        if self.metric not in self.metrics:
            raise UserError(
                f"task.table.metric is {self.metric!r}, which is for two labels; there are "
                f"{self.num_outputs}: choose {' or '.join(self.metrics)}"
            )
        self._train = None if train is None else TextSplit(self, train)
        self._devs = [TextSplit(self, dev) for dev in devs]

    @classmethod
    def open(cls, config: TaskConfig, tokenizer: Tokenizer) -> "TextTask":
        """Read training and dev data; see `task.open_task`."""
        devs: tuple[TextSource, ...]
        if config.kind == "glue":
            config.source("name")
            config.source("data")
            train, devs = open_glue(config.glue)
        else:
            train, dev = open_table(config.table, config.source("train"))
            devs = (dev,)
        if train.data.labels is not None:
            return cls(config, Learned(train.data.labels.names), tokenizer, train, devs)
        scores = _scores(train, "nothing can be learned from them")
        for dev in devs:
            _scores(dev, "a correlation with them is not defined")
        learned = Learned(mean=float(scores.mean()), deviation=float(scores.std()))
        return cls(config, learned, tokenizer, train, devs)

    def train_split(self) -> "TextSplit":
        """See `task.Task`."""
        if self._train is None:
            raise UserError("a task read from a checkpoint has no training data")
        return self._train

    def dev_splits(self) -> "list[TextSplit]":
        """See `task.Task`."""
        if not self._devs:
            raise UserError("a task read from a checkpoint has no dev data; name a file")
        return self._devs

    def open_split(self, source: str, *, labelled: bool = True) -> "TextSplit":
        """See `task.Task`."""
        if self.config.kind == "glue":
            return TextSplit(self, read_glue_source(self.config.glue, source, labelled=labelled))
        found = read_table(self.config.table, source, self.labels, labelled=labelled)
        return TextSplit(self, found)

    def describe(self) -> dict[str, Any]:
        """See `task.Task`."""
        return describe(self.config, self.learned)

    # What outputs mean

    def predicted(self, logits: np.ndarray) -> np.ndarray:
        """(N,) classes or scores, (N, K) bool for several labels."""
        if self.objective == "class":
            return logits.argmax(axis=1)
        if self.objective == "classes":
            return logits > 0  # a probability above one half
        return logits[:, 0] * self.learned.deviation + self.learned.mean

    def scores(self, labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
        """All metrics of the task."""
        if self.objective != "classes":
            return {name: metrics.METRICS[name](labels, predicted) for name in self.metrics}
        f1 = metrics.multi_label_f1(labels, predicted)
        same = float((labels == predicted).all(axis=1).mean())
        return {"f1": f1.micro, "macro_f1": f1.macro, "accuracy": same}

    def best_constant(self, labels: np.ndarray) -> float:
        """Return the task's metric for the best constant prediction."""
        rows = len(labels)
        if self.objective == "class":
            # The majority class, except for the F1, which is that of class 1.
            best = 1 if self.metric == "f1" else int(np.bincount(labels).argmax())
            return self.scores(labels, np.full_like(labels, best))[self.metric]
        if self.objective == "score":
            return 0.0
        if self.metric == "accuracy":  # the most frequent set of labels
            _, counts = np.unique(np.packbits(labels, axis=1), axis=0, return_counts=True)
            return float(counts.max() / rows)
        held = np.sort(labels.sum(axis=0))[::-1]
        if self.metric == "macro_f1":  # all labels: none makes that of another worse
            return float(np.mean(2 * held / (rows + held)))
        # Of sets of one size, the one with the most frequent labels has the most hits.
        hits, predicted = held.cumsum(), rows * np.arange(1, len(held) + 1)
        return float(np.max(2 * hits / (predicted + held.sum())))


class TextSplit:
    """Texts of one file; see `task.Split`."""

    def __init__(self, task: TextTask, source: TextSource) -> None:
        self._task = task
        self._examples = source.data.examples
        self._submission = source.submission
        self.name = source.name
        self._labels = self._true_labels()
        labels = self._labels
        if labels is not None:
            if task.objective == "class":
                labels = labels.astype(np.int32)
            elif task.objective == "classes":
                labels = labels.astype(np.float32)
            else:
                mean, deviation = task.learned.mean, task.learned.deviation
                labels = ((labels - mean) / deviation).astype(np.float32)
        self.rows, cut = text_rows(self._examples, task.tokenizer, task.config.length, labels)
        self.warnings = (*source.data.warnings, *cut)

    @cached_property
    def constant_score(self) -> float:
        """See `task.Split`."""
        return float("nan") if self._labels is None else self._task.best_constant(self._labels)

    def score(self, outputs: Outputs, saved: Mapping[str, float] | None = None) -> dict[str, float]:
        """See `task.Split`; all metrics are NaN where a logit is not finite."""
        del saved
        labels, logits = self._known_labels(), self._logits(outputs)
        if not np.isfinite(logits).all():
            return dict.fromkeys(self._task.metrics, float("nan"))
        return self._task.scores(labels, self._task.predicted(logits))

    def write_predictions(
        self, outputs: Outputs, out: Path, scores: Mapping[str, float]
    ) -> list[Path]:
        """Write predictions.jsonl and, for a test set of GLUE, the leaderboard's file."""
        del scores
        logits = self._logits(outputs)
        if not np.isfinite(logits).all():
            raise UserError(f"{self.name}: outputs are not finite; the model has diverged")
        predicted = self._task.predicted(logits)
        path = Path(out) / "predictions.jsonl"
        lines = [
            json.dumps({"id": example.id, **entry}, ensure_ascii=False)
            for example, entry in zip(self._examples, self._entries(logits, predicted), strict=True)
        ]
        replace_file(path, ("\n".join(lines) + "\n").encode())
        if self._submission is None:
            return [path]
        ids = [example.id for example in self._examples]
        return [path, write_submission(out, *self._submission, ids, predicted)]

    def _entries(self, logits: np.ndarray, predicted: np.ndarray) -> list[dict[str, Any]]:
        if self._task.objective == "score":
            return [{"score": score} for score in predicted.tolist()]
        names = self._task.learned.labels
        if self._task.objective == "class":
            shares = softmax(logits, axis=1)
            answers = [{"label": names[number]} for number in predicted.tolist()]
        else:
            shares = expit(logits)
            answers = [{"labels": [names[n] for n in np.flatnonzero(held)]} for held in predicted]
        listed = np.round(shares, 6).tolist()
        return [
            {**answer, "probabilities": dict(zip(names, row, strict=True))}
            for answer, row in zip(answers, listed, strict=True)
        ]

    def _logits(self, outputs: Outputs) -> np.ndarray:
        logits = np.asarray(outputs, np.float64)
        expected = (len(self._examples), self._task.num_outputs)
        if logits.shape != expected:
            raise ValueError(f"{self.name}: outputs {logits.shape}, {expected} are needed")
        return logits

    def _known_labels(self) -> np.ndarray:
        if self._labels is None:
            raise UserError(f"{self.name} has no labels, so it cannot be scored; predict it")
        return self._labels

    def _true_labels(self) -> np.ndarray | None:
        """Labels as the file has them: (N,) classes or scores, (N, K) bool."""
        if self._examples[0].label is None:  # none of them has one
            return None
        if self._task.objective == "classes":
            held = np.zeros((len(self._examples), self._task.num_outputs), bool)
            for row, example in zip(held, self._examples, strict=True):
                row[list(cast(tuple[int, ...], example.label))] = True
            return held
        kind = np.int64 if self._task.objective == "class" else np.float64
        return np.array([example.label for example in self._examples], kind)


def _scores(source: TextSource, consequence: str) -> np.ndarray:
    """Return the scores of a file, which must not be all the same."""
    labels = [cast(float, example.label) for example in source.data.examples]
    scores = np.array(labels, np.float64)
    if scores.min() == scores.max():
        raise UserError(
            f"{source.data.examples[0].origin.path} ({source.name}): all {len(scores):,} scores "
            f"are {scores[0]:g}; {consequence}"
        )
    return scores

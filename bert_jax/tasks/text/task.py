"""Classification and regression of texts and pairs, from tables or the tasks of GLUE."""

import math
import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from bert_jax.errors import UserError
from bert_jax.tasks.config import GlueConfig, TableConfig
from bert_jax.tasks.examples import Data, LabelSet, TextExample
from bert_jax.tasks.glue import submission_file
from bert_jax.tasks.long_texts import text_rows
from bert_jax.tasks.overlap import strata
from bert_jax.tasks.reports.classes import contradicted
from bert_jax.tasks.task import Examined, LabelSpec, Outputs, Split, SplitScores, Task
from bert_jax.tasks.text.metrics import METRICS, PLAIN, Decisions, text_details, text_grounds
from bert_jax.tasks.text.sources import open_glue, open_table, read_glue_source
from bert_jax.tasks.text.tables import read_other_texts
from bert_jax.tokenization.tokenizer import Tokenizer, num_special

_NAME_GROUPS = "set task.group to a column that such rows share, or intervals are too narrow"
_NOISE_COLUMNS = ("label", "predicted", "label_probability", "predicted_probability")


class TextSplit(Split):
    """Texts of one file, their rows and their scores."""

    _task: "TextTask"

    def __init__(self, task: "TextTask", data: Data[TextExample]) -> None:
        self._task, self._data, examples = task, data, data.examples
        labels = None if data.truth is None else self._labels_of(data.truth)
        if labels is not None:
            if task.objective == "regression":
                labels = (labels - task.spec.mean) / task.spec.deviation
            labels = labels.astype(np.int32 if task.objective == "single_label" else np.float32)
        length = task.config.length
        found = text_rows(examples, task.tokenizer, length, labels, task.long)
        room = length - num_special(task.tokenizer, examples[0].text_pair is not None)
        cut = found.warnings(examples, room, task.long)
        count = len({each.text for each in examples})
        grouped = isinstance(task.config, GlueConfig) or task.config.group or data.trains
        if not grouped and 5 * count < 4 * len(examples):
            cut += (f"{data.name}: {len(examples):,} rows share {count:,} texts; {_NAME_GROUPS}",)
        names = [*task.metrics, *Decisions.score_names(task.spec.labels, **task.fits)]
        super().__init__(data, found.rows, names, cut, found.owners)

    def _best_constant(self, gold: list[Any]) -> float:
        return self._task.best_constant(self._labels_of(gold))

    def linear_score(self, train: Split) -> float | None:
        """Train a linear model of TF-IDF vectors on `train`; return its score on this file."""
        known, own, task = train._data.truth, self._data.truth, self._task
        is_glue = isinstance(task.config, GlueConfig)
        if is_glue or known is None or own is None or len(known) > MAX_EXAMPLES:
            return math.nan
        labels = self._labels_of(known)
        try:
            found = predictions(task.objective, train._examples, labels, self._examples)
        except ValueError:  # no training text has a word of two letters, or all are of one class
            return math.nan
        return None if found is None else task.scores(self._labels_of(own), found)[task.metric]

    def strata(self) -> Sequence[Hashable]:
        """Return each example's label, or the quintile of its score."""
        return strata([example.label for example in self._examples])

    def group_keys(self) -> list[Sequence[Hashable]]:
        """Return the keys of the examples' texts and, if the table has groups, their groups."""
        name, groups = self.unit_names
        return [*super().group_keys(), *([groups] if name == "groups" else [])]

    @property
    def unit_names(self) -> tuple[str, Sequence[Hashable]]:
        """Units of confidence intervals: the table's groups or, if it has none, the examples."""
        groups = [each.group for each in self._examples]
        return super().unit_names if None in groups else ("groups", groups)

    def _score(self, outputs: Outputs, saved: SplitScores | None) -> dict[str, float]:
        task, labels = self._task, self._labels_of(self._gold)
        logits = self._logits(outputs)
        if saved is None:
            decisions = Decisions.fitted(logits, labels, **task.fits)
        else:
            decisions = task.decisions(saved)
        scores = task.scores(labels, task.predicted(logits, decisions))
        return scores | decisions.scores(logits, labels, task.spec.labels, **task.fits)

    def _examine(self, outputs: Outputs, scores: SplitScores) -> Examined:
        """Return the data for confidence intervals, and results by class (see `text_details`)."""
        task, logits, labels = self._task, self._logits(outputs), self._labels_of(self._gold)
        decisions = task.decisions(scores)
        predicted = task.predicted(logits, decisions)

        def details() -> dict[str, Any]:
            found = text_details(
                task.objective, task.spec.labels, self._examples, labels,
                logits / decisions.temperature, predicted,
            )  # fmt: skip
            if task.fits["calibrate"]:
                found["calibration"] = decisions.calibration(logits, labels)
            return found

        return Examined(text_grounds(task.objective, labels, predicted, self.units), details)

    def _prediction_files(self, outputs: Outputs, scores: SplitScores) -> Iterator[tuple[str, str]]:
        """Yield predictions.jsonl and, for a test set of GLUE, the leaderboard's file."""
        yield from super()._prediction_files(outputs, scores)
        if self._data.submission is not None:
            ids = [example.id for example in self._examples]
            predicted = self._task.predicted(self._logits(outputs), self._task.decisions(scores))
            yield submission_file(*self._data.submission, ids, predicted)

    def _entries(self, outputs: Outputs, scores: SplitScores) -> list[dict[str, Any]]:
        logits, decisions = self._logits(outputs), self._task.decisions(scores)
        predicted = self._task.predicted(logits, decisions)
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

    def label_noise(self, outputs: Outputs, scores: SplitScores) -> list[str]:
        """Return the lines of a table of the labels that the outputs contradict, worst first."""
        if self._task.objective != "single_label":
            return []
        shares = self._task.decisions(scores).shares(self._logits(outputs), several=False)
        truth, first = self._labels_of(self._gold), self._examples[0]
        kinds = ["text"] if first.text_pair is None else ["text", "text_pair"]
        table = [[first.origin.unit, *kinds, *_NOISE_COLUMNS]]
        for number in contradicted(shares, truth):
            example, both = self._examples[number], [truth[number], shares[number].argmax()]
            texts = [getattr(example, kind) for kind in kinds]
            labels = [self._task.spec.labels[label] for label in both]
            sure = [f"{shares[number, label]:.4f}" for label in both]
            table.append([f"{example.origin.line}", *texts, *labels, *sure])
        return ["\t".join(" ".join(cell.split()) for cell in row) for row in table]

    def _logits(self, outputs: Outputs) -> np.ndarray:
        """Pool the rows' logits into logits of the examples, (N, C)."""
        logits = self._stacked(outputs, len(self.rows), self._task.num_outputs)
        return self._task.long.pooled(logits, np.asarray(self._owners))

    def _labels_of(self, gold: list[Any]) -> np.ndarray:
        """Return the file's labels as an array: (N,) classes or scores, or (N, K) bool."""
        if self._task.objective != "multi_label":
            return np.array(gold, np.int64 if self._task.objective == "single_label" else float)
        held = np.zeros((len(gold), self._task.num_outputs), bool)
        for row, numbers in zip(held, gold, strict=True):
            row[list(numbers)] = True
        return held


class TextTask(Task[GlueConfig | TableConfig]):
    """A text classification or regression task, configured by `kind: glue` or `kind: table`."""

    SPLIT = TextSplit

    def __init__(
        self, config: GlueConfig | TableConfig, spec: LabelSpec, tokenizer: Tokenizer
    ) -> None:
        self.objective = config.problem_type
        super().__init__(config, spec, tokenizer)
        self.long = config.long_texts
        self.fits = {"calibrate": config.calibrate, "tune": config.thresholds == "tuned"}

    @override
    def _metrics(self) -> Sequence[str]:
        has_f1 = self.objective != "single_label" or len(self.spec.labels) == 2
        return [name for name in self.config.metrics if name != "f1" or has_f1]

    @classmethod
    def _read(
        cls, config: GlueConfig | TableConfig
    ) -> tuple[LabelSpec, Sequence[Data[TextExample]]]:
        found = open_glue(config) if isinstance(config, GlueConfig) else open_table(config)
        train, *devs = found
        if train.labels is not None:
            return LabelSpec(train.labels.names), found
        scores = _scores(train, "nothing can be learned")
        for dev in devs:
            _scores(dev, "the correlation is undefined")
        return LabelSpec(mean=float(scores.mean()), deviation=float(scores.std())), found

    def _read_other(self, source: str, labelled: bool) -> Data[TextExample]:
        if isinstance(self.config, GlueConfig):
            return read_glue_source(self.config, source, labelled=labelled)
        labels = LabelSet(self.spec.labels) if self.spec.labels else None
        return read_other_texts(source, self.config, labels, labelled=labelled)

    # The meaning of outputs

    def units(self, scores: SplitScores) -> tuple[float, float]:
        """Return offset and factor of logits: mean and deviation of scores, or 0, 1/temperature."""
        if self.objective == "regression":
            return self.spec.mean, self.spec.deviation
        return 0.0, 1 / self.decisions(scores).temperature

    def thresholds(self, scores: SplitScores) -> tuple[float, ...]:
        """Return the tuned thresholds of the labels' probabilities; () means one half for all."""
        return self.decisions(scores).thresholds

    def decisions(self, scores: SplitScores) -> Decisions:
        """Restore temperature and thresholds, which are among the saved scores of the dev data."""
        return Decisions.saved(scores, self.spec.labels)

    def predicted(self, logits: np.ndarray, decisions: Decisions = PLAIN) -> np.ndarray:
        """Convert logits (N, C) to predictions: (N,) classes or scores, or (N, K) bool."""
        if self.objective == "single_label":
            return logits.argmax(axis=1)
        if self.objective == "multi_label":
            return decisions.held(logits)
        return logits[:, 0] * self.spec.deviation + self.spec.mean

    def scores(self, labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
        """Return all metrics of the task, by name."""
        found = METRICS[self.objective](labels, predicted)
        return {name: found[name] for name in self.metrics}

    def best_constant(self, labels: np.ndarray) -> float:
        """Return the score of the best constant prediction in the task's metric."""
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
        if self.metric == "macro_f1":  # predict all labels: no label lowers the F1 of another
            return float(np.mean(2 * held / (rows + held)))
        # Among sets of one size, the set of the most frequent labels has the most hits.
        hits, predicted = held.cumsum(), rows * np.arange(1, len(held) + 1)
        return float(np.max(2 * hits / (predicted + held.sum())))


def _scores(data: Data[TextExample], consequence: str) -> np.ndarray:
    """Return the scores of a file; raise a UserError if all scores are equal."""
    scores = np.array([example.label for example in data.examples], np.float64)
    if scores.min() == scores.max():
        raise UserError(
            f"{data.examples[0].origin.path} ({data.name}): all {len(scores):,} scores "
            f"are {scores[0]:g}, so {consequence}; use scores that differ"
        )
    return scores


MAX_EXAMPLES = 50_000
"""Largest number of training examples; the fit then takes at most about a minute."""


def predictions(
    objective: str,
    train: Sequence[TextExample],
    labels: np.ndarray,
    examples: Sequence[TextExample],
) -> np.ndarray | None:
    """Predict the labels of examples by words and pairs of words, without a neural network.

    Texts become TF-IDF vectors. Logistic regression predicts classes, ridge regression scores.
    `labels` of the N examples `train` are (N,) classes or scores, or (N, K) bool. Return
    predictions, (M,) or (M, K), for the M `examples`; None without scikit-learn (extra `baseline`).
    """
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.multiclass import OneVsRestClassifier
        from sklearn.pipeline import make_pipeline
    except ImportError:
        return None
    linear: Any = Ridge() if objective == "regression" else LogisticRegression(C=10, max_iter=1000)
    if objective == "multi_label":
        linear = OneVsRestClassifier(linear)
    classes = int(labels.max()) + 1 if objective == "single_label" else 1
    most = max(1000, 2_000_000 // classes)  # the solver keeps about 25 copies of its parameters
    terms = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, max_features=most)
    model = make_pipeline(terms, linear)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about classes that never occur, and convergence
        found = model.fit([*map(_text, train)], labels).predict([*map(_text, examples)])
    return np.asarray(found, labels.dtype).reshape(len(examples), *labels.shape[1:])


def _text(example: TextExample) -> str:
    """Return the text of an example; a prefix marks the words of the second text."""
    second = (example.text_pair or "").split()
    return " ".join([example.text, *(f"second_{word}" for word in second)])

"""Answers to questions as spans of a text: SQuAD 1.1 and 2.0, and data in their layout."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bert_jax.errors import UserError
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.examples import Question
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.squad.answers import Prediction, best_threshold, find_answers, write_answers
from bert_jax.tasks.squad.metrics import best_scores, score
from bert_jax.tasks.squad.sources import SquadFile, question_name, read_squad
from bert_jax.tasks.squad.windows import build_windows
from bert_jax.tasks.task import Learned, Objective, Outputs, describe
from bert_jax.tokenization.tokenizer import Tokenizer

_THRESHOLD = "null_threshold"


class SpanTask:
    """A task of questions about texts; see `task.Task`.

    Args:
        config: of kind squad.
        learned: by which rules answers are scored.
        tokenizer: of the model.
        train: training data; None for a task that was restored.
        dev: dev data.
    """

    objective: Objective = "span"
    num_outputs = 2
    metric = "f1"

    def __init__(
        self,
        config: TaskConfig,
        learned: Learned,
        tokenizer: Tokenizer,
        train: SquadFile | None = None,
        dev: SquadFile | None = None,
    ) -> None:
        self.config = config
        self.learned = learned
        self.tokenizer = tokenizer
        self._train = None if train is None else SpanSplit(self, "train", train, to_learn=True)
        self._dev = None if dev is None else SpanSplit(self, "dev", dev)

    @classmethod
    def open(cls, config: TaskConfig, tokenizer: Tokenizer) -> "SpanTask":
        """Read training and dev data; see `task.open_task`."""
        train, dev = (
            read_squad(config.source(name), misplaced=config.squad.misplaced)
            for name in ("train", "dev")
        )
        unknown = [question for question in dev.questions if question.answers is None]
        if unknown:
            raise UserError(
                f"{question_name(unknown[0])} has no reference answers, nor {len(unknown) - 1} "
                "others; checkpoints are chosen by a file with answers"
            )
        empty = [q for file in (train, dev) for q in file.questions if q.answers == ()]
        rules: Literal["v1.1", "v2.0"]
        if config.squad.rules == "auto":
            rules = "v2.0" if empty else "v1.1"
        else:
            rules = config.squad.rules
        if rules == "v1.1" and empty:
            raise UserError(
                f"task.squad.rules is 'v1.1', but {question_name(empty[0])} has no answer, which "
                "they do not know; say v2.0"
            )
        return cls(config, Learned(rules=rules), tokenizer, train, dev)

    def train_split(self) -> "SpanSplit":
        """See `task.Task`; windows of which it is not known what they answer are left out."""
        if self._train is None:
            raise UserError("a task read from a checkpoint has no training data")
        return self._train

    def dev_splits(self) -> "list[SpanSplit]":
        """See `task.Task`."""
        if self._dev is None:
            raise UserError("a task read from a checkpoint has no dev data; name a file")
        return [self._dev]

    def open_split(self, source: str, *, labelled: bool = True) -> "SpanSplit":
        """See `task.Task`."""
        misplaced = self.config.squad.misplaced if labelled else "keep"
        file = read_squad(source, misplaced=misplaced)
        return SpanSplit(self, Path(source).name, file)

    def describe(self) -> dict[str, Any]:
        """See `task.Task`."""
        return describe(self.config, self.learned)


class SpanSplit:
    """Questions of one file; see `task.Split`. A question has a row for each of its windows."""

    def __init__(
        self, task: SpanTask, name: str, file: SquadFile, *, to_learn: bool = False
    ) -> None:
        self._task = task
        self._questions = file.questions
        self.name = name
        built = build_windows(file.questions, task.tokenizer, task.config.windows)
        self._windows = built.windows
        notes = [*file.warnings, *(f"{file.path}: {warning}" for warning in built.warnings)]
        if to_learn:
            self._windows = tuple(each for each in built.windows if each.target is not None)
            lacks = len({window.question for window in built.windows if window.target is None})
            if lacks:
                notes.append(
                    f"{file.path}: {lacks:,} questions are not learned from: no known answer"
                )
            if not self._windows:
                raise UserError(f"{file.path}: no question has a known answer to learn from")
        self.warnings = tuple(notes)
        targets = [window.target for window in self._windows if window.target is not None]
        self.rows = Rows(
            [window.ids for window in self._windows],
            np.array([window.context_at for window in self._windows], np.int32),
            np.array(targets, np.int32) if len(targets) == len(self._windows) else None,
        )

    @cached_property
    def constant_score(self) -> float:
        """See `task.Split`: what it scores to answer no question."""
        if any(question.answers is None for question in self._questions):
            return float("nan")
        if self._task.learned.rules == "v1.1":
            return 0.0
        return (
            100.0 * sum(best_scores("", each)[1] for each in self._questions) / len(self._questions)
        )

    def score(self, outputs: Outputs, saved: Mapping[str, float] | None = None) -> dict[str, float]:
        """See `task.Split`; in percent. The null threshold is the one that is best for F1."""
        rules = self._task.learned.rules
        names = ["exact", "f1"]
        if rules == "v2.0":
            names += ["f1_answerable", "f1_unanswerable", _THRESHOLD]
        if not self._is_finite(outputs):
            return dict.fromkeys(names, float("nan"))
        predictions = self._predictions(outputs, 1)  # the score looks at the best candidate alone
        threshold = None
        if rules == "v2.0":
            threshold = (
                best_threshold(self._questions, predictions, "f1").value
                if saved is None
                else _saved_threshold(saved)
            )
        found = score(
            self._questions, {each.id: each.text(threshold) for each in predictions}, rules=rules
        )
        scores = {"exact": found.overall.exact, "f1": found.overall.f1}
        if threshold is not None:
            if found.answerable is not None:
                scores["f1_answerable"] = found.answerable.f1
            if found.unanswerable is not None:
                scores["f1_unanswerable"] = found.unanswerable.f1
            scores[_THRESHOLD] = threshold
        return scores

    def write_predictions(
        self, outputs: Outputs, out: Path, scores: Mapping[str, float]
    ) -> list[Path]:
        """Write predictions.json, nbest.json and, under the rules of 2.0, null_odds.json."""
        if not self._is_finite(outputs):
            raise UserError(f"{self.name}: outputs are not finite; the model has diverged")
        threshold = _saved_threshold(scores) if self._task.learned.rules == "v2.0" else None
        predictions = self._predictions(outputs, self._task.config.squad.num_best)
        write_answers(out, predictions, threshold)
        names = ["predictions.json", "nbest.json"]
        if threshold is not None:
            names.append("null_odds.json")
        return [Path(out) / name for name in names]

    @property
    def questions(self) -> tuple[Question, ...]:
        """In the order of the file."""
        return self._questions

    def _predictions(self, outputs: Outputs, num_best: int) -> list[Prediction]:
        config = self._task.config
        return find_answers(
            self._questions,
            self._windows,
            [logits[:, 0] for logits in outputs],
            [logits[:, 1] for logits in outputs],
            num_best=num_best,
            max_answer_tokens=min(config.squad.max_answer_tokens, config.length),
        )

    def _is_finite(self, outputs: Outputs) -> bool:
        rows = zip(self.rows.tokens, outputs, strict=True)
        return all(np.isfinite(logits[: len(ids)]).all() for ids, logits in rows)


def _saved_threshold(scores: Mapping[str, float]) -> float:
    if _THRESHOLD not in scores:
        raise UserError(
            f"the saved scores have no {_THRESHOLD}, by which questions without answer are told; "
            "evaluate the model on a file with answers first"
        )
    return scores[_THRESHOLD]

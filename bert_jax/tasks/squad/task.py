"""Answers to questions as spans of a text: SQuAD 1.1 and 2.0, and data in their layout."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.tasks.config import SquadConfig
from bert_jax.tasks.examples import Data, Question
from bert_jax.tasks.overlap import example_key
from bert_jax.tasks.reports.classes import most_confident, share, shortened
from bert_jax.tasks.reports.intervals import Grounds, intervals, means
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.squad.metrics import best_scores, normalized_words, score
from bert_jax.tasks.squad.sources import question_name, read_squad
from bert_jax.tasks.squad.windows import (
    Prediction,
    answer_files,
    best_threshold,
    build_windows,
    find_answers,
)
from bert_jax.tasks.task import Examined, HeadKind, LabelSpec, Outputs, Split, SplitScores, Task

_THRESHOLD = "null_threshold"
_NAMES = ("exact", "f1")
_ASKING = ("what", "who", "whose", "whom", "when", "where", "which", "why", "how")


class SpanSplit(Split):
    """Questions of a file, with a row per window; training skips windows without a known target."""

    _task: "SpanTask"
    PER_TOKEN = True

    def __init__(self, task: "SpanTask", data: Data[Question]) -> None:
        self._task = task
        built = build_windows(data.examples, task.tokenizer, task.config.windows)
        self._windows, path = built.windows, data.examples[0].origin.path
        notes = [f"{path}: {warning}" for warning in built.warnings]
        if data.trains:
            self._windows = tuple(each for each in built.windows if each.target is not None)
            if lacks := len({window.question for window in built.windows if window.target is None}):
                notes.append(f"{path}: {lacks:,} questions have no known answer and are not used")
            if not self._windows:
                raise UserError(
                    f"{path}: no question has a known answer to learn from; name another file"
                )
        targets = [window.target for window in self._windows if window.target is not None]
        rows = Rows(
            [window.ids for window in self._windows],
            np.array([window.context_at for window in self._windows], np.int32),
            np.array(targets, np.int32) if len(targets) == len(self._windows) else None,
        )
        names = ["exact", "f1"]
        if task.spec.rules == "v2.0":
            names += ["f1_answerable", "f1_unanswerable", _THRESHOLD]
        super().__init__(data, rows, names, notes, [window.question for window in self._windows])

    def _best_constant(self, gold: list[Any]) -> float:
        """Return the score of predicting "no answer" for every question."""
        which, rules = _NAMES.index(self._task.metric), self._task.spec.rules
        scores = [best_scores("", each, rules=rules)[which] for each in self._examples]
        return 100.0 * sum(scores) / len(scores)

    def group_keys(self) -> list[Sequence[Hashable]]:
        """Return one list of keys: a hash of each question's context."""
        return [[example_key([each.context]) for each in self._examples]]

    @property
    def unit_names(self) -> tuple[str, Sequence[Hashable]]:
        """Paragraphs as the units of confidence intervals; questions on a paragraph are alike."""
        return "paragraphs", [each.context for each in self._examples]

    def _score(self, outputs: Outputs, saved: SplitScores | None) -> dict[str, float]:
        """Return scores in percent; the null threshold is in `saved` or is the best for F1."""
        rules = self._task.spec.rules
        predictions = self._predictions(outputs, 1)  # the best candidate is enough
        if rules == "v1.1":
            threshold = None
        elif saved is None:
            threshold = best_threshold(self._examples, predictions)
        else:
            threshold = _saved_threshold(saved)
        texts = {each.id: each.text(threshold) for each in predictions}
        found = score(self._examples, texts, rules=rules)
        scores = {"exact": found["exact"], "f1": found["f1"]}
        if threshold is not None:
            for prefix, which in (("HasAns_", "f1_answerable"), ("NoAns_", "f1_unanswerable")):
                if f"{prefix}f1" in found:
                    scores[which] = found[f"{prefix}f1"]
            scores[_THRESHOLD] = threshold
        return scores

    def _examine(self, outputs: Outputs, scores: SplitScores) -> Examined:
        """Return data for intervals, scores by kind of question and of answer, and mistakes."""
        questions, rules = self._examples, self._task.spec.rules
        predictions = self._predictions(outputs, self._task.config.num_best)
        threshold = scores.get(_THRESHOLD)  # higher null odds mean "no answer"
        texts = [each.text(threshold) for each in predictions]
        each = 100.0 * np.array(
            [best_scores(text, q, rules=rules) for text, q in zip(texts, questions, strict=True)]
        )
        has = np.array([bool(question.answers) for question in questions])

        def score(w: np.ndarray) -> dict[str, np.ndarray]:
            found = dict(means(_NAMES, each)(w))
            for name, held in (("f1_answerable", has), ("f1_unanswerable", ~has)):
                if has.any() and not has.all():
                    found[name] = means(_NAMES, each[held])(w[:, held])["f1"]
            return found

        def details() -> dict[str, Any]:
            groups = [
                row
                for what, name_of in (("question", _asks), ("answer", _kind_of_answer))
                for row in _groups(questions, each, self.units, what, name_of)
            ]
            sure = np.zeros(len(questions))
            for number, (prediction, text) in enumerate(zip(predictions, texts, strict=True)):
                shares = prediction.shares(with_null=threshold is not None)
                sure[number] = next(share for found, share in shares if found.text == text)
            mistakes = [
                {
                    "id": questions[n].id,
                    "text": shortened(questions[n].question),
                    "context": shortened(questions[n].context),
                    "label": list(dict.fromkeys(a.text for a in questions[n].answers or ())),
                    "predicted": texts[n],
                    "probability": share(sure[n]),
                }
                for n in most_confident(each[:, 1] == 0, sure)
            ]
            return {"groups": groups, "mistakes": mistakes}

        return Examined(Grounds(score, self.units, each[:, 1] / 100, most=100.0), details)

    def _prediction_files(self, outputs: Outputs, scores: SplitScores) -> Iterator[tuple[str, str]]:
        threshold = _saved_threshold(scores) if self._task.spec.rules == "v2.0" else None
        return answer_files(self._predictions(outputs, self._task.config.num_best), threshold)

    def _predictions(self, outputs: Outputs, num_best: int) -> list[Prediction]:
        most = min(self._task.config.max_answer_tokens, self._task.config.length)
        starts, ends = ([logits[:, n] for logits in outputs] for n in (0, 1))
        return find_answers(
            self._examples, self._windows, starts, ends, num_best=num_best, max_answer_tokens=most
        )


class SpanTask(Task[SquadConfig]):
    """A question-answering task, configured by `kind: squad`."""

    SPLIT = SpanSplit
    objective: HeadKind = "span"
    num_outputs = 2

    @classmethod
    def _read(cls, config: SquadConfig) -> tuple[LabelSpec, Sequence[Data[Question]]]:
        train, dev = (
            read_squad(config.source(name), misplaced=config.misplaced) for name in ("train", "dev")
        )
        if unknown := [question for question in dev.examples if question.answers is None]:
            raise UserError(
                f"{question_name(unknown[0])} has no reference answers ({len(unknown):,} questions "
                "have none); what is scored (task.dev or, for task.folds, task.train) needs them"
            )
        empty = [q for file in (train, dev) for q in file.examples if q.answers == ()]
        rules = config.rules if config.rules != "auto" else "v2.0" if empty else "v1.1"
        if rules == "v1.1" and empty:
            raise UserError(
                f"task.rules is 'v1.1', but {question_name(empty[0])} has no answer, which "
                "these rules do not allow; set task.rules to 'v2.0'"
            )
        return LabelSpec(rules=rules), [train, dev]

    def _read_other(self, source: str, labelled: bool) -> Data[Question]:
        return read_squad(source, misplaced=self.config.misplaced if labelled else "keep")


def _saved_threshold(scores: SplitScores) -> float:
    if _THRESHOLD not in scores:
        raise UserError(
            f"the saved scores have no {_THRESHOLD}, which is needed to decide whether a question "
            "has an answer; evaluate the model on a file with answers first"
        )
    return scores[_THRESHOLD]


# Reports: kinds of questions, and mistakes


def _asks(question: Question) -> str:
    return next((word for word in normalized_words(question.question) if word in _ASKING), "other")


def _kind_of_answer(question: Question) -> str:
    """Classify the first reference answer: "with digits" if it has any, else its word count."""
    if not question.answers:
        return "no answer"
    text = question.answers[0].text
    words = len(text.split())
    if any(letter.isdigit() for letter in text):
        return "with digits"
    return "1 word" if words < 2 else "2 or 3 words" if words < 4 else "4 words or more"


def _groups(
    questions: Sequence[Question], each: np.ndarray, units: np.ndarray, what: str,
    name_of: Callable[[Question], str],
) -> list[dict[str, Any]]:  # fmt: skip
    names = np.array([name_of(question) for question in questions])
    found = []
    for name in sorted(set(names.tolist()), key=lambda name: (-(names == name).sum(), name)):
        own = each[names == name]
        grounds = Grounds(means(_NAMES, own), units[names == name], own[:, 1] / 100, most=100.0)
        found.append({
            "by": what, "group": name, "questions": len(own), "exact": float(own[:, 0].mean()),
            "f1": float(own[:, 1].mean()),
            "f1_interval": intervals(grounds).found.get("f1"),
        })  # fmt: skip
    return found

"""Details behind the scores of answers: kinds of questions, and mistakes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.special import softmax

from bert_jax.tasks.examples import Question
from bert_jax.tasks.reports.intervals import Grounds, intervals, means
from bert_jax.tasks.reports.mistakes import most_confident, share, shortened
from bert_jax.tasks.squad.answers import Prediction
from bert_jax.tasks.squad.metrics import SquadRules, best_scores, normalized_words

_NAMES = ("exact", "f1")
_ASKING = ("what", "who", "whose", "whom", "when", "where", "which", "why", "how")


def answer_report(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    threshold: float | None,
    rules: SquadRules,
    units: np.ndarray,
) -> tuple[Grounds, dict[str, Any]]:
    """Return the data for intervals, and the details of a report.

    Args:
        questions: questions with reference answers.
        predictions: one for each, in the same order.
        threshold: null odds above which there is no answer; None: always an answer.
        rules: version of the script.
        units: number of the paragraph of each question.
    """
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

    groups = [
        row
        for what, name_of in (("question", _asks), ("answer", _kind_of_answer))
        for row in _groups(questions, each, units, what, name_of)
    ]
    return Grounds(score, units, each[:, 1] / 100, most=100.0), {
        "groups": groups,
        "mistakes": _mistakes(questions, predictions, texts, each[:, 1], threshold),
    }


def _asks(question: Question) -> str:
    """Return the question word; other where there is none."""
    words = normalized_words(question.question)
    return next((word for word in words if word in _ASKING), "other")


def _kind_of_answer(question: Question) -> str:
    """Classify the first reference: with digits, else by its length in words."""
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


def _mistakes(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    texts: Sequence[str],
    f1: np.ndarray,
    threshold: float | None,
) -> list[dict[str, Any]]:
    sure = np.zeros(len(questions))
    for number, (prediction, text) in enumerate(zip(predictions, texts, strict=True)):
        candidates = list(prediction.candidates)
        if threshold is not None:
            candidates.append(prediction.null)
        scores = softmax([candidate.score for candidate in candidates])
        said = {candidate.text: p for candidate, p in zip(candidates, scores, strict=True)}
        sure[number] = said[text]
    return [
        {
            "id": questions[n].id,
            "text": shortened(questions[n].question),
            "context": shortened(questions[n].context),
            "label": list(dict.fromkeys(answer.text for answer in questions[n].answers or ())),
            "predicted": texts[n],
            "probability": share(sure[n]),
        }
        for n in most_confident(f1 == 0, sure)
    ]

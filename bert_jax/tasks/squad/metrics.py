"""Exact match and F1 as SQuAD's two evaluation scripts compute them.

An answer is compared after normalisation: lower case, ASCII punctuation deleted, the words "a",
"an" and "the" deleted, whitespace made single. Exact match: the two normalised texts are equal. F1:
of the words of one among the words of the other. A question with several references counts with the
best of them.

The scripts of versions 1.1 and 2.0 differ where a text has no word left and where a prediction is
missing; `SquadRules` says how.

The rules were made for English, and XQuAD scores its other languages with them as they are:

- Chinese and Japanese have no spaces, so an answer is one word and its F1 is its exact match,
  unless it holds a space or a Latin word apart from the rest.
- Punctuation outside ASCII stays: "。", "「」", "।", "؟", "،", and in English curly quotes, dashes.
- Articles of other languages stay, Arabic "ال" among them. A Latin "a" before a combining accent
  is a word of its own to the script and goes: "a" + U+0301 leaves the accent, "á" stays.
- Nothing is brought to one Unicode form: "é" in one character and in two differ, as do full-width
  and ASCII digits, and Arabic with and without vowel marks.
- Lower case is Python's `str.lower`: "İ" becomes two characters, "ß" and "ss" differ.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bert_jax.errors import UserError
from bert_jax.tasks.examples import Question
from bert_jax.tasks.squad.sources import question_name
from bert_jax.untrusted.json_file import read_json_object

SquadRules = Literal["v1.1", "v2.0"]
"""Rules of the official scripts.

Missing predictions: v1.1 counts them as wrong, v2.0 leaves the questions out. Texts without a word
("the", "."): v1.1 gives them F1 0 and compares them with references as they are; v2.0 gives F1 1 to
two of them, and drops such references; of a question without any, the reference is the empty text.
"""

MAX_PREDICTIONS_BYTES = 256 << 20
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Score:
    """Means over questions.

    Attributes:
        exact: share of exact matches, in percent.
        f1: mean F1, in percent.
        total: questions.
    """

    exact: float
    f1: float
    total: int


@dataclass(frozen=True)
class SquadScores:
    """Scores that the official scripts print.

    Attributes:
        overall: over all questions counted.
        answerable: over those with reference answers; None where there are none.
        unanswerable: over those without; None where there are none.
        missing: ids of questions without a prediction.
    """

    overall: Score
    answerable: Score | None
    unanswerable: Score | None
    missing: tuple[str, ...]

    def as_dict(self) -> dict[str, float]:
        """Under the names of the script for 2.0: exact, f1, total, HasAns_exact and so on."""
        parts = (("", self.overall), ("HasAns_", self.answerable), ("NoAns_", self.unanswerable))
        return {
            f"{prefix}{name}": value
            for prefix, score in parts
            if score is not None
            for name, value in (("exact", score.exact), ("f1", score.f1), ("total", score.total))
        }


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, English articles and surplus whitespace."""
    return " ".join(_words(text))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def exact_match(prediction: str, reference: str) -> float:
    """1.0 where the normalised texts are equal, else 0.0; the same under both rules."""
    return float(_words(prediction) == _words(reference))


def f1_score(prediction: str, reference: str, *, rules: SquadRules = "v2.0") -> float:
    """Harmonic mean of precision and recall over words, each as often as it occurs."""
    return _f1(_words(prediction), _words(reference), rules)


def _f1(predicted: list[str], right: list[str], rules: SquadRules) -> float:
    if rules == "v2.0" and not (predicted and right):
        return float(predicted == right)
    same = sum((Counter(predicted) & Counter(right)).values())
    if same == 0:
        return 0.0
    precision = 1.0 * same / len(predicted)
    recall = 1.0 * same / len(right)
    return (2 * precision * recall) / (precision + recall)


def best_scores(
    prediction: str, question: Question, *, rules: SquadRules = "v2.0"
) -> tuple[float, float]:
    """Exact match and F1 of a text, each with the reference that suits it best.

    Raises:
        UserError: nothing is known about the question's answers, or it has none under v1.1.
    """
    if question.answers is None:
        raise UserError(
            f"{question_name(question)} has no reference answers, so it cannot be scored; give a "
            "file with answers"
        )
    references = [_words(answer.text) for answer in question.answers]
    if rules == "v2.0":
        references = [words for words in references if words] or [[]]
    elif not references:
        raise UserError(
            f"{question_name(question)} has no answer, which the rules of version 1.1 do not know; "
            "score it with v2.0"
        )
    predicted = _words(prediction)
    return (
        float(predicted in references),
        max(_f1(predicted, reference, rules) for reference in references),
    )


def score(
    questions: Sequence[Question], predictions: Mapping[str, str], *, rules: SquadRules = "v2.0"
) -> SquadScores:
    """Scores of predicted texts; the empty text says that there is no answer.

    Predictions for other questions are not looked at, as in the scripts.

    Args:
        questions: with reference answers.
        predictions: texts by question id.
        rules: whose.

    Raises:
        UserError: no question, a question without known answers, or no prediction for any.
    """
    if not questions:
        raise UserError("there are no questions to score")
    missing = tuple(each.id for each in questions if each.id not in predictions)
    if len(missing) == len(questions):
        other = next(iter(predictions), None)
        told = "there are no predictions" if other is None else f"the first is for {other[:80]!r}"
        raise UserError(
            f"no prediction is for a question of {questions[0].origin.path}: its first id is "
            f"{missing[0][:80]!r}, {told}. Give the predictions for this file"
        )
    found: list[tuple[bool, float, float]] = []
    for question in questions:
        if question.id in predictions:
            pair = best_scores(predictions[question.id], question, rules=rules)
        elif rules == "v1.1":
            pair = (0.0, 0.0)
        else:
            continue
        found.append((bool(question.answers), *pair))
    overall = _mean(found)
    assert overall is not None
    return SquadScores(
        overall=overall,
        answerable=_mean(each for each in found if each[0]),
        unanswerable=_mean(each for each in found if not each[0]),
        missing=missing,
    )


def _mean(found: Iterable[tuple[bool, float, float]]) -> Score | None:
    # In the scripts' order and with their roundings: `sum` of Python 3.12 rounds otherwise.
    exact = f1 = 0.0
    total = 0
    for _, each_exact, each_f1 in found:
        exact += each_exact
        f1 += each_f1
        total += 1
    return Score(100.0 * exact / total, 100.0 * f1 / total, total) if total else None


def read_predictions(path: str | Path) -> dict[str, str]:
    """Return a file of predictions: one JSON object, texts by question id.

    Raises:
        UserError: not such a file; names the first value that is no text.
    """
    found = read_json_object(Path(path), max_bytes=MAX_PREDICTIONS_BYTES)
    wrong = [id for id, text in found.items() if not isinstance(text, str)]
    if wrong:
        more = f", and of {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(
            f"{path}: the prediction of {wrong[0][:80]!r} is no text{more}; give a string, the "
            "empty one for a question without answer"
        )
    return found

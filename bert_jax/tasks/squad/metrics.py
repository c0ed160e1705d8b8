"""Exact match and F1 as SQuAD's two evaluation scripts compute them.

Answers are normalised before they are compared: lower case, ASCII punctuation deleted, the words
"a", "an" and "the" deleted, runs of whitespace made one space. Exact match is 1 if the two texts
are equal. F1 measures the overlap of their words. With several references, the best score counts.
Versions 1.1 and 2.0 differ on missing predictions and texts without words (see `SquadRules`).
docs/decisions.md ("Scores of SQuAD") says what these English rules do in other languages.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from bert_jax.errors import UserError
from bert_jax.tasks.examples import Question
from bert_jax.tasks.squad.sources import question_name

SquadRules = Literal["v1.1", "v2.0"]
"""Rules of the official scripts.

v1.1 counts missing predictions as wrong; v2.0 leaves their questions out. Texts such as "the" or
"." have no words after normalisation. v1.1 gives them F1 0. v2.0 drops such references, uses the
empty text if a question has no other reference, and gives F1 1 if both texts have no words.
"""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized_words(text: str) -> list[str]:
    """Return the words in lower case, without ASCII punctuation and English articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _f1(predicted: list[str], right: list[str], rules: SquadRules) -> float:
    """Return the harmonic mean of precision and recall over words; repetitions count too."""
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
    """Return a text's exact match and F1, each the maximum over the question's references.

    Raise a UserError if the question's answers are unknown or, under v1.1, it has no answer.
    """
    if question.answers is None:
        raise UserError(
            f"{question_name(question)} has no reference answers, so it cannot be scored; give a "
            "file with answers"
        )
    references = [normalized_words(answer.text) for answer in question.answers]
    if rules == "v2.0":
        references = [words for words in references if words] or [[]]
    elif not references:
        raise UserError(
            f"{question_name(question)} has no answer, which the rules of version 1.1 do not "
            "allow; train with task.rules='v2.0'"
        )
    predicted = normalized_words(prediction)
    return (
        float(predicted in references),
        max(_f1(predicted, reference, rules) for reference in references),
    )


def score(
    questions: Sequence[Question], predictions: Mapping[str, str], *, rules: SquadRules = "v2.0"
) -> dict[str, float]:
    """Score predicted texts by question id; the empty text means "no answer".

    Predictions for other questions are ignored, as in the scripts. Raise a UserError if no question
    has a prediction, a question's answers are unknown or, under v1.1, a question has no answer.

    The scores are named as in the script for version 2.0: exact and f1 in percent, and total, the
    number of scored questions. The prefix HasAns_ marks scores of questions with reference answers,
    and NoAns_ scores of questions without answers, if there are such questions.
    """
    if not questions:
        raise UserError("there are no questions to score")
    if not any(each.id in predictions for each in questions):
        other = next(iter(predictions), None)
        told = "there are no predictions" if other is None else f"predictions have {other[:80]!r}"
        raise UserError(
            f"no prediction has the id of a question in {questions[0].origin.path}: the file's "
            f"first id is {questions[0].id[:80]!r}, {told}. Give the predictions for this file"
        )
    found: dict[str, list[tuple[float, float]]] = {"": [], "HasAns_": [], "NoAns_": []}
    for question in questions:
        pair = (0.0, 0.0)
        if question.id in predictions:
            pair = best_scores(predictions[question.id], question, rules=rules)
        elif rules == "v2.0":
            continue
        found[""].append(pair)
        found["HasAns_" if question.answers else "NoAns_"].append(pair)
    scores: dict[str, float] = {}
    for prefix, pairs in found.items():
        # Add in the scripts' order and with their rounding; Python 3.12's `sum` rounds differently.
        exact = f1 = 0.0
        for each_exact, each_f1 in pairs:
            exact += each_exact
            f1 += each_f1
        if total := len(pairs):
            scores[f"{prefix}exact"] = 100.0 * exact / total
            scores[f"{prefix}f1"] = 100.0 * f1 / total
            scores[f"{prefix}total"] = total
    return scores

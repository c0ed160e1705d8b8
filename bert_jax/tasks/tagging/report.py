"""Details behind the scores of tags: entities by type, lenient and strict, or words by tag."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from bert_jax.tasks.examples import TaggedExample
from bert_jax.tasks.reports.classes import class_rows, confusion, macro, of_classes, shares
from bert_jax.tasks.reports.intervals import Grounds
from bert_jax.tasks.reports.mistakes import most_confident, share, shortened
from bert_jax.tasks.tagging.metrics import EntityScores, entity_scores
from bert_jax.tasks.tagging.schemes import Entity, entities

_NONE = "no entity"
_UNKNOWN = "not learned"
_Tags = Sequence[Sequence[str]]


def entity_report(
    gold: _Tags, predicted: _Tags, raw: _Tags, units: np.ndarray
) -> tuple[Grounds, dict[str, Any]]:
    """Return the data for intervals, and the details of a report on entities.

    The strict reading follows seqeval's `mode="strict"` with IOB2 on the model's raw tags; the
    lenient reading follows the CoNLL script, which scores the task.

    Args:
        gold: tags of each sentence in the data, sound IOB2.
        predicted: tags predicted, sound IOB2.
        raw: most probable tag of each word.
        units: number of the unit of each sentence.
    """
    lenient = _reading(entity_scores(gold, predicted))
    strict = _reading(entity_scores(gold, raw, scheme="iob2"))
    found = [
        (set(entities(truth)), set(entities(guess)))
        for truth, guess in zip(gold, predicted, strict=True)
    ]
    labels = [row["label"] for row in lenient["classes"]]
    details: dict[str, Any] = {**lenient, "strict": strict}
    if labels:
        details["confusion"] = confusion([*labels, _NONE], *_confused(found, labels))
    hits = [
        sum(a == b for a, b in zip(truth, guess, strict=True))
        for truth, guess in zip(gold, predicted, strict=True)
    ]
    counts = [(len(a & b), len(b), len(a)) for a, b in found]
    each = np.concatenate(
        [np.array(counts, float), np.array([hits, list(map(len, gold))], float).T], axis=1
    )

    def score(w: np.ndarray) -> dict[str, np.ndarray]:
        correct, guesses, golds, right, words = (w @ each).T
        return {
            "f1": _ratio(2 * correct, guesses + golds),
            "precision": _ratio(correct, guesses),
            "recall": _ratio(correct, golds),
            "accuracy": _ratio(right, words),
        }

    rarest = int((each[:, 2] > 0).sum())
    return Grounds(score, units, _ratio(each[:, 3], each[:, 4]), rarest), details


def tag_report(
    gold: _Tags, predicted: _Tags, labels: Sequence[str], units: np.ndarray
) -> tuple[Grounds, dict[str, Any]]:
    """Return the data for intervals, and the details of a report on words.

    Args:
        gold: tags of each sentence in the data; a word with an empty tag is left out.
        predicted: tags predicted.
        labels: tags learned; others in the data are counted together.
        units: number of the unit of each sentence.
    """
    number = {name: n for n, name in enumerate(labels)}
    pairs = [
        [(number.get(a, len(labels)), number[b]) for a, b in zip(*both, strict=True) if a]
        for both in zip(gold, predicted, strict=True)
    ]
    truth, guess = np.array(list(chain.from_iterable(pairs)), int).reshape(-1, 2).T
    names = [*labels, _UNKNOWN] if (truth == len(labels)).any() else labels
    each = np.array([(sum(a == b for a, b in pair), len(pair)) for pair in pairs], float)
    grounds = Grounds(lambda w: {"accuracy": _ratio(*(w @ each).T)}, units, _ratio(*each.T))
    return grounds, of_classes(names, truth, guess)


def tag_mistakes(
    examples: Sequence[TaggedExample], predicted: _Tags, sure: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Return the most probable wrong tags, one a sentence.

    Args:
        examples: sentences with tags.
        predicted: tags predicted.
        sure: probability of the best tag of each word, an array a sentence.
    """
    places: list[tuple[int, int]] = []
    confidence: list[float] = []
    for number, (example, tags, shares_of) in enumerate(
        zip(examples, predicted, sure, strict=True)
    ):
        truth = example.tags or ()
        wrong = [w for w, (a, b) in enumerate(zip(truth, tags, strict=True)) if a and a != b]
        if wrong:
            word = wrong[int(np.argmax(shares_of[wrong]))]
            places.append((number, word))
            confidence.append(float(shares_of[word]))
    chosen = most_confident(np.ones(len(places), bool), np.array(confidence))
    mistakes = []
    for at in chosen:
        number, word = places[at]
        example = examples[number]
        mistakes.append({
            "id": example.id, "line": example.origin.line,
            "text": shortened(" ".join(example.tokens)), "word": example.tokens[word],
            "position": word, "label": (example.tags or ())[word],
            "predicted": predicted[number][word], "probability": share(confidence[at]),
        })  # fmt: skip
    return mistakes


def _reading(scores: EntityScores) -> dict[str, Any]:
    names = list(scores.per_type)
    counts = np.array([scores.per_type[name] for name in names], int).reshape(-1, 3).T
    rows = class_rows(names, *counts)
    micro = shares(*scores.overall)
    return {"classes": rows, "micro": micro, "macro": macro(rows)}


def _confused(
    found: Sequence[tuple[set[Entity], set[Entity]]], labels: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Pair the true and predicted types of the same words; the last number means no entity."""
    number, none = {name: n for n, name in enumerate(labels)}, len(labels)
    truth: list[int] = []
    guess: list[int] = []
    for gold, predicted in found:
        ours, theirs = ({each[1:]: each.type for each in side} for side in (gold, predicted))
        for span in dict.fromkeys([*sorted(ours), *sorted(theirs)]):
            truth.append(number[ours[span]] if span in ours else none)
            guess.append(number[theirs[span]] if span in theirs else none)
    return np.array(truth, int), np.array(guess, int)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.divide(above, below, out=np.zeros(len(above)), where=below > 0)
    return found

"""Precision, recall and F1 of entities (words and type must be right), and reports on tags.

Entities are read from tags in two ways, both as in seqeval:

- lenient, as in the CoNLL script: an I that continues no entity begins a new entity. With the
  prefixes B, I and O, the result equals conlleval's. With S and E it may differ: here, as in
  seqeval, each S is an entity and E ends an entity, but conlleval reads two successive S as one
  entity, and lets B continue an entity that ended with E. L, U and M, which seqeval does not know,
  are read as E, S and I.
- strict, as in seqeval's `mode="strict"` for IOB2: only B (or S, U) begins an entity.

They differ only on invalid tags; say which was used. Published CoNLL-2003 scores are lenient.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import eq
from typing import Any

import numpy as np

from bert_jax.tasks.examples import TaggedExample
from bert_jax.tasks.reports.classes import (
    class_rows,
    confusion,
    macro,
    most_confident,
    of_classes,
    share,
    shares,
    shortened,
)
from bert_jax.tasks.reports.intervals import Grounds, ratio
from bert_jax.tasks.tagging.schemes import Entity, entities, strict_entities

_NONE = "no entity"
_UNKNOWN = "not learned"
_Tags = Sequence[Sequence[str]]


def entity_scores(gold: _Tags, predicted: _Tags, *, strict: bool = False) -> dict[str, Any]:
    """Score the entities in predicted tags; an entity lies within one sentence.

    Return `classes`, a row for each type found (see `class_rows`), `micro`, the scores over all
    types together, and `macro`, the mean over types. Raise a ValueError if the numbers of sentences
    differ, or a word has no valid tag.
    """
    read = strict_entities if strict else entities
    golds, guesses, correct = Counter[str](), Counter[str](), Counter[str]()
    for truth, guess in zip(gold, predicted, strict=True):
        first, second = set(read(truth)), set(read(guess))
        golds.update(entity.type for entity in first)
        guesses.update(entity.type for entity in second)
        correct.update(entity.type for entity in first & second)
    names, counts = sorted(guesses | golds), (correct, guesses, golds)
    rows = class_rows(names, *([each[name] for name in names] for each in counts))
    micro = shares(*(each.total() for each in counts))
    return {"classes": rows, "micro": micro, "macro": macro(rows)}


def entity_details(gold: _Tags, predicted: _Tags, raw: _Tags) -> dict[str, Any]:
    """Return the details of a report on entities.

    `gold` and `predicted` are valid IOB2; `raw` has the most probable tags, perhaps invalid. The
    scores of `predicted` are lenient; the entry `strict` has the strict scores of `raw`.
    """
    details = entity_scores(gold, predicted)
    labels = [row["label"] for row in details["classes"]]
    details["strict"] = entity_scores(gold, raw, strict=True)
    if labels:
        pairs: list[list[int]] = []  # gold and predicted index of each span
        number, none = {name: n for n, name in enumerate(labels)}, len(labels)
        for found in _entity_sets(gold, predicted):
            ours, theirs = ({each[1:]: each.type for each in side} for side in found)
            for span in dict.fromkeys([*sorted(ours), *sorted(theirs)]):
                pairs.append([number[s[span]] if span in s else none for s in (ours, theirs)])
        details["confusion"] = confusion([*labels, _NONE], *np.array(pairs, int).T)
    return details


def _entity_sets(gold: _Tags, predicted: _Tags) -> list[tuple[set[Entity], set[Entity]]]:
    pairs = zip(gold, predicted, strict=True)
    return [(set(entities(truth)), set(entities(guess))) for truth, guess in pairs]


def entity_grounds(gold: _Tags, predicted: _Tags, units: np.ndarray) -> Grounds:
    """Return the data for confidence intervals of entity scores; tags are valid IOB2."""
    each = np.array([
        (len(ours & theirs), len(theirs), len(ours), sum(map(eq, truth, guess)), len(truth))
        for (ours, theirs), truth, guess in zip(
            _entity_sets(gold, predicted), gold, predicted, strict=True
        )
    ], float)  # fmt: skip

    def score(w: np.ndarray) -> dict[str, np.ndarray]:
        correct, guesses, golds, right, words = (w @ each).T
        return {
            "f1": ratio(2 * correct, guesses + golds),
            "precision": ratio(correct, guesses),
            "recall": ratio(correct, golds),
            "accuracy": ratio(right, words),
        }

    rarest = int((each[:, 2] > 0).sum())
    return Grounds(score, units, ratio(each[:, 3], each[:, 4]), rarest)


def tag_details(gold: _Tags, predicted: _Tags, labels: Sequence[str]) -> dict[str, Any]:
    """Return the details of a report on plain tags.

    Words with an empty tag are left out. Gold tags outside the learned `labels` count as one class.
    """
    number = {name: n for n, name in enumerate(labels)}
    words = zip(chain(*gold), chain(*predicted), strict=True)
    pairs = [(number.get(a, len(labels)), number[b]) for a, b in words if a]
    truth, guess = np.array(pairs, int).reshape(-1, 2).T
    names = [*labels, _UNKNOWN] if (truth == len(labels)).any() else labels
    return of_classes(names, truth, guess)


def tag_grounds(gold: _Tags, predicted: _Tags, units: np.ndarray) -> Grounds:
    """Return the data for confidence intervals of the accuracy over the words that have a tag."""
    hits = [[a == b for a, b in zip(*both, strict=True) if a]
            for both in zip(gold, predicted, strict=True)]  # fmt: skip
    each = np.array([(sum(right), len(right)) for right in hits], float)
    return Grounds(lambda w: {"accuracy": ratio(*(w @ each).T)}, units, ratio(*each.T))


def tag_mistakes(
    examples: Sequence[TaggedExample], predicted: _Tags, sure: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """List the most confident wrong tags, at most one per sentence; `sure` has probabilities."""
    found: list[tuple[float, TaggedExample, int, str]] = []
    for example, tags, shares_of in zip(examples, predicted, sure, strict=True):
        truth = example.tags or ()
        wrong = [w for w, (a, b) in enumerate(zip(truth, tags, strict=True)) if a and a != b]
        if wrong:
            word = wrong[int(np.argmax(shares_of[wrong]))]
            found.append((float(shares_of[word]), example, word, tags[word]))
    chosen = most_confident(np.ones(len(found), bool), np.array([each[0] for each in found]))
    return [
        {
            "id": example.id, "line": example.origin.line,
            "text": shortened(" ".join(example.tokens)), "word": example.tokens[word],
            "position": word, "label": (example.tags or ())[word],
            "predicted": tag, "probability": share(confidence),
        }
        for confidence, example, word, tag in (found[at] for at in chosen)
    ]  # fmt: skip

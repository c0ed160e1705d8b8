"""Counts by class, metrics of weighted examples, and the most confident mistakes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from bert_jax.tasks.reports.intervals import Score, ratio

_Counts = Sequence[int] | np.ndarray

MOST_CONFUSED = 60
"""Largest number of classes for which a report has the full confusion matrix."""


def shares(correct: int, predicted: int, support: int) -> dict[str, float]:
    """Return precision, recall and F1 from counts; 0 if the denominator is 0."""
    total = predicted + support
    return {
        "precision": correct / predicted if predicted else 0.0,
        "recall": correct / support if support else 0.0,
        "f1": 2 * correct / total if total else 0.0,
    }


def class_rows(
    labels: Sequence[str], correct: _Counts, predicted: _Counts, support: _Counts
) -> list[dict[str, Any]]:
    """Return a report row for each of C classes, given counts (C,)."""
    rows = []
    for label, *each in zip(labels, correct, predicted, support, strict=True):
        counts = [int(count) for count in each]
        scores = shares(*counts)
        rows.append({"label": label, **scores, "support": counts[2], "predicted": counts[1]})
    return rows


def macro(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Average the rows of classes (as in `macro_f1`)."""
    names = ("precision", "recall", "f1")
    return {name: sum(row[name] for row in rows) / max(len(rows), 1) for name in names}


def confusion(labels: Sequence[str], truth: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    """Return the counts of examples by class (rows) and predicted class (columns).

    With more than `MOST_CONFUSED` classes, keep only the classes with the most mistakes.
    """
    size = len(labels)
    counts = np.bincount(truth * size + predicted, minlength=size * size).reshape(size, size)
    which = np.arange(size)
    if size > MOST_CONFUSED:
        wrong = counts - np.diag(np.diag(counts))
        worst = np.argsort(-(wrong.sum(axis=0) + wrong.sum(axis=1)), kind="stable")
        which = np.sort(worst[:MOST_CONFUSED])
    return {
        "labels": [labels[number] for number in which.tolist()],
        "counts": counts[np.ix_(which, which)].tolist(),
        "classes": size,
    }


def of_classes(labels: Sequence[str], truth: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    """Return class rows, their mean and the confusion matrix, given true and predicted classes."""
    size = len(labels)
    hits = np.bincount(truth[truth == predicted], minlength=size)
    totals = [np.bincount(each, minlength=size) for each in (predicted, truth)]
    rows = class_rows(labels, hits, *totals)
    met = [row for row in rows if row["support"] or row["predicted"]]
    return {"classes": rows, "macro": macro(met), "confusion": confusion(labels, truth, predicted)}


def of_label_sets(
    labels: Sequence[str], truth: np.ndarray, predicted: np.ndarray
) -> dict[str, Any]:
    """Return class rows and their mean, given the labels of each example as (N, K) bool."""
    counts = (truth & predicted).sum(axis=0), predicted.sum(axis=0), truth.sum(axis=0)
    rows = class_rows(labels, *counts)
    return {"classes": rows, "macro": macro(rows)}


def indicator(numbers: np.ndarray, size: int | None = None) -> csr_array:
    """Return the matrix (N, size) in which row n has 1 at column `numbers[n]`, 0 elsewhere."""
    shape = len(numbers), int(numbers.max()) + 1 if size is None else size
    return csr_array((np.ones(len(numbers)), (np.arange(len(numbers)), numbers)), shape)


def class_statistic(truth: np.ndarray, predicted: np.ndarray) -> Score:
    """Make a function that computes the single-label metrics from example weights."""
    size = int(max(truth.max(), predicted.max())) + 1
    cells, codes = np.unique(truth * size + predicted, return_inverse=True)
    which, (rows, columns) = indicator(codes.ravel()), np.divmod(cells, size)
    sides = [indicator(each, size) for each in (rows, columns)]
    same = rows == columns
    of_right = indicator(rows[same], size)

    def score(w: np.ndarray) -> dict[str, np.ndarray]:
        counts = w @ which
        of_truth, of_guess = (counts @ side for side in sides)
        hits = counts[:, same] @ of_right
        total, right = counts.sum(axis=1), hits.sum(axis=1)
        each, met = ratio(2 * hits, of_truth + of_guess), of_truth + of_guess > 0
        spread = (total**2 - (of_truth**2).sum(axis=1)) * (total**2 - (of_guess**2).sum(axis=1))
        above = right * total - (of_truth * of_guess).sum(axis=1)
        return {
            "accuracy": right / total,
            "f1": each[:, 1] if size > 1 else np.zeros(len(each)),
            "macro_f1": each.sum(axis=1) / met.sum(axis=1),
            "matthews": ratio(above, np.sqrt(spread)),
        }

    return score


def label_set_statistic(truth: np.ndarray, predicted: np.ndarray) -> Score:
    """Make a function that computes the multi-label metrics from example weights."""
    parts = [truth & predicted, truth, predicted]
    values = np.concatenate([*parts, (truth == predicted).all(axis=1)[:, None]], axis=1)

    def score(w: np.ndarray) -> dict[str, np.ndarray]:
        *sums, right = np.split(w @ values, [truth.shape[1] * n for n in (1, 2, 3)], axis=1)
        hits, held, said = sums
        return {
            "f1": ratio(2 * hits.sum(axis=1), held.sum(axis=1) + said.sum(axis=1)),
            "macro_f1": ratio(2 * hits, held + said).mean(axis=1),
            "accuracy": right[:, 0] / w.sum(axis=1),
        }

    return score


NOISE = "label_noise.tsv"
"""Name of the file that lists the contradicted labels."""


def contradicted(shares: np.ndarray, truth: np.ndarray) -> list[int]:
    """Return the indices of examples whose predictions contradict their labels, worst first.

    `shares` (N, C) are probabilities from models that have not seen the examples, `truth` (N,) the
    labels. A label is contradicted if another class is the most probable, and its probability is at
    least its mean probability over the examples with its label (confident learning, Northcutt et
    al. 2021, section 3.1). The worst has the largest margin between the two classes' probabilities.
    """
    rows, predicted = np.arange(len(truth)), shares.argmax(axis=1)
    own, best = shares[rows, truth], shares[rows, predicted]
    counts, sums = (np.bincount(truth, each, shares.shape[1]) for each in (None, own))
    least = ratio(sums, counts, np.inf)
    found = np.flatnonzero((predicted != truth) & (best >= least[predicted]))
    return found[np.argsort((own - best)[found], kind="stable")].tolist()


SHOWN = 20
"""Largest number of mistakes in a report."""
_LONGEST = 600  # characters of a text


def most_confident(wrong: np.ndarray, confidence: np.ndarray) -> list[int]:
    """Return the indices of the `SHOWN` most confident wrong predictions, most confident first."""
    found = np.flatnonzero(wrong)
    return found[np.argsort(-confidence[found], kind="stable")[:SHOWN]].tolist()


def shortened(text: str) -> str:
    """Return a text; if it is long, cut out its middle."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} … {text[-half:]}"


def share(value: Any) -> float:
    """Round a probability as reports show it."""
    return round(float(value), 4)

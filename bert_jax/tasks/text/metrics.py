"""Scores of classification and regression, over all examples at once.

Where a score is not defined it is what scikit-learn and scipy give: 0 for F1 without a positive and
for the Matthews coefficient of a constant, NaN for the correlation with a constant. A model that
predicts one value for everything has not learned, and NaN keeps it from passing for a weak model:
compare with `numpy.nanargmax`, not with `max`.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Return the share of examples whose prediction is their label; both (N,) numbers of classes.

    Raises:
        ValueError: no examples, different lengths, or values that are not whole numbers, in every
            function here.
    """
    truth, guess = _classes(labels, predictions)
    return float(np.mean(truth == guess))


def f1(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Return the harmonic mean of precision and recall of class 1; 0 where class 1 is absent."""
    truth, guess = _classes(labels, predictions)
    return _f1(truth == 1, guess == 1)


def macro_f1(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Return the mean F1 of the classes that occur in the labels or the predictions."""
    truth, guess = _classes(labels, predictions)
    return float(np.mean([_f1(truth == each, guess == each) for each in np.union1d(truth, guess)]))


def matthews(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Return the Matthews coefficient, for any number of classes; 0 where either is constant."""
    truth, guess = _classes(labels, predictions)
    classes = np.union1d(truth, guess)
    # Whole numbers of Python: products of counts over a large data set pass 2 ** 63.
    counts = [(int(np.sum(truth == each)), int(np.sum(guess == each))) for each in classes]
    total, hits = len(truth), int(np.sum(truth == guess))
    shared = hits * total - sum(t * p for t, p in counts)
    spread = (total**2 - sum(t * t for t, _ in counts)) * (total**2 - sum(p * p for _, p in counts))
    return shared / spread**0.5 if spread else 0.0


def pearson(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Return the linear correlation of scores; NaN where either side is constant or not finite."""
    from scipy.stats import pearsonr  # takes half a second, which other scores need not pay

    return _correlation(pearsonr, labels, predictions)


def spearman(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Return the correlation of ranks; infinite scores have ranks, NaN as for `pearson`."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, labels, predictions)


def multi_label_f1(labels: ArrayLike, predictions: ArrayLike) -> tuple[float, float]:
    """Return micro and macro F1 of yes-or-no decisions.

    Micro counts all decisions together, macro is the mean over labels; an absent label has 0.

    Args:
        labels: (N, K) bool or 0 and 1, a column for each label.
        predictions: (N, K) likewise.

    Raises:
        ValueError: not two tables of one shape, empty, or other values than 0 and 1.
    """
    truth, guess = np.asarray(labels), np.asarray(predictions)
    if truth.ndim != 2 or truth.shape != guess.shape or not truth.size:
        raise ValueError(f"labels {truth.shape} and predictions {guess.shape}: (N, K) each, N, K>0")
    for name, table in (("labels", truth), ("predictions", guess)):
        if not np.isin(table, (0, 1)).all():
            raise ValueError(f"{name} hold other values than 0 and 1")
    truth, guess = truth.astype(bool), guess.astype(bool)
    each = [_f1(t, p) for t, p in zip(truth.T, guess.T, strict=True)]
    return _f1(truth, guess), float(np.mean(each))


METRICS: Mapping[str, Callable[[ArrayLike, ArrayLike], float]] = {
    "accuracy": accuracy, "f1": f1, "macro_f1": macro_f1, "matthews": matthews,
    "pearson": pearson, "spearman": spearman,
}  # fmt: skip
"""Metrics by name, each of (labels, predictions); more is better for all of them."""


def _f1(truth: np.ndarray, guess: np.ndarray) -> float:
    found = int(np.sum(truth)) + int(np.sum(guess))
    return 2 * int(np.sum(truth & guess)) / found if found else 0.0


def _correlation(correlate: Callable[..., Any], labels: ArrayLike, predictions: ArrayLike) -> float:
    truth, guess = _pair(labels, predictions)
    if len(truth) < 2:  # scipy raises
        return float("nan")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # constant scores, for which scipy returns NaN
        found = correlate(truth.astype(np.float64), guess.astype(np.float64))
    return float(found.statistic)


def _classes(labels: ArrayLike, predictions: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    truth, guess = _pair(labels, predictions)
    for name, values in (("labels", truth), ("predictions", guess)):
        # A score compared with a class would be wrong everywhere without a word.
        if values.dtype.kind not in "iub":
            raise ValueError(f"{name} are {values.dtype}; numbers of classes are whole numbers")
    return truth, guess


def _pair(labels: ArrayLike, predictions: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    truth, guess = np.asarray(labels), np.asarray(predictions)
    if truth.ndim != 1 or truth.shape != guess.shape or not truth.size:
        raise ValueError(
            f"labels {truth.shape} and predictions {guess.shape}: one number each for the same "
            "examples, at least one"
        )
    return truth, guess

"""Scores and reports of classification and regression, over all examples at once.

Undefined scores are as in scikit-learn and scipy: F1 is 0 if there are no positives, the Matthews
coefficient is 0 if labels or predictions are constant, and the correlation with a constant is NaN.
To find the best model, compare scores with `numpy.nanargmax`. `max` may return NaN, the score of a
model that predicts one value for everything and has learned nothing.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, softmax

from bert_jax.tasks.examples import TextExample
from bert_jax.tasks.reports import classes
from bert_jax.tasks.reports.intervals import Grounds, ratio, unweighted
from bert_jax.tasks.task import HeadKind


def class_metrics(labels: ArrayLike, predictions: ArrayLike) -> dict[str, float]:
    """Return accuracy, f1, macro_f1 and matthews of class ids (N,).

    f1 is the F1 of class 1; it is 0 if class 1 is absent. macro_f1 is the mean F1 of the classes
    that occur in the labels or the predictions. matthews is the Matthews correlation coefficient
    for any number of classes; it is 0 if labels or predictions are constant.
    """
    truth, guess = _pair(labels, predictions)
    return unweighted(classes.class_statistic(truth, guess), len(truth))


def correlations(labels: ArrayLike, predictions: ArrayLike) -> dict[str, float]:
    """Return spearman, the correlation of ranks, and pearson, the linear correlation of scores.

    Both are NaN if labels or predictions are constant or have a NaN, pearson also for infinities.
    """
    from scipy.stats import pearsonr, spearmanr  # takes half a second to import

    truth, guess = _pair(labels, predictions, np.float64)
    functions = {"spearman": spearmanr, "pearson": pearsonr}
    if len(truth) < 2:  # scipy raises
        return dict.fromkeys(functions, float("nan"))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # constant scores, for which scipy returns NaN
        return {name: float(each(truth, guess).statistic) for name, each in functions.items()}


def label_set_metrics(labels: ArrayLike, predictions: ArrayLike) -> dict[str, float]:
    """Return f1, macro_f1 and accuracy of multi-label predictions (N, K), each 0 or 1.

    f1 counts the predictions of all labels together (micro). macro_f1 is the mean F1 of the labels;
    an absent label has F1 0. accuracy is the share of rows in which all labels are right.
    """
    truth, guess = np.asarray(labels), np.asarray(predictions)
    statistic = classes.label_set_statistic(truth.astype(bool), guess.astype(bool))
    return unweighted(statistic, len(truth))


METRICS: Mapping[HeadKind, Callable[[ArrayLike, ArrayLike], dict[str, float]]] = {
    "single_label": class_metrics, "multi_label": label_set_metrics, "regression": correlations,
}  # fmt: skip
"""Metrics by kind of head: functions of (labels, predictions). Higher values are better."""


def _pair(
    labels: ArrayLike, predictions: ArrayLike, dtype: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    truth, guess = np.asarray(labels, dtype), np.asarray(predictions, dtype)
    if truth.ndim != 1 or truth.shape != guess.shape or not truth.size:
        raise ValueError(
            f"labels {truth.shape} and predictions {guess.shape}; expected (N,) each, of at least "
            "one example"
        )
    return truth, guess


_MOST_POINTS = 1000  # in the plot of a regression
_SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


def text_details(
    kind: HeadKind,
    names: Sequence[str],
    examples: Sequence[TextExample],
    truth: np.ndarray,
    logits: np.ndarray,
    predicted: np.ndarray,
) -> dict[str, Any]:
    """Return a report's details for this kind: classes, confusion, residuals and mistakes.

    `truth` and `predicted` are (N,) classes or scores, or (N, K) bool; `logits` (N, C) must
    already be divided by the temperature.
    """
    if kind == "regression":
        return _of_scores(examples, truth, predicted)
    if kind == "multi_label":
        details = classes.of_label_sets(names, truth, predicted)
        # A mistake is one label of an example.
        sure = np.where(predicted, expit(logits), expit(-logits))
        for number in classes.most_confident((truth != predicted).ravel(), sure.ravel()):
            row, label = divmod(number, len(names))
            said, held = ((names[label] if each[row, label] else f"not {names[label]}")
                          for each in (predicted, truth))  # fmt: skip
            details.setdefault("mistakes", []).append(
                _mistake(examples[row], held, said)
                | {"probability": classes.share(sure[row, label])}
            )
        return {"mistakes": [], **details}
    sure = softmax(logits, axis=1)[np.arange(len(logits)), predicted]
    return classes.of_classes(names, truth, predicted) | {
        "mistakes": [
            _mistake(examples[n], names[truth[n]], names[predicted[n]])
            | {"probability": classes.share(sure[n])}
            for n in classes.most_confident(truth != predicted, sure)
        ]
    }


def text_grounds(
    kind: HeadKind, truth: np.ndarray, predicted: np.ndarray, units: np.ndarray
) -> Grounds:
    """Return the data for confidence intervals; arguments are as in `text_details`."""
    if kind == "single_label":
        right, counts = truth == predicted, np.bincount(truth)
        rarest = counts[counts > 0].min()
        return Grounds(classes.class_statistic(truth, predicted), units, right, rarest)
    if kind == "multi_label":
        counts, right = truth.sum(axis=0), (truth == predicted).all(axis=1)
        rarest = counts[counts > 0].min(initial=len(truth))
        return Grounds(classes.label_set_statistic(truth, predicted), units, right, rarest)
    of_truth, of_guess = (np.unique(x, return_inverse=True)[1] for x in (truth, predicted))
    return Grounds(
        lambda w: {
            "pearson": _correlations(truth, predicted, w),
            "spearman": _correlations(_ranks(of_truth, w), _ranks(of_guess, w), w),
        },
        units,
    )


def _of_scores(
    examples: Sequence[TextExample], truth: np.ndarray, predicted: np.ndarray
) -> dict[str, Any]:
    errors = predicted - truth
    step = -(-len(truth) // _MOST_POINTS)
    mistakes = [
        _mistake(examples[n], float(truth[n]), round(float(predicted[n]), 4))
        | {"error": round(float(errors[n]), 4)}
        for n in classes.most_confident(errors != 0, np.abs(errors))
    ]
    return {
        "residuals": {
            "mean": float(errors.mean()),
            "deviation": float(errors.std()),
            "root_mean_square": float(np.sqrt(np.mean(errors**2))),
            "mean_absolute": float(np.abs(errors).mean()),
            "quantiles": {
                f"{each:g}": float(value)
                for each, value in zip(_SHARES, np.quantile(errors, _SHARES), strict=True)
            },
        },
        "points": np.stack([truth, predicted], axis=1)[::step].round(4).tolist(),
        "mistakes": mistakes,
    }


def _mistake(example: TextExample, label: Any, predicted: Any) -> dict[str, Any]:
    texts = {"text": example.text, "text_pair": example.text_pair}
    return {
        "id": example.id,
        "line": example.origin.line,
        **{name: classes.shortened(text) for name, text in texts.items() if text is not None},
        "label": label,
        "predicted": predicted,
    }


def _ranks(places: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return mean ranks (d, N) under weights `w` (d, N); `places` index sorted distinct values."""
    counts = w @ classes.indicator(places)
    return (counts.cumsum(axis=1) - counts / 2)[:, places]


def _correlations(first: np.ndarray, second: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return linear correlations (d,) under each of d weightings; NaN if all values are equal."""
    total = w.sum(axis=1, keepdims=True)
    first, second = (x - (w * x).sum(axis=1, keepdims=True) / total for x in (first, second))
    squares = [(w * x**2).sum(axis=1) for x in (first, second)]
    # Rounding may leave the sum of squares of equal values above 0.
    known = np.minimum(*squares) > 1e-12 * total[:, 0]
    shared = (w * first * second).sum(axis=1)
    return ratio(shared, np.sqrt(squares[0] * squares[1]) * known, np.nan)

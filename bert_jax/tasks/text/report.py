"""Details behind the scores of classification and regression: see `Split.report`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.special import expit, softmax

from bert_jax.tasks.examples import TextExample
from bert_jax.tasks.reports.classes import (
    class_statistic,
    label_set_statistic,
    of_classes,
    of_label_sets,
)
from bert_jax.tasks.reports.intervals import Grounds
from bert_jax.tasks.reports.mistakes import most_confident, share, shortened
from bert_jax.tasks.task import HeadKind

_MOST_POINTS = 1000  # of the picture of a regression
_SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


def text_details(
    kind: HeadKind,
    names: Sequence[str],
    examples: Sequence[TextExample],
    truth: np.ndarray,
    logits: np.ndarray,
    predicted: np.ndarray,
) -> dict[str, Any]:
    """Return classes, confusion, residuals and mistakes, where the kind of head has them.

    Args:
        kind: head of a text: single_label, multi_label or regression.
        names: names of the classes.
        examples: texts.
        truth: labels, (N,) classes or scores, or (N, K) bool.
        logits: (N, C), as `TextTask.predicted` takes them.
        predicted: result of `TextTask.predicted`.
    """
    if kind == "regression":
        return _of_scores(examples, truth, predicted)
    if kind == "multi_label":
        details = of_label_sets(names, truth, predicted)
        # A mistake is one label of an example.
        sure = np.where(predicted, expit(logits), expit(-logits))
        for number in most_confident((truth != predicted).ravel(), sure.ravel()):
            row, label = divmod(number, len(names))
            said, held = ((names[label] if each[row, label] else f"not {names[label]}")
                          for each in (predicted, truth))  # fmt: skip
            details.setdefault("mistakes", []).append(
                _mistake(examples[row], held, said) | {"probability": share(sure[row, label])}
            )
        return {"mistakes": [], **details}
    sure = softmax(logits, axis=1)[np.arange(len(logits)), predicted]
    return of_classes(names, truth, predicted) | {
        "mistakes": [
            _mistake(examples[n], names[truth[n]], names[predicted[n]])
            | {"probability": share(sure[n])}
            for n in most_confident(truth != predicted, sure)
        ]
    }


def text_grounds(
    kind: HeadKind, truth: np.ndarray, predicted: np.ndarray, units: np.ndarray
) -> Grounds:
    """Return the data for the metrics' intervals; arguments as in `text_details`."""
    if kind == "single_label":
        right, counts = truth == predicted, np.bincount(truth)
        rarest = counts[counts > 0].min()
        return Grounds(class_statistic(truth, predicted), units, right, rarest)
    if kind == "multi_label":
        counts, right = truth.sum(axis=0), (truth == predicted).all(axis=1)
        rarest = counts[counts > 0].min(initial=len(truth))
        return Grounds(label_set_statistic(truth, predicted), units, right, rarest)
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
        for n in most_confident(errors != 0, np.abs(errors))
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
        **{name: shortened(text) for name, text in texts.items() if text is not None},
        "label": label,
        "predicted": predicted,
    }


def _ranks(places: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return mean ranks of weighted examples, (d, N), from the places of their sorted values."""
    which = csr_array((np.ones(len(places)), (np.arange(len(places)), places)))
    counts = w @ which
    found: np.ndarray = (counts.cumsum(axis=1) - counts / 2)[:, places]
    return found


def _correlations(first: np.ndarray, second: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return linear correlations of weighted examples, (d,); NaN where values are all the same."""
    total = w.sum(axis=1, keepdims=True)
    first, second = (x - (w * x).sum(axis=1, keepdims=True) / total for x in (first, second))
    squares = [(w * x**2).sum(axis=1) for x in (first, second)]
    scale = np.sqrt(squares[0] * squares[1])
    # The sum of the squares of equal values is not quite 0.
    known = np.minimum(*squares) > 1e-12 * total[:, 0]
    shared = (w * first * second).sum(axis=1)
    found: np.ndarray = np.divide(shared, scale, out=np.full(len(scale), np.nan), where=known)
    return found

"""Scores and reports of classification and regression, over all examples at once.

Undefined scores are as in scikit-learn and scipy: F1 is 0 if there are no positives, the Matthews
coefficient is 0 if labels or predictions are constant, and the correlation with a constant is NaN.
To find the best model, compare scores with `numpy.nanargmax`. `max` may return NaN, the score of a
model that predicts one value for everything and has learned nothing.

Temperatures and thresholds turn logits into probabilities and labels; both are fitted to dev data
(Guo et al. 2017, "On calibration of modern neural networks").
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from scipy.special import expit, log_expit, log_softmax, softmax

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
            mistake = _mistake(examples[row], held, said, probability=sure[row, label])
            details.setdefault("mistakes", []).append(mistake)
        return {"mistakes": [], **details}
    sure = softmax(logits, axis=1)[np.arange(len(logits)), predicted]
    return classes.of_classes(names, truth, predicted) | {
        "mistakes": [
            _mistake(examples[n], names[truth[n]], names[predicted[n]], probability=sure[n])
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
    quantiles = zip(_SHARES, np.quantile(errors, _SHARES), strict=True)
    mistakes = [
        _mistake(examples[n], float(truth[n]), float(f"{predicted[n]:.7g}"))
        | {"error": float(f"{errors[n]:.7g}")}
        for n in classes.most_confident(errors != 0, np.abs(errors))
    ]
    return {
        "residuals": {
            "mean": float(errors.mean()),
            "deviation": float(errors.std()),
            "root_mean_square": float(np.sqrt(np.mean(errors**2))),
            "mean_absolute": float(np.abs(errors).mean()),
            "quantiles": {f"{each:g}": float(value) for each, value in quantiles},
        },
        "points": np.stack([truth, predicted], axis=1)[::step].tolist(),
        "mistakes": mistakes,
    }


def _mistake(example: TextExample, label: Any, predicted: Any, **measured: float) -> dict[str, Any]:
    texts = {"text": example.text, "text_pair": example.text_pair}
    return {
        "id": example.id,
        "line": example.origin.line,
        **{name: classes.shortened(text) for name, text in texts.items() if text is not None},
        "label": label,
        "predicted": predicted,
        **{name: classes.share(value) for name, value in measured.items()},
    }


def _ranks(places: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return mean ranks (d, N) under weights `w` (d, N); `places` (N,) are the dense ranks."""
    counts = w @ classes.indicator(places)
    return (counts.cumsum(axis=1) - counts / 2)[:, places]


def _correlations(first: np.ndarray, second: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return linear correlations (d,) under each of d weightings; NaN if all values are equal."""

    def squares(x: np.ndarray) -> np.ndarray:
        return (w * x**2).sum(axis=1)

    total = w.sum(axis=1, keepdims=True)
    a, b = (x - (w * x).sum(axis=1, keepdims=True) / total for x in (first, second))
    of_a, of_b = squares(a), squares(b)
    # Rounding may leave the sum of squares of equal values above 0.
    known = (of_a > 1e-24 * squares(first)) & (of_b > 1e-24 * squares(second))
    return ratio((w * a * b).sum(axis=1), np.sqrt(of_a * of_b) * known, np.nan)


NUM_BINS = 15
_TEMPERATURE, _THRESHOLD = "temperature", "threshold/"
_ERRORS = ("ece", "ece_uncalibrated")

Labels = np.ndarray
"""Labels of N examples: (N,) class ids, or (N, C) bool, true for each label of the example."""


@dataclass(frozen=True)
class Decisions:
    """Conversion of logits to probabilities and labels, for single- and multi-label tasks."""

    temperature: float = 1.0
    """Divisor of the logits. It does not change which class has the largest logit."""
    thresholds: tuple[float, ...] = ()
    """Probability above which each label is predicted (multi-label); () means 0.5 for all."""

    @classmethod
    def saved(cls, scores: Mapping[str, float], labels: Sequence[str]) -> "Decisions":
        """Restore temperature and thresholds from saved `scores`."""
        thresholds = tuple(scores.get(f"{_THRESHOLD}{label}", 0.5) for label in labels)
        known = any(f"{_THRESHOLD}{label}" in scores for label in labels)
        return cls(scores.get(_TEMPERATURE, 1.0), thresholds if known else ())

    @classmethod
    def fitted(
        cls, logits: Float[np.ndarray, "N C"], labels: Labels, *, calibrate: bool, tune: bool
    ) -> "Decisions":
        """Fit to dev data: the temperature by log loss, the thresholds by each label's F1."""
        temperature = fit_temperature(logits, labels) if calibrate else 1.0
        if not tune:
            return cls(temperature)
        pairs = zip(expit(logits / temperature).T, labels.T, strict=True)
        return cls(temperature, tuple(_best_threshold(*each) for each in pairs))

    def shares(self, logits: Float[np.ndarray, "N C"], *, several: bool) -> np.ndarray:
        """Return probabilities (N, C): sigmoid if rows may have `several` labels, else softmax."""
        scaled = logits / self.temperature
        return np.asarray(expit(scaled) if several else softmax(scaled, axis=1))

    def held(self, logits: Float[np.ndarray, "N C"]) -> Bool[np.ndarray, "N C"]:
        """Return true for each label whose probability is above its threshold (multi-label)."""
        if not self.thresholds:
            return logits > 0  # a probability above one half
        return self.shares(logits, several=True) > np.array(self.thresholds)

    def scores(
        self, logits: Float[np.ndarray, "N C"], labels: Labels, names: Sequence[str],
        *, calibrate: bool, tune: bool,
    ) -> dict[str, float]:  # fmt: skip
        """Return the temperature, the calibration errors on these examples, and the thresholds."""
        found: dict[str, float] = {}
        if calibrate:
            found[_TEMPERATURE] = self.temperature
            after, before = (each.reliability(logits, labels)["ece"] for each in (self, PLAIN))
            found |= dict(zip(_ERRORS, (after, before), strict=True))
        if tune:
            values = zip(names, self.thresholds, strict=True)
            found |= {f"{_THRESHOLD}{name}": value for name, value in values}
        return found

    @staticmethod
    def score_names(names: Sequence[str], *, calibrate: bool, tune: bool) -> list[str]:
        """Return the keys of the result of `scores`."""
        found = [_TEMPERATURE, *_ERRORS] if calibrate else []
        return found + ([f"{_THRESHOLD}{name}" for name in names] if tune else [])

    def calibration(self, logits: Float[np.ndarray, "N C"], labels: Labels) -> dict[str, Any]:
        """Return the temperature, and the reliability before and after scaling, as JSON values."""
        parts = {"before": PLAIN, "after": self}
        bins = {name: each.reliability(logits, labels) for name, each in parts.items()}
        return {"temperature": self.temperature, **bins}

    def reliability(self, logits: Float[np.ndarray, "N C"], labels: Labels) -> dict[str, Any]:
        """Return `reliability` of the best classes or, for multi-label tasks, of all labels."""
        if labels.ndim == 2:
            return reliability(self.shares(logits, several=True).ravel(), labels.ravel() > 0)
        shares = self.shares(logits, several=False)
        return reliability(shares.max(axis=1), shares.argmax(axis=1) == labels)


PLAIN = Decisions()


def reliability(
    shares: Float[np.ndarray, " M"], came_true: Bool[np.ndarray, " M"], bins: int = NUM_BINS
) -> dict[str, Any]:
    """Compare probabilities with the fraction that came true, in bins (i / bins, (i + 1) / bins].

    The result has lists with an entry per bin (0 if the bin is empty): `counts`; `confidence`, the
    mean probability; `accuracy`, the fraction that came true. It also has `ece`, the expected
    calibration error: the mean gap between `confidence` and `accuracy`, weighted by `counts`.
    """
    number = np.clip(np.ceil(shares * bins).astype(int) - 1, 0, bins - 1)
    counts = np.bincount(number, minlength=bins)
    sums = (np.bincount(number, values, bins) for values in (shares, came_true))
    confidence, accuracy = (each / np.maximum(counts, 1) for each in sums)
    gaps = np.abs(confidence - accuracy)
    return {
        "ece": float(np.sum(gaps * counts) / max(int(counts.sum()), 1)),
        "counts": counts.tolist(),
        "confidence": confidence.round(6).tolist(),
        "accuracy": accuracy.round(6).tolist(),
    }


def fit_temperature(logits: Float[np.ndarray, "N C"], labels: Labels) -> float:
    """Return the temperature between 1/20 and 20 with the least log loss.

    The loss is convex in 1 / temperature, so that a bounded search finds its minimum.
    """
    from scipy.optimize import minimize_scalar  # takes a third of a second to import

    def loss(sharpness: float) -> float:
        scaled = logits * sharpness
        if labels.ndim == 2:
            return -float(np.mean(log_expit(np.where(labels, scaled, -scaled))))
        return -float(np.mean(log_softmax(scaled, axis=1)[np.arange(len(labels)), labels]))

    found = minimize_scalar(loss, bounds=(1 / 20, 20), method="bounded", options={"xatol": 1e-6})
    return 1 / float(found.x)


def _best_threshold(shares: Float[np.ndarray, " N"], labels: Bool[np.ndarray, " N"]) -> float:
    """Return the threshold with the highest F1; if several tie, the nearest to 0.5.

    Thresholds lie halfway between neighbouring probabilities; a label that no row has gets 0.5.
    """
    if not labels.any():
        return 0.5
    order = np.argsort(-shares, kind="stable")
    ranked = np.append(shares[order], 0.0)
    hits = np.cumsum(labels[order])
    f1 = 2 * hits / (np.arange(1, len(shares) + 1) + labels.sum())
    between = (ranked[:-1] + ranked[1:]) / 2
    apart = ranked[:-1] > ranked[1:]  # no threshold separates equal probabilities
    if not apart.any():
        return 0.5
    near = np.abs(between - 0.5)
    best = min(np.flatnonzero(apart), key=lambda n: (-f1[n], near[n]))
    return float(between[best])

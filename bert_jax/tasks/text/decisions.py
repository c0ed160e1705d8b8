"""Probabilities and labels from logits: a temperature and thresholds, fitted to dev data.

Guo et al. 2017, "On calibration of modern neural networks".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import expit, log_expit, log_softmax, softmax

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
        thresholds: tuple[float, ...] = ()
        if tune:
            shares = expit(logits / temperature)
            thresholds = tuple(
                _best_threshold(*each) for each in zip(shares.T, labels.T, strict=True)
            )
        return cls(temperature, thresholds)

    def shares(self, logits: Float[np.ndarray, "N C"], *, several: bool) -> np.ndarray:
        """Return probabilities (N, C): sigmoid if rows may have `several` labels, else softmax."""
        scaled = logits / self.temperature
        return np.asarray(expit(scaled) if several else softmax(scaled, axis=1))

    def held(self, logits: Float[np.ndarray, "N C"]) -> Bool[np.ndarray, "N C"]:
        """Mark the labels whose probability is above the label's threshold (multi-label)."""
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
        """Compare probabilities of best classes, or of labels, with how often they come true."""
        if labels.ndim == 2:
            return reliability(self.shares(logits, several=True).ravel(), labels.ravel() > 0)
        shares = self.shares(logits, several=False)
        return reliability(shares.max(axis=1), shares.argmax(axis=1) == labels)


PLAIN = Decisions()


def reliability(
    shares: Float[np.ndarray, " M"], came_true: Bool[np.ndarray, " M"], bins: int = NUM_BINS
) -> dict[str, Any]:
    """Compare probabilities with the fraction that came true, in bins (i / bins, (i + 1) / bins].

    Returns:
        Lists with an entry per bin (0 if the bin is empty): `counts`; `confidence`, the mean
        probability; `accuracy`, the fraction that came true. Also `ece`, the expected calibration
        error: the mean gap between `confidence` and `accuracy`, weighted by `counts`.
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

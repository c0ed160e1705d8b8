"""Confidence intervals of scores over the sampled units: examples, or groups of examples.

Proportions of right examples (accuracy, exact match) have a Wilson interval. For other scores,
units are resampled (bootstrap, Efron and Tibshirani 1993), and the interval is Student's t on the
log-odds scale (for correlations, Fisher's z). `docs/experiments.md` has the measured coverage. If
coverage would be too low, a report gives the reason instead of an interval. Resamples depend only
on the number of units, so two models are compared on the same resamples (paired).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import expit, logit, stdtrit

from bert_jax.hashing import below, hash_key, hash_u64

DRAWS = 1000
"""Number of resamples."""
LEVEL = 0.95
"""Confidence level of the intervals."""
LEAST = 10
"""Smallest number of units for which an interval is given."""
_LEAST_KNOWN = 0.99  # smallest share of resamples in which the score must be defined
_LEAST_SPREAD = 1e-9
_SIGNED = {"pearson", "spearman", "matthews"}  # scores that range from -1
_PURPOSE = 0x6578616D  # distinguishes the random numbers of resamples
_BLOCK = 1 << 22  # numbers drawn at a time

Score = Callable[[np.ndarray], Mapping[str, np.ndarray]]
"""Function that maps float weights (d, N) of the examples to scores by name, each (d,)."""


class Grounds(NamedTuple):
    """Data from which the confidence intervals of scores are computed."""

    score: Score
    units: np.ndarray
    """Index (N,) of the unit to which each example belongs. Resampling draws units."""
    right: np.ndarray | None = None
    """Correctness (N,) of each prediction, from 0 to 1; None if predictions are real numbers."""
    rarest: float = math.inf
    """Number of examples of the rarest class. All scores but `accuracy` need at least `LEAST`."""
    most: float = 1.0
    """Greatest possible score."""


class Intervals(NamedTuple):
    """Intervals at `LEVEL`, or reasons for their absence, by the name of the score."""

    found: dict[str, tuple[float, float]]
    missing: dict[str, str]


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Return Wilson's interval at `LEVEL` of the share of `hits` among `count` trials."""
    from scipy.stats import binomtest  # takes half a second to import

    low, high = binomtest(hits, count).proportion_ci(LEVEL, "wilson")
    return float(low), float(high)


def weights(count: int, num_examples: int = 0) -> Iterator[np.ndarray]:
    """Yield blocks (d, count) of d resamples: how often each resample contains each unit.

    The more examples the units have, the smaller d is: a caller repeats weights for the examples.
    """
    key, step = hash_key(_PURPOSE, count), max(1, _BLOCK // max(count, num_examples))
    for first in range(0, DRAWS, step):
        size = min(step, DRAWS - first)
        counters = np.arange(first * count, (first + size) * count).reshape(size, count)
        drawn = below(hash_u64(key, counters), count) + count * np.arange(size)[:, None]
        yield np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count).astype(float)


def ratio(above: np.ndarray, below: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
    """Divide element by element; the result is `otherwise` where the denominator is at most 0."""
    shape = np.broadcast_shapes(above.shape, below.shape)
    return np.divide(above, below, out=np.full(shape, otherwise), where=below > 0)


def means(names: Sequence[str], each: np.ndarray) -> Score:
    """Make a function for weighted means of columns of `each` (N, S); NaN if all weights are 0."""

    def score(w: np.ndarray) -> dict[str, np.ndarray]:
        found = ratio(w @ each, w.sum(axis=1, keepdims=True), np.nan)
        return dict(zip(names, found.T, strict=True))

    return score


def unweighted(score: Score, count: int) -> dict[str, float]:
    """Return the scores of `count` examples that weigh 1 each."""
    return {name: float(values[0]) for name, values in score(np.ones((1, count))).items()}


def intervals(ours: Grounds, theirs: Grounds | None = None) -> Intervals:
    """Return intervals of our scores or, given `theirs`, of our scores minus theirs (paired)."""
    _, unit = np.unique(ours.units, return_inverse=True)
    count = int(unit.max()) + 1

    def score(w: np.ndarray) -> dict[str, np.ndarray]:
        mine = ours.score(w)
        less = dict.fromkeys(mine, np.zeros(1)) if theirs is None else theirs.score(w)
        return {name: values - less[name] for name, values in mine.items() if name in less}

    blocks = [score(drawn[:, unit]) for drawn in weights(count, len(unit))]
    few, what, are_shares = count, "units", False
    if theirs is not None:
        if ours.right is not None and theirs.right is not None:
            few, what = len(set(unit[ours.right != theirs.right])), "units differ"
    elif ours.right is not None:
        sides = {"right": ours.right > 0, "wrong": ours.right < 1}
        are_shares = count == len(unit) and set(ours.right.tolist()) <= {0, 1}
        few, what = min((len(set(unit[side])), f"units are {n}") for n, side in sides.items())
    result = Intervals({}, {})
    for name, point in unweighted(score, len(unit)).items():
        own, words = (few, what) if few < count else (count, "units")
        if name != "accuracy" and ours.rarest < own:
            own, words = int(ours.rarest), "examples of a class"
        values = np.concatenate([block[name] for block in blocks])
        known = values[np.isfinite(values)]
        if are_shares and name in ("accuracy", "exact"):
            low, high = wilson(round(point / ours.most * count), count)
            result.found[name] = ours.most * low, ours.most * high
        elif len(known) < _LEAST_KNOWN * DRAWS:
            result.missing[name] = "the score is undefined in some resamples"
        elif own < LEAST or known.std() < _LEAST_SPREAD * ours.most:
            result.missing[name] = f"only {own} {words}" if own < LEAST else "resamples are equal"
        else:
            low, high = -ours.most if name in _SIGNED else 0.0, ours.most
            if theirs is not None:
                low, high = low - high, high - low
            if not low <= point <= high:
                raise ValueError(f"{name} is {point:g}; expected from {low:g} to {high:g}")
            if point in (low, high):
                result.missing[name] = "the score is an end of its range"
                continue
            share = (point - low) / (high - low)
            error = known.std() * math.sqrt(count / (count - 1)) / (high - low)
            half = stdtrit(count - 1, 0.5 + LEVEL / 2) * error / (share * (1 - share))
            ends = low + (high - low) * expit(logit(share) + np.array([-half, half]))
            result.found[name] = float(ends[0]), float(ends[1])
    return result

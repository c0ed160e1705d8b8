"""Intervals of scores by bootstrap over examples (Efron and Tibshirani 1993, percentiles).

A resample draws as many examples with replacement. The resamples are a function of the number of
examples alone: scores of two models on the same examples are scores of the same resamples.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from bert_jax.data.shuffle import below, hash_key, hash_u64

DRAWS = 1000
"""Number of resamples."""
LEVEL = 0.95
"""Share of the resamples inside an interval."""
_PURPOSE = 0x6578616D  # of the random numbers
_LEAST_KNOWN = 0.99  # share of the resamples that have a score
_BLOCK = 1 << 22  # numbers drawn at a time


def resamples(count: int) -> Iterator[np.ndarray]:
    """Yield the examples of the resamples, (d, count) int64 numbers below `count` at a time."""
    key, step = hash_key(_PURPOSE, count), max(1, _BLOCK // count)
    for first in range(0, DRAWS, step):
        size = min(step, DRAWS - first)
        counters = np.arange(first * count, (first + size) * count).reshape(size, count)
        yield below(hash_u64(key, counters), count)


def resampled_sums(values: np.ndarray) -> np.ndarray:
    """Return the sums (DRAWS, S) of what each example adds to them, (N, S)."""
    found = np.empty((DRAWS, values.shape[1]))
    at = 0
    for drawn in resamples(len(values)):
        for column in range(values.shape[1]):  # (d, N) at a time, not (d, N, S)
            found[at : at + len(drawn), column] = values[:, column][drawn].sum(axis=1)
        at += len(drawn)
    return found


def resampled_counts(codes: np.ndarray, size: int) -> np.ndarray:
    """Return how many examples have each code, (DRAWS, size) int64, of codes (N,) below `size`."""
    found = [
        np.bincount(
            (codes[drawn] + size * np.arange(len(drawn))[:, None]).ravel(),
            minlength=size * len(drawn),
        ).reshape(len(drawn), size)
        for drawn in resamples(len(codes))
    ]
    return np.concatenate(found)


def resampled(count: int, score: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the scores (DRAWS,) of a function from examples (d, count) to scores (d,)."""
    return np.concatenate([score(drawn) for drawn in resamples(count)])


def interval(values: np.ndarray) -> tuple[float, float] | None:
    """Return the percentile interval at `LEVEL`; None where few resamples have a score.

    A correlation is not defined where all examples of a resample are equal, which resamples of few
    examples may be.
    """
    known = values[np.isfinite(values)]
    if len(known) < _LEAST_KNOWN * DRAWS:
        return None
    low, high = np.quantile(known, (0.5 - LEVEL / 2, 0.5 + LEVEL / 2))
    return float(low), float(high)


def differences(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]
) -> dict[str, tuple[float, float]]:
    """Return the intervals of our scores less theirs, of the same examples, by name."""
    pairs = {name: ours[name] - theirs[name] for name in ours if name in theirs}
    found = {name: interval(values) for name, values in pairs.items()}
    return {name: ends for name, ends in found.items() if ends is not None}

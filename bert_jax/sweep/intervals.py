"""Intervals of means over few values: Student's t and bootstrap."""

import math
from itertools import combinations_with_replacement

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from bert_jax.data.shuffle import below, hash_key, hash_u64

LEVEL = 0.95
"""Level of the intervals, and of the bound that a run must exceed."""
_EXACT_UP_TO = 8  # seeds: 6,435 samples; beyond, so many are drawn:
_DRAWS = 10_000
_BOOTSTRAP = 0x626F6F74  # purpose of the random numbers


def student_interval(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Return the interval of the mean at `LEVEL` by Student's t; n at least 2."""
    n = len(values)
    half = stdtrit(n - 1, 0.5 + LEVEL / 2) * values.std(ddof=1) / math.sqrt(n)
    return float(values.mean() - half), float(values.mean() + half)


def bootstrap_interval(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Return the percentile interval of the mean at `LEVEL` over samples with replacement.

    All n^n samples are taken of 2 to 8 values, samples of equal content counted at once; 10,000 of
    more values, the same each time. For few values the interval is too narrow: believe Student's.
    """
    n = len(values)
    if n <= _EXACT_UP_TO:
        samples = np.array(list(combinations_with_replacement(range(n), n)))
        counts = (samples[:, :, None] == np.arange(n)).sum(axis=1)
        factorial = np.array([math.factorial(i) for i in range(n + 1)])
        weights = factorial[n] / factorial[counts].prod(axis=1) / n**n
    else:
        counters = np.arange(_DRAWS * n).reshape(_DRAWS, n)
        samples = below(hash_u64(hash_key(_BOOTSTRAP, n), counters), n)
        weights = np.full(_DRAWS, 1 / _DRAWS)
    means = values[samples].mean(axis=1)
    order = np.argsort(means, kind="stable")
    cumulated = np.cumsum(weights[order])
    at = np.searchsorted(cumulated, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    low, high = means[order][at.clip(max=len(means) - 1)].tolist()
    return low, high

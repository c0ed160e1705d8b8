"""Intervals of means over few values: Student's t."""

import math

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

LEVEL = 0.95
"""Level of the intervals, and of the bound that a run must exceed."""


def student_interval(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Return the interval of the mean at `LEVEL` by Student's t; n at least 2."""
    n = len(values)
    half = stdtrit(n - 1, 0.5 + LEVEL / 2) * values.std(ddof=1) / math.sqrt(n)
    return float(values.mean() - half), float(values.mean() + half)

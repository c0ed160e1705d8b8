"""The mistakes that a model is surest of, and the texts they are in."""

from typing import Any

import numpy as np

SHOWN = 20
"""Number of mistakes in a report."""
_LONGEST = 600  # characters of a text


def most_confident(wrong: np.ndarray, confidence: np.ndarray) -> list[int]:
    """Return the numbers of the wrong answers, (N,) bool, with the greatest confidence, (N,)."""
    found = np.flatnonzero(wrong)
    order = np.argsort(-confidence[found], kind="stable")
    return [int(number) for number in found[order[:SHOWN]]]


def shortened(text: str) -> str:
    """Return a text, its middle left out where it is long."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} … {text[-half:]}"


def share(value: Any) -> float:
    """Return a probability as reports have it."""
    return round(float(value), 4)

"""The most confident mistakes of a model, and their texts."""

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
    """Return a text; a long text loses its middle."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} … {text[-half:]}"


def share(value: Any) -> float:
    """Round a probability as reports show it."""
    return round(float(value), 4)

"""The choice of size and steps for a time, from the law and the measured speed of a step."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bert_jax.cli.start import law
from bert_jax.cli.start.recipe import LENGTH, SIZES, Size

Seconds = Callable[[Size], float]
"""Function that measures or predicts the seconds of a training step."""


class Choice(NamedTuple):
    """A size with the run that fits into the time."""

    size: Size
    num_steps: int
    step_seconds: float
    unique: int
    """Number of tokens of the training text."""

    @property
    def seconds(self) -> float:
        """Time of the run."""
        return self.num_steps * self.step_seconds

    @property
    def tokens(self) -> int:
        """Number of tokens in all batches."""
        return self.num_steps * self.size.rows * LENGTH

    @property
    def epochs(self) -> float:
        """Number of passes over the text."""
        return self.tokens / self.unique

    @property
    def nats(self) -> float:
        """Nats below the unigram entropy that the law predicts."""
        return law.nats_below_unigram(self.size.parameters, self.tokens, self.unique)


def choices(
    measure: Seconds, seconds: float, unique: int, sizes: Sequence[Size] = SIZES
) -> list[Choice]:
    """Return a choice for each size, the best first.

    `measure` is called for few sizes: first a small one, from which the cost of other sizes is
    estimated by their operations, then the best so far until the best one has been measured.

    Args:
        measure: function that returns the seconds of a step of a size.
        seconds: time of the run.
        unique: number of tokens of the training text.
        sizes: sizes to compare.
    """
    known = {sizes[1]: measure(sizes[1])}
    while True:
        found = [_choice(size, _estimated(size, known), seconds, unique) for size in sizes]
        found.sort(key=lambda choice: -choice.nats)
        if found[0].size in known:
            return found
        known[found[0].size] = measure(found[0].size)


def _choice(size: Size, step_seconds: float, seconds: float, unique: int) -> Choice:
    return Choice(size, max(1, math.floor(seconds / step_seconds)), step_seconds, unique)


def _estimated(size: Size, known: dict[Size, float]) -> float:
    """Return the seconds of a step, estimated from the measured size with the nearest cost."""
    nearest = min(known, key=lambda each: abs(math.log(each.step_cost / size.step_cost)))
    return known[nearest] * size.step_cost / nearest.step_cost

"""The choice of size and steps for a given time, from `law` and the measured speed of a step."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bert_jax.cli.start.law import nats_below_unigram
from bert_jax.cli.start.recipe import SIZES, Size


class Speed(NamedTuple):
    """Measured or predicted speed of a size."""

    seconds: float
    """Time of a step."""
    tokens: int
    """Number of tokens in a step."""


class Choice(NamedTuple):
    """A size with the run that fits into the time."""

    size: Size
    num_steps: int
    speed: Speed
    unique: int
    """Number of tokens of the training text."""

    @property
    def tokens(self) -> int:
        """Number of tokens in all batches."""
        return self.num_steps * self.speed.tokens

    @property
    def nats(self) -> float:
        """Loss that `law` predicts, in nats below the unigram entropy."""
        return nats_below_unigram(self.size.parameters, self.tokens, self.unique)


def choices(
    measure: Callable[[Size], Speed],
    seconds: float,
    unique: int,
    known: dict[Size, Speed],
    sizes: Sequence[Size] = SIZES,
) -> list[Choice]:
    """Return a choice for each size, the best first.

    `measure` is called for a small size, whose speed and operations predict the other speeds, and
    then for the size that seems best, until the best size has been measured. Measured speeds are
    added to `known`. A run takes `seconds`, and its text has `unique` tokens.
    """
    best = sizes[1]
    while True:
        if best not in known:
            known[best] = measure(best)
        runs = [size for size in known if math.isfinite(known[size].seconds)] or [best]
        base = min(runs, key=lambda size: abs(size.parameters - best.parameters))
        time, tokens = known[base]
        found = []
        for size in sizes:  # the speeds of sizes that were not measured follow from their costs
            speed = known.get(size, Speed(time * size.cost(tokens) / base.cost(tokens), tokens))
            found.append(Choice(size, max(1, int(seconds / speed.seconds)), speed, unique))
        # Sizes that cannot make a step in this time come last, the fastest first.
        found.sort(key=lambda choice: (max(seconds, choice.speed.seconds), -choice.nats))
        if found[0].size in known:
            return found
        best = found[0].size

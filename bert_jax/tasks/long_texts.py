"""Texts with more tokens than a row: the tokens of each row, and one answer for several rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int64

from bert_jax.errors import UserError

Span = tuple[int, int]
Pooling = Literal["mean", "max", "first_last"]
"""Pooling of the logits of a text's windows: the mean, the highest logit of each class, or the mean
of the first and the last window."""


@dataclass(frozen=True)
class LongTexts:
    """Treatment of texts with more tokens than a row."""

    how: Literal["cut", "head_tail", "windows"] = "cut"
    """Tokens that are read. cut: the beginning. head_tail: the beginning and the end. windows:
    everything, in overlapping rows."""
    pooling: Pooling = "mean"
    """Pooling of the logits of a text with several rows."""
    stride: int = 0
    """Tokens from the start of a window to the start of the next; 0: half a window."""

    def __post_init__(self) -> None:
        """Refuse a stride that goes backwards."""
        if self.stride < 0:
            raise UserError(f"the stride of windows is {self.stride}; it must be at least 0")

    def parts(self, lengths: Sequence[int], room: int) -> list[list[list[Span]]]:
        """Return the spans of tokens that each row has of one or two texts of these lengths.

        Together the texts have more than `room` tokens, and each row has at most `room`.
        """
        if self.how == "windows":
            return _windows(lengths, room, self.stride)
        kept = [room] if len(lengths) == 1 else pair_lengths(lengths[0], lengths[1], room)
        if self.how == "cut":
            return [[[(0, keep)] for keep in kept]]
        return [[_ends(length, keep) for length, keep in zip(lengths, kept, strict=True)]]

    def pooled(
        self, logits: Float[np.ndarray, "R C"], owners: Int64[np.ndarray, " R"]
    ) -> Float[np.ndarray, "N C"]:
        """Pool the logits of each example's rows, which follow each other."""
        first = np.flatnonzero(np.diff(owners, prepend=-1))
        if len(first) == len(logits):
            return logits
        if self.pooling == "max":
            highest: np.ndarray = np.maximum.reduceat(logits, first)
            return highest
        last = np.append(first[1:], len(logits)) - 1
        if self.pooling == "first_last":
            return (logits[first] + logits[last]) / 2
        return np.add.reduceat(logits, first) / (last - first + 1)[:, None]


CUT = LongTexts()


def pair_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Shorten two texts to `room` tokens: the longer loses tokens; of equal texts, the second."""
    if first + second <= room:
        return first, second
    kept = min(first, max(room - second, room - room // 2))
    return kept, room - kept


def _ends(length: int, keep: int) -> list[Span]:
    """Return the head and the tail of a text: 128 and 382 of 510 tokens (Sun et al. 2019)."""
    if length <= keep:
        return [(0, length)]
    head = keep * 128 // 510
    return [(0, head), (length - keep + head, length)]


def _windows(lengths: Sequence[int], room: int, stride: int) -> list[list[list[Span]]]:
    moving = int(np.argmax(lengths))
    still = [min(length, room // 2) for length in lengths]
    width = room - sum(still) + still[moving]
    length, stride = lengths[moving], min(stride or max(width // 2, 1), width)
    rows = []
    for start in range(0, length - width + stride, stride):
        # The last window is as long as the others, so it has all the context it can.
        begin = min(start, length - width)
        spans = [[(0, keep)] for keep in still]
        spans[moving] = [(begin, begin + width)]
        rows.append(spans)
    return rows


def covered(rows: Sequence[Sequence[Sequence[Span]]]) -> int:
    """Count the tokens that are in a row at least once."""
    total = 0
    for spans in zip(*rows, strict=True):  # the rows of one text
        end = 0
        for start, stop in sorted({span for row in spans for span in row}):
            total += max(stop, end) - max(start, end)
            end = max(stop, end)
    return total

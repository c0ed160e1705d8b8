"""Rows of token ids from texts and pairs, and the pooling of a long text's windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int64

from bert_jax.config.bounds import Bounded, Natural
from bert_jax.tasks.examples import TextExample, counted
from bert_jax.tasks.rows import Rows
from bert_jax.tokenization.tokenizer import Tokenizer, TokenRow, make_row, num_special

Span = tuple[int, int]
Pooling = Literal["mean", "max", "first_last"]
"""Rule that combines the logits of a text's windows; see `TableConfig.window_pooling`."""


@dataclass(frozen=True)
class LongTexts(Bounded, section="long"):
    """Treatment of texts that do not fit in a row."""

    how: Literal["cut", "head_tail", "windows"] = "cut"
    """Part to read of a long text; see `TableConfig.long`."""
    pooling: Pooling = "mean"
    """Rule that combines the logits of a text's windows."""
    stride: Natural = 0
    """Number of tokens from one window's start to the next; 0 means half a window."""

    def parts(self, lengths: Sequence[int], room: int) -> list[list[list[Span]]]:
        """Cut one or two texts of these lengths into rows; return token spans by row and text.

        The texts have more than `room` tokens together; each row gets at most `room`.
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
        """Pool the logits of each example's rows. `owners` has the index of each row's example."""
        first = np.flatnonzero(np.diff(owners, prepend=-1))
        if len(first) == len(logits):
            return logits
        if self.pooling == "max":
            return np.maximum.reduceat(logits, first)
        last = np.append(first[1:], len(logits)) - 1
        if self.pooling == "first_last":
            return (logits[first] + logits[last]) / 2
        return np.add.reduceat(logits, first) / (last - first + 1)[:, None]


CUT = LongTexts()


def pair_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Cut the longer text first until both texts fit `room` tokens; return the two lengths."""
    if first + second <= room:
        return first, second
    if first > second:
        return pair_lengths(second, first, room)[::-1]
    kept = min(first, room // 2)
    return kept, room - kept


def _ends(length: int, keep: int) -> list[Span]:
    """Return the spans of a text's head and tail, in the ratio 128 : 382 (Sun et al. 2019)."""
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
        # Begin the last window earlier, so that it is full and ends with the text.
        begin = min(start, length - width)
        spans = [[(0, keep)] for keep in still]
        spans[moving] = [(begin, begin + width)]
        rows.append(spans)
    return rows


def covered(rows: Sequence[Sequence[Sequence[Span]]]) -> int:
    """Count the tokens that at least one row contains."""
    total = 0
    for spans in zip(*rows, strict=True):  # the rows of one text
        end = 0
        for start, stop in sorted({span for row in spans for span in row}):
            total += max(stop, end) - max(start, end)
            end = max(stop, end)
    return total


@dataclass(frozen=True, eq=False)
class TextRows:
    """Rows of one file's examples, in order; the weights of an example's rows sum to 1."""

    rows: Rows
    owners: Int64[np.ndarray, " R"]
    """Index of the example of each row."""
    long: Sequence[int] = ()
    """Indices of the examples that did not fit in one row."""
    num_tokens: int = 0
    """Number of non-special tokens in long examples. `left_out` of them are in no row."""
    left_out: int = 0

    def warnings(
        self, examples: Sequence[TextExample], room: int, long: LongTexts
    ) -> tuple[str, ...]:
        """Return a warning that names the lines of long examples and says how they were cut."""
        is_pair = examples[0].text_pair is not None
        what = f"{'pairs of texts' if is_pair else 'texts'} of more than {room} tokens, "
        share = f"{self.left_out:,} of their {self.num_tokens:,} tokens are left out"
        if long.how == "cut":
            what += "cut there"
        elif long.how == "head_tail":
            what += f"read at both ends; {share}"
        else:
            added = len(self.rows) - len(examples) + len(self.long)
            what += f"read in {added:,} windows" + (f"; {share}" if self.left_out else "")
        return counted(what, [examples[number].origin for number in self.long])


def text_rows(
    examples: Sequence[TextExample],
    tokenizer: Tokenizer,
    max_length: int,
    labels: np.ndarray | None,
    long: LongTexts = CUT,
) -> TextRows:
    """Encode examples as rows of at most `max_length` tokens.

    `pair_lengths` cuts a pair; with windows, a row has at most half a row of the shorter text.
    """
    firsts = tokenizer.encode_batch([example.text for example in examples])
    pairs = [example.text_pair for example in examples]
    seconds = iter(tokenizer.encode_batch([pair for pair in pairs if pair is not None]))
    made: list[TokenRow] = []
    owners: list[int] = []
    cut: list[int] = []
    num_tokens = left_out = 0
    for number, (pair, first) in enumerate(zip(pairs, firsts, strict=True)):
        texts = [first] if pair is None else [first, next(seconds)]
        room = max_length - num_special(tokenizer, pair is not None)
        lengths = [len(text) for text in texts]
        rows = [[[(0, length)] for length in lengths]]
        if sum(lengths) > room:
            rows = long.parts(lengths, room)
            cut.append(number)
            num_tokens += sum(lengths)
            left_out += sum(lengths) - covered(rows)
        for parts in rows:
            ids = [
                np.concatenate([text[start:end] for start, end in spans])
                for text, spans in zip(texts, parts, strict=True)
            ]
            made.append(make_row(tokenizer, *ids))
            owners.append(number)
    owner: np.ndarray = np.array(owners, np.int64)
    weights = None
    if len(owners) > len(examples):
        labels = None if labels is None else labels[owner]
        weights = (1 / np.bincount(owner)[owner]).astype(np.float32)
    starts = np.array([row.second_start for row in made], np.int32)
    whole = Rows([row.ids for row in made], starts, labels, weights=weights)
    return TextRows(whole, owner, cut, num_tokens, left_out)

"""Batches of few shapes, so that calls and files share what was compiled."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64

from bert_jax.tasks.batches import eval_batches
from bert_jax.tasks.rows import Batch, Rows

LENGTHS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
"""Rows are padded to the next of these, and to no more than the model's positions."""
MAX_TOKENS = 1024
"""Tokens in a batch: more are no faster on a CPU, and the rows of a batch are less alike in length.
A last batch, or a small call, has the next power of 2 of rows."""


def shape_for(
    longest: int, count: int, limit: int, max_tokens: int = MAX_TOKENS
) -> tuple[int, int]:
    """Return rows and length of a batch: the longest row has so many tokens, and `count` are left.

    A row has at most `limit` tokens, a batch of more than one row at most `max_tokens`.
    """
    length = next((length for length in LENGTHS if longest <= length < limit), limit)
    most = max(1, max_tokens // length)
    return min(1 << (most.bit_length() - 1), 1 << (count - 1).bit_length()), length


def row_batches(
    rows: Rows, limit: int, pad_id: int, max_tokens: int = MAX_TOKENS
) -> Iterator[tuple[Int64[np.ndarray, " B"], Batch]]:
    """Yield the numbers of some rows, longest first, and their batch, until all have had a turn.

    `bert-jax predict` has other lengths, `tasks.batches.choose_buckets`: those with the least
    padding for the rows of one file, where these are shared by all calls (docs/decisions.md).
    """
    order = np.argsort(-rows.lengths, kind="stable")
    at = 0
    while at < len(order):
        longest = int(rows.lengths[order[at]])
        size, length = shape_for(longest, len(order) - at, limit, max_tokens)
        index = order[at : at + size]
        own = Rows([rows.tokens[row] for row in index.tolist()], rows.second_start[index])
        ((_, batch),) = eval_batches(own, (length,), size, pad_id)
        yield index, batch
        at += size

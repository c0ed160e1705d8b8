"""Rows through a model in few shapes, so that calls and files share what was compiled."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bert_jax.finetune.batches import eval_batches
from bert_jax.finetune.rows import Batch, Rows

LENGTHS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
"""Rows are padded to the next of these, and to no more than the model's positions."""
MAX_ROWS = 32
"""Rows in a batch; a smaller call takes the next power of 2."""
MAX_TOKENS = 4096
"""Tokens in a batch: attention's memory grows with the square of the length."""


def shapes(limit: int) -> list[tuple[int, tuple[int, ...]]]:
    """Rows in a batch, and the lengths for which it is so; for rows of at most `limit` tokens."""
    lengths = [*(length for length in LENGTHS if length < limit), limit]
    found: dict[int, list[int]] = {}
    for length in lengths:
        rows = MAX_ROWS
        while rows > 1 and rows * length > MAX_TOKENS:
            rows //= 2
        found.setdefault(rows, []).append(length)
    return [(rows, tuple(lengths)) for rows, lengths in found.items()]


def run_rows(
    rows: Rows,
    function: Callable[[Batch], Any],
    *,
    limit: int,
    pad_id: int,
    done: Callable[[int], object] = lambda count: None,
) -> list[Any]:
    """What a function of batches says of each row.

    Args:
        rows: Any number.
        function: A batch to a pytree of arrays with the rows on axis 0.
        limit: Tokens in a row at most.
        pad_id: Token of padding.
        done: Told how many rows were judged, after each batch.

    Returns:
        For each row the pytree without the axis of rows; an axis of positions still holds those of
        padding.
    """
    found: list[Any] = [None] * len(rows)
    pending: list[tuple[np.ndarray, Any]] = []

    def take() -> None:
        index, outputs = pending.pop(0)
        leaves, tree = jax.tree.flatten(jax.device_get(outputs))
        for place, row in enumerate(index):
            found[row] = jax.tree.unflatten(tree, [leaf[place] for leaf in leaves])
        done(len(index))

    shorter = 0
    for max_rows, lengths in shapes(limit):
        among = np.flatnonzero((rows.lengths > shorter) & (rows.lengths <= lengths[-1]))
        shorter = lengths[-1]
        if not len(among):
            continue
        own = Rows([rows.tokens[row] for row in among.tolist()], rows.second_at[among], None)
        size = min(max_rows, 1 << (len(among) - 1).bit_length())
        for index, batch in eval_batches(own, lengths, size, pad_id):
            pending.append((among[index], function(batch)))
            if len(pending) > 1:  # the device works on one while the one before it is read
                take()
    while pending:
        take()
    return found

"""Rows through a model in few shapes, so that calls and files share what was compiled."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from bert_jax.finetune.batches import eval_batches
from bert_jax.parallel.in_flight import in_flight
from bert_jax.tasks.rows import Batch, Rows

LENGTHS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
"""Rows are padded to the next of these, and to no more than the model's positions."""
MAX_TOKENS = 1024
"""Tokens in a batch: more are no faster on a CPU, and the rows of a batch are less alike in length.
A last batch, or a small call, has the next power of 2 of rows."""


def shape_for(longest: int, count: int, limit: int) -> tuple[int, int]:
    """Rows and length of a batch.

    Args:
        longest: Tokens of its longest row.
        count: Rows that are left.
        limit: Tokens in a row at most.
    """
    length = next((length for length in LENGTHS if longest <= length < limit), limit)
    most = max(1, MAX_TOKENS // length)
    return min(1 << (most.bit_length() - 1), 1 << (count - 1).bit_length()), length


def run_rows(rows: Rows, function: Callable[[Batch], Any], *, limit: int, pad_id: int) -> list[Any]:
    """Apply a function of batches to rows, and return its result for each row.

    Args:
        rows: Any number.
        function: A batch to a pytree of arrays with the rows on axis 0.
        limit: Tokens in a row at most.
        pad_id: Token of padding.

    Returns:
        For each row the pytree without the axis of rows; an axis of positions still holds those of
        padding.
    """
    found: list[Any] = [None] * len(rows)

    def batches() -> Iterator[tuple[np.ndarray, Batch]]:
        order = np.argsort(-rows.lengths, kind="stable")
        at = 0
        while at < len(order):
            size, length = shape_for(int(rows.lengths[order[at]]), len(order) - at, limit)
            index = order[at : at + size]
            own = Rows([rows.tokens[row] for row in index.tolist()], rows.second_start[index], None)
            ((_, batch),) = eval_batches(own, (length,), size, pad_id)
            yield index, batch
            at += size

    for (index, _), outputs in in_flight(lambda item: function(item[1]), batches(), ahead=1):
        leaves, tree = jax.tree.flatten(outputs)
        for place, row in enumerate(index):
            found[row] = jax.tree.unflatten(tree, [leaf[place] for leaf in leaves])
    return found

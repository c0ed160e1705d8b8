"""Comparison of an artefact with its source in several batch sizes and lengths."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.exchange.proof import (
    Batch,
    ProofFailedError,
    batch_of,
    differences,
    keep_worst,
    logits_of,
)
from bert_jax.saved.model import SavedModel

_ROWS = 16
"""In a batch: logits of 250,000 tokens take a gigabyte for 16 rows of 64."""


def compare(
    saved: SavedModel,
    rows: Sequence[Sequence[int]],
    run: Callable[[Batch], Mapping[str, np.ndarray]],
    *,
    optional: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """Run all rows in batches of 16, two of them padded further, and the longest by itself.

    Args:
        saved: The source.
        rows: Rows of token ids, special tokens included.
        run: The artefact: a batch to outputs under the names of `logits_of`.
        optional: Outputs that the artefact may lack.

    Returns:
        `differences` by output, and `shapes`, the (B, L) that were run.

    Raises:
        ProofFailedError: The artefact lacks an output or gives one of another shape.
    """
    longest = max(rows, key=len)
    length = len(longest)
    padded = min(length + 5, saved.config.num_positions)
    again = [*rows, *rows]  # the last batch is filled up: every size is compiled once
    size = min(_ROWS, len(rows))
    work: list[tuple[Sequence[Sequence[int]], int]] = [
        (again[start : start + size], length) for start in range(0, len(rows), size)
    ]
    worst: dict[str, float] = {}
    shapes: list[list[int]] = []
    for some, wanted in [*work, (rows[:2], padded), ([longest], length)]:
        batch = batch_of(saved, some, wanted)
        found = run(batch)
        source = logits_of(saved, some, wanted)
        if lacking := source.keys() - found.keys() - optional:
            raise ProofFailedError(f"the artefact has no output {', '.join(sorted(lacking))}")
        keep_worst(worst, differences(source, found, batch.segment_ids))
        if list(batch.tokens.shape) not in shapes:
            shapes.append(list(batch.tokens.shape))
    return {"differences": worst, "shapes": shapes}

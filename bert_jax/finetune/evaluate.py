"""What the members of a sweep say about the rows of a split."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.finetune.batches import eval_batches
from bert_jax.finetune.step import FinetuneStepConfig, place_eval_rows
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.task import Outputs


def member_outputs(
    config: FinetuneStepConfig,
    mesh: Mesh,
    eval_step: Callable[[Any, Any], jax.Array],
    params: Any,
    rows: Rows,
    *,
    buckets: tuple[int, ...],
    batch_size: int,
    pad_id: int,
    done: Callable[[int], object] = lambda rows: None,
) -> list[Outputs]:
    """Logits of every row, for each member.

    Args:
        config: Of the step.
        mesh: Of the sweep.
        eval_step: From `make_eval_step`.
        params: With members on axis 0.
        rows: To be judged; their labels are not read.
        buckets: Lengths to which rows are padded.
        batch_size: Rows at a time.
        pad_id: Token of the padding.
        done: Told how many rows were judged, after each batch.

    Returns:
        For each member logits as `Split.score` takes them.
    """
    unlabelled = Rows(rows.tokens, rows.second_at, None)
    pending: list[tuple[np.ndarray, jax.Array]] = []
    found: list[list[Any]] = []

    def take() -> None:
        index, logits = pending.pop(0)
        # Only the first rows: what follows fills the batch.
        values = np.asarray(jax.device_get(logits))[:, : len(index)]
        if not found:
            found.extend([None] * len(rows) for _ in values)
        for outputs, mine in zip(found, values, strict=True):
            for row, value in zip(index, mine, strict=True):
                outputs[row] = value
        done(len(index))

    for index, batch in eval_batches(unlabelled, buckets, batch_size, pad_id):
        pending.append((index, eval_step(params, place_eval_rows(batch, mesh))))
        if len(pending) > 1:  # the device works on one while the one before it is read
            take()
    while pending:
        take()
    if config.head.kind == "classification":
        return [np.stack(outputs) for outputs in found]
    return [list(outputs) for outputs in found]


def finite(outputs: Outputs) -> bool:
    """Whether all logits are numbers."""
    return all(bool(np.isfinite(row).all()) for row in outputs)

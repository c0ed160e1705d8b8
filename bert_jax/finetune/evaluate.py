"""Evaluation of the trials of a sweep on the rows of a split."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from bert_jax.finetune.batches import eval_batches
from bert_jax.finetune.trials import place_eval_rows
from bert_jax.objectives.objective import Forward
from bert_jax.parallel.in_flight import in_flight
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.task import Outputs


@dataclass(frozen=True)
class Judged:
    """One trial's answers to all rows of a split."""

    outputs: Outputs
    """Logits, as `Split.score` takes them."""
    loss: float | None
    """Mean loss of the labels; None where the rows have none, or the loss is not finite."""

    @property
    def finite(self) -> bool:
        """Whether all logits are numbers."""
        return all(bool(np.isfinite(row).all()) for row in self.outputs)


def judge_rows(
    eval_step: Callable[[Any, Any], Forward],
    mesh: Mesh,
    params: Any,
    rows: Rows,
    *,
    buckets: tuple[int, ...],
    batch_size: int,
    pad_id: int,
    done: Callable[[int], object] = lambda rows: None,
) -> list[Judged]:
    """Return the answers of each trial to every row, by one forward pass.

    Args:
        eval_step: Result of `make_eval_step`.
        mesh: Mesh of the sweep.
        params: Parameters with trials on axis 0.
        rows: Rows of a split, with or without labels.
        buckets: Lengths to which rows are padded.
        batch_size: Rows at a time.
        pad_id: Token of the padding.
        done: Told how many rows were judged, after each batch.
    """
    found: list[list[Any]] = []
    sums: dict[str, np.ndarray] = {}
    batches = eval_batches(rows, buckets, batch_size, pad_id)

    def dispatch(item: tuple[np.ndarray, Any]) -> Forward:
        return eval_step(params, place_eval_rows(item[1], mesh))

    for (index, _), forward in in_flight(dispatch, batches):
        for name, value in forward.sums.items():
            sums[name] = sums.get(name, 0) + np.asarray(value, np.float64)
        # Only the first rows: the others fill the batch.
        values = forward.outputs[:, : len(index)]
        if not found:
            found.extend([None] * len(rows) for _ in values)
        for outputs, mine in zip(found, values, strict=True):
            for row, value in zip(index, mine, strict=True):
                outputs[row] = value
        done(len(index))
    per_row = bool(found) and found[0][0].ndim == 1
    losses = sums["loss"] / np.maximum(sums["count"], 1.0)
    return [
        Judged(
            np.stack(outputs) if per_row else outputs,
            float(loss) if count and np.isfinite(loss) else None,
        )
        for outputs, loss, count in zip(found, losses, sums["count"], strict=True)
    ]

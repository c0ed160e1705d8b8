"""Evaluation on held-out rows: exact sums, fixed masks, no dropout."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.data.pipeline import eval_batches
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError
from bert_jax.objectives.losses import LossSums
from bert_jax.parallel.sharding import batch_sharding, data_shard, place_batch, replicated
from bert_jax.training.config import PretrainConfig
from bert_jax.training.step import Batch, StepConfig, loss_sums, mask_batch, state_shardings

EVAL_SEED = 20181011
"""Every evaluation masks the same tokens of the same rows, whatever the run's seed."""

_IN_FLIGHT = 2


def make_eval_step(config: StepConfig, mesh: Mesh) -> Callable[[Any, Batch], LossSums]:
    """The jitted `(params, batch) -> LossSums` over the global batch.

    A filler row (segment ids 0, nsp_label -1) has no masked position and no label: it adds nothing.
    """

    def eval_step(params: Any, batch: Batch) -> LossSums:
        rows = mask_batch(config, batch, EVAL_SEED)
        return loss_sums(config, mesh, params, rows)

    return jax.jit(
        eval_step,
        in_shardings=(state_shardings(config, mesh).params, batch_sharding(mesh)),
        out_shardings=replicated(mesh),
    )


def evaluate(
    eval_step: Callable[[Any, Batch], LossSums],
    params: Any,
    batches: Iterable[Mapping[str, np.ndarray]],
    mesh: Mesh,
    *,
    alive: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Means over all rows of `batches`, each row counted once.

    Losses are in nats. Sums of batches are added on the host in float64, in their order. A mean of
    nothing (no sentence pairs, no rows) is 0. All processes must bring equally many batches.

    Args:
        eval_step: From `make_eval_step`.
        params: The parameters.
        batches: This process's rows of each batch, as from `eval_batches`.
        mesh: The mesh of `eval_step`.
        alive: Called after each batch.

    Raises:
        UserError: a batch does not divide over the mesh.

    Returns:
        eval/mlm_loss, eval/mlm_accuracy, eval/nsp_loss, eval/nsp_accuracy, eval/nsp_majority (the
        share of the more frequent label among the same rows: the accuracy of always answering it),
        eval/num_masked.
    """
    total = np.zeros(len(LossSums._fields), np.float64)
    in_flight: deque[LossSums] = deque()
    for batch in batches:
        in_flight.append(eval_step(params, place_batch(batch, mesh)))
        if len(in_flight) > _IN_FLIGHT:  # bounds the batches that wait on the device
            total += np.array(jax.device_get(in_flight.popleft()), np.float64)
            alive()
    for sums in in_flight:
        total += np.array(jax.device_get(sums), np.float64)
    added = dict(zip(LossSums._fields, total.tolist(), strict=True))
    masked, pairs = max(added["mlm_count"], 1.0), max(added["nsp_count"], 1.0)
    return {
        "eval/mlm_loss": added["mlm_loss"] / masked,
        "eval/mlm_accuracy": added["mlm_correct"] / masked,
        "eval/nsp_loss": added["nsp_loss"] / pairs,
        "eval/nsp_accuracy": added["nsp_correct"] / pairs,
        "eval/nsp_majority": max(added["nsp_ones"], added["nsp_count"] - added["nsp_ones"]) / pairs,
        "eval/num_masked": added["mlm_count"],
    }


class HeldOut:
    """The held-out rows of a run, for each of its phases."""

    def __init__(
        self, config: PretrainConfig, store: TokenStore, step_config: StepConfig, mesh: Mesh
    ):
        """Plans the rows.

        Raises:
            UserError: The store is too small for a row.
        """
        self._pairs = config.data.objective != "none"
        self._step, self._mesh = make_eval_step(step_config, mesh), mesh
        index, count = data_shard(mesh)
        try:
            self._batches = [
                eval_batches(
                    store,
                    config.data,
                    phase.length,
                    phase.batch_size // config.training.accumulation,  # that of a micro-batch
                    max_rows=config.training.eval_rows,
                    process_index=index,
                    process_count=count,
                )
                for phase in config.phases
            ]
        except UserError as error:
            raise UserError(
                f"the held-out store {store.path} cannot be evaluated: {error}. "
                "Build the corpus with a larger --heldout-rate"
            ) from error

    def evaluate(
        self, params: Any, phase: int, *, alive: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """`evaluate` on the rows of a phase, without sentence pairs where the run has none."""
        values = evaluate(self._step, params, self._batches[phase], self._mesh, alive=alive)
        return {name: v for name, v in values.items() if self._pairs or "nsp" not in name}

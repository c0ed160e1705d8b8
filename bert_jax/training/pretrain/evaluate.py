"""Evaluation on held-out rows: exact sums, fixed corruption, no dropout."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from bert_jax.data.pipeline import EvalBatches
from bert_jax.data.store import TokenStore
from bert_jax.distributed.parallel.in_flight import in_flight
from bert_jax.distributed.parallel.sharding import data_shard, num_batch_shards, place_batch
from bert_jax.errors import UserError
from bert_jax.objectives.objective import Batch, Forward, Objective, evaluated
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.steps.state import StepConfig, made_once
from bert_jax.training.steps.step import make_eval_step

EVAL_SEED = 20181011
"""Seed of every evaluation: the same tokens of the same rows are corrupted, whatever the run."""


def evaluate(
    objective: Objective,
    eval_step: Callable[[Any, Batch], Forward],
    params: Any,
    batches: Iterable[Mapping[str, np.ndarray]],
    mesh: Mesh,
    *,
    alive: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return the means over all rows of `batches`, each row counted once.

    Sums of batches are added on the host in float64, in their order. A mean of nothing (no sentence
    pairs, no rows) is 0. All processes must bring equally many batches.

    Args:
        objective: Objective of `eval_step`.
        eval_step: Result of `make_eval_step`.
        params: Parameters.
        batches: Rows of each batch in this process, from `EvalBatches`.
        mesh: Mesh of `eval_step`.
        alive: Function called after each batch.

    Raises:
        UserError: A batch does not divide over the mesh.
    """
    total: dict[str, float] = defaultdict(float)

    def dispatch(batch: Mapping[str, np.ndarray]) -> Any:
        return eval_step(params, place_batch(batch, mesh)).sums

    for _, sums in in_flight(dispatch, batches):
        for name, value in sums.items():
            total[name] += float(value)
        alive()
    return evaluated(objective, total)


class HeldOut:
    """The held-out rows of a run, for each of its phases."""

    def __init__(
        self,
        config: PretrainConfig,
        store: TokenStore,
        settings: Sequence[StepConfig],
        mesh: Mesh,
        corpora: Mapping[str, TokenStore] | None = None,
    ):
        """Plan the rows.

        Args:
            config: Configuration of the run.
            store: Held-out text.
            settings: Settings of the evaluation step of each phase.
            mesh: Mesh of the run.
            corpora: Held-out text of the corpora of a mixture, by label.

        Raises:
            UserError: A store is too small for a row.
        """
        self._settings, self._mesh = settings, mesh
        self._steps = made_once(settings, lambda each: make_eval_step(each, mesh, EVAL_SEED))
        self._batches = _planned(config, store, mesh, config.training.eval_rows)
        rows = config.training.eval_rows
        share = rows and -(-rows // max(1, len(corpora or {})))
        self._corpora = {
            label: _planned(config, each, mesh, share) for label, each in (corpora or {}).items()
        }

    def evaluate(
        self, params: Any, phase: int, *, alive: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Evaluate on the rows of a phase; each corpus of a mixture gets only the first metric."""
        step, objective = self._steps[phase], self._settings[phase].objective
        params = objective.own(params)

        def found(batches: Sequence[EvalBatches]) -> dict[str, float]:
            return evaluate(objective, step, params, batches[phase], self._mesh, alive=alive)

        first = f"eval/{objective.metrics[0].name}"
        of_corpora = {
            f"{first}/{label}": found(batches)[first] for label, batches in self._corpora.items()
        }
        return found(self._batches) | of_corpora


def _planned(
    config: PretrainConfig, store: TokenStore, mesh: Mesh, max_rows: int | None
) -> list[EvalBatches]:
    """Plan the rows of a store for each phase."""
    (index, count), shards = data_shard(mesh), num_batch_shards(mesh)
    for _ in store.shards:  # what is not there, or away in its bucket, is said before a step
        pass
    try:
        return [
            EvalBatches(
                store,
                config.data,
                phase.length,
                # Rows of a micro-batch; finished phases need not divide.
                -(-phase.batch_size // (shards * config.accumulation_of(number))) * shards,
                max_rows=max_rows,
                process_index=index,
                process_count=count,
            )
            for number, phase in enumerate(config.phases)
        ]
    except UserError as error:
        raise UserError(
            f"the held-out store {store.path} cannot be evaluated: {error}. "
            "Build the corpus with a larger --heldout-rate"
        ) from error

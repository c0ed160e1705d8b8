"""Evaluation on held-out rows, with float64 sums, fixed corruption and no dropout."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.data.pairings import DataConfig
from bert_jax.data.phases import PhaseConfig
from bert_jax.data.pipeline import EvalBatches
from bert_jax.data.store import TokenStore
from bert_jax.distributed.parallel import sharding
from bert_jax.distributed.parallel.in_flight import in_flight
from bert_jax.errors import UserError
from bert_jax.model.heads import MASKED_LM
from bert_jax.objectives.objective import Batch, Forward, Objective, evaluated
from bert_jax.terminal import progress_bar
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.sections import PretrainModelConfig, TrainingConfig
from bert_jax.training.pretrain.settings import step_config, with_architecture
from bert_jax.training.pretrain.start import check_tokenizer
from bert_jax.training.progress import Moment
from bert_jax.training.run_plan import Scorer, Scores
from bert_jax.training.start import initial_params
from bert_jax.training.steps.state import StepConfig, made_once, param_placement
from bert_jax.training.steps.step import make_eval_step

EVAL_SEED = 20181011
"""Seed of every evaluation, so that all runs corrupt the same tokens of the same rows."""
_EVALUATED = (
    ("checkpoint", "keep_best"), ("training", "patience"), ("training", "eval_translations"),
)  # fmt: skip
LENGTH = 128
"""Default number of tokens in a row of held-out text; fewer if the model takes fewer."""


def evaluate(
    objective: Objective,
    eval_step: Callable[[Any, Batch], Forward],
    params: Any,
    batches: Iterable[Mapping[str, np.ndarray]],
    mesh: Mesh,
    *,
    alive: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return the metrics as means over all rows of `batches`, each row counted once.

    The sums of batches are added on the host in order, in float64. A mean over nothing (no sentence
    pairs, no rows) is 0. All processes must pass the same number of batches. `eval_step` comes from
    `make_eval_step`. `alive` is called after each batch. Raise a UserError if a batch does not
    divide evenly over the mesh.
    """
    total: dict[str, float] = defaultdict(float)

    def dispatch(batch: Mapping[str, np.ndarray]) -> Any:
        return eval_step(params, sharding.place_batch(batch, mesh)).sums

    for _, sums in in_flight(dispatch, batches):
        for name, value in sums.items():
            total[name] += float(value)
        alive()
    return evaluated(objective, total)


@dataclass(frozen=True, eq=False)
class HeldOut(Scorer):
    """Scorer that evaluates a run on held-out rows that have the length of the training rows."""

    settings: Sequence[StepConfig]
    """Settings of each phase's evaluation step."""
    mesh: Mesh
    rows: Sequence[EvalBatches]
    """Held-out rows for each phase."""
    corpora: Mapping[str, Sequence[EvalBatches]] = field(default_factory=dict)
    """Held-out rows of the corpora of a mixture: the rows for each phase, by corpus label."""
    every: int = 0
    """Number of steps between two evaluations; if 0, the run is evaluated only at `marks`."""
    marks: Collection[int] = ()
    """Steps at which phases end. The run is evaluated after these steps too."""

    @cached_property
    def _steps(self) -> list[Callable[[Any, Batch], Forward]]:
        return made_once(self.settings, lambda each: make_eval_step(each, self.mesh, EVAL_SEED))

    def after(self, step: int) -> bool:
        """Return true if an evaluation is due after a step."""
        return bool(self.every and step % self.every == 0) or step in self.marks

    def score(self, params: Any, at: Moment, alive: Callable[[str], None]) -> list[Scores]:
        """Evaluate on the held-out rows for the current phase."""
        found = self.evaluate(params, at.stage, alive=partial(alive, "a batch of an evaluation"))
        return [Scores({name.removeprefix("eval/"): value for name, value in found.items()})]

    def evaluate(
        self, params: Any, phase: int, *, alive: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Compute all metrics on a phase's rows, and the first metric on each mixed corpus."""
        step, objective = self._steps[phase], self.settings[phase].objective
        params = objective.own(params)

        def found(batches: Sequence[EvalBatches]) -> dict[str, float]:
            return evaluate(objective, step, params, batches[phase], self.mesh, alive=alive)

        first = f"eval/{objective.metrics[0].name}"
        of_corpora = {
            f"{first}/{label}": found(batches)[first] for label, batches in self.corpora.items()
        }
        return found(self.rows) | of_corpora


def heldout_rows(
    config: PretrainConfig, store: TokenStore, mesh: Mesh, num_corpora: int = 1
) -> list[EvalBatches]:
    """Choose held-out rows of a store for each phase: `training.eval_rows` / `num_corpora` rows.

    Raise a UserError if the store is too small for a single row. Raise a BucketAwayError if the
    bucket is out of reach.
    """
    max_rows = config.training.eval_rows and -(-config.training.eval_rows // num_corpora)
    (index, count), shards = sharding.data_shard(mesh), sharding.num_batch_shards(mesh)
    for _ in store.shards:  # raise for a missing or unreachable file before the first step
        pass
    try:
        return [
            EvalBatches(
                store,
                config.data,
                phase.length,
                # One micro-batch, rounded up: a finished phase's batch may not divide evenly.
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


def check_evaluated(config: PretrainConfig, corpus: Corpus) -> None:
    """Raise a UserError if a field is set that needs held-out text, but the corpus has none."""
    if corpus.heldout is not None:
        return
    for section, name in _EVALUATED:
        if value := getattr(getattr(config, section), name):
            raise UserError(
                f"{section}.{name} is {value}, but the corpus has no held-out text to evaluate; "
                f"build it with --heldout-rate above 0, or set {name} to 0"
            )


def check_measurable(saved: SavedModel, corpus: Corpus, name: str, directory: str) -> None:
    """Check that the loss of a model on held-out text of a corpus can be measured.

    `name` is the directory of the corpus (option --corpus). `directory` is the model's directory.
    Raise a UserError if there is no held-out text or masked-LM head, or the tokenizers differ.
    """
    if corpus.heldout is None:
        raise UserError(
            f"--corpus: {name} has no held-out text; build it with --heldout-rate above 0"
        )
    check_tokenizer(saved, corpus.train.tokenizer_fingerprint, "--corpus", directory)
    if MASKED_LM not in saved.params:
        raise UserError(
            f"--corpus: {saved.name} has no masked-LM head whose loss could be measured; leave "
            "--corpus out"
        )


def heldout_metrics(
    saved: SavedModel, corpus: Corpus, *, length: int | None = None, max_rows: int | None = None
) -> dict[str, float]:
    """Compute masked-LM loss (nats) and accuracy on packed held-out rows, at 15% masking.

    Model and corpus must have passed `check_measurable`. By default, rows have `LENGTH` tokens, or
    fewer if the model takes fewer. Raise a UserError if `length` is below 8 or above the positions.
    """
    assert corpus.heldout is not None
    limit = saved.config.num_positions
    if length is not None and not 8 <= length <= limit:
        raise UserError(f"--length is {length}; {saved.name} takes rows of 8 to {limit} tokens")
    mesh = sharding.make_mesh(sharding.MeshConfig())
    length = length or min(LENGTH, saved.max_length)
    config = PretrainConfig(
        model=PretrainModelConfig(num_positions=limit),
        data=DataConfig(pairing="none"),
        training=TrainingConfig(phases=(PhaseConfig(length=length),)),
    )
    config = with_architecture(config, saved.config).with_vocabulary(corpus.train.vocab_size)
    settings = step_config(config, corpus, evaluates=True)
    objective = settings.objective
    fresh = jax.jit(objective.init, out_shardings=param_placement(settings, mesh))
    params = initial_params(saved, fresh(jax.random.key(0)), objective.axes())
    size = -(-32 // mesh.size) * mesh.size
    rows = EvalBatches(corpus.heldout, config.data, length, size, max_rows=max_rows)
    batches = progress_bar(rows, of="held-out text", unit="batches")
    return evaluate(objective, make_eval_step(settings, mesh, EVAL_SEED), params, batches, mesh)

"""Sections of a pretraining configuration. `config.py` checks that the sections fit together."""

import bisect
import itertools
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, ClassVar, Literal

from bert_jax.config.bounds import AtLeast, AtMost, Bounded, Count, Natural, NonNegative
from bert_jax.data.phases import PhaseConfig
from bert_jax.distributed.checkpoint.retention import Retention
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.training.steps.optim import MAX_STEPS


@dataclass(frozen=True)
class PretrainModelConfig(ModelConfig):
    """Configuration of an encoder whose vocabulary size may come from the corpus."""

    vocab_size: Natural = 0
    """Number of tokens in the vocabulary. 0 means the size of the corpus's tokenizer; any other
    value must be equal to this size."""


@dataclass(frozen=True)
class ProbeConfig(Bounded, section="training.probes"):
    """A task on which a copy of the encoder is fine-tuned and scored at regular intervals."""

    recipe: str = ""
    """Recipe for `bert-jax finetune`: a file, or a run's work directory. The probe ignores `init`
    and a directory's `sweep.learning_rates`, and has the recipe's name without the extension."""
    every_steps: Count = 1000
    """Number of steps between two scores. The model is also scored after the last step."""
    num_steps: Count = 100
    """Number of fine-tuning steps before each score."""


@dataclass(frozen=True)
class TrainingConfig(Bounded, section="training"):
    """Length of training, shapes of batches, and intervals of logging and evaluation."""

    ELSEWHERE: ClassVar = {
        "freeze": "only `bert-jax finetune` freezes parts; pretraining trains all of them",
    }
    num_steps: Annotated[int, AtLeast(1), AtMost(MAX_STEPS)] = 100_000
    """Number of optimizer steps of the whole run."""
    phases: tuple[PhaseConfig, ...] = (PhaseConfig(),)
    accumulation: Count = 1
    """Number of micro-batches per step. More micro-batches save memory and cost time; the results
    differ only by rounding."""
    batch_unit: Count = 1
    """Common divisor of the batch sizes in a batch warm-up. If these batches cannot be divided
    evenly over the mesh, the run raises the divisor at its first start and then keeps it."""
    gather: Literal["layer", "step"] = "layer"
    """Schedule for gathering the parameters that mesh.fsdp shards. layer: for each layer of each
    micro-batch. step: once per step; gradients are then reduced at the end of the step. `step`
    needs memory for whole matrices in the compute type and whole gradients in float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of gradient sums over mesh.data and, with gather=step, over mesh.fsdp. `bfloat16` halves
    the bytes, with 8 significant bits."""
    log_every_steps: Count = 100
    """Number of steps between two rows of metrics, which are means over these steps."""
    eval_every_steps: Natural = 1000
    """Number of steps between evaluations; 0: none. Each phase also ends with an evaluation."""
    eval_rows: Count | None = 4096
    """Number of held-out rows per evaluation, the same rows each time; None means all rows."""
    eval_translations: Natural = 0
    """Number of held-out pairs that each evaluation translates (greedy search), for eval/bleu and
    eval/chrf. 0 means none. Only a run that learns to translate can set this field."""
    patience: Natural = 0
    """Number of evaluations in a row without a better checkpoint.best_metric after which the run
    ends. Evaluations count anew in each phase. 0 means that the run never ends early."""
    probes: tuple[ProbeConfig, ...] = ()
    """Tasks that score the encoder, such as {'recipe': 'topics.py', 'every_steps': 1000}."""
    stall_seconds: NonNegative = 1800.0
    """Time limit, in seconds, for each step (with compilation), evaluation batch, restore and save.
    After this time, the process writes all stacks and ends with exit code 6. 0 means no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.phases:
            raise UserError("training.phases is empty; name at least one phase")
        for number, phase in enumerate(self.phases):
            phase.check(number)
        self._check_phase_steps()
        names = [PurePath(probe.recipe).stem for probe in self.probes]
        for name in names:
            if not name or names.count(name) > 1:
                raise UserError(
                    f"training.probes: a recipe is named {name!r}; give each probe a recipe, and "
                    "each recipe a different name"
                )
        for number, (phase, steps) in enumerate(zip(self.phases, self.phase_steps, strict=True)):
            if steps < 1:
                raise UserError(
                    f"training.phases[{number}]: a share of {phase.share:g} of "
                    f"{self.num_steps} steps rounds to 0; raise training.num_steps or the share"
                )

    def _check_phase_steps(self) -> None:
        given = [phase.steps for phase in self.phases if phase.steps is not None]
        if 0 < len(given) < len(self.phases):
            number = next(n for n, phase in enumerate(self.phases) if phase.steps is None)
            raise UserError(
                f"training.phases[{number}].steps is not set, but other phases have steps; give "
                "steps in all phases or in none"
            )
        if given and sum(given) != self.num_steps:
            raise UserError(
                f"training.phases: the steps sum to {sum(given)}; training.num_steps must be "
                f"{sum(given)}, but is {self.num_steps}"
            )
        total = sum(phase.share for phase in self.phases)
        if not given and abs(total - 1) > 1e-6:
            raise UserError(f"training.phases: the shares sum to {total:g}; they must sum to 1")

    @property
    def phase_steps(self) -> tuple[int, ...]:
        """Number of steps in each phase; the sum is `num_steps`."""
        if given := tuple(phase.steps for phase in self.phases if phase.steps is not None):
            return given
        ends, covered = [0], 0.0
        for phase in self.phases:
            covered += phase.share
            ends.append(round(covered * self.num_steps))
        ends[-1] = self.num_steps
        return tuple(end - start for start, end in itertools.pairwise(ends))

    @property
    def phase_starts(self) -> tuple[int, ...]:
        """Index of the first batch of each phase after the first phase."""
        return tuple(itertools.accumulate(self.phase_steps))[:-1]

    def phase_of(self, step: int) -> int:
        """Return the index of the phase to which batch `step` belongs. Both count from 0."""
        return bisect.bisect_right(self.phase_starts, step)


@dataclass(frozen=True)
class CheckpointConfig(Retention):
    """Schedule of checkpoints, and rules for keeping them."""

    save_every_steps: Count = 1000
    """Number of steps between two saves. A run also saves its state when it ends or is stopped."""
    max_failed_saves: Count = 3
    """Number of consecutive failed saves after which the run stops with exit code 3."""

"""Sections of the configuration of a pretraining run, which stand below the whole."""

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
    """An encoder whose vocabulary size may be left to the corpus."""

    vocab_size: Natural = 0
    """Number of tokens; 0: the size of the corpus's tokenizer, which other numbers must equal."""


@dataclass(frozen=True)
class ProbeConfig(Bounded, section="training.probes"):
    """A small task that is fine-tuned from the encoder now and then, and scored on its dev data."""

    recipe: str = ""
    """Recipe of `bert-jax finetune` (a file, or the work directory of a run); its `init` is not
    read. The name without folder and ending names the probe."""
    every_steps: Count = 1000
    """Number of steps from one score to the next; the last step is scored, too."""
    num_steps: Count = 100
    """Steps of each fine-tuning."""


@dataclass(frozen=True)
class TrainingConfig(Bounded, section="training"):
    """Length of training, shapes of batches, and intervals of logging and evaluation."""

    ELSEWHERE: ClassVar = {
        "patience": "early stopping is of the trials of `bert-jax finetune`; here "
        "guard.on_divergence=stop ends a run whose loss stays up",
        "freeze": "parts are frozen by `bert-jax finetune`; pretraining trains all of them",
    }
    num_steps: Annotated[int, AtLeast(1), AtMost(MAX_STEPS)] = 100_000
    """Number of optimizer steps of the whole run."""
    phases: tuple[PhaseConfig, ...] = (PhaseConfig(),)
    accumulation: Count = 1
    """Micro-batches per step, which save memory and cost time; results agree within rounding."""
    batch_unit: Count = 1
    """Divisor of the rows of each step in a batch warm-up. Where these rows do not divide over the
    mesh, the first start raises the divisor, and the run keeps it."""
    gather: Literal["layer", "step"] = "layer"
    """Time of gathering the parameters that mesh.fsdp splits: for each layer of each micro-batch,
    or once a step, with whole gradients reduced at the end of the step. `step` needs memory for
    whole matrices in the compute type and whole gradients in float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the gradients that are summed over devices at the end of a step. `bfloat16` sends
    half the bytes; the sums then have 8 bits."""
    log_every_steps: Count = 100
    """Number of steps between two rows of metrics, which are means over these steps."""
    eval_every_steps: Natural = 1000
    """Number of steps between two evaluations; 0: evaluate only at the end."""
    eval_rows: Count | None = 4096
    """Number of held-out rows per evaluation, the same rows each time; None: all."""
    probes: tuple[ProbeConfig, ...] = ()
    """Tasks that score the encoder: {'recipe': 'topics.py', 'every_steps': 1000}."""
    stall_seconds: NonNegative = 1800.0
    """Longest time without a completed step, evaluation batch, restore or save; then the process
    writes its threads' stacks and ends with exit code 6. Compiling is part of a step. 0: no
    limit."""

    def __post_init__(self) -> None:
        """Refuse phases that do not cover the run."""
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
                    "recipes of different names"
                )
        for number, (phase, steps) in enumerate(zip(self.phases, self.phase_steps, strict=True)):
            if steps < 1:
                raise UserError(
                    f"training.phases[{number}]: a share of {phase.share:g} of "
                    f"{self.num_steps} steps is no step; raise training.num_steps or the share"
                )

    def _check_phase_steps(self) -> None:
        given = [phase.steps for phase in self.phases if phase.steps is not None]
        if 0 < len(given) < len(self.phases):
            number = next(n for n, phase in enumerate(self.phases) if phase.steps is None)
            raise UserError(
                f"training.phases[{number}].steps is not set, and other phases have steps; give "
                "steps in all phases or in none"
            )
        if given and sum(given) != self.num_steps:
            raise UserError(
                f"training.phases: the steps sum to {sum(given)}; training.num_steps must be "
                f"{sum(given)}, and is {self.num_steps}"
            )
        total = sum(phase.share for phase in self.phases)
        if not given and abs(total - 1) > 1e-6:
            raise UserError(f"training.phases: the shares sum to {total:g}; they must sum to 1")

    @property
    def phase_steps(self) -> tuple[int, ...]:
        """Steps of each phase; they sum to `num_steps`."""
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
        """Numbers of the first batches of the phases after the first."""
        return tuple(itertools.accumulate(self.phase_steps))[:-1]

    def phase_of(self, step: int) -> int:
        """Return the number of the phase that holds a batch."""
        return bisect.bisect_right(self.phase_starts, step)


@dataclass(frozen=True)
class CheckpointConfig(Retention):
    """Schedule of checkpoints, and rules for keeping them."""

    save_every_steps: Count = 1000
    """Number of steps between two saves; the step at which a run ends or stops is saved, too."""
    max_failed_saves: Count = 3
    """Number of failed saves in a row that stop the run, with exit code 3."""

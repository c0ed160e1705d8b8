"""Phases of a run: as a configuration gives them, and as the pipeline takes them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

from bert_jax.config.bounds import (
    AtLeast,
    Count,
    Fraction,
    Given,
    Natural,
    NonNegative,
    Part,
    Positive,
)
from bert_jax.errors import UserError

THETAS = ("rope_theta", "local_rope_theta")
"""Fields of a phase that replace fields of the model."""


@dataclass(frozen=True)
class MixtureConfig:
    """A corpus of a mixture."""

    corpus: Annotated[str, Given("the directory of a corpus")] = ""
    """Directory of the corpus, which must have the run's tokenizer."""
    weight: Positive = 1.0
    """Share of the rows, relative to the other corpora; see also `mixture_temperature`."""


@dataclass(frozen=True)
class PhaseConfig:
    """A stretch of training with rows of one length; BERT spends 90% of its steps at 128.

    Fields that are not set take the run's values.
    """

    length: Annotated[int, AtLeast(8)] = 128
    """Tokens per row, including special tokens."""
    batch_size: Count = 256
    """Rows per step, over all devices and micro-batches."""
    share: Part = 1.0
    """Share of the run's steps; the shares of all phases sum to 1."""
    steps: Count | None = None
    """Number of steps, instead of `share`. Set it in all phases, so that the sum is
    training.num_steps, or in none."""
    accumulation: Count | None = None
    """Micro-batches per step; by default `training.accumulation`."""
    masking_rate: Part | None = None
    """Share of a row's tokens that are predicted; by default `masking.rate`."""
    learning_rate: Positive | None = None
    """Peak of the learning rate; by default `optimizer.learning_rate`."""
    decay: Literal["", "constant", "linear", "cosine", "one_minus_sqrt"] = ""
    """Shape of the learning rate from the first to the last step of the phase; by default the run's
    schedule continues. The warm-up is always the run's."""
    end_rate: NonNegative | None = None
    """Learning rate at the end of `decay`; by default `optimizer.end_share` x the phase's peak."""
    rope_theta: Positive | None = None
    """Base of the rotations' wavelengths in global layers; by default `model.rope_theta`."""
    local_rope_theta: Positive | None = None
    """Base of the rotations' wavelengths in local layers; by default `model.local_rope_theta`."""
    corpus: str = ""
    """Directory of the training text, with the run's tokenizer; by default `data.mixture` or
    `data.corpus`. All phases use the held-out text of `data.corpus`."""
    mixture: tuple[MixtureConfig, ...] = ()
    """Corpora of the phase and their weights; by default `data.mixture`."""
    mixture_temperature: Fraction | None = None
    """Exponent of a corpus's tokens in its share; by default `data.mixture_temperature`."""
    batch_warmup_steps: Natural = 0
    """Number of steps with fewer rows at the start: a third of them has an eighth of `batch_size`,
    a third a quarter, a third half. If it exceeds the phase's steps, it becomes a tenth of them."""

    def check(self, number: int) -> None:
        """Raise a UserError if fields contradict each other; `number` counts phases from 0."""
        if self.mixture and self.corpus:
            raise UserError(
                f"training.phases[{number}] has a corpus, {self.corpus}, and a mixture; give one"
            )
        if self.steps is not None and self.share != 1:
            raise UserError(
                f"training.phases[{number}] has {self.steps} steps and a share, {self.share:g}; "
                "give one"
            )
        if self.end_rate is not None and self.decay in ("", "constant"):
            raise UserError(
                f"training.phases[{number}].end_rate is {self.end_rate:g}, but the phase's decay "
                f"is {self.decay!r}, which has no end; expected linear, cosine or one_minus_sqrt"
            )


def scaled(warmup: int, num_steps: int) -> int:
    """Return the steps of a warm-up: `warmup`, or a tenth of `num_steps` if `warmup` is larger."""
    return warmup if warmup <= num_steps else -(-num_steps // 10)


def scaling(name: str, warmup: int, num_steps: int) -> list[str]:
    """Report in a line that the warm-up of field `name` is scaled; return [] if it is not."""
    kept = scaled(warmup, num_steps)
    said = f"{name} is {warmup:,}, longer than the {num_steps:,} steps: scaled to {kept:,}"
    return [] if kept == warmup else [f"warm-up  {said}"]


def described(phase: Mapping[str, Any]) -> str:
    """Describe the fields that a phase sets besides its shape; "" if it sets none."""
    names = (
        "masking_rate", "learning_rate", "decay", "end_rate", *THETAS, "batch_warmup_steps",
        "accumulation",
    )  # fmt: skip
    return ", ".join(
        f"{name.replace('_', ' ')} {value if isinstance(value, str) else f'{value:g}'}"
        for name in names
        if (value := phase.get(name, getattr(PhaseConfig, name))) != getattr(PhaseConfig, name)
    )


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one shape."""

    length: int
    """L, including special tokens."""
    batch_size: int
    """B, rows of a step over all processes."""
    num_steps: int
    batch_warmup_steps: int = 0
    """Steps with fewer rows, at the beginning (see `PhaseConfig`)."""
    unit: int = 1
    """Divisor of the number of rows in each step of `batch_warmup_steps`."""

    @cached_property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """Stages from the start of the phase to its end, each (number of steps, rows of a step)."""
        warmup, parts = self.batch_warmup_steps, (8, 4, 2)
        ends = [round(warmup * n / len(parts)) for n in range(len(parts) + 1)]
        growing = [
            (end - begin, max(1, self.batch_size // part // self.unit) * self.unit)
            for (begin, end), part in zip(itertools.pairwise(ends), parts, strict=True)
        ]
        stages = (*growing, (self.num_steps - warmup, self.batch_size))
        return tuple(stage for stage in stages if stage[0])

    @property
    def num_rows(self) -> int:
        """Number of rows of all steps."""
        return sum(steps * rows for steps, rows in self.stages)

    def rows_of(self, step: int) -> tuple[int, int]:
        """Return a step's first row, counted from the start of the phase, and its row count."""
        first = 0
        for steps, rows in self.stages:
            if step < steps:
                return first + step * rows, rows
            first, step = first + steps * rows, step - steps
        raise IndexError(f"the phase has {self.num_steps} steps")


def stages_from(phases: Sequence[Phase], step: int) -> Iterator[tuple[int, int]]:
    """Yield (phase, rows of a step) for each stage that ends after the first `step` steps."""
    end = 0
    for number, phase in enumerate(phases):
        for steps, rows in phase.stages:
            end += steps
            if end > step:
                yield number, rows


class Share(NamedTuple):
    """Part of each batch that one process reads."""

    process_index: int
    process_count: int

    def of(self, batch_size: int) -> int:
        """Return the number of a process's rows in a batch; a UserError if it is not whole."""
        if batch_size % self.process_count:
            raise UserError(
                f"a batch of {batch_size} rows does not divide among {self.process_count} "
                f"processes; make the batch size a multiple of {self.process_count}"
            )
        return batch_size // self.process_count

    def rows(self, phase: Phase, step: int) -> tuple[int, int]:
        """Return a process's first row of a step, counted in the phase, and its number of rows."""
        start, batch_size = phase.rows_of(step)
        count = self.of(batch_size)
        return start + self.process_index * count, count

"""Phases of a run: their configuration, and the form that the pipeline uses."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

from bert_jax.config import bounds
from bert_jax.errors import UserError

THETAS = ("rope_theta", "local_rope_theta")
"""Fields of a phase that replace fields of the model."""


@dataclass(frozen=True)
class MixtureConfig:
    """One corpus of a mixture."""

    corpus: Annotated[str, bounds.Given("the directory of a corpus")] = ""
    """Directory of the corpus, which must have the tokenizer of the run."""
    weight: bounds.Positive = 1.0
    """Share of the rows, relative to the other corpora. See also `mixture_temperature`."""


@dataclass(frozen=True)
class PhaseConfig:
    """A part of training with rows of one length. BERT uses length 128 for 90% of its steps.

    Fields that are not set take the values of the run's other sections.
    """

    length: Annotated[int, bounds.AtLeast(8)] = 128
    """Tokens per row, including special tokens."""
    batch_size: bounds.Count = 256
    """Rows per step, over all devices and micro-batches."""
    share: bounds.Part = 1.0
    """Share of the steps of the run. The shares of all phases must add up to 1."""
    steps: bounds.Count | None = None
    """Number of steps, instead of `share`; set in all phases or in none. The sum must be
    training.num_steps."""
    accumulation: bounds.Count | None = None
    """Micro-batches per step, by default `training.accumulation`."""
    masking_rate: bounds.Part | None = None
    """Share of tokens to predict, by default `masking.rate`; without effect in translation."""
    learning_rate: bounds.Positive | None = None
    """Peak of the learning rate, by default `optimizer.learning_rate`."""
    decay: Literal["", "constant", "linear", "cosine", "one_minus_sqrt"] = ""
    """Shape of the learning rate from the first to the last step of the phase. By default, the
    schedule of the run continues. The warm-up of the run applies in any case."""
    end_rate: bounds.NonNegative | None = None
    """Learning rate at the end of `decay`, by default `optimizer.end_share` x the phase's peak."""
    rope_theta: bounds.Positive | None = None
    """Base of the wavelengths of rotations in global layers, by default `model.rope_theta`."""
    local_rope_theta: bounds.Positive | None = None
    """Base of the wavelengths of rotations in local layers, by default `model.local_rope_theta`."""
    corpus: str = ""
    """Directory of the training text, with the tokenizer of the run. By default, `data.mixture` or
    `data.corpus`. All phases use the held-out text of `data.corpus`."""
    mixture: tuple[MixtureConfig, ...] = ()
    """Corpora of the phase and their weights, by default `data.mixture`."""
    mixture_temperature: bounds.Fraction | None = None
    """Exponent of the sizes of corpora: shares are proportional to weight x size^exponent.
    By default, `data.mixture_temperature`."""
    batch_warmup_steps: bounds.Natural = 0
    """Number of steps with fewer rows at the start of the phase: 1/8, 1/4 and 1/2 of `batch_size`,
    in three equal parts. If the phase has fewer steps, a tenth of its steps is used."""

    def check(self, number: int) -> None:
        """Raise a UserError if fields contradict each other. `number` counts phases from 0."""
        if self.mixture and self.corpus:
            raise UserError(
                f"training.phases[{number}] has a corpus, {self.corpus}, and a mixture; "
                "set only one"
            )
        if self.steps is not None and self.share != 1:
            raise UserError(
                f"training.phases[{number}] has {self.steps} steps and a share, {self.share:g}; "
                "set only one"
            )
        if self.end_rate is not None and self.decay in ("", "constant"):
            raise UserError(
                f"training.phases[{number}].end_rate is {self.end_rate:g}, but the phase's decay "
                f"is {self.decay!r}, which has no end; set it to linear, cosine or one_minus_sqrt"
            )


def scaled(warmup: int, num_steps: int) -> int:
    """Return `warmup`, or a tenth of `num_steps` if `warmup` is larger than `num_steps`."""
    return warmup if warmup <= num_steps else -(-num_steps // 10)


def scaling(name: str, warmup: int, num_steps: int) -> list[str]:
    """Return a message that the warm-up of field `name` is scaled, or [] if it is not."""
    kept = scaled(warmup, num_steps)
    said = f"{name} is {warmup:,}, longer than the {num_steps:,} steps: scaled to {kept:,}"
    return [] if kept == warmup else [f"warm-up  {said}"]


def described(phase: Mapping[str, Any]) -> str:
    """Describe the fields a phase sets except length, batch size, steps and corpora; "" if none."""
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
    """A part of training with one shape of batches."""

    length: int
    """L, tokens per row, including special tokens."""
    batch_size: int
    """B, rows per step in all processes together."""
    num_steps: int
    batch_warmup_steps: int = 0
    """Number of steps with fewer rows, at the beginning (see `PhaseConfig`)."""
    unit: int = 1
    """Number that divides the rows per step during `batch_warmup_steps`."""

    @cached_property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """Stages of the phase in order. Each is (number of steps, rows per step)."""
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
        """Number of rows in all steps."""
        return sum(steps * rows for steps, rows in self.stages)

    def steps_for(self, num_rows: float) -> int:
        """Return the number of steps that read about `num_rows` rows from the phase's beginning."""
        done = 0.0
        for steps, rows in self.stages:
            part = min(steps, num_rows / rows)
            done, num_rows = done + part, num_rows - part * rows
        return round(done)

    def rows_of(self, step: int) -> tuple[int, int]:
        """Return the index in the phase of a step's first row, and the step's number of rows."""
        first = 0
        for steps, rows in self.stages:
            if step < steps:
                return first + step * rows, rows
            first, step = first + steps * rows, step - steps
        raise IndexError(f"the step is beyond the end of the phase ({self.num_steps} steps)")


def stages_from(phases: Sequence[Phase], step: int) -> Iterator[tuple[int, int]]:
    """Yield (index of the phase, rows per step) for each stage that is not over by step `step`."""
    end = 0
    for number, phase in enumerate(phases):
        for steps, rows in phase.stages:
            end += steps
            if end > step:
                yield number, rows


class Share(NamedTuple):
    """The part of each batch that a process reads."""

    process_index: int
    process_count: int

    def of(self, batch_size: int) -> int:
        """Return the number of rows per process; raise a UserError if it would not be whole."""
        if batch_size % self.process_count:
            raise UserError(
                f"a batch of {batch_size} rows does not divide evenly among {self.process_count} "
                f"processes; make the batch size a multiple of {self.process_count}"
            )
        return batch_size // self.process_count

    def rows(self, phase: Phase, step: int) -> tuple[int, int]:
        """Return a process's rows of a step: (index of the first in the phase, number of rows)."""
        start, batch_size = phase.rows_of(step)
        count = self.of(batch_size)
        return start + self.process_index * count, count

"""A best-first search for the fastest settings that fit into memory, with few compilations.

A compilation takes minutes, so candidates are ordered by an estimate (`planner.on_paper`). The most
promising candidate is compiled with fewer layers, and the result corrects the estimates. This
repeats until the most promising candidate is already compiled; it is then compiled with all layers.
The module does not use jax: callers pass the functions that estimate and compile.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from bert_jax.config.command_line import overridden
from bert_jax.distributed.parallel.sharding import divisors
from bert_jax.training.pretrain.config import PretrainConfig

Remat = Literal["none", "dots", "full"]
REMATS: tuple[Remat, ...] = ("none", "dots", "full")
MAX_TENSOR = 16
"""Largest tensor parallelism. With more, devices mostly wait for the four all-reduces per layer."""
MOST_PARTS, ENOUGH = 16, 0.97
"""Largest number of micro-batches in a step, and fraction of the throughput at this number that is
enough: `fastest_pace` chooses the smallest power of two with at least this throughput."""
MAX_REDUCED, MAX_WHOLE = 6, 3
"""Limits on compilations in a search: of models with fewer layers, and of the full model."""
SHRINK_BELOW = 0.97
"""Share of the predicted MFU below which a smaller batch is tried. Near the memory limit, the
compiler recomputes values to save memory, which takes longer than predicted."""


@dataclass(frozen=True, order=True)
class Settings:
    """Settings that the search may change. Only `rows` changes what a step computes."""

    fsdp: int
    tensor: int
    accumulation: int
    remat: Remat
    scan_unroll: int
    rows: int
    """Number of rows in a step, on all devices and in all micro-batches."""

    def apply(self, config: PretrainConfig, phase: int) -> PretrainConfig:
        """Return the configuration with these settings. Other phases keep their batch."""
        return overridden(config, self.overrides(config, phase))

    def overrides(self, config: PretrainConfig, phase: int) -> list[str]:
        """Return command-line arguments for the fields in which `config` has other settings."""
        mesh, model, shape = config.mesh, config.model, config.training.phases[phase]
        wanted = {
            "mesh.data": (mesh.data, -1),
            "mesh.fsdp": (mesh.fsdp, self.fsdp),
            "mesh.tensor": (mesh.tensor, self.tensor),
            "model.remat": (model.remat, self.remat),
            "model.scan_unroll": (model.scan_unroll, self.scan_unroll),
            accumulation_field(config, phase): (config.accumulation_of(phase), self.accumulation),
            f"training.phases[{phase}].batch_size": (shape.batch_size, self.rows),
        }
        return [f"--config.{name}={new}" for name, (old, new) in wanted.items() if new != old]


def accumulation_field(config: PretrainConfig, phase: int) -> str:
    """Return the name of the field that sets the number of micro-batches in a phase."""
    phases = config.training.phases
    is_own = len(phases) > 1 or phases[phase].accumulation is not None
    return f"training.phases[{phase}].accumulation" if is_own else "training.accumulation"


def settings_of(config: PretrainConfig, phase: int, num_devices: int) -> Settings:
    """Return the settings of a configuration, with its mesh resolved for `num_devices` devices."""
    mesh = config.mesh
    data = mesh.data if mesh.data > 0 else 1
    fsdp = mesh.fsdp if mesh.fsdp > 0 else num_devices // (data * mesh.tensor)
    tensor = mesh.tensor if mesh.tensor > 0 else num_devices // (data * fsdp)
    return Settings(
        fsdp=fsdp, tensor=tensor, accumulation=config.accumulation_of(phase),
        remat=config.model.remat, scan_unroll=config.model.scan_unroll,
        rows=config.training.phases[phase].batch_size,
    )  # fmt: skip


@dataclass(frozen=True)
class Guess:
    """Cost of settings per device: estimated, or compiled with fewer or with all layers."""

    peak: int
    """Peak of memory, in bytes."""
    seconds: float
    """Seconds of a step."""


Measure = Callable[[Settings], Guess]


def candidates(
    config: PretrainConfig, phase: int, num_devices: int, *, num_slices: int = 1,
    possible: Callable[[Settings], bool] = lambda settings: True,
) -> list[Settings]:  # fmt: skip
    """List all settings that keep the configured rows per step and satisfy `possible`."""
    model, phases = config.model, config.training.phases
    rows = phases[phase].batch_size
    others = [p.batch_size // config.accumulation_of(n) for n, p in enumerate(phases) if n != phase]
    unroll = model.scan_unroll
    if 1 < unroll < model.num_layers or model.num_layers > 24:
        unroll = 1  # in a deep model, a loop over single layers saves compile time and memory
    found = []
    for tensor in divisors(num_devices):
        kv_heads = model.num_kv_heads or model.num_heads
        sizes = (model.num_heads, kv_heads, model.mlp_dim, model.padded_vocab_size)
        if tensor > MAX_TENSOR or any(size % tensor for size in sizes):
            continue
        for fsdp in divisors(num_devices // tensor):
            data = num_devices // tensor // fsdp
            # The axis `data` spans the slices; all phases have the same mesh.
            if model.hidden_dim % fsdp or data % num_slices:
                continue
            if any(batch % (data * fsdp) for batch in (rows, *others)):
                continue
            first = Settings(fsdp, tensor, 1, "none", unroll, rows)
            if not possible(first):
                continue
            for accumulation in divisors(rows // (data * fsdp)):
                parts = dataclasses.replace(first, accumulation=accumulation)
                found += [dataclasses.replace(parts, remat=remat) for remat in REMATS]
    return found


@dataclass(frozen=True)
class Found:
    """Result of the search."""

    settings: Settings
    tried: tuple[tuple[Settings, Guess, str], ...]
    """Compilations: (settings, cost, "reduced depth" or "whole"); the last is of `settings`."""


def fastest_that_fits(
    choices: Iterable[Settings], paper: Measure, reduced: Measure, whole: Measure, usable: int,
) -> Found | None:  # fmt: skip
    """Return the fastest choice whose peak is at most `usable` bytes, or None if none is found.

    `paper` estimates without a compilation, `reduced` compiles with fewer layers, and `whole`
    compiles all layers. `whole` also returns the peak of a step that does not fit.
    """
    # A measurement corrects the estimates of all candidates of its kind. A kind without measurement
    # takes the most favourable known correction of time, but the least favourable of memory.
    memory_error: dict[tuple[str, int], float] = {}
    time_error: dict[tuple[str, int], float] = {}
    open_choices = {settings: paper(settings) for settings in choices}
    measured: dict[Settings, Guess] = {}
    tried: list[tuple[Settings, Guess, str]] = []

    def corrected(settings: Settings) -> Guess:
        if settings in measured:
            return measured[settings]
        guess = open_choices[settings]
        return Guess(
            int(guess.peak * memory_error.get(_kind(settings), max([1.0, *memory_error.values()]))),
            guess.seconds * time_error.get(_kind(settings), min(time_error.values(), default=1.0)),
        )

    while open_choices:
        fitting = [s for s in open_choices if corrected(s).peak <= usable]
        if fitting:
            best = min(fitting, key=lambda s: (corrected(s).seconds, s))
        else:  # nothing fits by estimate, so the smallest has the best chance
            best = min(open_choices, key=lambda s: (corrected(s).peak, s))
        if best not in measured:
            if len(measured) == MAX_REDUCED:
                break
            measured[best] = reduced(best)
            tried.append((best, measured[best], "reduced depth"))
            on_paper = open_choices[best]
            memory_error[_kind(best)] = measured[best].peak / max(on_paper.peak, 1)
            if measured[best].seconds:
                time_error[_kind(best)] = measured[best].seconds / on_paper.seconds
            if measured[best].peak > usable:
                del open_choices[best]
            continue
        if len(tried) - len(measured) == MAX_WHOLE:
            break
        answer = whole(best)
        tried.append((best, answer, "whole"))
        if answer.peak <= usable:
            return Found(best, tuple(tried))
        memory_error[_kind(best)] = answer.peak / max(open_choices[best].peak, 1)
        del open_choices[best]
    return None


@dataclass(frozen=True)
class Fit:
    """Result of `largest_batch`: the largest and the fastest batch, and predicted times.

    A batch shard is the part of a batch that one device, or one tensor-parallel group, computes.
    """

    largest: int
    """Rows per batch shard of the largest batch that was compiled and fits; 0 if none fits."""
    best: int
    """Rows per batch shard with the highest MFU among the compiled batches."""
    predicted: dict[int, float]
    """Predicted seconds of a step by rows per shard, extrapolated linearly from two batches."""


def largest_batch(
    reduced: Callable[[int], Guess], whole: Callable[[int], Guess], usable: int, first_guess: int,
) -> Fit:  # fmt: skip
    """Find the largest number of rows per batch shard that fits, and the fastest number.

    Memory and time are assumed to be linear in the rows per shard. `reduced` measures both for two
    batches smaller than `first_guess` rows, and `whole` checks the result.
    """
    # Stay well below the limit, where the compiler is slow, and memory and time are not linear.
    high = round_rows(max(first_guess * 5 // 8, 2))
    low = round_rows(max(high // 2, 1))
    at_low, at_high = reduced(low), reduced(high)
    per_row = max((at_high.peak - at_low.peak) / (high - low), 1.0)
    seconds_per_row = (at_high.seconds - at_low.seconds) / (high - low)

    def seconds(rows: int) -> float:
        return at_low.seconds + seconds_per_row * (rows - low)

    rows = round_rows(math.floor(low + (usable - at_low.peak) / per_row))
    compiled: dict[int, Guess] = {}
    while rows >= 1 and len(compiled) < MAX_WHOLE and rows not in compiled:
        answer = compiled[rows] = whole(rows)
        if answer.peak > usable:
            over = (answer.peak - usable) / per_row
            rows = round_rows(min(rows - 1, math.floor(rows - over)))
        elif answer.seconds * SHRINK_BELOW > seconds(rows) and rows > 8:
            rows = round_rows(rows * 7 // 8)
        else:
            break
    fitting = {rows: answer for rows, answer in compiled.items() if answer.peak <= usable}
    largest = max(fitting, default=0)
    ladder = sorted({max(largest * n // 8, 1) for n in range(1, 9)}) if largest else []
    return Fit(
        largest=largest,
        best=min(fitting, key=lambda rows: fitting[rows].seconds / rows, default=0),
        predicted={rows: seconds(rows) for rows in ladder},
    )


@dataclass(frozen=True)
class Pass:
    """Memory and time of a step with micro-batches, on one device."""

    peak: int
    """Peak of memory, in bytes."""
    part: float
    """Seconds of one micro-batch."""
    once: float
    """Seconds of work that a step does once: the reduction of gradients and the optimizer."""

    def seconds(self, parts: int) -> float:
        """Compute the seconds of a step of `parts` micro-batches."""
        return self.part * parts + self.once


@dataclass(frozen=True)
class Pace:
    """A micro-batch size and accumulation with nearly the highest throughput."""

    rows: int
    """Rows of a micro-batch on one batch shard."""
    accumulation: int
    tried: dict[int, Pass]
    """Measurements by rows, including sizes that do not fit."""


def fastest_pace(measure: Callable[[int], Pass], ladder: Sequence[int], usable: int) -> Pace | None:
    """Return the fastest micro-batch size and a number of micro-batches, or None if nothing fits.

    Small micro-batches can be faster per row than one large batch, because activations then stay in
    the core's own memory. More micro-batches amortise the work that a step does only once. The
    sizes in `ladder` (rows, ascending) are tried until one is slower per row or does not fit.
    """
    tried: dict[int, Pass] = {}

    def per_row(rows: int, parts: int) -> float:
        return (tried[rows].part + tried[rows].once / parts) / rows

    best = None
    for rows in ladder:
        tried[rows] = measure(rows)
        if tried[rows].peak > usable:
            break
        if best is not None and per_row(rows, MOST_PARTS) >= per_row(best, MOST_PARTS):
            break
        best = rows
    if best is None:
        return None
    parts = 1  # becomes the smallest power of two that is nearly as fast as `MOST_PARTS`
    while parts < MOST_PARTS and per_row(best, MOST_PARTS) < ENOUGH * per_row(best, parts):
        parts *= 2
    return Pace(best, parts, tried)


def round_rows(rows: int) -> int:
    """Round down to a number of rows that tiles well: from 16 on, a multiple of 8."""
    return rows // 8 * 8 if rows >= 16 else max(rows, 0)


def _kind(settings: Settings) -> tuple[str, int]:
    """Return a key that is equal for candidates whose estimates have similar errors."""
    return settings.remat, settings.tensor

"""The operations of one step as a `Program`, and their time on a chip.

Times are added up, because a TPU core runs one operation at a time, in the order of the schedule.
Asynchronous collectives, and DMA between HBM and the core's memory, run in parallel with the core.
They add only the time by which they exceed the operations they overlap with.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from bert_jax.chips import Chip
from bert_jax.planning.hlo_cost.kernels import work_of

MXU_SHARE = 0.5
PRODUCT_CYCLES = 18
STEP_CYCLES = 385
"""Constants of Pallas kernels in `op_seconds`: the fraction of matrix products' time that overlaps
with no vector work; a core's extra cycles per matrix product; extra cycles per grid step. They are
fitted to libtpu's schedules of 12 attention kernels on v5e. The prediction is within 11% for 11 of
the kernels and within 19% for the other (docs/experiments.md, "The wind tunnel")."""

STATED_EFFICIENCY = 0.5
"""Fraction of peak FLOPs assumed for a kernel that states its FLOPs but has no readable program:
one half, because heads of width 64 fill half of a 128 x 128 systolic array."""

NUM_TOP = 10


@dataclass(frozen=True)
class Op:
    """One operation on a TPU core, with all its runs in a step."""

    name: str
    kind: str
    """Kind: "xla", "pallas", or "copy" (moves of whole arrays that the core waits for)."""
    cycles: int | None
    """Cycles of one run, as the compiler estimates them; None if there is no estimate."""
    runs: int
    """Runs per step: the product of the trip counts around the operation."""
    bytes: int
    """Size of operands and results without padding, the least that the operation must move."""
    hbm_bytes: int
    """Bytes of operands and results in HBM, not in the core's own memories."""
    source: str
    """Source line, such as `model/encoder.py:123 Layer.__call__`; empty if there is none."""
    phase: str
    """Phase: "forward", "backward", "recomputed" (rematerialised) or "" (the rest of the step)."""
    flops: int | None = None
    """FLOPs that a Pallas kernel states; None if it states none."""
    kernel: str = field(default="", repr=False)
    """Program of a Pallas kernel, for `kernels.work_of`."""


@dataclass(frozen=True)
class Collective:
    """One exchange between devices, with all its runs in a step."""

    name: str
    kind: str
    """Kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", …"""
    network: str
    """Network: "ici" inside a slice, "dcn" between slices."""
    bytes: int
    """Bytes per device of the operand or the result, whichever is larger."""
    axes: tuple[str, ...]
    """Mesh axes that a group of devices spans, in mesh order; ("mixed",) if no axes match."""
    group_size: int
    """Number of devices in a group (2 in a permutation) or, for "dcn", number of slices."""
    runs: int
    source: str
    phase: str
    colors: int = 0
    """Number of rings that XLA runs at once, each on one link of a device; 0 if not stated."""
    asynchronous: bool = False
    """Whether other work may be scheduled between the exchange's start and end."""
    overlapped_cycles: int = 0
    """Cycles of core work scheduled during one run, divided among simultaneous exchanges."""


@dataclass(frozen=True)
class Transfer:
    """A copy between memories by DMA, in parallel with the core, with all its runs in a step."""

    bytes: int
    """Bytes moved in one run."""
    runs: int


@dataclass(frozen=True)
class Loop:
    """A while loop of the program."""

    name: str
    trips: int | None
    """Number of iterations; None if it depends on data. The cost then counts one iteration."""
    runs: int
    """Number of times per step that the loop is entered."""
    cycles: int
    """Cycles of one iteration."""
    source: str


@dataclass(frozen=True)
class Program:
    """Operations of one step on one device."""

    ops: tuple[Op, ...]
    collectives: tuple[Collective, ...]
    transfers: tuple[Transfer, ...]
    loops: tuple[Loop, ...]
    devices_per_slice: int

    @property
    def cycles(self) -> int:
        """Sum of the cycles of all operations that have an estimate, in one step."""
        return sum(op.cycles * op.runs for op in self.ops if op.cycles is not None)

    @property
    def unknown_loops(self) -> tuple[Loop, ...]:
        """Loops with a data-dependent number of iterations. The cost counts one iteration."""
        return tuple(loop for loop in self.loops if loop.trips is None)


@dataclass(frozen=True)
class Cost:
    """The predicted time of one step, and its parts."""

    seconds: float
    """Sum of `parts`."""
    parts: dict[str, float]
    """Seconds by part: "xla", "pallas", "unestimated", "collectives exposed", "copies exposed"."""
    how: dict[str, str]
    """Explanation of the estimate for each part, and of what is not counted."""
    top: tuple[tuple[float, str, str], ...]
    """The most expensive operations: (seconds per step, source line, name), longest first."""
    by_source: tuple[tuple[float, str], ...]
    """Seconds per step by source line, longest first; "(compiler)" if there is no line."""
    hidden: dict[str, float]
    """Seconds hidden behind other work, not counted in `parts`: "collectives", "copies"."""


def estimate(program: Program, chip: Chip, torus: Sequence[int] = ()) -> Cost:
    """Predict the time of a step on one device; a chip's devices share the chip equally.

    `torus` has the number of chips in each dimension of the slice, such as (4, 4) for v5e:4x4. If
    `torus` is empty, a group smaller than the slice counts as one ring without wrap-around links.
    """
    device = chip.per_device
    parts: dict[str, float] = defaultdict(float)
    lines: list[tuple[float, str, str]] = []
    for op in program.ops:
        part = "pallas" if op.kind == "pallas" else "unestimated" if op.cycles is None else "xla"
        seconds = op_seconds(op, device)
        parts[part] += seconds
        lines.append((seconds, _label(op.source, op.phase), op.name))
    hidden: dict[str, float] = defaultdict(float)
    for exchange in program.collectives:
        whole = exchange.runs * collective_seconds(exchange, device, program, torus)
        beside = exchange.runs * exchange.overlapped_cycles / device.clock_hz
        exposed = max(0.0, whole - beside) if exchange.asynchronous else whole
        parts["collectives exposed"] += exposed
        hidden["collectives"] += whole - exposed
        lines.append((exposed, _label(exchange.source, exchange.phase), exchange.name))
    core = math.fsum(parts.values())
    moved = sum(move.bytes * move.runs for move in program.transfers) / device.hbm_bytes_per_s
    parts["copies exposed"] = max(0.0, moved - core)
    hidden["copies"] = min(moved, core)
    if parts["copies exposed"] > 0:
        lines.append((parts["copies exposed"], "(copies between HBM and the core's memory)", "DMA"))
    by_source: dict[str, float] = defaultdict(float)
    for seconds, label, _ in lines:
        by_source[label] += seconds
    return Cost(
        seconds=math.fsum(parts.values()), parts=dict(parts), how=_how(program, chip),
        top=tuple(sorted(lines, reverse=True)[:NUM_TOP]),
        by_source=tuple(sorted(((s, label) for label, s in by_source.items()), reverse=True)),
        hidden=dict(hidden),
    )  # fmt: skip


def op_seconds(op: Op, device: Chip) -> float:
    """Estimate the seconds per step of one operation."""
    if op.cycles is not None:
        return op.runs * op.cycles / device.clock_hz
    seconds = op.bytes / device.hbm_bytes_per_s
    work = work_of(op.kernel)
    if work is not None:
        memory = op.hbm_bytes / device.hbm_bytes_per_s
        arrays = work.mxu_flops(device.mxu_side) / device.bf16_flops
        other = (
            (work.vector / device.alus + work.transcendentals) / (8 * 128)
            + work.num_products * PRODUCT_CYCLES
            + work.steps * STEP_CYCLES
        ) / (device.cores * device.clock_hz)
        seconds = max(memory, arrays, MXU_SHARE * arrays + other)
    elif op.flops is not None:
        seconds = max(seconds, op.flops / (device.bf16_flops * STATED_EFFICIENCY))
    return op.runs * seconds


def collective_seconds(
    exchange: Collective, device: Chip, program: Program, torus: Sequence[int] = ()
) -> float:
    """Estimate the seconds of one run of an exchange that has the network to itself.

    Rings run in both directions of every dimension that the group spans. Each of n devices sends
    (n-1)/n of the bytes, or twice as much in an all-reduce (reduce-scatter, then all-gather).
    """
    n = exchange.group_size
    share = (n - 1) / n * exchange.bytes
    if exchange.kind == "all-reduce":
        share *= 2
    elif exchange.kind == "collective-permute":
        share = exchange.bytes
    if exchange.network == "dcn":
        return share / device.dcn_bytes_per_s
    # Each torus dimension that the devices fill has one ring in each direction or, without
    # wrap-around links, a single ring that returns over the same links, at half the rate. Devices
    # that fill no dimension form one such single ring.
    link = device.ici_bytes_per_s_per_link
    dims = [size for size in torus if size > 1]
    filled: Sequence[int] = dims or (0,) * (device.ici_links // 2)
    if n != program.devices_per_slice:
        groups = (g for k in range(len(dims), 0, -1) for g in itertools.combinations(dims, k))
        filled = next((g for g in groups if math.prod(g) == n), (0,))
    # A torus dimension wraps around if 16 (2-D) or 4 (3-D) divides its size.
    wraps_at = 16 if device.ici_links == 4 else 4
    rate = sum(2 * link if size and size % wraps_at == 0 else link for size in filled)
    if exchange.colors:
        rate = min(rate, exchange.colors * link)
    return share / rate


def _label(source: str, phase: str) -> str:
    return f"{source or '(compiler)'}{f' [{phase}]' if phase else ''}"


def _how(program: Program, chip: Chip) -> dict[str, str]:
    how = {
        "xla": f"cycles that XLA estimates for each operation / {chip.clock_hz / 1e9:g} GHz; "
        "a loop body counts once per iteration",
        "pallas": "counted in the kernel's own program: vector operations, exponentials, "
        f"{MXU_SHARE:.0%} of its products' time on systolic arrays of {chip.mxu_side}, "
        f"{PRODUCT_CYCLES} cycles per product and {STEP_CYCLES} per step of the grid; at least the "
        "full time of the products, and at least the kernel's bytes / HBM bandwidth",
        "unestimated": "operations for which XLA estimates no cycles (gathers, scatters, sorts): "
        "bytes of operands and results / HBM bandwidth",
        "collectives exposed": "bytes over rings on all links of the dimensions a group spans; "
        "an asynchronous collective counts only the time by which it outlasts the work beside it",
        "copies exposed": "time by which DMA between HBM and core memory outlasts all other work",
    }
    kernels = [op for op in program.ops if op.kind == "pallas"]
    unread = {op.name for op in kernels if not ((work := work_of(op.kernel)) and work.exact)}
    if unread:
        names = ", ".join(sorted(unread))
        how["kernels not counted"] = (
            "kernels whose programs cannot be read in full take their stated FLOPs at "
            f"{STATED_EFFICIENCY:.0%} of the peak, or bytes / HBM bandwidth: {names}"
        )
    if program.unknown_loops:
        names = ", ".join(f"{loop.name} ({loop.source})" for loop in program.unknown_loops)
        how["unknown loops"] = f"one iteration is counted, as the number depends on data: {names}"
    return how

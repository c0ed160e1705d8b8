"""The operations of one step of one device, as data: `hlo.parse_program` makes them."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Op:
    """One operation of the core, with all its runs in a step."""

    name: str
    kind: str
    """"xla", "pallas", or "copy" (moves of whole arrays that the core waits for)."""
    cycles: int | None
    """Compiler's estimate for one run; None without an estimate."""
    runs: int
    """Runs per step: the product of the trip counts around the operation."""
    bytes: int
    """Logical size of operands and results: the least that the operation reads and writes."""
    hbm_bytes: int
    """Bytes of operands and results in HBM, not in the core's own memories."""
    source: str
    """`model/encoder.py:123 Layer.__call__`, or empty for the compiler's own."""
    phase: str
    """"forward", "backward", "recomputed" (rematerialised forward) or "" (the rest of the step)."""
    flops: int | None = None
    """FLOPs that a Pallas kernel states; None where the kernel states none."""
    transcendentals: int | None = None
    """Transcendentals that a Pallas kernel states."""
    kernel: str = field(default="", repr=False)
    """Program of a Pallas kernel, for `kernels.work_of`."""


@dataclass(frozen=True)
class Collective:
    """One exchange between devices, with all its runs in a step."""

    name: str
    kind: str
    """"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", …"""
    network: str
    """"ici" inside a slice, "dcn" between slices."""
    bytes: int
    """Bytes per device of the larger of operand and result: the operand where it is reduced
    (all-reduce, reduce-scatter), the result where it is gathered (all-gather)."""
    axes: tuple[str, ...]
    """Mesh axes of the exchange, in mesh order; ("mixed",) for groups that no axes span."""
    group_size: int
    """Devices in a group; 2 for a permutation; the number of slices between slices."""
    runs: int
    source: str
    phase: str
    colors: int = 0
    """Rings that XLA's strategy runs at once, each on one link of a device; 0: not stated."""
    asynchronous: bool = False
    """Whether other work is scheduled between its start and its end."""
    overlapped_cycles: int = 0
    """Cycles of the work scheduled beside it in one run; work beside several exchanges is divided
    among them."""


@dataclass(frozen=True)
class Transfer:
    """A copy between memories beside the core (DMA), with all its runs in a step."""

    bytes: int
    """Bytes moved in one run."""
    runs: int


@dataclass(frozen=True)
class Loop:
    """A while loop of the program."""

    name: str
    trips: int | None
    """Iterations; None where they depend on data, and the body is counted once."""
    runs: int
    """Number of times per step that the loop is entered."""
    cycles: int
    """Cycles of one iteration."""
    source: str


@dataclass(frozen=True)
class Program:
    """Operations of one step of one device."""

    ops: tuple[Op, ...]
    collectives: tuple[Collective, ...]
    transfers: tuple[Transfer, ...]
    loops: tuple[Loop, ...]
    devices_per_slice: int

    @property
    def cycles(self) -> int:
        """Cycles of all operations with an estimate, one after the other, in one step."""
        return sum(op.cycles * op.runs for op in self.ops if op.cycles is not None)

    @property
    def unknown_loops(self) -> tuple[Loop, ...]:
        """Loops whose length depends on data: the step takes longer than counted here."""
        return tuple(loop for loop in self.loops if loop.trips is None)

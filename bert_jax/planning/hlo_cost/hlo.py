"""The operations of one step, from the optimised HLO that XLA wrote for a TPU.

`parse_program` walks the schedule from the entry computation. The body of a loop counts once per
iteration. A conditional counts as its branch with the most cycles. A fusion is one operation with
the compiler's estimate (`estimated_cycles` in its backend_config). A -start instruction and its
-done instruction are one operation. Neither jax nor libtpu is needed.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bert_jax.planning.hlo_cost import hlo_text
from bert_jax.planning.hlo_cost.cost import Collective, Loop, Op, Program, Transfer
from bert_jax.planning.hlo_cost.hlo_text import Computation, Instruction, phase_of, shape_bytes
from bert_jax.planning.hlo_cost.loops import Scope, body_scope, trip_count

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "optimization-barrier", "opt-barrier", "add-dependency", "async-update", "recv",
}  # fmt: skip
"""Instructions that take no time on the core. They only name values, or other units run them."""
TRANSFERS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
FREE_CALLS = {
    "AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast",
    "GatherScatterIndicesBitpacked", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape",
    "MoveToHost", "MoveToDevice",
}  # fmt: skip
"""Custom calls for which the compiler generates no code."""
SENTINEL = 2**50
"""Smallest cycle estimate that means "unknown". The compiler writes about 2^63 for unknown."""


def parse_program(text: str, mesh_shape: Mapping[str, int]) -> Program:
    """Parse the optimised, scheduled HLO text of a TPU program, as from `compiled.as_text()`.

    `mesh_shape` is `mesh.shape`, in the order of the mesh's axes. XLA numbers partitions by
    position in `mesh.devices.flat`, not by device id. If there are several slices, all run the same
    program, and the outermost axes of the mesh must span the slices. Raise a ValueError if the text
    is not a program, or has device groups in an unknown format.
    """
    module = hlo_text.parse_text(text)
    inside, across = _split_slices(mesh_shape, module.num_partitions)
    walk = _Walk(module, inside, across)
    walk.computation(Scope(module, module.computations[module.entry], lambda _: None), 1)
    return Program(
        tuple(walk.ops), tuple(walk.collectives), tuple(walk.transfers), tuple(walk.loops),
        math.prod(inside.values()),
    )  # fmt: skip


def _split_slices(
    mesh_shape: Mapping[str, int], num_partitions: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return one slice's mesh shape, and the number of slices by axis (only if above 1)."""
    slices = max(1, math.prod(mesh_shape.values()) // num_partitions)
    inside: dict[str, int] = {}
    across: dict[str, int] = {}
    for name, size in mesh_shape.items():
        part = math.gcd(size, slices)
        slices //= part
        inside[name] = size // part
        if part > 1:
            across[name] = part
    return inside, across


_RENDEZVOUS = r'_xla_host_transfer_rendezvous="([^"]*)"'


@dataclass
class _Flight:
    """A collective that has started and not yet finished."""

    exchange: Collective
    fused: bool
    """Whether the collective advances only inside TPU's async collective fusions."""
    overlapped: float = 0.0


@dataclass
class _Walk:
    module: hlo_text.Module
    mesh_shape: Mapping[str, int]
    """Mesh shape of one slice."""
    slices: Mapping[str, int]
    """Number of slices along each mesh axis that spans several slices."""
    ops: list[Op] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)

    def computation(self, scope: Scope, runs: int) -> int:
        """Record a computation that runs `runs` times, and return the cycles of one run."""
        total = 0
        flying: dict[str, _Flight] = {}
        for instruction in scope.computation.instructions.values():
            if self._beside_the_core(instruction, scope, runs, flying):
                continue
            cycles, carried = self._on_the_core(instruction, scope, runs, flying)
            total += cycles
            beside = [flying[k] for k in carried if k in flying] or [
                flight for flight in flying.values() if not flight.fused
            ]
            for flight in beside:
                flight.overlapped += cycles / len(beside)
        for flight in flying.values():
            self._land(flight)
        return total

    def _beside_the_core(
        self, instruction: Instruction, scope: Scope, runs: int, flying: dict[str, _Flight]
    ) -> bool:
        """Record an exchange or copy. Return true if the instruction takes no time on the core."""
        opcode, name = instruction.opcode, instruction.name
        instructions = scope.computation.instructions
        base = opcode.removesuffix("-start").removesuffix("-done")
        rendezvous = instruction.attribute(_RENDEZVOUS) if opcode == "send" else None
        if opcode in FREE:
            pass
        elif opcode == "async-start" and (inside := self._offloaded(instruction.calls or "")):
            self._start(name, self._exchange(*inside, instruction, runs), flying)
        elif opcode == "async-done":
            begun = instruction
            while begun.opcode in ("async-done", "async-update"):
                begun = instructions[begun.operands[0]]
            self._finish(begun.name, flying)
        elif base in COLLECTIVES and opcode.endswith("-done"):
            self._finish(instruction.operands[0], flying)
        elif base in COLLECTIVES:
            exchange = self._exchange(instruction, scope.computation, instruction, runs)
            if opcode.endswith("-start"):
                self._start(name, exchange, flying)
            else:
                self._add(exchange)
        elif rendezvous and "_xla_megascale" in instruction.attributes:
            exchange = self._between_slices(instruction, rendezvous, scope, runs)
            self._start(rendezvous, exchange, flying)
        elif opcode == "recv-done":
            begun = instructions[instruction.operands[0]]
            self._finish(begun.attribute(_RENDEZVOUS) or "", flying)
        elif opcode in TRANSFERS or (opcode == "async-start" and self._moves(instruction)):
            # Count the arrays that a -start makes, not its operand.
            started = hlo_text.started_shape(instruction.shape)
            self.transfers.append(Transfer(shape_bytes(started), runs))
        else:
            return opcode.endswith("-done")
        return True

    def _moves(self, started: Instruction) -> bool:
        """Return true if an `async-start` copies a part of an array, or runs on a SparseCore."""
        called = self.module.computations.get(started.calls or "")
        inside = {i.opcode for i in called.instructions.values()} if called else set()
        sparse = 'async_execution_thread="sparsecore"' in started.attributes
        return sparse or inside == {"parameter", "slice"}

    def _on_the_core(
        self, instruction: Instruction, scope: Scope, runs: int, flying: dict[str, _Flight]
    ) -> tuple[int, list[str]]:
        """Return the cycles of one run, and the keys of collectives that advance during the run."""
        opcode, calls = instruction.opcode, instruction.calls
        if opcode == "while":
            return self._loop(instruction, scope, runs), []
        if opcode == "conditional":
            return self._conditional(instruction, scope, runs), []
        if opcode == "call" or (opcode == "async-start" and calls):
            return self.computation(scope.called(instruction, calls or ""), runs), []
        if opcode == "fusion" and calls in self.module.computations:
            return self._fusion(instruction, scope.computation, runs, flying)
        return self._op(instruction, scope.computation, runs), []

    def _loop(self, instruction: Instruction, scope: Scope, runs: int) -> int:
        trips = trip_count(instruction, scope)
        body = body_scope(instruction, scope)
        counted = 1 if trips is None else trips
        cycles = 0
        position = len(self.loops)  # so that the loop is listed before the loops of its body
        if body is not None and trips != 0:
            cycles = self.computation(body, runs * counted)
        source = self.module.source(instruction)
        self.loops.insert(position, Loop(instruction.name, trips, runs, cycles, source))
        return cycles * counted

    def _conditional(self, instruction: Instruction, scope: Scope, runs: int) -> int:
        listed = instruction.attribute(r"branch_computations=\{([^}]*)\}") or ""
        either = r"(?:true|false)_computation=%?([\w.\-]+)"
        names = re.findall(r"%?([\w.\-]+)", listed) or re.findall(either, instruction.attributes)
        if not names:
            return 0
        tried = []
        for name, operand in zip(names, instruction.operands[1:], strict=True):
            walk = _Walk(self.module, self.mesh_shape, self.slices)
            inner = scope.called(replace(instruction, operands=(operand,)), name)
            tried.append((walk.computation(inner, runs), walk))
        cycles, branch = max(tried, key=lambda pair: pair[0])
        for name in ("ops", "collectives", "transfers", "loops"):
            getattr(self, name).extend(getattr(branch, name))
        return cycles

    def _fusion(
        self, instruction: Instruction, computation: Computation, runs: int,
        flying: dict[str, _Flight],
    ) -> tuple[int, list[str]]:  # fmt: skip
        """Record a fusion; return its cycles, and the keys of collectives that it advances."""
        called = self.module.computations[instruction.calls or ""]
        parts = called.instructions.values()
        inner = [i for i in parts if i.opcode in COLLECTIVES]
        keys = ["channel " + (i.attribute(r"channel_id=(\d+)") or i.name) for i in inner]
        targets = {i.attribute(r'custom_call_target="([^"]*)"') for i in parts}
        if inner and "AsyncCollectiveStart" in targets:
            for key, i in zip(keys, inner, strict=True):
                self._start(key, self._exchange(i, called, instruction, runs), flying, fused=True)
            return 0, []
        if inner and "AsyncCollectiveDone" in targets:
            for key in keys:
                self._finish(key, flying)
            return 0, []
        started = [key for key in keys if key in flying]
        for key, i in zip(keys, inner, strict=True):
            if key not in flying:
                self._add(self._exchange(i, called, instruction, runs))
        if inner and not started:
            return 0, []
        return self._op(instruction, computation, runs), started

    def _offloaded(self, name: str) -> tuple[Instruction, Computation] | None:
        """Return the collective that a SparseCore runs in `name`, and its computation; else None.

        The collective may be in nested calls, which pass their arguments on unchanged.
        """
        computation = self.module.computations.get(name)
        if computation is None:
            return None
        for instruction in computation.instructions.values():
            if instruction.opcode in COLLECTIVES:
                return instruction, computation
            listed = instruction.attribute(r"called_computations=\{%?([\w.\-]+)\}")
            if listed and (found := self._offloaded(listed)):
                return found
        return None

    def _exchange(
        self, inner: Instruction, computation: Computation, outer: Instruction, runs: int
    ) -> Collective:
        """Describe the collective `inner` of `computation`, which the instruction `outer` runs."""
        kind = inner.opcode.removesuffix("-start")
        # A fusion that keeps only a slice of an all-reduce is a reduce-scatter.
        if outer is not inner and (
            "all-reduce-scatter" in (outer.calls or "") or "AllReduceScatter" in outer.attributes
        ):
            kind = "reduce-scatter"
        groups = hlo_text.parse_groups(inner.attributes, self.module.num_partitions)
        permutes = kind == "collective-permute"
        axes_of = hlo_text.axes_of_pairs if permutes else hlo_text.axes_of_groups
        size = max(len(group) for group in groups)
        operand = sum(map(shape_bytes, computation.operand_shapes(inner)))
        if kind == "all-reduce":  # may read bfloat16, but sends sums of the result's type
            operand = max(operand, shape_bytes(inner.shape))
        metadata = inner if inner.op_name else outer
        return Collective(
            name=outer.name, kind=kind, network="ici",
            bytes=operand * size if kind == "all-gather" else operand,
            axes=axes_of(groups, self.mesh_shape), group_size=size, runs=runs,
            source=self.module.source(metadata), phase=phase_of(metadata.op_name),
            colors=int(outer.attribute(r"\bcolors:(\d+)") or 0),
        )  # fmt: skip

    def _between_slices(
        self, send: Instruction, rendezvous: str, scope: Scope, runs: int
    ) -> Collective:
        """Return the exchange that `send` starts: the host sends over the data-centre network."""
        kind = send.attribute(r'_xla_megascale_transfer_type="(\w+)"') or "send"
        payload = scope.computation.instructions[send.operands[0]]
        return Collective(
            name=rendezvous, kind=kind.lower().replace("_", "-"), network="dcn",
            bytes=shape_bytes(payload.shape), axes=tuple(self.slices) or (hlo_text.MIXED,),
            group_size=math.prod(self.slices.values()), runs=runs,
            source=self.module.source(payload), phase=phase_of(payload.op_name),
        )  # fmt: skip

    def _add(self, exchange: Collective) -> None:
        if exchange.axes:  # groups of one device have no axes and send nothing
            self.collectives.append(exchange)

    def _start(
        self, key: str, exchange: Collective, flying: dict[str, _Flight], *, fused: bool = False
    ) -> None:
        if exchange.axes:
            flying[key] = _Flight(replace(exchange, asynchronous=True), fused)

    def _finish(self, key: str, flying: dict[str, _Flight]) -> None:
        if key in flying:
            self._land(flying.pop(key))

    def _land(self, flight: _Flight) -> None:
        self._add(replace(flight.exchange, overlapped_cycles=round(flight.overlapped)))

    def _op(self, instruction: Instruction, computation: Computation, runs: int) -> int:
        target = instruction.attribute(r'custom_call_target="([^"]*)"')
        if target in FREE_CALLS:
            return 0
        cycles = instruction.number("estimated_cycles")  # None if missing or negative
        if cycles is not None and cycles >= SENTINEL:
            cycles = None
        shapes = [instruction.shape, *computation.operand_shapes(instruction)]
        # The scalar unit computes scalars, so they need no estimate.
        if cycles is None and all(shape_bytes(shape) <= 8 for shape in shapes):
            return 0
        # A gather reads only what it returns.
        gathers = instruction.op_name.endswith("/gather")
        gathers &= instruction.opcode in ("gather", "fusion")
        touched = [shapes[0], shapes[0], *shapes[2:]] if gathers else shapes
        op = Op(
            name=instruction.name, kind="copy" if instruction.opcode == "copy" else "xla",
            cycles=cycles, runs=runs, bytes=sum(map(shape_bytes, touched)),
            hbm_bytes=sum(map(hlo_text.hbm_bytes, shapes)),
            source=self.module.source(instruction), phase=phase_of(instruction.op_name),
        )  # fmt: skip
        if target == "tpu_custom_call":  # a Pallas kernel
            op = replace(
                op, name=instruction.attribute(r"kernel_name\W+([\w.\-]+)") or op.name,
                kind="pallas", cycles=None, bytes=instruction.number("bytes_accessed") or op.bytes,
                flops=instruction.number("flops"),
                kernel=instruction.attribute(r'"body":"([^"]*)"') or "",
            )  # fmt: skip
        self.ops.append(op)
        return op.cycles or 0

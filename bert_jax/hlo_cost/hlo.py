"""The operations of one step, from the optimised HLO that XLA wrote for a TPU.

`parse_program` walks the schedule from the entry computation: bodies of loops count as often as
the loop runs, of a conditional's branches the one with more cycles counts, a fusion is one
operation with the cycles the compiler estimated for it (`estimated_cycles` in its backend_config),
a pair of -start and -done is one operation. Pure text to data: neither jax nor libtpu is needed.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bert_jax.hlo_cost.groups import MIXED, axes_of_groups, axes_of_pairs, parse_groups
from bert_jax.hlo_cost.hlo_text import (
    Computation,
    Instruction,
    Module,
    parse_text,
    shape_bytes,
)
from bert_jax.hlo_cost.instructions import (
    COLLECTIVES,
    FREE,
    FREE_CALLS,
    TRANSFERS,
    hbm_bytes,
    kernel_name,
    phase_of,
    started_shape,
    stated_number,
    touched_by,
)
from bert_jax.hlo_cost.loops import UNKNOWN, Scope, body_scope, trip_count
from bert_jax.hlo_cost.program import Collective, Loop, Op, Program, Transfer

SENTINEL = 2**50
"""Cycle counts from here on are the compiler's "do not know" (values near 2^63)."""


def parse_program(text: str, mesh_shape: Mapping[str, int]) -> Program:
    """Read `compiled.as_text()` of a TPU program.

    Args:
        text: Optimised, scheduled HLO.
        mesh_shape: `mesh.shape`, in the order of the mesh's axes. XLA numbers partitions by
            position in `mesh.devices.flat`, whatever the ids of the devices. A program for
            several slices is that of one slice: the mesh's outermost axes must span the slices.

    Raises:
        ValueError: not HLO text, or a collective whose groups cannot be read.
    """
    module = parse_text(text)
    inside, across = _split_slices(mesh_shape, module.num_partitions)
    walk = _Walk(module, inside, across)
    entry = module.computations[module.entry]
    walk.computation(Scope(module, entry, lambda _: UNKNOWN), 1)
    return Program(
        tuple(walk.ops),
        tuple(walk.collectives),
        tuple(walk.transfers),
        tuple(walk.loops),
        dict(mesh_shape),
        math.prod(inside.values()),
    )


def _split_slices(
    mesh_shape: Mapping[str, int], num_partitions: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Mesh of one slice, and slices by the outermost axes that they divide."""
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


_CYCLES = re.compile(r'"estimated_cycles":"(-?\d+)"')


@dataclass
class _Flight:
    """A collective under way: what is known when it starts."""

    fields: dict[str, Any]
    overlapped: float = 0.0
    fused: bool = False
    """It advances only inside the fusions that carry it (TPU's async collective fusions)."""


@dataclass
class _Walk:
    module: Module
    mesh_shape: Mapping[str, int]
    """Mesh shape of one slice."""
    slices: Mapping[str, int]
    """Slices along each mesh axis that spans several."""
    ops: list[Op] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)

    def computation(self, scope: Scope, runs: int) -> int:
        """Add the operations of `runs` runs of a computation, and return the cycles of one run."""
        total = 0
        flying: dict[str, _Flight] = {}
        for instruction in scope.computation.instructions.values():
            cycles, carried = self._instruction(instruction, scope, runs, flying)
            total += cycles
            beside = [flying[k] for k in carried if k in flying] or [
                flight for flight in flying.values() if not flight.fused
            ]
            for flight in beside:
                flight.overlapped += cycles / len(beside)
        for flight in flying.values():
            self._land(flight)
        return total

    def _instruction(
        self, instruction: Instruction, scope: Scope, runs: int, flying: dict[str, _Flight]
    ) -> tuple[int, list[str]]:
        """(cycles of one run, collectives under way that advance inside this instruction)."""
        opcode = instruction.opcode
        base = opcode.removesuffix("-start").removesuffix("-done")
        if opcode in FREE:
            return 0, []
        if opcode == "while":
            return self._loop(instruction, scope, runs), []
        if opcode == "conditional":
            return self._conditional(instruction, scope, runs), []
        if opcode == "async-start" and (inside := self._offloaded(instruction.calls or "")):
            exchange, computation = inside
            kind = self._kind(instruction, exchange)
            flight = self._flight(exchange, instruction, computation, runs, kind)
            self._start(instruction.name, flight, True, flying)
            return 0, []
        if opcode == "async-done":
            begun = instruction
            while begun.opcode in ("async-done", "async-update"):
                begun = scope.computation.instructions[begun.operands[0]]
            self._finish(begun.name, flying)
            return 0, []
        if opcode == "call" or (opcode == "async-start" and instruction.calls):
            return self.computation(scope.called(instruction, instruction.calls or ""), runs), []
        if base in COLLECTIVES:
            if opcode.endswith("-done"):
                self._finish(instruction.operands[0], flying)
            else:
                flight = self._flight(instruction, instruction, scope.computation, runs, base)
                self._start(instruction.name, flight, opcode.endswith("-start"), flying)
            return 0, []
        rendezvous = instruction.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"')
        if opcode == "send" and rendezvous and "_xla_megascale" in instruction.attributes:
            self._start(rendezvous, self._between_slices(instruction, scope, runs), True, flying)
            return 0, []
        if opcode == "recv-done":
            begun = scope.computation.instructions[instruction.operands[0]]
            self._finish(begun.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"') or "", flying)
            return 0, []
        if opcode in TRANSFERS:
            self._transfer(instruction, scope.computation, runs)
            return 0, []
        if opcode.endswith("-done"):
            return 0, []
        if opcode == "fusion" and instruction.calls in self.module.computations:
            return self._fusion(instruction, scope.computation, runs, flying)
        return self._op(instruction, scope.computation, runs), []

    def _loop(self, instruction: Instruction, scope: Scope, runs: int) -> int:
        trips = trip_count(instruction, scope)
        body = body_scope(instruction, scope)
        cycles = 0
        place = len(self.loops)
        if body is not None and trips != 0:
            cycles = self.computation(body, runs * (1 if trips is None else trips))
        source = self.module.source(instruction)
        self.loops.insert(place, Loop(instruction.name, trips, runs, cycles, source))
        return cycles * (1 if trips is None else trips)

    def _conditional(self, instruction: Instruction, scope: Scope, runs: int) -> int:
        """Count the branch with the most cycles."""
        names = re.findall(
            r"%?([\w.\-]+)",
            instruction.attribute(r"branch_computations=\{([^}]*)\}") or "",
        ) or [
            name
            for side in ("true", "false")
            if (name := instruction.attribute(rf"{side}_computation=%?([\w.\-]+)"))
        ]
        if not names:
            return 0
        tried = []
        for number, name in enumerate(names):
            walk = _Walk(self.module, self.mesh_shape, self.slices)
            inner = scope.called(instruction, name)
            inner.argument = functools.partial(_operand, scope, instruction.operands[number + 1])
            tried.append((walk.computation(inner, runs), walk))
        cycles, branch = max(tried, key=lambda pair: pair[0])
        self.ops += branch.ops
        self.collectives += branch.collectives
        self.transfers += branch.transfers
        self.loops += branch.loops
        return cycles

    def _fusion(
        self,
        instruction: Instruction,
        computation: Computation,
        runs: int,
        flying: dict[str, _Flight],
    ) -> tuple[int, list[str]]:
        """Count a leaf, which may start, advance or end a collective that runs inside fusions."""
        called = self.module.computations[instruction.calls or ""]
        inner = [i for i in called.instructions.values() if i.opcode in COLLECTIVES]
        keys = ["channel " + (i.attribute(r"channel_id=(\d+)") or i.name) for i in inner]
        targets = {
            i.attribute(r'custom_call_target="([^"]*)"')
            for i in called.instructions.values()
            if i.opcode == "custom-call"
        }
        if inner and "AsyncCollectiveStart" in targets:
            for key, exchange in zip(keys, inner, strict=True):
                kind = self._kind(instruction, exchange)
                flight = self._flight(exchange, instruction, called, runs, kind)
                flight.fused = True
                self._start(key, flight, True, flying)
            return 0, []
        if inner and "AsyncCollectiveDone" in targets:
            for key in keys:
                self._finish(key, flying)
            return 0, []
        started = [key for key in keys if key in flying]
        for key, exchange in zip(keys, inner, strict=True):
            if key not in flying:
                kind = self._kind(instruction, exchange)
                self._start(
                    key, self._flight(exchange, instruction, called, runs, kind), False, flying
                )
        if inner and not started:
            return 0, []
        return self._op(instruction, computation, runs), started

    def _offloaded(self, name: str) -> tuple[Instruction, Computation] | None:
        """Return the collective that a SparseCore runs beside the core, and where it stands.

        A call inside a call: the inner computation takes the arguments of the outer one.
        """
        computation = self.module.computations.get(name)
        for instruction in computation.instructions.values() if computation else ():
            if computation is not None and instruction.opcode in COLLECTIVES:
                return instruction, computation
            listed = instruction.attribute(r"called_computations=\{%?([\w.\-]+)\}")
            if listed and (found := self._offloaded(listed)):
                return found
        return None

    def _kind(self, fusion: Instruction, exchange: Instruction) -> str:
        """Return the kind: an all-reduce of which only a slice is kept is a reduce-scatter."""
        scatter = "all-reduce-scatter" in (fusion.calls or "") or (
            "AllReduceScatter" in fusion.attributes
        )
        return "reduce-scatter" if scatter else exchange.opcode

    def _flight(
        self,
        exchange: Instruction,
        outer: Instruction,
        computation: Computation,
        runs: int,
        kind: str,
    ) -> _Flight:
        groups = parse_groups(exchange.attributes, self.module.num_partitions)
        permute = kind == "collective-permute"
        size = max(len(group) for group in groups)
        operand = computation.operand_bytes(exchange)
        metadata = exchange if exchange.op_name else outer
        return _Flight(
            {
                "name": outer.name,
                "kind": kind,
                "network": "ici",
                "bytes": operand * size if kind == "all-gather" else operand,
                "axes": (axes_of_pairs if permute else axes_of_groups)(groups, self.mesh_shape),
                "group_size": size,
                "runs": runs,
                "source": self.module.source(metadata),
                "phase": phase_of(metadata.op_name),
                "colors": int(outer.attribute(r"\bcolors:(\d+)") or 0),
                "torus": outer.attribute(r'"strategy":"(\w+)"')
                or exchange.attribute(r'"strategy":"(\w+)"')
                or "",
            }
        )

    def _between_slices(self, send: Instruction, scope: Scope, runs: int) -> _Flight:
        """Count an exchange over the data-centre network, which the host sends for the device."""
        kind = send.attribute(r'_xla_megascale_transfer_type="(\w+)"') or "send"
        payload = scope.computation.instructions[send.operands[0]]
        fields = {
            "name": send.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"'),
            "kind": kind.lower().replace("_", "-"),
            "network": "dcn",
            "bytes": payload.num_bytes,
            "axes": tuple(self.slices) or (MIXED,),
            "group_size": math.prod(self.slices.values()),
            "runs": runs,
            "source": self.module.source(payload),
            "phase": phase_of(payload.op_name),
        }
        return _Flight(fields)

    def _start(
        self, key: str, flight: _Flight, asynchronous: bool, flying: dict[str, _Flight]
    ) -> None:
        if not flight.fields["axes"]:
            return  # groups of one device: nothing is sent
        flight.fields["asynchronous"] = asynchronous
        if asynchronous:
            flying[key] = flight
        else:
            self._land(flight)

    def _finish(self, key: str, flying: dict[str, _Flight]) -> None:
        if key in flying:
            self._land(flying.pop(key))

    def _land(self, flight: _Flight) -> None:
        self.collectives.append(
            Collective(**flight.fields, overlapped_cycles=round(flight.overlapped))
        )

    def _transfer(self, instruction: Instruction, computation: Computation, runs: int) -> None:
        """Count a transfer: the arrays that a -start makes, not the array it takes them from."""
        moved = started_shape(instruction.shape)
        self.transfers.append(
            Transfer(instruction.name, shape_bytes(moved), runs, "S(5)" in instruction.shape)
        )

    def _op(self, instruction: Instruction, computation: Computation, runs: int) -> int:
        target = instruction.attribute(r'custom_call_target="([^"]*)"')
        if target in FREE_CALLS:
            return 0
        found = _CYCLES.search(instruction.attributes)
        cycles = int(found.group(1)) if found else None
        if cycles is not None and not 0 <= cycles < SENTINEL:
            cycles = None
        shapes = [instruction.shape] + [
            computation.instructions[name].shape
            for name in instruction.operands
            if name in computation.instructions
        ]
        # Scalars are the scalar unit's: no estimate is missing there.
        if cycles is None and all(shape_bytes(shape) <= 8 for shape in shapes):
            return 0
        kernel = target == "tpu_custom_call"
        self.ops.append(
            Op(
                name=kernel_name(instruction) if kernel else instruction.name,
                opcode=instruction.opcode,
                kind="pallas" if kernel else "copy" if instruction.opcode == "copy" else "xla",
                cycles=None if kernel else cycles,
                runs=runs,
                bytes=(stated_number(instruction, "bytes_accessed") if kernel else None)
                or sum(map(shape_bytes, touched_by(instruction, shapes))),
                hbm_bytes=sum(map(hbm_bytes, shapes)),
                source=self.module.source(instruction),
                phase=phase_of(instruction.op_name),
                flops=stated_number(instruction, "flops") if kernel else None,
                transcendentals=stated_number(instruction, "transcendentals") if kernel else None,
                kernel=(instruction.attribute(r'"body":"([^"]*)"') or "") if kernel else "",
            )
        )
        return 0 if kernel else cycles or 0


def _operand(scope: Scope, name: str, _: int) -> Any:
    """Return the one argument of a branch."""
    return scope.value(name)

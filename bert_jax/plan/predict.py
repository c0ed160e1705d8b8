"""Prediction of a run from one compiled step: memory, seconds, tokens and MFU per chip."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from bert_jax.hlo_cost.cost import Cost, estimate
from bert_jax.hlo_cost.hlo import parse_program
from bert_jax.hlo_cost.program import Program
from bert_jax.plan.compile import Compiled, compile_step, row_flops
from bert_jax.plan.topology import Topology
from bert_jax.training.config import PretrainConfig


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind over the same mesh axes, as often as they run in a step."""

    kind: str
    network: str
    axes: tuple[str, ...]
    group_size: int
    runs: int
    bytes: int
    """Bytes of all runs together, per device; whole arrays where parts are reduced or gathered."""


@dataclass(frozen=True)
class Plan:
    """A phase on a topology: the compiler's answer and what is made of it."""

    phase: int
    config: PretrainConfig
    """Configuration, as compiled."""
    compiled: Compiled
    flops: int
    """Model FLOPs of a step, all rows (`model/flops.py`)."""
    program: Program | None
    cost: Cost | None
    """None, as `program`, where the step does not fit."""

    @property
    def topology(self) -> Topology:
        """Slice that the step is compiled for."""
        return self.compiled.topology

    @property
    def seconds(self) -> float | None:
        """Predicted, of one step."""
        return None if self.cost is None else self.cost.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """All chips, padding included."""
        return self.seconds and self.compiled.rows * self.compiled.length / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what the chips' bfloat16 peak would have done in the time."""
        return self.seconds and self.flops / (self.seconds * self.topology.bf16_flops)

    @property
    def ideal_seconds(self) -> float:
        """The model's FLOPs at the chips' peak: what an MFU of 100% would take."""
        return self.flops / self.topology.bf16_flops

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Collectives by kind and axes, the most bytes first."""
        if self.program is None:
            return ()
        groups = defaultdict(list)
        for c in self.program.collectives:
            groups[c.kind, c.network, c.axes, c.group_size].append(c)
        found = [
            Exchange(*key, sum(c.runs for c in group), sum(c.runs * c.bytes for c in group))
            for key, group in groups.items()
        ]
        return tuple(sorted(found, key=lambda e: -e.bytes))


def predict(config: PretrainConfig, phase: int, topology: Topology, *, cache: Path | None) -> Plan:
    """Compile the step (`compile_step`) and estimate its time."""
    compiled = compile_step(config, phase, topology, cache=cache)
    shape = config.training.phases[phase]
    flops = shape.batch_size * row_flops(config, shape.length)
    program = cost = None
    if compiled.fits:
        program = parse_program(compiled.hlo, compiled.mesh_shape)
        cost = estimate(program, topology.chip, topology.shape)
    return Plan(phase, config, compiled, flops, program, cost)

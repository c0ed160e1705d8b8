"""Plans without a compiler: a fixed program, with memory and time as lines in what matters."""

import dataclasses
from pathlib import Path

from bert_jax.planning.compile import Memory, Plan, usable_bytes
from bert_jax.planning.hlo_cost.cost import Collective, Cost, Op, Program
from bert_jax.planning.search import settings_of
from bert_jax.planning.topology import Topology
from bert_jax.training.pretrain.config import PretrainConfig

GIB = 2**30


def made_plan(
    config: PretrainConfig, phase: int, topology: Topology, *, cache: Path | None = None
) -> Plan:
    """Stands in for `bert_jax.planning.compile.compile_step`."""
    model, shape = config.model, config.training.phases[phase]
    s = settings_of(config, phase, topology.num_devices)
    shards = topology.num_devices // s.tensor
    unit = shards * s.accumulation
    assert shape.batch_size % unit == 0, "as check_batch_size would refuse"
    rows = shape.batch_size // unit
    kept = {"none": 1.0, "dots": 0.5, "full": 0.1}[s.remat]
    memory = Memory(
        parameters=int(0.4 * GIB / s.fsdp / s.tensor),
        optimizer=int(0.8 * GIB / s.fsdp / s.tensor),
        batch=rows * shape.length * 4,
        temporaries=int(rows * shape.length * model.num_layers * kept * 2**15 / s.tensor),
        other=2**20,
    )
    usable = usable_bytes(topology)
    plan = Plan(
        config=config,
        phase=phase,
        topology=topology,
        mesh_shape={"data": shards // s.fsdp, "fsdp": s.fsdp, "tensor": s.tensor},
        memory=memory,
        usable=usable,
        compile_seconds=1.0,
    )
    if memory.peak > usable:
        refused = f"needs {memory.peak}"
        return dataclasses.replace(plan, refused=refused, needs=memory.peak)
    ideal = plan.flops / topology.num_chips / topology.chip.bf16_flops
    parts = {"xla": 1.5 * ideal + 2e-3, "pallas": 0.0, "collectives exposed": 1e-3}
    cost = Cost(
        seconds=sum(parts.values()),
        parts=parts,
        how={"xla": "cycles", "pallas": "FLOPs", "collectives exposed": "bytes"},
        top=((ideal, "model/layers.py:45 einsum [forward]", "fusion.1"),),
        by_source=((1.5 * ideal, "model/layers.py:45"), (2e-3, "training/optim.py:9")),
        hidden={"copies": 1e-4},
    )
    reduced = Collective(
        name="all-reduce.1", kind="all-reduce", network="ici", bytes=GIB, axes=("data",),
        group_size=shards, runs=2, asynchronous=False, overlapped_cycles=0, source="", phase="",
    )  # fmt: skip
    layers = Op(
        name="fusion.1", kind="xla", runs=s.accumulation, bytes=0, hbm_bytes=0,
        cycles=round(1.5 * ideal / s.accumulation * topology.chip.clock_hz), source="", phase="",
    )  # fmt: skip
    update = dataclasses.replace(layers, runs=1, cycles=round(2e-3 * topology.chip.clock_hz))
    program = Program(
        ops=(layers, update),
        collectives=(reduced, dataclasses.replace(reduced, name="all-reduce.2", runs=1)),
        transfers=(),
        loops=(),
        devices_per_slice=topology.num_devices // topology.num_slices,
    )
    return dataclasses.replace(plan, program=program, cost=cost)

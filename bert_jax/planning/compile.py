"""Compilation of the train step of a configuration for a TPU slice, without a TPU.

A `Plan` has the results: memory, seconds, tokens per second and MFU (model FLOPs utilization).
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import zstandard

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.data.pairings import PAIRINGS, Column
from bert_jax.data.shard import token_dtype
from bert_jax.distributed.parallel.sharding import batch_sharding, check_batch_size, make_mesh
from bert_jax.errors import UserError
from bert_jax.files.caches import cache_directory
from bert_jax.files.staging import replace_file
from bert_jax.files.urls import scheme
from bert_jax.planning.hlo_cost.cost import Cost, Program, estimate
from bert_jax.planning.hlo_cost.hlo import parse_program
from bert_jax.planning.topology import Topology, devices, quiet
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import SHORT_TIMEOUT, open_corpus, store_openers
from bert_jax.training.pretrain.settings import objective_of, step_config
from bert_jax.training.pretrain.start import resolve_start
from bert_jax.training.steps.state import abstract_state
from bert_jax.training.steps.step import make_train_step
from bert_jax.training.steps.trials import bytes_on_device

ASSUMED_VOCAB_SIZE = 30522
"""Vocabulary size of English BERT, assumed if neither the configuration nor a corpus gives one."""
_CACHE_BYTES = 512 * 2**20
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by purpose. A chip may have two devices; `output` reports per chip."""

    parameters: int
    optimizer: int
    batch: int
    temporaries: int = 0
    """Peak of activations, gradients and everything else that lives only during a step."""
    other: int = 0
    """Code, padding of the arguments to tiles, and results that do not reuse arguments' memory."""

    @property
    def peak(self) -> int:
        """Sum of all parts."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Exchange:
    """All collectives in a step that have the same kind, network, mesh axes and group size."""

    kind: str
    network: str
    axes: tuple[str, ...]
    group_size: int
    runs: int
    bytes: int
    """Bytes per device in a step: the sum of `Collective.bytes` over all runs."""


@dataclass(frozen=True)
class Plan:
    """The compiled train step of a phase on a topology, or the reason why it does not fit."""

    config: PretrainConfig
    phase: int
    topology: Topology
    mesh_shape: dict[str, int]
    """Mesh axes and their sizes, in the order of `mesh.devices`."""
    memory: Memory
    """Memory of the step. If it does not fit, `other` is 0; the error gives `temporaries`."""
    usable: int
    """Bytes of a device's memory that a program may use."""
    refused: str = ""
    """Reason why the step does not fit, usually the compiler's error message; empty if it fits."""
    needs: int = 0
    """Bytes that the step needs on a device if it does not fit, else 0."""
    program: Program | None = None
    cost: Cost | None = None
    """Predicted time. `program` and `cost` are None if the step does not fit."""
    lowering_seconds: float = 0.0
    compile_seconds: float = 0.0
    cached: bool = False
    """Whether the result comes from the cache; `compile_seconds` is then the original time."""

    @property
    def rows(self) -> int:
        """Number of rows in a step, on all devices and in all micro-batches."""
        return self.config.training.phases[self.phase].batch_size

    @property
    def length(self) -> int:
        """Number of tokens in a row."""
        return self.config.training.phases[self.phase].length

    @property
    def accumulation(self) -> int:
        """Number of micro-batches in a step."""
        return self.config.accumulation_of(self.phase)

    @property
    def fits(self) -> bool:
        """Whether the step fits into a device's memory."""
        return not self.refused

    @property
    def peak(self) -> int:
        """Peak bytes on a device, which may be more than the device has."""
        return max(self.memory.peak, self.needs)

    @property
    def rows_per_chip(self) -> float:
        """Rows per chip in a micro-batch, which determine the memory for activations."""
        return self.rows / self.accumulation / self.topology.num_chips

    @property
    def seconds(self) -> float | None:
        """Predicted time of one step."""
        return None if self.cost is None else self.cost.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second on all chips together, padding included."""
        return self.seconds and self.rows * row_tokens(self.config, self.phase) / self.seconds

    @property
    def flops(self) -> int:
        """Model FLOPs of all rows of a step."""
        return self.rows * row_flops(self.config, self.phase)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: model FLOPs per second, divided by the chips' bfloat16 peak."""
        return self.seconds and self.flops / (self.seconds * self.topology.bf16_flops)

    @property
    def ideal_seconds(self) -> float:
        """Time that a step would take at an MFU of 100%."""
        return self.flops / self.topology.bf16_flops

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Collectives grouped by kind, network, mesh axes and group size; most bytes first."""
        groups = defaultdict(list)
        for c in self.program.collectives if self.program else ():
            groups[c.kind, c.network, c.axes, c.group_size].append(c)
        found = [
            Exchange(*key, sum(c.runs for c in group), sum(c.runs * c.bytes for c in group))
            for key, group in groups.items()
        ]
        return tuple(sorted(found, key=lambda e: -e.bytes))


def default_cache() -> Path:
    """Return the directory of compiled programs, which is under XDG_CACHE_HOME or ~/.cache."""
    return cache_directory("plan")


def with_vocabulary(config: PretrainConfig) -> tuple[PretrainConfig, str]:
    """Fill in the model's sizes; return the configuration and a line on the vocabulary size."""
    config, start = resolve_start(config, read_model)
    if start.initial is not None:
        config = config.with_vocabulary(start.initial.tokenizer.vocab_size)
    size, source = config.model.vocab_size, ", as configured"
    path, data = config.data.corpus, dataclasses.replace(config.data, read_timeout=SHORT_TIMEOUT)
    if path and (store_openers(path, data) if scheme(path) else Path(path).exists()):
        size, source = open_corpus(path, data).train.vocab_size, ", from the corpus"
    elif not size:
        size, source = ASSUMED_VOCAB_SIZE, " assumed (no corpus; set model.vocab_size)"
    return config.with_vocabulary(size), f"vocabulary: {size:,} tokens{source}"


def compile_step(
    config: PretrainConfig, phase: int, topology: Topology, *, cache: Path | None
) -> Plan:
    """Lower and compile the train step of one phase, and estimate its time, without running it.

    `config` must have a vocabulary size (see `with_vocabulary`). `cache` is the directory in which
    the compiler's results are looked up and stored. If `cache` is None, nothing is cached. Raise a
    UserError if the mesh or the batch does not fit the devices, or libtpu is missing.
    """
    mesh = make_mesh(config.mesh, devices(topology))
    shape = config.training.phases[phase]
    parts, where = config.accumulation_of(phase), f"training.phases[{phase}].batch_size"
    check_batch_size(shape.batch_size, mesh, parts, where)
    settings = _planned_step(config, phase)
    state = abstract_state(settings, mesh)
    batch = {
        name: jax.ShapeDtypeStruct((shape.batch_size, *row), dtype, sharding=batch_sharding(mesh))
        for name, (row, dtype) in _columns(config, phase).items()
    }
    known = Memory(
        parameters=bytes_on_device(state.params),
        optimizer=bytes_on_device(state._replace(params=None)), batch=bytes_on_device(batch),
    )  # fmt: skip
    plan = Plan(config, phase, topology, dict(mesh.shape), known, usable_bytes(topology))
    if known.peak > plan.usable:  # no need to ask the compiler
        words = "parameters, optimizer and batch by themselves exceed the memory"
        return dataclasses.replace(plan, refused=words, needs=known.peak)
    begun = time.perf_counter()
    step: Any = make_train_step(settings, mesh)  # a jitted function
    lowered = step.lower(state, batch)
    lowering_seconds = time.perf_counter() - begun
    path = None if cache is None else cache / f"{_key(lowered.as_text(), topology, mesh)}.zst"
    kept = path and _read(path)
    answer = kept or _compile(lowered)
    if path and not kept:
        _write(path, answer)
    memory, stats = known, answer["memory"]
    program = cost = None
    if stats:
        program = parse_program(answer["hlo"], plan.mesh_shape)
        cost = estimate(program, topology.chip, topology.shape)
        other = stats["argument"] - known.peak + stats["output"] - stats["alias"] + stats["code"]
        memory = dataclasses.replace(known, temporaries=stats["temp"], other=other)
    needs, has = _needs_and_has(answer["refused"])
    if needs and "HLO temporaries" in answer["refused"]:  # these exclude the arguments
        needs += known.peak
    if needs:
        memory = dataclasses.replace(known, temporaries=max(needs - known.peak, 0))
    return dataclasses.replace(
        plan, memory=memory, usable=has or plan.usable, refused=answer["refused"], needs=needs,
        program=program, cost=cost, lowering_seconds=lowering_seconds,
        compile_seconds=answer["seconds"], cached=bool(kept),
    )  # fmt: skip


def usable_bytes(topology: Topology) -> int:
    """Return the bytes of a device's memory that a program may use.

    On v5e, out-of-memory errors state 15.75 of 16 GiB. The same share is assumed for other chips.
    """
    return int(topology.chip.hbm_bytes / topology.chip.devices_per_chip * 15.75 / 16)


def row_flops(config: PretrainConfig, phase: int) -> int:
    """Count the model FLOPs of one row of a phase in a training step."""
    columns = _columns(config, phase).items()
    rows = {name: jax.ShapeDtypeStruct((1, *row), dtype) for name, (row, dtype) in columns}
    return objective_of(config, phase).flops(rows)


def row_tokens(config: PretrainConfig, phase: int) -> int:
    """Count the token positions in one row of a phase (in translation, source and target)."""
    columns = _columns(config, phase).items()
    return sum(math.prod(row) for name, (row, _) in columns if name.endswith("tokens"))


def _columns(config: PretrainConfig, phase: int) -> dict[str, Column]:
    length, tokens = config.training.phases[phase].length, token_dtype(config.model.vocab_size)
    columns = PAIRINGS[config.data.pairing].columns(config.data, length, tokens)
    return {**columns, "row_index": Column((), np.dtype(np.uint32))}


def _planned_step(config: PretrainConfig, phase: int) -> Any:
    if config.model.dtype == "auto":  # `auto` would follow the default backend, here the CPU
        model = dataclasses.replace(config.model, dtype="bfloat16")
        config = dataclasses.replace(config, model=model)
    there = config.data.corpus and Path(config.data.corpus).exists()
    return step_config(config, open_corpus(config.data.corpus) if there else None, phase)


def _compile(lowered: Any) -> dict[str, Any]:
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        # Dump only the module of the step, not the modules that the compiler extracts from it.
        options = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True,
                   "xla_dump_hlo_module_re": "jit_"}  # fmt: skip
        try:
            compiled = lowered.compile(compiler_options=options)
        except Exception as error:  # XlaRuntimeError or its successor, recognised by its message
            message = str(error)
            if "RESOURCE_EXHAUSTED" not in message or _needs_and_has(message)[0] == 0:
                raise
            refused, text, memory = message.split("\n\n")[0][:2000], "", None
        else:
            refused, text = "", _program_text(compiled, Path(directory))
            stats = compiled.memory_analysis()
            memory = {
                "argument": stats.argument_size_in_bytes, "output": stats.output_size_in_bytes,
                "alias": stats.alias_size_in_bytes, "temp": stats.temp_size_in_bytes,
                "code": stats.generated_code_size_in_bytes,
            }  # fmt: skip
    seconds = time.perf_counter() - begun
    return {"refused": refused, "seconds": seconds, "memory": memory, "hlo": text}


def _program_text(compiled: Any, directory: Path) -> str:
    """Return the optimised program's text; if XLA cannot print it, read the dump in `directory`."""
    try:
        with quiet():
            return str(compiled.as_text())
    except Exception:
        # XLA (of jax 0.10) cannot read back a program in which a collective on a SparseCore takes
        # an argument while under way ("async-update instruction should have 1 operands").
        written = sorted(directory.glob("*.after_codegen.txt"))
        if len(written) != 1:
            raise
        return written[0].read_text()


def _needs_and_has(message: str) -> tuple[int, int]:
    """Parse the bytes (needed, available) in an out-of-memory error. Return (0, 0) if it has none.

    The bytes in "Used 30.1G of 15.75G hbm" include everything. "HLO temporaries (99.69G) exceeds
    available HBM (15.75G)" comes from an earlier compiler stage and excludes the arguments.
    """
    for pattern in (
        r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
        r"HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
    ):
        if match := re.search(pattern, message):
            number, unit, limit, limit_unit = match.groups()
            return int(float(number) * _UNITS[unit]), int(float(limit) * _UNITS[limit_unit])
    return 0, 0


def _key(stablehlo: str, topology: Topology, mesh: Any) -> str:
    """Return the cache key: a hash of everything on which the compiler's result depends."""
    digest = hashlib.sha256()
    for package in ("jax", "jaxlib", "libtpu"):
        versions = [each.version for each in metadata.distributions(name=package)]
        digest.update(f"{package} {versions}\n".encode())
    order = ",".join(str(device.id) for device in mesh.devices.flat)
    digest.update(f"{topology.name} {dict(mesh.shape)} {order}\n".encode())
    digest.update(os.environ.get("LIBTPU_INIT_ARGS", "").encode())
    # A cached program names source lines, which `stablehlo` lacks: add the sources to the key.
    package_root = Path(__file__).parent.parent
    rooms = [package_root / room for room in ("model", "objectives", "distributed", "training")]
    for source in sorted(path for room in rooms for path in room.glob("**/*.py")):
        digest.update(source.read_bytes())
    digest.update(stablehlo.encode())
    return digest.hexdigest()[:40]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        answer = json.loads(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
        path.touch()  # the least recently used files are removed first
    except (OSError, ValueError, zstandard.ZstdError):
        return None
    return answer if isinstance(answer, dict) else None


def _write(path: Path, answer: Mapping[str, Any]) -> None:
    """Cache a result; if needed, evict the least recently used results. Ignore disk errors."""
    with contextlib.suppress(OSError, UserError):
        replace_file(path, zstandard.ZstdCompressor().compress(json.dumps(answer).encode()))
        kept = 0
        for entry in sorted(path.parent.glob("*.zst"), key=lambda p: -p.stat().st_mtime):
            kept += entry.stat().st_size
            if kept > _CACHE_BYTES:
                entry.unlink(missing_ok=True)

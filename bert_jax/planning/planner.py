"""Search for settings by compiling the full model or a model with fewer layers.

`on_paper` estimates the cost of candidates to rank them before any compilation. Activations per
layer and recomputation follow Korthikanti et al. 2022; bytes of state per parameter follow
Rajbhandari et al. 2019. Rates come from `chips.py`, and efficiencies, rounded, from compiled steps.
"""

import dataclasses
import math
import sys
import time
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.objectives.objective import num_frozen, num_params
from bert_jax.planning import search
from bert_jax.planning.compile import Plan, compile_step, row_flops, usable_bytes
from bert_jax.planning.hlo_cost.cost import estimate
from bert_jax.planning.search import Guess, Pace, Settings, settings_of
from bert_jax.planning.topology import Topology, devices
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.settings import objective_of, step_config
from bert_jax.training.steps.state import StepConfig, param_placement

LEAST_DEPTH = 2
"""Smallest number of layers to compile when the cost of a deeper model is extrapolated."""
PARTS = 13
"""Number of micro-batches in the steps that `pace` compiles. No other loop has this prime length,
so an operation that runs a multiple of 13 times is in the loop over micro-batches."""
PACE_TOKENS = (4096, 8192, 16384, 32768)
"""Sizes of a device's micro-batch that `pace` tries, in tokens."""
USUAL_TOKENS = 2**19
"""Number of tokens in a typical step of BERT pretraining: 4,096 rows of 128 tokens."""
_MATMUL_EFFICIENCY = 0.6
_RECOMPUTED = {"none": 1.0, "dots": 1.1, "full": 1.33}
_EXPOSED = 0.5
"""Fraction of the time of gathers and reductions that does not overlap with computation."""
_KEPT_TENSORS = {"none": (10, 16), "dots": (3, 7), "full": (1, 0)}
"""Numbers of bfloat16 activations of width D kept per token and layer, by `remat`: activations that
every device holds in full, and activations that tensor parallelism divides among devices."""


class Planner:
    """Planner of one phase of a configuration on one topology, with a cache of its compilations.

    In all methods, `rows_per_shard` is the number of rows of a micro-batch on one batch shard.
    """

    def __init__(
        self, config: PretrainConfig, phase: int, topology: Topology, *, cache: Path | None
    ):
        """Store the arguments; `config` must have a vocabulary size."""
        self.config, self.phase, self.topology, self.cache = config, phase, topology, cache
        self.length = config.training.phases[phase].length
        self.configured = settings_of(config, phase, topology.num_devices)
        self._plans: dict[tuple[Settings, int], Plan] = {}

    @property
    def usable(self) -> int:
        """Usable bytes of a device, from the last compilation or, before the first, an estimate."""
        named = [plan.usable for plan in self._plans.values()]
        return named[-1] if named else usable_bytes(self.topology)

    def plan(self, settings: Settings, num_layers: int | None = None) -> Plan:
        """Compile the step with these settings and `num_layers` layers (default: all layers)."""
        layers = self.config.model.num_layers
        depth = num_layers or layers
        if (settings, depth) not in self._plans:
            config = settings.apply(self.config, self.phase)
            model = dataclasses.replace(config.model, num_layers=depth)
            distil = dataclasses.replace(config.distil, layers=config.distil.layers[:depth])
            config = dataclasses.replace(config, model=model, distil=distil)
            part = "" if depth == layers else f", {depth} of {layers} layers"
            line = (
                f"[plan] compiling {self.topology.name} phase {self.phase}: fsdp {settings.fsdp}, "
                f"tensor {settings.tensor}, {settings.rows} rows, accumulation "
                f"{settings.accumulation}, remat {settings.remat}{part} ..."
            )
            print(line, end="", file=sys.stderr, flush=True)
            begun = time.perf_counter()
            try:
                plan = compile_step(config, self.phase, self.topology, cache=self.cache)
            finally:
                print(f" {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
            self._plans[settings, depth] = plan
        return self._plans[settings, depth]

    def whole(self, settings: Settings, num_layers: int | None = None) -> Guess:
        """Compile with `num_layers` layers (default: all layers), and return the cost."""
        plan = self.plan(settings, num_layers)
        return Guess(self._peak(plan), plan.seconds or 0.0)

    def _peak(self, plan: Plan) -> int:
        """Return the plan's peak bytes; if the step does not fit, more than the usable bytes."""
        limit = max(plan.usable, usable_bytes(self.topology))
        return plan.peak if plan.fits else max(plan.peak, limit + 1)

    def reduced(self, settings: Settings) -> Guess:
        """Compile with two small numbers of layers, and extrapolate linearly to all layers.

        If the layers run in a loop, compile all of them, which takes no longer.
        """
        layers = self.config.model.num_layers
        depths = two_depths(self.config.model, LEAST_DEPTH)
        if settings.scan_unroll < layers or layers <= depths[1]:
            return self.whole(settings)
        shallow, deeper = (self.whole(settings, depth) for depth in depths)
        more = (layers - depths[0]) / (depths[1] - depths[0])
        return Guess(
            peak=int(shallow.peak + (deeper.peak - shallow.peak) * more),
            seconds=shallow.seconds + (deeper.seconds - shallow.seconds) * more,
        )

    def mfu(self, rows: int, seconds: float) -> float:
        """Compute the MFU of a step of `rows` global rows."""
        return rows * row_flops(self.config, self.phase) / (seconds * self.topology.bf16_flops)

    def rows_per_chip(self, settings: Settings, rows_per_shard: int) -> float:
        """Convert rows per shard to rows per chip. A shard may be smaller or larger than a chip."""
        return rows_per_shard * (self.topology.chip.devices_per_chip / settings.tensor)

    def settings_that_fit(self) -> search.Found | None:
        """Find the fastest mesh, accumulation and rematerialisation for the configured batch."""
        choices = search.candidates(
            self.config, self.phase, self.topology.num_devices,
            num_slices=self.topology.num_slices, possible=self._mesh_is_possible,
        )  # fmt: skip
        paper = partial(on_paper, self.config, self.phase, self.topology)
        return search.fastest_that_fits(choices, paper, self.reduced, self.whole, self.usable)

    def fit(self, settings: Settings) -> search.Fit:
        """Find the largest batch for the mesh, accumulation and rematerialisation of `settings`."""

        def measured(measure: search.Measure, rows: int) -> Guess:
            return measure(self.with_batch(settings, rows, settings.accumulation))

        guess = rows_that_may_fit(self.config, self.phase, self.topology, settings, self.usable)
        reduced, whole = partial(measured, self.reduced), partial(measured, self.whole)
        return search.largest_batch(reduced, whole, self.usable, guess)

    def pace(self, settings: Settings) -> Pace | None:
        """Find the fastest micro-batch size and accumulation that fit on the mesh of `settings`.

        Extrapolate the cost from two small depths (see `reduced`). Return None if nothing fits.
        """
        layers = self.config.model.num_layers
        depths: tuple[int, ...] = two_depths(self.config.model, 1)
        if not settings.scan_unroll >= layers > depths[1]:
            depths = (layers,)

        def measure(rows: int) -> search.Pass:
            parts = self.with_batch(settings, rows, PARTS)
            passes = []
            for depth in depths:
                plan = self.plan(parts, depth)
                if plan.program is None or plan.cost is None:
                    return search.Pass(self._peak(plan), 0.0, 0.0)
                inside: dict[str, Any] = {
                    name: tuple(
                        dataclasses.replace(item, runs=item.runs // PARTS)
                        for item in getattr(plan.program, name)
                        if item.runs and item.runs % PARTS == 0
                    )
                    for name in ("ops", "collectives", "transfers")
                }
                one = dataclasses.replace(plan.program, **inside)  # a single micro-batch
                part = estimate(one, self.topology.chip, self.topology.shape).seconds
                once = plan.cost.seconds - PARTS * part
                passes.append((plan.memory.peak, part, once))
            first, last = passes[0], passes[-1]
            more = (layers - depths[0]) / max(depths[-1] - depths[0], 1)
            peak, part, once = (a + (b - a) * more for a, b in zip(first, last, strict=True))
            return search.Pass(int(peak), part, once)

        ladder = [tokens // self.length for tokens in PACE_TOKENS if tokens >= self.length]
        return search.fastest_pace(measure, ladder, self.usable)

    def usual(self, settings: Settings, pace: Pace) -> Settings:
        """Return settings for a step of about `USUAL_TOKENS` tokens (see `split`)."""
        rows = USUAL_TOKENS // self.length
        unit = self.rows(dataclasses.replace(settings, accumulation=1), pace.rows)
        return self.split(settings, pace, round(rows / unit) * unit if rows > unit else rows)

    def split(self, settings: Settings, pace: Pace, rows: int) -> Settings:
        """Return settings for at most `rows` rows per step. `pace` limits the micro-batch size."""
        mine = max(1, rows * settings.tensor // self.topology.num_devices)
        parts = next(n for n in range(math.ceil(mine / pace.rows), mine + 1) if mine % n == 0)
        return self.with_batch(settings, mine // parts, parts)

    def with_batch(self, settings: Settings, rows_per_shard: int, accumulation: int) -> Settings:
        """Return the settings with these rows per shard and this number of micro-batches."""
        settings = dataclasses.replace(settings, accumulation=accumulation)
        return dataclasses.replace(settings, rows=self.rows(settings, rows_per_shard))

    def rows(self, settings: Settings, rows_per_shard: int) -> int:
        """Count the rows of a step on all devices, in all micro-batches of `settings`."""
        shards = self.topology.num_devices // settings.tensor
        return rows_per_shard * shards * settings.accumulation

    @cached_property
    def _step(self) -> StepConfig:
        return step_config(self.config, None, self.phase)

    def _mesh_is_possible(self, settings: Settings) -> bool:
        """Return true if the mesh suits the torus and all parameters, including a teacher's."""
        mesh, step = MeshConfig(fsdp=settings.fsdp, tensor=settings.tensor), self._step
        try:
            param_placement(step, make_mesh(mesh, devices(self.topology)))
        except (UserError, NotImplementedError):
            return False
        return True


def two_depths(model: ModelConfig, least: int) -> tuple[int, int]:
    """Return two depths >= `least` that differ by whole periods of the attention pattern."""
    period = len(model.attention_pattern)
    first = least + (model.num_layers - least) % period
    return first, first + max(period, least)


def on_paper(config: PretrainConfig, phase: int, topology: Topology, settings: Settings) -> Guess:
    """Estimate the peak bytes of a device and the seconds of a step, without a compilation."""
    model, device = config.model, topology.chip.per_device
    length = config.training.phases[phase].length
    shards = topology.num_devices // settings.tensor
    rows = settings.rows / shards / settings.accumulation  # of a micro-batch, on one device
    parameters, frozen = _num_params(config)
    layers = 12 * model.num_layers * model.hidden_dim**2
    split = settings.fsdp * settings.tensor

    states = (16 * parameters + 4 * frozen) / split  # a teacher has no moments
    if settings.accumulation > 1:
        states += 4 * parameters / (split if settings.fsdp > 1 else settings.tensor)
    if settings.fsdp > 1:  # gathered: parameters outside the layers, and one or two layers
        states += (parameters - layers) * 6 / settings.tensor
        states += 3 * 4 * layers / model.num_layers / settings.tensor
    everywhere, divided = _KEPT_TENSORS[settings.remat]
    token_bytes = 2 * length * model.hidden_dim
    layer = token_bytes * (everywhere + divided / settings.tensor)
    # While a layer is recomputed, all activations of this layer are in memory.
    once = 0.0 if settings.remat == "none" else token_bytes * (10 + 16 / settings.tensor)
    masked = config.masking_of(phase).num_predictions(length)
    head = 8 * masked * model.padded_vocab_size / settings.tensor
    peak = states + rows * (layer * model.num_layers + once + head)

    flops = settings.rows * row_flops(config, phase) / topology.num_devices
    narrow = 1 + 256 / max(rows * length, 1.0)  # few rows give matrices with one short side
    rate = device.bf16_flops * _MATMUL_EFFICIENCY
    compute = flops / rate * _RECOMPUTED[settings.remat] * narrow
    update = 28 * parameters / split / device.hbm_bytes_per_s
    link = device.ici_bytes_per_s / 2
    exchanged = 0.0
    if shards > 1:  # the gradients' reduction, once a step
        exchanged += 4 * 2 * parameters / settings.tensor * _EXPOSED
    if settings.fsdp > 1:  # gathers in the forward and backward pass of every micro-batch
        gathered = 2 * parameters + frozen  # a teacher has no backward pass
        exchanged += 2 * gathered / settings.tensor * settings.accumulation * _EXPOSED
    if settings.tensor > 1:  # four sums of activations per layer; all devices wait
        share = (settings.tensor - 1) / settings.tensor
        exchanged += 4 * 2 * share * rows * token_bytes * model.num_layers * settings.accumulation
    overhead = 2e-4 * settings.accumulation
    return Guess(int(peak), compute + update + exchanged / link + overhead)


@lru_cache(maxsize=8)
def _num_params(config: PretrainConfig) -> tuple[int, int]:
    objective = objective_of(config)
    return num_params(objective), num_frozen(objective)


def rows_that_may_fit(
    config: PretrainConfig, phase: int, topology: Topology, settings: Settings, usable: int
) -> int:
    """Estimate the largest number of rows per batch shard that fits `usable` bytes; at least 2."""
    shards = topology.num_devices // settings.tensor

    def peak(rows: int) -> int:
        wanted = dataclasses.replace(settings, accumulation=1, rows=rows * shards)
        return on_paper(config, phase, topology, wanted).peak

    per_row = peak(2) - peak(1)
    return max(2, int((usable - peak(1)) / per_row) + 1)

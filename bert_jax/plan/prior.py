"""Estimated memory and time of a step, to order candidates before any compilation.

Source of the counts: Korthikanti et al. 2022 (activations per layer, recomputation), Rajbhandari et
al. 2019 (bytes of state per parameter). Rates come from `chips.py`; efficiencies are round numbers
near the values of compiled steps.
"""

import dataclasses
from functools import lru_cache

from bert_jax.objectives.objective import num_frozen, num_params
from bert_jax.plan.compile import row_flops
from bert_jax.plan.search import Guess, Settings
from bert_jax.plan.topology import Topology
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.settings import objective_of

_MATMUL_EFFICIENCY = 0.6
_RECOMPUTED = {"none": 1.0, "dots": 1.1, "full": 1.33}
_EXPOSED = 0.5
"""Share of gathers and reductions that no compute hides."""
_KEPT_TENSORS = {"none": (10, 16), "dots": (3, 7), "full": (1, 0)}
"""Number of bfloat16 activations of width D kept per token and layer: on every device, and divided
by tensor parallelism."""


def on_paper(config: PretrainConfig, phase: int, topology: Topology, settings: Settings) -> Guess:
    """Estimate the peak bytes of a device and the seconds of a step."""
    model, chip = config.model, topology.chip
    devices = topology.num_devices
    per_device = 1 / chip.devices_per_chip
    length = config.training.phases[phase].length
    shards = devices // settings.tensor
    rows = settings.rows / shards / settings.accumulation  # of a micro-batch, on one device
    parameters, frozen = _num_params(config)
    layers = 12 * model.num_layers * model.hidden_dim**2
    split = settings.fsdp * settings.tensor

    states = (16 * parameters + 4 * frozen) / split  # a teacher has no moments
    if settings.accumulation > 1:
        states += 4 * parameters / (split if settings.fsdp > 1 else settings.tensor)
    if settings.fsdp > 1:  # what is outside the layers is gathered whole, and a layer or two
        states += (parameters - layers) * 6 / settings.tensor
        states += 3 * 4 * layers / model.num_layers / settings.tensor
    everywhere, divided = _KEPT_TENSORS[settings.remat]
    width = everywhere + divided / settings.tensor
    token_bytes = 2 * length * model.hidden_dim
    layer = token_bytes * width
    # While one layer is recomputed, all its activations are in memory.
    once = 0.0 if settings.remat == "none" else token_bytes * (10 + 16 / settings.tensor)
    masked = config.of_phase(phase).masking.num_predictions(length)
    head = 8 * masked * model.padded_vocab_size / settings.tensor
    peak = states + rows * (layer * model.num_layers + once + head)

    flops = settings.rows * row_flops(config, phase) / devices
    tokens = max(rows * length, 1.0)
    narrow = 1 + 256 / tokens  # few rows a device: products with a short side
    compute = (
        flops / (chip.bf16_flops * per_device * _MATMUL_EFFICIENCY)
        * _RECOMPUTED[settings.remat] * narrow
    )  # fmt: skip
    update = 28 * parameters / split / (chip.hbm_bytes_per_s * per_device)
    link = chip.ici_bytes_per_s * per_device / 2
    exchanged = 0.0
    if shards > 1:  # the gradients' reduction, once a step
        exchanged += 4 * 2 * parameters / settings.tensor * _EXPOSED
    if settings.fsdp > 1:  # gathers in the forward and backward pass of every micro-batch
        gathered = 2 * parameters + frozen  # a teacher has no backward pass
        exchanged += 2 * gathered / settings.tensor * settings.accumulation * _EXPOSED
    if settings.tensor > 1:  # four sums over activations a layer, which everything waits for
        share = (settings.tensor - 1) / settings.tensor
        exchanged += 4 * 2 * share * rows * token_bytes * model.num_layers * settings.accumulation
    network = exchanged / link
    overhead = 2e-4 * settings.accumulation
    return Guess(int(peak), compute + update + network + overhead)


@lru_cache(maxsize=8)
def _num_params(config: PretrainConfig) -> tuple[int, int]:
    """Count the parameters that are trained, and the parameters of a teacher."""
    objective = objective_of(config)
    return num_params(objective), num_frozen(objective)


def rows_that_may_fit(
    config: PretrainConfig, phase: int, topology: Topology, settings: Settings, usable: int
) -> int:
    """Estimate the rows per batch shard that fill `usable` bytes; at least 2."""
    shards = topology.num_devices // settings.tensor

    def peak(rows: int) -> int:
        wanted = dataclasses.replace(settings, accumulation=1, rows=rows * shards)
        return on_paper(config, phase, topology, wanted).peak

    per_row = peak(2) - peak(1)
    return max(2, int((usable - peak(1)) / per_row) + 1)

"""The trials of a sweep on a mesh: their initial state, saved state and memory.

A trial is a run with its own parameters, learning rate, seed and order of examples. All trials have
equal shapes, so one compiled step trains them together: axis 0 of every array runs over trials.
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from bert_jax.distributed.parallel.sharding import ROW_SPEC, TRIAL, batch_sharding, num_batch_shards
from bert_jax.errors import UserError
from bert_jax.objectives.objective import Batch, trained, trains_all, with_trained
from bert_jax.training.steps.guard import GuardState
from bert_jax.training.steps.state import (
    StepConfig,
    TrainState,
    abstract_state,
    fresh_state,
    state_from,
    state_shardings,
    with_shardings,
)
from bert_jax.training.steps.step import Settings


class SweepState(NamedTuple):
    """State of all trials; every array has trials on axis 0."""

    step: Any
    params: Any
    """All parameters. In a checkpoint, only the trained parameters."""
    opt_state: Any
    guard: GuardState
    best: Any
    """Trained parameters at each trial's best evaluation so far."""

    @property
    def train(self) -> TrainState:
        """State in the form that the training step takes: all fields except `best`."""
        return TrainState(self.step, self.params, self.opt_state, self.guard)


def place_settings(
    rates: Sequence[float], seeds: Sequence[int], mesh: Mesh, head_rate: float | None = None
) -> Settings:
    """Put the trials' learning rates, seeds and, if given, the rate of all heads onto the mesh."""
    put = partial(place_trials, mesh=mesh)
    own = np.array(rates, np.float32)
    of_head = None if head_rate is None else put(np.full_like(own, head_rate))
    return Settings(put(own), put(np.array(seeds, np.uint32)), of_head)


def place_trials(values: np.ndarray, mesh: Mesh) -> jax.Array:
    """Put one value per trial onto the mesh; every process passes the values of all trials."""
    return _place(values, NamedSharding(mesh, PartitionSpec(TRIAL)))


def place_params(config: StepConfig, mesh: Mesh, params: Any) -> Any:
    """Put parameters with trials on axis 0 onto the mesh; every process passes all trials."""
    return jax.tree.map(_place, params, state_shardings(config, mesh).params)


def place_rows(batch: Batch, mesh: Mesh, accumulation: int = 1) -> dict[str, jax.Array]:
    """Put a training batch (M trials, B, ...) or an evaluation batch (B, ...) onto the mesh.

    Rows of weight 0 are added until the batch divides evenly over the mesh and the micro-batches.
    """
    rows_axis = batch["row_index"].ndim - 1
    sharding = batch_sharding(mesh) if rows_axis else NamedSharding(mesh, ROW_SPEC)
    missing = -batch["row_index"].shape[-1] % (num_batch_shards(mesh) * accumulation)

    def filled(name: str, array: np.ndarray) -> np.ndarray:
        if not missing:
            return array
        last = np.take(array, [-1], axis=rows_axis)
        fill = np.zeros_like(last) if name == "weights" else last
        return np.concatenate([array, *[fill] * missing], axis=rows_axis)

    return {name: _place(filled(name, array), sharding) for name, array in batch.items()}


def _place(array: Any, sharding: NamedSharding) -> jax.Array:
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def init_trials(
    config: StepConfig, mesh: Mesh, seeds: np.ndarray, starts: Sequence[Any], which: np.ndarray
) -> SweepState:
    """Make the state of trials before their first step; `mesh` is a mesh of trials.

    Args:
        seeds: Seeds (M,) of the M trials' random weights, uint32.
        starts: For each initialisation, a dict of parameters by part, such as `encoder`. Parts and
            entries that the dict lacks, such as a pooler, are random; {} makes all weights random.
        which: Index in `starts` of each trial's initialisation (M,).
    """

    def one(seed: Array, number: Array, starts: Sequence[Any]) -> Any:
        fresh = config.objective.init(jax.random.key(seed))
        whole = [
            fresh
            | {n: fresh[n] | new if isinstance(new, dict) else new for n, new in start.items()}
            for start in starts
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves, dtype=jnp.float32)[number], *whole)

    def states(seeds: Array, which: Array, starts: Sequence[Any]) -> SweepState:
        params = jax.vmap(one, in_axes=(0, 0, None))(seeds, which, starts)
        state = jax.vmap(partial(state_from, config))(params)
        return SweepState(*state, trained_of_trials(config, params))

    # A program that runs on several devices cannot take arrays that are on a single device.
    given = jax.tree.map(np.asarray, list(starts))
    shardings = state_shardings(config, mesh)
    best = trained(config.objective, shardings.params)
    make = jax.jit(states, out_shardings=SweepState(*shardings, best))
    return make(np.asarray(seeds, np.uint32), np.asarray(which, np.int32), given)


def abstract_trials(config: StepConfig, mesh: Mesh, num_trials: int) -> SweepState:
    """Return shape, type and sharding of each array of a sweep."""
    state = abstract_state(config, mesh, num_trials)
    shapes = jax.eval_shape(partial(trained_of_trials, config), state.params)
    shardings = trained(config.objective, state_shardings(config, mesh).params)
    return SweepState(*state, with_shardings(shapes, shardings))


def trained_of_trials(config: StepConfig, params: Any) -> Any:
    """Return the trained parameters; axis 0 is the trial of the sweep. Call this inside jit."""
    return jax.vmap(partial(trained, config.objective))(params)


def to_save(config: StepConfig, mesh: Mesh, state: SweepState) -> SweepState:
    """Return a state to be saved, without frozen parameters: a restart initialises them again."""
    if trains_all(config.objective):
        return state
    shardings = trained(config.objective, state_shardings(config, mesh).params)
    cut = jax.jit(partial(trained_of_trials, config), out_shardings=shardings)
    return state._replace(params=cut(state.params))


def from_saved(
    config: StepConfig, mesh: Mesh, saved: SweepState, begin: Callable[[], SweepState]
) -> SweepState:
    """Add to a saved state the frozen parameters of the initial state that `begin` makes."""
    if trains_all(config.objective):
        return saved
    return saved._replace(params=filled(config, mesh, begin().params, saved.params))


def filled(config: StepConfig, mesh: Mesh, params: Any, part: Any) -> Any:
    """Replace the trained part of the parameters, in every trial, with `part`."""
    if trains_all(config.objective):
        return part
    fill = jax.jit(
        jax.vmap(partial(with_trained, config.objective)),
        out_shardings=state_shardings(config, mesh).params,
    )
    return fill(params, part)


def stop_trials(state: TrainState, stopped: np.ndarray, mesh: Mesh) -> TrainState:
    """Halt the trials selected by `stopped` (M,), as the guard does: no later step trains them."""
    halt = jax.jit(jnp.maximum, out_shardings=state.guard.halted.sharding)
    halted = halt(state.guard.halted, place_trials(stopped.astype(np.int32), mesh))
    return state._replace(guard=state.guard._replace(halted=halted))


def check_memory(config: StepConfig, mesh: Mesh, num_trials: int) -> None:
    """Check that the parameters and moments of simultaneous trials fit the memory of a device.

    Raise a UserError if they do not fit. The message gives the largest number of trials that fits.
    """
    device = mesh.local_mesh.devices.flat[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if device.platform == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.local_mesh.size
    groups = mesh.shape[TRIAL]
    one = bytes_on_device(abstract_trials(config, mesh, groups))
    needed = one * num_trials // groups
    if limit is not None and needed > limit:
        raise UserError(
            f"{num_trials:,} runs at once need {needed / 2**30:,.1f} GiB on each device for "
            f"weights and optimizers; a device has {limit / 2**30:,.1f} GiB. Set "
            + f"sweep.at_once to {limit // one * groups:,}, or " * (limit >= one)
            + f"mesh.fsdp above {mesh.shape['fsdp']}, or training.freeze or lora.rank"
        )


class StateSizes(NamedTuple):
    """Sizes of the state of one run, over all devices."""

    trained: int
    """Number of parameters that a step changes."""
    params: int
    """Total number of parameters."""
    param_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    """Bytes of a saved state: trained parameters (newest and best), and the optimizer's state."""


def state_sizes(config: StepConfig) -> StateSizes:
    """Count the parameters and bytes of a run."""
    state = jax.eval_shape(partial(fresh_state, config), jax.random.key(0))
    part = jax.eval_shape(partial(trained, config.objective), state.params)
    (part_count, part_bytes), (count, param_bytes), (_, moments) = (
        (sum(leaf.size for leaf in leaves), sum(leaf.size * leaf.dtype.itemsize for leaf in leaves))
        for leaves in map(jax.tree.leaves, (part, state.params, state.opt_state))
    )
    return StateSizes(part_count, count, param_bytes, moments, 2 * part_bytes + moments)


def bytes_on_device(tree: Any) -> int:
    """Count the bytes that abstract arrays with shardings take on each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * int(leaf.dtype.itemsize)
        for leaf in jax.tree.leaves(tree)
    )


def make_keep_best(config: StepConfig, mesh: Mesh) -> Callable[[Any, Any, Array], Any]:
    """Make the jitted function `(best, params, better) -> best`, which donates `best`.

    The bool array `better` (M,) selects the trials whose trained parameters are copied to `best`.
    """

    def keep(best: Any, params: Any, better: Array) -> Any:
        def one(new: Any, old: Any, better: Array) -> Any:
            return jax.tree.map(partial(jnp.where, better), new, old)

        return jax.vmap(one)(trained_of_trials(config, params), best, better)

    shardings = trained(config.objective, state_shardings(config, mesh).params)
    return jax.jit(keep, donate_argnums=0, out_shardings=shardings)

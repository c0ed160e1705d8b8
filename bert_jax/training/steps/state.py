"""The state of training: its arrays, and their placement on a mesh.

Several trials (runs that differ only in values such as seed and learning rate) may train in one
program. Axis 0 of every array then runs over the trials, and the mesh axis `trial` splits axis 0.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from bert_jax.config.bounds import Bounded, Count
from bert_jax.distributed.parallel.sharding import (
    TRIAL,
    opt_state_shardings,
    param_shardings,
    replicated,
)
from bert_jax.objectives.objective import Objective, trained
from bert_jax.training.steps.guard import GuardConfig, GuardState, fresh_guard
from bert_jax.training.steps.optim import OptimizerConfig, PhaseRate, make_optimizer
from bert_jax.training.steps.optim_parts import layer_rates, scaled

Given = TypeVar("Given", bound=Hashable)
Compiled = TypeVar("Compiled")


class TrainState(NamedTuple):
    """Everything that a step changes, as a pytree of arrays."""

    step: Any
    """Number of batches done or skipped, which is also the index of the next batch (int32)."""
    params: Any
    """Nested dict of float32 arrays, as from `Objective.init`."""
    opt_state: Any
    guard: GuardState


@dataclass(frozen=True)
class StepConfig(Bounded, section="training"):
    """Settings from which a step is compiled. The shapes come from the batch."""

    objective: Objective
    optimizer: OptimizerConfig
    num_steps: int
    """Number of steps in the run, on which the learning rate depends."""
    layer_decay: float = 1.0
    """Factor by which the learning rate falls from layer to layer (see `layer_rates`)."""
    accumulation: Count = 1
    """Number of micro-batches per step."""
    gather: Literal["layer", "step"] = "layer"
    """Schedule for gathering parameters that `fsdp` splits (see `TrainingConfig.gather`)."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are sent between devices (see `TrainingConfig.reduce_dtype`)."""
    seed: int = 0
    """Seed for corruption and dropout."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    phase_starts: tuple[int, ...] = ()
    """Index of the first batch of each phase after the first phase."""
    rate: PhaseRate | None = None
    """Learning rate of the phase; None means the run's rate."""


def made_once(settings: Sequence[Given], make: Callable[[Given], Compiled]) -> list[Compiled]:
    """Apply `make` to each of the settings. Equal settings get the same object, compiled once."""
    made = {each: make(each) for each in dict.fromkeys(settings)}
    return [made[each] for each in settings]


def optimizer_of(config: StepConfig) -> Any:
    """Make the optimizer for the parameters that are not frozen."""
    objective, axes = config.objective, config.objective.axes()
    optimizer = make_optimizer(
        config.optimizer, config.num_steps, trained(objective, axes), config.rate
    )
    if config.layer_decay == 1:
        return optimizer
    rates = layer_rates(axes, objective.model.num_layers, config.layer_decay)
    return scaled(optimizer, trained(objective, rates))


def param_placement(config: StepConfig, mesh: Mesh) -> Any:
    """Return the NamedSharding of each parameter of one run.

    Raise a UserError if a size of the model does not divide evenly over the mesh.
    """
    shapes = jax.eval_shape(config.objective.init, jax.random.key(0))
    return param_shardings(config.objective.axes(), shapes, mesh)


def state_shardings(config: StepConfig, mesh: Mesh) -> TrainState:
    """Return the NamedSharding of each array of the state; for errors see `param_placement`."""
    shapes = jax.eval_shape(config.objective.init, jax.random.key(0))
    params = param_placement(config, mesh)
    one_run = TrainState(
        step=replicated(mesh),
        params=params,
        opt_state=opt_state_shardings(
            optimizer_of(config),
            trained(config.objective, shapes),
            trained(config.objective, params),
            mesh,
        ),
        guard=jax.tree.map(lambda _: replicated(mesh), jax.eval_shape(fresh_guard)),
    )
    if TRIAL not in mesh.axis_names:
        return one_run
    return jax.tree.map(lambda each: NamedSharding(mesh, PartitionSpec(TRIAL, *each.spec)), one_run)


def abstract_state(config: StepConfig, mesh: Mesh, num_trials: int = 1) -> TrainState:
    """Return shape, type and sharding of each array of the state, for a restore or a plan.

    On a mesh of trials, axis 0 of each array has length `num_trials`.
    """
    shapes = jax.eval_shape(lambda key: fresh_state(config, key), jax.random.key(0))
    if TRIAL in mesh.axis_names:
        shapes = jax.tree.map(lambda leaf: leaf.update(shape=(num_trials, *leaf.shape)), shapes)
    return with_shardings(shapes, state_shardings(config, mesh))


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Add shardings to abstract arrays."""
    return jax.tree.map(lambda leaf, to: leaf.update(sharding=to), shapes, shardings)


def jitted_init(config: StepConfig, mesh: Mesh) -> Any:
    """Make the jitted function that maps a random key to a fresh state, laid out on the mesh.

    A model that is split over devices never has to fit on one device. The values depend on the key
    and not on the mesh, because each threefry random number is a function of its index.
    """
    shardings = state_shardings(config, mesh)
    return jax.jit(lambda key: fresh_state(config, key), out_shardings=shardings)


def fresh_state(config: StepConfig, key: Array) -> TrainState:
    """Make the state of one run before its first step."""
    return state_from(config, config.objective.init(key))


def state_from(config: StepConfig, params: Any) -> TrainState:
    """Make the state of one run that starts from these parameters."""
    opt_state = optimizer_of(config).init(trained(config.objective, params))
    return TrainState(jnp.zeros([], jnp.int32), params, opt_state, fresh_guard())

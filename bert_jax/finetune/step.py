"""Many fine-tuning runs as one program: the members of a sweep lie on axis 0 of every array.

A member is a run of its own: its own parameters, learning rate, seed and order of examples. They
share shapes, so that one compiled step serves all, those of a later wave too. Devices form a mesh
(member, data): members are spread over them, and what is left splits the rows of each.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, UInt32

from bert_jax.errors import UserError
from bert_jax.finetune.losses import loss_sum, num_labelled
from bert_jax.model.config import ModelConfig
from bert_jax.model.counter_hash import hash_u32
from bert_jax.model.task_heads import (
    TaskHeadConfig,
    apply_task,
    init_task_params,
    task_logical_axes,
)
from bert_jax.tasks.task import Objective
from bert_jax.training.optim import OptimizerConfig, OptimizerState, make_optimizer

MEMBER, DATA = "member", "data"
_STATE, _ROWS = PartitionSpec(MEMBER), PartitionSpec(MEMBER, DATA)

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class FinetuneStepConfig:
    """What a step is compiled from."""

    model: ModelConfig
    head: TaskHeadConfig
    objective: Objective
    optimizer: OptimizerConfig
    """With a learning rate of 1; each member's own multiplies its updates."""
    num_steps: int
    """Of each member, for the schedule."""


class Members(NamedTuple):
    """What makes the members of a sweep different."""

    learning_rates: Float[Array, " M"]
    """At the peak."""
    seeds: UInt32[Array, " M"]


class SweepState(NamedTuple):
    """Of all members; every array has them on axis 0."""

    params: Any
    opt_state: OptimizerState
    best: Any
    """Parameters at each member's best evaluation so far."""


def sweep_mesh(num_members: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Devices as (member, data): as few to a member as give every device equally many members."""
    devices = list(jax.devices() if devices is None else devices)
    count = len(devices)
    members = math.gcd(num_members, count)
    return Mesh(
        np.array(devices).reshape(members, count // members),
        (MEMBER, DATA),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )


def place_members(values: Any, mesh: Mesh) -> Any:
    """Arrays with members on axis 0, onto the mesh; every process gives all of them."""
    return jax.tree.map(partial(_place, mesh=mesh, spec=_STATE), values)


def place_settings(learning_rates: Sequence[float], seeds: Sequence[int], mesh: Mesh) -> Members:
    """What makes the members different, onto the mesh."""
    rates = _place(np.array(learning_rates, np.float32), mesh=mesh, spec=_STATE)
    return Members(rates, _place(np.array(seeds, np.uint32), mesh=mesh, spec=_STATE))


def place_rows(batch: Batch, mesh: Mesh) -> dict[str, jax.Array]:
    """A training batch (M, B, ...) onto the mesh; rows of weight 0 are added until they divide."""
    return {
        name: _place(_filled(name, array, 1, mesh), mesh=mesh, spec=_ROWS)
        for name, array in batch.items()
    }


def place_eval_rows(batch: Batch, mesh: Mesh) -> dict[str, jax.Array]:
    """A batch (B, ...) that all members are evaluated on, likewise."""
    return {
        name: _place(_filled(name, array, 0, mesh), mesh=mesh, spec=PartitionSpec(DATA))
        for name, array in batch.items()
    }


def _filled(name: str, array: np.ndarray, axis: int, mesh: Mesh) -> np.ndarray:
    missing = -array.shape[axis] % mesh.shape[DATA]
    if not missing:
        return array
    last = np.take(array, [-1], axis=axis)
    fill = np.repeat(np.zeros_like(last) if name == "weights" else last, missing, axis=axis)
    return np.concatenate([array, fill], axis=axis)


def _place(array: Any, *, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    array = np.asarray(array)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def init_sweep(
    config: FinetuneStepConfig, mesh: Mesh, seeds: np.ndarray, encoders: Sequence[Any],
    which: np.ndarray,
) -> SweepState:  # fmt: skip
    """The members before their first step.

    Args:
        config: As for the step.
        mesh: From `sweep_mesh`.
        seeds: (M,) uint32, of the weights that no encoder gives.
        encoders: The initialisations: each the entry `encoder` of parameters, or {} for random
            weights. Entries that one lacks (a pooler) are random.
        which: (M,) the initialisation of each member.
    """

    def one(seed: Array, number: Array, encoders: Sequence[Any]) -> Any:
        starts = [
            init_task_params(config.model, config.head, jax.random.key(seed), encoder=encoder)
            for encoder in encoders
        ]
        return jax.tree.map(
            lambda *leaves: jnp.stack([jnp.asarray(leaf, jnp.float32) for leaf in leaves])[number],
            *starts,
        )

    def state(seeds: Array, which: Array, encoders: Sequence[Any]) -> SweepState:
        params = jax.vmap(one, in_axes=(0, 0, None))(seeds, which, encoders)
        return SweepState(params, jax.vmap(_optimizer(config).init)(params), params)

    make = jax.jit(state, out_shardings=NamedSharding(mesh, _STATE))
    # Arrays of one device cannot go into a program of several.
    given = jax.tree.map(np.asarray, list(encoders))
    return make(np.asarray(seeds, np.uint32), np.asarray(which, np.int32), given)


def abstract_sweep(config: FinetuneStepConfig, mesh: Mesh, num_members: int) -> SweepState:
    """Shapes and shardings of a sweep's state, for a restore."""

    def state() -> SweepState:
        params = jax.vmap(lambda seed: init_task_params(config.model, config.head,
                                                        jax.random.key(seed)))(
            jnp.zeros(num_members, jnp.uint32)
        )  # fmt: skip
        return SweepState(params, jax.vmap(_optimizer(config).init)(params), params)

    sharding = NamedSharding(mesh, _STATE)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(state),
    )


def check_memory(config: FinetuneStepConfig, mesh: Mesh, num_members: int) -> None:
    """Refuse members whose parameters and moments alone exceed the memory of a device.

    Raises:
        UserError: names the number of members that fit.
    """
    device = mesh.local_mesh.devices.flat[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if device.platform == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.local_mesh.size
    one = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(
        abstract_sweep(config, mesh, mesh.shape[MEMBER]))) // mesh.shape[MEMBER]  # fmt: skip
    needed = one * num_members // mesh.shape[MEMBER]
    if limit is not None and needed > limit:
        raise UserError(
            f"{num_members:,} runs at once need {needed / 2**30:,.1f} GiB on each device for their "
            f"weights and the optimizer's; it has {limit / 2**30:,.1f} GiB. Set sweep.at_once to "
            f"{max(1, limit // one):,} or less"
        )


def make_sweep_step(
    config: FinetuneStepConfig, mesh: Mesh
) -> Callable[[SweepState, Members, Batch], tuple[SweepState, dict[str, Array]]]:
    """One update of every member.

    Returns:
        A jitted function of the state (donated), the members and a batch from `place_rows`. Its
        metrics are (M,): loss, of each member's own rows, and grad_norm before clipping.
    """
    optimizer = _optimizer(config)

    def whole(parts: Any) -> Any:
        """Sums over the devices of a member; XLA leaves in a reduction over one device."""
        return jax.lax.psum(parts, DATA) if mesh.shape[DATA] > 1 else parts

    def member(params: Any, opt_state: Any, settings: Members, batch: Batch) -> tuple[Any, ...]:
        count = whole(num_labelled(config.objective, batch["labels"], batch["weights"]))
        # A batch may have no labelled token at all: then its loss and its gradient are 0.
        count = jnp.maximum(count, 1.0)
        seed = None
        if (
            config.model.hidden_dropout_rate
            or config.model.attention_dropout_rate
            or (config.head.dropout_rate)
        ):
            seed = jnp.asarray(hash_u32(settings.seeds, opt_state.num_updates))

        def loss(params: Any) -> Array:
            logits = apply_task(
                config.model, config.head, params,
                batch["tokens"], batch["type_ids"], batch["segment_ids"],
                dropout_seed=seed, row_index=batch["row_index"],
            )  # fmt: skip
            total = loss_sum(
                config.objective, logits, batch["labels"], batch["weights"], batch["segment_ids"]
            )
            return total / count

        value, grads = jax.value_and_grad(loss)(params)
        value, grads = whole((value, grads))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        updates = jax.tree.map(lambda update: settings.learning_rates * update, updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        return optax.apply_updates(params, updates), opt_state, metrics

    @partial(
        jax.shard_map, mesh=mesh, in_specs=(_STATE, _STATE, _ROWS), out_specs=_STATE,
        check_vma=False,
    )  # fmt: skip
    def local(state: SweepState, members: Members, batch: Batch) -> tuple[Any, ...]:
        params, opt_state, metrics = _each(member)(state.params, state.opt_state, members, batch)
        return SweepState(params, opt_state, state.best), metrics

    # Metrics on every device: each process reads those of all members.
    shardings = (NamedSharding(mesh, _STATE), NamedSharding(mesh, PartitionSpec()))
    return jax.jit(local, donate_argnums=0, out_shardings=shardings)


def make_eval_step(
    config: FinetuneStepConfig, mesh: Mesh
) -> Callable[[Any, Batch], Float[Array, "M B ..."]]:
    """Logits of all members: (M, B, C), of `tags` and `span` (M, B, L, C), on every device.

    Returns:
        A jitted function of parameters with members on axis 0 and of a batch from
        `place_eval_rows`.
    """

    @partial(
        jax.shard_map, mesh=mesh, in_specs=(_STATE, PartitionSpec(DATA)), out_specs=_ROWS,
        check_vma=False,
    )  # fmt: skip
    def local(params: Any, batch: Batch) -> Array:
        return _each(
            lambda params: apply_task(
                config.model, config.head, params,
                batch["tokens"], batch["type_ids"], batch["segment_ids"],
            )
        )(params)  # fmt: skip

    return jax.jit(local, out_shardings=NamedSharding(mesh, PartitionSpec()))


def make_keep_best(mesh: Mesh) -> Callable[[SweepState, Array], SweepState]:
    """A jitted function of the state (donated) and (M,) bool: whose parameters are its best now."""

    def keep(state: SweepState, better: Array) -> SweepState:
        def one(new: Array, old: Array) -> Array:
            return jnp.where(better.reshape(better.shape + (1,) * (new.ndim - 1)), new, old)

        return state._replace(best=jax.tree.map(one, state.params, state.best))

    return jax.jit(keep, donate_argnums=0, out_shardings=NamedSharding(mesh, _STATE))


def _each(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` of every member on this device; without a batch dimension where there is one only."""

    def all_members(*trees: Any) -> Any:
        if jax.tree.leaves(trees)[0].shape[0] > 1:
            return jax.vmap(f)(*trees)
        return jax.tree.map(lambda x: x[None], f(*jax.tree.map(lambda x: x[0], trees)))

    return all_members


def _optimizer(config: FinetuneStepConfig) -> optax.GradientTransformation:
    return make_optimizer(
        config.optimizer, config.num_steps, task_logical_axes(config.model, config.head)
    )

"""The training step: pure, jitted, donated, and the same on any mesh."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from bert_jax.data.store import SpecialIds
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.counter_hash import hash_u32
from bert_jax.model.heads import apply_pretraining, init_params, logical_axes
from bert_jax.model.layers import compute_dtype
from bert_jax.model.layout import Layout
from bert_jax.objectives.losses import LossSums, pretraining_loss, pretraining_sums, ratio
from bert_jax.objectives.masking import MaskingConfig, mask_tokens
from bert_jax.parallel.collectives import (
    gather_outside_layers,
    local_layout,
    on_local_rows,
    reduce_gradients,
    reduce_sums,
)
from bert_jax.parallel.sharding import (
    RULES,
    batch_sharding,
    check_batch_size,
    opt_state_shardings,
    param_shardings,
    replicated,
)
from bert_jax.training.guard import GuardConfig, GuardState, forget_losses, fresh_guard, judge
from bert_jax.training.optim import OptimizerConfig, learning_rate_schedule, make_optimizer

Batch = dict[str, Array]
"""tokens, type_ids, segment_ids (B, L); nsp_labels, row_index (B,), as `data/pipeline.py` makes."""
Metrics = dict[str, Array]


class TrainState(NamedTuple):
    """All that a step changes: a plain pytree of arrays."""

    step: Any
    """int32 scalar: batches done, the skipped ones too; also the number of the next batch."""
    params: Any
    """Nested dict of float32 arrays, as from `model.heads.init_params`."""
    opt_state: Any
    guard: GuardState


@dataclass(frozen=True)
class StepConfig:
    """What the step is compiled from; shapes come from the batch."""

    model: ModelConfig
    masking: MaskingConfig
    optimizer: OptimizerConfig
    num_steps: int
    """Length of the run: the learning rate depends on it."""
    special_ids: SpecialIds
    continues_word: np.ndarray | None = field(default=None, compare=False)
    """(vocab_size,) bool, for whole-word masking: the id continues the word before it."""
    accumulation: int = 1
    """Micro-batches per step."""
    seed: int = 0
    """Of masks and dropout."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    phase_starts: tuple[int, ...] = ()
    """Numbers of the first batches of the phases after the first."""

    def __post_init__(self) -> None:
        """Refuse a step of no micro-batches."""
        if self.accumulation < 1:
            raise UserError(f"training.accumulation is {self.accumulation}; it must be at least 1")


def state_shardings(config: StepConfig, mesh: Mesh) -> TrainState:
    """NamedSharding per leaf of the state: what init, step and restore all use.

    Raises:
        UserError: a size of the model does not divide over the mesh.
    """
    shapes = jax.eval_shape(lambda: init_params(config.model, jax.random.key(0)))
    axes = logical_axes(config.model)
    params = param_shardings(axes, shapes, mesh)
    optimizer = make_optimizer(config.optimizer, config.num_steps, axes)
    return TrainState(
        step=replicated(mesh),
        params=params,
        opt_state=opt_state_shardings(optimizer, shapes, params, mesh),
        guard=jax.tree.map(lambda _: replicated(mesh), jax.eval_shape(fresh_guard)),
    )


def abstract_state(config: StepConfig, mesh: Mesh) -> TrainState:
    """Shape, type and sharding per leaf of the state: a restore's target, and `plan`'s input."""
    shapes = jax.eval_shape(lambda key: _fresh_state(config, key), jax.random.key(0))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(config, mesh),
    )


def init_state(config: StepConfig, mesh: Mesh, key: Array) -> TrainState:
    """A fresh state, made sharded: no device ever holds the whole of a model that is split.

    The values depend on `key` only, not on the mesh: threefry bits are a function of their index.
    """
    state: TrainState = jitted_init(config, mesh)(key)
    return state


def jitted_init(config: StepConfig, mesh: Mesh) -> Any:
    """The jitted `key -> state` behind `init_state`, for whoever wants to look at its memory."""
    shardings = state_shardings(config, mesh)
    return jax.jit(lambda key: _fresh_state(config, key), out_shardings=shardings)


def _fresh_state(config: StepConfig, key: Array) -> TrainState:
    params = init_params(config.model, key)
    optimizer = make_optimizer(config.optimizer, config.num_steps, logical_axes(config.model))
    step = jnp.zeros([], jnp.int32)
    return TrainState(step, params, optimizer.init(params), fresh_guard())


def make_train_step(
    config: StepConfig, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The jitted step `(state, batch) -> (state, metrics)`; the state's buffers are donated.

    It is compiled once per batch shape. The loss and its gradient are those of the whole batch
    (sums over global counts), whatever the mesh and the number of micro-batches; masks and dropout
    are functions of (seed, step, row_index) and hence the same too.

    Metrics are scalars on the device, of the batch before the update: loss, mlm_loss, nsp_loss (in
    nats), mlm_accuracy, nsp_accuracy, grad_norm (before clipping), learning_rate, num_masked,
    num_tokens (padding excluded), and the guard's (see `guard.Judgement`).

    A step that the guard finds bad returns parameters and optimizer bit for bit as they were. A
    step that stops the run, and every later one, also returns the same step counter; only
    `guard.halted` changes, and at the first step of a phase the guard's statistics.

    Raises:
        UserError: when traced, if the batch does not divide over mesh and micro-batches.
    """
    shardings = state_shardings(config, mesh)
    optimizer = make_optimizer(config.optimizer, config.num_steps, logical_axes(config.model))
    learning_rate = learning_rate_schedule(config.optimizer, config.num_steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        check_batch_size(batch["tokens"].shape[0], mesh, config.accumulation)
        seed = dropout_seed(config, state.step)
        rows = mask_batch(config, batch, config.seed)
        grads, sums = gradients(config, mesh, state.params, rows, seed)
        grads = jax.lax.with_sharding_constraint(grads, shardings.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": pretraining_loss(sums, sums.mlm_count, sums.nsp_count),
            "mlm_loss": ratio(sums.mlm_loss, sums.mlm_count),
            "nsp_loss": ratio(sums.nsp_loss, sums.nsp_count),
            "mlm_accuracy": ratio(sums.mlm_correct, sums.mlm_count),
            "nsp_accuracy": ratio(sums.nsp_correct, sums.nsp_count),
            "grad_norm": optax.tree.norm(grads),
            # Of the update: a skipped step makes none, so the schedule waits for it.
            "learning_rate": learning_rate(state.opt_state.num_updates),
            "num_masked": sums.mlm_count,
            "num_tokens": jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32),
        }
        guard = state.guard
        if config.phase_starts:
            guard = forget_losses(guard, jnp.any(state.step == jnp.array(config.phase_starts)))
        verdict = judge(config.guard, guard, metrics["loss"], metrics["grad_norm"])
        # Part of the loop that writes the update, which reads the old values anyway.
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(verdict.taken, new, old),
            (optax.apply_updates(state.params, updates), opt_state),
            (state.params, state.opt_state),
        )
        after = TrainState(state.step + verdict.advance, params, opt_state, verdict.guard)
        return after, metrics | verdict.metrics

    return jax.jit(
        train_step,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def dropout_seed(config: StepConfig, step: Int[Array, ""]) -> Array | None:
    """uint32 seed of one step's dropout; None where the model has none."""
    if not (config.model.hidden_dropout_rate or config.model.attention_dropout_rate):
        return None
    return jnp.asarray(hash_u32(config.seed, step))


def mask_batch(config: StepConfig, batch: Batch, seed: int | Array) -> Batch:
    """The model's input and labels: `batch` with masked tokens and (B, P) positions, labels,
    weights.
    """
    masked = mask_tokens(
        batch["tokens"],
        batch["segment_ids"],
        batch["row_index"],
        seed=seed,
        config=config.masking,
        vocab_size=config.model.vocab_size,
        special_ids=dataclasses.astuple(config.special_ids),
        mask_id=config.special_ids.mask,
        continues_word=config.continues_word,
    )
    return {**batch, **masked._asdict()}


def forward(
    config: StepConfig, params: Any, rows: Batch, seed: Array | None, layout: Layout | None = None
) -> LossSums:
    """Loss sums of masked rows (from `mask_batch`); `seed` None switches dropout off."""
    logits = apply_pretraining(
        config.model,
        params,
        rows["tokens"],
        rows["type_ids"].astype(jnp.int32),
        rows["segment_ids"].astype(jnp.int32),
        rows["positions"],
        dropout_seed=seed,
        row_index=rows["row_index"],
        layout=layout,
    )
    return pretraining_sums(
        logits.mlm, rows["labels"], rows["weights"], logits.nsp, rows["nsp_labels"]
    )


def gradients(
    config: StepConfig, mesh: Mesh, params: Any, rows: Batch, seed: Array | None
) -> tuple[Any, LossSums]:
    """Gradient of the loss of the whole batch, and its sums, over `config.accumulation` parts.

    The counts in the loss's denominators are those of the whole batch and known before the first
    part (masking comes first), so parts with unequal numbers of masked positions weigh right.
    """
    mlm_count = jnp.sum(rows["weights"])
    nsp_count = jnp.sum(rows["nsp_labels"] >= 0)
    dtype = compute_dtype(config.model)
    specs = _param_specs(config, mesh, params)

    def local(params: Any, rows: Batch, seed: Any, counts: Any) -> tuple[Any, LossSums]:
        layout = local_layout(mesh, specs["encoder"]["layers"], dtype)

        def loss(params: Any, part: Batch) -> tuple[Float[Array, ""], LossSums]:
            params = gather_outside_layers(params, specs, mesh, dtype)
            sums = forward(config, params, part, seed, layout)
            return pretraining_loss(sums, *counts), sums

        grads, sums = _summed(config, jax.grad(loss, has_aux=True), params, rows)
        if mesh.size == 1:
            return grads, sums
        return reduce_gradients(grads, specs, mesh), reduce_sums(sums)

    whole = PartitionSpec()
    return on_local_rows(
        local, mesh, (specs, PartitionSpec(RULES["batch"]), whole, whole), (specs, whole)
    )(params, rows, seed, (mlm_count, nsp_count))


def loss_sums(config: StepConfig, mesh: Mesh, params: Any, rows: Batch) -> LossSums:
    """Loss sums of the whole batch of masked rows, without dropout or gradient."""
    dtype = compute_dtype(config.model)
    specs = _param_specs(config, mesh, params)

    def local(params: Any, rows: Batch) -> LossSums:
        layout = local_layout(mesh, specs["encoder"]["layers"], dtype)
        sums = forward(
            config, gather_outside_layers(params, specs, mesh, dtype), rows, None, layout
        )
        return reduce_sums(sums) if mesh.size > 1 else sums

    batch = PartitionSpec(RULES["batch"])
    return on_local_rows(local, mesh, (specs, batch), PartitionSpec())(params, rows)


def _param_specs(config: StepConfig, mesh: Mesh, params: Any) -> Any:
    shardings = param_shardings(logical_axes(config.model), params, mesh)
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def _summed(
    config: StepConfig,
    differentiate: Callable[[Any, Batch], tuple[Any, LossSums]],
    params: Any,
    rows: Batch,
) -> tuple[Any, LossSums]:
    """Gradients and sums of all rows, made part by part."""
    if config.accumulation == 1:
        return differentiate(params, rows)
    # Unrolled layers are added up one by one: each sum is then part of the product that makes the
    # gradient, and costs nothing; added up as one stack it is a pass over the memory for each part.
    unrolled = config.model.scan_unroll >= config.model.num_layers

    def part_gradients(params: Any, part: Batch) -> tuple[Any, LossSums]:
        grads, sums = differentiate(params, part)
        return _with_layers(grads, _unstack) if unrolled else grads, sums

    def add_part(total: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, part_gradients(params, part)), None

    split = split_rows(rows, config.accumulation)
    like = jax.eval_shape(part_gradients, params, jax.tree.map(lambda x: x[0], split))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    grads, sums = jax.lax.scan(add_part, zero, split)[0]
    return _with_layers(grads, _stack) if unrolled else grads, sums


def _with_layers(tree: Any, f: Callable[[Any], Any]) -> Any:
    encoder = tree["encoder"]
    return {**tree, "encoder": {**encoder, "layers": f(encoder["layers"])}}


def _unstack(layers: Any) -> list[Any]:
    num_layers = len(jax.tree.leaves(layers)[0])
    return [jax.tree.map(lambda x, n=n: x[n], layers) for n in range(num_layers)]


def _stack(layers: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *layers)


def split_rows(rows: Batch, parts: int) -> Batch:
    """(B, ...) arrays of one device as (parts, B / parts, ...)."""
    return jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), rows)

"""The training step and the evaluation step: pure, jitted, and the same on any mesh.

Both handle one run or, on a mesh with the axis `trial`, several runs, stacked on axis 0 of arrays.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.distributed.parallel import collectives
from bert_jax.distributed.parallel.sharding import (
    ROW_SPEC,
    TRIAL,
    batch_sharding,
    check_batch_size,
    replicated,
)
from bert_jax.model.counter_hash import hash_u32
from bert_jax.model.layers import compute_dtype
from bert_jax.model.layout import Layout
from bert_jax.objectives.objective import (
    Batch,
    CoupledObjective,
    Forward,
    Scalars,
    measure,
    trained,
    with_trained,
)
from bert_jax.training.steps.guard import forget_losses, judge
from bert_jax.training.steps.optim import learning_rate_schedule
from bert_jax.training.steps.optim_parts import is_head
from bert_jax.training.steps.recheck import GRADIENT_DIGESTS, digest
from bert_jax.training.steps.state import (
    StepConfig,
    TrainState,
    optimizer_of,
    param_placement,
    state_shardings,
)

Metrics = dict[str, Array]


class Settings(NamedTuple):
    """Settings in which runs that train in one program differ."""

    rate: Float[Array, "*trials"] | float
    """Factor that multiplies the learning rate."""
    seed: UInt32[Array, "*trials"] | int
    """Seed for corruption and dropout."""
    head_rate: Float[Array, "*trials"] | None = None
    """Factor that multiplies the head's learning rate (see `is_head`); `rate` if None."""


def make_train_step(config: StepConfig, mesh: Mesh) -> Callable[..., tuple[TrainState, Metrics]]:
    """Make the jitted step `(state, batch) -> (state, metrics)`; the state's buffers are donated.

    A step is compiled once per batch shape. The mesh and the number of micro-batches change results
    only by rounding: loss and gradient are sums over the whole batch, divided by global counts, and
    corruption and dropout depend only on (seed, step, row_index).

    Metrics are scalars on the device, computed with the parameters before the update: loss, the
    objective's metrics, grad_norm (before clipping), learning_rate, num_tokens (without padding),
    the metrics of the guard (`Judgement`), and, if steps are rechecked, `GRADIENT_DIGESTS`.

    If the guard finds a step bad, parameters and optimizer stay unchanged, bit for bit. If the
    guard halts the run, this step and all later steps leave the step counter unchanged, too: they
    change only `guard.halted` and, at the first step of a phase, the guard's statistics.

    On a mesh of trials, the step also takes `settings`, and all arrays have trials on axis 0. Raise
    a UserError, at tracing, if the batch does not divide evenly over mesh and micro-batches.
    """
    shardings = state_shardings(config, mesh)
    objective = config.objective
    optimizer = optimizer_of(config)
    learning_rate = learning_rate_schedule(config.optimizer, config.num_steps, config.rate)
    has_trials = TRIAL in mesh.axis_names
    each = jax.vmap if has_trials else (lambda f: f)

    def prepare(state: TrainState, batch: Batch, seed: Any) -> tuple[Batch, Any, Scalars]:
        rows = objective.prepare(batch, seed)
        counts = objective.counts(rows) | objective.pace(state.step / config.num_steps)
        return rows, dropout_seed(config, seed, state.step), counts

    def update(
        state: TrainState, batch: Batch, settings: Settings, grads: Any, sums: Any, counts: Any
    ) -> tuple[TrainState, Metrics]:
        params = trained(objective, state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        if has_trials:
            head_rate = settings.rate if settings.head_rate is None else settings.head_rate
            updates = jax.tree_util.tree_map_with_path(
                lambda path, change: (head_rate if is_head(path) else settings.rate) * change,
                updates,
            )
        metrics = {
            **measure(objective.metrics, sums),
            "loss": objective.loss(sums, counts),  # a metric `loss` may lack some terms
            "grad_norm": optax.tree.norm(grads),
            # The rate follows the number of updates, which a skipped step does not raise.
            "learning_rate": settings.rate * learning_rate(state.opt_state.num_updates),
            "num_tokens": objective.num_tokens(batch),
        }
        guard = state.guard
        if config.phase_starts:
            guard = forget_losses(guard, jnp.any(state.step == jnp.array(config.phase_starts)))
        verdict = judge(config.guard, guard, metrics["loss"], metrics["grad_norm"])
        # XLA fuses this choice into the loop that writes the update and reads the old values too.
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(verdict.taken, new, old),
            (optax.apply_updates(params, updates), opt_state),
            (params, state.opt_state),
        )
        after = TrainState(
            state.step + verdict.advance,
            with_trained(objective, state.params, params),
            opt_state,
            verdict.guard,
        )
        return after, metrics | verdict.metrics

    def train_step(
        state: TrainState, batch: Batch, settings: Settings | None = None
    ) -> tuple[TrainState, Metrics]:
        given = settings or Settings(1.0, config.seed)
        check_batch_size(batch["row_index"].shape[-1], mesh, config.accumulation)
        rows, dropout, counts = each(prepare)(state, batch, given.seed)
        grads, sums = gradients(config, mesh, state.params, rows, dropout, counts)
        grads = jax.lax.with_sharding_constraint(grads, trained(objective, shardings.params))
        digests = [(name, sums.pop(name)) for name in (GRADIENT_DIGESTS,) if name in sums]
        after, metrics = each(update)(state, batch, given, grads, sums, counts)
        return after, metrics | dict(digests)

    of_settings = [NamedSharding(mesh, PartitionSpec(TRIAL))] if has_trials else []
    return jax.jit(
        train_step,
        in_shardings=(shardings, batch_sharding(mesh), *of_settings),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def dropout_seed(config: StepConfig, seed: Any, step: Int[Array, ""]) -> Array | None:
    """Return the uint32 seed of one step's dropout; None if the objective has no dropout."""
    if not config.objective.has_dropout():
        return None
    return jnp.asarray(hash_u32(seed, step))


def gradients(
    config: StepConfig, mesh: Mesh, params: Any, rows: Batch, seed: Array | None, counts: Metrics
) -> tuple[Any, Metrics]:
    """Compute the gradient of a batch's loss, and the sums that give the loss and the metrics.

    The batch is processed in `config.accumulation` parts. The loss of each part is divided by
    `counts` of the whole batch (see `Objective.counts`), so that the parts add up to the loss of
    the batch. On a mesh of trials, every array, sums included, has trials on axis 0.
    """
    objective = config.objective
    specs = _param_specs(config, mesh)
    changed = trained(objective, specs)

    def local(params: Any, rows: Batch, seed: Any, counts: Any) -> tuple[Any, Scalars]:
        dtype = compute_dtype(objective.model)
        layout = collectives.local_layout(mesh, specs, dtype)
        if objective.frozen_layers:
            upper = layout.of("encoder")._replace(frozen_layers=objective.frozen_layers)
            layout = layout._replace(inner={**layout.inner, "encoder": upper})
        at_once = config.gather == "step" and mesh.shape["fsdp"] > 1
        of_parts = specs
        if at_once:
            layout = layout.without_gather()
            if _is_unrolled(config):
                params = _with_layers(params, _unstack)
                of_parts = _of_each_layer(specs, params)
            params = collectives.gather(params, of_parts, mesh, dtype, layers=True)

        def used(changing: Any) -> Any:
            whole = with_trained(objective, params, changing)
            if at_once:
                return _with_layers(whole, _stack)
            return collectives.gather(whole, specs, mesh, dtype)

        def loss(changing: Any, part: Batch) -> tuple[Float[Array, ""], Scalars]:
            sums = objective.forward(used(changing), part, seed, layout).sums
            return objective.loss(sums, counts), sums

        changing = trained(objective, params)
        if config.accumulation > 1 and isinstance(objective, CoupledObjective):
            grads, sums = _cached(config, used, layout, changing, rows, seed, counts)
        else:
            grads, sums = _summed(config, jax.grad(loss, has_aux=True), changing, rows)
        checked = {}
        if config.guard.recheck_every:
            checked[GRADIENT_DIGESTS] = collectives.of_each_device(digest(grads), mesh)
        if mesh.size == mesh.shape.get(TRIAL, 1):
            return _with_layers(grads, _stack), sums | checked
        of_parts = trained(objective, of_parts)
        if not at_once:
            grads, of_parts = _with_layers(grads, _stack), changed
        grads = collectives.reduce_gradients(
            grads, of_parts, mesh, config.reduce_dtype, whole=at_once
        )
        return _with_layers(grads, _stack), collectives.reduce_sums(sums) | checked

    whole = PartitionSpec()
    return collectives.on_local_rows(
        collectives.each_trial(local, mesh), mesh, (specs, ROW_SPEC, whole, whole), (changed, whole)
    )(params, rows, seed, counts)


def make_eval_step(config: StepConfig, mesh: Mesh, seed: int) -> Callable[[Any, Batch], Forward]:
    """Make the jitted function `(params, batch) -> Forward` over the global batch, without dropout.

    Padding rows (segment ids 0, no labels) add nothing to the sums. Outputs are copied to every
    device. On a mesh of trials, only `params` has trials on axis 0. `seed` decides the corruption.
    """
    objective = config.objective
    specs = _param_specs(config, mesh)

    def local(params: Any, rows: Batch) -> Forward:
        dtype = compute_dtype(objective.model)
        layout = collectives.local_layout(mesh, specs, dtype)
        whole = collectives.gather(params, specs, mesh, dtype)
        found = objective.forward(whole, rows, None, layout)
        if mesh.size == mesh.shape.get(TRIAL, 1):
            return found
        return found._replace(sums=collectives.reduce_sums(found.sums))

    def eval_step(params: Any, batch: Batch) -> Forward:
        rows = objective.prepare(batch, seed)
        return collectives.on_local_rows(
            collectives.each_trial(local, mesh, shared=1),
            mesh,
            (specs, ROW_SPEC),
            Forward(PartitionSpec(), ROW_SPEC),  # type: ignore[arg-type]
            shared=1,
        )(params, rows)

    placed = state_shardings(config, mesh).params
    rows = NamedSharding(mesh, ROW_SPEC)
    return jax.jit(eval_step, in_shardings=(placed, rows), out_shardings=replicated(mesh))


def _param_specs(config: StepConfig, mesh: Mesh) -> Any:
    return jax.tree.map(lambda sharding: sharding.spec, param_placement(config, mesh))


def _summed(
    config: StepConfig,
    differentiate: Callable[[Any, Any], tuple[Any, Scalars]],
    params: Any,
    rows: Any,
) -> tuple[Any, Scalars]:
    """Add up the gradients and sums of all rows, part by part, in float32.

    Gradients of unrolled layers are added as a list: each addition then fuses with the product that
    computes the gradient. Adding stacked layers would take a pass over the memory per part.
    """
    unstacks = _is_unrolled(config) and config.accumulation > 1

    def part_gradients(params: Any, part: Any) -> tuple[Any, Scalars]:
        grads, sums = differentiate(params, part)
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
        return _with_layers(grads, _unstack) if unstacks else grads, sums

    if config.accumulation == 1:
        return part_gradients(params, rows)

    def add_part(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, part_gradients(params, part)), None

    split = split_rows(rows, config.accumulation)
    like = jax.eval_shape(part_gradients, params, jax.tree.map(lambda x: x[0], split))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return jax.lax.scan(add_part, zero, split)[0]


def _cached(
    config: StepConfig,
    used: Callable[[Any], Any],
    layout: Layout,
    params: Any,
    rows: Batch,
    seed: Array | None,
    counts: Scalars,
) -> tuple[Any, Scalars]:
    """Compute, part by part, the gradient and the sums of a loss that compares all rows of a batch.

    `_summed` needs a sum over parts. Here, a first pass computes the compared arrays, without
    gradients. Then the gradient with respect to these arrays is computed for the whole batch, and a
    second pass propagates it back through the parts. Both passes have the same dropout.

    `used` adds frozen parameters to the trained `params`; `counts` are the loss's denominators.
    """
    objective = cast(CoupledObjective, config.objective)

    def represent(params: Any, part: Batch) -> Array:
        return objective.represent(used(params), part, seed, layout)

    def loss(outputs: Array) -> tuple[Float[Array, ""], Scalars]:
        sums = objective.compare(outputs, rows, layout)
        return objective.loss(sums, counts), sums

    def product(params: Any, part: tuple[Batch, Array]) -> tuple[Float[Array, ""], Scalars]:
        return jnp.vdot(represent(params, part[0]), part[1]), {}

    outputs = jax.lax.map(partial(represent, params), split_rows(rows, config.accumulation))
    slopes, sums = jax.grad(loss, has_aux=True)(outputs.reshape(-1, *outputs.shape[2:]))
    grads, _ = _summed(config, jax.grad(product, has_aux=True), params, (rows, slopes))
    return grads, sums


def _is_unrolled(config: StepConfig) -> bool:
    model = config.objective.model
    return model.scan_unroll >= model.num_layers


def _with_layers(tree: Any, f: Callable[[Any], Any]) -> Any:
    """Apply `f` to every stack of layers in a tree of parameters."""
    if not isinstance(tree, dict):
        return tree
    return {
        name: f(entry) if name == "layers" else _with_layers(entry, f)
        for name, entry in tree.items()
    }


def _unstack(layers: Any) -> list[Any]:
    if isinstance(layers, list):
        return layers
    num_layers = len(jax.tree.leaves(layers)[0])
    return [jax.tree.map(lambda x, n=n: x[n], layers) for n in range(num_layers)]


def _stack(layers: Any) -> Any:
    if not isinstance(layers, list):
        return layers
    return jax.tree.map(lambda *xs: jnp.stack(xs), *layers)


def _of_each_layer(specs: Any, params: Any) -> Any:
    """Replace the specs of stacked layers by a list wherever `params` has a list of layers."""
    if isinstance(params, list):
        return [collectives.specs_of_one_layer(specs)] * len(params)
    if not isinstance(params, dict):
        return specs
    return {name: _of_each_layer(specs[name], entry) for name, entry in params.items()}


def split_rows(rows: Any, parts: int) -> Any:
    """Reshape the arrays (B, ...) on one device to (parts, B / parts, ...)."""
    return jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), rows)

"""Parts that optimizers are built from. All of them support layers stacked on axis 0.

A part is an `optax.GradientTransformation`. Its updates are not yet multiplied by -learning_rate.
The state of a complete optimizer has a field `num_updates`, the number of updates made.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from bert_jax.distributed.checkpoint.record import named_leaves
from bert_jax.errors import UserError


class OptimizerState(NamedTuple):
    """State of the optimizers in this file: float32 moments, sharded like the parameters.

    In `nu`, each parameter without a second moment has an `optax.MaskedNode` instead.
    """

    num_updates: Int[Array, ""]
    mu: Any
    nu: Any


class CountedState(NamedTuple):
    """State of an optax optimizer, together with the number of updates."""

    num_updates: Int[Array, ""]
    inner: Any


def adam(
    b1: float, b2: float, eps: float, *, bias_correction: bool = True
) -> optax.GradientTransformation:
    """Build Adam (Kingma & Ba 2015); the published BERT and LAMB code has no bias correction."""

    def init(params: Any) -> OptimizerState:
        mu, nu = (optax.tree.zeros_like(params, jnp.float32) for _ in range(2))
        return OptimizerState(jnp.zeros([], jnp.int32), mu, nu)

    def update(grads: Any, state: OptimizerState, params: Any = None) -> tuple[Any, OptimizerState]:
        count = state.num_updates + 1
        correction1 = bias_left(b1, count, bias_correction)
        correction2 = bias_left(b2, count, bias_correction)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, grads)
        steps = jax.tree.map(
            lambda m, v: (m / correction1) / (jnp.sqrt(v / correction2) + eps), mu, nu
        )
        return steps, OptimizerState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def bias_left(beta: float, count: Int[Array, ""], bias_correction: bool) -> Float[Array, ""]:
    """Compute the divisor that corrects the bias of a moment; 1 if there is no correction."""
    return 1 - beta ** count.astype(jnp.float32) if bias_correction else jnp.float32(1)


def decay(weight_decay: float) -> optax.GradientTransformation:
    """Build decoupled weight decay (Loshchilov & Hutter 2019): add `weight_decay` x parameter."""

    def mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: is_decayed(joined(path)), params)

    return optax.add_decayed_weights(weight_decay, mask)


def is_decayed(path: str) -> bool:
    """Return true if weight decay and LAMB's ratio apply to the parameter at a /-joined path.

    Neither applies to biases and norms, as in the code of BERT and LAMB. Biases and norms are
    recognised by name, not by rank, because a stack of biases is two-dimensional.
    """
    *owners, leaf = path.lower().split("/")
    return "bias" not in leaf and leaf != "scale" and not any("norm" in part for part in owners)


def then(
    first: optax.GradientTransformation, stateless: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Append a stateless part to `first`. The result has the state of `first`, without nesting."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        steps, state = first.update(grads, state, params)
        return stateless.update(steps, stateless.init(params), params)[0], state

    return optax.GradientTransformation(first.init, update)


def scaled(optimizer: optax.GradientTransformation, factors: Any) -> optax.GradientTransformation:
    """Multiply the steps of an optimizer by a tree of factors, without changing its state."""
    multiply = optax.stateless(lambda steps, _: jax.tree.map(jnp.multiply, steps, factors))
    return then(optimizer, multiply)


def counted(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Make an optimizer from any optax transformation by adding a count of updates to its state."""

    def init(params: Any) -> CountedState:
        return CountedState(jnp.zeros([], jnp.int32), optimizer.init(params))

    def update(grads: Any, state: CountedState, params: Any = None) -> tuple[Any, CountedState]:
        steps, inner = optimizer.update(grads, state.inner, params)
        return steps, CountedState(state.num_updates + 1, inner)

    return optax.GradientTransformation(init, update)


def trust_ratios(logical_axes: Any) -> optax.GradientTransformation:
    """Scale each tensor's step to the tensor's norm: LAMB (You et al. 2019, algorithm 2).

    The step is multiplied by |param| / |step|, or by 1 if either norm is zero. Stacked layers have
    one ratio per layer. Biases and norms are not scaled, as in the authors' code.
    """

    def one(path: Any, step: Array, param: Array, axes: tuple) -> Array:
        if not is_decayed(joined(path)):
            return step
        within = tuple(range(is_stacked(axes), param.ndim))
        param_norm = jnp.sqrt(jnp.sum(jnp.square(param), within, keepdims=True))
        step_norm = jnp.sqrt(jnp.sum(jnp.square(step), within, keepdims=True))
        both = (param_norm > 0) & (step_norm > 0)
        return step * jnp.where(both, param_norm / jnp.where(both, step_norm, 1), 1.0)

    return optax.stateless(
        lambda steps, params: jax.tree_util.tree_map_with_path(one, steps, params, logical_axes)
    )


_FUSED = {"query": "qkv", "key": "qkv", "value": "qkv", "gate": "gate_up", "up": "gate_up"}
"""Common name of tensors that StableAdamW treats as one, because other codebases fuse them."""


def bounded(
    adamw: optax.GradientTransformation,
    b2: float,
    eps: float,
    logical_axes: Any,
    *,
    bias_correction: bool = True,
) -> optax.GradientTransformation:
    """Shorten steps whose gradients exceed the second moment: StableAdamW (Wortsman et al. 2023).

    Let rms = sqrt(mean(g^2 / max(v, eps^2))) over a tensor. If rms is above 1, the tensor's step,
    weight decay included, is divided by rms. Stacked layers have one rms per layer. Queries, keys
    and values count as one tensor, and so do the two halves of a gated MLP. The state of `adamw`
    must be an `OptimizerState`.
    """

    def update(grads: Any, state: OptimizerState, params: Any = None) -> tuple[Any, OptimizerState]:
        steps, after = adamw.update(grads, state, params)
        correction = bias_left(b2, after.num_updates, bias_correction)
        sums: dict[str, Array] = {}
        counts: dict[str, int] = {}

        def collect(path: Any, grad: Array, nu: Array, axes: tuple) -> None:
            group, within = _fused(path), tuple(range(is_stacked(axes), grad.ndim))
            ratio = jnp.square(grad) / jnp.maximum(nu / correction, eps**2)
            sums[group] = sums.get(group, 0.0) + jnp.sum(ratio, within)
            counts[group] = counts.get(group, 0) + math.prod(grad.shape[axis] for axis in within)

        def divide(path: Any, step: Array) -> Array:
            group = _fused(path)
            rms = jnp.sqrt(sums[group] / counts[group])
            return step / jnp.maximum(1, rms).reshape(rms.shape + (1,) * (step.ndim - rms.ndim))

        jax.tree_util.tree_map_with_path(collect, grads, after.nu, logical_axes)
        return jax.tree_util.tree_map_with_path(divide, steps), after

    return optax.GradientTransformation(adamw.init, update)


def muon(
    momentum: float, rest: optax.GradientTransformation, sides: Mapping[str, Any], **settings: Any
) -> optax.GradientTransformation:
    """Build Muon (Jordan et al. 2024) for matrices; `rest` trains all other parameters.

    The step of a matrix is its momentum, with all singular values made about equal by five
    Newton-Schulz iterations. A factor of 0.2 sqrt(the larger side) makes the step as large as
    AdamW's (Liu et al. 2025), so that one learning rate and weight decay suit both. Optax's
    Nesterov look-ahead, unlike Jordan's code, corrects the bias of the average and the look-ahead.

    The state of `rest` must be an `OptimizerState`. `sides` has the sides of each matrix, by path
    (see `matrix_sides`). `settings` are more arguments of optax's `scale_by_muon`.
    """
    if not sides:
        raise UserError(
            "optimizer.name is 'muon', but no matrix of stacked layers is trained; choose 'adamw'"
        )
    orthogonal = optax.contrib.scale_by_muon(
        beta=momentum, weight_dimension_numbers=sides, **settings
    )

    def init(params: Any) -> OptimizerState:
        def hole(path: Any, nu: Array) -> Any:
            return optax.MaskedNode() if joined(path) in sides else nu

        state = rest.init(params)
        return state._replace(nu=jax.tree_util.tree_map_with_path(hole, state.nu))

    def update(grads: Any, state: OptimizerState, params: Any = None) -> tuple[Any, OptimizerState]:
        all_grads, mu, nu = (named_leaves(tree) for tree in (grads, state.mu, state.nu))
        others = [name for name in all_grads if name not in sides]

        def take(values: dict[str, Array], names: Any) -> dict[str, Array]:
            return {name: values[name] for name in names}

        averages = take(mu, sides)
        steps, after = orthogonal.update(
            take(all_grads, sides),
            orthogonal.init(averages)._replace(count=state.num_updates, mu=averages),
        )
        for name, step in steps.items():
            lengths = [math.prod(step.shape[axis] for axis in side) for side in sides[name]]
            steps[name] = 0.2 * math.sqrt(max(lengths)) * step
        other_steps, others_after = rest.update(
            take(all_grads, others),
            OptimizerState(state.num_updates, take(mu, others), take(nu, others)),
        )

        def whole(values: dict[str, Array]) -> Any:
            leaves = [values.get(name, optax.MaskedNode()) for name in all_grads]
            return jax.tree.unflatten(jax.tree.structure(grads), leaves)

        return whole(steps | other_steps), OptimizerState(
            others_after.num_updates, whole(after.mu | others_after.mu), whole(others_after.nu)
        )

    return optax.GradientTransformation(init, update)


def matrix_sides(logical_axes: Any) -> dict[str, optax.contrib.MuonDimensionNumbers]:
    """Find the axes that form the two sides of each hidden matrix, by /-joined path.

    They are the kernels of stacked layers and of the masked-LM head's dense layer. One side is one
    axis: `embed`, if exactly one axis has this name; else an axis without a name (the rank of a
    low-rank update); else the first after the layer axis. All other axes form the other side:
    (embed, heads x head_dim), (embed, mlp), (rank, heads x head_dim).
    """
    sides = {}
    for name, axes in named_leaves(logical_axes, is_leaf=lambda x: isinstance(x, tuple)).items():
        inner = range(is_stacked(axes), len(axes))
        is_hidden = is_stacked(axes) or name.endswith("mlm/dense/kernel")
        if not (is_hidden and is_decayed(name) and len(inner) >= 2):
            continue
        embed = [axis for axis in inner if axes[axis] == "embed"]
        ranks = [axis for axis in inner if axes[axis] is None]
        first = embed[0] if len(embed) == 1 else (*ranks, *inner)[0]
        other = tuple(axis for axis in inner if axis != first)
        sides[name] = optax.contrib.MuonDimensionNumbers((first,), other)
    return sides


def layer_rates(logical_axes: Any, num_layers: int, decay: float) -> Any:
    """Return the factor of each parameter's learning rate: discriminative fine-tuning.

    The rate falls from the head down to the embeddings (Howard & Ruder 2018, section 3.2). The
    factor is 1 for everything above the layers, `decay` ** (num_layers - n) for layer n counted
    from 0 (so `decay` for the top layer), and `decay` ** (num_layers + 1) for the embeddings. The
    result is a tree like the parameters: float32 scalars, and (N, 1, ...) for stacked layers.
    """

    def one(path: Any, axes: tuple[str | None, ...]) -> Any:
        names = [entry.key for entry in path]
        if is_stacked(axes):
            each = decay ** np.arange(num_layers, 0, -1, dtype=np.float32)
            return each.reshape(-1, *(1,) * (len(axes) - 1))
        return np.float32(decay ** (num_layers + 1) if "embeddings" in names else 1.0)

    return jax.tree_util.tree_map_with_path(
        one, logical_axes, is_leaf=lambda x: isinstance(x, tuple)
    )


def is_head(path: Any) -> bool:
    """Return true if the parameter at `path` belongs to the pooler, the head or its transform.

    Encoder layers, the encoder's final norm and `lora` do not belong to the head.
    """
    names = [entry.key for entry in path]
    return names[0] not in ("encoder", "lora") or "pooler" in names[:2]


def is_stacked(axes: tuple[str | None, ...]) -> bool:
    """Return true if axis 0 of a parameter runs over layers."""
    return axes[:1] == ("layers",)


def joined(path: Any) -> str:
    """Join the names along a path in a tree with /."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _fused(path: Any) -> str:
    return "/".join(_FUSED.get(part, part) for part in joined(path).split("/"))

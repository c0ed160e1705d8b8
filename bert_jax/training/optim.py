"""Optimizers of BERT pretraining: AdamW and LAMB, over parameters whose layers are stacked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from bert_jax.errors import UserError


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule and clipping; one instance per training run."""

    name: Literal["adamw", "lamb"] = "adamw"
    learning_rate: float = 1e-4
    """Peak, reached at the end of the warm-up."""
    schedule: Literal["linear", "cosine"] = "linear"
    """Shape of the decay from the peak to zero at the end of training."""
    warmup_steps: int | None = None
    """Steps of linear rise to the peak; None: `warmup_rate` of all steps."""
    warmup_rate: float = 0.01
    weight_decay: float = 0.01
    """Decoupled; not applied to biases and norms."""
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    clip_norm: float | None = 1.0
    """Largest global norm of the averaged gradient of a batch; None: no clipping."""
    bias_correction: bool = True
    """Divide the moments by 1 - b**t. The original BERT (and LAMB) code did not."""

    def __post_init__(self) -> None:
        """Refuse values that cannot train."""
        checks = {
            "learning_rate": (self.learning_rate > 0, "positive"),
            "warmup_steps": (self.warmup_steps is None or self.warmup_steps >= 0, "at least 0"),
            "warmup_rate": (0 <= self.warmup_rate < 1, "in [0, 1)"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "b1": (0 <= self.b1 < 1, "in [0, 1)"),
            "b2": (0 <= self.b2 < 1, "in [0, 1)"),
            "eps": (self.eps > 0, "positive"),
            "clip_norm": (self.clip_norm is None or self.clip_norm > 0, "positive, or None"),
        }
        for field, (fits, wanted) in checks.items():
            if not fits:
                value = getattr(self, field)
                raise UserError(f"optimizer.{field} is {value!r}; it must be {wanted}")

    def num_warmup_steps(self, num_steps: int) -> int:
        """Steps of the rise in a training of `num_steps`."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return round(self.warmup_rate * num_steps)


class OptimizerState(NamedTuple):
    """State of both optimizers; float32, moments shaped and sharded like the parameters."""

    num_updates: Int[Array, ""]
    mu: Any
    nu: Any


def learning_rate_schedule(
    config: OptimizerConfig, num_steps: int
) -> Callable[[Int[Array, "*steps"] | int], Float[Array, "*steps"]]:
    """Learning rate of update number `step` (0-based) out of `num_steps`.

    Rises linearly: the first update has 1 / warmup_steps of the peak, not zero, and update
    warmup_steps - 1 has the peak. Then decays; the last update is one step short of zero.

    Raises:
        UserError: the warm-up is longer than the training.
    """
    warmup = config.num_warmup_steps(num_steps)
    if num_steps < 1 or warmup > num_steps:
        raise UserError(
            f"optimizer.warmup_steps is {warmup} and training has {num_steps} steps; the peak "
            "would never be reached: 1 to 10% of the steps is usual"
        )

    def rate(step: Int[Array, "*steps"] | int) -> Float[Array, "*steps"]:
        done = jnp.asarray(step, jnp.float32)
        rise = (done + 1) / max(warmup, 1)
        left = jnp.clip((num_steps - done) / max(num_steps - warmup, 1), 0.0, 1.0)
        if config.schedule == "cosine":
            left = 0.5 * (1 - jnp.cos(jnp.pi * left))
        return config.learning_rate * jnp.where(done < warmup, rise, left)

    return rate


def is_decayed(path: str) -> bool:
    """Whether weight decay, and LAMB's ratio, apply to the parameter at this /-joined path.

    They do to all but biases and norms, as in the published code of both optimizers.

    By name and not by rank: stacked layers make every bias of a block two-dimensional.
    """
    *owners, leaf = path.lower().split("/")
    return "bias" not in leaf and leaf != "scale" and not any("norm" in part for part in owners)


def make_optimizer(
    config: OptimizerConfig, num_steps: int, logical_axes: Any
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) or LAMB (You et al. 2019, algorithm 2), as optax.

    `update` wants the averaged gradient of the whole batch. Its order: clip by the global norm,
    moments, bias correction, weight decay, LAMB's trust ratio, learning rate.

    LAMB scales each tensor's step to the tensor's own norm. A parameter that stacks layers on axis
    0 holds one tensor per layer, so it gets one ratio per layer. Biases and norms are neither
    decayed nor rescaled, as in the authors' code; a zero norm leaves the step as it is.

    Args:
        config: Which optimizer.
        num_steps: Length of the training run, for the schedule.
        logical_axes: Tree like the parameters of tuples of axis names; "layers" marks a stack.
    """
    rate = learning_rate_schedule(config, num_steps)

    def init(params: Any) -> OptimizerState:
        def zeros(param: Array) -> Array:
            return jnp.zeros(param.shape, jnp.float32)

        return OptimizerState(
            jnp.zeros([], jnp.int32), jax.tree.map(zeros, params), jax.tree.map(zeros, params)
        )

    def update(grads: Any, state: OptimizerState, params: Any = None) -> tuple[Any, OptimizerState]:
        count = state.num_updates + 1
        correction1 = correction2 = jnp.float32(1)
        if config.bias_correction:
            correction1 = 1 - config.b1 ** count.astype(jnp.float32)
            correction2 = 1 - config.b2 ** count.astype(jnp.float32)
        learning_rate = rate(state.num_updates)
        clip = clip_factor(optax.tree.norm(grads), config.clip_norm)

        def one(
            path: Any, grad: Array, mu: Array, nu: Array, param: Array, axes: tuple
        ) -> tuple[Array, Array, Array]:
            grad = grad.astype(jnp.float32) * clip
            mu = config.b1 * mu + (1 - config.b1) * grad
            nu = config.b2 * nu + (1 - config.b2) * jnp.square(grad)
            step = (mu / correction1) / (jnp.sqrt(nu / correction2) + config.eps)
            if is_decayed(_joined(path)):
                step += config.weight_decay * param
                if config.name == "lamb":
                    step *= trust_ratio(param, step, stacked=axes[:1] == ("layers",))
            return -learning_rate * step, mu, nu

        triples = jax.tree_util.tree_map_with_path(
            one, grads, state.mu, state.nu, params, logical_axes
        )
        updates, mus, nus = jax.tree.transpose(
            jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), triples
        )
        return updates, OptimizerState(count, mus, nus)

    return optax.GradientTransformation(init, update)


def clip_factor(norm: Float[Array, ""], limit: float | None) -> Float[Array, ""]:
    """What to multiply a gradient of this global norm by, so that its norm is at most `limit`."""
    if limit is None:
        return jnp.float32(1)
    return limit / jnp.maximum(norm, limit)


def trust_ratio(
    param: Float[Array, "*shape"], step: Float[Array, "*shape"], *, stacked: bool
) -> Float[Array, "..."]:
    """|param| / |step| per tensor, broadcastable to it; 1 where either norm is zero.

    Args:
        param: One tensor, or with `stacked` one per index of axis 0.
        step: The update before it is scaled, same shape.
        stacked: Whether axis 0 counts tensors.
    """
    axes = tuple(range(1 if stacked else 0, param.ndim))
    param_norm = jnp.sqrt(jnp.sum(jnp.square(param), axes, keepdims=True))
    step_norm = jnp.sqrt(jnp.sum(jnp.square(step), axes, keepdims=True))
    both = (param_norm > 0) & (step_norm > 0)
    return jnp.where(both, param_norm / jnp.where(both, step_norm, 1), 1.0)


def _joined(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")

"""Optimizers and learning-rate schedules, by name. `optim_parts.py` has parts of optimizers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from bert_jax.config.bounds import Bounded, KeyOf, Natural, NonNegative, Part, Positive, Rate
from bert_jax.data.phases import scaled
from bert_jax.training.steps import optim_parts as parts

MAX_STEPS = 2**31 - 1
"""Largest number of updates, which are counted in int32."""


def _adam(config: "OptimizerConfig") -> optax.GradientTransformation:
    return parts.adam(config.b1, config.b2, config.eps, bias_correction=config.bias_correction)


def _adamw(config: "OptimizerConfig", logical_axes: Any) -> optax.GradientTransformation:
    return parts.then(_adam(config), parts.decay(config.weight_decay))


OPTIMIZERS: dict[str, Callable[["OptimizerConfig", Any], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "lamb": lambda config, axes: parts.then(_adamw(config, axes), parts.trust_ratios(axes)),
    "muon": lambda config, axes: parts.then(
        parts.muon(config.momentum, _adam(config), parts.matrix_sides(axes)),
        parts.decay(config.weight_decay),
    ),
    "stable_adamw": lambda config, axes: parts.bounded(
        _adamw(config, axes), config.b2, config.eps, axes, bias_correction=config.bias_correction
    ),
}
"""Functions (configuration, logical axes) -> optimizer, by name. The optimizer's state must have a
field `num_updates`. `make_optimizer` adds clipping and the learning rate."""


class Progress(NamedTuple):
    """Position of updates in the decay of the learning rate."""

    left: Float[Array, "*steps"]
    """Fraction of the decay that is still ahead, from 1 to 0."""
    decay_share: float
    """Fraction of the decay, at its end, during which `wsd` and `one_minus_sqrt` fall."""
    ratio: Float[Array, "*steps"]
    """Index of the update (counted from 1), divided by the number of updates before the decay."""


SCHEDULES: dict[str, Callable[[Progress], Float[Array, "*steps"]]] = {
    "linear": lambda at: at.left,
    "cosine": lambda at: 0.5 * (1 - jnp.cos(jnp.pi * at.left)),
    "constant": lambda at: jnp.ones_like(at.left),
    "wsd": lambda at: jnp.minimum(at.left / at.decay_share, 1),
    "one_minus_sqrt": lambda at: 1 - jnp.sqrt(1 - jnp.minimum(at.left / at.decay_share, 1)),
    "inverse_sqrt": lambda at: 1 / jnp.sqrt(jnp.maximum(at.ratio, 1)),
}
"""Decay of the learning rate after the warm-up, as a factor that begins at 1. It ends at 0, except
for `constant` and `inverse_sqrt` (Vaswani et al. 2017, section 5.3)."""


@dataclass(frozen=True)
class OptimizerConfig(Bounded, section="optimizer"):
    """Optimizer, learning-rate schedule and clipping; one instance per training run."""

    name: Annotated[str, KeyOf(OPTIMIZERS)] = "adamw"
    learning_rate: Positive = 1e-4
    """Peak of the learning rate, reached at the end of the warm-up."""
    schedule: Annotated[str, KeyOf(SCHEDULES)] = "linear"
    """Shape of the decay from the peak. `wsd` and `one_minus_sqrt` first hold the peak; `wsd` then
    falls linearly. `inverse_sqrt` falls as 1 / sqrt(n) at update n, whatever the run's length."""
    decay_share: Part = 0.2
    """Fraction of the steps after the warm-up in which `wsd` or `one_minus_sqrt` decays."""
    end_share: Rate = 0.0
    """Fraction of the peak that remains at the end of the decay."""
    warmup_steps: Natural | None = None
    """Number of steps in which the rate rises linearly to the peak. A run shorter than this uses a
    tenth of its steps. None means `warmup_rate` times the number of steps."""
    warmup_rate: Rate = 0.01
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, multiplied by the learning rate. Biases and norms are not decayed."""
    b1: Rate = 0.9
    b2: Rate = 0.999
    eps: Positive = 1e-6
    momentum: Rate = 0.95
    """Decay rate of Muon's average of gradients. AdamW trains all but hidden matrices."""
    clip_norm: Positive | None = 1.0
    """Largest global norm of the averaged gradient of a batch; None means no clipping."""
    bias_correction: bool = True
    """Whether to divide the moments by 1 - b**t, which the original code of BERT and LAMB omits."""

    def num_warmup_steps(self, num_steps: int) -> int:
        """Return the number of warm-up steps in a run of `num_steps` steps."""
        if self.warmup_steps is not None:
            return scaled(self.warmup_steps, num_steps)
        return round(self.warmup_rate * num_steps)


@dataclass(frozen=True)
class PhaseRate:
    """Learning rate of a phase that sets its own rate; the run's warm-up is unchanged."""

    peak: float
    """Replacement for `OptimizerConfig.learning_rate`."""
    decay: str = ""
    """Name, in `SCHEDULES`, of a decay over the phase. If empty, the run's schedule goes on."""
    end: float = 0.0
    """Learning rate of the last step of `decay`."""
    start: int = 0
    """Index of the phase's first step."""
    num_steps: int = 0
    """Number of steps in the phase."""


def learning_rate_schedule(
    config: OptimizerConfig, num_steps: int, phase: PhaseRate | None = None
) -> Callable[[Int[Array, "*steps"] | int], Float[Array, "*steps"]]:
    """Build the function that maps the index of an update, counted from 0, to its learning rate.

    In the warm-up the rate rises linearly: update 0 has 1 / warmup_steps of the peak, and update
    warmup_steps - 1 has the peak. Then the rate decays, and has its final value one step after the
    last of `num_steps` updates. A `phase` may set a rate, and a decay that ends at its last step.
    """
    warmup = config.num_warmup_steps(num_steps)
    peak = config.learning_rate if phase is None else phase.peak
    shape, decay_share, end_share = SCHEDULES[config.schedule], config.decay_share, config.end_share
    begin, end = warmup, num_steps
    if phase is not None and phase.decay:
        shape, decay_share, end_share = SCHEDULES[phase.decay], 1.0, phase.end / peak
        begin, end = max(phase.start, warmup), phase.start + phase.num_steps - 1

    def rate(step: Int[Array, "*steps"] | int) -> Float[Array, "*steps"]:
        done = jnp.asarray(step, jnp.float32)
        rise = (done + 1) / max(warmup, 1)
        left = jnp.clip((end - done) / max(end - begin, 1), 0.0, 1.0)
        at = Progress(left, decay_share, (done + 1) / max(begin, 1))
        decayed = end_share + (1 - end_share) * shape(at)
        return peak * jnp.where(done < warmup, rise, decayed)

    return rate


def make_optimizer(
    config: OptimizerConfig, num_steps: int, logical_axes: Any, phase: PhaseRate | None = None
) -> optax.GradientTransformation:
    """Build the optimizer `config.name`, with clipping and a schedule over `num_steps`.

    The optimizer's state has the same structure for every `phase`. `logical_axes` is a tree like
    the parameters, with a tuple of axis names for each; the name "layers" marks stacked layers.
    """
    rate = learning_rate_schedule(config, num_steps, phase)
    optimizer = OPTIMIZERS[config.name](config, logical_axes)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        clip = clip_factor(optax.tree.norm(grads), config.clip_norm)
        clipped = jax.tree.map(lambda grad: grad.astype(jnp.float32) * clip, grads)
        steps, after = optimizer.update(clipped, state, params)
        learning_rate = rate(state.num_updates)
        return jax.tree.map(lambda step: -learning_rate * step, steps), after

    return optax.GradientTransformation(optimizer.init, update)


def clip_factor(norm: Float[Array, ""], limit: float | None) -> Float[Array, ""]:
    """Compute the factor that reduces a gradient of global norm `norm` to at most `limit`."""
    if limit is None:
        return jnp.float32(1)
    return limit / jnp.maximum(norm, limit)

"""Which steps are taken: a loss that is not finite, or far above the ones before it, is not.

The decision is part of the step and made on the device, from nothing but the state and the batch:
the same on every device and after every restart, and without waiting for the host.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bert_jax.errors import UserError

MIN_EXCESS = 1.0
"""Nats above the mean that count as a spike at least, however steady the loss is."""
_LARGEST = 1e6
"""Nats: a larger loss enters the statistics as this."""

GUARD_METRICS = ("bad", "halted", "guard_skipped", "guard_mean", "guard_std", "guard_limit")
"""What `judge` adds to the metrics of a step."""


@dataclass(frozen=True)
class GuardConfig:
    """What happens to a step whose loss or gradient is not finite, or whose loss spikes."""

    on_bad_step: Literal["stop", "skip"] = "stop"
    """stop: the run ends before the step. skip: the batch is left out, parameters and optimizer
    stay as they are, and the run goes on."""
    max_skips: int = 10
    """Batches left out in a row; one more stops the run."""
    spike_sigmas: float = 10.0
    """A loss is a spike so many standard deviations above the mean of the recent steps, and at
    least 1 nat above it; 0: only what is not finite is bad."""
    window: int = 128
    """Steps over which mean and deviation are taken. Half of them must have been good before a
    loss is judged."""

    def __post_init__(self) -> None:
        """Refuse values that cannot judge."""
        checks = {
            "max_skips": (self.max_skips >= 1, "at least 1"),
            "spike_sigmas": (
                self.spike_sigmas >= 0 and math.isfinite(self.spike_sigmas),
                "at least 0, where 0 means that only what is not finite is bad",
            ),
            "window": (self.window >= 2, "at least 2"),
        }
        for field, (fits, wanted) in checks.items():
            if not fits:
                raise UserError(f"guard.{field} is {getattr(self, field)!r}; it must be {wanted}")

    @property
    def allowed_skips(self) -> int:
        """Bad steps in a row that do not stop the run."""
        return self.max_skips if self.on_bad_step == "skip" else 0

    @property
    def first_judged(self) -> int:
        """Good steps after which a spike can be told."""
        return self.window // 2


class GuardState(NamedTuple):
    """What the guard remembers between steps: scalars, replicated on any mesh."""

    num_good: Int[Array, ""]
    """Good steps so far; statistics are over them."""
    mean: Float[Array, ""]
    """Of the loss, in nats."""
    variance: Float[Array, ""]
    skipped: Int[Array, ""]
    """Steps left out in a row until now."""
    halted: Int[Array, ""]
    """1: a bad step stopped the run, and no step after it changes the state."""


def fresh_guard() -> GuardState:
    """Before the first step."""
    zero, nothing = jnp.zeros([], jnp.float32), jnp.zeros([], jnp.int32)
    return GuardState(num_good=nothing, mean=zero, variance=zero, skipped=nothing, halted=nothing)


def cleared(guard: GuardState) -> GuardState:
    """The same with `halted` cleared: what the step that was stopped started from.

    Works for arrays over several processes; all must call it.
    """
    halted = guard.halted
    zero = np.zeros(halted.shape, halted.dtype)
    return guard._replace(
        halted=jax.make_array_from_callback(halted.shape, halted.sharding, lambda index: zero)
    )


class Judgement(NamedTuple):
    """Of one step."""

    taken: Bool[Array, ""]
    """Whether parameters and optimizer take the update."""
    advance: Int[Array, ""]
    """0 or 1, for the step counter: 0 when the run is halted."""
    guard: GuardState
    """After the step."""
    metrics: dict[str, Array]
    """`GUARD_METRICS`: bad and halted (0 or 1) and guard_skipped (in a row, after the step), int32;
    guard_mean, guard_std and guard_limit, float32 in nats: what the loss was judged by, the limit
    infinite while spikes are not judged."""


def judge(
    config: GuardConfig, guard: GuardState, loss: Float[Array, ""], grad_norm: Float[Array, ""]
) -> Judgement:
    """Decides over a step; a few scalar operations.

    Mean and variance weigh the newest loss with 1 / window, and all losses alike until there are
    that many, so the early ones do not hang on a starting value. A bad loss does not enter them,
    and neither does one after the run was halted.

    Args:
        config: What is bad, and what then.
        guard: Before the step.
        loss: Of the batch, in nats.
        grad_norm: Of the batch.
    """
    std = jnp.sqrt(guard.variance)
    limit = jnp.float32(jnp.inf)
    if config.spike_sigmas:
        excess = jnp.maximum(config.spike_sigmas * std, MIN_EXCESS)
        limit = jnp.where(guard.num_good < config.first_judged, limit, guard.mean + excess)
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (loss <= limit)
    running = guard.halted == 0
    stops = ~good & (guard.skipped >= config.allowed_skips)
    halted = ~running | stops
    taken = good & running

    # Before the arithmetic: NaN times 0 is NaN, and a square may overflow.
    loss = jnp.where(taken, jnp.minimum(loss, _LARGEST), guard.mean)
    weight = jnp.maximum(1 / (guard.num_good + 1).astype(jnp.float32), 1 / config.window)
    weight = jnp.where(taken, weight, 0)
    delta = loss - guard.mean
    after = GuardState(
        num_good=guard.num_good + taken,
        mean=guard.mean + weight * delta,
        variance=(1 - weight) * (guard.variance + weight * jnp.square(delta)),
        skipped=jnp.where(halted, guard.skipped, jnp.where(good, 0, guard.skipped + 1)),
        halted=halted.astype(jnp.int32),
    )
    metrics = {
        "bad": (~good).astype(jnp.int32),
        "halted": after.halted,
        "guard_skipped": after.skipped,
        "guard_mean": guard.mean,
        "guard_std": std,
        "guard_limit": limit,
    }
    return Judgement(taken, (~halted).astype(jnp.int32), after, metrics)

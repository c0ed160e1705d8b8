"""Rejection of steps with a non-finite loss or a loss spike.

The step itself decides on the device, using only its state and its batch. So the decision is the
same on every device and after every restart, and needs no transfer to the host.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bert_jax.config.bounds import AtLeast, Bounded, Count, NonNegative

MIN_EXCESS = 1.0
"""Least height of a spike above the mean, in nats, however steady the loss is."""
_LARGEST = 1e6
"""Largest loss, in nats, in the statistics; larger losses are clipped to it."""

GUARD_METRICS = ("bad", "halted", "guard_skipped", "guard_mean", "guard_std", "guard_limit")
"""Names of the metrics that `judge` adds to the metrics of a step."""


@dataclass(frozen=True)
class GuardConfig(Bounded, section="guard"):
    """Treatment of steps with a non-finite loss or gradient, or a loss spike."""

    on_bad_step: Literal["stop", "skip"] = "stop"
    """Reaction to a bad step. stop: the run ends before the step. skip: the run leaves the batch
    out, keeps parameters and optimizer as they are, and goes on."""
    on_divergence: Literal["report", "stop"] = "report"
    """Reaction to a loss that rises gradually and stays high, although no single step is bad (see
    `loss_monitor.LossMonitor`). report: the run says so and goes on. stop: it says so and ends."""
    max_skips: Count = 10
    """Largest number of batches skipped in a row; one more stops the run."""
    spike_sigmas: NonNegative = 10.0
    """Number of standard deviations above the mean of recent losses, but at least 1 nat, beyond
    which a loss is a spike. 0: only non-finite values are bad."""
    window: Annotated[int, AtLeast(2)] = 128
    """Number of recent losses that mean and deviation cover. Both start anew with each phase; the
    guard looks for spikes once they cover half a window of good steps."""


class GuardState(NamedTuple):
    """State of the guard between steps: scalars, replicated on any mesh."""

    num_good: Int[Array, ""]
    """Number of good steps in the statistics."""
    mean: Float[Array, ""]
    """Mean loss, in nats."""
    variance: Float[Array, ""]
    skipped: Int[Array, ""]
    """Number of steps skipped in a row until now."""
    halted: Int[Array, ""]
    """Flag: 1 after a bad step has stopped the run; no later step changes the state."""


def fresh_guard() -> GuardState:
    """Make the guard's state before the first step."""
    zero, nothing = jnp.zeros([], jnp.float32), jnp.zeros([], jnp.int32)
    return GuardState(num_good=nothing, mean=zero, variance=zero, skipped=nothing, halted=nothing)


def forget_losses(guard: GuardState, where: Bool[Array, ""]) -> GuardState:
    """Reset the statistics if a phase begins (`where`), since its losses have another level.

    For example, rows of 512 tokens after rows of 128 raise the loss at once, beyond any spike.
    """
    kept = jnp.where(where, 0, 1)
    return guard._replace(
        num_good=guard.num_good * kept, mean=guard.mean * kept, variance=guard.variance * kept
    )


def cleared(guard: GuardState) -> GuardState:
    """Clear `halted`, which restores the state that the stopped step started from.

    The arrays may span several processes; all processes must call this function.
    """
    halted = guard.halted
    zero = np.zeros(halted.shape, halted.dtype)
    return guard._replace(
        halted=jax.make_array_from_callback(halted.shape, halted.sharding, lambda index: zero)
    )


class Judgement(NamedTuple):
    """Decision of the guard about one step: whether to take the step, and the state after it."""

    taken: Bool[Array, ""]
    """Whether parameters and optimizer take the update."""
    advance: Int[Array, ""]
    """Increment of the step counter: 0 when the run is halted, else 1."""
    guard: GuardState
    """State after the step."""
    metrics: dict[str, Array]
    """Values of `GUARD_METRICS`. int32: bad and halted (0 or 1), guard_skipped (skips in a row,
    after this step). float32, in nats: guard_mean and guard_std before the step, and guard_limit,
    which is infinite while the guard does not look for spikes."""


def judge(
    config: GuardConfig, guard: GuardState, loss: Float[Array, ""], grad_norm: Float[Array, ""]
) -> Judgement:
    """Decide about a step, in a few scalar operations, from its loss (nats) and gradient norm.

    Mean and variance give the newest loss the weight 1 / window. Until the window is full, all
    losses have equal weights, so no initial value remains. Losses of steps not taken are left out.
    """
    std = jnp.sqrt(guard.variance)
    limit = jnp.float32(jnp.inf)
    if config.spike_sigmas:
        excess = jnp.maximum(config.spike_sigmas * std, MIN_EXCESS)
        limit = jnp.where(guard.num_good < config.window // 2, limit, guard.mean + excess)
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (loss <= limit)
    running = guard.halted == 0
    allowed_skips = config.max_skips if config.on_bad_step == "skip" else 0
    stops = ~good & (guard.skipped >= allowed_skips)
    halted = ~running | stops
    taken = good & running

    # Replace the loss before the arithmetic: NaN times 0 is NaN, and a square may overflow.
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

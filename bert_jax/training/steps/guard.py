"""Rejection of steps with a non-finite loss or a loss spike.

The decision is part of the compiled step: it depends only on the state and the batch. So it is the
same on every device and after every restart, and needs no transfer to the host.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bert_jax.config.bounds import AtLeast, Bounded, Count, Natural, NonNegative

MIN_EXCESS = 1.0
"""Minimum distance of a spike from the mean loss, in nats, however small the deviation is."""
_LARGEST = 1e6
"""Loss, in nats, to which larger losses are clipped in the statistics."""

GUARD_METRICS = ("bad", "halted", "guard_skipped", "guard_mean", "guard_std", "guard_limit")
"""Names of the metrics that `judge` adds to the metrics of a step."""


@dataclass(frozen=True)
class GuardConfig(Bounded, section="guard"):
    """Treatment of steps with a non-finite loss or gradient, or a loss spike."""

    on_bad_step: Literal["stop", "skip"] = "stop"
    """Reaction to a bad step. stop: the run ends, without taking the step. skip: the run goes on
    with the next batch, and parameters and optimizer stay as they are."""
    on_divergence: Literal["report", "stop"] = "report"
    """Reaction to a loss that rises gradually and stays high, although no step is bad (see
    `loss_monitor.LossMonitor`). report: the run goes on, with a warning. stop: the run ends."""
    max_skips: Count = 10
    """Largest number of batches that may be skipped in a row. One more bad batch stops the run."""
    spike_sigmas: NonNegative = 10.0
    """Distance above the mean of recent losses, in standard deviations, beyond which a loss is a
    spike; the distance is at least 1 nat. 0 means that only non-finite values are bad."""
    window: Annotated[int, AtLeast(2)] = 128
    """Number of recent losses from which mean and deviation are computed. Each phase starts new
    statistics. The guard looks for spikes after half a window of good steps."""
    recheck_every: Natural = 0
    """Interval, in steps, at which a step is computed twice, to detect devices that silently
    compute wrong results; 0 means never. A check needs memory for a second state. Before each save,
    replicas of the state are compared (see `recheck.Recheck`)."""


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
    """Flag: 1 once a bad step has stopped the run. Later steps change no parameters."""


def fresh_guard() -> GuardState:
    """Make the guard's state for the start of a run."""
    zero, nothing = jnp.zeros([], jnp.float32), jnp.zeros([], jnp.int32)
    return GuardState(num_good=nothing, mean=zero, variance=zero, skipped=nothing, halted=nothing)


def forget_losses(guard: GuardState, where: Bool[Array, ""]) -> GuardState:
    """Reset the statistics where `where` is true: at the first step of a phase.

    The losses of a new phase may be at another level. For example, the loss jumps when rows of 512
    tokens follow rows of 128, and this is no spike.
    """
    kept = jnp.where(where, 0, 1)
    return guard._replace(
        num_good=guard.num_good * kept, mean=guard.mean * kept, variance=guard.variance * kept
    )


def cleared(guard: GuardState) -> GuardState:
    """Set `halted` to 0: the result is the state from which the halted step started.

    The arrays may span several processes, so all processes must call this function.
    """
    return guard._replace(halted=jnp.zeros_like(guard.halted, device=guard.halted.sharding))


class Judgement(NamedTuple):
    """Decision of the guard about one step, and the guard's state after the step."""

    taken: Bool[Array, ""]
    """Whether parameters and optimizer take the update."""
    advance: Int[Array, ""]
    """Increment of the step counter: 0 when the run is halted, else 1."""
    guard: GuardState
    """State after the step."""
    metrics: dict[str, Array]
    """Values of `GUARD_METRICS`. Of type int32: bad and halted (0 or 1), and guard_skipped (steps
    skipped in a row, this one included). Of type float32, in nats: guard_mean and guard_std before
    the step, and guard_limit, which is infinite while the guard does not look for spikes."""


def judge(
    config: GuardConfig, guard: GuardState, loss: Float[Array, ""], grad_norm: Float[Array, ""]
) -> Judgement:
    """Decide whether to take a step, from its loss (nats) and gradient norm.

    The statistics are running averages over steps taken. The newest loss has the weight 1 / window,
    but the first `window` losses have equal weights, so the initial mean of 0 has no influence.
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

"""Checks of the training loss: does it stay at its baseline, and does it rise later?

Within minutes, the loss of a masked LM falls to the unigram entropy: the loss of a model that knows
only how frequent each token is. Some runs never get below this level, and some climb back to it.
"""

import bisect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from bert_jax.data.phases import Phase
from bert_jax.objectives.objective import Metric

MARGIN = 0.05
"""Distance, in nats: a run has left the plateau if its loss is this far below the baseline."""
RISE = 0.5
"""Rise, in nats: a smoothed loss this far above its lowest value is reported as a divergence."""

_FAR_ABOVE = 0.3  # nats; this far above the baseline, not even token frequencies are learnt
_CLIMB = 0.3  # nats; a rise by this much is reported if it leads back above the baseline
_FILLED = 0.4  # total weight of the losses in the mean after half a window
_SETTLED = 0.86  # total weight after two windows; by then a phase's new positions are learnt
_FALL, _STAND = 0.02, 5  # a loss that falls by less than 0.02 nats in 5 windows stands still
_STATE = ("mean", "weight", "done", "step", "lowest", "lowest_at", "alarm", "fallen", "fallen_at")


class Finding(NamedTuple):
    """Finding about the loss, which the run prints and writes to `events.jsonl`."""

    kind: Literal["plateau", "diverged", "recovered"]
    message: str


@dataclass
class LossMonitor:
    """Monitor of the training loss. It finds plateaus and divergences.

    The monitor checks for a plateau once: a quarter of the run (at most 10,000 steps) after the
    warm-up, as a healthy loss may be at the baseline before, and later if the loss still falls.

    The monitor checks for a divergence at each step. It compares the smoothed loss with its lowest
    value so far, because a comparison with a running mean would miss a slow rise.

    When a phase begins, smoothing starts anew, and the checks pause for half a window of steps. The
    lowest value starts anew too, with two exceptions: the loss has climbed back above the baseline,
    or a divergence was reported and the loss has not recovered.
    """

    metric: Metric
    """The monitored loss: the first metric of the objective."""
    baselines: Sequence[float]
    """Value of the metric for a model that ignores its input, in nats, in each phase; infinite if
    unknown, as from the first phase with another text on."""
    unknown_rate: float
    """Fraction of the corpus's tokens that are the unknown token."""
    phases: Sequence[Phase]
    peak_rates: Sequence[float]
    """Peak learning rate of each phase."""
    warmup_steps: int
    num_layers: int
    save_every: int
    """Number of steps between two checkpoints."""
    mean: float = 0.0
    weight: float = 0.0
    done: bool = False
    """Whether the check for a plateau is done."""
    step: int = 0
    """Step of the newest loss."""
    lowest: float = sys.float_info.max
    """Lowest smoothed loss of the phase, in nats."""
    lowest_at: int = 0
    """Step of the lowest smoothed loss."""
    alarm: int = 0
    """Reported divergence without recovery (0: none, 1: a rise, 2: a rise above the baseline)."""
    fallen: float = sys.float_info.max
    """Smoothed loss, in nats, at the latest fall. The next fall is a smoothed loss more than
    `_FALL` below this value. Each phase begins without a fall."""
    fallen_at: int = 0
    """Step of the latest fall."""

    @cached_property
    def _bounds(self) -> list[int]:
        """Number of steps before each phase, followed by the number of steps in the run."""
        return list(accumulate((phase.num_steps for phase in self.phases), initial=0))

    @property
    def num_steps(self) -> int:
        """Number of steps in the run."""
        return self._bounds[-1]

    @property
    def baseline(self) -> float:
        """Baseline of the phase of the newest loss."""
        return self.baselines[self._phase_of(self.step)]

    @property
    def window(self) -> int:
        """Number of steps over which the loss is smoothed."""
        return max(5, min(40, self.num_steps // 20))

    @property
    def judged_at(self) -> int:
        """First step of the check for a plateau. By then, the loss should be below the baseline."""
        waits = max(self.window, min(self.num_steps // 4, 10_000))
        return min(self.warmup_steps + waits, self.num_steps)

    @property
    def smoothed(self) -> float:
        """Smoothed loss, in nats; NaN before the first step."""
        return self.mean / self.weight if self.weight else math.nan

    def observe(self, step: int, loss: float) -> list[Finding]:
        """Add the loss of step number `step`, counted from 1, and return the findings."""
        phase_start = self._bounds[self._phase_of(step)]
        if self.step <= phase_start:
            self.mean = self.weight = 0.0
            self.fallen = sys.float_info.max
        self.step = step
        decay = 1 - 1 / self.window
        self.mean = decay * self.mean + (1 - decay) * loss
        self.weight = decay * self.weight + (1 - decay)
        found = [self._judge_plateau(step), self._judge_rise(step, phase_start)]
        return [finding for finding in found if finding]

    def state(self) -> dict[str, Any]:
        """Return the state of the monitor as JSON values, for `restore`."""
        return {name: getattr(self, name) for name in _STATE}

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Continue from a `state` saved after `step` steps. Old versions saved fewer values."""
        for name, value in {"step": step, **state}.items():
            setattr(self, name, value)

    def _judge_plateau(self, step: int) -> Finding | None:
        last, filled = step == self.num_steps, self.weight >= _FILLED
        if filled and self.smoothed < self.fallen - _FALL:
            self.fallen, self.fallen_at = self.smoothed, step
        if self.done or step < self.judged_at or not (last or filled):
            return None
        # A run above the baseline that was reported as diverged is not reported as a plateau too.
        left = self.smoothed < self.baseline - MARGIN or self.alarm == 2
        self.done = bool(left or last or step - self.fallen_at >= _STAND * self.window)
        return Finding("plateau", self._explanation(step)) if self.done and not left else None

    def _judge_rise(self, step: int, phase_start: int) -> Finding | None:
        loss = self.smoothed
        if self.weight < _FILLED:
            return None
        climbed = self.lowest + _CLIMB < self.baseline < loss
        outdated = self.lowest_at <= phase_start and not self.alarm
        if outdated and climbed and self.weight < _SETTLED:
            return None
        if loss < self.lowest or (outdated and not climbed):
            self.lowest, self.lowest_at = loss, step
        rise = loss - self.lowest
        level = 2 if climbed else 1 if rise > RISE else 0
        if level > self.alarm:
            self.alarm = level
            return Finding("diverged", self._divergence(step))
        if self.alarm and level == 0 and rise < RISE / 2:
            self.alarm = 0
            text = f"The {self.metric.title} has recovered: {loss:.3f} nats at step {step:,}"
            return Finding("recovered", text)
        return None

    def _divergence(self, step: int) -> str:
        text = (
            f"the {self.metric.title} has risen to {self.smoothed:.3f} nats at step {step:,} "
            f"(mean of about {self.window} steps); its lowest value was {self.lowest:.3f} at "
            f"step {self.lowest_at:,}"
        )
        if self.alarm == 2:
            text += (
                f". The run has climbed back above the {self.metric.baseline} of the corpus, "
                f"{self.baseline:.3f}: the model has lost all it had learnt from context"
            )
        kept = f"The newest checkpoint of step {self.lowest_at:,} or earlier is kept"
        if self.lowest_at < self.save_every:
            kept = "No checkpoint was due by that step"
        return (
            f"{text}. {kept}. Most often the learning rate, "
            f"{self.peak_rates[self._phase_of(step)]:g}, is too high or the warm-up too short. "
            "docs/pretraining.md explains how to go back to a checkpoint"
        )

    def _phase_of(self, step: int) -> int:
        """Return the index (from 0) of the phase that contains step `step`, counted from 1."""
        return bisect.bisect_left(self._bounds[:-1], step, lo=1) - 1

    def _explanation(self, step: int) -> str:
        number, num_steps = self._phase_of(step), self.num_steps
        phase, rate = self.phases[number], self.peak_rates[number]
        tokens = phase.batch_size * phase.length
        above = self.smoothed > self.baseline + _FAR_ABOVE
        met = "the model predicts how frequent each token is and has learnt nothing from context"
        causes = [f"the learning rate, {rate:g}, is too high (try {_two_digits(rate / 3)})"]
        if above:
            met = "the model has not yet learnt even how frequent each token is"
            causes = [
                f"the learning rate, {rate:g}, is too low for so short a run (try "
                f"{_two_digits(rate * 3)}), or so high that the loss diverges "
                f"(try {_two_digits(rate / 3)})"
            ]
        if self.warmup_steps < 0.05 * num_steps:
            causes.append(
                f"the warm-up is too short: {self.warmup_steps:,} of {num_steps:,} steps (5 to 10% "
                f"suits a model of {self.num_layers} post-norm layers)"
            )
        if tokens < 32_768:
            causes.append(
                f"the batch is too small for this learning rate: {phase.batch_size} rows of "
                f"{phase.length}, {tokens:,} tokens a step"
            )
        if num_steps < 20_000:
            causes.append(f"{num_steps:,} steps are too few for this model and corpus")
        causes.append(
            "the corpus and its tokenizer do not fit each other "
            f"({100 * self.unknown_rate:.2g}% of the tokens are unknown)"
        )
        return (
            f"the {self.metric.title} is {self.smoothed:.3f} nats at step {step:,} (mean of "
            f"about {self.window} steps), and the {self.metric.baseline} of the corpus is "
            f"{self.baseline:.3f}: {met}. Runs that are still at this level after the warm-up "
            f"tend to stay at it. Likely causes, the most frequent first: {'; '.join(causes)}."
        )


def _two_digits(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")

"""Progress of a run: the scores of its trials, means of metrics, and the state between steps."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bert_jax.tasks.task import null
from bert_jax.training.loss_monitor import LossMonitor
from bert_jax.training.steps.guard import GUARD_METRICS
from bert_jax.training.steps.state import TrainState
from bert_jax.training.sweep.statistics import Outcome, Trial

_NO_MEANS = (*GUARD_METRICS, "num_tokens", "learning_rate")


@dataclass
class Progress:
    """Progress of one trial."""

    member: Trial
    scores: list[dict[str, Any]] = field(default_factory=list)
    """Step, epoch and scores of each evaluation; None replaces a score that is not finite."""
    best: float | None = None
    best_step: int = -1
    finite: bool = True
    """Whether all logits have been finite."""
    halted: bool = False
    """Whether the guard has stopped the trial."""
    best_epoch: float | None = None
    last: float | None = None
    """Score of the newest evaluation; None if it is not finite."""
    stopped: bool = False
    """Whether the trial has stopped early, after `patience` evaluations without improvement."""

    def take(
        self, step: int, epoch: float, scores: Mapping[str, float], metric: str, patience: int = 0
    ) -> bool:
        """Record an evaluation and update `stopped`; return true for the best evaluation so far."""
        known = {name: null(value) for name, value in scores.items()}
        self.scores.append({"step": step, "epoch": epoch, **known})
        score, sign = scores.get(metric, math.nan), -1 if metric.endswith("loss") else 1
        self.last = null(score)
        better = math.isfinite(score) and (self.best is None or sign * score > sign * self.best)
        if better:
            self.best, self.best_step, self.best_epoch = score, step, epoch
        self.stopped = self.has_waited(patience)
        return better

    def has_waited(self, patience: int) -> bool:
        """Return true if `patience` (above 0) or more evaluations followed the best evaluation."""
        waited = sum(each["step"] > self.best_step for each in self.scores)
        return bool(patience) and waited >= patience

    def outcome(
        self, goal: float = -math.inf, seconds: float = 0.0, test: Mapping[str, float] | None = None
    ) -> Outcome:
        """Return the outcome so far; the trial has failed if its last score is at most `goal`.

        `test` contains the scores of the best parameters on the test data.
        """
        return Outcome(
            member=self.member, scores=self.scores, best=self.best, best_step=self.best_step,
            failed=failure_reason(self.best, self.last, goal, self.finite, self.halted),
            seconds=seconds, best_epoch=self.best_epoch, last=self.last,
            test={name: null(value) for name, value in (test or {}).items()},
        )  # fmt: skip


def best_trial(progress: Sequence[Progress], init: str) -> tuple[float, int] | None:
    """Return (score, index) of the best trial of an initialisation; None if no score is finite.

    Equal scores are ranked by the step at which a trial reached the score, the earliest first, and
    then by the lowest index. So saves and restarts have no influence on the choice.
    """
    found = [
        (each.best, -each.best_step, -number)
        for number, each in enumerate(progress)
        if each.member.init == init and each.best is not None
    ]
    if not found:
        return None
    best, _, negative = max(found)
    return best, -negative


class Means:
    """Means of each metric, by trial, over the steps since metrics were last written.

    Steps that the guard rejected, and padding trials (after the first `count`), are left out.
    """

    def __init__(self, count: int):
        self._sums: dict[str, np.ndarray] = {}
        self._count = np.zeros(count, int)
        self.last: dict[str, np.ndarray] = {}
        """Metrics of the last step."""

    def add(self, metrics: Mapping[str, np.ndarray]) -> None:
        """Add the metrics of a step: arrays (M,) over trials."""
        metrics = {name: np.asarray(value)[: len(self._count)] for name, value in metrics.items()}
        self.last = metrics
        taken = (metrics["bad"] == 0) & (metrics["halted"] == 0)
        for name, value in metrics.items():
            if name not in _NO_MEANS:
                added = np.where(taken, value.astype(np.float64), 0.0)
                self._sums[name] = self._sums.get(name, 0.0) + added
        self._count += taken

    def __bool__(self) -> bool:
        """Return true if a step has been added since `take` was last called."""
        return bool(self._count.any())

    def median(self, name: str) -> float:
        """Return a metric's median over trials at the last step; NaN counts as infinite."""
        value = self.last[name].astype(np.float64)
        return float(np.median(np.where(np.isfinite(value), value, np.inf)))

    def take(self) -> dict[str, list[float | None]]:
        """Return means by metric and trial (None if all steps were rejected); begin new means."""
        counts = self._count.tolist()
        means = {
            name: [total / n if n else None for total, n in zip(sums.tolist(), counts, strict=True)]
            for name, sums in self._sums.items()
        }
        self._sums, self._count = {}, np.zeros_like(self._count)
        return means

    def state(self) -> dict[str, Any]:
        """Return the sums and counts as JSON, for a checkpoint."""
        sums = {name: values.tolist() for name, values in self._sums.items()}
        return {"sums": sums, "count": self._count.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the sums and counts from `state`, which the method `state` returned."""
        self._sums = {name: np.array(values) for name, values in state["sums"].items()}
        self._count = np.array(state["count"])


class DivergedError(RuntimeError):
    """Error that stops a run whose loss has diverged, if guard.on_divergence is `stop`."""

    exit_code = 4


@dataclass
class Moment:
    """State of a run between two steps, which a save stores and a restart restores."""

    stage: int
    step: int
    """Number of batches done in the whole run."""
    state: TrainState
    progress: list[Progress]
    """Progress of the stage's trials, without padding trials."""
    means: Means
    wave: int = 0
    best: Any = None
    """Trained parameters of each trial at its best evaluation; None if a run keeps none."""
    monitor: LossMonitor | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    """Outcomes of the trials of earlier stages."""
    scores: dict[str, Any] = field(default_factory=dict)
    """Metrics of the newest evaluation, by column."""
    scored_at: int = -1
    """Step of the newest evaluation."""
    seconds: float = 0.0
    """Seconds that earlier starts spent on the stage."""
    began: float = field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        """Return the seconds spent on the stage, over all starts."""
        return self.seconds + time.monotonic() - self.began

    def name_of(self, number: int) -> str:
        """Return the name of a trial for messages."""
        trial = self.progress[number].member
        settings = f"learning rate {trial.learning_rate:g}, seed {trial.seed}"
        return f"run {number + 1} of wave {self.wave} ({settings})"

    @property
    def ended(self) -> bool:
        """Whether all trials have stopped early."""
        return all(each.stopped for each in self.progress)


def failure_reason(
    best: float | None, last: float | None, goal: float, finite: bool, halted: bool = False
) -> str:
    """Return the reason why a run has failed at the end of training; "" if it has not failed.

    The score `last` must exceed `goal` (see `goal_score`). `best` is not compared: the best of many
    evaluations may exceed `goal` by chance, if nothing was learned. A score is None if not finite.
    `finite` says whether all logits were finite, `halted` whether the guard stopped the run.
    """
    if best is None:
        return "no evaluation gave a finite score"
    reasons = [] if finite else ["a loss or a score was not finite"]
    if halted:
        reasons.append("the run stopped at a loss or gradient that was not finite, or at a spike")
    if last is None:
        reasons.append("the last evaluation gave no finite score")
    elif not last > goal:
        reasons.append(f"the last evaluation's score {last:.4f} is not above {goal:.4f}")
    return "; ".join(reasons)

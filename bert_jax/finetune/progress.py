"""Progress of the trials of a sweep, and the words and columns for it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import bdtrik, stdtrit

from bert_jax.sweep.intervals import LEVEL
from bert_jax.sweep.statistics import Outcome, Trial, quantile

_CORRELATIONS = ("matthews", "pearson", "spearman")


class NoModelError(RuntimeError):
    """End of all runs of the initialisation, none with a finite score."""

    exit_code = 1


class NothingLearnedError(RuntimeError):
    """End of a run that is complete, and no better than a constant prediction."""

    exit_code = 8


@dataclass
class Progress:
    """Progress of one trial."""

    member: Trial
    scores: list[dict[str, Any]] = field(default_factory=list)
    """Scores of each evaluation; None is not a number."""
    best: float | None = None
    best_step: int = -1
    finite: bool = True
    """Whether all logits were numbers."""
    halted: bool = False
    """Whether the guard has stopped the trial."""
    best_epoch: float | None = None
    last: float | None = None
    """Score of the newest evaluation; None where it is not finite."""
    stopped: bool = False
    """Whether the trial has ended before the others: `patience` evaluations were no better."""

    def take(
        self,
        step: int,
        epoch: float,
        scores: Mapping[str, float],
        metric: str,
        patience: int = 0,
    ) -> bool:
        """Record an evaluation, and say whether it is the best so far.

        The trial stops after `patience` evaluations in a row that were no better; 0: never.
        """
        known = {name: null(value) for name, value in scores.items()}
        self.scores.append({"step": step, "epoch": epoch, **known})
        score = scores.get(metric, math.nan)
        self.last = null(score)
        better = math.isfinite(score) and (self.best is None or score > self.best)
        if better:
            self.best, self.best_step, self.best_epoch = score, step, epoch
        waited = sum(each["step"] > self.best_step for each in self.scores)
        self.stopped = bool(patience) and waited >= patience
        return better

    def outcome(
        self,
        goal: float = -math.inf,
        seconds: float = 0.0,
        test: Mapping[str, float] | None = None,
    ) -> Outcome:
        """Return the outcome so far, judged by `goal` (see `goal_score`).

        `test` has the scores on the test data of the best parameters.
        """
        return Outcome(
            member=self.member,
            scores=self.scores,
            best=self.best,
            best_step=self.best_step,
            failed=failure_reason(self.best, self.last, goal, self.finite, self.halted),
            seconds=seconds,
            best_epoch=self.best_epoch,
            last=self.last,
            test={name: null(value) for name, value in (test or {}).items()},
        )


class Losses:
    """Means of the training losses since the last row; records the trials that the guard stopped.

    A loss that the guard rejected is in no mean. Trials beyond those of `progress` only fill the
    program.
    """

    def __init__(self, progress: Sequence[Progress]):
        self._progress = progress
        self._sums, self._count = np.zeros(len(progress)), np.zeros(len(progress), int)
        self.last = math.nan
        """Median of the members at the last step."""

    def add(self, metrics: Mapping[str, np.ndarray]) -> None:
        """Add the metrics of a step, each (M,)."""
        count = len(self._progress)
        loss = np.asarray(metrics["loss"], np.float64)[:count]
        taken = (metrics["bad"][:count] == 0) & (metrics["halted"][:count] == 0)
        for each, halted in zip(self._progress, metrics["halted"], strict=False):
            each.halted = each.halted if each.stopped else bool(halted)
        self._sums += np.where(taken, loss, 0.0)
        self._count += taken
        self.last = float(np.median(np.where(np.isfinite(loss), loss, np.inf)))

    def take(self) -> list[float | None]:
        """Return the mean of each trial, None where no step was taken, and start anew."""
        means = [
            null(total / count) if count else None
            for total, count in zip(self._sums.tolist(), self._count.tolist(), strict=True)
        ]
        self._sums, self._count = np.zeros_like(self._sums), np.zeros_like(self._count)
        return means

    def state(self) -> dict[str, Any]:
        """Return the sums and counts as JSON, for a checkpoint."""
        return {"sums": self._sums.tolist(), "count": self._count.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; version 0.1.0 saved one count, and null for no number."""
        sums = np.array([math.nan if v is None else v for v in state["sums"]], np.float64)
        known = np.isfinite(sums)
        self._sums = np.where(known, sums, 0.0)
        self._count = np.where(known, state["count"], 0)


def evaluation_columns(
    losses: Sequence[float | None], scores: Sequence[Mapping[str, float]]
) -> dict[str, Sequence[float | None]]:
    """Return the columns of an evaluation's row, with a value for each trial.

    `losses` are those of the first dev split; scores are empty where logits were not finite.
    """
    columns: dict[str, Sequence[float | None]] = {}
    if any(loss is not None for loss in losses):
        columns["eval/loss"] = losses
    for name in dict.fromkeys(name for mine in scores for name in mine):
        columns[f"eval/{name}"] = [null(mine.get(name, math.nan)) for mine in scores]
    return columns


def evaluation_line(
    where: str, losses: Sequence[float | None], scores: Sequence[Mapping[str, float]], metric: str
) -> str:
    """Describe an evaluation at epoch and step `where`: training losses, and scores in `metric`."""
    found = [mine.get(metric) for mine in scores]
    known = [value for value in found if value is not None and math.isfinite(value)]
    text = _number(quantile(found, 0.5), "g")
    if len(scores) > 1 and known:
        text = f"median {text}, from {min(known):.4g} to {max(known):.4g}"
        if len(known) < len(scores):
            text += f"; {len(scores) - len(known)} of {len(scores)} not a number"
    return f"{where}  loss {_number(median_loss(losses), 'f')}  {metric} {text}"


def median_loss(losses: Sequence[float | None]) -> float | None:
    """Return the median, where a trial without a loss counts as the highest."""
    # The lowest loss is the best: a lost trial's is above all others.
    median = quantile([None if value is None else -value for value in losses], 0.5)
    return None if median is None else -median


def goal_score(metric: str, constant_score: float, rows: int, num_labels: int = 0) -> float:
    """Return the score that predictions made without the text exceed in at most about 5% of cases.

    Their expected score is at most `constant_score`; for macro F1 it is 1 / `num_labels`, by
    drawing labels as often as they occur. The mean of `rows` values in [0, 1] deviates from its
    expectation no more than the share of successes of a binomial: the bound is that of the
    binomial, exact for accuracy and generous for F1. For correlations the bound is Student's.

    Args:
        metric: Name of the score; a fraction or a correlation.
        constant_score: Score of the best constant prediction; NaN: the result is minus infinity.
        rows: Number of rows scored.
        num_labels: Number of labels in single-label tasks, else 0.
    """
    if not math.isfinite(constant_score):
        return -math.inf
    if metric in _CORRELATIONS:
        t = stdtrit(max(rows - 2, 1), LEVEL)
        return max(constant_score, float(t / math.sqrt(max(rows - 2, 1) + t * t)))
    expected = constant_score
    if metric == "macro_f1" and num_labels:
        expected = max(expected, 1 / num_labels)
    if not 0 < expected < 1:
        return expected
    return math.ceil(bdtrik(LEVEL, rows, expected)) / rows


def failure_reason(
    best: float | None, last: float | None, goal: float, finite: bool, halted: bool = False
) -> str:
    """Say why a run failed at the end of training; "" where it did not.

    The last evaluation is judged, because the best of many evaluations of a model that learned
    nothing is above `goal` by chance.

    Args:
        best: Score of the best evaluation; None: none was finite.
        last: Score of the last evaluation; None: not finite.
        goal: Result of `goal_score`.
        finite: Whether all logits were finite.
        halted: Whether the guard has stopped the run.
    """
    if best is None:
        return "no evaluation gave a finite score"
    reasons = [] if finite else ["a loss or a score was not finite"]
    if halted:
        reasons.append("a step was not finite or its loss a spike, and the run stopped there")
    if last is None:
        reasons.append("the last evaluation gave no finite score")
    elif not last > goal:
        reasons.append(f"the last evaluation's score {last:.4f} is not above {goal:.4f}")
    return "; ".join(reasons)


def unlearned(bests: Sequence[float | None], metric: str, constant_score: float) -> str:
    """Say that no run's best score is above the constant prediction's; "" where that is not so."""
    best = max((best for best in bests if best is not None), default=math.inf)
    if not best <= constant_score:
        return ""
    return (
        f"no run learned anything: the best {metric} on dev is {best:.4g}, and a constant "
        f"prediction has {constant_score:.4g}. Try other rates "
        "(sweep.learning_rates=1e-5,3e-5,1e-4), more steps (training.num_epochs), or a larger "
        "pretrained model (init)"
    )


def _number(value: float | None, kind: str) -> str:
    return "not a number" if value is None else f"{value:.4{kind}}"


def null(value: float) -> float | None:
    """Return a value for JSON: None where not finite."""
    return value if math.isfinite(value) else None

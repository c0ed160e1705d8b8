"""How far the members of a sweep are, and what is said of it: metrics.jsonl, lines, a bar."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.special import bdtrik, stdtrit

from bert_jax.run.console import Console
from bert_jax.run.telemetry import MetricsLog
from bert_jax.sweep.statistics import LEVEL, Member, Outcome, quantile

_CORRELATIONS = ("matthews", "pearson", "spearman")


@dataclass
class Progress:
    """One member's way so far."""

    member: Member
    scores: list[dict[str, Any]] = field(default_factory=list)
    """Of each evaluation; None is not a number."""
    best: float | None = None
    best_step: int = -1
    finite: bool = True
    """All of its losses and logits."""
    best_epoch: float | None = None
    last: float | None = None
    """Score of the newest evaluation; None where it is not finite."""

    def take(self, step: int, epoch: float, scores: Mapping[str, float], metric: str) -> bool:
        """Notes an evaluation; whether it is the best one so far."""
        known = {name: null(value) for name, value in scores.items()}
        self.scores.append({"step": step, "epoch": epoch, **known})
        score = scores.get(metric, math.nan)
        self.last = null(score)
        better = math.isfinite(score) and (self.best is None or score > self.best)
        if better:
            self.best, self.best_step, self.best_epoch = score, step, epoch
        return better

    def outcome(self, goal: float = -math.inf, seconds: float = 0.0) -> Outcome:
        """As it stands.

        Args:
            goal: From `goal_score`.
            seconds: The member's share of the time.
        """
        return Outcome(
            member=self.member,
            scores=self.scores,
            best=self.best,
            best_step=self.best_step,
            failed=judge(self.best, self.last, goal, self.finite),
            seconds=seconds,
            best_epoch=self.best_epoch,
            last=self.last,
        )


class Losses:
    """Means of the training losses since they were last asked for; notes who is not finite.

    Args:
        progress: Of the members; what the program computes beyond them only fills it.
    """

    def __init__(self, progress: Sequence[Progress]):
        self._progress = progress
        self._sums, self._count = np.zeros(len(progress)), 0
        self.last = math.nan
        """Median of the members at the last step."""

    def read(self, metrics: Any) -> None:
        """Waits for the metrics of a step; None: there is none."""
        if metrics is None:
            return
        loss = np.asarray(jax.device_get(metrics["loss"]), np.float64)[: len(self._progress)]
        for each, value in zip(self._progress, loss, strict=True):
            each.finite = each.finite and bool(np.isfinite(value))
        self._sums += loss
        self._count += 1
        self.last = float(np.median(np.where(np.isfinite(loss), loss, np.inf)))

    def take(self) -> list[float | None]:
        """The mean of each member, None where it is not finite; and starts anew."""
        means = self._sums / max(self._count, 1)
        self._sums, self._count = np.zeros_like(self._sums), 0
        return [null(float(value)) for value in means]

    def state(self) -> dict[str, Any]:
        """As JSON, for a checkpoint."""
        return {"sums": [null(value) for value in self._sums.tolist()], "count": self._count}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What `state` gave."""
        self._sums = np.array([math.nan if v is None else v for v in state["sums"]], np.float64)
        self._count = state["count"]


class Output:
    """What a run says; only process 0 writes and prints. A context manager."""

    def __init__(
        self,
        metrics: Path,
        *,
        begun: int,
        total: int,
        single: bool,
        echo: Callable[[str], None] | None = None,
    ):
        """Opens the files.

        Args:
            metrics: `metrics.jsonl`; rows beyond `begun` are dropped.
            begun: Steps of all waves that are done.
            total: Steps of all waves.
            single: There is one member; the values of others are lists.
            echo: Gets each line for people; None: standard output, with a bar on a terminal.
        """
        self._single = single
        self._console = Console(total, begun, echo)
        self._log = MetricsLog(metrics, begun) if jax.process_index() == 0 else None

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        self._console.close()
        if self._log is not None:
            self._log.close()

    def say(self, text: str) -> None:
        """A line for people."""
        self._console.say(text)

    def tick(self, loss: float) -> None:
        """A step is done."""
        self._console.tick(f"loss {loss:.3f}")

    def evaluated(
        self,
        total: int,
        where: Mapping[str, Any],
        loss: Sequence[float | None],
        scores: Sequence[Mapping[str, float]],
        metric: str,
    ) -> None:
        """A row of metrics and a line.

        Args:
            total: Steps of all waves that are done.
            where: Step of the wave, epoch and wave.
            loss: Of each member.
            scores: Of each member by name; empty where its logits were not finite.
            metric: The one for people.
        """
        if self._log is not None:
            row: dict[str, Any] = {name: where[name] for name in ("epoch", "wave")}
            columns: dict[str, Sequence[float | None]] = {"train/loss": loss}
            for name in dict.fromkeys(name for mine in scores for name in mine):
                columns[f"eval/{name}"] = [null(mine.get(name, math.nan)) for mine in scores]
            row |= {name: each[0] if self._single else each for name, each in columns.items()}
            self._log.write(total, row)
        found = [mine.get(metric) for mine in scores]
        known = [value for value in found if value is not None and math.isfinite(value)]
        shown = _shown(quantile(found, 0.5), "g")
        if len(scores) > 1 and known:
            shown = f"median {shown}, from {min(known):.4g} to {max(known):.4g}"
            if len(known) < len(scores):
                shown += f"; {len(scores) - len(known)} of {len(scores)} not a number"
        # The lowest loss is the best: a lost member's is above all others.
        train = quantile([None if value is None else -value for value in loss], 0.5)
        self.say(
            f"epoch {where['epoch']:.2f}  step {where['step']:,}  "
            f"loss {_shown(None if train is None else -train, 'f')}  {metric} {shown}"
        )

    def sync(self) -> None:
        """Returns when all rows are on the disk, if it takes them."""
        if self._log is not None:
            self._log.sync()


def goal_score(metric: str, constant_score: float, rows: int, num_labels: int = 0) -> float:
    """Score that predictions made without the text exceed in about 5% of cases at most.

    Their expected score is at most `constant_score`; of macro F1 it is 1 / `num_labels`, by drawing
    labels as often as they occur. The mean of `rows` values in [0, 1] deviates
    from its expectation no more than the share of successes of a binomial: the bound is that of
    the binomial, exact for accuracy and generous for F1. Of correlations the bound is Student's.

    Args:
        metric: name of the score; a fraction or a correlation.
        constant_score: score of the best constant prediction; NaN: minus infinity is returned.
        rows: number of rows that are scored.
        num_labels: number of labels of which a row has one; 0 in other tasks.
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


def judge(best: float | None, last: float | None, goal: float, finite: bool) -> str:
    """Why a run failed; empty where it did not. The end of training is judged.

    The best of many evaluations of a model that learned nothing is above `goal` by chance.

    Args:
        best: score of its best evaluation, None where none was finite.
        last: score of its last evaluation, None where that was not finite.
        goal: from `goal_score`.
        finite: whether all of its losses and scores were.
    """
    if best is None:
        return "no evaluation gave a finite score"
    reasons = [] if finite else ["a loss or a score was not finite"]
    if last is None:
        reasons.append("the last evaluation gave no finite score")
    elif not last > goal:
        reasons.append(f"the last evaluation's score {last:.4f} is not above {goal:.4f}")
    return "; ".join(reasons)


def _shown(value: float | None, kind: str) -> str:
    return "not a number" if value is None else f"{value:.4{kind}}"


def null(value: float) -> float | None:
    """The value, None where it is not finite: JSON has no other."""
    return value if math.isfinite(value) else None

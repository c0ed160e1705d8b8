"""How far the members of a sweep are, and what is said of it: metrics.jsonl, lines, a bar."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.finetune.statistics import Member, Outcome, judge
from bert_jax.training.console import Console
from bert_jax.training.telemetry import MetricsLog


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

    def take(self, step: int, epoch: float, scores: Mapping[str, float], metric: str) -> bool:
        """Notes an evaluation; whether it is the best one so far."""
        known = {name: null(value) for name, value in scores.items()}
        self.scores.append({"step": step, "epoch": epoch, **known})
        score = scores.get(metric, math.nan)
        better = math.isfinite(score) and (self.best is None or score > self.best)
        if better:
            self.best, self.best_step = score, step
        return better

    def outcome(self, constant_score: float = math.nan, seconds: float = 0.0) -> Outcome:
        """As it stands.

        Args:
            constant_score: Of the best constant prediction.
            seconds: The member's share of the time.
        """
        return Outcome(
            member=self.member,
            scores=self.scores,
            best=self.best,
            best_step=self.best_step,
            failed=judge(self.best, constant_score, self.finite),
            seconds=seconds,
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
        self.last = float(np.median(loss))

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
        known = [value for mine in scores if math.isfinite(value := mine.get(metric, math.nan))]
        shown = "not a number"
        if len(scores) == 1 and known:
            shown = f"{known[0]:.4g}"
        elif known:
            shown = f"median {np.median(known):.4g}, from {min(known):.4g} to {max(known):.4g}"
            if len(known) < len(scores):
                shown += f"; {len(scores) - len(known)} of {len(scores)} not a number"
        numbers = [value for value in loss if value is not None]
        train = f"{np.median(numbers):.4f}" if numbers else "not a number"
        self.say(
            f"epoch {where['epoch']:.2f}  step {where['step']:,}  loss {train}  {metric} {shown}"
        )

    def sync(self) -> None:
        """Returns when all rows are on the disk, if it takes them."""
        if self._log is not None:
            self._log.sync()


def null(value: float) -> float | None:
    """The value, None where it is not finite: JSON has no other."""
    return value if math.isfinite(value) else None

"""Status of a run from its work directory, during the run and afterwards.

Reads files only: no device is opened, since those of a running job belong to it.
"""

import contextlib
import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np

from bert_jax.checkpoint.storage import AnyPath, as_path, saved_steps
from bert_jax.checkpoint.verify import verified_steps
from bert_jax.errors import UserError
from bert_jax.objectives.objective import Metric, num_params
from bert_jax.run.events import read_events
from bert_jax.run.goodput import Start, down_seconds, read_starts, total_seconds
from bert_jax.run.loss_curve import draw_loss_curve
from bert_jax.run.telemetry import read_metrics
from bert_jax.training.config import PretrainConfig
from bert_jax.training.corpus import objective_of, open_corpus
from bert_jax.training.workdir import read_config, read_record

State = Literal["new", "running", "silent", "killed", "failed", "stopped", "finished"]
"""`silent`: longer without a sign of life than between two steps; it may be saving or evaluating.
`killed`: for so long that it must have ended, without a word."""

_ENDS: dict[str, State] = {
    "finished": "finished",
    "stopped": "stopped",
    "error": "failed",
    "stalled": "failed",
}
_NO_ERRORS = ("start", "saved", "finished", "stopped")
_MAX_ERRORS = 5
_MAX_POINTS = 200
_SOON = 60.0  # seconds; a run says every 10 that it lives, unless a step is longer
_LONG = 1800.0  # seconds without a step after which a watchdog ends a run, where none is set


@dataclass(frozen=True)
class PhaseStatus:
    """One phase of a run."""

    num_steps: int
    batch_size: int
    length: int


@dataclass(frozen=True)
class RunStatus:
    """Everything that a run of any kind says. Steps are updates made, times seconds since 1970."""

    workdir: str
    version: str
    """Version of bert_jax at the last start; "" where the run does not say."""
    num_steps: int | None
    """Length of the run; None where the run does not say."""
    step: int
    state: State
    heard: float | None
    """When there was last a sign of life."""
    silent_seconds: float | None
    steps_per_second: float | None
    seconds_left: float | None
    damaged: list[str]
    """Checkpoints that were found damaged and put aside."""
    seconds: dict[str, float]
    """Over all starts: `productive`, and by reason for the rest (see `goodput`)."""
    down_seconds: float
    """Between the starts."""
    num_starts: int
    num_killed: int
    """Starts that ended without a word."""
    errors: list[dict[str, Any]]
    """The last events that are not as they should be, the newest last."""


@dataclass(frozen=True)
class Status(RunStatus):
    """A pretraining run. Losses are in nats."""

    num_steps: int
    num_params: int
    num_layers: int
    hidden_dim: int
    vocab_size: int
    corpus: str
    corpus_tokens: int | None
    """None: the corpus is not where it was."""
    phases: list[PhaseStatus]
    checkpoints: list[int]
    """Steps of all that are complete, ascending."""
    verified: list[int]
    """Steps of the checkpoints that were read back after they were written."""
    metrics: tuple[Metric, ...]
    """Metrics of the run's objective; the curves are those of the first."""
    unigram_entropy: float | None
    """Baseline of the first metric, where the metric has one and the corpus is known."""
    train: dict[str, Any]
    """The last row of training metrics, with its `step`; empty when there is none."""
    evaluation: dict[str, Any]
    """The last evaluation."""
    curve: list[tuple[float, float]]
    """(step, first metric of training), thinned by means."""
    heldout_curve: list[tuple[float, float]]

    @property
    def phase(self) -> int:
        """Number of the phase, from 0, that the next step is in, or the last step was."""
        end = 0
        for number, phase in enumerate(self.phases):
            end += phase.num_steps
            if self.step < end:
                return number
        return len(self.phases) - 1


def run_status(
    workdir: Path,
    *,
    checkpoints: AnyPath | None = None,
    damaged: AnyPath | None = None,
    now: float | None = None,
) -> Status:
    """Return the status that the files in a work directory tell; nothing changes.

    Args:
        workdir: Work directory of a `bert-jax pretrain` run.
        checkpoints: Where its checkpoints are; None: in it.
        damaged: Where damaged ones are put; None: in it.
        now: Seconds since 1970; None: it is asked for.

    Raises:
        UserError: No run there, or its configuration cannot be read.
    """
    config = read_config(workdir)
    rows = read_metrics(workdir / "metrics.jsonl")
    saved, verified, damaged_names = _checkpoints(
        checkpoints or workdir / "checkpoints", damaged or workdir / "damaged"
    )
    metrics = config.metrics
    watched = metrics[0].name
    train, evaluation = _last(rows, f"train/{watched}"), _last(rows, f"eval/{watched}")
    tokens, entropy = _corpus(config, evaluation)
    num_steps = config.training.num_steps
    return Status(
        **run_values(
            workdir,
            version=_version(workdir),
            num_steps=num_steps,
            stall_seconds=config.training.stall_seconds,
            saved=saved,
            damaged=damaged_names,
            row=train,
            now=now,
        ),
        num_params=num_params(objective_of(config)),
        num_layers=config.model.num_layers,
        hidden_dim=config.model.hidden_dim,
        vocab_size=config.model.vocab_size,
        corpus=config.data.corpus,
        corpus_tokens=tokens,
        phases=[PhaseStatus(p.num_steps, p.batch_size, p.length) for p in config.phases],
        checkpoints=saved,
        verified=verified,
        unigram_entropy=entropy,
        train=train,
        evaluation=evaluation,
        metrics=metrics,
        curve=_thinned(_points(rows, f"train/{watched}")),
        heldout_curve=_points(rows, f"eval/{watched}"),
    )


def run_values(
    workdir: Path,
    *,
    version: str,
    num_steps: int | None,
    stall_seconds: float,
    saved: Sequence[int],
    damaged: list[str],
    row: Mapping[str, Any],
    now: float | None = None,
) -> dict[str, Any]:
    """Return the fields of `RunStatus`.

    Args:
        workdir: Work directory of the run.
        version: Version of bert_jax that made its last start.
        num_steps: Length of the run, if known.
        stall_seconds: Limit of the watchdog; 0: none.
        saved: Steps of the checkpoints.
        damaged: Checkpoints that were put aside.
        row: Newest row with rates.
        now: Seconds since 1970; None: the present.
    """
    rows = read_metrics(workdir / "metrics.jsonl")
    events = read_events(workdir / "events.jsonl")
    starts = read_starts(workdir / "goodput.json")
    step = _step(rows, starts, saved)
    heard = _heard(workdir, starts, events)
    silent = None if heard is None else max(0.0, (now or time.time()) - heard)
    logged = row.get("perf/steps_per_second")
    rate = logged if _is_number(logged) and logged > 0 else None
    ended = num_steps is not None and step >= num_steps and num_steps in saved
    return {
        "workdir": str(workdir),
        "version": version,
        "num_steps": num_steps,
        "step": step,
        "state": _state(
            events, silent, rate, stall_seconds, started=bool(rows or starts), ended=ended
        ),
        "heard": heard,
        "silent_seconds": silent,
        "steps_per_second": rate,
        "seconds_left": None
        if rate is None or num_steps is None
        else max(0, num_steps - step) / rate,
        "damaged": damaged,
        "seconds": total_seconds(starts),
        "down_seconds": down_seconds(starts),
        "num_starts": sum(start.count for start in starts),
        "num_killed": _num_killed(events),
        "errors": [e for e in events if e["kind"] not in _NO_ERRORS][-_MAX_ERRORS:],
    }


def redraw(workdir: Path, status: Status, path: Path) -> str:
    """Draws the loss curve as a PNG.

    Returns:
        What kept it from being drawn; "" when it was.
    """
    rows = read_metrics(workdir / "metrics.jsonl")
    if not status.curve and not status.heldout_curve:
        return "there is no loss to draw yet"
    if not path.parent.is_dir():
        return f"{path} cannot be written: No such file or directory"
    ends = np.cumsum([phase.num_steps for phase in status.phases])
    labels = [f"length {phase.length}" for phase in status.phases[1:]]
    try:
        draw_loss_curve(
            rows,
            status.metrics,
            status.unigram_entropy,
            path,
            title=workdir.absolute().name,
            phase_ends=[(int(end), label) for end, label in zip(ends[:-1], labels, strict=True)],
        )
    except (OSError, UserError) as error:
        return f"{path} cannot be written: {error}"
    return ""


def _checkpoints(checkpoints: AnyPath, damaged: AnyPath) -> tuple[list[int], list[int], list[str]]:
    """Return the steps of complete and of verified checkpoints, and the names of damaged ones."""
    aside = as_path(damaged)
    names = sorted(p.name for p in aside.iterdir()) if aside.is_dir() else []
    return saved_steps(checkpoints), verified_steps(checkpoints), names


def _version(workdir: Path) -> str:
    return str(read_record(workdir).get("bert_jax", ""))


def _corpus(config: PretrainConfig, evaluation: dict[str, Any]) -> tuple[int | None, float | None]:
    """Tokens and unigram entropy of the training corpus, as far as they are known."""
    metric = config.metrics[0]
    with contextlib.suppress(UserError, OSError):
        store = open_corpus(config.data.corpus).train
        return store.num_tokens, store.unigram_entropy if metric.baseline else None
    loss = evaluation.get(f"eval/{metric.name}")
    below = evaluation.get("eval/nats_below_unigram")
    return None, loss + below if _is_number(loss) and _is_number(below) else None


def _step(rows: list[dict[str, Any]], starts: list[Start], saved: Sequence[int]) -> int:
    if starts:  # the last start may have gone back to an earlier step than was logged
        return starts[-1].last_step
    return max([row["step"] for row in rows[-1:]] + list(saved[-1:]), default=0)


def _heard(workdir: Path, starts: list[Start], events: list[dict[str, Any]]) -> float | None:
    """Return the time of the last sign of life, by the files' content or else by their times."""
    times = [start.last for start in starts[-1:]]
    for event in events[-1:]:
        with contextlib.suppress(ValueError):
            times.append(datetime.datetime.fromisoformat(event["time"]).timestamp())
    if not times:
        with contextlib.suppress(OSError):
            times.append((workdir / "metrics.jsonl").stat().st_mtime)
    return max(times, default=None)


def _state(
    events: Sequence[dict[str, Any]],
    silent: float | None,
    rate: float | None,
    stall_seconds: float,
    *,
    started: bool,
    ended: bool,
) -> State:
    turns = [event["kind"] for event in events if event["kind"] in ("start", *_ENDS)]
    if turns and turns[-1] in _ENDS:
        return _ENDS[turns[-1]]
    if not turns and ended:
        return "finished"
    if silent is None or not (started or turns):
        return "new"
    if silent <= max(_SOON, 0.0 if rate is None else 5 / rate):
        return "running"
    return "silent" if silent <= (stall_seconds or _LONG) else "killed"


def _num_killed(events: Sequence[dict[str, Any]]) -> int:
    """Count the starts that the next start found without an end."""
    killed, open_start = 0, False
    for event in events:
        if event["kind"] == "start":
            killed += open_start
            open_start = True
        elif event["kind"] in _ENDS:
            open_start = False
    return killed


def _last(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next((row for row in reversed(rows) if name in row), {})


def _points(rows: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(float(row["step"]), float(row[name])) for row in rows if _is_number(row.get(name))]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over neighbours, `_MAX_POINTS` at most."""
    if len(points) <= _MAX_POINTS:
        return points
    groups = np.array_split(np.array(points), _MAX_POINTS)
    return [(float(x), float(y)) for x, y in (group.mean(axis=0) for group in groups)]


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and bool(np.isfinite(value))

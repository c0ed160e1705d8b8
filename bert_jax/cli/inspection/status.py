"""Status of a run, read from its work directory during the run or afterwards.

Only files are read. No device is opened, because a running job owns its devices.
"""

import contextlib
import datetime
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np

from bert_jax.artefacts.saved import runs
from bert_jax.config.mapping import build
from bert_jax.data.phases import Phase
from bert_jax.distributed.checkpoint.retention import branches_of
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.checkpoint.verify import verified_steps
from bert_jax.errors import UserError
from bert_jax.files.bucket import BucketAwayError
from bert_jax.files.remote import WorkDir
from bert_jax.objectives.objective import Metric, num_params
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import SHORT_TIMEOUT, open_corpus
from bert_jax.training.pretrain.saves import read_config
from bert_jax.training.pretrain.settings import objective_of
from bert_jax.training.run.events import read_events
from bert_jax.training.run.loss_curve import CorpusCurve, corpus_curves, draw_loss_curve
from bert_jax.training.run.telemetry import points, read_metrics

State = Literal["new", "running", "silent", "killed", "failed", "stopped", "finished"]
"""State of a run. `silent`: no sign of life for longer than a step takes; the run may be saving or
evaluating. `killed`: silent for so long that the run must have ended."""

_ENDS: dict[str, State] = {
    "finished": "finished", "stopped": "stopped", "error": "failed", "stalled": "failed",
}  # fmt: skip
_NO_ERRORS = "start", "saved", "attention", "recovered", "early_stop", "finished", "stopped"
_MAX_ERRORS = 5
_MAX_POINTS = 200
_SOON = 60.0  # seconds; signs of life come every 10 s, or every step if steps take longer
_LONG = 1800.0  # seconds of silence until a run without `stall_seconds` counts as killed


@dataclass(frozen=True)
class RunStatus:
    """Status of a run of any kind. Steps count updates; times are in seconds since 1970."""

    workdir: str
    version: str
    """Version of bert_jax at the last start, or an empty string if unknown."""
    num_steps: int | None
    """Length of the run in steps, or None if unknown."""
    step: int
    state: State
    heard: float | None
    """Time of the last sign of life, or None if there was none."""
    silent_seconds: float | None
    steps_per_second: float | None
    seconds_left: float | None
    damaged: list[str]
    """Names of checkpoints that were found damaged and moved to damaged/."""
    seconds: dict[str, float]
    """Seconds of all starts: `productive`, and other time by reason (see `saved.runs.REASONS`)."""
    down_seconds: float
    """Total seconds between an end of the run and its next start, when nothing ran."""
    num_starts: int
    num_killed: int
    """Number of starts for which no end was recorded before the next start."""
    errors: list[dict[str, Any]]
    """Latest error events, the newest last."""


@dataclass(frozen=True)
class PretrainStatus(RunStatus):
    """Status of a pretraining run. Losses are in nats."""

    num_steps: int
    num_params: int
    num_layers: int
    hidden_dim: int
    vocab_size: int
    corpus: str
    corpus_tokens: int | None
    """Number of tokens in the corpus, or None if the corpus is no longer where it was."""
    phases: tuple[Phase, ...]
    checkpoints: list[int]
    """Steps of the complete checkpoints, ascending."""
    verified: list[int]
    """Steps of the checkpoints that were read back after they were written."""
    metrics: tuple[Metric, ...]
    """Metrics of the run's objective; the curves show the first metric."""
    unigram_entropy: float | None
    """Baseline of the first metric; None if there is no baseline or the baseline is unknown."""
    train: dict[str, Any]
    """Last row of training metrics, with its `step`; empty before the first row."""
    evaluation: dict[str, Any]
    """Last row of held-out metrics; empty before the first row."""
    origin: str
    """Checkpoint from which the run branches, or checkpoints that were averaged; may be empty."""
    branches: dict[int, list[str]]
    """Work directories of branches, by starting step; checkpoints at these steps are kept."""
    curve: list[tuple[float, float]]
    """Points (step, first training metric). If there are many, neighbouring points are averaged."""
    heldout_curve: list[tuple[float, float]]
    corpora: list[CorpusCurve]
    """Text read so far and held-out loss for each corpus of a mixture; empty without a mixture."""

    @property
    def phase(self) -> int:
        """Phase of the next step, counted from 0; the last phase if the run has finished."""
        ends = itertools.accumulate(phase.num_steps for phase in self.phases)
        current = (number for number, end in enumerate(ends) if self.step < end)
        return next(current, len(self.phases) - 1)


@dataclass(frozen=True)
class FinetuneStatus(RunStatus):
    """Status of a fine-tuning run. Steps are counted through all waves of trials."""

    task: str
    init: str
    runs: int
    """Number of runs in the sweep."""
    num_epochs: float
    evaluation: dict[str, Any]
    """Newest row of metrics, of training or of an evaluation; empty before the first row."""
    model_saved: bool
    statistics: str
    """Statistics of a finished run as text; empty before the end."""


def pretrain_status(work: WorkDir, *, now: float | None = None) -> PretrainStatus:
    """Return the status of a pretraining run without changing the run.

    `now` is a time in seconds since 1970; None means the present. Raise a UserError if there is no
    run, or its configuration cannot be read.
    """
    workdir = work.local
    config = read_config(workdir)
    rows = read_metrics(workdir / "metrics.jsonl")
    saved, metrics = saved_steps(work.checkpoints), config.metrics
    watched = metrics[0].name
    train, evaluation = _last(rows, f"train/{watched}"), _last(rows, f"eval/{watched}")
    tokens, entropy = _corpus(config, evaluation)
    record = runs.read_record(workdir, "pretrain")
    return PretrainStatus(
        **_run_values(work, record, config, rows, train, config.training.num_steps, saved, now),
        num_params=num_params(objective_of(config)), num_layers=config.model.num_layers,
        hidden_dim=config.model.hidden_dim, vocab_size=config.model.vocab_size,
        corpus=config.data.corpus, corpus_tokens=tokens, phases=config.phases, checkpoints=saved,
        verified=verified_steps(work.checkpoints), unigram_entropy=entropy, train=train,
        evaluation=evaluation, metrics=metrics, origin=_origin(record),
        branches=branches_of(work.checkpoints), curve=_thinned(points(rows, f"train/{watched}")),
        heldout_curve=points(rows, f"eval/{watched}"), corpora=corpus_curves(rows, metrics[0]),
    )  # fmt: skip


def finetune_status(work: WorkDir) -> FinetuneStatus:
    """Return the status of a fine-tuning run without changing the run.

    Raise a UserError if there is no fine-tuning run, or its configuration cannot be read.
    """
    workdir = work.local
    record = runs.read_record(workdir, "finetune")
    config = build(FinetuneConfig, record["config"], where=str(workdir / "config.json"))
    rows = read_metrics(workdir / "metrics.jsonl")
    finished, text = (workdir / runs.STATISTICS).exists(), workdir / "statistics.txt"
    events = read_events(workdir / "events.jsonl")
    lengths = [event.get("num_steps") for event in events if event["kind"] == "start"]
    num_steps = lengths[-1] if lengths and isinstance(lengths[-1], int) else None
    newest, saved = _last(rows, "train/loss"), saved_steps(work.resume)
    values = _run_values(work, record, config, rows, newest, num_steps, saved)
    return FinetuneStatus(
        **values | {"damaged": []} | ({"state": "finished"} if finished else {}),
        task=" ".join([config.task.kind, getattr(config.task, "name", "")]).rstrip(),
        init=config.init,
        runs=config.num_trials,
        num_epochs=config.training.num_epochs,
        evaluation=_last(rows, "epoch"),
        model_saved=bool(saved_steps(work.checkpoints)),
        statistics=text.read_text(encoding="utf-8") if finished and text.exists() else "",
    )


def _run_values(
    work: WorkDir,
    record: Mapping[str, Any],
    config: PretrainConfig | FinetuneConfig,
    rows: list[dict[str, Any]],
    row: Mapping[str, Any],
    num_steps: int | None,
    saved: Sequence[int],
    now: float | None = None,
) -> dict[str, Any]:
    """Return the values of the fields of `RunStatus`.

    `rows` are from `metrics.jsonl`, `row` is the newest training row, `saved` has all saved steps.
    """
    workdir, aside = work.local, work.damaged
    events = read_events(workdir / "events.jsonl")
    starts = runs.read_starts(workdir / "goodput.json")
    step = max([row["step"] for row in rows[-1:]] + list(saved[-1:]), default=0)
    if starts:  # the last start may have gone back to an earlier step
        step = starts[-1].last_step
    heard = _heard(work, starts, events)
    silent = None if heard is None else max(0.0, (now or time.time()) - heard)
    logged = row.get("perf/steps_per_second")
    rate = logged if _is_number(logged) and logged > 0 else None
    ended = num_steps is not None and step >= num_steps and num_steps in saved
    turns = [event["kind"] for event in events if event["kind"] in ("start", *_ENDS)]
    known = silent if rows or starts or turns else None
    soon, long = max(_SOON, 5 / rate if rate else 0.0), config.training.stall_seconds or _LONG
    state = _state(turns, known, soon=soon, long=long, ended=ended)
    end = step if state == "finished" else num_steps  # `training.patience` may end a run early
    left = None if rate is None or end is None else max(0, end - step) / rate
    return {
        "workdir": work.name, "version": str(record.get("bert_jax", "")), "num_steps": num_steps,
        "step": step, "state": state, "heard": heard, "silent_seconds": silent,
        "steps_per_second": rate, "seconds_left": left,
        "damaged": sorted(path.name for path in aside.iterdir()) if aside.is_dir() else [],
        "seconds": runs.total_seconds(starts), "down_seconds": runs.down_seconds(starts),
        "num_starts": sum(start.count for start in starts),
        "num_killed": sum(pair == ("start", "start") for pair in itertools.pairwise(turns)),
        "errors": [e for e in events if e["kind"] not in _NO_ERRORS][-_MAX_ERRORS:],
    }  # fmt: skip


def redraw(workdir: Path, status: PretrainStatus, path: Path) -> None:
    """Draw the loss curve as a PNG file. Raise a UserError if no loss has been logged yet."""
    if not status.curve and not status.heldout_curve:
        raise UserError("there is no loss to draw yet")
    metrics, baseline, title = status.metrics, status.unigram_entropy, workdir.absolute().name
    file = workdir / "metrics.jsonl"
    draw_loss_curve(file, metrics, baseline, path, title=title, phases=status.phases)


def _origin(record: Mapping[str, Any]) -> str:
    """Name the checkpoints from which a run or model comes; `record` is its config.json."""
    try:
        if "average" in record:
            made = record["average"]
            names = [f"{each['workdir']} at step {each['step']:,}" for each in made["sources"]]
            return f"{made['method']} of {', '.join(names)}"
        parts, branch = [], record.get("branch")
        while branch:
            parts.append(f"{branch['workdir']} from step {branch['step']:,}")
            branch = branch.get("branch")
    except (AttributeError, KeyError, TypeError, ValueError):
        return "not known: config.json names no checkpoint"
    return f"branch of {', a branch of '.join(parts)}" if parts else ""


def _corpus(config: PretrainConfig, evaluation: dict[str, Any]) -> tuple[int | None, float | None]:
    """Return the corpus's number of tokens and the metric's baseline, each None if unknown."""
    metric, data = config.metrics[0], replace(config.data, read_timeout=SHORT_TIMEOUT)
    with contextlib.suppress(UserError, OSError, BucketAwayError):
        store = open_corpus(config.data.corpus, data).train
        return store.num_tokens, config.objective.baseline(store) if metric.baseline else None
    loss = evaluation.get(f"eval/{metric.name}")
    below = evaluation.get("eval/nats_below_unigram")
    return None, loss + below if _is_number(loss) and _is_number(below) else None


def _heard(work: WorkDir, starts: list[runs.Start], events: list[dict[str, Any]]) -> float | None:
    """Return the time of the last recorded sign of life, else when metrics.jsonl last changed."""
    times = [start.last for start in starts[-1:]]
    if work.mirror is not None:  # a bucket gets records with saves only, but renewals all the time
        times += work.mirror.renewals
    for event in events[-1:]:
        with contextlib.suppress(ValueError):
            times.append(datetime.datetime.fromisoformat(event["time"]).timestamp())
    if not times:
        with contextlib.suppress(OSError):
            times.append((work.local / "metrics.jsonl").stat().st_mtime)
    return max(times, default=None)


def _state(
    turns: Sequence[str], silent: float | None, *, soon: float, long: float, ended: bool
) -> State:
    """Decide the state of a run, `silent` seconds after its last sign of life.

    `turns` are the starts and ends in the log. A run counts as silent after `soon` seconds, and as
    killed after `long` seconds. `ended` says whether the checkpoint of the last step exists.
    """
    if turns and turns[-1] in _ENDS:
        return _ENDS[turns[-1]]
    if not turns and ended:
        return "finished"
    if silent is None:
        return "new"
    if silent <= soon:
        return "running"
    return "silent" if silent <= long else "killed"


def _last(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next((row for row in reversed(rows) if name in row), {})


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= _MAX_POINTS:
        return points
    groups = np.array_split(np.array(points), _MAX_POINTS)
    return [(float(x), float(y)) for x, y in (group.mean(axis=0) for group in groups)]


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and bool(np.isfinite(value))

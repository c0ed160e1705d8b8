"""The fine-tuning loop: waves of members, evaluations, the best model, results."""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from bert_jax.checkpoint import Checkpoints, Retention
from bert_jax.checkpoint.reading import all_agree
from bert_jax.finetune.batches import choose_buckets
from bert_jax.finetune.config import FinetuneConfig
from bert_jax.finetune.evaluate import finite, member_outputs
from bert_jax.finetune.setup import Setup, set_up
from bert_jax.finetune.statistics import Member, Outcome, judge, summarise
from bert_jax.finetune.statistics_report import summary_lines, write_summary
from bert_jax.finetune.step import (
    SweepState,
    abstract_sweep,
    init_sweep,
    make_eval_step,
    make_keep_best,
    make_sweep_step,
    place_members,
    place_rows,
    place_settings,
    sweep_mesh,
)
from bert_jax.finetune.workdir import (
    FinetunedState,
    check_finetune_workdir,
    prepare_finetune_workdir,
    remove_resume,
    saved_content,
)
from bert_jax.training.events import Events
from bert_jax.training.interrupt import StopRequest
from bert_jax.training.remote import WorkDir, open_workdir
from bert_jax.training.telemetry import MetricsLog, duration
from bert_jax.training.watchdog import Watchdog
from bert_jax.untrusted.json_file import read_json_object

_RESUME = "resume"
_SAVE_SECONDS = 60.0
"""A run is saved after an evaluation when so much would be lost."""
_MAX_STATISTICS_BYTES = 1 << 28
_DONE = "statistics.json"
"""Written when all members have ended."""


@dataclass(frozen=True)
class FinetuneResult:
    """How a run ended."""

    finished: bool
    outcomes: tuple[Outcome, ...]
    """Of the members that have ended."""
    seconds: float
    """Of this start, compilations included."""


def finetune(
    config: FinetuneConfig,
    workdir: Path | str,
    *,
    echo: Callable[[str], None] | None = None,
) -> FinetuneResult:
    """Fine-tunes all members of a sweep, or continues the run in `workdir`.

    With several processes all call it, after `jax.distributed.initialize`; they share `workdir`.

    Args:
        config: The run.
        workdir: Made if missing; a local directory, or `gs://bucket/directory`.
        echo: Gets each line for people; None: standard output, with a bar on a terminal.

    Raises:
        UserError: The configuration, the data, the initialisation and the work directory do not fit
            together. Nothing has been written.
    """
    setup = set_up(config)
    place = open_workdir(workdir)
    check_finetune_workdir(place, config, setup.fingerprints)
    if (place.local / _DONE).exists():
        remove_resume(place.checkpoints.parent / _RESUME)
        (echo or print)(f"{place.name} is finished")
        (echo or print)((place.local / "statistics.txt").read_text().rstrip())
        return FinetuneResult(True, _ended(place.local / _DONE), 0.0)
    run = _Run(config, setup, place, echo)
    with StopRequest() as stop:
        return run.run(stop)


@dataclass
class _Progress:
    """One member's way so far."""

    member: Member
    scores: list[dict[str, float | None]] = field(default_factory=list)
    """Of each evaluation; None is not a number."""
    best: float | None = None
    best_step: int = -1
    finite: bool = True

    def take(self, step: int, epoch: float, scores: dict[str, float], metric: str) -> bool:
        """Notes an evaluation; whether it is the best one so far."""
        known = {name: _null(value) for name, value in scores.items()}
        self.scores.append({"step": step, "epoch": epoch, **known})
        score = scores.get(metric, math.nan)
        better = math.isfinite(score) and (self.best is None or score > self.best)
        if better:
            self.best, self.best_step = score, step
        return better


class _Run:
    """What a run holds while it lasts."""

    def __init__(
        self,
        config: FinetuneConfig,
        setup: Setup,
        place: WorkDir,
        echo: Callable[[str], None] | None,
    ):
        self.config, self.setup, self.place = config, setup, place
        self.mesh = sweep_mesh(len(setup.waves[0]))
        self.train_step = make_sweep_step(setup.step, self.mesh)
        self.eval_step = make_eval_step(setup.step, self.mesh)
        self.keep_best = make_keep_best(self.mesh)
        self.member_params = jax.jit(
            lambda tree, number: jax.tree.map(lambda leaf: leaf[number], tree),
            out_shardings=NamedSharding(self.mesh, PartitionSpec()),
        )
        limit = setup.step.model.num_positions
        self.dev_buckets = [
            choose_buckets(split.rows.lengths, config.training.max_buckets, limit=limit)
            for split in setup.dev
        ]
        self.constant = setup.dev[0].constant_score
        self.main = jax.process_index() == 0
        self.outcomes: list[Outcome] = []
        self.wave_number = 0
        self.best_saved: tuple[float, int] | None = None
        """Score and step (over all waves) of the checkpoint."""
        self.saved_at = time.monotonic()
        self.started = time.monotonic()
        self._echo = echo
        self._bar: Any = None

    def run(self, stop: StopRequest) -> FinetuneResult:
        config, setup, place = self.config, self.setup, self.place
        events = Events(place.local / "events.jsonl", jax.process_index())
        stacks = place.local / f"stacks.{jax.process_index()}.txt"
        with Watchdog(config.training.stall_seconds, stacks, events=events) as self.watchdog:
            prepare_finetune_workdir(
                place.local, config, setup.fingerprints, setup.initial.tokenizer_files
            )
            place.sync(required=True)
            self.resume = place.checkpoints.parent / _RESUME

            def report(kind: str, step: int, message: str) -> None:
                events.write(kind, message, step=step)

            keep_one = Retention(keep=1)
            self.checkpoints = Checkpoints(place.checkpoints, keep_one, report=report)
            self.saves = Checkpoints(self.resume, keep_one, report=report)
            try:
                return self._run(stop, events)
            except BaseException as error:
                events.write("error", f"{type(error).__name__}: {error}")
                raise
            finally:
                self.checkpoints.close()
                self.saves.close()
                place.sync()

    def _run(self, stop: StopRequest, events: Events) -> FinetuneResult:
        setup = self.setup
        restored = self._restore()
        begun = self.wave_number * setup.step.num_steps + (restored[1] if restored else 0)
        if self.main:
            self.metrics = MetricsLog(self.place.local / "metrics.jsonl", begun)
        for line in self._summary(begun):
            self._say(line)
        events.write("start", self._summary(begun)[0], step=begun)
        finished = True
        with self._progress_bar(begun) as self._bar:
            while finished and self.wave_number < len(setup.waves):
                finished = self._wave(setup.waves[self.wave_number], restored, stop)
                restored = None
        seconds = time.monotonic() - self.started
        if self.main:
            self.metrics.close()
        if finished:
            self._finish(seconds)
        else:
            self._say(f"stopped by {stop.name}; the same command continues")
        events.write("finished" if finished else "stopped", duration(seconds))
        return FinetuneResult(finished, tuple(self.outcomes), seconds)

    # One wave.

    def _wave(
        self,
        members: tuple[Member, ...],
        restored: tuple[SweepState, int, list[_Progress]] | None,
        stop: StopRequest,
    ) -> bool:
        """Trains members to the end; False where a signal stopped them, with all saved."""
        setup, began = self.setup, time.monotonic()
        num_steps = setup.step.num_steps
        if restored is None:
            which = np.array([setup.inits.index(member.init) for member in members])
            seeds = np.array([member.seed for member in members], np.uint32)
            state = init_sweep(setup.step, self.mesh, seeds, setup.encoders, which)
            step, progress = 0, [_Progress(member) for member in members]
        else:
            state, step, progress = restored
        settings = place_settings(
            [member.learning_rate for member in members],
            [member.seed for member in members],
            self.mesh,
        )
        losses = _Losses(progress)
        unread: Any = None
        for batch in self._batches(members, step):
            state, metrics = self.train_step(state, settings, place_rows(batch, self.mesh))
            step += 1
            losses.read(unread)  # of the step before, so that one is always queued
            unread = metrics
            self.watchdog.alive(f"step {step:,}")
            self._tick(losses.last)
            if step in setup.eval_steps:
                losses.read(unread)
                unread = None
                state = self._evaluate(state, step, progress, losses)
                self._save_if_due(state, step, progress)
            elif stop.due(self._total(step)):
                losses.read(unread)
                self._save(state, step, progress)
                return False
            if step == num_steps:
                break
        last = partial(self.checkpoints.save_last, read_back=True)
        self._save_best(state, step, progress, last)
        seconds = (time.monotonic() - began) / len(members)
        kept = min(len(members), len(setup.members) - len(self.outcomes))
        self.outcomes += [self._outcome(each, seconds) for each in progress[:kept]]
        self.wave_number += 1
        return True

    def _batches(self, members: tuple[Member, ...], step: int) -> Iterator[dict[str, np.ndarray]]:
        per_epoch = self.setup.batches.num_batches
        seeds = [member.seed for member in members]
        epoch, start = divmod(step, per_epoch)
        while True:
            yield from self.setup.batches.epoch(epoch, seeds, start)
            epoch, start = epoch + 1, 0

    def _evaluate(
        self, state: SweepState, step: int, progress: list[_Progress], losses: "_Losses"
    ) -> SweepState:
        setup = self.setup
        scores: list[dict[str, float]] = [{} for _ in progress]
        for number, (split, buckets) in enumerate(zip(setup.dev, self.dev_buckets, strict=True)):
            outputs = member_outputs(
                setup.step, self.mesh, self.eval_step, state.params, split.rows,
                buckets=buckets,
                batch_size=self.config.training.eval_batch_size,
                pad_id=setup.initial.tokenizer.special_ids.pad,
                done=lambda _: self.watchdog.alive("a batch of an evaluation"),
            )  # fmt: skip
            for member, (mine, theirs) in enumerate(zip(scores, outputs, strict=True)):
                repeated = progress[member].member in [p.member for p in progress[:member]]
                found = {} if repeated or not finite(theirs) else split.score(theirs)
                if not finite(theirs):
                    progress[member].finite = False
                prefix = f"{split.name}/" if number else ""
                mine.update({f"{prefix}{name}": value for name, value in found.items()})
                self.watchdog.alive("scoring")
        epoch = step / setup.batches.num_batches
        metric = setup.task.metric
        better = [
            each.take(step, epoch, mine, metric)
            for each, mine in zip(progress, scores, strict=True)
        ]
        self._write_metrics(step, epoch, scores, losses)
        if any(better):
            state = self.keep_best(state, place_members(np.array(better), self.mesh))
        return state

    def _outcome(self, progress: _Progress, seconds: float) -> Outcome:
        return Outcome(
            member=progress.member,
            scores=progress.scores,
            best=progress.best,
            best_step=progress.best_step,
            failed=judge(progress.best, self.constant, progress.finite),
            seconds=seconds,
        )

    # What is kept.

    def _total(self, step: int) -> int:
        """Updates made in all waves: numbers of checkpoints and rows of metrics only grow."""
        return self.wave_number * self.setup.step.num_steps + step

    def _save_if_due(self, state: SweepState, step: int, progress: list[_Progress]) -> None:
        if not all_agree(time.monotonic() - self.saved_at < _SAVE_SECONDS):
            self._save(state, step, progress)

    def _save(self, state: SweepState, step: int, progress: list[_Progress]) -> None:
        """The best model so far, and everything that a restart needs."""
        self._save_best(state, step, progress, self.checkpoints.save)
        self.saves.save(
            self._total(step),
            state,
            config={},
            extra={
                "wave": self.wave_number,
                "step": step,
                "progress": [dataclasses.asdict(each) for each in progress],
                "outcomes": [dataclasses.asdict(each) for each in self.outcomes],
                "best_saved": self.best_saved,
            },
        )
        self.saved_at = time.monotonic()
        self.place.sync()

    def _save_best(
        self,
        state: SweepState,
        step: int,
        progress: list[_Progress],
        save: Callable[..., None],
    ) -> None:
        """The best member of the first initialisation, if it is better than what is saved."""
        mine = [
            (each.best, -number)
            for number, each in enumerate(progress)
            if each.member.init == self.setup.inits[0] and each.best is not None
        ]
        if not mine:
            return
        best, negative = max(mine)
        if self.best_saved is not None and best <= self.best_saved[0]:
            return
        each = progress[-negative]
        total = self._total(step)
        save(
            total,
            FinetunedState(self.member_params(state.best, -negative)),
            **saved_content(
                self.config, self.setup.step.model, self.setup.step.head, self.setup.task,
                self._outcome(each, 0.0).best_scores, each.member,
            ),
        )  # fmt: skip
        self.best_saved = (best, total)

    def _restore(self) -> tuple[SweepState, int, list[_Progress]] | None:
        abstract = abstract_sweep(self.setup.step, self.mesh, len(self.setup.waves[0]))
        restored = self.saves.restore(abstract)
        if restored is None:
            return None
        extra = restored.record.extra
        self.wave_number = extra["wave"]
        self.outcomes = [_outcome(each) for each in extra["outcomes"]]
        saved = extra["best_saved"]
        self.best_saved = None if saved is None else (saved[0], saved[1])
        progress = [
            _Progress(**{**each, "member": Member(**each["member"])}) for each in extra["progress"]
        ]
        return restored.state, extra["step"], progress

    def _finish(self, seconds: float) -> None:
        self.checkpoints.wait()
        summary = summarise(self.outcomes, self.setup.task.metric, self.constant)
        percent = self.setup.step.objective == "span"
        if self.main:
            write_summary(
                summary, self.place.local, title=Path(self.place.name).name, percent=percent
            )
        self._say("")
        for line in summary_lines(summary, percent=percent):
            self._say(line)
        self._say(
            f"{duration(seconds)}, {len(self.outcomes)} runs; the best of {self.setup.inits[0]} is "
            f"in {self.place.checkpoints}"
        )
        self.saves.close()  # nothing reads there any more
        remove_resume(self.resume)

    # What people see.

    def _summary(self, begun: int) -> list[str]:
        setup, total = self.setup, len(self.setup.waves) * self.setup.step.num_steps
        head = f"fine-tuning {', '.join(setup.inits)} in {self.place.name}"
        lines = [head if not begun else f"{head}, continued at step {begun:,} of {total:,}"]
        lines += [f"Warning: {text}" for split in (setup.train, *setup.dev)
                  for text in split.warnings]  # fmt: skip
        shapes = ", ".join(f"{n} x {length}" for length, n in setup.batches.batches_of.items())
        sizes = ", ".join(f"{split.name} {len(split.rows):,}" for split in setup.dev)
        lines += [
            f"data     {len(setup.train.rows):,} rows to train on; {sizes}",
            f"batches  {setup.batches.num_batches:,} of {self.config.training.batch_size} rows an "
            f"epoch, by length: {shapes}",
            f"runs     {len(setup.members)} of {setup.step.num_steps:,} steps, "
            f"{len(setup.waves[0])} at once, devices as member {self.mesh.shape['member']} x data "
            f"{self.mesh.shape['data']}",
            f"goal     {setup.task.metric} above {self.constant:.4g}, which the best "
            "constant prediction has",
        ]
        return lines

    def _write_metrics(
        self, step: int, epoch: float, scores: list[dict[str, float]], losses: "_Losses"
    ) -> None:
        metric = self.setup.task.metric
        loss = losses.take()
        values = [mine.get(metric, math.nan) for mine in scores if mine]
        if self.main:
            one = len(self.setup.waves[0]) == 1
            row: dict[str, Any] = {"epoch": epoch, "wave": self.wave_number}
            row["train/loss"] = loss[0] if one else loss
            for name in scores[0]:
                each = [mine.get(name, math.nan) for mine in scores]
                row[f"eval/{name}"] = each[0] if one else [_null(value) for value in each]
            self.metrics.write(self._total(step), row)
        known = [value for value in values if math.isfinite(value)]
        shown = "not a number"
        if len(values) == 1 and known:
            shown = f"{known[0]:.4g}"
        elif known:
            shown = f"median {np.median(known):.4g}, from {min(known):.4g} to {max(known):.4g}"
        numbers = [value for value in loss if value is not None]
        train = f"{np.median(numbers):.4f}" if numbers else "not a number"
        self._say(f"epoch {epoch:.2f}  step {step:,}  loss {train}  {metric} {shown}")

    def _say(self, text: str) -> None:
        if not self.main:
            return
        if self._echo is not None:
            self._echo(text)
        elif self._bar is not None:
            tqdm.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    @contextlib.contextmanager
    def _progress_bar(self, begun: int) -> Iterator[Any]:
        total = len(self.setup.waves) * self.setup.step.num_steps
        if not self.main or self._echo is not None or not sys.stderr.isatty():
            yield None
            return
        with tqdm(total=total, initial=begun, unit="step", dynamic_ncols=True, leave=False) as bar:
            yield bar
        self._bar = None

    def _tick(self, loss: float) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            self._bar.update(1)


class _Losses:
    """Means of the training losses since they were last asked for; notes who is not finite."""

    def __init__(self, progress: list[_Progress]):
        self._progress = progress
        self._sums, self._count = np.zeros(len(progress)), 0
        self.last = math.nan

    def read(self, metrics: Any) -> None:
        if metrics is None:
            return
        loss = np.asarray(jax.device_get(metrics["loss"]), np.float64)
        for each, value in zip(self._progress, loss, strict=True):
            each.finite = each.finite and bool(np.isfinite(value))
        self._sums += loss
        self._count += 1
        self.last = float(np.median(loss))

    def take(self) -> list[float | None]:
        means = self._sums / max(self._count, 1)
        self._sums, self._count = np.zeros_like(self._sums), 0
        return [_null(float(value)) for value in means]


def _null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ended(path: Path) -> tuple[Outcome, ...]:
    record = read_json_object(path, max_bytes=_MAX_STATISTICS_BYTES)
    return tuple(_outcome(each) for each in record["outcomes"])


def _outcome(record: dict[str, Any]) -> Outcome:
    return Outcome(**{**record, "member": Member(**record["member"])})

"""The fine-tuning loop: waves of members, evaluations, the best model, results."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.checkpoint import SaveFailedError
from bert_jax.checkpoint.agreement import all_agree, by_first
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.finetune.batches import choose_buckets
from bert_jax.finetune.config import FinetuneConfig
from bert_jax.finetune.evaluate import finite, member_outputs
from bert_jax.finetune.progress import Losses, Output, Progress, goal_score
from bert_jax.finetune.saves import Saves, Wave
from bert_jax.finetune.setup import Setup, set_up
from bert_jax.finetune.step import (
    check_memory,
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
    check_finetune_workdir,
    prepare_finetune_workdir,
    remove_resume,
)
from bert_jax.run.events import Events
from bert_jax.run.interrupt import StopRequest
from bert_jax.run.lease import hold_workdir
from bert_jax.run.telemetry import duration
from bert_jax.run.watchdog import Watchdog
from bert_jax.saved.runs import NO_MODEL, STATISTICS
from bert_jax.sweep.report import summary_lines, write_summary
from bert_jax.sweep.statistics import LEVEL, Member, Outcome, Summary, summarise
from bert_jax.untrusted.json_file import read_json_object

_SAVE_SECONDS = 60.0
"""A run is saved after an evaluation when so much would be lost."""
_MAX_STATISTICS_BYTES = 1 << 28


class NoModelError(RuntimeError):
    """All runs of the initialisation have ended, none with a finite score."""

    exit_code = 1


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
        NoModelError: No run of the first initialisation had a finite score; the statistics say so.
        SaveFailedError: Several saves in a row have failed.
        DamagedCheckpointError: None of the run's checkpoints is intact.
    """
    setup = set_up(config)
    with hold_workdir(workdir, echo=echo) as place:
        check_finetune_workdir(place, config, setup.fingerprints)
        if by_first(lambda: (place.local / STATISTICS).exists()):
            return _finished_before(setup, place, echo)
        check_memory(setup.step, sweep_mesh(len(setup.waves[0])), len(setup.waves[0]))
        run = _Run(config, setup, place, echo)
        with StopRequest() as stop:
            return run.run(stop)


def _finished_before(
    setup: Setup, place: WorkDir, echo: Callable[[str], None] | None
) -> FinetuneResult:
    path = place.local / STATISTICS
    rows = by_first(lambda: read_json_object(path, max_bytes=_MAX_STATISTICS_BYTES)["outcomes"])
    outcomes = tuple(Outcome.from_json(each) for each in rows)
    remove_resume(place)
    if jax.process_index() == 0:
        say = echo or print
        say(f"{place.name} is finished")
        say((place.local / "statistics.txt").read_text(encoding="utf-8").rstrip())
    _check_model(setup, outcomes)
    return FinetuneResult(True, outcomes, 0.0)


class _Run:
    """What a run holds while it lasts."""

    watchdog: Watchdog
    out: Output

    def __init__(
        self,
        config: FinetuneConfig,
        setup: Setup,
        place: WorkDir,
        echo: Callable[[str], None] | None,
    ):
        self.config, self.setup, self.place, self.echo = config, setup, place, echo
        self.mesh = sweep_mesh(len(setup.waves[0]))
        self.train_step = make_sweep_step(setup.step, self.mesh)
        self.eval_step = make_eval_step(setup.step, self.mesh)
        self.keep_best = make_keep_best(self.mesh)
        limit = setup.step.model.num_positions
        self.dev_buckets = [
            choose_buckets(split.rows.lengths, config.training.max_buckets, limit=limit)
            for split in setup.dev
        ]
        self.percent = setup.step.objective == "span"
        dev, scale = setup.dev[0], 100.0 if self.percent else 1.0
        self.constant = dev.constant_score
        labels = setup.task.num_outputs if setup.task.objective == "class" else 0
        self.goal = scale * goal_score(
            setup.task.metric, self.constant / scale, len(dev.rows), labels
        )
        self.outcomes: list[Outcome] = []
        self.saved_at = self.started = time.monotonic()

    def run(self, stop: StopRequest) -> FinetuneResult:
        config, setup, place = self.config, self.setup, self.place
        events = Events(place.local / "events.jsonl", jax.process_index())
        stacks = place.local / f"stacks.{jax.process_index()}.txt"
        with Watchdog(config.training.stall_seconds, stacks, events=events) as self.watchdog:
            prepare_finetune_workdir(
                place.local, config, setup.fingerprints, setup.initial.tokenizer_files
            )
            by_first(lambda: place.sync(required=True))

            def report(kind: str, step: int, message: str) -> None:
                events.write(kind, message, step=step)

            self.saves = Saves(config, setup, self.mesh, place, report)
            try:
                return self._run(stop, events)
            except BaseException as error:
                events.write(
                    "error", f"{type(error).__name__}: {error}",
                    code=getattr(error, "exit_code", None),
                )  # fmt: skip
                raise
            finally:
                self.saves.close()
                place.sync()

    def _run(self, stop: StopRequest, events: Events) -> FinetuneResult:
        setup = self.setup
        wave, begun = None, 0
        if restored := self.saves.restore():
            wave, self.outcomes = restored
            begun = self.saves.total(wave)
        total = len(setup.waves) * setup.step.num_steps
        self.watchdog.alive("the restore")
        with Output(
            self.place.local / "metrics.jsonl",
            begun=begun, total=total, single=len(setup.members) == 1, echo=self.echo,
        ) as self.out:  # fmt: skip
            lines = self._summary(begun, total)
            for line in lines:
                self.out.say(line)
            if jax.process_index() == 0:
                events.write("start", lines[0], step=begun)
            finished = True
            while finished and len(self.outcomes) < len(setup.members):
                finished = self._train(wave or self._first_state(), stop)
                wave = None
        seconds = time.monotonic() - self.started
        if finished:
            self._finish(seconds)
        else:
            self.out.say(f"stopped by {stop.name}, saved; the same command continues")
        if jax.process_index() == 0:
            events.write("finished" if finished else "stopped", duration(seconds))
        return FinetuneResult(finished, tuple(self.outcomes), seconds)

    # One wave.

    def _first_state(self) -> Wave:
        setup = self.setup
        number = len(self.outcomes) // len(setup.waves[0])
        members = setup.waves[number]
        which = np.array([setup.inits.index(member.init) for member in members])
        seeds = np.array([member.seed for member in members], np.uint32)
        state = init_sweep(setup.step, self.mesh, seeds, setup.encoders, which)
        # What repeats the last member only fills the program.
        progress = [Progress(member) for member in dict.fromkeys(members)]
        return Wave(number, state, 0, progress, Losses(progress))

    def _train(self, wave: Wave, stop: StopRequest) -> bool:
        """Trains members to the end; False where a signal stopped them, with all saved."""
        num_steps = self.setup.step.num_steps
        members = self.setup.waves[wave.number]
        settings = place_settings(
            [member.learning_rate for member in members],
            [member.seed for member in members],
            self.mesh,
        )
        batches = self._batches(members, wave.step)
        unread: Any = None
        while wave.step < num_steps:
            batch = place_rows(next(batches), self.mesh)
            wave.state, metrics = self.train_step(wave.state, settings, batch)
            wave.step += 1
            wave.losses.read(unread)  # of the step before, so that one is always queued
            unread = metrics
            self.watchdog.alive(f"step {wave.step:,}")
            self.out.tick(wave.losses.last)
            # Asked at every step: several processes stop at one that they agree upon. After the
            # last one the wave is finished first.
            stopping = stop.due(self.saves.total(wave)) and wave.step < num_steps
            evaluating = self.setup.evaluates_after(wave.step)
            if evaluating or stopping:
                wave.losses.read(unread)
                unread = None
            if evaluating:
                self._evaluate(wave)
            if stopping:
                self._save(wave, last=True)
                return False
            if evaluating and not all_agree(time.monotonic() - self.saved_at < _SAVE_SECONDS):
                self._save(wave)
        self.saves.save_best(wave, must=True)
        seconds = wave.elapsed() / len(wave.progress)
        self.outcomes += [each.outcome(self.goal, seconds) for each in wave.progress]
        return True

    def _save(self, wave: Wave, *, last: bool = False) -> None:
        self.out.sync()
        self.place.sync()
        self.saves.save(wave, self.outcomes, last=last)
        self.saved_at = time.monotonic()
        self.watchdog.alive("a save")

    def _batches(self, members: tuple[Member, ...], step: int) -> Iterator[dict[str, np.ndarray]]:
        seeds = [member.seed for member in members]
        epoch, start = divmod(step, self.setup.batches.num_batches)
        while True:
            yield from self.setup.batches.epoch(epoch, seeds, start)
            epoch, start = epoch + 1, 0

    def _evaluate(self, wave: Wave) -> None:
        setup = self.setup
        scores: list[dict[str, float]] = [{} for _ in wave.progress]
        for number, (split, buckets) in enumerate(zip(setup.dev, self.dev_buckets, strict=True)):
            outputs = member_outputs(
                setup.step, self.mesh, self.eval_step, wave.state.params, split.rows,
                buckets=buckets,
                batch_size=min(self.config.training.eval_batch_size, len(split.rows)),
                pad_id=setup.initial.tokenizer.special_ids.pad,
                done=lambda _: self.watchdog.alive("a batch of an evaluation"),
            )  # fmt: skip
            prefix = f"{split.name}/" if number else ""
            for each, mine, theirs in zip(wave.progress, scores, outputs, strict=False):
                if finite(theirs):
                    found = split.score(theirs)
                    mine.update({f"{prefix}{name}": value for name, value in found.items()})
                else:
                    each.finite = False
                self.watchdog.alive("scoring")
        epoch = wave.step / setup.batches.num_batches
        metric = setup.task.metric
        better = np.zeros(len(setup.waves[0]), bool)
        for number, (each, mine) in enumerate(zip(wave.progress, scores, strict=True)):
            better[number] = each.take(wave.step, epoch, mine, metric)
        where = {"step": wave.step, "epoch": epoch, "wave": wave.number}
        self.out.evaluated(self.saves.total(wave), where, wave.losses.take(), scores, metric)
        if better.any():
            wave.state = self.keep_best(wave.state, place_members(better, self.mesh))

    def _finish(self, seconds: float) -> None:
        summary = summarise(self.outcomes, self.setup.task.metric, self.constant, self.goal)
        percent = self.percent
        by_first(lambda: self._write_summary(summary, percent))
        self.out.say("")
        for line in summary_lines(summary, percent=percent):
            self.out.say(line)
        self.saves.finish()
        _check_model(self.setup, tuple(self.outcomes))
        self.out.say(
            f"{duration(seconds)}, {len(self.outcomes)} runs; the best of {self.setup.inits[0]} is "
            f"in {self.place.checkpoints}"
        )

    def _write_summary(self, summary: Summary, percent: bool) -> None:
        try:
            write_summary(
                summary, self.place.local, title=Path(self.place.name).name, percent=percent
            )
        except (OSError, UserError) as error:
            raise SaveFailedError(
                f"the statistics cannot be written to {self.place.local} ({error}). Fix that and "
                "rerun the command: the run continues from its last save"
            ) from error

    def _summary(self, begun: int, total: int) -> list[str]:
        setup = self.setup
        head = f"fine-tuning {', '.join(setup.inits)} in {self.place.name}"
        lines = [head if not begun else f"{head}, continued at step {begun:,} of {total:,}"]
        lines += [f"Warning: {text}" for split in (setup.train, *setup.dev)
                  for text in split.warnings]  # fmt: skip
        shapes = ", ".join(f"{n} x {length}" for length, n in setup.batches.batches_of.items())
        sizes = ", ".join(f"{split.name} {len(split.rows):,}" for split in setup.dev)
        task = self.config.task
        fitted = task.fitted(setup.step.model.num_positions)
        if fitted.length < task.length:
            lines.append(
                f"length   {fitted.length} tokens a row: the model has no more positions; "
                f"task.max_length is {task.length} by default"
            )
        lines += [
            f"data     {len(setup.train.rows):,} rows to train on; {sizes}",
            f"batches  {setup.batches.num_batches:,} of {self.config.training.batch_size} rows an "
            f"epoch, by length: {shapes}",
            f"runs     {len(setup.members)} of {setup.step.num_steps:,} steps, "
            f"{len(setup.waves[0])} at once, devices as member {self.mesh.shape['member']} x data "
            f"{self.mesh.shape['data']}",
        ]
        if math.isfinite(self.constant):
            lines.append(
                f"goal     {setup.task.metric} above {self.goal:.4g} at the end of training (a "
                f"constant prediction has {self.constant:.4g}; {LEVEL:.0%} bound for "
                f"{len(setup.dev[0].rows):,} rows)"
            )
        return lines


def _check_model(setup: Setup, outcomes: tuple[Outcome, ...]) -> None:
    own = [outcome for outcome in outcomes if outcome.member.init == setup.inits[0]]
    if all(outcome.best is None for outcome in own):
        raise NoModelError(f"{setup.inits[0]}: {NO_MODEL}")

"""The fine-tuning loop: waves of members, evaluations, the best model, results."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.checkpoint import saved_steps
from bert_jax.checkpoint.agreement import all_agree, by_first
from bert_jax.finetune.batches import choose_buckets
from bert_jax.finetune.config import FinetuneConfig
from bert_jax.finetune.evaluate import judge_rows
from bert_jax.finetune.progress import (
    Losses,
    Progress,
    evaluation_columns,
    evaluation_line,
    goal_score,
    median_loss,
)
from bert_jax.finetune.report import finished_before, summary_of_run, write_statistics
from bert_jax.finetune.saves import Saves, Wave
from bert_jax.finetune.setup import Setup, set_up
from bert_jax.finetune.trials import (
    check_memory,
    init_trials,
    make_keep_best,
    place_rows,
    place_settings,
    place_trials,
)
from bert_jax.finetune.workdir import (
    check_finetune_workdir,
    prepare_finetune_workdir,
    remove_resume,
)
from bert_jax.parallel.sharding import make_trial_mesh
from bert_jax.run.goodput import Clock
from bert_jax.run.interrupt import StopRequest
from bert_jax.run.lease import hold_workdir
from bert_jax.run.session import Session
from bert_jax.run.telemetry import duration, whole_peak
from bert_jax.saved.runs import NO_MODEL, STATISTICS
from bert_jax.sweep.statistics import Outcome, Trial, summarise
from bert_jax.training.bad_step import (
    BadStep,
    BadStepError,
    find_bad_step,
    rerun,
    skipped_message,
)
from bert_jax.training.step import Settings, make_eval_step, make_train_step

_SAVE_SECONDS = 60.0
"""A run is saved after an evaluation when so much would be lost."""


class NoModelError(RuntimeError):
    """All runs of the initialisation have ended, none with a finite score."""

    exit_code = 1


@dataclass(frozen=True)
class FinetuneResult:
    """How a run ended."""

    finished: bool
    outcomes: tuple[Outcome, ...]
    """Outcomes of the members that have ended."""
    seconds: float
    """Seconds of this start, compilations included."""


def finetune(
    config: FinetuneConfig,
    workdir: Path | str,
    *,
    clock: Clock | None = None,
    echo: Callable[[str], None] | None = None,
) -> FinetuneResult:
    """Fine-tunes all members of a sweep, or continues the run in `workdir`.

    With several processes all call it, after `jax.distributed.initialize`; they share `workdir`.

    Args:
        config: The run.
        workdir: Made if missing; a local directory, or `gs://bucket/directory`.
        clock: Clock that has been running since the process began; None: a new one.
        echo: Gets each line for people; None: standard output, with a bar on a terminal.

    Raises:
        BadStepError: A step of a run alone was not finite, and the guard says to stop.
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
            outcomes = finished_before(place, echo or print)
            remove_resume(place)
            _check_model(setup, outcomes)
            return FinetuneResult(True, outcomes, 0.0)
        seconds = config.training.stall_seconds
        session = Session(place, stall_seconds=seconds, clock=clock, echo=echo)
        run = _Run(config, setup, session)
        check_memory(setup.step, run.mesh, len(setup.waves[0]))
        with StopRequest() as stop:
            return run.run(stop)


class _Unread(NamedTuple):
    """A step whose metrics were not read yet."""

    step: int
    """Updates made in the wave, this one included."""
    metrics: Any
    flops: int
    settings: Settings


class _Run:
    """A run while it lasts."""

    def __init__(self, config: FinetuneConfig, setup: Setup, session: Session):
        self.config, self.setup, self.session = config, setup, session
        self.place, self.clock = session.place, session.clock
        self.mesh = make_trial_mesh(config.mesh, len(setup.waves[0]))
        self.train_step = make_train_step(setup.step, self.mesh)
        self.eval_step = make_eval_step(setup.step, self.mesh, seed=0)
        self.keep_best = make_keep_best(setup.step, self.mesh)
        limit = setup.objective.model.num_positions
        self.dev_buckets = [
            choose_buckets(split.rows.lengths, config.training.max_buckets, limit=limit)
            for split in setup.dev
        ]
        self.percent = setup.objective.kind == "span"
        dev, scale = setup.dev[0], 100.0 if self.percent else 1.0
        self.constant = dev.constant_score
        labels = setup.task.num_outputs if setup.task.objective == "single_label" else 0
        self.goal = scale * goal_score(
            setup.task.metric, self.constant / scale, len(dev.rows), labels
        )
        self.outcomes: list[Outcome] = []
        self.compiled: set[int] = set()
        """Lengths of batches for which the step is compiled."""
        self.unread: _Unread | None = None
        self.saved_at = time.monotonic()

    def run(self, stop: StopRequest) -> FinetuneResult:
        config, setup, session = self.config, self.setup, self.session

        def prepare() -> None:
            prepare_finetune_workdir(
                self.place.local, config, setup.fingerprints, setup.initial.tokenizer_files
            )

        def report(kind: str, step: int, message: str) -> None:
            session.events.write(kind, message, step=step)

        with session.open(prepare) as closing:
            self.saves = Saves(config, setup, self.mesh, self.place, report)
            closing.callback(self.saves.close)
            return self._run(stop)

    def _run(self, stop: StopRequest) -> FinetuneResult:
        setup, session = self.setup, self.session
        wave, begun = None, 0
        with self.clock.spend("restore"):
            if restored := self.saves.restore():
                wave, self.outcomes = restored
                begun = self.saves.total(wave)
        total = len(setup.waves) * setup.step.num_steps
        metrics = setup.objective.metrics
        peak = whole_peak(setup.objective.model, self.mesh.size)
        with session.telling(begun, num_steps=total, metrics=metrics, peak=peak) as out:
            lines = summary_of_run(
                self.config, setup, self.mesh, self.place.name, begun, total,
                goal=self.goal, constant=self.constant,
            )  # fmt: skip
            session.begin(lines, lines[0], total)
            finished = True
            while finished and len(self.outcomes) < len(setup.members):
                finished = self._train(wave or self._first_state(), stop)
                wave = None
            session.end(session.step)
            seconds = self.clock.elapsed
            if finished:
                self._finish(seconds)
            else:
                out.say(f"stopped by {stop.name}, saved; the same command continues")
        session.event("finished" if finished else "stopped", duration(seconds))
        return FinetuneResult(finished, tuple(self.outcomes), seconds)

    # One wave.

    def _first_state(self) -> Wave:
        setup = self.setup
        number = len(self.outcomes) // len(setup.waves[0])
        members = setup.waves[number]
        which = np.array([setup.inits.index(member.init) for member in members])
        seeds = np.array([member.seed for member in members], np.uint32)
        state = init_trials(setup.step, self.mesh, seeds, setup.encoders, which)
        # What repeats the last member only fills the program.
        progress = [Progress(member) for member in dict.fromkeys(members)]
        return Wave(number, state.train, state.best, 0, progress, Losses(progress))

    def _train(self, wave: Wave, stop: StopRequest) -> bool:
        """Train the trials of a wave to the end; False where a signal stopped them, all saved."""
        num_steps = self.setup.step.num_steps
        members = self.setup.waves[wave.number]
        settings = place_settings(
            [member.learning_rate for member in members],
            [member.seed for member in members],
            self.mesh,
        )
        batches = self._batches(members, wave.step)
        self.clock.started()
        while wave.step < num_steps:
            with self.clock.spend("input"):
                batch = place_rows(next(batches), self.mesh, self.setup.step.accumulation)
            self._step(wave, batch, settings)
            # Asked at every step: several processes stop at one that they agree upon. After the
            # last one the wave is finished first.
            stopping = stop.due(self.saves.total(wave)) and wave.step < num_steps
            evaluating = self.setup.evaluates_after(wave.step)
            if evaluating or stopping:
                self._read(wave)
            if evaluating:
                with self.clock.spend("evaluation"):
                    self._evaluate(wave)
            if stopping:
                self._save(wave, last=True)
                return False
            if evaluating and not all_agree(time.monotonic() - self.saved_at < _SAVE_SECONDS):
                self._save(wave)
        with self.clock.spend("save"):
            self.saves.save_best(wave, must=True)
        seconds = wave.elapsed() / len(wave.progress)
        self.outcomes += [each.outcome(self.goal, seconds) for each in wave.progress]
        return True

    def _step(self, wave: Wave, batch: dict[str, jax.Array], settings: Settings) -> None:
        """Dispatch a step, and read the metrics of the step before: one step is always queued."""
        trials, rows, length = batch["tokens"].shape
        if length in self.compiled:
            wave.state, metrics = self.train_step(wave.state, batch, settings)
        else:
            self._read(wave)
            with self.clock.spend("compile"):
                wave.state, metrics = self.train_step(wave.state, batch, settings)
            self.compiled.add(length)
        wave.step += 1
        self._read(wave)
        flops = trials * rows * self.setup.objective.flops(length)
        self.unread = _Unread(wave.step, metrics, flops, settings)

    def _read(self, wave: Wave) -> None:
        """Wait for the metrics of the newest step that was not read yet, and pass them on."""
        if self.unread is None:
            return
        unread, self.unread = self.unread, None
        metrics = jax.device_get(unread.metrics)
        session, out = self.session, self.session.out
        session.step = self.saves.total(wave) - wave.step + unread.step
        session.alive(f"step {unread.step:,}")
        if metrics["bad"].any():
            self._bad_step(wave, unread, metrics)
        wave.losses.add(metrics)
        tokens = float(metrics["num_tokens"][: len(wave.progress)].sum())
        out.step_done(session.step, tokens, unread.flops, wave.losses.last)
        due = unread.step % self.config.training.log_every_steps == 0
        if due and not self.setup.evaluates_after(unread.step):  # which writes a row, too
            losses = wave.losses.take()
            row = self._row(wave, unread.step, losses) | out.rates()
            out.write(session.step, row)
            median = median_loss(losses)
            out.progress_line(
                session.step, row | {"train/loss": math.nan if median is None else median}
            )

    def _bad_step(self, wave: Wave, unread: "_Unread", metrics: dict[str, np.ndarray]) -> None:
        """Say which trials skipped a batch or halted; a run alone that halted ends with why."""
        session, alone = self.session, len(self.setup.members) == 1
        for number, each in enumerate(wave.progress):
            one = {name: values[number] for name, values in metrics.items()}
            bad = None if each.halted else find_bad_step(unread.step - 1, one)
            if bad is None:
                continue
            error, kind = None, "bad_step" if bad.halted else "skipped_step"
            message = bad.describe() if bad.halted else skipped_message(bad)
            if bad.halted and alone:
                error = self._explained(wave, bad, unread.settings)
                message = str(error)
            elif not alone:
                member = each.member
                message = f"run {number + 1} of wave {wave.number} (learning rate "
                message += f"{member.learning_rate:g}, seed {member.seed}): {bad.describe()}; "
                message += "it has failed and stays as it was" if bad.halted else "skipped"
            session.event(kind, message, trial=number, batch=bad.batch, **bad.statistics)
            if error:
                raise error
            session.out.say(f"Warning: {message}")

    def _explained(self, wave: Wave, bad: BadStep, settings: Settings) -> BadStepError:
        """Compute the step that halted the run again, and say why it stops."""
        members = self.setup.waves[wave.number]
        batch = next(self._batches(members, bad.batch))
        verdict = rerun(
            lambda state, rows: self.train_step(state, rows, settings),
            wave.state,
            place_rows(batch, self.mesh, self.setup.step.accumulation),
            bad.metrics,
        )
        saved = saved_steps(self.place.resume)
        return BadStepError(bad, verdict, f"{self.place.resume / str(saved[-1])}" if saved else "")

    def _save(self, wave: Wave, *, last: bool = False) -> None:
        with self.session.saving("a save"):
            self.saves.save(wave, self.outcomes, last=last)
        self.saved_at = time.monotonic()

    def _batches(self, members: tuple[Trial, ...], step: int) -> Iterator[dict[str, np.ndarray]]:
        seeds = [member.seed for member in members]
        epoch, start = divmod(step, self.setup.batches.num_batches)
        while True:
            yield from self.setup.batches.epoch(epoch, seeds, start)
            epoch, start = epoch + 1, 0

    def _evaluate(self, wave: Wave) -> None:
        setup, session = self.setup, self.session
        scores: list[dict[str, float]] = [{} for _ in wave.progress]
        dev_losses: list[float | None] = []
        for number, (split, buckets) in enumerate(zip(setup.dev, self.dev_buckets, strict=True)):
            judged = judge_rows(
                self.eval_step, self.mesh, wave.state.params, split.rows,
                buckets=buckets,
                batch_size=min(self.config.training.eval_batch_size, len(split.rows)),
                pad_id=setup.initial.tokenizer.special_ids.pad,
                done=lambda _: session.alive("a batch of an evaluation"),
            )  # fmt: skip
            prefix = f"{split.name}/" if number else ""
            for each, mine, theirs in zip(wave.progress, scores, judged, strict=False):
                if theirs.finite:
                    found = split.score(theirs.outputs)
                    mine.update({f"{prefix}{name}": value for name, value in found.items()})
                else:
                    each.finite = False
                session.alive("scoring")
            dev_losses = dev_losses or [each.loss for each in judged[: len(wave.progress)]]
        metric, epoch = setup.task.metric, wave.step / setup.batches.num_batches
        better = np.zeros(len(setup.waves[0]), bool)
        for number, (each, mine) in enumerate(zip(wave.progress, scores, strict=True)):
            better[number] = each.take(wave.step, epoch, mine, metric)
        losses, total = wave.losses.take(), self.saves.total(wave)
        row = self._row(wave, wave.step, losses)
        for name, values in evaluation_columns(dev_losses, scores).items():
            row[name] = self._column(values)
        session.out.write(total, row | session.out.rates())
        where = f"epoch {epoch:.2f}  step {wave.step:,}"
        session.out.say(evaluation_line(where, losses, scores, metric))
        if better.any():
            chosen = place_trials(better, self.mesh)
            wave.best = self.keep_best(wave.best, wave.state.params, chosen)

    def _row(self, wave: Wave, step: int, losses: Sequence[float | None]) -> dict[str, Any]:
        epoch = step / self.setup.batches.num_batches
        return {"epoch": epoch, "wave": wave.number, "train/loss": self._column(losses)}

    def _column(self, values: Sequence[float | None]) -> Any:
        """Return a column of a row: the value of a run alone, else a list."""
        return values[0] if len(self.setup.members) == 1 else list(values)

    def _finish(self, seconds: float) -> None:
        out = self.session.out
        summary = summarise(self.outcomes, self.setup.task.metric, self.constant, self.goal)
        for line in write_statistics(summary, self.place, percent=self.percent):
            out.say(line)
        self.saves.finish()
        _check_model(self.setup, tuple(self.outcomes))
        out.say(
            f"{duration(seconds)}, {len(self.outcomes)} runs; the best of {self.setup.inits[0]} is "
            f"in {self.place.checkpoints}"
        )


def _check_model(setup: Setup, outcomes: tuple[Outcome, ...]) -> None:
    own = [outcome for outcome in outcomes if outcome.member.init == setup.inits[0]]
    if all(outcome.best is None for outcome in own):
        raise NoModelError(f"{setup.inits[0]}: {NO_MODEL}")

"""The fine-tuning loop: waves of members, evaluations, the best model, results."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.checkpoint import saved_steps
from bert_jax.checkpoint.agreement import all_agree, by_first
from bert_jax.finetune import trials
from bert_jax.finetune.batches import choose_buckets
from bert_jax.finetune.config import FinetuneConfig
from bert_jax.finetune.evaluate import Judged, named_scores, score_rows
from bert_jax.finetune.progress import (
    NoModelError,
    evaluation_columns,
    evaluation_line,
    goal_score,
    median_loss,
)
from bert_jax.finetune.report import REPORT_LINES, conclude
from bert_jax.finetune.saves import (
    Saves,
    began_without_heads,
    check_finetune_workdir,
    first_wave,
    prepare_finetune_workdir,
    remove_resume,
)
from bert_jax.finetune.setup import Setup, set_up
from bert_jax.finetune.summary import finished_before, summary_of_run, write_statistics
from bert_jax.parallel.sharding import make_trial_mesh
from bert_jax.run.goodput import Clock
from bert_jax.run.interrupt import StopRequest
from bert_jax.run.lease import hold_workdir
from bert_jax.run.session import Session
from bert_jax.run.telemetry import duration
from bert_jax.saved.runs import NO_MODEL, STATISTICS
from bert_jax.sweep.statistics import Outcome, summarise
from bert_jax.tasks.task import Split
from bert_jax.training.bad_step import (
    BadStep,
    BadStepError,
    compute_again,
    find_bad_step,
    skipped_message,
)
from bert_jax.training.step import make_eval_step, make_train_step
from bert_jax.training.step_queue import StepQueue

_SAVE_SECONDS = 60.0
"""Work that may be lost: an evaluation saves the run when the last save is older."""


@dataclass(frozen=True)
class FinetuneResult:
    """Result of a start of a run."""

    finished: bool
    outcomes: tuple[Outcome, ...]
    """Outcomes of the members that have ended."""
    seconds: float
    """Seconds of this start, compilations included."""
    stopped_by: str = ""
    """Name of the signal that stopped the run before its end."""
    unlearned: str = ""
    """Why no trial learned anything, and what to try; "" where one did, or the run goes on."""


def finetune(
    config: FinetuneConfig,
    workdir: Path | str,
    *,
    clock: Clock | None = None,
    echo: Callable[[str], None] | None = None,
) -> FinetuneResult:
    """Fine-tune all members of a sweep, or continue the run in `workdir`.

    With several processes all call it, after `jax.distributed.initialize`; they share `workdir`.

    Args:
        config: Configuration of the run.
        workdir: Local directory, made if missing, or `gs://bucket/directory`.
        clock: Clock started at process start; None: a new clock.
        echo: Function that gets each line for people; None: standard output, with a bar on a
            terminal.

    Raises:
        BadStepError: A step of a run alone was not finite, and the guard says to stop.
        UserError: The configuration, the data, the initialisation and the work directory do not fit
            together. Nothing has been written.
        NoModelError: No run of the first initialisation had a finite score; the statistics say so.
        SaveFailedError: Several saves in a row have failed.
        DamagedCheckpointError: None of the run's checkpoints is intact.
    """
    config = dataclasses.replace(config, task=config.task.located())
    setup = set_up(config)
    with hold_workdir(workdir, echo=echo) as work:
        if any("head" in start for start in setup.starts) and began_without_heads(work):
            config = dataclasses.replace(config, head="fresh")
            setup = set_up(config)
        check_finetune_workdir(work, config, setup.fingerprints)
        if by_first(lambda: (work.local / STATISTICS).exists()):
            outcomes = finished_before(work, echo or print)
            remove_resume(work)
            _check_model(setup, outcomes)
            return FinetuneResult(True, outcomes, 0.0, "", setup.unlearned(outcomes))
        seconds = config.training.stall_seconds
        session = Session(work, stall_seconds=seconds, clock=clock, echo=echo)
        run = _Run(config, setup, session)
        trials.check_memory(setup.step, run.mesh, len(setup.waves[0]))
        with StopRequest() as stop:
            return run.run(stop)


class _Run:
    """State of a run."""

    def __init__(self, config: FinetuneConfig, setup: Setup, session: Session):
        self.config, self.setup, self.session = config, setup, session
        self.work, self.clock = session.work, session.clock
        self.mesh = make_trial_mesh(config.mesh, len(setup.waves[0]))
        self.train_step = make_train_step(setup.step, self.mesh)
        self.queue = StepQueue(self.train_step, setup.objective, session, self._read)
        self.evaluated = setup.objective.for_evaluation()
        evaluation = dataclasses.replace(setup.step, objective=self.evaluated)
        self.eval_step = make_eval_step(evaluation, self.mesh, seed=0)
        self.keep_best = trials.make_keep_best(setup.step, self.mesh)
        limit = setup.objective.model.num_positions
        self.buckets = {
            split.name: choose_buckets(split.rows.lengths, config.training.max_buckets, limit=limit)
            for split in (*setup.dev, *setup.test)
        }
        self.percent = setup.objective.kind == "span"
        dev, scale = setup.dev[0], 100.0 if self.percent else 1.0
        self.constant = dev.constant_score
        labels = setup.task.num_outputs if setup.task.objective == "single_label" else 0
        self.goal = scale * goal_score(
            setup.task.metric, self.constant / scale, dev.num_scored, labels
        )
        self.outcomes: list[Outcome] = []
        self.saved_at = time.monotonic()

    def run(self, stop: StopRequest) -> FinetuneResult:
        setup, session, num_steps = self.setup, self.session, self.setup.step.num_steps

        def prepare() -> None:
            prepare_finetune_workdir(
                self.work.local, self.config, setup.fingerprints, setup.initial.tokenizer_files,
                setup.initial.origin.step, setup.splits,
            )  # fmt: skip

        def report(kind: str, step: int, message: str) -> None:
            session.events.write(kind, message, step=step)

        with session.open(prepare) as closing:
            self.saves = Saves(self.config, setup, self.mesh, self.work, report)
            closing.callback(self.saves.close)
            wave, begun = None, 0
            with self.clock.spend("restore"):
                if restored := self.saves.restore():
                    wave, self.outcomes = restored
                    begun = self.saves.total(wave)
            total = len(setup.waves) * num_steps
            lines = summary_of_run(
                self.config, setup, self.mesh, self.work.name, begun, total,
                goal=self.goal, constant=self.constant,
            )  # fmt: skip
            with session.telling(
                begun,
                setup.objective,
                num_steps=total,
                num_devices=self.mesh.size,
                lines=lines,
                event=lines[0],
            ) as out:
                finished = True
                while finished and len(self.outcomes) < len(setup.members):
                    number = len(self.outcomes) // len(setup.waves[0])
                    with self.clock.spend("startup"):
                        self.wave = wave or first_wave(setup, self.mesh, number)
                    finished, wave = self._train(stop), None
                session.end()
                seconds = self.clock.elapsed
                if finished:
                    self._finish(seconds)
                else:
                    out.say(f"stopped by {stop.name}, saved; the same command continues")
            session.event("finished" if finished else "stopped", duration(seconds))
            by, outcomes = "" if finished else stop.name, tuple(self.outcomes)
            wrong = setup.unlearned(outcomes) if finished else ""
            return FinetuneResult(finished, outcomes, seconds, by, wrong)

    def _train(self, stop: StopRequest) -> bool:
        """Train the trials of the wave to the end; False where a signal stopped them, all saved."""
        setup, wave, num_steps = self.setup, self.wave, self.setup.step.num_steps
        members = setup.waves[wave.number]
        self.settings = trials.place_settings(
            [member.learning_rate for member in members],
            [member.seed for member in members],
            self.mesh,
            self.config.optimizer.head_learning_rate,
        )
        batches = setup.rows_of(wave.number, wave.step)
        while wave.step < num_steps and not wave.ended:
            with self.clock.spend("input"):
                batch = trials.place_rows(next(batches), self.mesh, self.setup.step.accumulation)
            wave.step += 1
            wave.state = self.queue.dispatch(
                self.saves.total(wave), wave.state, batch, self.settings
            )
            # Asked at every step: several processes stop at one that they agree upon. After the
            # last one the wave is finished first.
            stopping = stop.due() and wave.step < num_steps
            evaluating = self.setup.evaluates_after(wave.step)
            if evaluating or stopping:
                self.queue.flush(wave.state)
            if evaluating:
                with self.clock.spend("evaluation"):
                    self._evaluate()
            if wave.ended:
                break
            if stopping:
                self._save(last=True)
                return False
            if evaluating and not all_agree(time.monotonic() - self.saved_at < _SAVE_SECONDS):
                self._save()
        with self.clock.spend("save"):
            self.saves.save_best(wave, must=True)
        with self.clock.spend("evaluation"):
            best = trials.filled(self.setup.step, self.mesh, wave.state.params, wave.best)
            tests = conclude(
                self.setup, wave, self.outcomes, self.work,
                lambda split: self._answers(best, split),
            )  # fmt: skip
        seconds = wave.elapsed() / len(wave.progress)
        self.outcomes += [
            each.outcome(self.goal, seconds, test)
            for each, test in zip(wave.progress, tests, strict=True)
        ]
        return True

    def _read(self, total: int, flops: int, metrics: dict[str, Any], state: Any) -> None:
        wave, out = self.wave, self.session.out
        step = total - wave.number * self.setup.step.num_steps
        if metrics["bad"].any():
            self._bad_step(step - 1, metrics, state)
        wave.losses.add(metrics)
        self.rates = metrics["learning_rate"][: len(wave.progress)].tolist()
        tokens = float(metrics["num_tokens"][: len(wave.progress)].sum())
        out.step_done(total, tokens, flops, wave.losses.last)
        due = step % self.config.training.log_every_steps == 0
        if due and not self.setup.evaluates_after(step):  # which writes a row, too
            losses = wave.losses.take()
            row = self._row(step, losses) | out.rates()
            out.write(total, row)
            median = median_loss(losses)
            out.progress_line(total, row | {"train/loss": math.nan if median is None else median})

    def _bad_step(self, batch: int, metrics: dict[str, Any], state: Any) -> None:
        """Say which trials skipped a batch or halted; a run alone that halted ends with why."""
        wave, session, alone = self.wave, self.session, len(self.setup.members) == 1
        for number, each in enumerate(wave.progress):
            one = {name: values[number] for name, values in metrics.items()}
            bad = None if each.halted or each.stopped else find_bad_step(batch, one)
            if bad is None:
                continue
            error, kind = None, "bad_step" if bad.halted else "skipped_step"
            message = bad.describe() if bad.halted else skipped_message(bad)
            if bad.halted and alone:
                error = self._explained(bad, state)
                message = str(error)
            elif not alone:
                message = f"{wave.name_of(number)}: {bad.describe()}; "
                message += "it has failed and stays as it was" if bad.halted else "skipped"
            session.event(kind, message, trial=number, batch=bad.batch, **bad.statistics)
            if error:
                raise error
            session.out.say(f"Warning: {message}")

    def _explained(self, bad: BadStep, state: Any) -> BadStepError:
        """Compute the step that halted the run again, and explain why the run stops."""
        batch = next(self.setup.rows_of(self.wave.number, bad.batch))
        comparison = compute_again(
            lambda state, rows: self.train_step(state, rows, self.settings),
            state,
            trials.place_rows(batch, self.mesh, self.setup.step.accumulation),
            bad.metrics,
        )
        saved = saved_steps(self.work.resume)
        return BadStepError(
            bad, comparison, f"{self.work.resume / str(saved[-1])}" if saved else ""
        )

    def _save(self, *, last: bool = False) -> None:
        with self.session.saving("a save"):
            self.saves.save(self.wave, self.outcomes, last=last)
        self.saved_at = time.monotonic()

    def _evaluate(self) -> None:
        setup, session, wave = self.setup, self.session, self.wave
        goes_on = [not each.stopped for each in wave.progress]
        scores: list[dict[str, float]] = [{} for _ in wave.progress]
        dev_losses: list[float | None] = []
        for number, split in enumerate(setup.dev):
            scored = self._answers(wave.state.params, split)
            for each, mine, theirs in zip(wave.progress, scores, scored, strict=False):
                if each.stopped:
                    continue
                if theirs.finite:
                    mine |= named_scores(split, number, theirs.outputs)
                else:
                    each.finite = False
                session.alive("scoring")
            dev_losses = dev_losses or [
                each.loss if active else None for each, active in zip(scored, goes_on, strict=False)
            ]
        metric, epoch = setup.task.metric, wave.step / setup.batches.num_batches
        better = np.zeros(len(setup.waves[0]), bool)
        patience = self.config.training.patience
        for number, (each, mine) in enumerate(zip(wave.progress, scores, strict=True)):
            if not each.stopped:
                better[number] = each.take(wave.step, epoch, mine, metric, patience)
        losses, total = wave.losses.take(), self.saves.total(wave)
        row = self._row(wave.step, losses)
        for name, values in evaluation_columns(dev_losses, scores).items():
            row[name] = self._column(values)
        session.out.write(total, row | session.out.rates())
        where = f"epoch {epoch:.2f}  step {wave.step:,}"
        active = [number for number, on in enumerate(goes_on) if on]
        session.out.say(
            evaluation_line(where, [losses[n] for n in active], [scores[n] for n in active], metric)
        )
        if better.any():
            chosen = trials.place_trials(better, self.mesh)
            wave.best = self.keep_best(wave.best, wave.state.params, chosen)
        self._stop_early(goes_on)

    def _stop_early(self, went_on: list[bool]) -> None:
        """Say which trials have stopped since the last evaluation, and keep their state."""
        wave, patience = self.wave, self.config.training.patience
        stopped = np.zeros(len(self.setup.waves[0]), bool)
        for number, (each, before) in enumerate(zip(wave.progress, went_on, strict=True)):
            stopped[number] = before and each.stopped
            if stopped[number]:
                best = "no finite score" if each.best is None else f"{each.best:.4g}"
                message = f"stopped early: {patience} evaluations in a row no better than {best}"
                if len(self.setup.members) > 1:
                    message = f"{wave.name_of(number)} {message}"
                self.session.event("early_stop", message, trial=number)
                self.session.out.say(message)
        wave.state = trials.stop_trials(wave.state, stopped, self.mesh)

    def _answers(self, params: Any, split: Split) -> list[Judged]:
        """Return the answers of each trial to the rows of a split."""
        return score_rows(
            self.eval_step, self.mesh, self.evaluated.own(params), split.rows,
            buckets=self.buckets[split.name],
            batch_size=min(self.config.training.eval_batch_size, len(split.rows)),
            pad_id=self.setup.initial.tokenizer.special_ids.pad,
            done=lambda _: self.session.alive("a batch of an evaluation"),
        )  # fmt: skip

    def _row(self, step: int, losses: Sequence[float | None]) -> dict[str, Any]:
        epoch = step / self.setup.batches.num_batches
        return {
            "epoch": epoch,
            "wave": self.wave.number,
            "train/loss": self._column(losses),
            "train/learning_rate": self._column(self.rates),
        }

    def _column(self, values: Sequence[float | None]) -> Any:
        """Return a column of a row: the value of a run alone, else a list."""
        return values[0] if len(self.setup.members) == 1 else list(values)

    def _finish(self, seconds: float) -> None:
        out = self.session.out
        test = [each.constant_score for each in self.setup.test]
        summary = summarise(self.outcomes, self.setup.task.metric, self.constant, self.goal, *test)
        for line in write_statistics(summary, self.work, percent=self.percent):
            out.say(line)
        self.saves.finish()
        _check_model(self.setup, tuple(self.outcomes))
        out.say(
            f"{duration(seconds)}, {len(self.outcomes)} runs; the best of {self.setup.inits[0]} is "
            f"in {self.work.checkpoints}, a report in {self.work.name}/{REPORT_LINES}"
        )


def _check_model(setup: Setup, outcomes: tuple[Outcome, ...]) -> None:
    own = [outcome for outcome in outcomes if outcome.member.init == setup.inits[0]]
    if all(outcome.best is None for outcome in own):
        raise NoModelError(f"{setup.inits[0]}: {NO_MODEL}")

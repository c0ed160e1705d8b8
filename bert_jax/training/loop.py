"""The training loop of all runs. Its only input is a plan (`RunPlan`), never a configuration."""

import contextlib
import dataclasses
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from bert_jax.distributed.checkpoint.agreement import all_agree
from bert_jax.training.progress import DivergedError, Means, Moment, Progress
from bert_jax.training.run.session import Session, StopRequest
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.run_plan import (
    Result,
    RunPlan,
    Scorer,
    Scores,
    Stage,
    Trace,
    score_columns,
    together,
)
from bert_jax.training.steps import bad_step, trials
from bert_jax.training.steps.recheck import GRADIENT_DIGESTS, Recheck
from bert_jax.training.steps.state import made_once
from bert_jax.training.steps.step import make_train_step


def carry_out(plan: RunPlan, session: Session, trace: Trace | None = None) -> Result:
    """Run a plan until its last step or a stop signal; if a save exists, resume from the newest."""
    with StopRequest() as stop:
        return dataclasses.replace(_Run(plan, session, trace).run(stop), stopped_by=stop.name)


class _Run:
    now: Moment
    shown: Means  # since the last printed line

    def __init__(self, plan: RunPlan, session: Session, trace: Trace | None):
        self.plan, self.policy, self.saves = plan, plan.policy, plan.saves
        self.session, self.clock, self.trace = session, session.clock, trace
        self.steps = made_once(
            [stage.train for stage in plan.stages], partial(make_train_step, mesh=plan.mesh)
        )
        self.recheck = Recheck(plan.stages[0].train, plan.mesh, plan.saves.newest)
        self.compiled: set[tuple[int, tuple[int, ...]]] = set()
        self.unread: tuple[int, int, Any] | None = None  # number, FLOPs and metrics of a step
        self.watched = plan.objective.metrics[0].name
        if plan.num_trials:
            self.keep_best = trials.make_keep_best(plan.stages[0].train, plan.mesh)
        self.train_metrics: dict[str, Any] = {}
        self.saved_at = time.monotonic()

    @property
    def stage(self) -> Stage:
        return self.plan.stages[self.now.stage]

    def run(self, stop: StopRequest) -> Result:
        # The order: restore -> [read batch n -> dispatch step n -> log metrics of step n - 1 ->
        # score if due -> save if due].
        # A dispatch returns before the device has computed the step. The loop blocks only when it
        # reads the metrics of the previous step (so one step is always queued), evaluates or saves.
        # The saved `step` counts the batches done, so `step` is the number of the next batch.
        plan, session = self.plan, self.session
        with session.open(partial(self.saves.prepare, session.report)) as closing:
            closing.callback(self.saves.close)
            with self.clock.spend("restore"):
                restored = self.saves.restore()
                self.now = restored or self.saves.begin(0, plan.stages[0])
            self.shown = Means(len(self.now.progress))
            if restored:
                self._read_rows()
            elif jax.process_index() == 0:  # rows of a start that saved nothing
                (session.work.local / "metrics.jsonl").unlink(missing_ok=True)
            lines, event = plan.voice.about(self.now.step, restored is not None)
            with session.telling(
                self.now.step, plan.objective, num_steps=plan.num_steps, num_devices=plan.mesh.size
            ) as out:
                if self.trace:
                    closing.callback(self.trace, None, session, lambda: None)
                for line in lines:
                    out.say(line)
                session.event("start", event, num_steps=plan.num_steps)
                if self.policy.scores_start and not restored:
                    self._score(plan.scorers)
                finished = self._train(stop)
                session.end()
                result = Result(
                    workdir=plan.name, step=self.now.step, finished=finished,
                    baseline=plan.objective.baseline, train_metrics=self.train_metrics,
                    eval_metrics=self.now.scores, seconds=self.clock.elapsed,
                    outcomes=tuple(self.now.outcomes),
                )  # fmt: skip
                message, said = plan.voice.closing(result, self.clock, stop.name)
                for line in said:
                    out.say(line)
                session.event("finished" if finished else "stopped", message)
                return result

    def _train(self, stop: StopRequest) -> bool:
        """Train all stages; return False if a stop signal came before the end."""
        self.next_batch, finished = -1, True
        with contextlib.ExitStack() as self.reading:
            while finished := self._train_stage(stop):
                if self.now.stage + 1 == len(self.plan.stages):
                    break
                self._enter(self.now.stage + 1)
            self._flush()
            if self.policy.saves_end or not finished:
                # The save after a signal is not read back to check it: there may be no time.
                self._save(last=True, finished=finished)
        return finished

    def _enter(self, number: int) -> None:
        """Enter stage `number`: begin its new trials or, in pretraining, count evaluations anew."""
        self._flush()  # a bad step is computed again with the step function of its own stage
        before, stage = self.now, self.plan.stages[number]
        if stage.begins:
            with self.clock.spend("startup"):
                self.now = self.saves.begin(number, stage)
            self.shown = Means(len(self.now.progress))
            self.now.outcomes, self.now.scores = before.outcomes, before.scores
        elif not self.plan.num_trials and not before.ended:
            # Scores of two phases are not comparable: their rows may differ in length.
            self.now.progress = [Progress(each.member) for each in before.progress]
        self.now.stage = number

    def _train_stage(self, stop: StopRequest) -> bool:
        now, stage = self.now, self.stage
        while now.step < stage.steps.stop and not now.ended:
            if stop.due():
                return False
            with self.clock.spend("input"):
                batch = self._next_batch()
            now.step += 1
            self._dispatch(batch)
            if self.trace:
                self.trace(now.step, self.session, self._flush)
            if due := self._due(now.step):
                self._flush()
                self._score(due)
            if self._saves_now(bool(due)):
                self._flush()
                self._save()
        if stage.ends:
            self._conclude()
        return True

    def _next_batch(self) -> Any:
        if self.next_batch != self.now.step:  # at the first batch, or after an early stop
            self.reading.close()
            rows = self.plan.batches.stream(self.now.step)
            self.rows = self.reading.enter_context(contextlib.closing(rows))
        self.next_batch = self.now.step + 1
        return next(self.rows)

    def _dispatch(self, batch: Any) -> None:
        """Dispatch a step, and then read the metrics of the step before.

        The dispatch returns before the device has computed the step. So one step is always queued,
        and the device need not wait for the host, except before a compilation and in a recheck.
        """
        now, step, shape = self.now, self.steps[self.now.stage], batch["tokens"].shape
        is_new = (id(step), shape) not in self.compiled
        if is_new:
            self._flush()
            self.compiled.add((id(step), shape))
        with self.clock.spend("compile") if is_new else contextlib.nullcontext():
            now.state, metrics = self.recheck.step(
                now.step, step, now.state, batch, *self.stage.settings
            )
        if is_new:
            self.session.alive("a compilation")
        self._flush()
        flops = math.prod(shape[:-1]) * self.stage.train.objective.flops(batch)
        self.unread = (now.step, flops, metrics)

    def _flush(self) -> None:
        """Wait for metrics that have not been read yet, and read them."""
        if self.unread is None:
            return
        (step, flops, found), self.unread = self.unread, None
        found = jax.device_get({n: m for n, m in found.items() if n != GRADIENT_DIGESTS})
        now, out, self.session.step = self.now, self.session.out, step
        self.session.alive(f"step {step:,}")
        metrics = {name: np.atleast_1d(values) for name, values in found.items()}
        if metrics["bad"].any():
            self._bad_step(step - 1, metrics)
        for each, halted in zip(now.progress, metrics["halted"], strict=False):
            each.halted = each.halted if each.stopped else bool(halted)
        now.means.add(metrics)
        self.shown.add(metrics)
        watched = now.means.median(self.watched)
        out.step_done(step, float(now.means.last["num_tokens"].sum()), flops, watched)
        if now.monitor and not metrics["bad"].any():
            for kind, message in now.monitor.observe(step, watched):
                stops = kind == "diverged" and self.policy.stops_diverged
                self.session.warn(kind, message, step, DivergedError(message) if stops else None)
        logs = (step - self.stage.first) % self.policy.log_every == 0 or step == self.plan.num_steps
        if now.means and (logs or self._due(step)):
            means = now.means.take()
            rate = now.means.last["learning_rate"].tolist()
            self.train_metrics = self._columns("train", means | {"learning_rate": rate})
            self.train_metrics |= self.plan.voice.columns(now.wave, step) | out.rates()
            out.write(step, self.train_metrics)
        if out.line_due(step):
            means = self.shown.take()
            out.progress_line(step, {name: self._median(of) for name, of in means.items()})

    def _due(self, step: int) -> list[Scorer]:
        return [scorer for scorer in self.plan.scorers if scorer.after(step)]

    def _columns(self, kind: str, values: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return columns of metrics: a value if the run has one trial, else a value per trial."""
        alone = self.plan.num_trials < 2
        return {f"{kind}/{n}": each[0] if alone else list(each) for n, each in values.items()}

    def _median(self, values: Sequence[float | None]) -> float:
        """Return the median over running trials; missing values count as infinite."""
        going = [values[n] for n, each in enumerate(self.now.progress) if not each.stopped]
        known = [math.inf if v is None or not math.isfinite(v) else v for v in going]
        return float(np.median(known))

    def _score(self, due: Sequence[Scorer]) -> None:
        """Score all trials, keep the best parameters, and stop trials that do not improve."""
        plan, session, now = self.plan, self.session, self.now
        with self.clock.spend("evaluation"):
            found = [each.score(now.state.params, now, session.alive) for each in due]
            scores = [together(of_trial) for of_trial in zip(*found, strict=True)]
            now.scores, now.scored_at = self._columns("eval", score_columns(scores)), now.step
            columns = plan.voice.columns(now.wave, now.step)
            session.out.write(now.step, columns | now.scores)
            for line in plan.voice.scored(now, scores):
                session.out.say(line)
            if not self.policy.metric or due[0] is not plan.scorers[0]:
                return
            better = self._judge(scores, columns.get("epoch", 0.0))
            if plan.num_trials and any(better):
                chosen = trials.place_trials(self._filled(better), plan.mesh)
                now.best = self.keep_best(now.best, now.state.params, chosen)
            self._stop_early([mine is not None for mine in scores])

    def _judge(self, scores: Sequence[Scores | None], epoch: float) -> list[bool]:
        """Record each trial's scores; return true for each trial whose scores are its best."""
        policy, now, step = self.policy, self.now, self.now.step - self.stage.first
        better = [False] * len(scores)
        for n, (each, mine) in enumerate(zip(now.progress, scores, strict=True)):
            if mine is not None:
                each.finite = each.finite and mine.finite
                better[n] = each.take(step, epoch, mine.values, policy.metric, policy.patience)
        return better

    def _stop_early(self, went_on: Sequence[bool]) -> None:
        """Report the trials that have just stopped early, and freeze their state."""
        now, session = self.now, self.session
        stopped = [on and each.stopped for on, each in zip(went_on, now.progress, strict=True)]
        for number, each in enumerate(now.progress):
            if stopped[number]:
                best = "a score that is not finite" if each.best is None else f"{each.best:.4g}"
                message = f"stopped early: {self.policy.patience} evaluations in a row were no "
                message += f"better than {best}"
                if self.plan.num_trials > 1:
                    message = f"{now.name_of(number)} {message}"
                session.event("early_stop", message, trial=number)
                session.out.say(message)
        if self.plan.num_trials and any(stopped):
            now.state = trials.stop_trials(now.state, self._filled(stopped), self.plan.mesh)

    def _filled(self, values: Sequence[bool]) -> np.ndarray:
        """Return `values` (one per trial) as an array, extended with False for padding trials."""
        places = len(self.stage.settings[0].seed)
        return np.array([*values, *[False] * (places - len(values))], bool)

    def _conclude(self) -> None:
        """End the trials of a stage: save the best model, score the test data, add outcomes."""
        now = self.now
        with self.clock.spend("save"):
            self.saves.choose(now)
        with self.clock.spend("evaluation"):
            tests = self.plan.scorers[0].conclude(now, self.session.alive)
        seconds = now.elapsed() / len(now.progress)
        now.outcomes += [
            each.outcome(self.policy.goal, seconds, test)
            for each, test in zip(now.progress, tests, strict=True)
        ]

    def _saves_now(self, scored: bool) -> bool:
        if self.policy.save_every:
            return self.now.step % self.policy.save_every == 0
        late = time.monotonic() - self.saved_at >= self.policy.save_seconds
        return scored and not self.now.ended and not all_agree(not late)

    def _save(self, *, last: bool = False, finished: bool = False) -> None:
        self.plan.batches.confirm()
        self.recheck.replicas(self.now.step, self.now.state)
        with self.session.saving(f"the save of step {self.now.step:,}"):
            self.saves.save(self.now, last=last, finished=finished)
        self.saved_at = time.monotonic()

    def _bad_step(self, batch: int, metrics: dict[str, Any]) -> None:
        """Report trials that skipped a batch or halted; raise if the only trial halted."""
        now, session, alone = self.now, self.session, self.plan.num_trials < 2
        look = f"bert-jax replay {shlex.quote(str(self.plan.name))} --step {batch}"
        for number, each in enumerate(now.progress):
            if each.halted or each.stopped:
                continue
            one = {name: values[number] for name, values in metrics.items()}
            if (bad := bad_step.find_bad_step(batch - self.stage.first, one)) is None:
                continue
            error, kind = None, "bad_step" if bad.halted else "skipped_step"
            message = bad.describe() if bad.halted else bad_step.skipped_message(bad, look)
            if bad.halted and alone:
                error = self._explained(batch, bad, look)
                message = str(error)
            elif not alone:
                message = f"{now.name_of(number)}: {bad.describe()}; "
                message += "this run has failed" if bad.halted else "the batch was skipped"
            whose = {"trial": number} if self.plan.num_trials else {}
            session.warn(
                kind, message, bad.batch, error, **whose, batch=bad.batch, **bad.statistics
            )

    def _explained(self, batch: int, bad: bad_step.BadStep, look: str) -> bad_step.BadStepError:
        """Recompute the step that halted the run, and return an error that explains the halt."""
        state = self.now.state
        self.recheck.replicas(batch + 1, state)  # raises if replicas differ, which explains more
        step, settings = self.steps[self.now.stage], self.stage.settings
        with contextlib.closing(self.plan.batches.stream(batch)) as rows:
            comparison = bad_step.compute_again(
                lambda state, rows: step(state, rows, *settings), state, next(rows), bad.metrics
            )
        return bad_step.BadStepError(bad, comparison, self.saves.newest(), look)

    def _read_rows(self) -> None:
        """Read from metrics.jsonl the newest metrics up to the step at which the run resumes."""
        for row in read_metrics(self.session.work.local / "metrics.jsonl"):
            if row["step"] > self.now.step:
                break
            of = {name: name.partition("/")[0] for name in row}
            if f"train/{self.watched}" in row:
                self.train_metrics = {
                    n: row[n] for n in row if of[n] not in ("step", "eval", "event")
                }
            self.now.scores = {n: row[n] for n in row if of[n] == "eval"} or self.now.scores

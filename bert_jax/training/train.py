"""The pretraining loop."""

import contextlib
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from bert_jax.checkpoint import Checkpoints, saved_steps
from bert_jax.checkpoint.agreement import by_first
from bert_jax.config.mapping import to_dict
from bert_jax.data.pipeline import ExampleStream, TrainBatches
from bert_jax.errors import UserError
from bert_jax.parallel.sharding import data_shard, make_mesh, num_batch_shards, place_batch
from bert_jax.run.goodput import Clock
from bert_jax.run.interrupt import StopRequest
from bert_jax.run.lease import hold_workdir
from bert_jax.run.loss_curve import draw_loss_curve
from bert_jax.run.session import Session
from bert_jax.run.telemetry import RunningMeans, read_metrics, readout
from bert_jax.saved.model import SavedModel
from bert_jax.training.bad_step import (
    BadStep,
    BadStepError,
    compute_again,
    find_bad_step,
    skipped_message,
)
from bert_jax.training.baseline import DivergedError, LossMonitor
from bert_jax.training.config import PretrainConfig
from bert_jax.training.corpus import (
    Corpus,
    MixedCorpora,
    evaluation_config,
    open_corpus,
    phase_stores,
    step_config,
)
from bert_jax.training.evaluate import HeldOut
from bert_jax.training.guard import GUARD_METRICS
from bert_jax.training.start.branch import open_branch
from bert_jax.training.start.initial_model import initial_params, resolve_init, starting_line
from bert_jax.training.start.stages import begun, check_stages, with_batch_unit
from bert_jax.training.start.teacher import (
    resolve_teacher,
    starts_from_teacher,
    student_start,
    teacher_digest,
    teacher_line,
    with_teacher,
    without_teacher,
)
from bert_jax.training.state import abstract_state, init_state, made_once
from bert_jax.training.step import make_train_step
from bert_jax.training.step_queue import StepQueue
from bert_jax.training.summary import TrainResult, closing_lines, summary
from bert_jax.training.workdir import check_workdir, prepare_workdir

_REDRAW_SECONDS = 60.0
_log = logging.getLogger("bert_jax")


def train(
    config: PretrainConfig,
    workdir: Path | str,
    *,
    corpus: Corpus | None = None,
    initial: Callable[[], SavedModel] | None = None,
    branch_from: str = "",
    clock: Clock | None = None,
    echo: Callable[[str], None] | None = None,
) -> TrainResult:
    """Pretrain, or continue the run in `workdir`, until its last step or a signal.

    With several processes all call it, after `jax.distributed.initialize`; they share `workdir`.

    Args:
        config: Configuration of the run.
        workdir: Local directory, made if missing, or `gs://bucket/directory`.
        corpus: Replacement for the corpus that `config.data.corpus` names.
        initial: Function that reads the model that `config.init` names; called by the first start.
        branch_from: Checkpoint of another run to go on from, as `WORKDIR@STEP`, or WORKDIR for its
            newest that was read back; a run that has begun knows it.
        clock: Clock started at process start; None: a new clock.
        echo: Function that gets each line for people; None: standard output, with a bar on a
            terminal.

    Raises:
        UserError: The configuration, the corpus, the devices and the work directory do not fit
            together. Nothing has been written.
        BadStepError: A step was not finite or its loss a spike, and the guard says to stop.
        DamagedCheckpointError: None of the run's checkpoints is intact.
        SaveFailedError: Several saves in a row have failed.
    """
    corpus = corpus or open_corpus(config.data.corpus, config.data)
    with hold_workdir(workdir, echo=echo) as work:
        seconds = config.training.stall_seconds
        session = Session(work, stall_seconds=seconds, clock=clock, echo=echo)
        run = _Run(config, session, corpus, initial, branch_from)
        with StopRequest() as stop:
            return run.run(stop)


class _Run:
    """State of a run; the constructor refuses everything that can be refused."""

    def __init__(
        self,
        config: PretrainConfig,
        session: Session,
        corpus: Corpus,
        initial: Callable[[], SavedModel] | None,
        branch_from: str,
    ):
        store, work = corpus.train, session.work
        self.branch = branch = open_branch(branch_from, work)
        """Checkpoint of another run that this one goes on from, if it does."""
        config, self.initial = resolve_init(
            config, work, initial, store.tokenizer_fingerprint, branch.config if branch else None
        )
        config, self.teacher = resolve_teacher(config, store.tokenizer_fingerprint)
        self.mesh = make_mesh(config.mesh)
        unit, step = by_first(lambda: begun(work, branch))
        shards = num_batch_shards(self.mesh)
        config = with_batch_unit(config, shards, unit)
        self.config = config = config.with_vocabulary(store.vocab_size)
        self.work, self.corpus = work, corpus
        self.directory = work.local if work.mirror is None else work.name
        """Work directory for messages."""
        self.metrics_file = work.local / "metrics.jsonl"
        self.session, self.clock = session, session.clock
        self.stores = phase_stores(config, store)
        self.digest = teacher_digest(self.teacher) if self.teacher else ""
        check_workdir(work, config, store, self.stores, self.digest)
        check_stages(config, shards, step)
        self.shard = data_shard(self.mesh)
        numbers = range(len(config.phases))
        self.settings = [step_config(config, corpus, number) for number in numbers]
        """Settings of the train step of each phase."""
        self.step_config = self.settings[0]
        """Settings for what all phases share: the arrays of the state, and the metrics."""
        self.objective = self.step_config.objective
        self.watched = self.objective.metrics[0].name
        self.abstract = abstract_state(self.step_config, self.mesh)
        self.saved = without_teacher(self.abstract)
        """Arrays of a checkpoint."""
        if self.branch is not None:
            self.branch.check(config, store, self.stores, self.saved)
        if self.teacher and self.initial is None and starts_from_teacher(config, work):
            self.initial = student_start(config, self.teacher)
        self.mixed, self.held_out = MixedCorpora(config), None
        texts = self.mixed.named(self.stores, config)
        self.stream = ExampleStream(store, config.data, config.phases, config.seed, texts)
        for number in numbers:
            self.stream.plan(number)
        self.train_steps = made_once(self.settings, partial(make_train_step, mesh=self.mesh))
        self.queue = StepQueue(
            self.train_steps[0], self.objective, self.session, self._read_metrics
        )
        if corpus.heldout is not None:
            evaluations = [evaluation_config(config, corpus, number) for number in numbers]
            self.held_out = HeldOut(
                config, corpus.heldout, evaluations, self.mesh, self.mixed.heldout()
            )
        self.monitor = LossMonitor.of(store, config, self.objective)
        self.means = RunningMeans()
        self.train_metrics: dict[str, float] = {}
        self.eval_metrics: dict[str, float] = {}
        self.evaluated = -1
        """Updates made when `eval_metrics` were measured."""
        self.drawn = -math.inf
        self.last_saved: int | None = None

    def run(self, stop: StopRequest) -> TrainResult:
        # The order: restore -> [read batch n -> dispatch step n -> log metrics of step n - 1 ->
        # evaluate if due -> save if due]. Dispatch returns before the device has computed; the loop
        # waits for it only to read the metrics of the step before (so one step is always queued)
        # and for evaluations and saves. A saved `step` is the number of updates made and of the
        # next batch.
        config, session, metrics = self.config, self.session, self.objective.metrics
        num_steps = config.training.num_steps
        with session.open(self._prepare) as closing:
            self.checkpoints = Checkpoints(
                self.work.checkpoints,
                config.retention,
                max_failed_saves=config.checkpoint.max_failed_saves,
                report=session.report,
            )
            closing.callback(self.checkpoints.close)
            with self.clock.spend("restore"):
                state, step = self._restore_or_init()
            check_stages(config, num_batch_shards(self.mesh), step)
            goes_on = 0 if self.last_saved is None else step
            lines = summary(
                config, self.directory, self.corpus, self.stream, self.mesh, goes_on, self.objective
            )
            if self.branch is not None:
                lines.append(self.branch.line(config))
            if self.teacher is not None:
                lines.append(teacher_line(self.teacher))
            if self.initial is not None:
                lines.append(starting_line(self.initial, self.saved.params))
            with session.telling(
                step,
                self.objective,
                num_steps=num_steps,
                num_devices=self.mesh.size,
                lines=lines,
                event="; ".join([lines[0], *lines[-2:]]),
            ) as out:
                if self.initial is not None:
                    with self.clock.spend("evaluation"):
                        self._evaluate(state.params, step)
                step = self._steps(state, step, stop)
                self._draw()
                session.end()
                result = TrainResult(
                    workdir=self.directory,
                    step=step,
                    finished=step == num_steps,
                    baseline=self.objective.baseline,
                    train_metrics=self.train_metrics,
                    eval_metrics=self.eval_metrics,
                    seconds=self.clock.elapsed,
                    stopped_by=stop.name if step < num_steps else "",
                )
                lines = closing_lines(result, metrics, num_steps, self.clock, stop.name)
                for line in lines:
                    out.say(line)
                session.event("finished" if result.finished else "stopped", lines[0])
                return result

    def _prepare(self) -> None:
        with contextlib.ExitStack() as keeping:
            if self.branch is not None:
                keeping.enter_context(self.branch.keeping(self.work.name))
            prepare_workdir(
                self.work.local,
                self.config,
                self.corpus.train,
                self.stores,
                self.branch.record if self.branch else None,
                self.digest,
                has_saved=bool(saved_steps(self.work.checkpoints)),
                init_step=self.initial.origin.step if self.initial else 0,
            )

    def _restore_or_init(self) -> tuple[Any, int]:
        restored = self.checkpoints.restore(self.saved)
        if restored is not None:
            self.last_saved = restored.step
        elif self.branch is not None:
            restored = self.branch.restore(self.saved)
        axes = self.objective.axes()
        if restored is None:
            state = init_state(self.step_config, self.mesh, jax.random.key(self.config.seed))
            if self.initial is not None:
                state = state._replace(params=initial_params(self.initial, state.params, axes))
            return with_teacher(self.teacher, state, self.abstract, axes), 0
        extra = restored.record.extra
        self.means = RunningMeans(**extra["means"])
        self.monitor.restore(extra["plateau"], restored.step)
        for row in read_metrics(self.metrics_file):
            values = {name: value for name, value in row.items() if name != "step"}
            if row["step"] > restored.step:
                break
            if f"train/{self.watched}" in row:
                self.train_metrics = values
            elif f"eval/{self.watched}" in row:
                self.eval_metrics = values
        return with_teacher(self.teacher, restored.state, self.abstract, axes), restored.step

    def _steps(self, state: Any, step: int, stop: StopRequest) -> int:
        """Train from `step` to the end or a stop; return the number of updates made."""
        training, every = self.config.training, self.config.checkpoint.save_every_steps
        batches = TrainBatches(self.stream, step, *self.shard)
        self.clock.started()
        try:
            while step < training.num_steps and not stop.due():
                with self.clock.spend("input"):
                    batch = place_batch(next(batches), self.mesh)
                phase = self.stream.phase_of(step)
                self.queue.switch(self.train_steps[phase], self.settings[phase].objective)
                step += 1
                state = self.queue.dispatch(step, state, batch)
                if self._evaluation_due(step):
                    self.queue.flush(state)
                    with self.clock.spend("evaluation"):
                        self._evaluate(state.params, step)
                if step % every == 0:
                    self.queue.flush(state)
                    self._save(step, state, self.checkpoints.save)
            self.queue.flush(state)
            # After a signal there may be no time to read the checkpoint back.
            finished = step == training.num_steps
            self._save(step, state, partial(self.checkpoints.save_last, read_back=finished))
            return step
        finally:
            batches.close()

    def _read_metrics(self, step: int, flops: int, metrics: dict[str, Any], state: Any) -> None:
        bad = find_bad_step(step - 1, metrics)
        if bad is not None:
            self._bad_step(bad, state)
        # The guard's metrics have no useful mean: a limit may be infinite.
        values = {name: float(v) for name, v in metrics.items() if name not in GUARD_METRICS}
        tokens, rate = values.pop("num_tokens"), values.pop("learning_rate")
        watched, out = values[self.watched], self.session.out
        out.step_done(step, tokens, flops, watched)
        if bad is None:
            self.means.add(values)
            for kind, message in self.monitor.observe(step, watched):
                stops = kind == "diverged" and self.config.guard.on_divergence == "stop"
                error = DivergedError(message) if stops else None
                self.session.warn(kind, message, step, error)
        training = self.config.training
        due = step % training.log_every_steps == 0 or step == training.num_steps
        if due and self.means.count:
            row = {f"train/{name}": value for name, value in self.means.take().items()}
            row["train/learning_rate"] = rate
            self.train_metrics = row | out.rates() | self.mixed.seen(self.stream, step)
            out.write(step, self.train_metrics)
            out.progress_line(step, self.train_metrics)

    def _bad_step(self, bad: BadStep, state: Any) -> None:
        """Say that a batch was skipped, or compute it again and raise why the run stops."""
        error, look = None, f"bert-jax replay {self.directory} --step {bad.batch}"
        if bad.halted:
            batch = place_batch(self.stream.batch(bad.batch, *self.shard), self.mesh)
            train_step = self.train_steps[self.stream.phase_of(bad.batch)]
            comparison = compute_again(train_step, state, batch, bad.metrics)
            saved = self.last_saved
            where = "" if saved is None else f"{self.directory}/checkpoints/{saved}"
            error = BadStepError(bad, comparison, where, look)
        kind = "bad_step" if error else "skipped_step"
        message = str(error) if error else skipped_message(bad, look)
        self.session.warn(kind, message, bad.batch, error, batch=bad.batch, **bad.statistics)

    def _evaluation_due(self, step: int) -> bool:
        training, every = self.config.training, self.config.training.eval_every_steps
        ends = (*training.phase_starts, training.num_steps)
        return bool(every and step % every == 0) or step in ends

    def _evaluate(self, params: Any, step: int) -> None:
        if self.held_out is None:
            return
        values = self.held_out.evaluate(
            params,
            self.stream.phase_of(max(step - 1, 0)),
            alive=lambda: self.session.alive("a batch of an evaluation"),
        )
        self.eval_metrics, self.evaluated = values, step
        self.session.out.write(step, values)
        text = readout(self.objective.metrics, values, "eval", self.objective.baseline)
        self.session.out.say(f"held-out text at step {step:,}: {text}")
        if self.clock.elapsed - self.drawn > _REDRAW_SECONDS:
            self._draw()

    def _save(self, step: int, state: Any, save: Callable[..., None]) -> None:
        extra = {
            "means": {"sums": self.means.sums, "count": self.means.count},
            "plateau": self.monitor.state(),
            "lowest_at": self.monitor.lowest_at,
        }
        metrics = self.eval_metrics if self.evaluated == step else {}
        config = self.config.with_thetas_of(self.stream.phase_of(max(step - 1, 0)))
        self.stream.wait_for_checks()
        with self.session.saving(f"the save of step {step:,}"):
            save(step, without_teacher(state), config=to_dict(config), extra=extra, metrics=metrics)
        self.last_saved = step

    def _draw(self) -> None:
        if jax.process_index() != 0:
            return
        self.drawn = self.clock.elapsed
        path, name = self.work.local / "loss.png", Path(self.work.name).name
        metrics, baseline = self.objective.metrics, self.objective.baseline
        try:
            draw_loss_curve(
                self.metrics_file, metrics, baseline, path, title=name, phases=self.config.phases
            )
        except (OSError, UserError) as error:
            _log.warning("%s cannot be drawn: %s", path, error)

"""The pretraining loop."""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from bert_jax.checkpoint import Checkpoints
from bert_jax.config.mapping import to_dict
from bert_jax.data.pipeline import ExampleStream, TrainBatches
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.parallel.sharding import check_batch_size, data_shard, make_mesh, place_batch
from bert_jax.run.goodput import Clock
from bert_jax.run.interrupt import StopRequest
from bert_jax.run.lease import hold_workdir
from bert_jax.run.loss_curve import draw_loss_curve
from bert_jax.run.readout import readout
from bert_jax.run.session import Session
from bert_jax.run.telemetry import Means, read_metrics, whole_peak
from bert_jax.saved.model import SavedModel
from bert_jax.training.bad_step import (
    BadStep,
    BadStepError,
    find_bad_step,
    replay_command,
    rerun,
    skipped_message,
    without_guard,
)
from bert_jax.training.baseline import DivergedError, LossMonitor
from bert_jax.training.config import PretrainConfig
from bert_jax.training.corpus import Corpus, open_corpus, step_config
from bert_jax.training.evaluate import HeldOut
from bert_jax.training.initial import resolve_init, started_from
from bert_jax.training.report import TrainResult, closing_lines, starting_line, summary
from bert_jax.training.state import abstract_state, init_state
from bert_jax.training.step import make_train_step
from bert_jax.training.workdir import check_workdir, prepare_workdir

_REDRAW_SECONDS = 60.0
_log = logging.getLogger("bert_jax")


def train(
    config: PretrainConfig,
    workdir: Path | str,
    *,
    corpus: Corpus | None = None,
    initial: Callable[[], SavedModel] | None = None,
    clock: Clock | None = None,
    echo: Callable[[str], None] | None = None,
) -> TrainResult:
    """Pretrains, or continues the run in `workdir`, until its last step or a signal.

    With several processes all call it, after `jax.distributed.initialize`; they share `workdir`.

    Args:
        config: The run.
        workdir: Made if missing; a local directory, or `gs://bucket/directory`.
        corpus: In place of what `config.data.corpus` names.
        initial: Reads what `config.init` names; called where no checkpoint is there yet.
        clock: Clock started at process start; None: a new clock.
        echo: Gets each line for people; None: standard output, with a bar on a terminal.

    Raises:
        UserError: The configuration, the corpus, the devices and the work directory do not fit
            together. Nothing has been written.
        BadStepError: A step was not finite or its loss a spike, and the guard says to stop.
        DamagedCheckpointError: None of the run's checkpoints is intact.
        SaveFailedError: Several saves in a row have failed.
    """
    corpus = corpus or open_corpus(config.data.corpus)
    with hold_workdir(workdir, echo=echo) as place:
        run = _Run(config, place, corpus, initial, clock, echo)
        with StopRequest() as stop:
            return run.loop(stop)


class _Run:
    """State of a run; everything that can be refused is refused by the constructor."""

    def __init__(
        self,
        config: PretrainConfig,
        place: WorkDir,
        corpus: Corpus,
        initial: Callable[[], SavedModel] | None,
        clock: Clock | None,
        echo: Callable[[str], None] | None,
    ):
        store = corpus.train
        self.place = place
        config, self.initial = resolve_init(config, place, initial, store.tokenizer_fingerprint)
        self.config = config = config.with_vocabulary(store.vocab_size)
        self.shown = place.local if place.mirror is None else place.name
        self.workdir, self.corpus = place.local, corpus
        self.session = Session(
            place, stall_seconds=config.training.stall_seconds, clock=clock, echo=echo
        )
        self.clock = self.session.clock
        check_workdir(place, config, store)
        self.mesh = make_mesh(config.mesh)
        for number, phase in enumerate(config.phases):
            check_batch_size(
                phase.batch_size, self.mesh, config.training.accumulation,
                where=f"training.phases[{number}].batch_size",
            )  # fmt: skip
        self.shard = data_shard(self.mesh)
        self.step_config = step_config(config, corpus)
        self.objective = self.step_config.objective
        self.abstract = abstract_state(self.step_config, self.mesh)
        self.stream = ExampleStream(store, config.data, config.phases, config.seed)
        for number in range(len(config.phases)):
            self.stream.plan(number)
        self.train_step = make_train_step(self.step_config, self.mesh)
        self.held_out = None
        if corpus.heldout is not None:
            self.held_out = HeldOut(config, corpus.heldout, self.step_config, self.mesh)
        self.monitor = LossMonitor.of(store, config, self.objective)
        self.means = Means()
        self.unread: tuple[int, Any] | None = None
        self.train_metrics: dict[str, float] = {}
        self.eval_metrics: dict[str, float] = {}
        self.evaluated = -1
        """Updates made when it was measured."""
        self.drawn = -math.inf
        self.last_saved: int | None = None

    def loop(self, stop: StopRequest) -> TrainResult:
        # The order: restore -> [read batch n -> dispatch step n -> log metrics of step n - 1 ->
        # evaluate if due -> save if due]. Dispatch returns before the device has computed; the only
        # things that wait for it are the metrics of the step before (so one step is always queued)
        # and what is due. A saved `step` is the number of updates made and of the next batch.
        config = self.config
        with self.session.open(
            lambda: prepare_workdir(self.workdir, config, self.corpus.train)
        ) as closing:
            checkpoints = Checkpoints(
                self.place.checkpoints,
                config.retention,
                max_failed_saves=config.checkpoint.max_failed_saves,
                report=self.session.report,
            )
            closing.callback(checkpoints.close)
            return self._restored_loop(checkpoints, stop)

    def _restored_loop(self, checkpoints: Checkpoints, stop: StopRequest) -> TrainResult:
        with self.clock.spend("restore"):
            state, step = self._restore_or_init(checkpoints)
        num_steps, metrics = self.config.training.num_steps, self.objective.metrics
        peak = whole_peak(self.config.model, self.mesh.size)
        with self.session.telling(step, num_steps=num_steps, metrics=metrics, peak=peak) as out:
            lines = summary(
                self.config, self.shown, self.corpus, self.stream, self.mesh, step, self.objective
            )
            if self.initial is not None:
                lines.append(starting_line(self.initial, self.abstract.params))
            self.session.begin(lines, "; ".join([lines[0], *lines[-2:]]), num_steps)
            step = self._steps(state, step, checkpoints, stop)
            self._draw()
            self.session.end(step)
            result = TrainResult(
                workdir=self.shown,
                step=step,
                finished=step == num_steps,
                baseline=self.objective.baseline,
                train_metrics=self.train_metrics,
                eval_metrics=self.eval_metrics,
                seconds=self.clock.elapsed,
            )
            lines = closing_lines(result, metrics, num_steps, self.clock, stop.name)
            for line in lines:
                out.say(line)
            self.session.event("finished" if result.finished else "stopped", lines[0])
            return result

    def _restore_or_init(self, checkpoints: Checkpoints) -> tuple[Any, int]:
        restored = checkpoints.restore(self.abstract)
        if restored is None:
            state = init_state(self.step_config, self.mesh, jax.random.key(self.config.seed))
            if self.initial is None:
                return state, 0
            axes = self.objective.axes()
            return state._replace(params=started_from(self.initial, state.params, axes)), 0
        extra = restored.record.extra
        self.means = Means(**extra["means"])
        self.monitor.restore(extra["plateau"], restored.step)
        self.last_saved = restored.step
        for row in read_metrics(self.workdir / "metrics.jsonl"):
            values = {name: value for name, value in row.items() if name != "step"}
            if row["step"] > restored.step:
                break
            watched = self.objective.metrics[0].name
            if f"train/{watched}" in row:
                self.train_metrics = values
            elif f"eval/{watched}" in row:
                self.eval_metrics = values
        return restored.state, restored.step

    def _steps(self, state: Any, step: int, checkpoints: Checkpoints, stop: StopRequest) -> int:
        """Trains from `step` to the end or a stop; the number of updates made."""
        training, checkpoint = self.config.training, self.config.checkpoint
        batches = TrainBatches(self.stream, step, *self.shard)
        compiled: set[tuple[int, ...]] = set()
        self.clock.started()
        try:
            while step < training.num_steps and not stop.due(step):
                with self.clock.spend("input"):
                    batch = place_batch(next(batches), self.mesh)
                shape = batch["tokens"].shape
                if shape in compiled:
                    state, metrics = self.train_step(state, batch)
                else:
                    self._read_metrics(state)
                    with self.clock.spend("compile"):
                        state, metrics = self.train_step(state, batch)
                    compiled.add(shape)
                    self.session.alive("a compilation")
                step += 1
                self._read_metrics(state)
                self.unread = (step, metrics)
                if self._evaluation_due(step):
                    self._read_metrics(state)
                    with self.clock.spend("evaluation"):
                        self._evaluate(state.params, step)
                if step % checkpoint.save_every_steps == 0:
                    self._read_metrics(state)
                    self._save(step, state, checkpoints.save)
            self._read_metrics(state)
            # After a signal there may be no time to read the checkpoint back.
            finished = step == training.num_steps
            self._save(step, state, partial(checkpoints.save_last, read_back=finished))
            return step
        finally:
            batches.close()

    def _read_metrics(self, state: Any) -> None:
        """Wait for the metrics of the newest step that was not read yet, and pass them on.

        Args:
            state: After it, or after the step that was dispatched since.
        """
        if self.unread is None:
            return
        (step, metrics), self.unread = self.unread, None
        metrics = jax.device_get(metrics)
        self.session.step = step
        self.session.alive(f"step {step:,}")
        bad = find_bad_step(step - 1, metrics)
        if bad is not None:
            self._bad_step(bad, state)
        values = without_guard({name: float(value) for name, value in metrics.items()})
        tokens, rate = values.pop("num_tokens"), values.pop("learning_rate")
        watched = values[self.objective.metrics[0].name]
        out = self.session.out
        phase = self.config.phases[self.stream.phase_of(step - 1)]
        flops = phase.batch_size * self.objective.flops(phase.length)
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
            self.train_metrics = row | out.rates()
            out.write(step, self.train_metrics)
            out.progress_line(step, self.train_metrics)

    def _bad_step(self, bad: BadStep, state: Any) -> None:
        """Say that a batch was skipped, or compute it again and raise why the run stops."""
        error, look = None, replay_command(self.shown, bad.batch)
        if bad.halted:
            batch = self.stream.batch(bad.batch, *self.shard)
            verdict = rerun(self.train_step, state, place_batch(batch, self.mesh), bad.metrics)
            saved = self.last_saved
            where = "" if saved is None else f"{self.shown}/checkpoints/{saved}"
            error = BadStepError(bad, verdict, where, look)
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
            self.stream.phase_of(step - 1),
            alive=lambda: self.session.alive("a batch of an evaluation"),
        )
        self.eval_metrics, self.evaluated = values, step
        self.session.out.write(step, values)
        metrics, baseline = self.objective.metrics, self.objective.baseline
        self.session.out.say(
            f"held-out text at step {step:,}: {readout(metrics, values, 'eval', baseline)}"
        )
        if self.clock.elapsed - self.drawn > _REDRAW_SECONDS:
            self._draw()

    def _save(self, step: int, state: Any, save: Callable[..., None]) -> None:
        with self.session.saving(f"the save of step {step:,}"):
            save(step, state, **self._saved_beside(step))
        self.last_saved = step

    def _saved_beside(self, step: int) -> dict[str, Any]:
        return {
            "config": to_dict(self.config),
            "extra": {
                "means": {"sums": self.means.sums, "count": self.means.count},
                "plateau": self.monitor.state(),
                "lowest_at": self.monitor.lowest_at,
            },
            "metrics": self.eval_metrics if self.evaluated == step else {},
        }

    def _draw(self) -> None:
        if jax.process_index() != 0:
            return
        self.drawn = self.clock.elapsed
        starts, phases = self.config.training.phase_starts, self.config.phases[1:]
        try:
            draw_loss_curve(
                read_metrics(self.workdir / "metrics.jsonl"),
                self.objective.metrics,
                self.objective.baseline,
                self.workdir / "loss.png",
                title=Path(self.place.name).name,
                phase_ends=[(n, f"length {p.length}") for n, p in zip(starts, phases, strict=True)],
            )
        except (OSError, UserError) as error:
            _log.warning("%s cannot be drawn: %s", self.workdir / "loss.png", error)

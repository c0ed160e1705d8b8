"""The pretraining loop."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from bert_jax.data.pipeline import ExampleStream, eval_batches, train_batches
from bert_jax.data.tokenizer import load_tokenizer
from bert_jax.errors import UserError
from bert_jax.model.flops import train_flops
from bert_jax.model.layers import compute_dtype
from bert_jax.training.baseline import PlateauDetector, compare
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.config import PretrainConfig, to_dict
from bert_jax.training.evaluate import evaluate, make_eval_step
from bert_jax.training.goodput import Clock
from bert_jax.training.interrupt import StopRequest
from bert_jax.training.loss_curve import draw_loss_curve
from bert_jax.training.report import TrainResult, closing, summary
from bert_jax.training.sharding import check_batch_size, data_shard, make_mesh, place_batch
from bert_jax.training.step import StepConfig, abstract_state, init_state, make_train_step
from bert_jax.training.telemetry import Means, Telemetry, peak_flops, read_metrics
from bert_jax.training.workdir import Corpus, check_workdir, open_corpus, prepare_workdir

_REDRAW_SECONDS = 60.0


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient is NaN or infinite; nothing after it was saved."""

    exit_code = 4

    def __init__(self, message: str, step: int):
        """Step is the number of the batch."""
        super().__init__(message)
        self.step = step


def train(
    config: PretrainConfig,
    workdir: Path,
    *,
    corpus: Corpus | None = None,
    echo: Callable[[str], None] | None = None,
) -> TrainResult:
    """Pretrains, or continues the run in `workdir`, until its last step or a signal.

    With several processes all call it, after `jax.distributed.initialize`; they share `workdir`.

    Args:
        config: The run.
        workdir: Made if missing.
        corpus: In place of what `config.data.corpus` names.
        echo: Gets each line for people; None: standard output, with a bar on a terminal.

    Raises:
        UserError: The configuration, the corpus, the devices and the work directory do not fit
            together. Nothing has been written.
        NonFiniteLossError: The loss became NaN or infinite.
        DamagedCheckpointError: None of the run's checkpoints is intact.
    """
    clock = Clock()
    run = _Run(config, workdir, corpus or open_corpus(config.data.corpus), clock, echo)
    with StopRequest() as stop:
        return run.loop(stop)


class _Run:
    """What a run holds while it lasts. Everything that can be refused is refused on the way in."""

    def __init__(
        self,
        config: PretrainConfig,
        workdir: Path,
        corpus: Corpus,
        clock: Clock,
        echo: Callable[[str], None] | None,
    ):
        store = corpus.train
        self.config = config = config.with_vocabulary(store.vocab_size)
        self.workdir, self.corpus, self.clock = workdir, corpus, clock
        check_workdir(workdir, config, store)
        self.mesh = make_mesh(config.mesh)
        for number, phase in enumerate(config.phases):
            check_batch_size(
                phase.batch_size, self.mesh, config.training.accumulation,
                where=f"training.phases[{number}].batch_size",
            )  # fmt: skip
        self.shard = data_shard(self.mesh)
        self.step_config = step_config(config, corpus)
        self.abstract = abstract_state(self.step_config, self.mesh)
        self.stream = ExampleStream(store, config.data, config.phases, config.seed)
        for number in range(len(config.phases)):
            self.stream.plan(number)
        self.eval_sets = [self._eval_set(phase.length, phase.batch_size) for phase in config.phases]

        self.train_step = make_train_step(self.step_config, self.mesh)
        self.eval_step = make_eval_step(self.step_config, self.mesh)
        self.plateau = PlateauDetector.of(store, config)
        self.means = Means()
        self.unread: tuple[int, Any] | None = None
        self.echo = echo
        self.train_metrics: dict[str, float] = {}
        self.eval_metrics: dict[str, float] = {}
        self.drawn = -math.inf
        self.last_saved: int | None = None

    def _eval_set(self, length: int, batch_size: int) -> Any:
        if self.corpus.heldout is None:
            return None
        batch_size //= self.config.training.accumulation  # the memory of a micro-batch
        index, count = self.shard
        try:
            return eval_batches(
                self.corpus.heldout, self.config.data, length, batch_size,
                max_rows=self.config.training.eval_rows, process_index=index, process_count=count,
            )  # fmt: skip
        except UserError as error:
            raise UserError(
                f"the held-out store {self.corpus.heldout.path} cannot be evaluated: {error}. "
                "Build the corpus with a larger --heldout-rate"
            ) from error

    def loop(self, stop: StopRequest) -> TrainResult:
        # The order: restore -> [read batch n -> dispatch step n -> log metrics of step n - 1 ->
        # evaluate if due -> save if due]. Dispatch returns before the device has computed; the only
        # things that wait for it are the metrics of the step before (so one step is always queued)
        # and what is due. A saved `step` is the number of updates made and of the next batch.
        config, clock = self.config, self.clock
        prepare_workdir(self.workdir, config, self.corpus.train)
        checkpoints = Checkpoints(self.workdir / "checkpoints", keep=config.checkpoint.keep)
        try:
            with clock.spend("restore"):
                state, step = self._restore_or_init(checkpoints)
            with self._telemetry(step) as out:
                self.out = out
                for line in summary(
                    config, self.workdir, self.corpus, self.stream, self.mesh, step
                ):
                    out.say(line)
                step = self._steps(state, step, checkpoints, stop)
                with clock.spend("save"):
                    checkpoints.wait()
                out.sync()
                self._draw()
                result = TrainResult(
                    workdir=self.workdir,
                    step=step,
                    finished=step == config.training.num_steps,
                    baseline=self.plateau.baseline,
                    train_metrics=self.train_metrics,
                    eval_metrics=self.eval_metrics,
                    seconds=clock.elapsed,
                )
                for line in closing(result, config.training.num_steps, clock, stop.name):
                    out.say(line)
                return result
        finally:
            checkpoints.close()

    def _restore_or_init(self, checkpoints: Checkpoints) -> tuple[Any, int]:
        restored = checkpoints.restore(self.abstract)
        if restored is None:
            key = jax.random.key(self.config.seed)
            return init_state(self.step_config, self.mesh, key), 0
        self.means = Means(**restored.extra["means"])
        self.plateau.restore(restored.extra["plateau"])
        self.last_saved = restored.step
        for row in read_metrics(self.workdir / "metrics.jsonl"):
            values = {name: value for name, value in row.items() if name != "step"}
            if row["step"] > restored.step:
                break
            if "train/mlm_loss" in row:
                self.train_metrics = values
            elif "eval/mlm_loss" in row:
                self.eval_metrics = values
        return restored.state, restored.step

    def _steps(self, state: Any, step: int, checkpoints: Checkpoints, stop: StopRequest) -> int:
        """Trains from `step` to the end or a stop; the number of updates made."""
        training, checkpoint = self.config.training, self.config.checkpoint
        batches = train_batches(self.stream, step, *self.shard)
        compiled: set[tuple[int, ...]] = set()
        try:
            while step < training.num_steps and not stop.due(step):
                with self.clock.spend("input"):
                    batch = place_batch(next(batches), self.mesh)
                shape = batch["tokens"].shape
                if shape in compiled:
                    state, metrics = self.train_step(state, batch)
                else:
                    self._read_metrics()
                    with self.clock.spend("compile"):
                        state, metrics = self.train_step(state, batch)
                    compiled.add(shape)
                step += 1
                self._read_metrics()
                self.unread = (step, metrics)
                if self._evaluation_due(step):
                    self._read_metrics()
                    with self.clock.spend("evaluation"):
                        self._evaluate(state.params, step)
                if step % checkpoint.save_every_steps == 0:
                    self._read_metrics()
                    self._save(checkpoints, step, state)
            self._read_metrics()
            self._save(checkpoints, step, state)
            return step
        finally:
            batches.close()

    def _read_metrics(self) -> None:
        """Waits for the metrics of the newest step that was not read yet, and passes them on."""
        if self.unread is None:
            return
        (step, metrics), self.unread = self.unread, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            raise self._not_finite(step, values)
        tokens, rate = values.pop("num_tokens"), values.pop("learning_rate")
        values.pop("num_masked")
        if self.config.data.objective == "none":
            values.pop("nsp_loss")
            values.pop("nsp_accuracy")
        self.means.add(values)
        self.out.step_done(step, tokens, values["mlm_loss"])
        warning = self.plateau.observe(step, values["mlm_loss"])
        if warning:
            self.out.say(warning)
        training = self.config.training
        if step % training.log_every_steps == 0 or step == training.num_steps:
            row = {f"train/{name}": value for name, value in self.means.take().items()}
            row["train/learning_rate"] = rate
            self.train_metrics = row | self.out.rates()
            self.out.write(step, self.train_metrics)
            self.out.progress_line(step, self.train_metrics)

    def _not_finite(self, step: int, values: dict[str, float]) -> NonFiniteLossError:
        batch = step - 1
        saved = "none was saved"
        if self.last_saved is not None:
            saved = f"{self.workdir / 'checkpoints' / str(self.last_saved)}"
        self.out.write(step, {"event/non_finite_batch": batch})
        return NonFiniteLossError(
            f"the loss of batch {batch:,} is {values['loss']} and its gradient norm "
            f"{values['grad_norm']}; the run stops, and nothing after it was saved. See the batch "
            f"with `bert-jax replay {self.workdir} --step {batch}`. The last good "
            f"checkpoint: {saved}. Most often the learning rate is too high or the warm-up too "
            "short; a run with other values needs a work directory of its own",
            batch,
        )

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.training.eval_every_steps
        return bool(every and step % every == 0) or step in self._phase_ends()

    def _phase_ends(self) -> list[int]:
        steps = self.config.training.phase_steps
        return [sum(steps[: number + 1]) for number in range(len(steps))]

    def _evaluate(self, params: Any, step: int) -> None:
        batches = self.eval_sets[self.stream.phase_of(step - 1)]
        if batches is None:
            return
        values = evaluate(self.eval_step, params, batches, self.mesh)
        if self.config.data.objective == "none":
            values = {name: v for name, v in values.items() if "nsp" not in name}
        baseline = self.plateau.baseline
        values["eval/nats_below_unigram"] = baseline - values["eval/mlm_loss"]
        self.eval_metrics = values
        self.out.write(step, values)
        line = f"held-out text at step {step:,}: mlm {compare(values['eval/mlm_loss'], baseline)}"
        if "eval/nsp_accuracy" in values:
            line += (
                f"; nsp accuracy {values['eval/nsp_accuracy']:.3f} (majority label "
                f"{values['eval/nsp_majority']:.3f})"
            )
        self.out.say(line)
        if self.clock.elapsed - self.drawn > _REDRAW_SECONDS:
            self._draw()

    def _save(self, checkpoints: Checkpoints, step: int, state: Any) -> None:
        if step == self.last_saved:
            return
        with self.clock.spend("save"):
            self.out.sync()
            extra = {
                "means": {"sums": self.means.sums, "count": self.means.count},
                "plateau": self.plateau.state(),
            }
            checkpoints.save(step, state, config=to_dict(self.config), extra=extra)
        self.last_saved = step

    def _draw(self) -> None:
        if jax.process_index() != 0:
            return
        phases = self.config.phases
        draw_loss_curve(
            read_metrics(self.workdir / "metrics.jsonl"),
            self.plateau.baseline,
            self.workdir / "loss.png",
            title=str(self.workdir.name),
            phase_ends=[
                (end, f"length {phase.length}")
                for end, phase in zip(self._phase_ends()[:-1], phases[1:], strict=True)
            ],
        )
        self.drawn = self.clock.elapsed

    def _telemetry(self, step: int) -> Telemetry:
        config, device = self.config, jax.devices()[0]
        per_phase = [
            phase.batch_size
            * train_flops(config.model, phase.length, config.masking.num_predictions(phase.length))
            for phase in config.phases
        ]
        peak = peak_flops(device.device_kind, compute_dtype(config.model).name)
        return Telemetry(
            self.workdir,
            num_steps=config.training.num_steps,
            restored_step=step,
            flops_per_step=lambda n: per_phase[self.stream.phase_of(n)],
            peak=None if peak is None else peak * self.mesh.size,
            clock=self.clock,
            echo=self.echo,
        )


def step_config(config: PretrainConfig, corpus: Corpus) -> StepConfig:
    """What the train and evaluation steps of a run are compiled from."""
    store = corpus.train
    continues_word = None
    if config.masking.whole_word:
        if store.path is None:
            raise UserError("masking.whole_word needs a store on disk, with its tokenizer")
        continues_word = load_tokenizer(store.path / "tokenizer").continues_word
    return StepConfig(
        model=config.model,
        masking=config.masking,
        optimizer=config.optimizer,
        num_steps=config.training.num_steps,
        special_ids=store.special_ids,
        continues_word=continues_word,
        accumulation=config.training.accumulation,
        seed=config.seed,
        guard=config.guard,
    )


__all__ = ["Corpus", "NonFiniteLossError", "TrainResult", "step_config", "train"]

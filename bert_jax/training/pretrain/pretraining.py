"""Parts of a pretraining plan: its batches, saves and words."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.config.mapping import to_dict
from bert_jax.data.mixture import Mixture
from bert_jax.data.pipeline import ExampleStream, TrainBatches
from bert_jax.data.store import TokenStore
from bert_jax.distributed.checkpoint import Checkpoints, saved_steps
from bert_jax.distributed.checkpoint.manager import Report
from bert_jax.distributed.parallel.sharding import data_shard, num_batch_shards, place_batch
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, MixedCorpora
from bert_jax.training.pretrain.evaluate import HeldOut
from bert_jax.training.pretrain.loss_monitor import LossMonitor
from bert_jax.training.pretrain.start.branch import Branch
from bert_jax.training.pretrain.start.initial_model import initial_params, starting_line
from bert_jax.training.pretrain.start.stages import check_stages
from bert_jax.training.pretrain.start.teacher import teacher_line, with_teacher, without_teacher
from bert_jax.training.pretrain.summary import closing_lines, summary
from bert_jax.training.pretrain.workdir import prepare_workdir
from bert_jax.training.progress import Means, Moment, Progress
from bert_jax.training.run.goodput import Clock
from bert_jax.training.run.loss_curve import PROBE, draw_loss_curve
from bert_jax.training.run.telemetry import readout
from bert_jax.training.run_plan import Result, Scores, Stage
from bert_jax.training.steps.state import StepConfig, TrainState, abstract_state, init_state
from bert_jax.training.sweep.statistics import Trial

_REDRAW_SECONDS = 60.0
_log = logging.getLogger("bert_jax")


@dataclass(frozen=True, eq=False)
class TextBatches:
    """Batches of a stream of examples: the rows of this process, on the mesh."""

    examples: ExampleStream
    mesh: Mesh

    def at(self, step: int) -> Mapping[str, Any]:
        """Return one batch."""
        return place_batch(self.examples.batch(step, *data_shard(self.mesh)), self.mesh)

    def stream(self, first: int) -> Generator[Mapping[str, Any], None, None]:
        """Yield the batches from number `first` on, built ahead in threads."""
        with contextlib.closing(TrainBatches(self.examples, first, *data_shard(self.mesh))) as rows:
            for batch in rows:
                yield place_batch(batch, self.mesh)

    def confirm(self) -> None:
        """Wait until all text read so far was compared with its digests."""
        self.examples.wait_for_checks()


@dataclass(frozen=True, eq=False)
class HeldOutScorer:
    """Held-out loss as the one score of a run."""

    held_out: HeldOut
    after: Callable[[int], bool]

    def score(self, params: Any, at: Moment, alive: Callable[[str], None]) -> list[Scores]:
        """Evaluate on the rows of the stage."""
        ring = partial(alive, "a batch of an evaluation")
        found = self.held_out.evaluate(params, at.stage, alive=ring)
        return [Scores({name.removeprefix("eval/"): value for name, value in found.items()})]

    def conclude(self, at: Moment, alive: Callable[[str], None]) -> list[Mapping[str, float]]:
        """Score no test data."""
        del at, alive
        return []


@dataclass(eq=False)
class PretrainSaves:
    """`checkpoints/`: the state, which is also the model."""

    config: PretrainConfig
    work: WorkDir
    corpus: Corpus
    texts: Mapping[int, TokenStore | Mixture]
    mesh: Mesh
    step: StepConfig
    initial: SavedModel | None
    teacher: SavedModel | None
    digest: str
    branch: Branch | None
    trial: Trial
    checkpoints: Checkpoints = field(init=False)
    last_saved: int | None = None

    def __post_init__(self) -> None:
        """Derive the arrays of a checkpoint."""
        self.abstract = abstract_state(self.step, self.mesh)
        self.saved = without_teacher(self.abstract)

    def prepare(self) -> None:
        """Begin the run in its work directory."""
        with contextlib.ExitStack() as keeping:
            if self.branch is not None:
                keeping.enter_context(self.branch.keeping(self.work.name))
            prepare_workdir(
                self.work.local,
                self.config,
                self.corpus.train,
                self.texts,
                self.branch.record if self.branch else None,
                self.digest,
                has_saved=bool(saved_steps(self.work.checkpoints)),
                init_step=self.initial.origin.step if self.initial else 0,
            )

    def open(self, report: Report) -> None:
        """Open the checkpoints."""
        self.checkpoints = Checkpoints(
            self.work.checkpoints,
            self.config.retention,
            max_failed_saves=self.config.checkpoint.max_failed_saves,
            report=report,
        )

    def begin(self, number: int, stage: Stage) -> Moment:
        """Make the state before the first step."""
        state = init_state(self.step, self.mesh, jax.random.key(self.config.seed))
        if self.initial is not None:
            axes = self.step.objective.axes()
            state = state._replace(params=initial_params(self.initial, state.params, axes))
        return self._moment(number, stage.first, state)

    def _moment(self, stage: int, step: int, state: TrainState) -> Moment:
        axes = self.step.objective.axes()
        monitor = LossMonitor.of(self.corpus.train, self.config, self.step.objective)
        return Moment(
            stage, step, with_teacher(self.teacher, state, self.abstract, axes),
            [Progress(self.trial)], Means(1), monitor=monitor,
        )  # fmt: skip

    def restore(self) -> Moment | None:
        """Return the newest save, or the one that the run branches from."""
        restored = self.checkpoints.restore(self.saved)
        if restored is not None:
            self.last_saved = restored.step
        elif self.branch is not None:
            restored = self.branch.restore(self.saved)
        if restored is None:
            return None
        step, extra = restored.step, restored.record.extra
        check_stages(self.config, num_batch_shards(self.mesh), step)
        phase = self.config.training.phase_of(max(step - 1, 0))
        now = self._moment(phase, step, restored.state)
        now.means.restore(extra["means"])
        assert now.monitor is not None
        now.monitor.restore(extra["plateau"], step)
        return now

    def save(self, at: Moment, *, last: bool, finished: bool) -> None:
        """Save the state; the last save of a run that has ended is read back."""
        assert at.monitor is not None
        extra = {
            "means": at.means.state(),
            "plateau": at.monitor.state(),
            "lowest_at": at.monitor.lowest_at,
        }
        save = self.checkpoints.save
        if last:
            save = partial(self.checkpoints.save_last, read_back=finished)
        save(
            at.step,
            without_teacher(at.state),
            config=to_dict(self.config.with_thetas_of(at.stage)),
            extra=extra,
            metrics=at.scores if at.scored_at == at.step else {},
        )
        self.last_saved = at.step

    def choose(self, at: Moment) -> None:
        """Choose nothing: the state is the model."""

    def newest(self) -> str:
        """Name the newest save."""
        saved = self.last_saved
        return "" if saved is None else f"{directory_of(self.work)}/checkpoints/{saved}"

    def close(self) -> None:
        """Wait for saves in progress."""
        self.checkpoints.close()


@dataclass(eq=False)
class PretrainVoice:
    """Words, columns and the picture of a run."""

    config: PretrainConfig
    work: WorkDir
    corpus: Corpus
    examples: ExampleStream
    mixed: MixedCorpora
    saves: PretrainSaves
    drawn: float = -math.inf

    def about(self, at: Moment, restored: bool) -> tuple[list[str], str]:
        """Describe the run."""
        saves, objective = self.saves, self.saves.step.objective
        goes_on = 0 if saves.last_saved is None else at.step
        lines = summary(
            self.config, directory_of(self.work), self.corpus, self.examples, saves.mesh, goes_on,
            objective,
        )  # fmt: skip
        if saves.branch is not None:
            lines.append(saves.branch.line(self.config))
        if saves.teacher is not None:
            lines.append(teacher_line(saves.teacher))
        if saves.initial is not None:
            lines.append(starting_line(saves.initial, saves.saved.params))
        return lines, "; ".join([lines[0], *lines[-2:]])

    def columns(self, wave: int, step: int) -> dict[str, Any]:
        """Return the amounts read from each corpus."""
        return self.mixed.seen(self.examples, step)

    def scored(self, at: Moment, scores: Sequence[Scores | None]) -> list[str]:
        """Describe a held-out loss."""
        if time.monotonic() - self.drawn > _REDRAW_SECONDS:
            self.draw()
        objective = self.saves.step.objective
        text = readout(objective.metrics, at.scores, "eval", objective.baseline)
        found = [f"held-out text at step {at.step:,}: {text}"] if text else []
        return found + [
            f"probe {name.removeprefix(PROBE)} at step {at.step:,}: {value:.4g}"
            for name, value in at.scores.items()
            if name.startswith(PROBE)
        ]

    def closing(self, result: Result, clock: Clock, signal: str) -> tuple[str, Iterable[str]]:
        """Draw the losses, and describe how the run ended."""
        self.draw()
        metrics, num_steps = self.saves.step.objective.metrics, self.config.training.num_steps
        lines = closing_lines(result, metrics, num_steps, clock, signal)
        return lines[0], lines

    def draw(self) -> None:
        """Draw the loss curve, in process 0."""
        if jax.process_index() != 0:
            return
        self.drawn = time.monotonic()
        path, name = self.work.local / "loss.png", Path(self.work.name).name
        objective = self.saves.step.objective
        try:
            draw_loss_curve(
                self.work.local / "metrics.jsonl", objective.metrics, objective.baseline, path,
                title=name, phases=self.config.phases,
            )  # fmt: skip
        except (OSError, UserError) as error:
            _log.warning("%s cannot be drawn: %s", path, error)


def directory_of(work: WorkDir) -> Path | str:
    """Name a work directory for messages."""
    return work.local if work.mirror is None else work.name

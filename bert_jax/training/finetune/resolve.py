"""Everything that a fine-tuning run decides before its first step, as one immutable value."""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from jax.sharding import Mesh

from bert_jax.artefacts.saved.runs import NO_MODEL
from bert_jax.distributed.parallel.sharding import make_trial_mesh
from bert_jax.files.remote import WorkDir
from bert_jax.tasks.rows import choose_buckets
from bert_jax.tasks.task import Split
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.evaluate import Judged, named_scores, score_rows
from bert_jax.training.finetune.progress import (
    NoModelError,
    goal_score,
    score_range,
)
from bert_jax.training.finetune.report import REPORT_LINES, conclude
from bert_jax.training.finetune.saves import FinetuneSaves, remove_resume
from bert_jax.training.finetune.setup import Setup
from bert_jax.training.finetune.summary import summary_of_run, write_statistics
from bert_jax.training.progress import Moment
from bert_jax.training.run.goodput import Clock
from bert_jax.training.run.telemetry import duration
from bert_jax.training.run_plan import Policy, Result, RunPlan, Scores, Stage
from bert_jax.training.steps import trials
from bert_jax.training.steps.step import make_eval_step
from bert_jax.training.sweep.statistics import Outcome, summarise

_SAVE_SECONDS = 60.0
"""Largest loss of work in seconds: an evaluation saves the run when the last save is older."""


@dataclass(frozen=True, eq=False)
class WaveBatches:
    """Batches of all waves, one after the other."""

    setup: Setup
    mesh: Mesh

    def at(self, step: int) -> Mapping[str, Any]:
        """Return one batch."""
        return next(self.stream(step))

    def stream(self, first: int) -> Generator[Mapping[str, Any], None, None]:
        """Yield the batches from number `first` on."""
        num_steps, accumulation = self.setup.step.num_steps, self.setup.step.accumulation
        wave, step = divmod(first, num_steps)
        for number in range(wave, len(self.setup.waves)):
            for batch in islice(self.setup.rows_of(number, step), num_steps - step):
                yield trials.place_rows(batch, self.mesh, accumulation)
            step = 0

    def confirm(self) -> None:
        """Return at once: tables are read completely before the first step."""


class TaskScorer:
    """Scores of the dev splits and, at the end, of the test splits."""

    def __init__(self, config: FinetuneConfig, setup: Setup, mesh: Mesh, work: WorkDir):
        """Compile nothing yet."""
        self._setup, self._mesh, self._work = setup, mesh, work
        self._batch_size = config.training.eval_batch_size
        self._evaluated = setup.objective
        evaluation = dataclasses.replace(setup.step, objective=self._evaluated)
        self._step = make_eval_step(evaluation, mesh, seed=0)
        limit = setup.objective.model.num_positions
        self._buckets = {
            split.name: choose_buckets(split.rows.lengths, config.training.max_buckets, limit=limit)
            for split in (*setup.dev, *setup.test)
        }

    def after(self, step: int) -> bool:
        """Say whether an evaluation of the step's wave is due."""
        return self._setup.evaluates_after((step - 1) % self._setup.step.num_steps + 1)

    def score(self, params: Any, at: Moment, alive: Callable[[str], None]) -> list[Scores | None]:
        """Score the dev splits."""
        answers = [self._answers(params, split, alive) for split in self._setup.dev]
        found: list[Scores | None] = []
        for trial, each in enumerate(at.progress):
            values: dict[str, float] = {}
            mine = [judged[trial] for judged in answers]
            if not each.stopped:
                for number, (split, judged) in enumerate(zip(self._setup.dev, mine, strict=True)):
                    if judged.finite:
                        values |= named_scores(split, number, judged.outputs)
                    alive("scoring")
            scores = Scores(values, mine[0].loss, all(judged.finite for judged in mine))
            found.append(None if each.stopped else scores)
        return found

    def conclude(self, at: Moment, alive: Callable[[str], None]) -> list[dict[str, float]]:
        """Score the test splits with the best parameters, and write the report."""
        best = trials.filled(self._setup.step, self._mesh, at.state.params, at.best)
        return conclude(
            self._setup, at, self._work, lambda split: self._answers(best, split, alive)
        )

    def _answers(self, params: Any, split: Split, alive: Callable[[str], None]) -> list[Judged]:
        """Compute each trial's outputs for the rows of a split."""
        return score_rows(
            self._step, self._mesh, self._evaluated.own(params), split.rows,
            buckets=self._buckets[split.name],
            batch_size=min(self._batch_size, len(split.rows)),
            pad_id=self._setup.initial.tokenizer.special_ids.pad,
            done=lambda _: alive("a batch of an evaluation"),
        )  # fmt: skip


@dataclass(eq=False)
class FinetuneVoice:
    """Words and columns of a run, and its statistics."""

    config: FinetuneConfig
    setup: Setup
    mesh: Mesh
    work: WorkDir
    saves: FinetuneSaves

    @cached_property
    def goal(self) -> float:
        """Score that a trial must exceed."""
        task, dev, scale = self.setup.task, self.setup.dev[0], 100.0 if self.percent else 1.0
        labels = task.num_outputs if task.objective == "single_label" else 0
        return scale * goal_score(task.metric, dev.constant_score / scale, dev.num_scored, labels)

    @property
    def percent(self) -> bool:
        """Whether scores are percentages."""
        return self.setup.objective.kind == "span"

    def about(self, at: Moment, restored: bool) -> tuple[list[str], str]:
        """Describe the run."""
        total = len(self.setup.waves) * self.setup.step.num_steps
        lines = summary_of_run(
            self.config, self.setup, self.mesh, self.work.name, at.step, total,
            goal=self.goal, constant=self.setup.dev[0].constant_score,
        )  # fmt: skip
        return lines, lines[0]

    def columns(self, wave: int, step: int) -> dict[str, Any]:
        """Return the wave, and its epoch."""
        done = step - wave * self.setup.step.num_steps
        return {"epoch": done / self.setup.batches.num_batches, "wave": wave}

    def scored(self, at: Moment, scores: Sequence[Scores | None]) -> list[str]:
        """Describe the scores of the trials that go on."""
        step, metric = at.step - at.wave * self.setup.step.num_steps, self.setup.task.metric
        epoch = step / self.setup.batches.num_batches
        found = [each.values.get(metric) for each in scores if each is not None]
        return [f"epoch {epoch:.2f}  step {step:,}  {metric} {score_range(found)}"]

    def closing(self, result: Result, clock: Clock, signal: str) -> tuple[str, Iterable[str]]:
        """Write the statistics, and describe how the run ended."""
        del clock
        return duration(result.seconds), self._closing(result, signal)

    def _closing(self, result: Result, signal: str) -> Iterator[str]:
        setup, outcomes = self.setup, result.outcomes
        if not result.finished:
            yield f"stopped by {signal}, saved; the same command continues"
            return
        test, constant = [each.constant_score for each in setup.test], setup.dev[0].constant_score
        summary = summarise(outcomes, setup.task.metric, constant, self.goal, *test)
        yield from write_statistics(summary, self.work, percent=self.percent)
        self.saves.close()
        remove_resume(self.work)
        check_model(setup, outcomes)
        yield (
            f"{duration(result.seconds)}, {len(outcomes)} runs; the best of {setup.inits[0]} is "
            f"in {self.work.checkpoints}, a report in {self.work.name}/{REPORT_LINES}"
        )


def check_model(setup: Setup, outcomes: Sequence[Outcome]) -> None:
    """Refuse to finish a run that has no model.

    Raises:
        NoModelError: No trial of the initialisation had a finite score.
    """
    own = [outcome for outcome in outcomes if outcome.member.init == setup.inits[0]]
    if all(outcome.best is None for outcome in own):
        raise NoModelError(f"{setup.inits[0]}: {NO_MODEL}")


def resolve_finetuning(config: FinetuneConfig, setup: Setup, work: WorkDir) -> RunPlan:
    """Make the plan of a run whose data and models were read."""
    size, num_steps = len(setup.waves[0]), setup.step.num_steps
    mesh = make_trial_mesh(config.mesh, size)
    trials.check_memory(setup.step, mesh, size)
    saves = FinetuneSaves(config, setup, mesh, work)
    voice = FinetuneVoice(config, setup, mesh, work, saves)

    def stage(number: int) -> Stage:
        members = setup.waves[number]
        settings = trials.place_settings(
            [member.learning_rate for member in members],
            [member.seed for member in members],
            mesh,
            config.optimizer.head_learning_rate,
        )
        steps = range(number * num_steps, (number + 1) * num_steps)
        own = tuple(dict.fromkeys(members))
        return Stage(steps, setup.step, own, (settings,), number, steps.start, ends=True)

    return RunPlan(
        name=work.name,
        mesh=mesh,
        stages=tuple(stage(number) for number in range(len(setup.waves))),
        batches=WaveBatches(setup, mesh),
        scorers=(TaskScorer(config, setup, mesh, work),),
        saves=saves,
        voice=voice,
        policy=Policy(
            log_every=config.training.log_every_steps,
            metric=setup.task.metric,
            patience=config.training.patience,
            save_seconds=_SAVE_SECONDS,
            goal=voice.goal,
        ),
    )

"""The plan of a run: everything that the loop needs, decided before the first step.

A run is a sequence of stages. In pretraining, each phase is a stage, and continues with the state
of the previous phase. In fine-tuning, trials train in groups called waves. A wave is one or more
stages: the first starts with a fresh state, and the last ends with the outcomes of the trials.
Steps are counted over all stages, so that step numbers of checkpoints and metrics only grow.
"""

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax.sharding import Mesh

from bert_jax.distributed.checkpoint.manager import Report
from bert_jax.objectives.objective import Objective
from bert_jax.training.progress import Moment
from bert_jax.training.run.goodput import Clock
from bert_jax.training.run.session import Session
from bert_jax.training.steps.state import StepConfig
from bert_jax.training.sweep.statistics import Outcome, Trial


@dataclass(frozen=True, eq=False)
class Stage:
    """Part of a run: steps that use one compiled program."""

    steps: range
    """Indices of the stage's batches, counted over all stages of the run."""
    train: StepConfig
    trials: tuple[Trial, ...]
    """Trials that train in the stage, without padding trials. Pretraining has one trial."""
    settings: tuple[Any, ...] = ()
    """Further arguments of the step: learning rates and seeds of the trials, on the mesh."""
    wave: int = 0
    """Index of the wave (group of trials). Waves of a large sweep train one after another."""
    first: int = 0
    """Index of the first batch that the trials see."""
    ends: bool = False
    """Whether the trials end with this stage."""

    @property
    def begins(self) -> bool:
        """Whether the stage starts with a fresh state; otherwise it continues the state so far."""
        return self.steps.start == self.first


@dataclass(frozen=True, eq=False)
class Batches:
    """Source of batches, which are arrays on the mesh. A batch is a pure function of its index."""

    stream: Callable[[int], Generator[Mapping[str, Any], None, None]]
    """Function that yields the batches from a given index on."""
    confirm: Callable[[], None] = lambda: None
    """Function that waits for the checks of all text read so far; raises if text is damaged."""


class Scores(NamedTuple):
    """Scores of one trial in one evaluation."""

    values: Mapping[str, float]
    loss: float | None = None
    """Mean loss over the labels, if known."""
    finite: bool = True
    """Whether all outputs were finite."""


def together(found: Sequence[Scores | None]) -> Scores | None:
    """Merge the scores of one trial from several scorers; return None if the trial has stopped."""
    known = [each for each in found if each is not None]
    if not known:
        return None
    values = {name: value for each in known for name, value in each.values.items()}
    return Scores(values, known[0].loss, all(each.finite for each in known))


def score_columns(scores: Sequence[Scores | None]) -> dict[str, list[float | None]]:
    """Return a column for each score: the values of all trials, None for a missing value."""
    known = [each or Scores({}) for each in scores]
    columns: dict[str, list[float | None]] = {}
    if any(each.loss is not None for each in known):
        columns["loss"] = [each.loss for each in known]
    for name in dict.fromkeys(name for each in known for name in each.values):
        columns[name] = [each.values.get(name) for each in known]
    return columns


@runtime_checkable
class Scorer(Protocol):
    """Evaluation of all trials of a stage."""

    def after(self, step: int) -> bool:
        """Return true if trials are scored after step `step`, counted over all stages."""

    def score(
        self, params: Any, at: Moment, alive: Callable[[str], None]
    ) -> Sequence[Scores | None]:
        """Return the scores of each trial, or None for a trial that has stopped.

        `alive` must be called after each piece of work, with a description of the work.
        """

    def conclude(self, at: Moment, alive: Callable[[str], None]) -> Sequence[Mapping[str, float]]:
        """Score the best parameters of each trial on test data, and write the reports."""
        return [{} for _ in at.progress]


@runtime_checkable
class Saves(Protocol):
    """Saved states and models of a run. All processes must call each method."""

    config: Any
    """Configuration of the run in full, which `config.json` stores."""

    def described(self) -> list[str]:
        """Return lines that say which files the run writes."""

    def prepare(self, report: Report) -> None:
        """Write the run's first files to its work directory, and open its checkpoints."""

    def begin(self, number: int, stage: Stage) -> Moment:
        """Make a fresh state for stage `number`."""

    def restore(self) -> Moment | None:
        """Restore the newest save; return None if there is none."""

    def save(self, at: Moment, *, last: bool, finished: bool) -> None:
        """Save the state for a restart; if `last`, no step follows in this process."""

    def choose(self, at: Moment) -> None:
        """Save the best trial's model after a stage. The default, for pretraining, does nothing."""
        return

    def newest(self) -> str:
        """Return the path of the newest save; empty if there is none."""

    def close(self) -> None:
        """Wait for saves in progress, without raising errors."""


@runtime_checkable
class Voice(Protocol):
    """Reporter of a run: the lines that it prints, and further columns of its metrics."""

    def about(self, step: int, restored: bool) -> tuple[list[str], str]:
        """Return lines that describe the run, and the message of the event `start`.

        `step` is the number of steps done; `restored` is true if a save of this run was restored.
        """

    def columns(self, wave: int, step: int) -> dict[str, Any]:
        """Return columns other than metrics, rates and scores, such as `epoch`.

        `step` is the newest step whose metrics were read; a later step may have been dispatched.
        """

    def scored(self, at: Moment, scores: Sequence[Scores | None]) -> Sequence[str]:
        """Return lines that describe an evaluation; its columns are in `at.scores`."""

    def closing(self, result: "Result", clock: Clock, signal: str) -> tuple[str, Iterable[str]]:
        """Return the last event's message and the last lines; `signal` is "" for a finished run."""


@dataclass(frozen=True)
class Policy:
    """Schedule of logging, saving and early stopping. Steps are counted over all stages."""

    log_every: int
    scores_start: bool = False
    """Whether a new run is evaluated before its first step."""
    metric: str = ""
    """Name of the first scorer's score that selects each trial's best parameters and ends a trial
    early (`patience`). If empty, no score does so. For a loss, lower is better."""
    patience: int = 0
    save_every: int = 0
    """Number of steps between saves; 0 means after evaluations, at least `save_seconds` apart."""
    save_seconds: float = 60.0
    saves_end: bool = False
    """Whether the state after the last step is saved."""
    stops_diverged: bool = False
    goal: float = -math.inf
    """Score that a trial must exceed; otherwise the trial has failed."""


@dataclass(frozen=True, eq=False)
class RunPlan:
    """Plan of a run, which is made before the first step."""

    name: Path | str
    """Work directory, as the caller named it."""
    mesh: Mesh
    stages: tuple[Stage, ...]
    batches: Batches
    scorers: tuple[Scorer, ...]
    saves: Saves
    voice: Voice
    policy: Policy
    begins: int = 0
    """Number of steps done before this start of a pretraining run, or before the run's branch."""

    @property
    def num_steps(self) -> int:
        """Number of steps in all stages."""
        return self.stages[-1].steps.stop

    @property
    def objective(self) -> Objective:
        """Objective of the first stage; the other stages' objectives have the same metrics."""
        return self.stages[0].train.objective

    @property
    def num_trials(self) -> int:
        """Number of trials in a sweep; 0 in pretraining."""
        return sum(len(stage.trials) for stage in self.stages if stage.ends)


@dataclass(frozen=True)
class Result:
    """Result of one start of a run."""

    workdir: Path | str
    """Work directory, as the caller named it."""
    step: int
    """Number of steps done."""
    finished: bool
    """Whether the run is complete. If not, a signal stopped it; the same command continues it."""
    baseline: float | None = None
    """Value of the first metric for a model that ignores its input, if known."""
    train_metrics: dict[str, Any] = field(default_factory=dict)
    """Last row of training metrics; empty if none was written."""
    eval_metrics: dict[str, Any] = field(default_factory=dict)
    """Scores of the last evaluation of this start; empty if there was none."""
    seconds: float = 0.0
    """Wall time of this start, in seconds."""
    outcomes: tuple[Outcome, ...] = ()
    """Outcomes of the trials that have ended."""
    stopped_by: str = ""
    """Name of the signal that stopped the run, or that arrived after its last step; else ""."""
    unlearned: str = ""
    """Message, with advice, if the run is complete and no trial learned anything; otherwise ""."""


Trace = Callable[[int | None, Session, Callable[[], None]], None]
"""Function to call after each step: (step, session, wait for step); at the end, step is None."""
Profiler = Callable[[RunPlan], Trace]
"""Function that returns a run's `Trace`; raises a UserError if the run lacks steps to trace."""

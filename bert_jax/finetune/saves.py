"""Saves of a fine-tuning run: the best model, and the state that a restart needs."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.checkpoint import Checkpoints, Restored, Retention, SaveFailedError
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.finetune.config import FinetuneConfig
from bert_jax.finetune.progress import Losses, Progress
from bert_jax.finetune.setup import Setup
from bert_jax.finetune.trials import SweepState, abstract_trials, earlier, from_earlier
from bert_jax.finetune.workdir import remove_resume, saved_content
from bert_jax.saved.runs import FinetunedState
from bert_jax.sweep.statistics import Outcome, Trial
from bert_jax.training.state import TrainState


@dataclass
class Wave:
    """Members that train together, after `step` updates."""

    number: int
    state: TrainState
    best: Any
    """Parameters at each trial's best evaluation so far."""
    step: int
    progress: list[Progress]
    losses: Losses
    seconds: float = 0.0
    """Seconds of the starts before this one."""
    began: float = dataclasses.field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        """Seconds so far, of all starts."""
        return self.seconds + time.monotonic() - self.began


class Saves:
    """`checkpoints/` and `resume/` of a run. All methods are collective."""

    def __init__(
        self,
        config: FinetuneConfig,
        setup: Setup,
        mesh: Mesh,
        place: WorkDir,
        report: Callable[[str, int, str], None],
    ):
        """Open the directories.

        Args:
            config: Configuration of the run.
            setup: Setup of the run.
            mesh: Mesh of the sweep.
            place: The work directory.
            report: Callback for events, as of `Checkpoints`.
        """
        self._config, self._setup, self._mesh, self._place = config, setup, mesh, place
        self._models = Checkpoints(place.checkpoints, Retention(keep=1), report=report)
        self._states = Checkpoints(place.resume, Retention(keep=1), report=report)
        self._best: tuple[float, int] | None = None
        """Score of the saved model, and its number."""
        self._copied = NamedSharding(mesh, PartitionSpec())
        self._member = jax.jit(
            lambda tree, number: jax.tree.map(lambda leaf: leaf[number], tree),
            out_shardings=self._copied,
        )

    def total(self, wave: Wave) -> int:
        """Count the updates of all waves: numbers of checkpoints and rows of metrics only grow."""
        return wave.number * self._setup.step.num_steps + wave.step

    def restore(self) -> tuple[Wave, list[Outcome]] | None:
        """Where the run was, and the outcomes of the waves before; None: it begins."""
        abstract = abstract_trials(self._setup.step, self._mesh, len(self._setup.waves[0]))
        one = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=self._copied),
            abstract.params,
        )
        model = self._models.restore(FinetunedState(one))
        if model is not None:
            self._best = (model.record.extra["scores"][self._setup.task.metric], model.step)
        restored = self._restored(abstract)
        if restored is None:
            return None
        state: SweepState = restored.state
        extra = restored.record.extra
        progress = [
            Progress(**{**each, "member": Trial(**each["member"])}) for each in extra["progress"]
        ]
        wave = Wave(
            extra["wave"], state.train, state.best, extra["step"], progress, Losses(progress),
            extra["seconds"],
        )  # fmt: skip
        wave.losses.restore(extra["losses"])
        return wave, [Outcome.from_json(each) for each in extra["outcomes"]]

    def _restored(self, abstract: SweepState) -> Restored | None:
        """Restore all trials; those that version 0.1.0 saved become what they are now."""
        try:
            return self._states.restore(abstract)
        except UserError:
            try:
                restored = self._states.restore(earlier(abstract))
            except UserError:
                restored = None
            if restored is None:
                raise
        return dataclasses.replace(restored, state=from_earlier(restored.state, self._mesh))

    def save(self, wave: Wave, outcomes: Sequence[Outcome], *, last: bool) -> None:
        """Everything that a restart needs, and the best model so far.

        Args:
            wave: To be saved.
            outcomes: Outcomes of the waves before.
            last: The process ends behind it: the save is waited for and must work.

        Raises:
            SaveFailedError: Several saves in a row have failed, or, with `last`, this one.
        """
        content: dict[str, Any] = {
            "config": {},
            "extra": {
                "wave": wave.number,
                "step": wave.step,
                "progress": [dataclasses.asdict(each) for each in wave.progress],
                "losses": wave.losses.state(),
                "seconds": wave.elapsed(),
                "outcomes": [dataclasses.asdict(each) for each in outcomes],
            },
        }
        state = SweepState(*wave.state, wave.best)
        if last:
            self._states.save_last(self.total(wave), state, read_back=False, **content)
        else:
            self._states.save(self.total(wave), state, **content)
        self.save_best(wave, must=False)

    def save_best(self, wave: Wave, *, must: bool) -> None:
        """Save the best member of the first initialisation, if better than the saved model.

        Of equal ones the first in time, then in number: what is saved does not depend on when.

        Args:
            wave: With the members.
            must: Raise where it cannot be saved: what is best in this wave is forgotten behind it.

        Raises:
            SaveFailedError: `must`, and it has failed several times.
        """
        mine = [
            (each.best, -each.best_step, -number)
            for number, each in enumerate(wave.progress)
            if each.member.init == self._setup.inits[0] and each.best is not None
        ]
        if not mine:
            return
        best, _, negative = max(mine)
        total = self.total(wave)
        if self._best is not None:
            if best <= self._best[0]:
                return
            total = max(total, self._best[1] + 1)  # a start that was killed may have come further
        each = wave.progress[-negative]
        try:
            self._models.save_last(
                total, FinetunedState(self._member(wave.best, -negative)),
                read_back=True,
                **saved_content(
                    self._config, self._setup.objective, self._setup.task,
                    each.outcome().best_scores, each.member,
                ),
            )  # fmt: skip
        except SaveFailedError:
            if must:
                raise
            return
        self._best = (best, total)

    def finish(self) -> None:
        """Delete what a finished run no longer needs."""
        self._states.close()
        remove_resume(self._place)

    def close(self) -> None:
        """Close both (see `Checkpoints.close`)."""
        self._models.close()
        self._states.close()

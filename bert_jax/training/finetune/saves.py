"""The work directory of a fine-tuning run: its first files, best model, and saved trials.

config.json  tokenizer/  checkpoints/ (the best model)  resume/ (all trials, until they end)
metrics.jsonl  events.jsonl  statistics.json  statistics.txt  statistics.png
train_texts.u64 (`example_keys` of the training data)  report.json  report.md  confusion.png
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.artefacts.saved.ancestors import file_entries
from bert_jax.artefacts.saved.lineage import ancestor_entry
from bert_jax.artefacts.saved.runs import TRAIN_TEXTS, FinetunedState
from bert_jax.config.mapping import to_dict
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.distributed.checkpoint.manager import Checkpoints, Report, SaveFailedError
from bert_jax.distributed.checkpoint.retention import Retention
from bert_jax.distributed.checkpoint.storage import newest_step
from bert_jax.files.remote import WorkDir
from bert_jax.files.staging import replace_file
from bert_jax.objectives.objective import num_params, with_trained
from bert_jax.tasks.overlap import example_keys
from bert_jax.tasks.task import Split, Task
from bert_jax.training.finetune.config import FREE_FIELDS, FinetuneConfig
from bert_jax.training.finetune.setup import Setup
from bert_jax.training.finetune.start import Trainable
from bert_jax.training.progress import Means, Moment, Progress, best_trial
from bert_jax.training.run_plan import Stage
from bert_jax.training.start import RANDOM
from bert_jax.training.steps.trials import (
    SweepState,
    abstract_trials,
    from_saved,
    init_trials,
    to_save,
)
from bert_jax.training.sweep.statistics import Outcome, Trial
from bert_jax.training.workdir import FILES, begin_workdir, look_into, refuse_other_run


def check_finetune_workdir(
    work: WorkDir, config: FinetuneConfig, fingerprints: dict[str, str]
) -> None:
    """Check that a work directory does not belong to another run; change nothing.

    Raise a UserError if the runs differ. The message lists the fields with both values.
    """
    there = look_into(work, "finetune")
    if there.record is None:
        return
    known = there.record.get("fingerprints", {})
    found = {f"what {n} names": (known.get(n), fingerprints.get(n)) for n in known | fingerprints}
    refuse_other_run(work, there.config(FinetuneConfig), config, FREE_FIELDS, found)


def prepare_finetune_workdir(
    workdir: Path,
    config: FinetuneConfig,
    fingerprints: dict[str, str],
    tokenizer_files: Path,
    init_step: int = 0,
    splits: Sequence[Split] = (),
) -> None:
    """Begin a fine-tuning run in its work directory.

    `init_step` is the step of the initial checkpoint. The first split is the training data.
    """

    def ancestors() -> list[dict[str, Any]]:
        found = [ancestor_entry("init", config.init, init_step)]
        if config.sweep.baseline not in ("", RANDOM):
            found.append(ancestor_entry("sweep.baseline", config.sweep.baseline))
        if config.distil.teacher:
            found.append(ancestor_entry("distil.teacher", config.distil.teacher))
        return found + file_entries(config.task.sources)

    begin_workdir(
        workdir, config, tokenizer_files, ancestors, kind="finetune", fingerprints=fingerprints,
        splits={each.name: describe_split(each) for each in splits},
    )  # fmt: skip
    if splits:
        keys = np.sort(example_keys(splits[0].texts()))
        by_first(lambda: replace_file(workdir / TRAIN_TEXTS, keys.tobytes()))


def describe_split(split: Split) -> dict[str, Any]:
    """Return the size and the fingerprint of a split; later evaluations check both for changes."""
    return {"examples": len(split.texts()), "fingerprint": split.fingerprint}


def remove_resume(work: WorkDir) -> None:
    """Delete the saved trials, which a finished run no longer needs."""
    if jax.process_index() == 0 and work.resume.exists():
        work.resume.rmtree()


class FinetuneSaves:
    """Saves of a fine-tuning run: the best model (`checkpoints/`) and all trials (`resume/`)."""

    def __init__(self, config: FinetuneConfig, setup: Setup, mesh: Mesh, work: WorkDir):
        self.config, self._setup, self._mesh, self._work = config, setup, mesh, work
        self._best: tuple[float, int] | None = None
        """Score of the saved model, and step of its checkpoint."""
        self._copied = NamedSharding(mesh, PartitionSpec())
        self._member = jax.jit(self._best_of, out_shardings=self._copied)

    def described(self) -> list[str]:
        """Return lines that list the files of a run, with the model's size."""
        return [
            FILES,
            f"checkpoints/  best model, {4 * num_params(self._setup.objective) / 1e6:,.1f} MB",
            "resume/       all trials and their best models, until the end",
            "statistics.json, .txt and .png, report.json and .md",
        ]

    def prepare(self, report: Report) -> None:
        """Write the run's first files, and open `checkpoints/` and `resume/`."""
        setup = self._setup
        prepare_finetune_workdir(
            self._work.local, self.config, setup.fingerprints, setup.initial.tokenizer_files,
            setup.initial.origin.step, setup.splits,
        )  # fmt: skip
        self._models = Checkpoints(self._work.checkpoints, Retention(keep=1), report=report)
        self._states = Checkpoints(self._work.resume, Retention(keep=1), report=report)

    def _best_of(self, params: Any, best: Any, number: Any) -> Any:
        params, best = jax.tree.map(lambda leaf: leaf[number], (params, best))
        return self._setup.objective.own(with_trained(self._setup.step.objective, params, best))

    def _first_state(self, wave: int) -> SweepState:
        members = self._setup.schedule.waves[wave]
        which = np.array([self._setup.inits.index(member.init) for member in members])
        seeds = np.array([member.seed for member in members], np.uint32)
        return init_trials(self._setup.step, self._mesh, seeds, self._setup.start.parts, which)

    def begin(self, number: int, stage: Stage) -> Moment:
        """Make the state of a stage's trials before their first step."""
        state, progress = self._first_state(stage.wave), [Progress(each) for each in stage.trials]
        return Moment(
            number, stage.first, state.train, progress, Means(len(progress)), stage.wave, state.best
        )

    def restore(self) -> Moment | None:
        """Restore the interrupted stage; return None if nothing was saved."""
        abstract = abstract_trials(self._setup.step, self._mesh, len(self._setup.schedule.waves[0]))
        one = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=self._copied),
            abstract.params,
        )
        model = self._models.restore(FinetunedState(self._setup.objective.own(one)))
        if model is not None:
            self._best = (model.record.extra["scores"][self._setup.task.metric], model.step)
        restored = self._states.restore(abstract._replace(params=abstract.best))
        if restored is None:
            return None
        extra = restored.record.extra
        for each in (*extra["progress"], *extra["outcomes"]):
            if each["member"]["init"] != self.config.sweep.baseline:
                each["member"]["init"] = self._setup.inits[0]  # `init` may have another path now
        number = extra["wave"]
        state = from_saved(
            self._setup.step, self._mesh, restored.state, lambda: self._first_state(number)
        )
        progress = [
            Progress(**{**each, "member": Trial(**each["member"])}) for each in extra["progress"]
        ]
        now = Moment(
            extra["stage"], number * self._setup.schedule.num_steps + extra["step"],
            state.train, progress, Means(len(progress)), number, state.best,
            outcomes=[Outcome.from_json(each) for each in extra["outcomes"]],
            seconds=extra["seconds"],
        )  # fmt: skip
        now.means.restore(extra["losses"])
        return now

    def save(self, at: Moment, *, last: bool, finished: bool) -> None:
        """Save the state that a restart needs, and the best model so far.

        Raise a SaveFailedError if several saves in a row, or the `last` save, have failed.
        """
        del finished
        extra = {
            "stage": at.stage, "wave": at.wave,
            "step": at.step - at.wave * self._setup.schedule.num_steps,
            "progress": [dataclasses.asdict(each) for each in at.progress],
            "losses": at.means.state(), "seconds": at.elapsed(),
            "outcomes": [dataclasses.asdict(each) for each in at.outcomes],
        }  # fmt: skip
        state = to_save(self._setup.step, self._mesh, SweepState(*at.state, at.best))
        save = partial(self._states.save_last, read_back=False) if last else self._states.save
        save(at.step, state, config={}, extra=extra)
        self.choose(at, must=False)

    def newest(self) -> str:
        """Return the newest save's path; empty if there is none or saves cannot be listed."""
        step = newest_step(self._work.resume)
        return "" if step is None else f"{self._work.resume / str(step)}"

    def choose(self, at: Moment, *, must: bool = True) -> None:
        """Save the model of the first initialisation's best trial if it beats the saved model.

        Raise a SaveFailedError if saving has failed several times, and `must` is true.
        """
        found = best_trial(at.progress, self._setup.inits[0])
        if found is None:
            return
        (best, number), total = found, at.step
        if self._best is not None:
            if best <= self._best[0]:
                return
            total = max(total, self._best[1] + 1)  # a killed start may have saved a later step
        content = saved_content(
            self.config, self._setup.objective, self._setup.task, at.progress[number].outcome()
        )
        model = FinetunedState(self._member(at.state.params, at.best, number))
        try:
            self._models.save_last(total, model, read_back=True, **content)
        except SaveFailedError:
            if must:
                raise
            return
        self._best = (best, total)

    def close(self) -> None:
        """Close both directories (see `Checkpoints.close`)."""
        self._models.close()
        self._states.close()


def saved_content(
    config: FinetuneConfig, objective: Trainable, task: Task, best: Outcome
) -> dict[str, Any]:
    """Return the content of the best model's checkpoint, apart from its arrays."""
    scores = best.best_scores
    return {
        "config": to_dict(config),
        "extra": {
            "model": to_dict(objective.model),
            "head": to_dict(objective.config),
            **({"lora": to_dict(objective.lora)} if objective.lora.rank else {}),
            "task": task.describe(), "scores": scores, "member": dataclasses.asdict(best.member),
        },
        "metrics": {f"eval/{name}": value for name, value in scores.items()},
    }  # fmt: skip

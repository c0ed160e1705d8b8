"""The work directory of a pretraining run: its checks, its first files, and its checkpoints."""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.artefacts.saved.ancestors import corpus_entry
from bert_jax.artefacts.saved.lineage import ancestor_entry
from bert_jax.artefacts.saved.runs import read_record
from bert_jax.config.mapping import build, to_dict
from bert_jax.data.mixture import Mixture
from bert_jax.data.store import TokenStore
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.distributed.checkpoint.manager import Checkpoints, Report
from bert_jax.distributed.checkpoint.storage import newest_step, saved_steps
from bert_jax.distributed.parallel.sharding import num_batch_shards
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.pretrain.branch import Branch
from bert_jax.training.pretrain.config import FREE_FIELDS, PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, recorded_corpus
from bert_jax.training.pretrain.settings import check_stages, loss_monitor
from bert_jax.training.progress import Means, Moment, Progress
from bert_jax.training.run_plan import Saves, Stage
from bert_jax.training.start import Start, without_teacher
from bert_jax.training.steps.state import StepConfig, TrainState, abstract_state, jitted_init
from bert_jax.training.sweep.statistics import Trial
from bert_jax.training.workdir import FILES, There, begin_workdir, refuse_other_run


def read_config(workdir: Path) -> PretrainConfig:
    """Return the configuration of the pretraining run in a work directory.

    Raise a UserError if there is no such run, or its configuration cannot be read.
    """
    record = read_record(workdir, "pretrain")
    return build(PretrainConfig, record["config"], where=str(workdir / "config.json"))


def check_workdir(
    work: WorkDir,
    there: There,
    config: PretrainConfig,
    store: TokenStore,
    stores: Mapping[int, TokenStore | Mixture],
    teacher: str = "",
) -> None:
    """Check that a work directory contains no other run or tokenizer, without changing anything.

    `store` is the run's corpus. `stores` maps the indices of the phases that read other text to
    their texts. `teacher` is the digest of the teacher. Raise a UserError if the directory has a
    run with other settings or data, which the message lists, or another tokenizer.
    """
    record = there.record
    if record is None:
        by_first(lambda: _check_tokenizer(work.local, store))
        return
    if "average" in record:
        raise UserError(
            f"{work.name} contains an average of checkpoints, which cannot be continued. To "
            f"train it further, choose another work directory and --config.init={work.name}"
        )
    corpora = {"the training corpus": (record.get("corpus"), store.fingerprint)}
    if teacher:
        corpora["the teacher"] = record.get("teacher"), teacher
    # Corpora may move, and a batch may be computed in more or fewer micro-batches.
    free = [*FREE_FIELDS, *(f"data.mixture[{n}].corpus" for n in range(len(config.data.mixture)))]
    for number, phase in enumerate(config.training.phases):
        name = f"training.phases[{number}]"
        free += [f"{name}.corpus", f"{name}.accumulation"]
        free += [f"{name}.mixture[{n}].corpus" for n in range(len(phase.mixture))]
        text = recorded_corpus(record, number), stores.get(number, store).fingerprint
        if text != corpora["the training corpus"]:
            corpora[f"{name}.corpus"] = text
    refuse_other_run(work, there.config(PretrainConfig), config, free, corpora)


def _check_tokenizer(workdir: Path, store: TokenStore) -> None:
    """Check that the store has a tokenizer, and that the work directory has no other tokenizer."""
    if store.path is None:
        return
    if not (store.path / "tokenizer").is_dir():
        raise UserError(
            f"the token store {store.path} is damaged: its tokenizer is missing. Build the corpus "
            "again"
        )
    if not (workdir / "tokenizer").exists():
        return
    there = load_tokenizer(workdir / "tokenizer").fingerprint
    if there != store.tokenizer_fingerprint:
        raise UserError(
            f"{workdir / 'tokenizer'} already contains the tokenizer {there[:12]}, but the run "
            f"would copy the tokenizer of the corpus, {store.tokenizer_fingerprint[:12]}, to this "
            "directory. Choose another work directory"
        )


def prepare_workdir(
    workdir: Path,
    config: PretrainConfig,
    store: TokenStore,
    start: Start,
    stores: Mapping[int, TokenStore | Mixture] | None = None,
    branch: Mapping[str, Any] | None = None,
    *,
    has_saved: bool = False,
) -> None:
    """Begin a pretraining run in its work directory, or update its config.json at a restart.

    `stores` is as in `check_workdir`. `branch` is `Branch.record`, if the run is a branch. If the
    run `has_saved`, the ancestors that config.json lists are not changed.
    """
    files = None if store.path is None else store.path / "tokenizer"
    record: dict[str, Any] = {"corpus": store.fingerprint, "tokenizer": store.tokenizer_fingerprint}
    if stores:
        record["phase_corpora"] = {str(n): each.fingerprint for n, each in stores.items()}
    if branch:
        record["branch"] = branch
    if start.teacher:
        record["teacher"] = start.teacher_digest

    def ancestors() -> list[dict[str, Any]]:
        texts = {"data.corpus": (config.data.corpus, store)}
        for number, text in (stores or {}).items():
            phase, where = config.training.phases[number], f"training.phases[{number}]"
            if isinstance(text, Mixture):
                where = f"{where}.mixture" if phase.mixture else "data.mixture"
                parts = enumerate(zip(text.names, text.stores, strict=True))
                texts |= {f"{where}[{n}].corpus": part for n, part in parts}
            else:
                texts[f"{where}.corpus"] = phase.corpus, text
        found = [corpus_entry(role, *text) for role, text in texts.items() if text[0]]
        if branch:
            found.append(ancestor_entry("branch", branch["workdir"], branch["step"]))
        elif config.init:
            step = start.initial.origin.step if start.initial else 0
            found.append(ancestor_entry("init", config.init, step))
        if config.distil.teacher:
            found.append(ancestor_entry("distil.teacher", config.distil.teacher))
        return found

    begin_workdir(workdir, config, files, None if has_saved else ancestors, **record)


@dataclass(eq=False)
class PretrainSaves(Saves):
    """Checkpoints of a pretraining run, in `checkpoints/`. Each contains the model."""

    config: PretrainConfig
    work: WorkDir
    corpus: Corpus
    texts: Mapping[int, TokenStore | Mixture]
    mesh: Mesh
    step: StepConfig
    start: Start
    branch: Branch | None
    trial: Trial
    checkpoints: Checkpoints = field(init=False)

    def __post_init__(self) -> None:
        self.axes = self.step.objective.axes()
        self.abstract = abstract_state(self.step, self.mesh)
        self.saved = without_teacher(self.abstract)
        config = self.config
        how = config.masking.eval_rate, config.training.eval_rows, config.training.eval_translations
        self.judged_by = [config.retention.best_metric, *how]

    def described(self) -> list[str]:
        """Return lines that list the files of a run, with size and number of the checkpoints."""
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.saved))
        return [
            FILES,
            f"checkpoints/  {size / 1e6:,.1f} MB every {self.config.checkpoint.save_every_steps:,} "
            f"steps and at the end; the newest {self.config.retention.keep} stay",
            "loss.png      loss curve",
        ]

    def prepare(self, report: Report) -> None:
        """Begin or continue the run in its work directory, and open its checkpoints."""
        with contextlib.ExitStack() as keeping:
            if self.branch is not None:
                keeping.enter_context(self.branch.keeping(self.work.name))
            prepare_workdir(
                self.work.local, self.config, self.corpus.train, self.start, self.texts,
                self.branch.record if self.branch else None,
                has_saved=bool(saved_steps(self.work.checkpoints)),
            )  # fmt: skip
        self.checkpoints = Checkpoints(
            self.work.checkpoints, self.config.retention, report=report,
            max_failed_saves=self.config.checkpoint.max_failed_saves,
        )  # fmt: skip

    def begin(self, number: int, stage: Stage) -> Moment:
        """Initialise the state before the first step."""
        state = jitted_init(self.step, self.mesh)(jax.random.key(self.config.seed))
        state = state._replace(params=self.start.first_params(state.params, self.axes))
        return self._moment(number, stage.first, state)

    def _moment(self, stage: int, step: int, state: TrainState) -> Moment:
        monitor = loss_monitor(self.config, self.step.objective, self.corpus.train)
        state = self.start.with_teacher(state, self.abstract, self.axes)
        return Moment(stage, step, state, [Progress(self.trial)], Means(1), monitor=monitor)

    def restore(self) -> Moment | None:
        """Restore the newest save. For a new branch, restore the checkpoint that it continues."""
        restored = own = self.checkpoints.restore(self.saved)
        if own is None and self.branch is not None:
            restored = self.branch.restore(self.saved)
        if restored is None:
            return None
        step, extra = restored.step, restored.record.extra
        check_stages(self.config, num_batch_shards(self.mesh), step)
        now = self._moment(self.config.training.phase_of(max(step - 1, 0)), step, restored.state)
        now.means.restore(extra["means"])
        # Count evaluations anew in a branch without a save, and after a change of metric or sample.
        if own is not None and extra.get("judged_by") in (None, self.judged_by):
            for each in now.progress:
                vars(each).update(extra.get("progress", {}), member=each.member)
                each.stopped = each.has_waited(self.config.training.patience)
        assert now.monitor is not None
        now.monitor.restore(extra["plateau"], step)
        return now

    def save(self, at: Moment, *, last: bool, finished: bool) -> None:
        """Save the state. The last save of a finished run is read back and checked."""
        assert at.monitor is not None
        # After an early stop, `at.stage` is the last stage, in which no step was done.
        phase = self.config.training.phase_of(max(at.step - 1, 0))
        extra = {
            "means": at.means.state(), "plateau": at.monitor.state(),
            "lowest_at": at.monitor.lowest_at, "judged_by": self.judged_by,
            "judged_on": [self.config.training.phases[phase].length, *self.judged_by[1:]],
        }  # fmt: skip
        if self.config.training.patience:
            extra["progress"] = dataclasses.asdict(at.progress[0])
        checkpoints = self.checkpoints
        save = partial(checkpoints.save_last, read_back=finished) if last else checkpoints.save
        save(
            at.step, without_teacher(at.state), extra=extra,
            config=to_dict(self.config.with_thetas_of(phase)),
            metrics=at.scores if at.scored_at == at.step else {},
        )  # fmt: skip

    def newest(self) -> str:
        """Return the newest save's path; empty if there is none or saves cannot be listed."""
        self.checkpoints.join()  # a save in progress counts, too
        step = newest_step(self.work.checkpoints)
        return "" if step is None else f"{self.work.name}/checkpoints/{step}"

    def close(self) -> None:
        """Wait for saves in progress."""
        self.checkpoints.close()

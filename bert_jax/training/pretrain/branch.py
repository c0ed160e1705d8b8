"""Branches: runs that continue a checkpoint of another run (`bert-jax pretrain --branch-from`).

A branch takes over all state of the other run: parameters, optimizer moments, the index of the next
batch and, through the seed, random numbers. The runs share all steps before the branch, so their
configurations must agree in the fields that determine these steps. Later steps may differ.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from bert_jax.artefacts.saved.runs import named_steps, read_record, split_name
from bert_jax.config.mapping import build, diff
from bert_jax.data.mixture import Mixture
from bert_jax.data.store import TokenStore
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.distributed.checkpoint.reading import Restored, check_same, restore_step
from bert_jax.distributed.checkpoint.record import named_leaves
from bert_jax.distributed.checkpoint.record import read_record as read_checkpoint_record
from bert_jax.distributed.checkpoint.retention import forget_branch, keep_for_branch
from bert_jax.distributed.checkpoint.verify import find_fault, verified_steps
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir, open_workdir
from bert_jax.training.pretrain.config import FREE_FIELDS, PretrainConfig
from bert_jax.training.pretrain.corpus import recorded_corpus
from bert_jax.training.steps.optim import learning_rate_schedule
from bert_jax.training.workdir import There, show

_BY_PHASE = (
    "masking.rate", "model.rope_theta", "model.local_rope_theta", "training", "data.mixture",
    "data.mixture_temperature", "distil.architecture.num_positions",
)  # fmt: skip
"""Fields that must agree only for phases that begin before the branch."""


@dataclass(frozen=True)
class Branch:
    """Checkpoint of another run, from which this run continues."""

    record: Mapping[str, Any]
    """Entry `branch` of this run's config.json: `workdir`, `step` and `digest` of the checkpoint.
    If the other run is a branch too, the entry also contains the `branch` entry of that run."""
    source: WorkDir | None
    """Work directory of the other run; None once this run has saved checkpoints itself."""
    began: Mapping[str, Any]
    """Content of the other run's config.json; empty if `source` is None."""

    @property
    def step(self) -> int:
        """Number of steps before the branch."""
        return int(self.record["step"])

    @cached_property
    def config(self) -> PretrainConfig | None:
        """Configuration of the other run; None once this run has saved."""
        if self.source is None:
            return None
        return build(PretrainConfig, self.began["config"], where=f"{self.source.name}/config.json")

    def check(
        self, config: PretrainConfig, store: TokenStore,
        stores: Mapping[int, TokenStore | Mixture], teacher: str, abstract: Any,
    ) -> None:  # fmt: skip
        """Check that a run can continue the checkpoint, without changing anything.

        `store` is the run's corpus. `stores` maps the indices of the phases that read other text to
        their texts. `teacher` is the digest of the teacher, and `abstract` the state as abstract
        arrays. Raise a UserError if the runs differ, or no steps follow the branch.
        """
        source, began = self.source, self.config
        if source is None or began is None:
            return
        if config.training.num_steps <= self.step:
            raise UserError(
                f"training.num_steps is {config.training.num_steps}; it must exceed {self.step} "
                f"for a branch from step {self.step} of {source.name}, because it counts the "
                "steps before the branch too"
            )
        both = ("tokenizer", store.tokenizer_fingerprint), ("teacher", teacher)
        rows = [
            f"the {name}: fingerprint {there or 'none'} there, {given or 'none'} given"
            for name, given in both
            if (there := self.began.get(name, "")) != given
        ] + [
            f"{name}: {show(old)} there, {show(new)} given"
            for name, old, new in diff(began, config, (*FREE_FIELDS, *_BY_PHASE))
            # The optimizer's settings may change, but not its kind.
            if name == "optimizer.name" or not name.startswith("optimizer.")
        ]
        corpora = {number: each.fingerprint for number, each in stores.items()}
        rows += _phase_rows(
            list(_before(began, self.step, lambda n: recorded_corpus(self.began, n))),
            list(_before(config, self.step, lambda n: corpora.get(n, store.fingerprint))),
            self.step / config.training.num_steps,
        )
        if rows:
            raise UserError(
                f"a branch from step {self.step} of {source.name} must have the settings and the "
                f"data of that run up to this step, but these differ: {'; '.join(rows)}. A branch "
                f"may change training.num_steps, phases that begin at step {self.step} or later, "
                "settings of the optimizer, and whatever a restart may change"
            )
        path = source.checkpoints / str(self.step)
        wanted = named_leaves(abstract)
        by_first(lambda: check_same(path, read_checkpoint_record(path).arrays, wanted))

    @contextlib.contextmanager
    def keeping(self, branch: str) -> Iterator[None]:
        """Mark the checkpoint as kept forever, for the run in the work directory `branch`.

        The `with` block begins the run. If the block fails, the mark is removed, unless it existed
        before. Raise a UserError if the other run's work directory cannot be written.
        """
        source = self.source
        if source is None:
            yield
            return

        def mark() -> bool:
            what = f"cannot write the mark that keeps the checkpoint of step {self.step} in"
            try:
                with source.failures_named(what):
                    return keep_for_branch(source.checkpoints, self.step, branch)
            except UserError as error:
                if str(error).startswith(what):
                    raise
                raise UserError(f"{what} {source.name}: {error}") from error

        is_new = by_first(mark)
        try:
            yield
        except BaseException:
            if is_new and jax.process_index() == 0:
                with contextlib.suppress(Exception):  # report the error of the body instead
                    forget_branch(source.checkpoints, self.step, branch)
            raise

    def restore(self, abstract: Any) -> Restored:
        """Restore the checkpoint, with the shapes, types and shardings of `abstract`.

        Raise a DamagedCheckpointError if it has been damaged or removed since it was checked.
        """
        assert self.source is not None  # a run that has saved restores its own checkpoints
        return restore_step(self.source.checkpoints, self.step, abstract)

    def line(self, config: PretrainConfig) -> str:
        """Describe the branch on one line, with the learning rates of the steps around it."""
        rates = ""
        if self.config is not None:
            before, after = _rate(self.config, self.step - 1), _rate(config, self.step)
            rates = f"; learning rate {before:.3g} before, {after:.3g} after"
        return f"branch   of {self.record['workdir']} from step {self.step:,}{rates}"


def open_branch(name: str, work: WorkDir, there: There) -> Branch | None:
    """Find the checkpoint that a run branches from; return None if the run is not a branch.

    Collective. Raise a UserError if run or step is missing or damaged, or `work` began differently.

    Args:
        name: Value of --branch-from: WORKDIR@STEP, or WORKDIR for its newest checkpoint that was
            read back after saving. If empty, a branch that has begun is found from its config.json.
            Once the branch has saved, only the step of `name` is compared.
        work, there: Work directory of the run, and its content.
    """
    known: Any = (there.record or {}).get("branch")
    fields = known if isinstance(known, dict) else {}
    kinds = {"workdir": str, "step": int, "digest": str}
    if known is not None and any(type(fields.get(n)) is not kind for n, kind in kinds.items()):
        raise UserError(
            f"{work.local / 'config.json'}: branch is {show(known):.200}; it must have the "
            "workdir, step and digest of a checkpoint. Restore the file"
        )
    if not (name or known):
        return None
    if there.record and not known:
        raise UserError(
            f"--branch-from is {name}, but the run in {work.name} is not a branch. To continue "
            "that run, leave --branch-from out. To begin a branch, choose another --workdir"
        )
    directory, step = split_name(name) if name else (known["workdir"], known["step"])
    if known and step not in (None, known["step"]):
        raise UserError(
            f"{work.name} is a branch from step {known['step']} of {known['workdir']}, but "
            f"--branch-from is {name}. Choose another --workdir for another branch"
        )
    if there.steps:
        return Branch(known, None, {})
    source = open_workdir(directory)
    here, own = (each.name if each.mirror else Path(each.name).resolve() for each in (source, work))
    if here == own:
        raise UserError(
            f"--branch-from and --workdir name the same directory, {name}; choose another --workdir"
        )
    step = known["step"] if known else step
    entry, record = by_first(lambda: _look(source, step, known))
    return Branch(entry, source, record)


def _look(source: WorkDir, step: int | None, known: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """Check all files of a checkpoint; return `Branch.record` and `Branch.began`."""
    record = read_record(source.local, "pretrain")
    if "average" in record:
        raise UserError(
            f"{source.name} contains an average of checkpoints, which has no state to continue "
            f"from. Start a new run with --config.init={source.name} and without --branch-from"
        )
    (step,) = named_steps(source, step)
    path = source.checkpoints / str(step)
    if fault := find_fault(path):
        others = [each for each in verified_steps(source.checkpoints) if each != step]
        there = ", ".join(map(str, others)) or "none"
        raise UserError(
            f"the checkpoint of step {step} in {source.name} is damaged: {fault}. Other steps "
            f"whose checkpoints were intact when read back: {there}"
        )
    entry = {
        "workdir": source.name,
        "step": step,
        "digest": read_checkpoint_record(path).digest,
        **({"branch": record["branch"]} if "branch" in record else {}),
    }
    if known and known["digest"] != entry["digest"]:
        raise UserError(
            f"the checkpoint of step {step} in {source.name} has been replaced since the branch "
            f"began: its digest was {known['digest']} and is now {entry['digest']}. Choose another "
            "--workdir"
        )
    return entry, record


def _before(config: PretrainConfig, step: int, corpus_of: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings that decide the steps before `step`, phase by phase."""
    starts = (0, *config.training.phase_starts)
    steps = config.training.phase_steps
    for number, (start, phase) in enumerate(zip(starts, config.training.phases, strict=True)):
        if start < step:
            model = config.model_of(number)
            yield {
                "steps": min(steps[number], step - start),
                "length": phase.length,
                "batch_size": phase.batch_size,
                "batch_warmup_steps": config.phases[number].batch_warmup_steps,
                "batch_unit": config.training.batch_unit if phase.batch_warmup_steps else 1,
                "masking_rate": config.masking_of(number).rate,
                "mixture": [part.weight for part in config.mixture_of(number)],
                "mixture_temperature": config.temperature_of(number),
                "rope_theta": model.rope_theta,
                "local_rope_theta": model.local_rope_theta,
                "corpus": str(corpus_of(number))[:12],
            }


def _phase_rows(
    there: list[dict[str, Any]], given: list[dict[str, Any]], share: float
) -> list[str]:
    """Describe how phases before the branch differ; the branch is at `share` of the steps."""
    old_steps, new_steps = (
        " + ".join(str(phase["steps"]) for phase in each) for each in (there, given)
    )
    if old_steps != new_steps:
        return [
            f"training.phases: before the branch they have {old_steps} steps there, {new_steps} "
            "given (to begin a phase at the branch, make the shares of earlier phases sum to "
            f"{share:.10g})"
        ]
    return [
        f"training.phases[{number}].{name}: {show(old[name])} there, {show(new[name])} given"
        for number, (old, new) in enumerate(zip(there, given, strict=True))
        for name in old
        if old[name] != new[name]
    ]


def _rate(config: PretrainConfig, step: int) -> float:
    training = config.training
    rate = config.phase_rate(training.phase_of(step))
    return float(learning_rate_schedule(config.optimizer, training.num_steps, rate)(step))

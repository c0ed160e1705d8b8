"""The work directory of a fine-tuning run: what is in it, and the fine-tuned model in it.

config.json  tokenizer/  checkpoints/ (the best model)  resume/ (all runs, while they last)
metrics.jsonl  events.jsonl  statistics.json  statistics.txt  statistics.png
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import bert_jax
from bert_jax.checkpoint import load_newest
from bert_jax.checkpoint.agreement import by_first
from bert_jax.data.tokenizer import Tokenizer, load_tokenizer
from bert_jax.errors import UserError
from bert_jax.finetune.config import FREE_FIELDS, FinetuneConfig
from bert_jax.finetune.rows import Rows
from bert_jax.finetune.task import Task, restore_task
from bert_jax.model.config import ModelConfig
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.training.config import build, diff, to_dict
from bert_jax.training.remote import WorkDir, open_workdir
from bert_jax.training.workdir import (
    MAX_CONFIG_BYTES,
    begin_workdir,
    holds_run,
    refuse_other_run,
)
from bert_jax.untrusted.json_file import read_json_object

KIND = "finetune"
"""What `config.json` says a run is; a pretraining run says nothing."""

STATISTICS = "statistics.json"
"""Written when all members have ended: then a run is finished."""

NO_MODEL = (
    "no run gave a finite score, so there is no model to save: all have diverged. Lower "
    "optimizer.learning_rate or sweep.learning_rates, or look at the data, and choose another work "
    "directory"
)

_log = logging.getLogger("bert_jax")


class FinetunedState(NamedTuple):
    """What a checkpoint holds."""

    params: Any
    """As from `init_task_params`."""


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned model, with all that it needs."""

    model: ModelConfig
    head: TaskHeadConfig
    params: Any
    """As from `init_task_params`, on one device."""
    task: Task
    tokenizer: Tokenizer
    tokenizer_files: Path
    scores: dict[str, float]
    """On the dev data, of exactly these parameters."""
    config: FinetuneConfig
    step: int
    """Updates made."""


def is_finetuning(workdir: Path) -> bool:
    """Whether the run in a (local) work directory is one of fine-tuning."""
    path = workdir / "config.json"
    if not path.is_file():
        return False
    return read_json_object(path, max_bytes=MAX_CONFIG_BYTES).get("kind") == KIND


def read_finetune_record(workdir: Path) -> dict[str, Any]:
    """`config.json` as JSON values: kind, bert_jax (the version), config, fingerprints.

    Raises:
        UserError: There is none, or it is of another kind of run.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(
            f"{workdir} holds no run: it has no config.json. Give the work directory of a "
            "`bert-jax finetune` run"
        )
    record = read_json_object(path, max_bytes=MAX_CONFIG_BYTES)
    if record.get("kind") != KIND:
        raise UserError(
            f"{workdir} holds a run that is not one of fine-tuning; give the work directory of a "
            "`bert-jax finetune` run"
        )
    return record


def fingerprint(encoder: Any, tokenizer: Tokenizer) -> str:
    """SHA-256 of the weights that a run starts from ({}: none are given) and of its tokenizer."""
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(encoder):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(np.asarray(leaf, np.float32)).tobytes())
    return digest.hexdigest()


def rows_fingerprint(splits: Iterable[Rows]) -> str:
    """SHA-256 of the tokens and labels of all splits."""
    digest = hashlib.sha256()
    for rows in splits:
        labels = () if rows.labels is None else rows.labels
        for array in (rows.lengths, rows.second_at, *rows.tokens, *labels):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def check_finetune_workdir(
    place: WorkDir, config: FinetuneConfig, fingerprints: dict[str, str]
) -> None:
    """Refuses a work directory that belongs to another run; changes nothing.

    Args:
        place: The work directory.
        config: Of this run.
        fingerprints: By the field that names files, of what they hold.

    Raises:
        UserError: Lists the fields that differ, with the run's value and the one given.
    """
    record = by_first(lambda: read_finetune_record(place.local) if holds_run(place) else None)
    if record is None:
        return
    there = build(FinetuneConfig, record["config"], where=str(place.local / "config.json"))
    unread = tuple(f"task.{name}." for name in config.task.unread)
    rows = [
        f"{name}: {json.dumps(old)} there, {json.dumps(new)} given"
        for name, old, new in diff(there, config)
        if name not in FREE_FIELDS and not name.startswith(unread)
    ]
    known = record.get("fingerprints", {})
    rows += [
        f"what {name} names: fingerprint {str(known.get(name))[:12]} there, {given[:12]} given"
        for name, given in fingerprints.items()
        if known.get(name) != given
    ]
    refuse_other_run(place, rows)


def prepare_finetune_workdir(
    workdir: Path, config: FinetuneConfig, fingerprints: dict[str, str], tokenizer_files: Path
) -> None:
    """Write config.json and copy the tokenizer; each appears complete or not at all."""
    record = {
        "kind": KIND,
        "bert_jax": bert_jax.__version__,
        "config": to_dict(config),
        "fingerprints": fingerprints,
    }
    begin_workdir(workdir, record, lambda target: _copy_tokenizer(tokenizer_files, target))


def _copy_tokenizer(source: Path, target: Path) -> None:
    """The files of the tokenizer alone: an exported directory holds the weights beside them."""
    if target.exists():
        return
    load_tokenizer(source).save(target)


def saved_content(
    config: FinetuneConfig,
    model: ModelConfig,
    head: TaskHeadConfig,
    task: Task,
    scores: dict[str, float],
    member: Any,
) -> dict[str, Any]:
    """What a checkpoint says beside its arrays, for `Checkpoints.save`."""
    return {
        "config": to_dict(config),
        "extra": {
            "model": to_dict(model),
            "head": to_dict(head),
            "task": task.describe(),
            "scores": scores,
            "member": dataclasses.asdict(member),
        },
        "metrics": {f"eval/{name}": value for name, value in scores.items()},
    }


def load_finetuned(workdir: Path | str) -> Finetuned:
    """The best model of a fine-tuning run. Changes nothing on disk.

    Raises:
        UserError: No such run there, or it has saved nothing yet.
        DamagedCheckpointError: It holds checkpoints and none is intact.
    """
    place = open_workdir(workdir)
    read_finetune_record(place.local)
    restored = load_newest(place.checkpoints)
    if restored is None and (place.local / STATISTICS).exists():
        raise UserError(f"{workdir} has no model: {NO_MODEL}")
    if restored is None:
        raise UserError(
            f"{workdir} holds no checkpoint yet: the run has not come to its first save. Give the "
            "`bert-jax finetune` command again to continue it"
        )
    if restored.damaged:
        _log.warning("%s", restored.warning())
    extra, where = restored.record.extra, f"{workdir}: checkpoint {restored.step}"
    files = place.local / "tokenizer"
    tokenizer = load_tokenizer(files)
    return Finetuned(
        model=build(ModelConfig, extra["model"], where),
        head=build(TaskHeadConfig, extra["head"], where),
        params=restored.state,
        task=restore_task(extra["task"], tokenizer),
        tokenizer=tokenizer,
        tokenizer_files=files,
        scores=extra["scores"],
        config=build(FinetuneConfig, restored.record.config, where),
        step=restored.step,
    )


def remove_resume(place: WorkDir) -> None:
    """Deletes what a finished run no longer needs."""
    if jax.process_index() == 0 and place.resume.exists():
        place.resume.rmtree()

"""The work directory of a fine-tuning run: what is in it, and the fine-tuned model in it.

config.json  tokenizer/  checkpoints/ (the best model)  resume/ (all runs, while they last)
metrics.jsonl  events.jsonl  statistics.json  statistics.txt  statistics.png
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import bert_jax
from bert_jax.checkpoint.agreement import by_first
from bert_jax.config.mapping import build, diff, to_dict
from bert_jax.files.remote import WorkDir
from bert_jax.finetune.config import FREE_FIELDS, FinetuneConfig
from bert_jax.objectives.task import TaskObjective
from bert_jax.saved.runs import KIND, read_finetune_record
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.task import Task
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.training.workdir import (
    begin_workdir,
    holds_run,
    refuse_other_run,
)

_log = logging.getLogger("bert_jax")


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
        config: Configuration of this run.
        fingerprints: Fingerprints by the field that names files, of what they hold.

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
        for name, old, new in diff(there, config, FREE_FIELDS)
        if not name.startswith(unread)
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
    begin_workdir(workdir, record, tokenizer_files)


def saved_content(
    config: FinetuneConfig,
    objective: TaskObjective,
    task: Task,
    scores: dict[str, float],
    member: Any,
) -> dict[str, Any]:
    """Return the content of a checkpoint beside its arrays, for `Checkpoints.save`."""
    return {
        "config": to_dict(config),
        "extra": {
            "model": to_dict(objective.model),
            "head": to_dict(objective.config),
            "task": task.describe(),
            "scores": scores,
            "member": dataclasses.asdict(member),
        },
        "metrics": {f"eval/{name}": value for name, value in scores.items()},
    }


def remove_resume(place: WorkDir) -> None:
    """Delete what a finished run no longer needs."""
    if jax.process_index() == 0 and place.resume.exists():
        place.resume.rmtree()

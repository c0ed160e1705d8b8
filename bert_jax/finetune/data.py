"""Data that a saved fine-tuning run is scored on: those of the run, or others, told apart."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.finetune.saves import describe_split
from bert_jax.finetune.setup import rows_fingerprint
from bert_jax.saved.model import SavedModel
from bert_jax.saved.runs import TRAIN_TEXTS, read_record
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.opening import open_task
from bert_jax.tasks.overlap import example_keys, overlap_warning
from bert_jax.tasks.task import Split, Task


def task_of(model: SavedModel) -> Task:
    """Return the task of a fine-tuning run, from `read_finetuned`."""
    assert model.origin.task is not None
    return model.origin.task


def splits_of(workdir: Path | str, model: SavedModel, data: str | None) -> list[Split]:
    """Read labelled data: a file, a split of GLUE, `dev` or `test` of the run; None: both of these.

    Raises:
        UserError: Data cannot be read, or are those of the run and have changed since.
    """
    config = task_of(model).config
    own = {"dev", *config.dev_sources, *config.test_sources}
    if data is None or (data in own and config.kind != "glue" and not Path(data).exists()):
        return _run_splits(workdir, model, data)
    return [other_split(workdir, model, data)]


def _run_splits(workdir: Path | str, model: SavedModel, name: str | None) -> list[Split]:
    """Read the dev and the test data of a run, or one of them.

    The training file is read only where dev data were held out of it, and of runs of version 0.1.0.
    """
    task, record = task_of(model), read_record(open_workdir(workdir).local, "finetune")
    recorded = record.get("splits", {})
    sources = {**task.config.dev_sources, **task.config.test_sources}
    if recorded and (task.config.dev_sources or name in sources):
        named = {each: source for each, source in sources.items() if name in (None, each)}
        splits = [_named(task.open_split(source), each) for each, source in named.items()]
    else:
        config = build(TaskConfig, model.origin.config["task"], f"{workdir}: task")
        again = open_task(config, model.tokenizer, model.config.num_positions)
        splits = [*again.dev_splits(), *task.test_splits()]
        joint = record.get("fingerprints", {}).get("task")
        whole = (again.train_split(), *again.dev_splits())
        if again.describe() != task.describe() or (
            not recorded and joint not in (None, rows_fingerprint(whole))
        ):
            raise UserError(_changed(workdir, "", "other labels or examples"))
        splits = [split for split in splits if name in (None, split.name)]
    known = train_texts(workdir)
    for split in splits:
        _check_unchanged(workdir, split, recorded.get(split.name), known)
    return splits


def other_split(
    workdir: Path | str, model: SavedModel, data: str, *, labelled: bool = True
) -> Split:
    """Read a file, or a split of GLUE.

    Faults of the file, and examples that were trained on, are told on standard error.

    Raises:
        UserError: There are no such data, or they cannot be read.
    """
    split = task_of(model).open_split(data, labelled=labelled)
    overlap = overlap_warning(split.name, split.texts(), train_texts(workdir)) if labelled else ""
    warn([*split.warnings, *filter(None, [overlap])])
    return split


def train_texts(workdir: Path | str) -> np.ndarray:
    """Return the keys of the texts that a run has trained on; none of version 0.1.0."""
    path = open_workdir(workdir).local / TRAIN_TEXTS
    return np.fromfile(path, "<u8") if path.is_file() else np.zeros(0, "<u8")


def warn(texts: Sequence[str]) -> None:
    """Print warnings on standard error."""
    for text in texts:
        print(f"Warning: {text}", file=sys.stderr)


def _named(split: Split, name: str) -> Split:
    split.name = name
    return split


def _check_unchanged(
    workdir: Path | str, split: Split, recorded: Mapping[str, Any] | None, known: np.ndarray
) -> None:
    """Refuse a split of other examples than that of the training."""
    found = describe_split(split)
    if recorded is None or found == recorded:
        return
    why = f"{found['examples']:,} examples, {recorded['examples']:,} then"
    if found["examples"] == recorded["examples"]:
        why = f"{found['examples']:,} examples as then, with other texts or labels"
    if trained := np.isin(example_keys(split.texts()), known).sum():
        why += f"; {trained:,} of them were trained on"
    raise UserError(_changed(workdir, f" of the split {split.name!r}", why))


def _changed(workdir: Path | str, which: str, why: str) -> str:
    return (
        f"the data{which} of {workdir} have changed since it was trained: {why}. Name the data to "
        "be scored with --data FILE, or put back the file as it was"
    )

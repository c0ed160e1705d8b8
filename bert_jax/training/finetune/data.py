"""Data for scoring a saved fine-tuning run: the run's own data or other data."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_finetuned, read_model
from bert_jax.artefacts.saved.runs import TRAIN_TEXTS, is_finetuning, read_record
from bert_jax.config.command_line import overridden
from bert_jax.config.mapping import build, to_dict
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.opening import TASKS, open_task
from bert_jax.tasks.overlap import example_keys, overlap_warning
from bert_jax.tasks.tagging.schemes import split_tag
from bert_jax.tasks.task import LabelSpec, Split, Task
from bert_jax.training.finetune.saves import describe_split


def read_scored(path: Path | str, columns: Mapping[str, str] | None = None) -> SavedModel:
    """Read a model together with its task, so that it can be scored on labelled data.

    `path` is the work directory of a fine-tuning run, or a directory in Hugging Face's format with
    a task head; the task is then derived from the head and from config.json. `columns` changes
    fields of the task, such as the names of the text and label columns. Raise a UserError if there
    is no such model, it has no task head, or a field is unknown.
    """
    finetuned = is_finetuning(open_workdir(path).local)
    model = read_finetuned(path) if finetuned else read_model(path)
    task, scores = (task_of(model), model.origin.metrics) if finetuned else _implied_task(model)
    if columns:
        given = [f"--config.{name}={value}" for name, value in columns.items()]
        config = overridden(task.config, given, "--columns")
        for name in ("max_length", "thresholds", "calibrate"):
            if getattr(config, name, None) != getattr(task.config, name, None):
                raise UserError(f"--columns cannot change task.{name} of a trained model")
        task = TASKS[config.kind](config, task.spec, task.tokenizer)
    origin = dataclasses.replace(model.origin, task=task, metrics=scores)
    return dataclasses.replace(model, origin=origin)


def _implied_task(model: SavedModel) -> tuple[Task, dict[str, float]]:
    """Return the task that an exported head implies, and dev scores with the tuned thresholds."""
    if (outputs := model.outputs) is None:
        raise UserError(
            f"{model.name} has no task head, so it cannot be scored on labelled data; it supports "
            f"{' and '.join(model.verbs)}"
        )
    kind, labels, long = outputs.objective, outputs.labels, outputs.long
    parts = [split_tag(label) for label in labels]
    entities = "O" in labels and all(parts)
    reading = {} if outputs.reading is None else to_dict(outputs.reading)
    null_threshold = reading.pop("null_threshold", None)
    scores = {f"threshold/{n}": x for n, x in zip(labels, outputs.thresholds, strict=False)}
    spec = LabelSpec(labels, scheme="iob2" if entities else "plain")
    fields: dict[str, Any] = {"kind": kind}
    if kind == "tags":
        fields = {"kind": "tagging", "labels": labels, "stride": reading.get("stride", 0)}
    elif kind == "span":
        fields = {"kind": "squad", **reading}
        if null_threshold is not None:
            scores["null_threshold"] = null_threshold
        elif reading:  # every question of the run had an answer
            spec = dataclasses.replace(spec, rules="v1.1")
    elif kind != "choice":
        fields = {"problem_type": kind, "thresholds": "tuned" if scores else "half"}  # a table
        fields |= {"window_pooling": long.pooling, "window_stride": long.stride, "long": long.how}
    config = build(TaskConfig, {"max_length": model.max_length, **fields}, model.name)
    return TASKS[config.kind](config, spec, model.tokenizer), scores


def task_of(model: SavedModel) -> Task:
    """Return the task of a model from `read_finetuned` or `read_scored`."""
    assert model.origin.task is not None
    return model.origin.task


def splits_of(workdir: Path | str, model: SavedModel, data: str | None) -> list[Split]:
    """Read labelled data: a file, a split of GLUE, or the run's `dev` or `test`; None means both.

    Raise a UserError if the data cannot be read, or the run's data have changed since training.
    """
    config = task_of(model).config
    own = {"dev", *config.dev_sources, *config.test_sources}
    if data is None or (data in own and config.kind != "glue" and not Path(data).is_file()):
        return _run_splits(workdir, model, data)
    return [other_split(workdir, model, data)]


def _run_splits(workdir: Path | str, model: SavedModel, name: str | None) -> list[Split]:
    """Read dev and test data, or only the split `name`; read train only if dev is part of train."""
    task, record = task_of(model), read_record(open_workdir(workdir).local, "finetune")
    recorded = record["splits"]
    sources = {**task.config.dev_sources, **task.config.test_sources}
    if task.config.dev_sources or name in sources:
        named = {each: source for each, source in sources.items() if name in (None, each)}
        splits = [task.open_split(source) for source in named.values()]
        for split, each in zip(splits, named, strict=True):
            split.name = each
    else:
        config = build(TaskConfig, model.origin.config["task"], f"{workdir}: task")
        again = open_task(config, model.tokenizer, model.config.num_positions)
        splits = [*again.dev_splits(), *([] if name else task.test_splits())]
        if again.describe() != task.describe():
            raise UserError(_changed(workdir, "", "other labels"))
    known = train_texts(workdir)
    for split in splits:
        found = describe_split(split)
        then = recorded.get(split.name, found)
        if found != then:
            why = f"{found['examples']:,} examples now, {then['examples']:,} then"
            if found["examples"] == then["examples"]:
                why = f"{found['examples']:,} examples, as before, but with other texts or labels"
            if trained := np.isin(example_keys(split.texts()), known).sum():
                why += f"; {trained:,} of them are training examples"
            raise UserError(_changed(workdir, f" of the split {split.name!r}", why))
        _warn(overlap_warning(split.name, split.texts(), known))
    return splits


def other_split(
    workdir: Path | str, model: SavedModel, data: str, *, labelled: bool = True
) -> Split:
    """Read data to score or to predict: a file, or a split of GLUE.

    Warnings about faults in the file and about examples seen in training go to standard error.
    Raise a UserError if the data do not exist or cannot be read.
    """
    task = task_of(model)
    if data in ("dev", "test") and task.config.kind != "glue" and not Path(data).is_file():
        raise UserError(f"{workdir} names no {data} data, and there is no file {data}; name a file")
    split = task.open_split(data, labelled=labelled)
    _warn(*split.warnings)
    if labelled:
        _warn(overlap_warning(split.name, split.texts(), train_texts(workdir)))
    return split


def _warn(*texts: str) -> None:
    for text in filter(None, texts):
        print(f"Warning: {text}", file=sys.stderr)


def train_texts(workdir: Path | str) -> np.ndarray:
    """Return the keys (`example_keys`) of a run's training texts; [] if the file is missing."""
    path = open_workdir(workdir).local / TRAIN_TEXTS
    return np.fromfile(path, "<u8") if path.is_file() else np.zeros(0, "<u8")


def _changed(workdir: Path | str, which: str, why: str) -> str:
    return (
        f"the data{which} of {workdir} have changed since training: {why}. Name the data to be "
        "scored with --data FILE, or restore the file"
    )

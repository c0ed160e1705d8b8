"""Reading texts with labels, from tables and from the tasks of GLUE."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.tasks.config import GlueConfig, TableConfig
from bert_jax.tasks.examples import Data, LabelSet, MissingColumn, TextExample
from bert_jax.tasks.glue import TASKS, GlueTask, glue_task
from bert_jax.tasks.overlap import deal, example_key, held_out, joined, strata
from bert_jax.tasks.tables import TableFormat, read_rows
from bert_jax.tasks.text.tables import read_labelled, read_other_texts, read_texts

_Reader = Callable[..., Data[TextExample]]

# Tables


def open_table(config: TableConfig) -> list[Data[TextExample]]:
    """Read training and dev data with the same labels; if there is no dev file, hold out rows."""
    train = config.source("train")
    data = read_labelled(train, config, LabelSet(config.labels) if config.labels else None)
    if not config.dev:
        return _held_out(train, data, config)
    dev = read_labelled(config.dev, config, data.labels, read_other_texts)
    return [replace(data, name="train"), replace(dev, name="dev")]


def _held_out(path: str, data: Data[TextExample], config: TableConfig) -> list[Data[TextExample]]:
    """Hold out a part of the rows as dev; rows with equal texts stay in the same part.

    If there are groups, a group's rows stay together too, and both parts get the same label mix.
    """
    keys = [example_key(example.texts) for example in data.examples]
    if config.group:
        groups = joined(keys, [example.group for example in data.examples])
        kinds = strata([example.label for example in data.examples])
        held = (deal(kinds, groups, keys, (config.dev_rate, 1 - config.dev_rate)) == 0).tolist()
        if all(held) or not any(held):
            raise UserError(
                f"{path}: rows of a group stay together, and with {len(set(groups.tolist()))} "
                f"groups of {config.group!r}, task.dev_rate {config.dev_rate:g} leaves train or "
                "dev empty; set another rate, or name a second file in task.dev"
            )
    else:
        held = held_out(path, keys, config.dev_rate, 1, "text")
    dev, train = (
        tuple(e for e, mine in zip(data.examples, held, strict=True) if mine == part)
        for part in (True, False)
    )
    notes = list(data.warnings)
    if data.labels is not None:
        lacks = [data.labels.names[n] for n in sorted(_classes_of(dev) - _classes_of(train))]
        if lacks:
            notes.append(
                f"{path}: {len(lacks)} labels occur only in the rows held out, so they are not "
                f"learned: {', '.join(map(repr, lacks[:5]))}; name a dev file in task.dev"
            )
    notes.append(f"{path}: {len(dev):,} of {len(data.examples):,} rows are held out as dev")
    return [Data("train", train, data.labels, tuple(notes)), Data("dev", dev, data.labels)]


def _classes_of(examples: Sequence[TextExample]) -> set[Any]:
    labels = (each.label if isinstance(each.label, tuple) else [each.label] for each in examples)
    return {name for names in labels for name in names}


# GLUE


def open_glue(config: GlueConfig) -> list[Data[TextExample]]:
    """Read the training data and all dev sets; MNLI's matched dev set comes first."""
    config.source("data")
    devs = [split for split in glue_task(config.source("name")).files if split.startswith("dev")]
    return [_glue_split(config, split) for split in ("train", *devs)]


def read_glue_source(
    config: GlueConfig, source: str, *, labelled: bool = True
) -> Data[TextExample]:
    """Read a split of the task by its name, an official file, or another table.

    MNLI also has the split `ax`. A file with an official name has the official format. Other files
    must have the column names of GLUE or TensorFlow Datasets; labels are read only if `labelled`.
    Raise a UserError if no split or file has this name, or the file cannot be read.
    """
    task, others = glue_task(config.name), ["ax"] if config.name == "mnli" else []
    if source in [*task.files, *others]:
        if not config.data:
            raise UserError(f"task.data is empty, so there is no split {source!r}; give a file")
        return _glue_split(config, source)
    path = Path(source)
    if not path.is_file():
        splits = ", ".join([*task.files, *others])
        raise UserError(f"there is no file {source}; give a file, or a split: {splits}")
    for name in [config.name, *others]:
        for split, file in TASKS[name].files.items():
            if path.name == file:
                return read_glue(path, name, split)

    def read(names: tuple[str, ...], reader: _Reader, **fields: str) -> Data[TextExample]:
        labels = LabelSet(names) if names else None
        table, limits = _table(task, **fields), task.score_range
        return reader(source, table, labels, labelled=labelled, score_range=limits)

    _, text, text_pair = task.tfds
    # If both formats name the columns of texts alike, only the label's column tells them apart.
    is_alike = (text, text_pair) == (task.text, task.text_pair)
    try:
        return read(task.written, read_texts if is_alike else read_other_texts)
    except MissingColumn:
        return read(task.labels, read_other_texts, text=text, text_pair=text_pair, label="label")


def _glue_split(config: GlueConfig, split: str) -> Data[TextExample]:
    name, file = (split, "test") if split == "ax" else (config.name, split)
    if config.data == "tfds":
        return replace(read_glue_tfds(name, file), name=split)
    home = Path(config.data)
    if split == "ax" and not (home / TASKS["ax"].directory).is_dir():
        home = home.parent  # `data` is MNLI's directory; the directory of ax is beside it
    return replace(read_glue(home, name, file), name=split)


def read_glue(directory: str | PathLike[str], name: str, split: str) -> Data[TextExample]:
    """Read a split from the official TSV files.

    The files have no quoting: quotes are text. CoLA has a header only in its test set. MRPC is read
    from train.tsv, dev.tsv and test.tsv or, if these are missing, from Microsoft's files and GLUE's
    dev_ids.tsv. Rows of QQP that are broken by line ends are skipped and counted.

    `directory` is the split's file, its directory, or has the directories of all tasks. Labels are
    None in test splits. Ids are the file's row numbers in test splits, else numbers from 0.
    Raise a UserError if the task, split or file does not exist, or rows are wrong.
    """
    given, task = Path(directory), _task_with(name, split)
    inside = given / task.directory
    home = given.parent if given.is_file() else inside if inside.is_dir() else given
    path = home / task.files[split]
    if name == "mrpc" and not path.is_file() and (home / "msr_paraphrase_train.txt").is_file():
        return _read_published_mrpc(home, split)
    if not path.is_file():
        there = sorted(entry.name for entry in home.iterdir())[:10] if home.is_dir() else []
        raise UserError(
            f"there is no {path}; {home} holds {', '.join(there) or 'nothing'}. Name the directory "
            f"with {task.files[split]} of {task.directory}, or its parent"
        )
    fields: dict[str, Any] = {"id": task.id if split.startswith("test") else ""}
    if name == "cola" and split != "test":
        fields |= {"text": "4", "label": "2", "header": False}
    if name == "qqp" and not split.startswith("test"):
        fields["ragged"] = "skip"
    return _read_split(path, name, split, task.written, format="tsv", **fields)


def read_glue_tfds(name: str, split: str) -> Data[TextExample]:
    """Read a split that TensorFlow Datasets has prepared, in its stored order."""
    task = _task_with(name, split)
    config, text, text_pair = task.tfds
    source = f"tfds:glue/{config}:{split.replace('dev', 'validation')}"
    id = "idx" if split.startswith("test") else ""
    return _read_split(
        source, name, split, task.labels, text=text, text_pair=text_pair, label="label", id=id
    )


def _task_with(name: str, split: str) -> GlueTask:
    task = glue_task(name)
    if split not in task.files:
        raise UserError(f"{name} has no split {split!r}; it has {', '.join(task.files)}")
    return task


def _table(task: GlueTask, **fields: Any) -> TableConfig:
    """Configure a table in the format of the official files; `fields` override that format."""
    official: dict[str, Any] = {
        "text": task.text, "text_pair": task.text_pair, "label": task.label,
        "problem_type": "single_label" if task.labels else "regression",
    }  # fmt: skip
    return TableConfig(**official | fields)


def _read_split(
    source: str | PathLike[str], name: str, split: str, names: tuple[str, ...], **fields: Any
) -> Data[TextExample]:
    """Read a file in which the labels are written as `names`; test splits have no labels."""
    task = TASKS[name]
    data = read_texts(
        source, _table(task, **fields), LabelSet(names) if names else None,
        labelled=not split.startswith("test"), score_range=task.score_range,
    )  # fmt: skip
    return replace(
        data,
        labels=LabelSet(task.labels) if names else None,
        submission=(name, split) if split in task.submissions else None,
    )


def _read_published_mrpc(home: Path, split: str) -> Data[TextExample]:
    """Read Microsoft's MRPC files, split into train and dev by dev_ids.tsv; ignore test labels."""
    path = home / f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt"
    data = _read_split(path, "mrpc", split, TASKS["mrpc"].written, format="tsv")
    if split == "test":
        return data
    numbered = TableFormat("tsv", header=False)
    dev = {row.values for row in read_rows(f"{home / 'dev_ids.tsv'}", ("1", "2"), numbered)}
    lines = {
        row.origin.line: row.values
        for row in read_rows(f"{path}", ("#1 ID", "#2 ID"), TableFormat("tsv"))
        if row.values in dev
    }
    if missing := dev - set(lines.values()):
        raise UserError(
            f"{home / 'dev_ids.tsv'}: {path} lacks {len(missing):,} of the listed pairs, the first "
            f"{' '.join(min(missing))!r}; fetch both files again"
        )
    chosen = [e for e in data.examples if (e.origin.line in lines) == (split == "dev")]
    return replace(data, examples=tuple(replace(e, id=f"{n}") for n, e in enumerate(chosen)))

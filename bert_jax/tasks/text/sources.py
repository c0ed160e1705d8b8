"""Where texts with labels come from: tables, and the tasks of GLUE."""

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.tasks.config import GlueConfig, TableConfig
from bert_jax.tasks.examples import LabelSet, TextExample
from bert_jax.tasks.glue import TASKS, GlueTask, glue_task, read_glue, read_glue_tfds
from bert_jax.tasks.problems import MissingColumn
from bert_jax.tasks.tables.delimited import TableFormat
from bert_jax.tasks.tables.tables import LabelKind, TextColumns, TextData, read_texts


@dataclass(frozen=True)
class TextSource:
    """Examples that were read, with counts.

    Attributes:
        name: of the split, or of the file.
        data: its examples.
        submission: task and split of GLUE for which the leaderboard takes predictions of it.
    """

    name: str
    data: TextData
    submission: tuple[str, str] | None = None


# Tables


def open_table(config: TableConfig, train: str) -> tuple[TextSource, TextSource]:
    """Training and dev data; dev has the labels of train.

    Args:
        config: of the table.
        train: its training file.

    Raises:
        UserError: a file cannot be read or has no labels; a label that train does not have.
    """
    labels = LabelSet(config.labels) if config.labels else None
    data = _labelled(train, read_texts(train, _columns(config), _format(config), labels), config)
    if not config.dev:
        return _held_out(train, data, config)
    dev = read_texts(config.dev, _columns(config), _format(config), data.labels)
    return TextSource("train", data), TextSource("dev", _labelled(config.dev, dev, config))


def read_table(
    config: TableConfig, source: str, labels: LabelSet | None, *, labelled: bool = True
) -> TextSource:
    """Another table with the same columns; the label may be missing.

    Raises:
        UserError: it cannot be read, or, where it is `labelled`, has a label that is not among
            `labels`.
    """
    columns = _columns(config)
    if not labelled:
        columns = replace(columns, label=None, label_columns=())
    try:
        data = read_texts(source, columns, _format(config), labels)
    except MissingColumn as error:  # of another column than the label's it will be raised again
        data = without_labels(source, columns, _format(config), error)
    return TextSource(_file_name(source), data)


def without_labels(
    source: str, columns: TextColumns, table: TableFormat, error: MissingColumn
) -> TextData:
    """Return a table of which `error` says that the column of the label is not there."""
    columns = replace(columns, label=None, label_columns=())
    data = read_texts(source, columns, table)
    note = f"{source}: there is no column {error.column!r}, so its rows have no labels"
    return replace(data, warnings=(*data.warnings, note))


def _columns(config: TableConfig) -> TextColumns:
    return TextColumns(
        config.text,
        config.text_pair or None,
        None if config.label_columns else config.label,
        config.label_columns,
        config.id or None,
        config.kind,
        config.separator,
        empty=config.empty,
    )


def _format(config: TableConfig) -> TableFormat:
    return TableFormat(
        config.format, config.header, config.quoting, config.delimiter, config.ragged
    )


def _file_name(source: str) -> str:
    return source if source.startswith("tfds:") else Path(source).name


def _labelled(path: str, data: TextData, config: TableConfig) -> TextData:
    if data.examples[0].label is None:
        raise UserError(f"{path} has no labels in column {config.label!r}; name a file with labels")
    return data


def _held_out(path: str, data: TextData, config: TableConfig) -> tuple[TextSource, TextSource]:
    """Rows with the same texts fall on the same side, whatever their order."""
    keys = [_key(example) for example in data.examples]
    ranked = sorted(set(keys))
    if len(ranked) < 2:
        raise UserError(
            f"{path} has {len(ranked)} distinct text; at least 2 are needed to hold one out. Name "
            "a second file in task.table.dev"
        )
    chosen = set(ranked[: min(math.ceil(config.dev_rate * len(ranked)), len(ranked) - 1)])
    dev, train = (
        tuple(e for e, key in zip(data.examples, keys, strict=True) if (key in chosen) == held)
        for held in (True, False)
    )
    notes = list(data.warnings)
    if data.labels is not None:
        lacks = [data.labels.names[n] for n in sorted(_met(dev) - _met(train))]
        if lacks:
            notes.append(
                f"{path}: {len(lacks)} labels are among the rows held out alone and are not "
                f"learned: {', '.join(map(repr, lacks[:5]))}; name a dev file in task.table.dev"
            )
    notes.append(f"{path}: {len(dev):,} of {len(data.examples):,} rows are held out as dev")
    return (
        TextSource("train", TextData(train, data.labels, tuple(notes))),
        TextSource("dev", TextData(dev, data.labels)),
    )


def _key(example: TextExample) -> bytes:
    """Case and blanks do not make another text."""
    texts = [" ".join(text.casefold().split()) for text in (example.text, example.text_pair or "")]
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=16).digest()


def _met(examples: tuple[TextExample, ...]) -> set[int]:
    met: set[int] = set()
    for example in examples:
        if isinstance(example.label, tuple):
            met.update(example.label)
        elif isinstance(example.label, int):
            met.add(example.label)
    return met


# GLUE


def open_glue(config: GlueConfig) -> tuple[TextSource, tuple[TextSource, ...]]:
    """Training data and all dev sets, MNLI's matched one first.

    Raises:
        UserError: they cannot be read.
    """
    task = glue_task(config.name)
    devs = [split for split in task.files if split.startswith("dev")]
    return _glue_split(config, "train"), tuple(_glue_split(config, split) for split in devs)


def read_glue_source(config: GlueConfig, source: str, *, labelled: bool = True) -> TextSource:
    """Return a split of the task by its name, one of its official files, or a table.

    Args:
        config: of the task.
        source: the name of a split (for a model of MNLI `ax`, too); else a file: where it has the
            name of an official one it is read as such, else its columns have GLUE's names or those
            of TensorFlow Datasets.
        labelled: False leaves the labels of a file with other columns out.

    Raises:
        UserError: there is nothing of this name, or it cannot be read.
    """
    task = glue_task(config.name)
    if source in task.files or (source == "ax" and config.name == "mnli"):
        if not config.data:
            raise UserError(f"task.glue.data is empty, so there is no split {source!r}")
        return _glue_split(config, source)
    path = Path(source)
    if not path.is_file():
        splits = ", ".join([*task.files, *(["ax"] if config.name == "mnli" else [])])
        raise UserError(f"there is no file {source}; give a file, or a split: {splits}")
    for name in [config.name, *(["ax"] if config.name == "mnli" else [])]:
        for split, file in TASKS[name].files.items():
            if path.name == file:
                data = read_glue(path.parent, name, split)
                return TextSource(path.name, data, _submission(name, split))
    return TextSource(path.name, _glue_table(task, source, labelled=labelled))


def _glue_split(config: GlueConfig, split: str) -> TextSource:
    name, file = (split, "test") if split == "ax" else (config.name, split)
    if config.data == "tfds":
        data = read_glue_tfds(name, file)
    else:
        home = Path(config.data)
        if split == "ax" and not (home / TASKS["ax"].directory).is_dir():
            home = home.parent  # it was MNLI's own
        data = read_glue(home, name, file)
    return TextSource(split, data, _submission(name, file))


def _submission(name: str, split: str) -> tuple[str, str] | None:
    return (name, split) if split in TASKS[name].submissions else None


def _glue_table(task: GlueTask, source: str, *, labelled: bool) -> TextData:
    """Return a table with the columns of the official files, or of TensorFlow Datasets."""
    kind: LabelKind = "class" if task.labels else "score"
    layouts = [
        (task.text, task.text_pair, task.label, task.written),
        (*task.tfds[1:], "label", task.labels),
    ]
    missing: MissingColumn | None = None
    for text, text_pair, label, names in layouts:
        columns = TextColumns(
            text, text_pair, label if labelled else None, kind=kind,
            score_range=task.score_range, empty="keep",
        )  # fmt: skip
        try:
            return read_texts(source, columns, labels=LabelSet(names) if task.labels else None)
        except MissingColumn as error:
            if error.column == label:
                return without_labels(source, columns, TableFormat(), error)
            missing = error  # the plainer names are the last
    assert missing is not None
    raise missing

"""Tables of texts that belong together."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bert_jax.errors import UserError
from bert_jax.tasks.config import TableConfig
from bert_jax.tasks.examples import LabelSet, Origin, TextExample
from bert_jax.tasks.kinds.embedding import EmbeddingTaskConfig, PairKind
from bert_jax.tasks.problems import Problems, counted
from bert_jax.tasks.tables.files import read_rows
from bert_jax.tasks.text.tables import TextData, read_other_texts, read_texts

_SHORTEST_HALVES = 8
"""Characters of the shortest text that has two halves."""


class TextGroup(NamedTuple):
    """Texts of one row of a file."""

    id: str
    """Name of the row in the file, else its number from 0."""
    texts: tuple[str, ...]
    """Query, document and hard negatives; two texts; or one text."""
    label: int | float | tuple[int, ...] | None
    """Score or number of the class; None where the file has none."""
    origin: Origin


@dataclass(frozen=True)
class GroupData:
    """Content of a table."""

    name: str
    """Name of the file, or of the split."""
    kind: PairKind
    groups: tuple[TextGroup, ...]
    labels: LabelSet | None = None
    """Names of the classes."""
    warnings: tuple[str, ...] = ()


def open_groups(config: EmbeddingTaskConfig, train: str) -> tuple[GroupData, GroupData]:
    """Read training and dev data.

    Raises:
        UserError: A file cannot be read or has wrong rows, or nothing can be held out.
    """
    data = read_groups(train, config, config.rows)
    if config.dev:
        dev = read_groups(config.dev, config, config.kind_of_dev, data.labels)
        if config.kind_of_dev == "texts":
            dev = halved(dev)
        return replace(data, name="train"), replace(dev, name="dev")
    return _held_out(train, data, config.dev_rate)


def read_groups(
    source: str,
    config: EmbeddingTaskConfig,
    kind: PairKind,
    labels: LabelSet | None = None,
    *,
    labelled: bool = True,
) -> GroupData:
    """Read a file of one kind; rows with an empty text are left out and counted in a warning.

    Args:
        source: File, or `tfds:NAME:SPLIT`.
        config: Columns, and how the file is written.
        kind: Kind of the rows.
        labels: Classes of the training file; None takes the classes of this file.
        labelled: Whether scores and classes are read.

    Raises:
        UserError: The file cannot be read, or rows are wrong.
    """
    is_pair = kind in ("pairs", "scores")
    table = TableConfig(
        text=config.query if is_pair else config.text,
        text_pair=config.document if is_pair else "",
        label=config.score if kind == "scores" else config.label,
        problem_type="single_label" if kind == "classes" else "regression",
        id=config.id, empty="skip", ragged=config.ragged, format=config.format,
        header=config.header, quoting=config.quoting, delimiter=config.delimiter,
    )  # fmt: skip
    if kind in ("scores", "classes") and not labelled:
        data = read_other_texts(source, table, labels, labelled=False)
    else:
        data = read_texts(source, table, labels, labelled=kind in ("scores", "classes"))
    if kind in ("scores", "classes") and labelled and data.examples[0].label is None:
        raise UserError(f"{source} has no values in column {table.label!r}; name another column")
    negatives = _negatives(source, config, data) if kind == "pairs" and config.negatives else {}
    groups = tuple(
        TextGroup(
            each.id, (*_texts(each), *negatives.get(each.origin.line, ())), each.label, each.origin
        )
        for each in data.examples
    )
    return GroupData(data.name, kind, groups, data.labels, data.warnings)


def _texts(example: TextExample) -> tuple[str, ...]:
    return (example.text,) if example.text_pair is None else (example.text, example.text_pair)


def _negatives(
    source: str, config: EmbeddingTaskConfig, data: TextData
) -> dict[int, tuple[str, ...]]:
    """Return the hard negatives of each row, by its line."""
    read = {example.origin.line for example in data.examples}
    problems = Problems(source)
    found: dict[int, tuple[str, ...]] = {}
    for row in read_rows(source, config.negatives, config.file_format):
        if row.origin.line in read and not row.problem:
            try:
                texts = [text for value in row.values for text in _listed(row.origin, value)]
                found[row.origin.line] = tuple(texts[: config.max_negatives])
            except UserError as error:
                problems.add(error)
    problems.check()
    return found


def _listed(origin: Origin, value: Any) -> Iterator[str]:
    """Yield the texts of a column of negatives: a text, a list of texts, or nothing."""
    for text in value if isinstance(value, list) else [value]:
        if text is not None and not isinstance(text, str):
            raise UserError(
                f"{origin}: a column of negatives holds {text!r:.60}; give a text, a list of "
                "texts, or nothing"
            )
        if text and text.strip():
            yield text


def text_key(text: str) -> bytes:
    """Hash a text; texts that differ only in case and blanks get the same hash."""
    words = " ".join(text.casefold().split())
    return hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _held_out(source: str, data: GroupData, rate: float) -> tuple[GroupData, GroupData]:
    """Hold out some documents with all their rows; for kinds classes and texts, some texts."""
    keys = [text_key(group.texts[1 if len(group.texts) > 1 else 0]) for group in data.groups]
    ranked = sorted(set(keys))
    if len(ranked) < 4:
        raise UserError(
            f"{source} has {len(ranked)} distinct documents; at least 4 are needed to hold some "
            "out. Name a second file in task.dev"
        )
    chosen = set(ranked[: min(max(2, math.ceil(rate * len(ranked))), len(ranked) - 2)])
    train, dev = (
        replace(
            data,
            name=name,
            groups=tuple(
                group
                for group, key in zip(data.groups, keys, strict=True)
                if (key in chosen) == held
            ),
        )
        for name, held in (("train", False), ("dev", True))
    )
    note = f"{source}: {len(dev.groups):,} of {len(data.groups):,} rows are held out as dev"
    dev = replace(dev, warnings=())
    return replace(train, warnings=(*data.warnings, note)), (
        halved(dev) if dev.kind == "texts" else dev
    )


def halved(data: GroupData) -> GroupData:
    """Make pairs of the first and the second half of each text, cut at a blank where there is one.

    Raises:
        UserError: No text is long enough.
    """
    groups, short = [], []
    for group in data.groups:
        text = group.texts[0].strip()
        middle = len(text) // 2
        blanks = [text.rfind(" ", 0, middle), text.find(" ", middle)]
        end = min((at for at in blanks if at > 0), key=lambda at: abs(at - middle), default=middle)
        if len(text) < _SHORTEST_HALVES:
            short.append(group.origin.line)
        else:
            groups.append(group._replace(texts=(text[:end].strip(), text[end:].strip())))
    source = data.groups[0].origin.path
    if len(groups) < 2:
        raise UserError(
            f"{source}: {len(groups)} of {len(data.groups):,} dev texts have two halves, and at "
            "least 2 are needed; name a file of pairs or scores in task.dev, with "
            "task.dev_rows"
        )
    notes = [counted(source, "texts without two halves, not scored", short)] if short else []
    return replace(data, groups=tuple(groups), warnings=(*data.warnings, *notes))


def numbered(groups: Sequence[TextGroup]) -> Mapping[bytes, int]:
    """Return a number for each distinct text of the groups, by its key."""
    keys = (text_key(text) for group in groups for text in group.texts)
    return {key: number for number, key in enumerate(dict.fromkeys(keys))}

"""Reading texts with labels from a table: one class, several classes or a score per row."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

from bert_jax.errors import UserError
from bert_jax.tasks.config import TableConfig
from bert_jax.tasks.examples import (
    Data,
    LabelSet,
    MissingColumn,
    Origin,
    Problems,
    TextExample,
    counted,
    file_name,
)
from bert_jax.tasks.tables import read_rows

ScoreRange = tuple[float, float]
_AS_BOOLEAN = {"0": False, "1": True, "False": False, "True": True}


def read_texts(
    source: str | PathLike[str], table: TableConfig, labels: LabelSet | None = None, *,
    labelled: bool = True, score_range: ScoreRange | None = None, more: Sequence[str] = (),
    texts_of: Callable[[Origin, Sequence[Any]], Sequence[str]] | None = None,
) -> Data[TextExample]:  # fmt: skip
    """Read texts and their labels.

    Raise a UserError if the file cannot be read or lacks a column, or rows are wrong; the message
    names the first five wrong rows and counts the others.

    Args:
        source: a file of any format of `TableFormat`, or `tfds:NAME:SPLIT`.
        table: columns of the texts and labels, and how the file is written.
        labels: the classes; None means the classes that occur in the file (see `LabelSet.of`).
        labelled: whether to read the labels; if false, their columns may be missing.
        score_range: lowest and highest valid score; None permits any finite number.
        more: names of other columns to read.
        texts_of: function that makes `TextExample.more` from a row's origin and values in `more`.
    """
    name = fspath(source)
    problems = Problems(name)
    present = [*filter(None, (table.text, table.text_pair, table.id, table.group)), *more]
    if labelled:
        present += table.label_columns or (table.label,)
    if table.label_columns:
        labels = labels or LabelSet(table.label_columns)
        if set(labels.names) != set(table.label_columns):
            raise UserError(
                f"the label columns are {', '.join(table.label_columns)}, but the labels are "
                f"{', '.join(labels.names)}; they must be the same"
            )
    examples: list[TextExample] = []  # without labels, which get numbers once all names are known
    found: list[Any] = []
    ragged: list[Origin] = []
    empty: list[Origin] = []
    seen: dict[str, int] = {}
    for index, row in enumerate(read_rows(name, present, table)):
        origin = row.origin
        if row.missing:
            ragged.append(origin)
            continue
        try:
            if row.problem:
                raise UserError(row.problem)
            values = iter(row.values)
            text = as_text(origin, table.text, next(values))
            pair = as_text(origin, table.text_pair, next(values)) if table.text_pair else None
            key = _name(origin, table.id, values, "an id")
            group = _name(origin, table.group, values, "a group")
            if not text.strip() or (pair is not None and not pair.strip()):
                if table.empty == "fail":
                    raise UserError(
                        f"{origin}: a text is empty; fix it, or set empty to 'skip' or 'keep'"
                    )
                empty.append(origin)
                if table.empty == "skip":
                    continue
            if key is not None and seen.setdefault(key, origin.line) != origin.line:
                first = f"{origin.unit} {seen[key]}"
                raise UserError(f"{origin}: the id {key[:80]!r} is also the id of {first}")
            others = [next(values) for _ in more]
            texts = () if texts_of is None else tuple(texts_of(origin, others))
            label = _label(origin, table, values, score_range) if labelled else None
        except UserError as error:
            problems.add(error)
        else:
            examples.append(TextExample(key or f"{index}", text, pair, None, origin, group, texts))
            found.append(label)
    if table.problem_type != "regression" and labelled:
        found, labels = _numbered(name, table, examples, found, labels, problems)
    pairs = list(zip(examples, found, strict=True))
    lacks = [example.origin for example, label in pairs if label is None]
    if not problems.count and 0 < len(lacks) < len(found):
        problems.add(*counted("rows without a label among others that have one", lacks))
    problems.check()
    if not examples:
        raise UserError(f"{name} has no examples")
    notes = {
        "rows skipped for having more or fewer fields than the first": ragged,
        f"rows with an empty text {'skipped' if table.empty == 'skip' else 'kept'}": empty,
    }
    warnings = tuple(note for what, origins in notes.items() for note in counted(what, origins))
    whole = tuple(replace(example, label=label) for example, label in pairs)
    return Data(file_name(name), whole, labels, warnings)


def read_other_texts(
    source: str, table: TableConfig, labels: LabelSet | None, **options: Any
) -> Data[TextExample]:
    """Read a table that may lack its group column or, with a warning, its label columns.

    `options` are passed to `read_texts`.
    """
    try:
        return read_texts(source, table, labels, **options)
    except MissingColumn as error:
        if table.group and error.column == table.group:
            return read_other_texts(source, replace(table, group=""), labels, **options)
        if error.column not in (table.label_columns or (table.label,)):
            raise
        data = read_texts(source, table, labels, **{**options, "labelled": False})
        note = f"{source}: there is no column {error.column!r}, so its rows have no labels"
        return replace(data, warnings=(*data.warnings, note))


def read_labelled(
    source: str, table: TableConfig, labels: LabelSet | None, read: Any = read_texts, **options: Any
) -> Data[TextExample]:
    """Read a table that must have labels, with `read_texts` or `read_other_texts`.

    Raise a UserError if the table has no labels, or `read` raises an error.
    """
    data: Data[TextExample] = read(source, table, labels, **options)
    if data.examples[0].label is None:
        raise UserError(
            f"{source} has no labels in column {', '.join(table.label_columns) or table.label!r}; "
            "name another column or file"
        )
    return data


def as_text(origin: Origin, column: str, value: Any) -> str:
    """Return `value` if it is text without NUL; raise a UserError otherwise."""
    if not isinstance(value, str):
        what = "nothing" if value is None else f"{value!r:.60}"
        raise UserError(f"{origin}: column {column!r} holds {what}, not text")
    if "\0" in value:
        raise UserError(f"{origin}: column {column!r} holds a NUL character; expected text")
    return value


def _name(origin: Origin, column: str, values: Iterator[Any], what: str) -> str | None:
    if not column:
        return None
    if (value := next(values)) in (None, ""):
        raise UserError(f"{origin}: column {column!r} is empty; expected {what}")
    return f"{value}"


def _label(
    origin: Origin, table: TableConfig, values: Iterator[Any], score_range: ScoreRange | None
) -> float | str | tuple[str, ...] | None:
    """Return a row's score, class name, or tuple of names; None if it has no label."""
    if table.label_columns:
        held = zip(table.label_columns, values, strict=True)
        return tuple(column for column, value in held if _flag(origin, column, value))
    if (value := next(values)) is None:
        return None
    if table.problem_type == "regression":
        return as_score(origin, table.label, value, score_range)
    if table.problem_type != "multi_label":
        return class_name(origin, table.label, value)
    if isinstance(value, str):
        value = [part.strip() for part in value.split(table.separator)] if value.strip() else []
    parts = value if isinstance(value, list) else [value]
    names = tuple(class_name(origin, table.label, part) for part in parts if part is not None)
    if len(set(names)) != len(parts):
        raise UserError(f"{origin}: the labels {value!r:.60} repeat a label or have an empty one")
    return names


def class_name(origin: Origin, column: str, value: Any) -> str:
    """Return a class's name from a text or a whole number; raise a UserError for other values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # parquet columns of whole numbers with gaps are read as floats
    if isinstance(value, int):
        return f"{value}"
    if not isinstance(value, str):
        hints = {float: ". To predict numbers, set problem_type='regression'",
                 list: ". For several labels per row, set problem_type='multi_label'"}  # fmt: skip
        hint = hints.get(type(value), "")
        raise UserError(f"{origin}: column {column!r} holds {value!r:.60}, not a label{hint}")
    if not value.strip():
        raise UserError(f"{origin}: column {column!r} is empty; expected a label")
    if value != value.strip():
        raise UserError(f"{origin}: the label {value[:80]!r} has blanks around it; take them out")
    return value


def as_score(
    origin: Origin, column: str, value: Any, score_range: ScoreRange | None = None
) -> float:
    """Return `value` as a finite number within `score_range`; raise a UserError otherwise."""
    wrong = f"{origin}: column {column!r} holds {value!r:.60}, not a number"
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str) or "_" in str(value):
            raise ValueError
        score = float(value)
    except (ValueError, OverflowError):
        raise UserError(f"{wrong} such as 3.5") from None
    low, high = score_range or (-math.inf, math.inf)
    if not math.isfinite(score) or not low <= score <= high:
        right = f"between {low:g} and {high:g}" if score_range else "that is finite"
        raise UserError(f"{wrong} {right}")
    return score


def _flag(origin: Origin, column: str, value: Any) -> bool:
    flag = _AS_BOOLEAN.get(str(int(value)) if value in (0.0, 1.0) else str(value))
    if flag is None:
        raise UserError(f"{origin}: column {column!r} holds {value!r:.60}; it must be 0 or 1")
    return flag


def _numbered(
    name: str, table: TableConfig, examples: Sequence[TextExample], found: list[Any],
    labels: LabelSet | None, problems: Problems,
) -> tuple[list[Any], LabelSet | None]:  # fmt: skip
    """Convert labels to ids; return the ids, None for a wrong label, and all labels' names."""
    if labels is None:
        problems.check()  # the labels of wrong rows would be missing
        held = ([value] if isinstance(value, str) else value or () for value in found)
        if not (met := {name for names in held for name in names}):
            return [None] * len(found), None
        labels = LabelSet.of(met)
        if len(labels) == 1 and table.problem_type != "multi_label":
            raise UserError(
                f"{name}: column {table.label!r} has only the label {labels.names[0]!r}; name "
                "another column or, if there are other labels, list all in `labels`"
            )
        if len(labels) > max(20, len(found) // 2):
            raise UserError(
                f"{name}: column {table.label!r} has {len(labels):,} different labels in "
                f"{len(found):,} rows, such as {labels.names[0][:40]!r}. Name the right column; to "
                "predict numbers, set problem_type='regression'; if these are the labels, list "
                "them in `labels`"
            )
    numbered: list[Any] = []
    for example, value in zip(examples, found, strict=True):
        number: Any = None
        try:
            if isinstance(value, tuple):
                number = tuple(sorted({labels.id(part, example.origin) for part in value}))
            elif value is not None:
                number = labels.id(value, example.origin)
        except UserError as error:
            problems.add(error)
        numbered.append(number)
    return numbered, labels

"""Texts with labels from a table: one class, several classes or a score for each row."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Literal

from bert_jax.errors import UserError
from bert_jax.tasks.examples import LabelSet, Origin, TextExample
from bert_jax.tasks.problems import Problems, counted
from bert_jax.tasks.tables.delimited import Column, Row, TableFormat
from bert_jax.tasks.tables.files import read_rows

LabelKind = Literal["class", "classes", "score"]
Label = int | float | tuple[int, ...] | None
_BY_SUFFIX = TableFormat()
_AS_BOOLEAN = {"0": False, "1": True, "False": False, "True": True}


@dataclass(frozen=True)
class TextColumns:
    """Where in a table the texts and labels stand.

    A column is a name, or a number from 1 in CSV and TSV.

    Attributes:
        text: the text.
        text_pair: the second text of a pair.
        label: the label, the list of labels or the score; None for texts without.
        label_columns: instead of `label`, columns of 0 and 1, one for each of several labels.
        id: names the example; None numbers them from 0.
        kind: "class" for one label a row, "classes" for any number of them, "score" for a number.
        separator: between the labels of a row in one field of text; blanks around them go.
        score_range: lowest and highest score that is right; None lets any finite number pass.
        empty: what to do with texts that are empty or blank: fail, skip the row or keep it; what
            is not refused is counted in a warning.
    """

    text: Column
    text_pair: Column | None = None
    label: Column | None = None
    label_columns: tuple[Column, ...] = ()
    id: Column | None = None
    kind: LabelKind = "class"
    separator: str = ","
    score_range: tuple[float, float] | None = None
    empty: Literal["fail", "skip", "keep"] = "fail"

    def __post_init__(self) -> None:
        if self.label is not None and self.label_columns:
            raise UserError("both label and label_columns are given; one says where labels stand")
        if self.label_columns and self.kind != "classes":
            raise UserError(
                f"label_columns are for several labels a row (kind='classes'), not {self.kind!r}"
            )
        if self.kind == "classes" and not self.separator.strip():
            raise UserError(f"the separator of labels is {self.separator!r}; a mark is needed")


@dataclass(frozen=True)
class TextData:
    """Content of a table.

    Attributes:
        examples: in the order of the file.
        labels: names of the classes; None for scores and for texts without labels.
        warnings: what was skipped or kept although it looks wrong, counted, with lines.
    """

    examples: tuple[TextExample, ...]
    labels: LabelSet | None
    warnings: tuple[str, ...] = ()


def read_texts(
    source: str | PathLike[str],
    columns: TextColumns,
    table: TableFormat = _BY_SUFFIX,
    labels: LabelSet | None = None,
) -> TextData:
    """Read texts and their labels.

    Args:
        source: a CSV, TSV, JSON lines or parquet file, or `tfds:NAME:SPLIT`.
        columns: where the texts and labels stand.
        table: how the file is written.
        labels: the classes, for example those of the training file; None takes those that the file
            has, in the order of numbers where all are whole numbers, else as text sorts.

    Raises:
        UserError: the file or a column cannot be read, or rows are wrong: the first five are named
            with their lines, the rest are counted.
    """
    name = fspath(source)
    problems = Problems(name)
    wanted = [columns.text, columns.text_pair, columns.id, columns.label, *columns.label_columns]
    present = [column for column in wanted if column is not None]
    if columns.label_columns:
        labels = _columns_as_labels(columns, labels)
    rows: list[tuple[Row, str, str | None, str | None]] = []
    raw_labels: list[Any] = []
    notes = _Notes(name)
    seen: dict[str, int] = {}
    for row in read_rows(name, present, table):
        if row.problem:
            problems.add(row.problem)
            continue
        if row.missing:
            notes.ragged.append(row.origin.line)
            continue
        values = iter(row.values)
        problem, text, pair = _texts(row.origin, columns, values)
        key = f"{next(values)}" if columns.id is not None else None
        if key in ("", "None"):
            problem = problem or f"{row.origin}: column {columns.id!r} is empty; an id is needed"
        if problem is not None:
            problems.add(problem)
            continue
        if not text.strip() or (pair is not None and not pair.strip()):
            if columns.empty == "fail":
                problems.add(
                    f"{row.origin}: a text is empty; fix it, or say empty='skip' or 'keep'"
                )
                continue
            notes.empty.append(row.origin.line)
            if columns.empty == "skip":
                continue
        if key is not None and seen.setdefault(key, row.origin.line) != row.origin.line:
            first = f"{row.origin.unit} {seen[key]}"
            problems.add(f"{row.origin}: the id {key[:80]!r} is that of {first}, too")
            continue
        rows.append((row, text, pair, key))
        raw_labels.append(tuple(values) if columns.label_columns else next(values, None))
    numbers, labels = _labels(name, columns, [row.origin for row, *_ in rows], raw_labels, labels,
                              problems)  # fmt: skip
    problems.check()
    if not rows:
        raise UserError(f"{name} has no examples")
    examples = tuple(
        TextExample(f"{number}" if key is None else key, text, pair, label, row.origin)
        for number, ((row, text, pair, key), label) in enumerate(zip(rows, numbers, strict=True))
    )
    return TextData(examples, labels, notes.warnings(columns.empty))


class _Notes:
    """Lines that were let pass."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.ragged: list[int] = []
        self.empty: list[int] = []

    def warnings(self, empty: str) -> tuple[str, ...]:
        found = []
        if self.ragged:
            what = "rows with more or fewer fields than the first skipped"
            found.append(counted(self._name, what, self.ragged))
        if self.empty:
            what = "rows with an empty text " + ("skipped" if empty == "skip" else "kept")
            found.append(counted(self._name, what, self.empty))
        return tuple(found)


def _texts(
    origin: Origin, columns: TextColumns, values: Iterator[Any]
) -> tuple[str | None, str, str | None]:
    """Return the fault of a row, if any, and the texts."""
    problem = None
    texts: list[str] = []
    for column in (columns.text, columns.text_pair):
        if column is None:
            continue
        value = next(values)
        if not isinstance(value, str):
            what = "nothing" if value is None else f"{value!r:.60}"
            problem = problem or f"{origin}: column {column!r} holds {what}, not text"
            value = ""
        elif "\0" in value:
            problem = problem or f"{origin}: column {column!r} holds a NUL; this is no text"
        texts.append(value)
    return problem, texts[0], texts[1] if len(texts) > 1 else None


# Labels


def _labels(
    name: str,
    columns: TextColumns,
    origins: Sequence[Origin],
    values: Sequence[Any],
    labels: LabelSet | None,
    problems: Problems,
) -> tuple[list[Label], LabelSet | None]:
    """Return the label of each row, None where it is wrong, and the classes."""
    if columns.label is None and not columns.label_columns:
        return [None] * len(values), labels
    if columns.kind == "score":
        if labels is not None:
            raise UserError(f"{name}: a score has no classes, but labels are given")
        parsed = _each(origins, values, lambda o, v: _score(o, v, columns), problems)
        return _all_or_none(name, origins, parsed, problems), None
    if columns.label_columns:
        assert labels is not None
        order = [labels.id(str(column), Origin(name, 1)) for column in columns.label_columns]
        return _each(origins, values, lambda o, v: _flags(o, v, columns, order), problems), labels
    parse = _names if columns.kind == "classes" else _name
    named = _each(origins, values, lambda o, v: parse(o, v, columns), problems)
    if labels is None:
        problems.check()  # labels of rows that are wrong would be missing
        met = [part for value in named if value is not None
               for part in (value if isinstance(value, tuple) else (value,))]  # fmt: skip
        if not met:
            return [None] * len(values), None
        labels = LabelSet.of(met)
        _check_labels(name, columns, labels, len(named))
    known = labels

    def numbered(origin: Origin, value: Any) -> Label:
        if isinstance(value, tuple):
            return tuple(sorted({known.id(part, origin) for part in value}))
        return None if value is None else known.id(value, origin)

    found = _each(origins, named, numbered, problems)
    return _all_or_none(name, origins, found, problems), labels


def _each(
    origins: Sequence[Origin],
    values: Sequence[Any],
    parse: Callable[[Origin, Any], Any],
    problems: Problems,
) -> list[Any]:
    parsed: list[Any] = []
    for origin, value in zip(origins, values, strict=True):
        try:
            parsed.append(parse(origin, value))
        except UserError as error:
            problems.add(error)
            parsed.append(None)
    return parsed


def _all_or_none(
    name: str, origins: Sequence[Origin], values: list[Any], problems: Problems
) -> list[Any]:
    """Drop the labels of a test set, and refuse a row without a label among others."""
    lacks = [origin.line for origin, value in zip(origins, values, strict=True) if value is None]
    if not problems.count and 0 < len(lacks) < len(values):
        problems.add(counted(name, "rows without a label among others that have one", lacks))
    return values


def _check_labels(name: str, columns: TextColumns, labels: LabelSet, rows: int) -> None:
    if len(labels) == 1 and columns.kind == "class":
        raise UserError(
            f"{name}: column {columns.label!r} has only the label {labels.names[0]!r}; give the "
            "labels if there are more, or name another column"
        )
    if len(labels) > max(20, rows // 2):
        raise UserError(
            f"{name}: column {columns.label!r} has {len(labels):,} different labels in {rows:,} "
            f"rows, {labels.names[0][:40]!r} among them. Is it the label? Numbers to predict are "
            "kind='score'; else give the labels"
        )


def _name(origin: Origin, value: Any, columns: TextColumns) -> str | None:
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a parquet column of whole numbers with gaps comes as floats
    if isinstance(value, int):
        return f"{value}"
    if not isinstance(value, str):
        hint = ". Numbers to predict are kind='score'" if isinstance(value, float) else ""
        hint = ". Several labels a row are kind='classes'" if isinstance(value, list) else hint
        raise UserError(
            f"{origin}: column {columns.label!r} holds {value!r:.60}, not a label{hint}"
        )
    if not value.strip():
        raise UserError(f"{origin}: column {columns.label!r} is empty; a label is needed")
    if value != value.strip():
        raise UserError(f"{origin}: the label {value[:80]!r} has blanks around it; take them out")
    return value


def _names(origin: Origin, value: Any, columns: TextColumns) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = [part.strip() for part in value.split(columns.separator)] if value.strip() else []
    parts = value if isinstance(value, list) else [value]
    names = [_name(origin, part, columns) for part in parts]
    if None in names or len(set(names)) != len(names):
        raise UserError(f"{origin}: the labels {value!r:.60} hold one twice, or none in between")
    return tuple(name for name in names if name is not None)


def _score(origin: Origin, value: Any, columns: TextColumns) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str) or "_" in str(value):
            raise ValueError
        score = float(value)
    except (ValueError, OverflowError):
        raise UserError(
            f"{origin}: column {columns.label!r} holds {value!r:.60}, not a number such as 3.5"
        ) from None
    low, high = columns.score_range or (-math.inf, math.inf)
    if not math.isfinite(score) or not low <= score <= high:
        right = f"between {low:g} and {high:g}" if columns.score_range else "that is finite"
        raise UserError(
            f"{origin}: column {columns.label!r} holds {value!r:.60}, not a number {right}"
        )
    return score


def _columns_as_labels(columns: TextColumns, labels: LabelSet | None) -> LabelSet:
    own = LabelSet(tuple(str(column) for column in columns.label_columns))
    if labels is not None and set(labels.names) != set(own.names):
        raise UserError(
            f"the label columns are {', '.join(own.names)}, the labels {', '.join(labels.names)}; "
            "they must be the same"
        )
    return labels or own


def _flags(
    origin: Origin, values: tuple[Any, ...], columns: TextColumns, order: Sequence[int]
) -> tuple[int, ...]:
    held = []
    for value, column, number in zip(values, columns.label_columns, order, strict=True):
        flag = _AS_BOOLEAN.get(str(int(value)) if value in (0.0, 1.0) else str(value))
        if flag is None:
            raise UserError(f"{origin}: column {column!r} holds {value!r:.60}; it must be 0 or 1")
        if flag:
            held.append(number)
    return tuple(sorted(held))

"""Reading columns of tables: CSV, TSV, JSON lines, parquet, and prepared TensorFlow Datasets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bert_jax.errors import UserError, suggestion
from bert_jax.files.tfds import open_tfds
from bert_jax.files.untrusted.compressed import SUFFIXES as COMPRESSED
from bert_jax.files.untrusted.compressed import plain_suffix, read_plain
from bert_jax.files.untrusted.json_file import parse_json
from bert_jax.files.untrusted.tables import csv_records, open_parquet
from bert_jax.files.untrusted.whole_file import decode_text
from bert_jax.tasks.examples import MissingColumn, Origin, listed

MAX_BYTES = 1 << 30
MAX_FIELD = 16 << 20
"""Largest number of characters in a field; a field with an unclosed quote soon exceeds it."""
_DELIMITERS = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "bar"}


@dataclass(frozen=True)
class TableFormat:
    """Format of a table: kind of file, header, quotes, delimiter, and treatment of broken rows."""

    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "tfds"] = "auto"
    """Format of the files; auto detects it by the file name's suffix or the prefix `tfds:`."""
    header: bool | None = None
    """Whether line 1 of CSV or TSV names the columns. None means yes if columns are given by name;
    true or false must be set if columns are given by number."""
    quoting: bool | None = None
    """Whether double quotes may enclose a field of CSV or TSV. None means yes in CSV and no in TSV,
    so that quotes in TSV are part of the text, as in the files of GLUE."""
    delimiter: str = ""
    """Character between the fields. If empty, it is a comma in CSV and a tab in TSV."""
    ragged: Literal["fail", "skip"] = "fail"
    """Treatment of rows with more or fewer fields than the first line."""


class Row(NamedTuple):
    """The requested fields of a row."""

    origin: Origin
    values: tuple[Any, ...]
    """Values in the order of the requested columns; None for a missing optional column."""
    missing: bool = False
    """True for a row to skip: it has too few or too many fields, and `ragged` is skip."""
    problem: str = ""
    """Message about a fault of the row; it begins with the origin. The row then has no values."""


def read_delimited(
    name: str, columns: Sequence[str], table: TableFormat, kind: str, optional: Sequence[str] = ()
) -> Iterator[Row]:
    """Yield the rows of a CSV or TSV file (see `read_rows`)."""
    delimiter = table.delimiter or ("," if kind == "csv" else "\t")
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise UserError(f"{name}: the delimiter is {delimiter!r}; give one character, not a quote")
    quoting = kind == "csv" if table.quoting is None else table.quoting
    text = decode_text(read_plain(Path(name), max_bytes=MAX_BYTES), where=name)
    if "\n" not in text and "\r" in text:
        raise UserError(f"{name}: lines end in carriage returns; save the file with line feeds")
    lines = text.split("\n")
    del text
    while lines and lines[-1] in ("", "\r"):
        lines.pop()
    plain = ((n, line.removesuffix("\r").split(delimiter)) for n, line in enumerate(lines, 1))
    records = iter(_quoted(name, lines, delimiter)) if quoting else plain
    if (first := next(records, None)) is None:
        raise UserError(f"{name} has no rows")
    if table.header is None and all(_number(c) is not None for c in columns if c not in optional):
        raise UserError(
            f"{name}: columns are given by number, so set whether line 1 has their names "
            f"(header=True) or is an example (header=False). Line 1: {listed(first[1])}"
        )
    header = table.header is not False
    positions = [
        None
        if column in optional and not (header and column in first[1])
        else _position(name, column, first[1], header, delimiter, quoting)
        for column in columns
    ]
    width = len(first[1])

    def row(line: int, fields: list[str]) -> Row:
        origin, count = Origin(name, line), len(fields)
        if count == width:
            return Row(origin, tuple([None if at is None else fields[at] for at in positions]))
        if table.ragged == "skip":
            return Row(origin, (), missing=True)
        problem = (
            f"{origin}: {count} field{'s' if count != 1 else ''} where "
            f"{'the header' if header else 'line 1'} has {width}"
            f"{_quote_hint(fields, delimiter, quoting)}"
        )
        return Row(origin, (), problem=problem)

    if not header:
        yield row(*first)
    for line, fields in records:
        yield row(line, fields)


def _quote_hint(fields: list[str], delimiter: str, quoting: bool) -> str:
    mark = _DELIMITERS.get(delimiter, repr(delimiter))
    if not quoting and any(field.startswith('"') for field in fields):
        return "; if quotes enclose fields in this file, set quoting=True"
    if quoting:
        return f"; a text with a {mark} needs double quotes around it"
    return f"; without quoting, a text cannot have a {mark} or a line end"


def _quoted(name: str, lines: list[str], delimiter: str) -> list[tuple[int, list[str]]]:
    hint = "; if quotes are part of the text, set quoting=False"
    records = []  # all are read now, while the csv module's limit is raised
    for line, fields in csv_records(name, lines, MAX_FIELD, delimiter=delimiter, hint=hint):
        # A quoted text may well have line ends and commas, but hardly another delimiter.
        if delimiter != "," and any(delimiter in field and "\n" in field for field in fields):
            mark = _DELIMITERS.get(delimiter, repr(delimiter))
            last = line + sum(field.count("\n") for field in fields)
            raise UserError(
                f"{Origin(name, line)}: a quoted field runs to line {last} and has a {mark} in it; "
                "a stray quote seems to join rows. Remove the quote or, if quotes are part of the "
                "text, set quoting=False"
            )
        records.append((line, fields or [""]))
    return records


def _number(column: str) -> int | None:
    return int(column) if column.isascii() and column.isdigit() and len(column) < 6 else None


def _position(
    name: str, column: str, first: list[str], header: bool, delimiter: str, quoting: bool
) -> int:
    number = _number(column)
    if header and column in first:
        if first.count(column) > 1:
            raise UserError(
                f"{name}: the header has {column!r} {first.count(column)} times; give the column's "
                f"number. The header: {listed(first)}"
            )
        return first.index(column)
    if number is not None:
        if not 1 <= number <= len(first):
            raise MissingColumn(
                column,
                f"{name}: there is no column {number}; columns are numbered from 1 to "
                f"{len(first)}. Line 1: {listed(first)}",
            )
        return number - 1
    if not header:
        raise UserError(
            f"{name}: without a header, give columns as numbers (from 1), not as names such as "
            f"{column!r}. Line 1: {listed(first)}"
        )
    hint = suggestion(column, first)
    if len(first) == 1:
        other = next((mark for mark in "\t;,|" if mark in first[0]), None)
        if other is not None and other != delimiter:
            hint = f" Is the delimiter a {_DELIMITERS[other]} (delimiter={other!r})?"
    elif not quoting and any(field.startswith('"') for field in first):
        hint = " If quotes enclose fields in this file, set quoting=True."
    raise MissingColumn(
        column,
        f"{name}: no column {column!r}. Line 1 was read as the header: {listed(first)}.{hint} If "
        "line 1 is an example, set header=False and give columns by number",
    )


_SUFFIXES = {
    ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip


def read_rows(
    name: str, columns: Sequence[str], table: TableFormat, optional: Sequence[str] = ()
) -> Iterator[Row]:
    """Yield the rows of a table, with the requested columns.

    The source is a file, perhaps compressed (`compressed.SUFFIXES`), or `tfds:NAME:SPLIT`. Columns
    are given by name, in CSV and TSV also by number from 1; a file may lack `optional` columns.
    Values are in the order of `columns`; they are text in CSV and TSV, and have the file's types in
    other formats. A row that has a problem, or that `ragged` skips, has no values. Raise a
    UserError if the file cannot be read, lacks a column, or does not fit the format.
    """
    kind = _kind(name, table)
    if kind in ("csv", "tsv"):
        yield from read_delimited(name, columns, table, kind, optional)
        return
    for field in ("header", "quoting", "delimiter"):
        if getattr(table, field) not in (None, ""):
            raise UserError(f"{name}: {field} works only with csv and tsv; leave it out")
    yield from {"jsonl": _json, "parquet": _parquet, "tfds": _tfds}[kind](name, columns, optional)


def _kind(name: str, table: TableFormat) -> str:
    if name.startswith("tfds:") != (table.format == "tfds") and table.format != "auto":
        raise UserError(
            f"{name}: the format is {table.format!r}; tfds:NAME:SPLIT needs the format 'tfds', and "
            "a file needs another format"
        )
    if table.format != "auto":
        return table.format
    if name.startswith("tfds:"):
        return "tfds"
    if (kind := _SUFFIXES.get(plain_suffix(name))) is None:
        raise UserError(
            f"{name}: the name's suffix does not tell the format (known: {', '.join(_SUFFIXES)}); "
            "set the format to csv, tsv, jsonl or parquet"
        )
    return kind


def _missing(column: str, present: Sequence[str]) -> str:
    there = listed(present) or "none"
    return f"no column {column!r}; there are {there}.{suggestion(column, present)}"


class _Item(Origin):
    """Position in a JSON array."""

    unit = "object"


def _json(name: str, columns: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
    """Read JSON lines, or one array of objects."""
    raw = read_plain(Path(name), max_bytes=MAX_BYTES).removeprefix(b"\xef\xbb\xbf")
    values = _json_lines(name, raw)
    if raw.lstrip()[:1] == b"[":
        array = enumerate(parse_json(raw, where=name), 1)
        values = ((_Item(name, number), value, "") for number, value in array)
    rows = 0
    for origin, value, problem in values:
        if not problem and not isinstance(value, dict):
            problem = f"{origin}: a JSON {type(value).__name__}; expected an object"
        if not problem:
            lacks = [name for name in columns if name not in value and name not in optional]
            rows += 1
            if lacks:
                if rows == 1:  # probably the whole file lacks the column
                    raise MissingColumn(lacks[0], f"{origin}: {_missing(lacks[0], list(value))}")
                problem = f"{origin}: no column {lacks[0]!r}; there are {listed(list(value))}"
        values_of_row = () if problem else tuple([value.get(column) for column in columns])
        yield Row(origin, values_of_row, problem=problem)


def _json_lines(name: str, raw: bytes) -> Iterator[tuple[Origin, Any, str]]:
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        origin = Origin(name, number)
        try:
            yield origin, parse_json(line, where=f"{origin}"), ""
        except UserError as error:  # its message calls this line "line 1"
            yield origin, None, str(error).replace(f"{origin}, line 1", f"{origin}")


def _parquet(name: str, columns: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
    if Path(name).suffix.lower() in COMPRESSED:
        raise UserError(f"{name}: compressed parquet files are not supported; decompress the file")
    with open_parquet(name) as file:
        present = file.schema_arrow.names
        for column in columns:
            if column not in present and column not in optional:
                raise MissingColumn(column, f"{name}: {_missing(column, present)}")
        number = 0
        read = [column for column in dict.fromkeys(columns) if column in present]
        for batch in file.iter_batches(1024, columns=read):
            values = [
                batch.column(column).to_pylist() if column in read else [None] * len(batch)
                for column in columns
            ]
            for number, row in enumerate(zip(*values, strict=True), number + 1):  # noqa: B020
                yield Row(Origin(name, number), row)


def _tfds(name: str, columns: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
    """Read a prepared data set; replace class ids by class names, and -1 (no label) by None."""
    del optional  # a data set's columns are known, so none is optional
    _, dataset, *split = name.split(":", 2)
    if not dataset or not split:
        raise UserError(
            f"{name}: the name or the split is missing; write tfds:NAME:SPLIT, for example "
            "tfds:glue/mrpc:train"
        )
    features, examples, _ = open_tfds(name, dataset, split[0])
    for column in columns:
        if column not in features:
            raise MissingColumn(column, f"{name}: {_missing(column, list(features))}")
    classes = [getattr(features[column], "names", None) for column in columns]
    for number, example in enumerate(examples, 1):
        origin = Origin(name, number)
        try:
            values = tuple(map(_tfds_value, (example[column] for column in columns), classes))
        except UnicodeDecodeError as error:
            yield Row(origin, (), problem=f"{origin}: a text is not UTF-8: {error}")
            continue
        yield Row(origin, values)


def _tfds_value(value: Any, names: Sequence[str] | None) -> Any:
    if isinstance(value, np.ndarray | list):  # sequences of numbers have either type
        return [_tfds_value(item, names) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if names is not None and isinstance(value, int):
        return names[value] if value >= 0 else None
    return value.decode("utf-8") if isinstance(value, bytes) else value

"""CSV and TSV: the fields of every row, as written.

Nothing is guessed and nothing is repaired: a row whose fields cannot be told apart is an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bert_jax.errors import UserError, nearest
from bert_jax.files.untrusted.compressed import read_plain
from bert_jax.files.untrusted.tables import csv_records
from bert_jax.files.untrusted.whole_file import decode_text
from bert_jax.tasks.examples import Origin, listed
from bert_jax.tasks.problems import MissingColumn

MAX_BYTES = 1 << 30
MAX_FIELD = 16 << 20
"""Most characters in a field; an unclosed quote would swallow the rest of the file."""
_DELIMITERS = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "bar"}


@dataclass(frozen=True)
class TableFormat:
    """Format of a table."""

    kind: Literal["auto", "csv", "tsv", "jsonl", "parquet", "tfds"] = "auto"
    """Format; auto goes by the suffix, and `tfds:` at the beginning means a prepared data set."""
    header: bool | None = None
    """Whether line 1 of CSV or TSV names the columns. None: true where the caller names columns;
    required where the caller numbers columns."""
    quoting: bool | None = None
    """Whether a field may stand in double quotes, which are no part of it. None: in CSV yes, in TSV
    no (there quotes are text, as in the files of GLUE)."""
    delimiter: str = ""
    """Character between the fields; empty: a comma in CSV and a tab in TSV."""
    ragged: Literal["fail", "skip"] = "fail"
    """Treatment of rows that have more or fewer fields than the first."""


class Row(NamedTuple):
    """The requested fields of a row."""

    origin: Origin
    values: tuple[Any, ...]
    """Fields; None for an optional column that is missing."""
    missing: bool = False
    """Whether the row has too few or too many fields, which `ragged` permits."""
    problem: str = ""
    """Fault of the row, with its origin; the row then has no values."""


def read_delimited(
    name: str,
    columns: Sequence[str],
    table: TableFormat,
    kind: str,
    optional: Sequence[str] = (),
) -> Iterator[Row]:
    """Read columns of a CSV or TSV file; see `files.read_rows`."""
    delimiter = table.delimiter or ("," if kind == "csv" else "\t")
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise UserError(f"{name}: the delimiter is {delimiter!r}; one character is needed")
    quoting = kind == "csv" if table.quoting is None else table.quoting
    text = decode_text(read_plain(Path(name), max_bytes=MAX_BYTES), where=name)
    if "\n" not in text and "\r" in text:
        raise UserError(f"{name}: lines end in a carriage return alone; save it with line feeds")
    lines = text.split("\n")
    del text
    while lines and lines[-1] in ("", "\r"):
        lines.pop()
    plain = ((n, line.removesuffix("\r").split(delimiter)) for n, line in enumerate(lines, 1))
    records = iter(_quoted(name, lines, delimiter)) if quoting else plain
    first = next(records, None)
    if first is None:
        raise UserError(f"{name} has no rows")
    if table.header is None and all(_number(c) is not None for c in columns if c not in optional):
        raise UserError(
            f"{name}: columns are given by number, so say whether line 1 has their names "
            f"(header=True) or is an example (header=False). It is: {listed(first[1])}"
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
        return "; if quotes hold fields together in this file, say quoting=True"
    if quoting:
        return f"; a text with a {mark} needs double quotes around it"
    return f"; a text cannot hold a {mark} or a line end here"


def _quoted(name: str, lines: list[str], delimiter: str) -> list[tuple[int, list[str]]]:
    hint = "; where quotes are part of the text, say quoting=False"
    records = []  # all are read before the limit of a field goes back
    for line, fields in csv_records(name, lines, MAX_FIELD, delimiter=delimiter, hint=hint):
        if delimiter != ",":
            _refuse_swallowed(Origin(name, line), fields, delimiter)
        records.append((line, fields or [""]))
    return records


def _refuse_swallowed(origin: Origin, fields: list[str], delimiter: str) -> None:
    """Refuse fields with swallowed rows: texts have line ends and commas, but hardly tabs."""
    if any(delimiter in field and "\n" in field for field in fields):
        mark = _DELIMITERS.get(delimiter, repr(delimiter))
        last = origin.line + sum(field.count("\n") for field in fields)
        raise UserError(
            f"{origin}: a quoted field runs to line {last} and holds a {mark}: a stray quote has "
            "joined rows. Where quotes are part of the text, say quoting=False"
        )


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
            f"{name}: without a header columns have numbers (from 1), not names such as "
            f"{column!r}. Line 1: {listed(first)}"
        )
    near = nearest(column, first)
    hint = f" Did you mean {near!r}?" if near else ""
    if len(first) == 1:
        other = next((mark for mark in "\t;,|" if mark in first[0]), None)
        if other is not None and other != delimiter:
            hint = f" Is the delimiter a {_DELIMITERS[other]} (delimiter={other!r})?"
    elif not quoting and any(field.startswith('"') for field in first):
        hint = " If quotes hold fields together in this file, say quoting=True."
    raise MissingColumn(
        column,
        f"{name}: no column {column!r}. Line 1 was read as the header: {listed(first)}.{hint} If "
        "line 1 is an example, say header=False and give columns by number",
    )

"""Reading of texts, JSON lines and tables from files and standard input.

Files of lines are read in constant memory. Tables are read into memory as a whole.
"""

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from bert_jax.errors import UserError
from bert_jax.files.untrusted.compressed import decompress, plain_suffix
from bert_jax.files.untrusted.json_file import parse_json
from bert_jax.files.untrusted.whole_file import decode_text
from bert_jax.files.urls import open_binary
from bert_jax.tasks.examples import MissingColumn, Origin, listed
from bert_jax.tasks.tables import TableFormat, read_rows

STDIN = "-"
Format = Literal["auto", "text", "json", "jsonl", "csv", "tsv", "parquet"]
FORMATS: tuple[Format, ...] = get_args(Format)
MAX_LINE_BYTES = 4 << 20
_MAX_DEPTH = 32
_BLOCK = 1 << 16
_KNOWN: dict[str, Format] = {
    ".txt": "text", ".text": "text", "": "text", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".json": "json", ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".parquet": "parquet",
}  # fmt: skip
_PATIENCE = 0.05
"""Seconds to wait for more input from a pipe before the lines read so far are answered."""
_MOST_PATIENCE = 0.5
"""Longest total wait, in seconds, before the lines read so far are answered anyway."""


@dataclass
class Record:
    """A line or row with its answer, or with the reason why it has no answer."""

    origin: Origin
    fields: dict[str, Any]
    problem: str | None = None
    """Reason why the line cannot be read or answered. None means no problem so far."""
    example: Any = None
    """Result of `Predictor.example`."""
    answer: Any = None
    """Entry of `Predictor.answers`."""
    line: bytes = b""
    """Output line with the answer, if an interrupted run of the same command has written it."""


PAUSE = Record(Origin("", 0), {})
"""Marker between records: no more input has arrived yet, so the records so far are answered now."""


def format_of(source: str, format: Format, other: Format | None = None) -> Format:
    """Return the format of a file. For standard input, the result may still be "auto".

    `other` is the format to assume for an unknown suffix. Raise a UserError if the suffix is
    unknown and `other` is None, or standard input cannot be `format`.
    """
    if source == STDIN:
        if format in ("auto", "text", "jsonl"):
            return format
        raise UserError(f"--format={format}: standard input must be text or jsonl; name a file")
    if format != "auto":
        return format
    suffix = plain_suffix(source)
    if suffix[1:].isdigit():  # log.1, part.00017
        return "text"
    if suffix not in _KNOWN:
        if other is not None:
            return other
        raise UserError(
            f"{source}: the suffix {suffix} is unknown; known are "
            f"{', '.join(filter(None, _KNOWN))} (also compressed: .gz, .xz, .zst). A file "
            f"without a suffix is text. For another name, give --format={'|'.join(FORMATS[1:])}"
        )
    return _KNOWN[suffix]


def read_records(
    source: str, *, format: Format = "auto", fields: Sequence[str] = ("text",),
    names: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None,
    table: TableFormat | None = None, read: Callable[[int], object] = lambda size: None,
) -> Iterator[Record]:  # fmt: skip
    r"""Read the records of a file, in order.

    In JSON lines, each line that is not blank is an object. In plain text, each line is a text,
    even an empty line. Lines end in \n or \r\n. A table has a column per field.

    Also yield `PAUSE` if a pipe has no line ready. The field `problem` of a record is set if a line
    is too long, is not UTF-8, is no JSON object, or lacks a field that `names` has, or if a row has
    too few or too many fields. Raise a UserError if the file cannot be read, its format is unknown,
    or it lacks a column.

    Args:
        source: The file, which may be compressed (.gz, .xz or .zst), or `-` for standard input.
        format: Format. "auto" takes it from the suffix, or from the first line of standard input.
        fields: Names of the fields to read. A line of plain text is the value of the first field.
        names: Map from a field to its name in the file, for fields whose names differ.
        more: Default values of fields that a line lacks.
        table: Options of a CSV or TSV file.
        read: Function that is called after each read with the number of bytes that were read.
    """
    names, more = names or {}, more or {}
    format = format_of(source, format)
    if format in ("csv", "tsv", "json", "parquet"):
        table = replace(table or TableFormat(), format="jsonl" if format == "json" else format)
        yield from _rows(source, table, fields, names, more)
        if os.path.isfile(source):
            read(os.path.getsize(source))
        return
    path = "standard input" if source == STDIN else source
    is_json: bool | None = None if format == "auto" else format == "jsonl"
    number = 0
    with _opened(source, read) as blocks:
        for raw in _lines(blocks):
            if raw == _NOT_READY:
                yield PAUSE
                continue
            number += 1
            if number == 1 and raw is not None:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
                if is_json is None:
                    is_json = raw.lstrip()[:1] == b"{"
            origin = Origin(path, number)
            if raw is None:
                problem = f"{origin}: longer than {MAX_LINE_BYTES:,} bytes, the limit for a line"
                yield Record(origin, {}, problem)
            elif is_json and not raw.strip():
                continue
            else:
                try:
                    given = _fields(raw, origin, is_json, fields[0])
                except UserError as error:
                    yield Record(origin, {}, f"{error}")
                    continue
                found = {ours: given[name] for ours, name in names.items() if name in given}
                named = {n: v for n, v in found.items() if v is not None or n not in more}
                lacks = [n for ours, n in names.items() if n not in given and ours not in more]
                told = None
                if is_json and lacks:
                    there = listed(list(given), 8) or "none"
                    told = f"{origin}: no field {lacks[0]!r}; the fields are {there}"
                kept = {n: v for n, v in given.items() if v is not None or n not in fields[1:]}
                yield Record(origin, {**more, **kept, **named}, told)


def _rows(
    source: str, table: TableFormat, fields: Sequence[str], names: Mapping[str, str],
    more: Mapping[str, Any],
) -> Iterator[Record]:  # fmt: skip
    """Yield the rows of a table. The first field and all fields in `names` must be columns."""
    needed = {"tokens" if "tokens" in names else fields[0], *names}
    columns = {ours: names.get(ours, ours) for ours in (*fields, "id")}
    optional = [theirs for ours, theirs in columns.items() if ours not in needed]
    try:
        for row in read_rows(source, list(columns.values()), table, optional):
            if row.problem or row.missing:
                problem = row.problem or f"{row.origin}: more or fewer fields than in line 1"
                yield Record(row.origin, {}, problem)
                continue
            values = zip(columns, row.values, strict=True)
            given = {n: v for n, v in values if v is not None or (n in needed and n not in more)}
            yield Record(row.origin, {**more, **given})
    except MissingColumn as error:
        ours = next(ours for ours, theirs in columns.items() if theirs == error.column)
        raise UserError(f"{error} (name the column with --columns {ours}=NAME)") from error


@contextmanager
def _opened(source: str, read: Callable[[int], object]) -> Iterator[Iterator[bytes]]:
    """Yield the decompressed content in blocks; a block is empty if a pipe has nothing ready."""
    if source == STDIN:
        try:
            descriptor = sys.stdin.fileno()
        except (OSError, ValueError):  # in a notebook, standard input is not a file
            yield iter(lambda: sys.stdin.buffer.read(_BLOCK), b"")
        else:
            yield _arriving(descriptor)
        return
    with open_binary(source) as file:

        def counted(size: int) -> bytes:
            data: bytes = file.read(min(size, _BLOCK))
            read(len(data))
            return data

        yield decompress(counted, source)


def _arriving(descriptor: int) -> Iterator[bytes]:
    waited = 0.0
    while True:
        begun = time.monotonic()
        ready, _, _ = select.select([descriptor], [], [], _PATIENCE)
        waited += time.monotonic() - begun
        if not ready or waited > _MOST_PATIENCE:
            yield b""
            waited = 0.0
        if not (data := os.read(descriptor, _BLOCK)):
            return
        yield data


_NOT_READY = b"\n"  # differs from every line, since lines contain no line feed


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes | None]:
    """Yield lines without line ends, None for a long line, and `_NOT_READY` for an empty block."""
    rest, is_long = b"", False
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            yield None if is_long or len(line) > MAX_LINE_BYTES else line
            is_long = False
        if len(rest) > MAX_LINE_BYTES + 1:  # + 1, since `rest` may end in a carriage return
            rest, is_long = b"", True
        if not block:
            yield _NOT_READY
    if rest or is_long:
        yield None if is_long or len(rest) > MAX_LINE_BYTES else rest.removesuffix(b"\r")


def _fields(raw: bytes, origin: Origin, is_json: bool | None, name: str) -> dict[str, Any]:
    """Parse a line of JSON as an object, or return a line of plain text as the field `name`."""
    try:
        text = decode_text(raw, where="")
        value = parse_json(raw, where="", max_depth=_MAX_DEPTH) if is_json else {name: text}
    except UserError as error:  # the parsers see one line, so their messages call it "line 1"
        message = f"{error}".removeprefix(", line 1").lstrip(":, ")
        raise UserError(f"{origin}: {message}") from error
    if not isinstance(value, dict):
        raise UserError(f'{origin}: {f"{value!r}"[:40]} is not an object such as {{"text": "..."}}')
    return value

"""Texts and JSON lines from files and standard input, in memory that does not grow with them."""

import gzip
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from bert_jax.errors import UserError
from bert_jax.tasks.examples import Origin
from bert_jax.untrusted.json_file import parse_json
from bert_jax.untrusted.whole_file import decode_text

STDIN = "-"
Format = Literal["auto", "text", "jsonl"]
MAX_LINE_BYTES = 4 << 20
_MAX_DEPTH = 32
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl"}


@dataclass(frozen=True)
class Record:
    """A line, or what is wrong with it."""

    origin: Origin
    fields: dict[str, Any]
    problem: str | None = None


def read_records(
    source: str,
    *,
    format: Format = "auto",
    field: str = "text",
    names: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
    read: Callable[[int], object] = lambda size: None,
) -> Iterator[Record]:
    r"""The lines of a file, in order.

    JSON lines: each line that is not blank is an object. Plain text: each line is a text, an empty
    one too. Lines end in \n or \r\n.

    Args:
        source: The file, also compressed as .gz; `-` for standard input.
        format: auto tells by the suffix .jsonl, of standard input by its first line.
        field: What a line of plain text is.
        names: Field as the verb knows it to its name in the file.
        more: Fields that every line has unless it says otherwise.
        read: Told how many bytes each line had.

    Yields:
        Records; one with a problem where the line is too long, no UTF-8, no text or no JSON object.

    Raises:
        UserError: The file cannot be opened or read.
    """
    path = "standard input" if source == STDIN else source
    with _opened(source) as file:
        is_json: bool | None = None
        if format != "auto":
            is_json = format == "jsonl"
        elif source != STDIN:
            stem = source.removesuffix(".gz")
            is_json = any(stem.endswith(suffix) for suffix in _SUFFIXES)
        for number, raw in enumerate(_lines(file, path, read), 1):
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
                    given = _object(raw, origin) if is_json else {field: _text(raw, origin)}
                except UserError as error:
                    yield Record(origin, {}, f"{error}")
                    continue
                yield Record(origin, {**(more or {}), **_renamed(given, names or {})})


@contextmanager
def _opened(source: str) -> Iterator[Any]:
    if source == STDIN:
        yield sys.stdin.buffer
        return
    try:
        file = (gzip.open if source.endswith(".gz") else open)(source, "rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{source} cannot be read: {reason}") from error
    with file:
        yield file


def _lines(
    file: Any, path: str, read: Callable[[int], object]
) -> Iterator[bytes | None]:  # fmt: skip
    """Lines without their ends; None for one that is too long."""
    while True:
        try:
            raw = file.readline(MAX_LINE_BYTES + 2)
            read(len(raw))
            if not raw:
                return
            whole = raw.endswith(b"\n") or len(raw) < MAX_LINE_BYTES + 2
            while not whole:
                rest = file.readline(1 << 20)
                read(len(rest))
                whole = not rest or rest.endswith(b"\n")
                raw = b""
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        yield raw.removesuffix(b"\n").removesuffix(b"\r") if raw else None


def _text(raw: bytes, origin: Origin) -> str:
    # `decode_text` counts lines of what it is given, which is always one.
    try:
        return decode_text(raw, where="")
    except UserError as error:
        raise UserError(f"{origin}{f'{error}'.removeprefix(', line 1')}") from error


def _object(raw: bytes, origin: Origin) -> dict[str, Any]:
    _text(raw, origin)
    try:
        value = parse_json(raw, where="", max_depth=_MAX_DEPTH)
    except UserError as error:
        raise UserError(f"{origin}: {f'{error}'.removeprefix(', line 1').lstrip(': ')}") from error
    if not isinstance(value, dict):
        raise UserError(f'{origin}: {f"{value!r}"[:40]} is no object such as {{"text": "..."}}')
    return value


def _renamed(given: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {**given, **{ours: given[theirs] for ours, theirs in names.items() if theirs in given}}

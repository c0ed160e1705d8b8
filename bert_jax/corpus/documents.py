"""Documents of a source: what reading them needs and yields."""

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from bert_jax.corpus.lines import MAX_LINE_BYTES
from bert_jax.errors import UserError, nearest


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read."""

    field: str = "text"
    """The field of a JSON line, parquet row or TFDS example that holds the text."""
    line_documents: bool = False
    """Text files: each line is a document, in place of blank lines between documents."""
    max_line_bytes: int = MAX_LINE_BYTES
    """Refuse longer lines: they are mostly binary files or a missing line end."""
    max_document_chars: int = 64 << 20
    """Refuse longer documents: they are mostly files without blank lines."""


@runtime_checkable
class Source(Protocol):
    """One place that text comes from.

    `documents` yields each document as paragraphs joined by newlines, none of them blank. `size`
    and `bytes_read` count the same bytes (of the file as it lies on disk), for a progress bar.
    """

    name: str
    size: int
    bytes_read: int

    def documents(self) -> Iterator[str]:
        """Read the source from its beginning; each call starts over."""

    def record(self) -> dict[str, Any]:
        """After reading: what identifies the content, for `corpus.json`."""


def paragraphs(text: str) -> str:
    """Return a document's text as its paragraphs joined by newlines: stripped, none blank."""
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    return "\n".join(lines)


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def field_text(example: dict[str, Any], field: str, where: str) -> str:
    """Return the text in a field of an example, with lone surrogates (from JSON escapes) replaced.

    Raises:
        UserError: no such field, or it holds something else; begins with `where`.
    """
    value = example.get(field)
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where}: the field {field!r} is not UTF-8: byte 0x{value[error.start]:02x} at "
                f"byte {error.start} of the field."
            ) from error
    if isinstance(value, str):
        value = value.replace("\0", " ")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value
    if field in example:
        raise UserError(f"{where}: the field {field!r} holds {reprlib.repr(value):.40}, not text.")
    raise UserError(f"{where}: {missing_field(field, [str(key) for key in example])}")


def missing_field(field: str, present: list[str]) -> str:
    """Says that a field is not there, which ones are, and the nearest of them."""
    present = [name[:40] for name in present[:1000]]  # one object may have a million
    near = nearest(field, present)
    hint = f" Did you mean {near!r}?" if near else ""
    shown = ", ".join(present[:20]) or "none"
    return f"no field {field!r}; the fields present are {shown}.{hint}"

"""Documents of a source: what reading them needs and yields."""

import hashlib
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bert_jax.errors import UserError, nearest
from bert_jax.tokenization.tokenizer import replace_surrogates


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read."""

    field: str = "text"
    """Field of a JSON line, parquet row or TFDS example that holds the text."""
    line_documents: bool = False
    """Text files: each line is a document, in place of blank lines between documents."""
    max_line_bytes: int = 16 << 20
    """Longest line; longer ones are mostly binary files or a missing line end."""
    max_document_chars: int = 64 << 20
    """Longest document; longer ones are mostly files without blank lines."""


class Source(ABC):
    """One place that text comes from; `size` and `bytes_read` count bytes of the file on disk."""

    def __init__(self, name: str, size: int = 0, field: str | None = None) -> None:
        self.name, self.size, self.bytes_read = name, size, 0
        self._field = field
        self._digest = hashlib.sha256()

    @abstractmethod
    def _texts(self) -> Iterator[str]:
        """Read documents from the beginning; those without text are empty."""

    def documents(self) -> Iterator[str]:
        """Read the source from its beginning: documents are non-blank paragraphs, one a line.

        Raises:
            UserError: the source cannot be read, is damaged or holds no text.
        """
        self.bytes_read, self._digest = 0, hashlib.sha256()
        found = False
        for text in self._texts():
            if text:
                found = True
                yield text
        if not found:
            field = f" in the field {self._field!r}" if self._field else ""
            what = f"holds no text{field}" if self.size else "is empty"
            raise UserError(f"{self.name} {what}. Take it out of the input, or fetch it again.")

    def record(self) -> dict[str, Any]:
        """Return what identifies the content, for `corpus.json`; after reading."""
        return {"name": self.name, "bytes": self.size, "sha256": self._digest.hexdigest()}


def paragraphs(text: str) -> str:
    """Return a document's text as its paragraphs joined by newlines: stripped, none blank."""
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    return "\n".join(lines)


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
        return replace_surrogates(value.replace("\0", " "))
    if field in example:
        raise UserError(f"{where}: the field {field!r} holds {reprlib.repr(value):.40}, not text.")
    raise UserError(f"{where}: {missing_field(field, [str(key) for key in example])}")


def missing_field(field: str, present: list[str]) -> str:
    """Say that a field is not there, which ones are, and the nearest of them."""
    present = [name[:40] for name in present[:1000]]  # one object may have a million
    near = nearest(field, present)
    hint = f" Did you mean {near!r}?" if near else ""
    listed = ", ".join(present[:20]) or "none"
    return f"no field {field!r}; the fields present are {listed}.{hint}"

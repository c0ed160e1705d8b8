"""Documents, and the sources that they come from."""

import contextlib
import copy
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from typing_extensions import override

from bert_jax.errors import UserError, suggestion
from bert_jax.files.urls import FileState, file_state
from bert_jax.tokenization.tokenizer import replace_surrogates

NO_FIELDS: Mapping[str, Any] = {}
"""Fields of a document that has only a text."""


class Document(NamedTuple):
    """A text from a source."""

    text: str
    """Non-blank paragraphs, stripped, joined by newlines."""
    source: str
    number: int
    """Number, from 1, among the non-empty documents of the source, or of its part."""
    fields: Mapping[str, Any] = NO_FIELDS
    """Further fields, such as a language, which `ReadOptions.keep` names or the format has."""


@dataclass(frozen=True)
class ReadOptions:
    """Settings for reading sources."""

    field: str = "text"
    """Field of a JSON line, parquet row or TFDS example that holds the text."""
    keep: tuple[str, ...] = ()
    """Names of further fields that a document keeps if its row has them."""
    line_documents: bool = False
    """Whether each line of a text file is a document; otherwise blank lines separate documents."""
    newline_only: bool = False
    r"""Whether lines of a text file end only in \n or \r\n, as two aligned files need."""
    max_line_bytes: int = 16 << 20
    """Longest line in bytes; a longer one usually means a binary file or missing line ends."""
    max_document_chars: int = 64 << 20
    """Longest document in characters; a longer one usually means a file without blank lines."""

    def kept(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a row that its document keeps."""
        return {name: row[name] for name in self.keep if name in row} if self.keep else NO_FIELDS


class Source(ABC):
    """A source of text; `size` and `bytes_read` count bytes of the file on disk, or `unit`s."""

    unit = "bytes"
    """Unit of `size` and `bytes_read`, also its name in `record`."""
    options: ReadOptions | None = None
    """Options that the content depends on; None if it depends on no options."""
    state: FileState | None = None
    """Size and version of the file when the source was named; None if there is no file."""
    part: tuple[int, int] | None = None
    """Begin and end of the part to read, in bytes or row groups; None reads everything."""

    def __init__(self, name: str, size: int = 0, field: str = "") -> None:
        self.name, self.size, self.bytes_read = name, size, 0
        self._field = field
        self._details: dict[str, Any] = {"field": field} if field else {}
        self._sha256 = ""

    @abstractmethod
    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield texts, maybe empty, with their fields; also set `_sha256` and `bytes_read`."""

    def documents(self) -> Generator[Document, None, None]:
        """Yield the documents of the source, from its beginning.

        Raises:
            UserError: The source cannot be read, is damaged, holds no text, or has changed since
                it was named.
        """
        self.bytes_read, number = 0, 0
        self._check_state()
        for text, fields in self._rows():
            if text:
                number += 1
                yield Document(text, self.name, number, fields)
        self._check_state()
        if not number and self.part is None:
            what = "holds no text" if self.size else "is empty"
            what += f" in the field {self._field!r}" if self.size and self._field else ""
            raise UserError(f"{self.name} {what}. Take it out of the input, or fetch it again.")

    def texts(self) -> Iterator[str]:
        """Return an iterator over the texts of `documents`."""
        return (document.text for document in self.documents())

    def divided(self, size: int) -> Sequence["Source"]:
        """Divide the source into sources of about `size` bytes each.

        Only the text at the cuts is read. A source that must be read from its start stays whole.
        """
        return [self]

    def head(self, size: int) -> "Source":
        """Return a source with about the first `size` bytes of this one, at least one document."""
        return _Head(self, size)

    def _of(self, part: tuple[int, int], size: int) -> "Source":
        """Return a copy that reads only `part`, which has `size` bytes."""
        other = copy.copy(self)
        other.part, other.size = part, size
        return other

    def _check_state(self) -> None:
        """Raise a UserError if the file has changed since the source was named."""
        if self.state is not None and (now := file_state(self.name)) != self.state:
            raise UserError(
                f"{self.name} changed while the corpus was built: it had {self.state.size:,} bytes "
                f"and has {now.size:,} (version {self.state.version}, now {now.version}). Wait "
                "until nothing writes to it, and rerun the command."
            )

    def identity(self) -> dict[str, Any]:
        """Return the values that determine the content, without reading it."""
        options = asdict(self.options) if self.options else None
        return {"name": self.name, "state": self.state, "part": self.part, "options": options}

    def record(self) -> dict[str, Any]:
        """Return the record that identifies the content in `corpus.json`; call it after reading."""
        found: dict[str, Any] = {"name": self.name, self.unit: self.size}
        if self._sha256:
            found["sha256"] = self._sha256
        elif self.state is not None:  # only a part of the file was read
            found["version"] = self.state.version
        part = {} if self.part is None else {"part": list(self.part)}
        return found | part | self._details


class _Head(Source):
    """The first documents of a source that is read from its beginning."""

    def __init__(self, source: Source, limit: int) -> None:
        super().__init__(source.name, source.size)
        self._source, self._limit = source, limit

    @override
    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        complete = 0  # bytes whose documents were all yielded; the source reads ahead of this
        with contextlib.closing(self._source.documents()) as documents:
            for document in documents:
                if self._source.bytes_read != complete:
                    if self.bytes_read >= self._limit:
                        return
                    self.bytes_read, complete = complete, self._source.bytes_read
                yield document.text, document.fields
        self.bytes_read = self._source.bytes_read


def paragraphs(text: str) -> str:
    """Return the paragraphs of a text, stripped and without blank ones, joined by newlines."""
    return "\n".join(filter(None, map(str.strip, text.splitlines())))


def field_text(example: Mapping[str, Any], field: str) -> str:
    """Return the text in a field, with lone surrogates (from JSON escapes) and NULs replaced.

    Raises:
        UserError: The field is missing, or holds something other than text in UTF-8.
    """
    value = example.get(field)
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"the field {field!r} is not UTF-8: byte 0x{value[error.start]:02x} at "
                f"byte {error.start} of the field."
            ) from error
    if isinstance(value, str):
        return replace_surrogates(value.replace("\0", " "))
    if field in example:
        raise UserError(f"the field {field!r} holds {reprlib.repr(value):.40}, not text.")
    raise UserError(missing_field(field, [str(key) for key in example]))


def missing_field(field: str, present: list[str]) -> str:
    """Return a message that a field is missing, with the names present and the nearest name."""
    present = [name[:40] for name in present[:1000]]  # one object may have a million
    hint = suggestion(field, present)
    return f"no field {field!r}; the fields present are {', '.join(present[:20]) or 'none'}.{hint}"

"""Documents, and the base class of the sources that they are read from."""

import contextlib
import copy
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from typing_extensions import override

from bert_jax.errors import UserError, suggestion
from bert_jax.files.urls import FileState, file_state
from bert_jax.tokenization.tokenizer import replace_surrogates

NO_FIELDS: Mapping[str, Any] = {}
"""Empty mapping, for documents that have no field but their text."""


class Document(NamedTuple):
    """A text, and where it comes from."""

    text: str
    """Text of the document: its non-blank paragraphs, stripped and joined by newlines."""
    source: str
    """Name of the source."""
    number: int
    """Position, from 1, among the non-empty documents of the source (or of the part it reads)."""
    fields: Mapping[str, Any] = NO_FIELDS
    """Further fields, such as a language, which `ReadOptions.keep` or the file format set."""


@dataclass(frozen=True)
class ReadOptions:
    """Settings for reading sources."""

    field: str = "text"
    """Name of the field that holds the text: a JSON key, a column of a table, or a TFDS feature."""
    keep: tuple[str, ...] = ()
    """Names of further fields that are copied to the document if its row has them; * means all."""
    line_documents: bool = False
    """Whether each line of a text file is a document; otherwise blank lines separate documents."""
    newline_only: bool = False
    r"""Whether only \n and \r\n end lines of a text file; files aligned line by line need this."""
    max_line_bytes: int = 16 << 20
    """Longest allowed line in bytes; longer lines usually mean a binary file, or no line ends."""
    max_document_chars: int = 64 << 20
    """Longest allowed document in characters; longer documents usually mean missing blank lines."""

    def kept(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a row that are copied."""
        return {name: row[name] for name in self.kept_names(row)} if self.keep else NO_FIELDS

    def kept_names(self, present: Iterable[str]) -> list[str]:
        """Return the names in `present` whose fields are copied; * does not mean the text."""
        rest = "*" in self.keep
        return [name for name in present if name in self.keep or (rest and name != self.field)]


class Source(ABC):
    """A source of text, such as a file or a data set.

    `size` is the amount of data, and `bytes_read` is how much of the data has been read. Both are
    counted in `unit`: bytes of the stored (perhaps compressed) file, or examples.
    """

    unit = "bytes"
    """Unit of `size` and `bytes_read`; also the key of the size in `record`."""
    options: ReadOptions | None = None
    """Options that the content depends on; None if the content depends on no options."""
    state: FileState | None = None
    """Size and version of the file when this object was created; None if there is no file."""
    part: tuple[int, int] | None = None
    """Start and end of the part to read, in bytes or parquet row groups; None means everything."""

    def __init__(self, name: str, size: int = 0, field: str = "") -> None:
        self.name, self.size, self.bytes_read = name, size, 0
        self._field = field
        self._details: dict[str, Any] = {"field": field} if field else {}
        self._sha256 = ""

    @abstractmethod
    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield texts, which may be empty, with their fields; also set `_sha256`, `bytes_read`."""

    def documents(self) -> Generator[Document, None, None]:
        """Yield the documents of the source, from its beginning.

        Raises:
            UserError: The source cannot be read, is damaged, holds no text, or has since changed.
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

        Only text at the cuts is read. A source that must be read from its beginning stays whole.
        """
        return [self]

    def head(self, size: int) -> "Source":
        """Return a source of about the first `size` bytes (or examples), at least one document."""
        return _Head(self, size)

    def _of(self, part: tuple[int, int], size: int) -> "Source":
        """Return a copy that reads only `part`, which has `size` bytes."""
        other = copy.copy(self)
        other.part, other.size = part, size
        return other

    def _check_state(self) -> None:
        """Raise a UserError if the file has changed since this object was created."""
        if self.state is not None and (now := file_state(self.name)) != self.state:
            raise UserError(
                f"{self.name} changed while the corpus was built: it had {self.state.size:,} bytes "
                f"and now has {now.size:,} (version {self.state.version}, now {now.version}). Wait "
                "until nothing writes to the file, and rerun the command."
            )

    def identity(self) -> dict[str, Any]:
        """Return the values that determine the content; the content itself is not read."""
        options = asdict(self.options) if self.options else None
        return {"name": self.name, "state": self.state, "part": self.part, "options": options}

    def record(self) -> dict[str, Any]:
        """Return the entry of `corpus.json` that identifies the content; call it after reading."""
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
        complete = 0  # bytes whose documents were all yielded; the source has read further
        with contextlib.closing(self._source.documents()) as documents:
            for document in documents:
                if self._source.bytes_read != complete:
                    if self.bytes_read >= self._limit:
                        return
                    self.bytes_read, complete = complete, self._source.bytes_read
                yield document.text, document.fields
        self.bytes_read = self._source.bytes_read


def paragraphs(text: str) -> str:
    """Return the paragraphs (non-blank lines) of a text, stripped and joined by newlines."""
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
                f"offset {error.start} in the field."
            ) from error
    if isinstance(value, str):
        return replace_surrogates(value.replace("\0", " "))
    if field in example:
        raise UserError(f"the field {field!r} holds {reprlib.repr(value):.40}, not text.")
    raise UserError(missing_field(field, [str(key) for key in example]))


def missing_field(field: str, present: list[str]) -> str:
    """Return the error message for a missing field: fields present, and the nearest name."""
    present = [name[:40] for name in present[:1000]]  # one object may have a million
    hint = suggestion(field, present)
    return f"no field {field!r}; the fields present are {', '.join(present[:20]) or 'none'}.{hint}"

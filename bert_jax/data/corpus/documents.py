"""Documents, and the base class of their sources."""

import contextlib
import copy
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

from typing_extensions import override

from bert_jax.data.corpus.intake import BAD_SAMPLES, ON_BAD, QUARANTINE, DropReport
from bert_jax.errors import BadRecord, UserError, suggestion
from bert_jax.files.urls import FileState, file_state
from bert_jax.tokenization.tokenizer import replace_surrogates

NO_FIELDS: Mapping[str, Any] = {}  # fields of documents that have only a text
_PIECES = re.compile(r"(?s:.{1,1048576})[^\n]*\n?")  # pieces of a long text, cut at line ends


class Document(NamedTuple):
    """A text, and where it comes from."""

    text: str
    """Text of the document: its non-blank paragraphs, stripped and joined by newlines."""
    source: str
    number: int
    """Record's number, from 1, in the source or its part; lost records count, empty ones do not."""
    fields: Mapping[str, Any] = NO_FIELDS
    """Further fields, such as a language, which `ReadOptions.keep` or the file format set."""


Row: TypeAlias = tuple[str, Mapping[str, Any]] | BadRecord
"""Text of a record, which may be empty, and its further fields; or the error in the record."""


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
    on_bad: str = "stop"
    """Reaction, one of `ON_BAD`, to a record that is damaged or exceeds these limits."""
    most_bad: float = 0.01
    """Share of bad records above which reading stops, whatever `on_bad` is."""

    def __post_init__(self) -> None:
        """Raise a UserError if `on_bad` is unknown, or `most_bad` is not from 0 to 1."""
        if self.on_bad not in ON_BAD or not 0 <= self.most_bad <= 1:
            raise UserError(
                f"on_bad is {self.on_bad}:{self.most_bad:g}; it must be {', '.join(ON_BAD)}, and a "
                "share after a colon from 0 to 1, as in skip:0.05."
            )

    def kept(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a row that `keep` selects, with bytes (texts of TFDS) decoded."""
        if not self.keep:
            return NO_FIELDS
        kept = ((name, row[name]) for name in self.kept_names(row))
        return {k: v.decode(errors="replace") if isinstance(v, bytes) else v for k, v in kept}

    def kept_names(self, present: Iterable[str]) -> list[str]:
        """Return the names that `keep` selects from `present`; * selects all but the text."""
        rest = "*" in self.keep
        return [name for name in present if name in self.keep or (rest and name != self.field)]


class Source(ABC):
    """A source of text, such as a file or a data set."""

    unit = "bytes"
    """Unit of `size` and `bytes_read`: "bytes" (of the stored file, even if compressed) or
    "examples". `record` uses the unit as the key of the size."""
    options: ReadOptions | None = None
    """Options that the content depends on, if any."""
    state: FileState | None = None
    """Size and version of the file when this object was created; None if there is no file."""
    part: tuple[int, int] | None = None
    """Start and end of the part to read, in bytes or parquet row groups; None means everything."""

    def __init__(self, name: str, size: int = 0, field: str = "") -> None:
        self.name, self.size, self.bytes_read, self.bad = name, size, 0, DropReport()
        self._field = field
        self._details: dict[str, Any] = {"field": field} if field else {}
        self._sha256 = ""

    @abstractmethod
    def _rows(self) -> Iterator[Row]:
        """Yield records; set `_sha256` and `bytes_read`. Raise a BadRecord if the rest is lost."""

    def documents(self, *, gaps: bool = False) -> Generator[Document, None, None]:
        """Yield the documents of the source, from its beginning, and count its records in `bad`.

        With `gaps`, a document without text replaces each bad record. Raise a UserError if the
        source cannot be read or has since changed, or too many records are bad. Raise a BadRecord
        if a record is bad, and `ReadOptions.on_bad` says to stop.
        """
        keeps = self.options is not None and self.options.on_bad == QUARANTINE
        self.bytes_read, self.bad = 0, DropReport(BAD_SAMPLES * keeps)
        self._check_state()
        for row in self._all_rows():
            if isinstance(row, BadRecord):
                self._lose(row)
                for _ in range(row.count * gaps):
                    yield Document("", self.name, self.bad.records)
            elif row[0]:
                self.bad.records += 1
                yield Document(row[0], self.name, self.bad.records, row[1])
        self._check_state()
        if not self.bad.records and self.part is None:
            what = "holds no text" if self.size else "is empty"
            what += f" in the field {self._field!r}" if self.size and self._field else ""
            told = f"{self.name} {what}. Take it out of the input, or fetch it again."
            self._lose(BadRecord(told, "empty"))

    def _all_rows(self) -> Iterator[Row]:
        try:
            yield from self._rows()
        except BadRecord as error:
            error.unread = max(0, self.size - self.bytes_read)
            self.bytes_read = self.size
            yield error

    def _lose(self, bad: BadRecord) -> None:
        if self.options is None or self.options.on_bad == "stop":
            raise bad
        self.bad.lose(bad, self.name)
        self.bad.check(self.options.most_bad)

    def _place(self, number: int) -> str:
        """Return the place of a record in the source, for messages."""
        return f"row {number}"

    def _row(self, example: Mapping[str, Any], number: int, data: bytes | str = b"") -> Row:
        """Return the text and fields of example `number`, or a BadRecord that quotes `data`."""
        assert self.options is not None
        field, most = self.options.field, self.options.max_document_chars
        value, reason = example.get(field), "no-text"
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError as error:
                found, reason = value[error.start], "not-utf8"
                told = f"the field {field!r} is not UTF-8: byte 0x{found:02x} at {error.start}."
        if isinstance(value, str) and len(value) <= most:
            text = replace_surrogates(value.replace("\0", " "))
            return paragraphs(text), self.options.kept(example)
        if isinstance(value, str):
            told = f"the field {field!r} has {len(value):,} characters; the limit is {most:,}."
            data, reason = value[:most], "too-long"
        elif field not in example:
            told = missing_field(field, [str(key) for key in example])
        elif reason == "no-text":
            told = f"the field {field!r} holds {reprlib.repr(value):.40}, not text."
        told = f"{self.name}, {self._place(number)}: {told}"
        return BadRecord(told, reason, data or f"{dict(example)}")

    def texts(self) -> Iterator[str]:
        """Yield the texts of `documents`."""
        return (document.text for document in self.documents())

    def divided(self, size: int) -> Sequence["Source"]:
        """Divide the source, if it can be cut, into sources of about `size` bytes each."""
        return [self]

    def head(self, size: int) -> "Source":
        """Return a source of about the first `size` bytes (or examples), at least one document."""
        first, *others = self.divided(size)
        return first if others or self.size <= size else Head(self, size)

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
        options = asdict(self.options) if self.options else {}
        for name in ("on_bad", "most_bad"):  # they matter only if there are bad records
            options.pop(name, None)
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


class Head(Source):
    """The first documents of a source that is read from its beginning."""

    def __init__(self, source: Source, limit: int) -> None:
        super().__init__(source.name, source.size)
        self._source, self._limit = source, limit

    @override
    def _rows(self) -> Iterator[Row]:
        complete = 0  # bytes whose documents were all yielded; the source has read further
        with contextlib.closing(self._source.documents()) as documents:
            for document in documents:
                if self._source.bytes_read != complete:
                    self.bytes_read, complete = complete, self._source.bytes_read
                    if self.bytes_read >= self._limit:
                        return
                yield document.text, document.fields
        self.bytes_read = self._source.bytes_read


def paragraphs(text: str) -> str:
    """Return the paragraphs (non-blank lines) of a text, stripped and joined by newlines."""
    # Work on pieces, since a list of all lines may take 40 times the memory of the text.
    pieces = _PIECES.findall(text) if len(text) > 1 << 20 else [text]
    found = ("\n".join(filter(None, map(str.strip, each.splitlines()))) for each in pieces)
    return "\n".join(filter(None, found))


def missing_field(field: str, present: list[str]) -> str:
    """Return the error message for a missing field; it lists the fields and the nearest name."""
    present = [name[:40] for name in present[:1000]]  # one object may have a million
    hint = suggestion(field, present)
    return f"no field {field!r}; the fields present are {', '.join(present[:20]) or 'none'}.{hint}"

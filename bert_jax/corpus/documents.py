"""Documents of a source, and of text and JSON lines files, in memory of a fixed size."""

import hashlib
import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bert_jax.errors import UserError, nearest
from bert_jax.tokenization.tokenizer import replace_surrogates
from bert_jax.untrusted.compressed import SUFFIXES as COMPRESSED
from bert_jax.untrusted.compressed import decompress

_MAGIC = {
    b"\x1f\x8b": "gzip-compressed (name it .gz)",
    b"\xfd7zXZ\x00": "xz-compressed (name it .xz)",
    b"\x28\xb5\x2f\xfd": "zstd-compressed (name it .zst)",
    b"BZh": "bzip2-compressed (decompress it first)",
    b"PK\x03\x04": "like a zip archive (unpack it first)",
    b"%PDF": "like a PDF document (extract its text first)",
    b"PAR1": "like a parquet file (name it .parquet)",
    b"\xff\xfe": "like UTF-16 (convert it: iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "like UTF-16 (convert it: iconv -f UTF-16 -t UTF-8)",
}


_JSON_TYPES = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}

_Blocks = Iterable[tuple[int, list[str]]]


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read."""

    field: str = "text"
    """Field of a JSON line, parquet row or TFDS example that holds the text."""
    line_documents: bool = False
    """Text files: each line is a document, in place of blank lines between documents."""
    newline_only: bool = False
    r"""Text files: lines end in \n or \r\n alone, as where two files are aligned line by line."""
    max_line_bytes: int = 16 << 20
    """Longest line; longer ones are mostly binary files or a missing line end."""
    max_document_chars: int = 64 << 20
    """Longest document; longer ones are mostly files without blank lines."""


class Source(ABC):
    """One place that text comes from; `size` and `bytes_read` count bytes of the file on disk."""

    unit = "bytes"
    """Unit of `size` in `record`."""

    def __init__(self, name: str, size: int = 0, field: str = "") -> None:
        self.name, self.size, self.bytes_read = name, size, 0
        self._field = field
        self._details: dict[str, Any] = {"field": field} if field else {}
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
        found = {"name": self.name, self.unit: self.size, "sha256": self._digest.hexdigest()}
        return found | self._details


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


class FileSource(Source):
    """A text or JSON lines file, possibly compressed."""

    def __init__(self, name: str, options: ReadOptions, *, is_json: bool = False) -> None:
        super().__init__(name, Path(name).stat().st_size)
        self._options, self.is_json = options, is_json
        self._lone = " " if options.newline_only else "\n"  # in the place of a \r alone

    def _texts(self) -> Iterator[str]:
        blocks = self._read()
        return self._json_texts(blocks) if self.is_json else self._plain_texts(blocks)

    def lines(self) -> Iterator[str]:
        """Read all lines from the beginning, blank ones too, without their ends.

        Raises:
            UserError: the file cannot be read or is not text.
        """
        self.bytes_read, self._digest = 0, hashlib.sha256()
        for _, lines in self._read():
            yield from lines

    def _read(self) -> _Blocks:
        try:
            with open(self.name, "rb") as file:

                def read(size: int) -> bytes:
                    data = file.read(size)
                    self.bytes_read += len(data)
                    self._digest.update(data)
                    return data

                yield from self._blocks(decompress(read, self.name))
        except OSError as error:
            where = f" beyond byte {self.bytes_read}" if self.bytes_read else ""
            raise UserError(f"cannot read {self.name}{where}: {error.strerror}.") from error

    def _plain_texts(self, blocks: _Blocks) -> Iterator[str]:
        if self._options.line_documents:
            for _, lines in blocks:
                yield from (line.strip() for line in lines)
            return
        document: list[str] = []
        size = 0
        begin = 1
        for number, lines in blocks:
            for position, line in enumerate(lines):
                stripped = line.strip()
                if stripped:
                    if not document:
                        begin = number + position
                    document.append(stripped)
                    size += len(stripped)
                    if size > self._options.max_document_chars:
                        raise UserError(
                            f"{self.name}, line {begin}: the document that begins here is longer "
                            f"than {self._options.max_document_chars:,} characters. Documents are "
                            "divided by blank lines; put some in, or read each line as a document "
                            "(line_documents)."
                        )
                elif document:
                    yield "\n".join(document)
                    document = []
                    size = 0
        yield "\n".join(document)

    def _json_texts(self, blocks: _Blocks) -> Iterator[str]:
        field = self._options.field
        for number, lines in blocks:
            for position, line in enumerate(lines):
                if not line or line.isspace():
                    continue
                where = f"{self.name}, line {number + position}"
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    detail = error if isinstance(error, ValueError) else "nested too deeply"
                    raise UserError(
                        f"{where}: not JSON: {detail}. Each line of a .jsonl file is one JSON "
                        f"object; it starts {line[:40]!r}."
                    ) from error
                if not isinstance(value, dict):
                    kind = _JSON_TYPES.get(type(value), "null")
                    raise UserError(
                        f"{where}: a JSON {kind}, not an object with a field {field!r}."
                    )
                yield paragraphs(field_text(value, field, where))

    def _blocks(self, content: Iterable[bytes]) -> _Blocks:
        r"""Return the lines of a text file, in blocks.

        UTF-8 with or without a byte order mark; lines end in \n, \r\n or \r (`newline_only`: a \r
        alone becomes a space). A stray NUL becomes a space. A block has the number of its first
        line (from 1) and its lines without their ends.

        Raises:
            UserError: not UTF-8, mostly binary, a line too long; names file, line and byte.
        """
        limit = self._options.max_line_bytes
        rest = b""
        line = 1
        offset = 0  # of `rest` in the decompressed content, in bytes
        for data in content:
            whole = rest + data
            # The last \r may be the first half of a \r\n that the next block completes.
            cut = whole.rfind(b"\n", len(rest)) + 1
            if not self._options.newline_only:
                cut = max(cut, whole.rfind(b"\r", max(0, len(rest) - 1), -1) + 1)
            if not cut:
                if len(whole) > limit:
                    self._refuse_long(line, len(whole))
                rest = whole
                continue
            lines = self._decode(whole[:cut], line, offset).split("\n")
            lines.pop()  # what follows the last line end: nothing
            if len(whole) > limit:
                for number, text in enumerate(lines):
                    if len(text) * 4 > limit and len(text.encode()) > limit:
                        self._refuse_long(line + number, len(text.encode()))
            yield line, lines
            line += len(lines)
            offset += cut
            rest = whole[cut:]
        if rest:
            if len(rest) > limit:
                self._refuse_long(line, len(rest))
            yield line, self._decode(rest, line, offset).removesuffix("\n").split("\n")

    def _decode(self, data: bytes, line: int, offset: int) -> str:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            before = data[: error.start].replace(b"\r\n", b"\n").replace(b"\r", self._lone.encode())
            number, column = line + before.count(b"\n"), len(before) - before.rfind(b"\n")
            hint = "Convert the file, for example: iconv -f WINDOWS-1252 -t UTF-8."
            if Path(self.name).suffix.lower() not in COMPRESSED:
                with open(self.name, "rb") as again:
                    head = again.read(8)
                hint = next((f"It looks {_MAGIC[m]}." for m in _MAGIC if head.startswith(m)), hint)
            raise UserError(
                f"{self.name}, line {number}: not UTF-8: byte 0x{data[error.start]:02x} at byte "
                f"{column} of the line, {offset + error.start} of the text. {hint}"
            ) from error
        if not offset:
            text = text.removeprefix("\ufeff")  # byte order mark
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", self._lone)
        if "\0" in text:
            if text.count("\0") * 100 > len(text):
                number = line + text[: text.index("\0")].count("\n")
                raise UserError(
                    f"{self.name}, line {number}: NUL bytes; this is a binary file or "
                    "UTF-16 without a mark. Sources are UTF-8 text (iconv -f UTF-16 -t UTF-8 "
                    "converts)."
                )
            text = text.replace("\0", " ")
        return text

    def _refuse_long(self, line: int, size: int) -> NoReturn:
        raise UserError(
            f"{self.name}, line {line}: {size:,} bytes or more on one line, more than the limit of "
            f"{self._options.max_line_bytes:,}. Text has one paragraph on each line; put line ends "
            "in, or raise the limit (max_line_bytes) if the line is meant."
        )

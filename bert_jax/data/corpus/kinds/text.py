"""Text files and JSON lines files, read in a fixed amount of memory."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

from bert_jax.data.corpus.documents import NO_FIELDS, ReadOptions, Source, field_text, paragraphs
from bert_jax.errors import UserError
from bert_jax.files.untrusted.compressed import SUFFIXES as COMPRESSED
from bert_jax.files.untrusted.compressed import decompress
from bert_jax.files.urls import file_state, open_binary

_MAGIC = {
    b"\x1f\x8b": "gzip-compressed (name it .gz)",
    b"\xfd7zXZ\x00": "xz-compressed (name it .xz)",
    b"\x28\xb5\x2f\xfd": "zstd-compressed (name it .zst)",
    b"BZh": "bzip2-compressed (name it .bz2)",
    b"PK\x03\x04": "like a zip archive (unpack it first)",
    b"%PDF": "like a PDF document (extract its text first)",
    b"PAR1": "like a parquet file (name it .parquet)",
    b"\xff\xfe": "like UTF-16 (convert it: iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "like UTF-16 (convert it: iconv -f UTF-16 -t UTF-8)",
}
_JSON_TYPES = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
_CUT_BLOCK = 1 << 18
_LINE_END = re.compile(rb"\r?\n|\r(?!\n)")
_BLANK_LINE = re.compile(rb"(?:\r?\n|\r(?!\n))[ \t]{0,60}(?:\r?\n|\r(?!\n))")
_LONGEST_BLANK = 64

_Blocks = Iterable[tuple[int, list[str]]]


class FileSource(Source):
    """A text or JSON lines file; unless compressed, it can be divided into parts."""

    options: ReadOptions
    has_cuts = True
    """Whether reading can start inside the file, after line ends or blank lines."""
    has_records = False
    """Whether the file consists of records, such as the rows of a table."""

    def __init__(self, name: str, options: ReadOptions, *, is_json: bool = False) -> None:
        self.state = file_state(name)
        super().__init__(name, self.state.size)
        self.options, self.is_json = options, is_json
        self._lone = " " if options.newline_only else "\n"  # replaces a \r without \n

    @property
    def is_prose(self) -> bool:
        """Whether the lines are running text, not records."""
        return not (self.has_records or self.is_json)

    @property
    def _begin(self) -> int:
        return self.part[0] if self.part else 0

    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        blocks = self._blocks(self._content())
        if self.is_json:
            return self._json_rows(blocks)
        return ((text, NO_FIELDS) for text in self._plain_texts(blocks))

    def lines(self) -> Iterator[str]:
        """Yield all lines from the beginning, including blank lines, without their line ends."""
        self.bytes_read = 0
        for _, lines in self._blocks(self._content()):
            yield from lines

    @override
    def divided(self, size: int) -> Sequence[Source]:
        if self.size <= size or not self.has_cuts or self._is_compressed:
            return [self]
        count = -(-self.size // size)
        cuts = self._cuts(self.size * number // count for number in range(1, count))
        return [self._of((begin, end), end - begin) for begin, end in itertools.pairwise(cuts)]

    @override
    def head(self, size: int) -> Source:
        if self.size <= size:
            return self
        if len(self.divided(self.size - 1)) < 2:  # the file cannot be divided
            return super().head(size)
        begin, end, *_ = self._cuts([size])
        return self._of((begin, end), end - begin)

    @property
    def _is_compressed(self) -> bool:
        return Path(self.name).suffix.lower() in COMPRESSED

    def _cuts(self, sizes: Iterable[int]) -> list[int]:
        """Return sorted file positions at which to cut the part, including its start and end.

        Each size is a distance in bytes; there is a cut where the first document after it begins.
        """
        begin, end = self._begin, self._begin + self.size
        with open_binary(self.name) as file:
            return sorted({begin, end, *(self._cut(file, begin + size, end) for size in sizes)})

    def _cut(self, file: Any, position: int, end: int) -> int:
        """Find the first document after `position`; return its first byte, or `end` without one."""
        ends = _LINE_END if self.is_json or self.options.line_documents else _BLANK_LINE
        file.seek(position)
        seen, start = b"", 0
        while data := file.read(min(_CUT_BLOCK, end - position - len(seen))):
            seen += data
            # A byte must follow: a \r at the end may be the first half of a \r\n.
            found = ends.search(seen, start, len(seen) - 1)
            if found is not None:
                return position + found.end()
            start = max(0, len(seen) - _LONGEST_BLANK)
        return end

    def _line(self, number: int) -> int:
        """Convert a line number in the part to a line number in the file."""
        if self._begin:
            with open_binary(self.name) as file:
                while data := file.read(min(_CUT_BLOCK, self._begin - file.tell())):
                    number += data.count(b"\n")
        return number

    def _content(self) -> Iterator[bytes]:
        """Yield the decompressed content of the file, or of its byte range `part`, in blocks."""
        digest = hashlib.sha256()
        with open_binary(self.name) as file:
            if self._begin:
                file.seek(self._begin)

            def read(size: int) -> bytes:
                if self.part is not None:
                    size = min(size, self.size - self.bytes_read)
                data = file.read(size)
                self.bytes_read += len(data)
                digest.update(data)
                return data

            yield from decompress(read, self.name)
        self._sha256 = digest.hexdigest()

    def _plain_texts(self, blocks: _Blocks) -> Iterator[str]:
        if self.options.line_documents:
            for _, lines in blocks:
                yield from (line.strip() for line in lines)
            return
        document: list[str] = []
        size, begin = 0, 1
        for number, lines in blocks:
            for position, line in enumerate(lines):
                stripped = line.strip()
                if stripped:
                    if not document:
                        begin = number + position
                    document.append(stripped)
                    size += len(stripped)
                    if size > self.options.max_document_chars:
                        raise UserError(
                            f"{self.name}, line {self._line(begin)}: the document that begins here "
                            f"is longer than {self.options.max_document_chars:,} characters. "
                            "Blank lines separate documents: insert blank lines, or read each line "
                            "as a document (line_documents)."
                        )
                elif document:
                    yield "\n".join(document)
                    document, size = [], 0
        yield "\n".join(document)

    def _json_rows(self, blocks: _Blocks) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, lines in blocks:
            for position, line in enumerate(lines):
                if not line or line.isspace():
                    continue
                try:
                    row = self._json_row(line)
                except UserError as error:
                    where = f"{self.name}, line {self._line(number + position)}"
                    raise UserError(f"{where}: {error}") from error
                yield row

    def _json_row(self, line: str) -> tuple[str, Mapping[str, Any]]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            detail = error if isinstance(error, ValueError) else "nested too deeply"
            raise UserError(
                f"not JSON: {detail}. Each line of a .jsonl file must be a JSON object; this line "
                f"starts with {line[:40]!r}."
            ) from error
        if not isinstance(value, dict):
            kind = _JSON_TYPES.get(type(value), "null")
            raise UserError(
                f"found a JSON {kind}, not an object with a field {self.options.field!r}."
            )
        return paragraphs(field_text(value, self.options.field)), self.options.kept(value)

    def _blocks(self, content: Iterable[bytes]) -> _Blocks:
        r"""Return the lines of a text file, in blocks.

        The text is UTF-8, with or without a byte order mark. Lines end in \n, \r\n or \r. With
        `newline_only`, a lone \r does not end a line but becomes a space. A stray NUL becomes a
        space. A block is (number of its first line, from 1; list of its lines without line ends).

        Raises:
            UserError: The text is not UTF-8, many characters are NUL, or a line is too long.
        """
        limit = self.options.max_line_bytes
        rest, line = b"", 1
        offset = self._begin  # of `rest` in the decompressed content, in bytes
        for data in content:
            whole = rest + data
            # A \r at the end may be the first half of a \r\n that the next block completes.
            cut = whole.rfind(b"\n", len(rest)) + 1
            if not self.options.newline_only:
                cut = max(cut, whole.rfind(b"\r", max(0, len(rest) - 1), -1) + 1)
            if not cut:
                if len(whole) > limit:
                    self._refuse_long(line, len(whole))
                rest = whole
                continue
            lines = self._decode(whole[:cut], line, offset).split("\n")
            lines.pop()  # the empty text after the last line end
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
            if not self._is_compressed:
                with open_binary(self.name) as again:
                    head = again.read(8)
                hint = next((f"It looks {_MAGIC[m]}." for m in _MAGIC if head.startswith(m)), hint)
            raise UserError(
                f"{self.name}, line {self._line(number)}: not UTF-8: found "
                f"0x{data[error.start]:02x} at byte {column} of the line (offset "
                f"{offset + error.start} in the text). {hint}"
            ) from error
        if not offset:
            text = text.removeprefix("\ufeff")  # byte order mark
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", self._lone)
        if "\0" in text:
            if text.count("\0") * 100 > len(text):
                number = line + text[: text.index("\0")].count("\n")
                raise UserError(
                    f"{self.name}, line {self._line(number)}: NUL bytes; the file is binary, or "
                    "UTF-16 without a byte order mark. A source must be UTF-8 text; convert UTF-16 "
                    "with: iconv -f UTF-16 -t UTF-8."
                )
            text = text.replace("\0", " ")
        return text

    def _refuse_long(self, line: int, size: int) -> NoReturn:
        raise UserError(
            f"{self.name}, line {self._line(line)}: this line has at least {size:,} bytes, but "
            f"the limit is {self.options.max_line_bytes:,}. A text file has one paragraph per "
            "line: insert line ends, or raise the limit (max_line_bytes) if the line is intended."
        )

"""Text files and JSON lines files, read in a fixed amount of memory."""

import codecs
import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from bert_jax.data.corpus.documents import NO_FIELDS, Head, ReadOptions, Row, Source
from bert_jax.errors import BadRecord
from bert_jax.files.untrusted.compressed import SUFFIXES as COMPRESSED
from bert_jax.files.untrusted.compressed import next_start, sound_blocks
from bert_jax.files.urls import FileState, file_state, open_binary

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
_STREAM_BLOCKS = 1 << 20, 1 << 24  # bytes to search for a cut of a compressed file
_LINE_END = re.compile(rb"\r?\n|\r(?!\n)")
_BLANK_LINE = re.compile(rb"(?:\r?\n|\r(?!\n))[ \t]{0,60}(?:\r?\n|\r(?!\n))")
_LONGEST_BLANK = 64
_STRAY_NULS = 7  # NULs that may become spaces in a line, however short the line is
_PARAGRAPHS = 1 << 16  # paragraphs to join at once: lists of short lines take 40 times the memory

_Blocks = Iterable[tuple[int, list[str] | BadRecord]]
"""Blocks: the number of the first line, from 1, and the lines, or the error in a bad line."""


class FileSource(Source):
    """A text or JSON lines file, which can be divided unless it is a single compressed stream."""

    options: ReadOptions
    cut_suffixes: tuple[str, ...] = ("", ".gz", ".zst")
    """Suffixes of compression ("" for none) for which reading can start inside a file."""
    record_start: re.Pattern[bytes] | None = None
    """Pattern of the bytes before a record begins; None means a line end or a blank line."""
    has_records = False
    """Whether the file consists of records, such as the rows of a table."""

    def __init__(
        self, name: str, options: ReadOptions, state: FileState | None = None, is_json: bool = False
    ) -> None:
        self.state = state or file_state(name)
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

    def _rows(self) -> Iterator[Row]:
        blocks = self._blocks(self._content())
        return self._json_rows(blocks) if self.is_json else self._plain_rows(blocks)

    def lines(self) -> Iterator[str]:
        """Yield all lines, without line ends; raise a BadRecord for a long or undecodable line."""
        self.bytes_read = 0
        for line in self._items():
            if isinstance(line, BadRecord):
                raise line
            yield line

    def _items(self) -> Iterator[str | BadRecord]:
        """Yield the lines; in place of a bad line, yield its error."""
        for _, lines in self._blocks(self._content()):
            yield from [lines] if isinstance(lines, BadRecord) else lines

    @override
    def divided(self, size: int) -> Sequence[Source]:
        if self.size <= size or self._compression not in self.cut_suffixes:
            return [self]
        count = -(-self.size // size)
        cuts = self._cuts(self.size * number // count for number in range(1, count))
        parts = [self._of((begin, end), end - begin) for begin, end in itertools.pairwise(cuts)]
        return parts if len(parts) > 1 else [self]

    @override
    def head(self, size: int) -> Source:
        if self.size > size and self._compression:
            return Head(self, size)
        if self.size <= size or len(self.divided(self.size - 1)) < 2:  # it cannot be divided
            return super().head(size)
        begin, end, *_ = self._cuts([size])
        return self._of((begin, end), end - begin)

    @property
    def _compression(self) -> str:
        suffix = Path(self.name).suffix.lower()
        return suffix if suffix in COMPRESSED else ""

    def _cuts(self, sizes: Iterable[int]) -> list[int]:
        """Return sorted file positions at which to cut the part, including its start and end.

        For each of `sizes` (bytes from the start), the cut is where the next document begins.
        """
        begin, end = self._begin, self._begin + self.size
        with open_binary(self.name) as file:
            cuts = (self._cut(file, begin + size, end) for size in sizes)
            return sorted({begin, end, *itertools.takewhile(lambda cut: cut < end, cuts)})

    def _cut(self, file: Any, position: int, end: int) -> int:
        """Return the position where the first document after `position` begins; `end` if none."""
        ends = _LINE_END if self.is_json or self.options.line_documents else _BLANK_LINE
        if self._compression:
            for most in _STREAM_BLOCKS:
                file.seek(position)
                data = file.read(min(most, end - position))
                if (start := next_start(data, self.name, self.record_start or ends)) >= 0:
                    return position + start
            return end
        file.seek(position)
        seen = b""
        while data := file.read(min(_CUT_BLOCK, end - file.tell())):
            seen = seen[-_LONGEST_BLANK:] + data
            # A byte must follow: a \r at the end may be the first half of a \r\n.
            if (found := ends.search(seen)) and found.end() < len(seen):
                return int(file.tell()) - len(seen) + found.end()
        return end

    @override
    def _place(self, number: int) -> str:
        """Name a line by its number in the file, or in the part if earlier lines are uncounted."""
        if self._begin and (self._compression or self.options.on_bad != "stop"):
            return f"line {number:,} after byte {self._begin:,}"
        if self._begin:
            with open_binary(self.name) as file:
                while data := file.read(min(_CUT_BLOCK, self._begin - file.tell())):
                    number += data.count(b"\n")
        return f"line {number}"

    def _content(self) -> Iterator[bytes | BadRecord]:
        """Yield decompressed blocks of the part or file, none empty, and a BadRecord for damage."""
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

            yield from sound_blocks(read, self.name)
        self._sha256 = digest.hexdigest()

    def _bad(self, number: int, told: str, reason: str, data: bytes | str) -> BadRecord:
        return BadRecord(f"{self.name}, {self._place(number)}: {told}", reason, data)

    def _plain_rows(self, blocks: _Blocks) -> Iterator[Row]:
        if self.options.line_documents:
            for _, lines in blocks:
                if isinstance(lines, BadRecord):
                    yield lines
                else:
                    yield from ((line.strip(), NO_FIELDS) for line in lines)
            return
        done: list[str] = []  # joined paragraphs of the document
        document: list[str] = []
        size, begin, lost, most = 0, 1, False, self.options.max_document_chars
        for number, lines in blocks:
            if isinstance(lines, BadRecord):
                is_damage = lines.reason == "damaged"  # a document may begin after the damage
                if is_damage or not lost:
                    yield lines
                done, document, size, lost = [], [], 0, not is_damage
                continue
            for position, line in enumerate(lines):
                if not (stripped := line.strip()):
                    if document and not lost:
                        yield "\n".join([*done, *document]), NO_FIELDS
                    done, document, size, lost = [], [], 0, False
                elif not lost:
                    if not document:
                        begin = number + position
                    document.append(stripped)
                    size += len(stripped)
                    if size > most:
                        lost = True
                        told = (
                            "the document that begins here is longer than "
                            f"{most:,} characters. Blank lines separate documents: insert blank "
                            "lines, or read each line as a document (line_documents)."
                        )
                        yield self._bad(begin, told, "too-long", "\n".join([*done, *document]))
                    elif len(document) >= _PARAGRAPHS:
                        done.append("\n".join(document))
                        document = []
        if not lost:
            yield "\n".join([*done, *document]), NO_FIELDS

    def _json_rows(self, blocks: _Blocks) -> Iterator[Row]:
        for number, lines in blocks:
            if isinstance(lines, BadRecord):
                yield lines
                continue
            for position, line in enumerate(lines):
                if line and not line.isspace():
                    yield self._json_row(line, number + position)

    def _json_row(self, line: str, number: int) -> Row:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            detail = error if isinstance(error, ValueError) else "nested too deeply"
            told = (
                f"not JSON: {detail}. Each line of a .jsonl file must be a JSON object; this line "
                f"starts with {line[:40]!r}."
            )
            return self._bad(number, told, "malformed", line)
        if not isinstance(value, dict):
            kind = _JSON_TYPES.get(type(value), "null")
            told = f"found a JSON {kind}, not an object with a field {self.options.field!r}."
            return self._bad(number, told, "malformed", line)
        return self._row(value, number, line)

    def _blocks(self, content: Iterable[bytes | BadRecord]) -> _Blocks:
        r"""Yield the lines of a text file, in blocks, without line ends; bad lines come one by one.

        The text is UTF-8, with or without a byte order mark. Lines end in \n, \r\n or \r. With
        `newline_only`, a lone \r does not end a line but becomes a space. A stray NUL becomes a
        space. A line is bad if it is not UTF-8, if many of its characters are NUL, or if it is too
        long. The error about damage takes the place of a damaged line.
        """
        limit = self.options.max_line_bytes
        ends = re.compile(rb"\n") if self.options.newline_only else _LINE_END
        rest, line, is_long = b"", 1, False
        for data in content:
            if isinstance(data, BadRecord):
                yield line, data
                rest, line, is_long = b"", line + 1, False
                continue
            whole = rest + data
            if is_long:
                # A byte must follow: a \r at the end may be the first half of a \r\n.
                found = ends.finditer(whole)
                end = next((each for each in found if each.end() < len(whole)), None)
                rest = whole[-1:] if end is None else b""
                if end is None:
                    continue
                whole, line, is_long = whole[end.end() :], line + 1, False
            cut = whole.rfind(b"\n", len(rest)) + 1
            if not self.options.newline_only:
                cut = max(cut, whole.rfind(b"\r", max(0, len(rest) - 1), -1) + 1)
            rest = whole[cut:]
            if cut:
                for number, lines in self._decoded(whole[:cut], line):
                    yield number, lines
                    line = number + (1 if isinstance(lines, BadRecord) else len(lines))
            if len(rest) > limit:
                yield line, self._too_long(rest, line)
                rest, is_long = rest[-1:], True
        if rest and not is_long:
            yield from self._decoded(rest, line)

    def _decoded(self, data: bytes, line: int) -> _Blocks:
        """Yield the lines of `data` as one block, or one by one if a line may be bad."""
        lone, limit = self._lone, self.options.max_line_bytes
        with contextlib.suppress(UnicodeDecodeError):
            text = data.decode()
            if line == 1 and not self._begin:
                text = text.removeprefix("\ufeff")  # byte order mark
            if "\r" in text:
                text = text.replace("\r\n", "\n").replace("\r", lone)
            lines = text.removesuffix("\n").split("\n")
            if "\0" not in text and (len(data) <= limit or max(map(len, lines)) * 4 <= limit):
                yield line, lines
                return
        dense = data.count(b"\0") * 100 > len(data)
        data = data.replace(b"\r\n", b"\n").replace(b"\r", lone.encode())
        if line == 1 and not self._begin:
            data = data.removeprefix(codecs.BOM_UTF8)
        for number, raw in enumerate(data.removesuffix(b"\n").split(b"\n"), line):
            nuls = raw.count(b"\0")
            try:
                if len(raw) > limit:
                    yield number, self._too_long(raw, number)
                elif nuls * 100 > len(raw.decode()) and nuls > (0 if dense else _STRAY_NULS):
                    told = (
                        "NUL bytes; the file is binary, or UTF-16 without a byte order mark. A "
                        "source must be UTF-8 text; convert UTF-16 with: iconv -f UTF-16 -t UTF-8."
                    )
                    yield number, self._bad(number, told, "binary", raw)
                else:
                    yield number, [raw.decode().replace("\0", " ")]
            except UnicodeDecodeError as error:
                yield number, self._not_utf8(raw, number, error)

    def _not_utf8(self, raw: bytes, number: int, error: UnicodeDecodeError) -> BadRecord:
        hint = "Convert the file, for example: iconv -f WINDOWS-1252 -t UTF-8."
        if not self._compression:
            with open_binary(self.name) as again:
                head = again.read(8)
            hint = next((f"It looks {_MAGIC[m]}." for m in _MAGIC if head.startswith(m)), hint)
        told = f"not UTF-8: found 0x{raw[error.start]:02x} at byte {error.start + 1} of the line. "
        return self._bad(number, told + hint, "not-utf8", raw)

    def _too_long(self, raw: bytes, number: int) -> BadRecord:
        told = (
            f"this line has at least {len(raw):,} bytes, but the limit is "
            f"{self.options.max_line_bytes:,}. A text file has one paragraph per line: insert line "
            "ends, or raise the limit (max_line_bytes) if the line is intended."
        )
        return self._bad(number, told, "too-long", raw)

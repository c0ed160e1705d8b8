"""Lines of text files, plain or compressed, in memory that does not grow with the file."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from bert_jax.errors import UserError
from bert_jax.untrusted.compressed import SUFFIXES as COMPRESSED
from bert_jax.untrusted.compressed import decompress

MAX_LINE_BYTES = 16 << 20

_MAGIC = {
    b"\x1f\x8b": "gzip-compressed (name it .gz)",
    b"\xfd7zXZ\x00": "xz-compressed (name it .xz)",
    b"\x28\xb5\x2f\xfd": "zstd-compressed (name it .zst)",
    b"BZh": "bzip2-compressed (decompress it first)",
    b"PK\x03\x04": "a zip archive (unpack it first)",
    b"%PDF": "a PDF document (extract its text first)",
    b"PAR1": "a parquet file (name it .parquet)",
    b"\xff\xfe": "UTF-16 (convert it: iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "UTF-16 (convert it: iconv -f UTF-16 -t UTF-8)",
}


class HashedFile:
    """A file read once from beginning to end, whose bytes are counted and hashed on the way.

    Attributes:
        size: bytes in the file.
        bytes_read: bytes read so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}.") from error
        self.size = path.stat().st_size
        self.bytes_read = 0
        self._digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """At most `size` bytes, none at the end."""
        try:
            data = self._file.read(size)
        except OSError as error:
            raise UserError(
                f"cannot read {self.path} beyond byte {self.bytes_read}: {error.strerror}."
            ) from error
        self.bytes_read += len(data)
        self._digest.update(data)
        return data

    def sha256(self) -> str:
        """Digest of the bytes read, in hexadecimal."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(
    file: HashedFile, *, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, list[str]]]:
    r"""Return the lines of a text file, in blocks.

    UTF-8 with or without a byte order mark; lines end in \n, \r\n or \r. A stray NUL becomes a
    space.

    Args:
        file: a file just opened; its suffix tells the compression (.gz, .xz, .zst, else none).
        max_line_bytes: refuse longer lines.

    Yields:
        The number of the first line of the block (from 1) and its lines without their ends.

    Raises:
        UserError: not UTF-8, mostly binary, a line too long, or a damaged compressed file; the
            message names file, line and byte.
    """
    rest = b""
    line = 1
    offset = 0  # of `rest` in the decompressed content, in bytes
    for data in decompress(file.read, f"{file.path}"):
        whole = rest + data
        # The last \r may be the first half of a \r\n that the next block completes.
        cut = max(whole.rfind(b"\n", len(rest)), whole.rfind(b"\r", max(0, len(rest) - 1), -1)) + 1
        if not cut:
            if len(whole) > max_line_bytes:
                _refuse_long(file, line, len(whole), max_line_bytes)
            rest = whole
            continue
        lines = _decode(file, whole[:cut], line, offset).split("\n")
        lines.pop()  # what follows the last line end: nothing
        if len(whole) > max_line_bytes:
            for number, text in enumerate(lines):
                if len(text) * 4 > max_line_bytes and len(text.encode()) > max_line_bytes:
                    _refuse_long(file, line + number, len(text.encode()), max_line_bytes)
        yield line, lines
        line += len(lines)
        offset += cut
        rest = whole[cut:]
    if rest:
        if len(rest) > max_line_bytes:
            _refuse_long(file, line, len(rest), max_line_bytes)
        yield line, _decode(file, rest, line, offset).removesuffix("\n").split("\n")


def _decode(file: HashedFile, data: bytes, line: int, offset: int) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse_bytes(file, data, error, line, offset)
    if not offset:
        text = text.removeprefix("\ufeff")  # byte order mark
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:
        if text.count("\0") * 100 > len(text):
            before = text[: text.index("\0")].count("\n")
            raise UserError(
                f"{file.path}, line {line + before}: NUL bytes; this is a binary file or UTF-16 "
                "without a mark. Sources are UTF-8 text (iconv -f UTF-16 -t UTF-8 converts)."
            )
        text = text.replace("\0", " ")
    return text


def _refuse_bytes(
    file: HashedFile, data: bytes, error: UnicodeDecodeError, line: int, offset: int
) -> NoReturn:
    before = data[: error.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    number = line + before.count(b"\n")
    column = len(before) - (before.rfind(b"\n") + 1) + 1
    hint = "Convert the file, for example: iconv -f WINDOWS-1252 -t UTF-8."
    if file.path.suffix.lower() not in COMPRESSED:
        with open(file.path, "rb") as again:
            head = again.read(8)
        for magic, what in _MAGIC.items():
            if head.startswith(magic):
                hint = f"It looks {what}." if "compressed" in what else f"It looks like {what}."
    raise UserError(
        f"{file.path}, line {number}: not UTF-8: byte 0x{data[error.start]:02x} at byte "
        f"{column} of the line, {offset + error.start} of the text. {hint}"
    )


def _refuse_long(file: HashedFile, line: int, size: int, limit: int) -> NoReturn:
    raise UserError(
        f"{file.path}, line {line}: {size:,} bytes or more on one line, more than the limit of "
        f"{limit:,}. Text has one paragraph on each line; put line ends in, or raise the limit "
        "(max_line_bytes) if the line is meant."
    )

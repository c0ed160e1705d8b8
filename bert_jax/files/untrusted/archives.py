"""Unpacking of untrusted zip and tar archives, which `zipfile` and `tarfile` parse.

This module limits how much these libraries read. It checks each entry's name, kind and declared
size before it writes the entry. The target appears only when complete.
"""

import contextlib
import errno
import functools
import gzip
import io
import os
import re
import shutil
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.files.untrusted.whole_file import CONTROL

MAX_BYTES = 4 << 30
MAX_FILES = 10_000
MAX_RATIO = 200
_MAX_NAME = 512
_BLOCK = 1 << 20
_FREE_BYTES = 16 << 20  # unpacked bytes allowed at any ratio; small archives may have high ratios
_ENTRY_BYTES = 256  # bytes allowed per entry in the central directory of a zip archive
_HEADER_BYTES = 1 << 16  # bytes allowed for the header of a tar member, with its extended headers
_MAX_GLOBAL_HEADERS = 1000
_MAX_DEPTH = 16

# Exceptions that the parsers of the standard library raise if a file is not a valid archive.
_PARSER_ERRORS = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, ValueError,
    ArithmeticError, LookupError, RuntimeError, struct.error,
)  # fmt: skip


def _extract(
    read: Callable[["_Unpacked", io.BufferedIOBase], None], path: str | Path, target: str | Path, *,
    max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES, max_ratio: int = MAX_RATIO,
) -> list[str]:  # fmt: skip
    """Unpack an archive into the new directory `target`; return the sorted names of the files.

    All files together may have `max_bytes`, and above 16 MiB `max_ratio` times the archive's bytes.
    Raise a UserError if an entry is damaged, unsafe or too large. `target` is then not created.
    """
    path, target = Path(path), Path(os.path.abspath(target))
    if os.path.lexists(target):
        raise UserError(f"{target} exists; name a directory that does not exist yet")
    if not path.is_file():
        raise UserError(f"{path}: no such file; an archive was expected")
    root = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb"))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        shutil.rmtree(root, ignore_errors=True)  # of a killed process that had the same number
        root.mkdir(parents=True)
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        unpacked = _Unpacked(path, root, max_bytes, max_files, max_ratio)
        try:
            read(unpacked, file)
        except UserError:
            raise
        except (*_PARSER_ERRORS, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise  # the disk failed; the archive is not at fault
            entry = f", {unpacked.entry[:80]!r}" if unpacked.entry else ""
            raise UserError(
                f"{path}{entry}: not a sound archive: {type(error).__name__}: {error}"
            ) from error
        os.rename(root, target)
    return sorted(unpacked.names)


def _read_zip(unpacked: "_Unpacked", file: io.BufferedIOBase) -> None:
    path = unpacked.path
    # The parsers of the standard library trust the sizes that a header declares, so limit reads.
    reads = _BoundedReads(file, path, 2 * _BLOCK + unpacked.max_files * _ENTRY_BYTES)
    archive = zipfile.ZipFile(reads)
    entries = archive.infolist()
    unpacked.check_totals(len(entries), sum(entry.file_size for entry in entries))
    for entry in entries:
        # zipfile cuts `filename` at a NUL, so check the name as the archive has it.
        name = entry.orig_filename
        kind = stat.S_IFMT(entry.external_attr >> 16)
        is_directory = name.endswith("/")
        if kind not in (0, stat.S_IFDIR if is_directory else stat.S_IFREG):
            raise UserError(f"{path}: {name[:80]!r} is a link or device; only files are unpacked")
        if entry.flag_bits & 0x41:
            raise UserError(f"{path}: {name[:80]!r} is encrypted; decrypt the archive first")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(
                f"{path}: {name[:80]!r} has the compression {entry.compress_type}; only "
                "deflate (8) and none (0) are read"
            )
        if is_directory:
            unpacked.add_directory(name)
            continue
        reads.allow()
        unpacked.entry = name
        with archive.open(entry) as content:
            unpacked.add_file(name, entry.file_size, content.read, reads)


def _read_tar(unpacked: "_Unpacked", file: io.BufferedIOBase) -> None:
    """Read a tar archive, plain or with gzip, in one pass."""
    path = unpacked.path
    magic = file.read(6)
    file.seek(0)
    if magic[:3] == b"BZh" or magic == b"\xfd7zXZ\x00" or magic[:4] == b"\x28\xb5\x2f\xfd":
        raise UserError(f"{path} is compressed with bzip2, xz or zstd; decompress it first")
    plain = gzip.GzipFile(fileobj=file) if magic[:2] == b"\x1f\x8b" else file
    # tarfile reads as much as an extended header declares.
    reads = _BoundedReads(plain, path, _HEADER_BYTES, unpacked.check_size)
    archive = tarfile.TarFile(fileobj=reads, errors="strict")
    count = size = 0
    while member := archive.next():
        archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all headers
        name = unpacked.entry = member.name
        if member.size < 0 or len(archive.pax_headers) > _MAX_GLOBAL_HEADERS:
            raise UserError(f"{path}: not a sound archive: the header of {name[:80]!r} is invalid")
        count, size = count + 1, size + member.size
        unpacked.check_totals(count, size)
        if member.isdir():
            unpacked.add_directory(name)
        elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None:
            unpacked.add_file(name, member.size, tarfile.ExFileObject(archive, member).read, reads)
        else:
            raise UserError(
                f"{path}: {name[:80]!r} is a link, device or sparse file; only plain files and "
                "directories are unpacked"
            )
        reads.allow()
    # tarfile treats a damaged header as the end of the archive.
    if reads.last != bytes(tarfile.BLOCKSIZE):
        raise UserError(
            f"{path} is damaged or cut off: no end-of-archive mark at byte {archive.offset:,}"
        )
    while reads.last:  # read to the end, where gzip verifies its checksum
        reads.allow()
        reads.read(_HEADER_BYTES)


extract_zip = functools.partial(_extract, _read_zip)
extract_tar = functools.partial(_extract, _read_tar)


class _Unpacked:
    """The files unpacked so far (in a temporary directory), and the name of the current entry."""

    def __init__(
        self, path: Path, root: Path, max_bytes: int, max_files: int, max_ratio: int
    ) -> None:
        self.path = path
        self.max_files = max_files
        self.names: list[str] = []
        self.entry = ""
        self._root = root
        self._max_bytes = max_bytes
        self._limit = min(max_bytes, max(_FREE_BYTES, max_ratio * path.stat().st_size))
        self._seen: dict[str, bool] = {}  # normalised names; true for a directory

    def check_totals(self, entries: int, size: int) -> None:
        """Raise a UserError if declared totals exceed a limit. Reads never exceed these totals."""
        if entries > self.max_files:
            raise UserError(f"{self.path} has more than {self.max_files:,} entries, the limit")
        self.check_size(size)

    def check_size(self, size: int) -> None:
        if size > self._limit:
            why = f"{self._limit:,} bytes"
            if self._limit < self._max_bytes:
                why += f" for an archive of {self.path.stat().st_size:,} bytes"
            raise UserError(f"{self.path} unpacks to more than the limit of {why}")

    def add_directory(self, name: str) -> None:
        parts = self._parts(name.rstrip("/") if name.strip("/") else name)
        self._claim(parts, directory=True)
        self._root.joinpath(*parts).mkdir(parents=True, exist_ok=True)

    def add_file(
        self, name: str, size: int, read: Callable[[int], bytes], reads: "_BoundedReads"
    ) -> None:
        parts = self._parts(name)
        self._claim(parts, directory=False)
        target = self._root.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as out:
            while data := read(_HEADER_BYTES // 2):
                out.write(data)
                reads.allow()
            found = out.tell()
            out.flush()
            os.fsync(out.fileno())
        if found != size:
            raise UserError(f"{self.path}: {name[:80]!r} declares {size:,} bytes and has {found:,}")
        self.names.append("/".join(parts))

    def _parts(self, name: str) -> list[str]:
        said = f"{self.path}: the name {name[:80]!r}"
        parts = name.removeprefix("./").split("/")
        if len(name) > _MAX_NAME or any(len(p.encode("utf-8", "replace")) > 255 for p in parts):
            raise UserError(f"{said} has over {_MAX_NAME} characters, or a part over 255 bytes")
        if CONTROL.search(name):
            raise UserError(f"{said} holds a control character or is not text")
        if name in (".", "./"):  # the top directory, which `tar .` writes as an entry
            return []
        if "\\" in name or re.match(r"[A-Za-z]:", name) or {"", ".", ".."} & set(parts):
            raise UserError(f"{said} may lead out of the target; give entries plain relative names")
        if len(parts) > _MAX_DEPTH:
            raise UserError(f"{said} is {len(parts)} levels deep; the limit is {_MAX_DEPTH}")
        return parts

    def _claim(self, parts: list[str], *, directory: bool) -> None:
        """Record a name. Raise a UserError if it occurred before, in any case or Unicode form."""
        for end in range(1, len(parts) + 1):
            name = "/".join(parts[:end])
            key = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
            is_directory = directory or end < len(parts)
            before = self._seen.get(key)
            if before is not None and not (before and is_directory):
                what = "twice" if before == is_directory else "as a file and as a directory"
                raise UserError(f"{self.path} holds {name[:80]!r} {what}")
            self._seen[key] = is_directory


class _BoundedReads(io.RawIOBase):
    """A file that raises a UserError on reads beyond `limit` bytes between calls of `allow`."""

    def __init__(
        self, file: io.BufferedIOBase, path: Path, limit: int,
        check_end: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.last = b""
        self._file = file
        self._path = path
        self._limit = limit
        self._check_end = check_end
        self.allow()

    def allow(self) -> None:
        """Allow another `limit` bytes."""
        self._left = self._limit

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        most = self._left + 1
        self.last = self._file.read(most if size is None or size < 0 else min(size, most))
        self._check_end(self._file.tell())
        self._left -= len(self.last)
        if self._left < 0:
            raise UserError(
                f"{self._path}: a header or directory has more than {self._limit:,} bytes, which "
                "no valid archive has"
            )
        return self.last

    def seek(self, position: int, whence: int = 0) -> int:
        return self._file.seek(position, whence)

    def tell(self) -> int:
        return self._file.tell()

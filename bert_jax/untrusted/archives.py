"""Unpacking zip and tar archives from elsewhere.

The target appears complete or not at all. Names, kinds and declared sizes are checked first, and
since declared sizes can lie, bytes are counted again as they are written.
"""

import contextlib
import errno
import gzip
import io
import itertools
import os
import re
import shutil
import stat
import struct
import tarfile
import tempfile
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from bert_jax.errors import UserError

MAX_BYTES = 4 << 30
MAX_FILES = 10_000
MAX_RATIO = 200
_MAX_NAME = 512
_BLOCK = 1 << 20
_FREE_BYTES = 16 << 20
"""Below this the ratio is not looked at: small files of one byte are no attack."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_ENTRY_BYTES = 256
"""Of a zip's directory, on average for each entry that is allowed."""
_HEADER_BYTES = 1 << 16
"""Of a tar member, extended headers included."""
_MAX_GLOBAL_HEADERS = 1000
_MAX_DEPTH = 16

# What the parsers of the standard library raise on bytes that are no archive.
_PARSER_ERRORS = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, ValueError,
    ArithmeticError, LookupError, RuntimeError, struct.error,
)  # fmt: skip


def extract_zip(
    path: str | Path,
    target: str | Path,
    *,
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
    max_ratio: int = MAX_RATIO,
) -> list[str]:
    """Unpacks a zip archive into a new directory.

    Args:
        path: the archive; stored and deflated entries are read.
        target: the directory, which must not exist yet.
        max_bytes: refuse more than this in all files together.
        max_files: refuse more entries.
        max_ratio: refuse more unpacked bytes than this times the size of the archive.

    Returns:
        The names of the files, sorted.

    Raises:
        UserError: names the archive and the entry; nothing is left at `target` then.
    """
    path = Path(path)
    with _unpacking(path, Path(target), max_bytes, max_files, max_ratio) as (file, unpacked):
        bounded = _BoundedReads(file, path, 2 * _BLOCK + max_files * _ENTRY_BYTES)
        with _parsing(path):
            archive = zipfile.ZipFile(bounded)
        entries = archive.infolist()
        unpacked.check_totals(len(entries), sum(entry.file_size for entry in entries))
        for entry in entries:
            # `filename` is cut at a NUL; the name as it was written is the one to judge.
            name = entry.orig_filename
            kind = stat.S_IFMT(entry.external_attr >> 16)
            is_directory = name.endswith("/")
            if kind not in (0, stat.S_IFDIR if is_directory else stat.S_IFREG):
                raise UserError(f"{path}: {name[:80]!r} is a link or device; files are unpacked")
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
            unpacked.add_file(name, _zip_blocks(path, archive, entry, bounded), entry.file_size)
        return unpacked.names()


def extract_tar(
    path: str | Path,
    target: str | Path,
    *,
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
    max_ratio: int = MAX_RATIO,
) -> list[str]:
    """Unpacks a tar archive, plain or with gzip, into a new directory; see `extract_zip`.

    A compressed archive is first decompressed beside the target, so that one pass bounds it.
    """
    path = Path(path)
    with (
        _unpacking(path, Path(target), max_bytes, max_files, max_ratio) as (file, unpacked),
        _decompressed(path, file, unpacked) as plain,
    ):
        # Extended headers are read as long as they say they are.
        bounded = _BoundedReads(plain, path, _HEADER_BYTES)
        with _parsing(path):
            archive = tarfile.TarFile(fileobj=bounded, errors="strict")
        for count in itertools.count(1):
            bounded.allow()
            with _parsing(path):
                member = archive.next()
            if member is None:
                break
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            name, size = member.name, member.size
            if size < 0 or len(archive.pax_headers) > _MAX_GLOBAL_HEADERS:
                raise UserError(f"{path}: not a sound archive: the header of {name[:80]!r}")
            unpacked.check_totals(count, size)
            if member.isdir():
                unpacked.add_directory(name)
                continue
            if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
                raise UserError(
                    f"{path}: {name[:80]!r} is a link, device or sparse file; plain files and "
                    "directories are unpacked"
                )
            unpacked.add_file(name, _tar_blocks(plain, member.offset_data, size), size)
        # `tarfile` takes a damaged header for the end.
        plain.seek(archive.offset)
        if plain.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise UserError(f"{path} is damaged or cut off: no end mark at byte {archive.offset:,}")
        return unpacked.names()


def _zip_blocks(
    path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, bounded: "_BoundedReads"
) -> Iterator[bytes]:
    bounded.allow()
    with _parsing(path, entry.filename):
        content = archive.open(entry)
    with content:
        while True:
            bounded.allow()
            with _parsing(path, entry.filename):
                data = content.read(_BLOCK)
            if not data:
                return
            yield data


def _tar_blocks(plain: IO[bytes], begin: int, size: int) -> Iterator[bytes]:
    plain.seek(begin)
    while size and (data := plain.read(min(size, _BLOCK))):
        yield data
        size -= len(data)


class _Unpacked:
    """The files so far, in a temporary directory."""

    def __init__(
        self, path: Path, root: Path, max_bytes: int, max_files: int, max_ratio: int
    ) -> None:
        self.path = path
        self.root = root
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._limit = min(max_bytes, max(_FREE_BYTES, max_ratio * path.stat().st_size))
        self._written = 0
        self._seen: dict[str, bool] = {}  # folded name to whether it is a directory
        self._names: list[str] = []

    def names(self) -> list[str]:
        return sorted(self._names)

    def check_totals(self, entries: int, size: int) -> None:
        """Of what is declared."""
        if entries > self._max_files:
            raise UserError(f"{self.path} has more than {self._max_files:,} entries, the limit")
        self.check_size(self._written + size)

    def check_size(self, size: int) -> None:
        if size > self._limit:
            why = f"{self._limit:,} bytes"
            if self._limit < self._max_bytes:
                why += f" for an archive of {self.path.stat().st_size:,}"
            raise UserError(f"{self.path} unpacks to more than the limit of {why}")

    def add_directory(self, name: str) -> None:
        parts = self._parts(name.rstrip("/") if name.strip("/") else name)
        self._claim(parts, directory=True)
        self.root.joinpath(*parts).mkdir(parents=True, exist_ok=True)

    def add_file(self, name: str, blocks: Iterable[bytes], size: int) -> None:
        parts = self._parts(name)
        self._claim(parts, directory=False)
        place = self.root.joinpath(*parts)
        place.parent.mkdir(parents=True, exist_ok=True)
        left = size
        with open(place, "xb") as out:
            for data in blocks:
                left -= len(data)
                self._written += len(data)
                self.check_size(self._written)
                if left < 0:
                    break
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
        if left:
            raise UserError(
                f"{self.path}: {name[:80]!r} declares {size:,} bytes and has "
                f"{'more' if left < 0 else f'{size - left:,}'}"
            )
        self._names.append("/".join(parts))

    def _parts(self, name: str) -> list[str]:
        shown = f"{self.path}: the name {name[:80]!r}"
        if len(name) > _MAX_NAME or any(len(os.fsencode(p)) > 255 for p in _encodable(name)):
            raise UserError(f"{shown} is longer than {_MAX_NAME} characters, 255 bytes a part")
        if _CONTROL.search(name):
            raise UserError(f"{shown} holds a control character or is not text")
        parts = name.removeprefix("./").split("/")
        if name in (".", "./"):  # the directory itself, as `tar .` writes it
            return []
        if "\\" in name or re.match(r"[A-Za-z]:", name) or {"", ".", ".."} & set(parts):
            raise UserError(f"{shown} does not stay below the target; only plain relative names do")
        if len(parts) > _MAX_DEPTH:
            raise UserError(f"{shown} has {len(parts)} parts; the limit is {_MAX_DEPTH}")
        return parts

    def _claim(self, parts: list[str], *, directory: bool) -> None:
        """Each name once, also where the file system folds case or composes characters."""
        for end in range(1, len(parts) + 1):
            name = "/".join(parts[:end])
            key = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
            is_directory = directory or end < len(parts)
            before = self._seen.get(key)
            if before is not None and not (before and is_directory):
                what = "twice" if before == is_directory else "as a file and as a directory"
                raise UserError(f"{self.path} holds {name[:80]!r} {what}")
            self._seen[key] = is_directory


def _encodable(name: str) -> list[str]:
    return name.encode("utf-8", "replace").decode().split("/")


class _BoundedReads(io.RawIOBase):
    """A file of which so many bytes are read at most: parsers trust the sizes they find."""

    def __init__(self, file: IO[bytes], path: Path, limit: int) -> None:
        self._file = file
        self._path = path
        self._limit = limit
        self.allow()

    def allow(self) -> None:
        """Begins to count anew."""
        self._left = self._limit

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        most = self._left + 1
        data = self._file.read(most if size is None or size < 0 else min(size, most))
        self._left -= len(data)
        if self._left < 0:
            raise UserError(
                f"{self._path}: a header or directory of more than {self._limit:,} bytes; no sound "
                "archive has one"
            )
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        return self._file.seek(position, whence)

    def tell(self) -> int:
        return self._file.tell()


@contextlib.contextmanager
def _parsing(path: Path, name: str | None = None) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (*_PARSER_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # the disk's
        entry = "" if name is None else f", {name[:80]!r}"
        raise UserError(
            f"{path}{entry}: not a sound archive: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _decompressed(path: Path, file: IO[bytes], unpacked: _Unpacked) -> Iterator[IO[bytes]]:
    """The plain tar of a file that may be compressed with gzip."""
    magic = file.read(6)
    file.seek(0)
    if magic[:3] == b"BZh" or magic == b"\xfd7zXZ\x00" or magic[:4] == b"\x28\xb5\x2f\xfd":
        raise UserError(f"{path} is compressed with bzip2, xz or zstd; decompress it first")
    if magic[:2] != b"\x1f\x8b":
        yield file
        return
    with (
        gzip.GzipFile(fileobj=file) as compressed,
        tempfile.TemporaryFile(dir=unpacked.root) as plain,
    ):
        size = 0
        while True:
            with _parsing(path):
                data = compressed.read(_BLOCK)
            if not data:
                break
            size += len(data)
            unpacked.check_size(size)
            plain.write(data)
        plain.seek(0)
        yield plain


@contextlib.contextmanager
def _unpacking(
    path: Path, target: Path, max_bytes: int, max_files: int, max_ratio: int
) -> Iterator[tuple[IO[bytes], _Unpacked]]:
    """The open archive and a place for its files, which becomes `target` at the end."""
    target = Path(os.path.abspath(target))
    if os.path.lexists(target):
        raise UserError(f"{target} exists; name a directory that does not exist yet")
    if not path.is_file():
        raise UserError(f"{path}: no such file; an archive was expected")
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    root = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    with file, contextlib.ExitStack() as stack:
        root.mkdir(parents=True)
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        yield file, _Unpacked(path, root, max_bytes, max_files, max_ratio)
        os.rename(root, target)

"""Reading of files in a bucket: retries, and a cache of limited size on the local disk."""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.files.checks import DIGESTS, digest_of
from bert_jax.files.staging import replace_file, staged_file
from bert_jax.files.urls import bucket_failures, file_system

_RANGE = 32 << 20  # bytes per read of a large file
_SMALL = 64 << 20  # largest file that is fetched as a whole, such as a tokenizer file
_READ_SECONDS = 120.0  # seconds after which a read is given up and tried again
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # seconds between tries; the wait doubles up to the longest


class BucketAwayError(RuntimeError):
    """The bucket was unreachable for longer than the read timeout. The run can be restarted."""

    exit_code = 6


class BucketFiles:
    """Reader of the files below a URL. Failed reads are retried for `read_timeout` seconds."""

    def __init__(self, url: str, read_timeout: float) -> None:
        self.url, self._read_timeout = url.rstrip("/"), read_timeout
        self._files = file_system(url)
        self.bytes_read = 0

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Read a file or, with `end`, the bytes [start, end) of a file.

        Raise a FileNotFoundError if there is no such file, a UserError if the bucket does not exist
        or may not be read, and a BucketAwayError if it was out of reach for `read_timeout`.
        """
        part = {} if end is None else {"start": start, "end": end}
        data: bytes = self._patiently(name, "cat_file", **part)
        self.bytes_read += len(data)
        return data

    def size(self, name: str) -> int:
        """Return a file's size. A missing file is a UserError; other errors are as in `read`."""
        try:
            return int(self._patiently(name, "info")["size"])
        except FileNotFoundError as error:
            raise damaged(self, name, "the file is missing") from error

    def fetch_small(self, name: str, target: Path, digest: str | None = None) -> None:
        """Download a file, unless `target` exists (with the CRC `digest`, if given).

        Raise a UserError if the file is missing or too large.
        """
        if target.is_file() and digest in (None, digest_of(target, DIGESTS)):
            return
        if (size := self.size(name)) > _SMALL:
            raise UserError(f"{self.url}/{name} has {size:,} bytes; the limit is {_SMALL:,}")
        replace_file(target, self.read(name))

    def names(self, directory: str) -> list[str]:
        """List the names of the files directly in a directory. A missing directory has no files."""
        try:
            entries = self._patiently(directory, "ls", detail=True)
        except FileNotFoundError:
            return []
        files = [entry["name"] for entry in entries if entry["type"] == "file"]
        return [name.rpartition("/")[2] for name in files if not name.endswith("/")]

    def _patiently(self, name: str, method: str, **options: Any) -> Any:
        path = f"{self.url}/{name}"
        begin, wait = time.monotonic(), _FIRST_WAIT
        while True:
            left = self._read_timeout - (time.monotonic() - begin)
            try:
                with bucket_failures(f"cannot read {path}", self.url):
                    call = getattr(self._files, method)
                    patience = max(1.0, min(left, _READ_SECONDS))
                    try:
                        return call(path, timeout=patience, **options)
                    except FileNotFoundError:
                        if not self.url.startswith("s3://"):  # S3's error says which is missing
                            self._files.info(self.url.removeprefix("gs://").partition("/")[0])
                        missing = FileNotFoundError(f"{path} is not there")
                raise missing
            except ConnectionError as error:
                away = time.monotonic() - begin
                if away + wait > self._read_timeout:
                    raise BucketAwayError(
                        f"{error}. The bucket was out of reach for {away:.0f} s, and "
                        f"data.read_timeout is {self._read_timeout:g}. No data was skipped; rerun "
                        "the command to continue the run"
                    ) from error
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)


class FileCache:
    """Disk cache that processes share. Above `most_bytes`, it removes least recently used files."""

    def __init__(self, root: Path, most_bytes: float) -> None:
        self._root, self._most = root, most_bytes
        self._found: dict[tuple[Path, int], str] = {}
        """sha256 of each file that this process has checked, by path and inode."""

    def fetch(self, files: BucketFiles, name: str, target: Path, size: int, digest: str) -> None:
        """Fetch a file of `size` bytes and sha256 `digest` to `target` unless the cache has it.

        A process hashes a cached file at its first use, and fetches a damaged file again. Raise a
        UserError if the file is missing, its size or sha256 is wrong, or the disk is full, and a
        BucketAwayError as `BucketFiles.read` does.
        """
        if self._has(target, size, digest):
            os.utime(target)  # the time of the last use
            return
        with _lock(target.with_name(f".{target.name}.lock")):
            if self._has(target, size, digest):  # another process fetched the file
                return
            if (there := files.size(name)) != size:
                raise damaged(files, name, f"the file has {there:,} bytes, not {size:,}")
            with _lock(self._root / ".lock"):
                self._make_room(size)
            with staged_file(target) as out:
                sha = hashlib.sha256()
                for start in range(0, size, _RANGE):
                    data = files.read(name, start, min(start + _RANGE, size))
                    sha.update(data)
                    out.write(data)
                if out.tell() != size or sha.hexdigest() != digest:
                    raise damaged(files, name, "the content does not match corpus.json")
            self._found[target, target.stat().st_ino] = digest

    def _has(self, path: Path, size: int, digest: str) -> bool:
        try:
            status = path.stat()
            if status.st_size != size:
                return False
            if (key := (path, status.st_ino)) not in self._found:
                self._found[key] = digest_of(path)
        except FileNotFoundError:
            return False
        return self._found[key] == digest

    def _make_room(self, size: int) -> None:
        status = {}
        for lock in self._root.rglob(".*.lock"):  # a lock file lies beside each fetched file
            path = lock.with_name(lock.name[1:-5])
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                status[path] = path.stat()
        total = sum(each.st_size for each in status.values())
        for path in sorted(status, key=lambda path: status[path].st_mtime_ns):
            if total + size <= self._most:
                break
            path.unlink(missing_ok=True)
            total -= status[path].st_size


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file while the body runs. Other threads and processes wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def damaged(files: BucketFiles, name: str, what: str) -> UserError:
    """Return the error for a damaged file of a corpus."""
    return UserError(
        f"the corpus {files.url} is damaged: {name}: {what}. Copy the file again from where the "
        "corpus was built, or build the corpus again"
    )

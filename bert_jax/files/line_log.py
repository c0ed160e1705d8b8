"""An append-only text file whose writer survives a full disk.

A logging failure must never stop a run. A line that cannot be written is kept in memory and
written, in order, once the disk accepts it.
"""

import collections
import errno
import logging
import os
from pathlib import Path

from bert_jax.files.staging import sync

_log = logging.getLogger("bert_jax")


class LineLog:
    """A log file, opened anew for each write in case it is removed; no method raises an OSError."""

    def __init__(self, path: Path, *, shared: bool = False, limit: int = 10_000):
        """Set the file; if more than `limit` lines wait in memory, the oldest are dropped.

        A missing directory is never made: it may be a disk that is not mounted. In a file that
        other processes write too (`shared`), a line that was cut off stays, since others may have
        written after it; the next line begins on a new line.
        """
        self._path, self._shared, self._limit = path, shared, limit
        self._waiting: collections.deque[bytes] = collections.deque()
        self._dropped = 0
        self._failing = False

    def write(self, line: str) -> None:
        """Append a line, which must have no newline in it, after the lines that wait."""
        self._waiting.append(line.encode() + b"\n")
        if len(self._waiting) > self._limit:
            self._waiting.popleft()
            self._dropped += 1
        self.flush()

    def flush(self) -> None:
        """Write the waiting lines; if that fails, they keep waiting."""
        if not self._waiting:
            return
        try:
            with open(self._path, "a+b", buffering=0) as file:
                self._append(file.fileno())
        except OSError as error:
            if not self._failing:
                _log.warning(
                    "%s cannot be written (%s); its lines are kept in memory until it can be",
                    self._path, error.strerror or error,
                )  # fmt: skip
            self._failing = True
            return
        if self._failing:
            lost = f"; {self._dropped:,} lines were too many to keep" if self._dropped else ""
            _log.warning("%s can be written again%s", self._path, lost)
        self._failing, self._dropped = False, 0

    def sync(self) -> None:
        """Write the waiting lines and flush the file to the disk (fsync)."""
        self.flush()
        try:
            sync(self._path)
        except FileNotFoundError:  # no line yet, or the file is gone, which the next write reports
            pass
        except OSError as error:
            if not self._failing:  # else flush has reported it
                _log.warning("%s may not be on the disk: %s", self._path, error.strerror or error)

    def close(self) -> None:
        """Try a last time to write the waiting lines; warn of lines that are lost."""
        self.flush()
        if self._waiting:
            _log.warning("%s: %s lines are lost", self._path, f"{len(self._waiting):,}")

    def _append(self, file: int) -> None:
        """Write the waiting lines, and stop keeping each line that was written whole."""
        end = os.lseek(file, 0, os.SEEK_END)
        torn = end > 0 and os.pread(file, 1, end - 1) != b"\n"
        data = b"\n" * torn + b"".join(self._waiting)
        try:
            written = os.write(file, data)
        except OSError:
            self._cut(file, end)  # a file system may have taken a part before it failed
            raise
        complete = data.rfind(b"\n", 0, written) + 1
        for _ in range(data.count(b"\n", 0, complete) - (torn and complete > 0)):
            self._waiting.popleft()
        if self._waiting:
            self._cut(file, end + complete)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _cut(self, file: int, end: int) -> None:
        if not self._shared and os.fstat(file).st_size > end:
            os.ftruncate(file, end)

"""An append-only log file that never stops a run: on a full disk, lines wait in memory."""

import collections
import errno
import logging
import os
from pathlib import Path

from bert_jax.files.staging import sync

_log = logging.getLogger("bert_jax")


class LineLog:
    """A log file, reopened for each write, so it may be removed. No method raises an OSError."""

    def __init__(self, path: Path, *, shared: bool = False, limit: int = 10_000):
        """Write to the file `path`. If more than `limit` lines wait in memory, drop the oldest.

        A missing directory is not created, because it may be a disk that is not mounted. `shared`
        means that other processes also write to the file. A partly written line then stays, since
        another process may have written after it, and the next write begins a new line.
        """
        self._path, self._shared, self._limit = path, shared, limit
        self._waiting: collections.deque[bytes] = collections.deque()
        self._dropped = 0
        self._failing = False

    def write(self, line: str) -> None:
        """Write the waiting lines, then this line. The line must not contain a newline."""
        self._waiting.append(line.encode() + b"\n")
        if len(self._waiting) > self._limit:
            self._waiting.popleft()
            self._dropped += 1
        self.flush()

    def flush(self) -> None:
        """Write the waiting lines. If that fails, the lines stay in memory."""
        if not self._waiting:
            return
        try:
            with open(self._path, "a+b", buffering=0) as file:
                self._append(file.fileno())
        except OSError as error:
            if not self._failing:
                _log.warning(
                    "%s cannot be written (%s); its lines stay in memory until a write succeeds",
                    self._path, error.strerror or error,
                )  # fmt: skip
            self._failing = True
            return
        if self._failing:
            lost = f"; {self._dropped:,} lines were lost" if self._dropped else ""
            _log.warning("%s can be written again%s", self._path, lost)
        self._failing, self._dropped = False, 0

    def sync(self) -> None:
        """Write the waiting lines and flush the file to the disk (fsync)."""
        self.flush()
        try:
            sync(self._path)
        except FileNotFoundError:  # no line was written yet, or the next write reports the failure
            pass
        except OSError as error:
            if not self._failing:  # else flush has reported it
                _log.warning("%s may not be on the disk: %s", self._path, error.strerror or error)

    def close(self) -> None:
        """Try a last time to write the waiting lines. Warn if lines are lost."""
        self.flush()
        if self._waiting:
            _log.warning("%s: %s lines are lost", self._path, f"{len(self._waiting):,}")

    def _append(self, file: int) -> None:
        """Write the waiting lines; remove from memory the lines that were written completely."""
        end = os.lseek(file, 0, os.SEEK_END)
        torn = end > 0 and os.pread(file, 1, end - 1) != b"\n"
        data = b"\n" * torn + b"".join(self._waiting)
        try:
            written = os.write(file, data)
        except OSError:
            self._cut(file, end)  # a part may have been written before the failure
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

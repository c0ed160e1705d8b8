"""A text file that lines are added to, and that a full disk does not hurt.

A logging failure must never stop a run. A line that cannot be written is kept in memory and
written, in order, when the disk takes it again.
"""

import collections
import errno
import logging
import os
from pathlib import Path

from bert_jax.files.staging import sync

_log = logging.getLogger("bert_jax")


class LineLog:
    """Adds lines to a file, opened for each write as it may go; no method raises an OSError."""

    def __init__(self, path: Path, *, shared: bool = False, limit: int = 10_000):
        """Name the file; at most `limit` lines wait in memory, beyond which the oldest are dropped.

        Its directory is never made here: a missing one is not mounted. In a file that is `shared`
        with other processes a line that was cut off stays, since others may have written behind it;
        the next one begins on its own line.
        """
        self._path, self._shared, self._limit = path, shared, limit
        self._waiting: collections.deque[bytes] = collections.deque()
        self._dropped = 0
        self._failing = False

    def write(self, line: str) -> None:
        """Add a line, which must have no newline in it, after those that wait."""
        self._waiting.append(line.encode() + b"\n")
        if len(self._waiting) > self._limit:
            self._waiting.popleft()
            self._dropped += 1
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait; where that fails they go on waiting."""
        if not self._waiting:
            return
        try:
            with open(self._path, "a+b", buffering=0) as file:
                self._append(file.fileno())
        except OSError as error:
            if not self._failing:
                _log.warning(
                    "%s cannot be written (%s); its lines are kept in memory until it can",
                    self._path, error.strerror or error,
                )  # fmt: skip
            self._failing = True
            return
        if self._failing:
            lost = f"; {self._dropped:,} lines were too many to keep" if self._dropped else ""
            _log.warning("%s can be written again%s", self._path, lost)
        self._failing, self._dropped = False, 0

    def sync(self) -> None:
        """Wait until all lines are on the disk, not only with the operating system."""
        self.flush()
        try:
            sync(self._path)
        except FileNotFoundError:  # no line yet, or it went away: the next write says so
            pass
        except OSError as error:
            if not self._failing:  # flush has said so
                _log.warning("%s may not be on the disk: %s", self._path, error.strerror or error)

    def close(self) -> None:
        """Try a last time to write the lines that wait."""
        self.flush()
        if self._waiting:
            _log.warning("%s: %s lines are lost", self._path, f"{len(self._waiting):,}")

    def _append(self, file: int) -> None:
        """Write the lines that wait, and forget the lines that are complete."""
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

"""Writing of files and directories that appear only when they are complete."""

import contextlib
import errno
import fcntl
import glob
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from bert_jax.errors import UserError
from bert_jax.files.urls import scheme

_LOCK = ".lock"
_UNLOCKED_GRACE_SECONDS, _YOUNG_SECONDS = 3600.0, 60.0
REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "the directory is not writable",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EEXIST: "a part of the path is a file",
    errno.EISDIR: "it is a directory",
    errno.ENOENT: "no directory can be made there",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EPERM: "it is not permitted",
    errno.EIO: "the disk reports an error",
    errno.EFBIG: "the file would be larger than the file system or `ulimit -f` allows",
}
"""Reasons why a file or directory cannot be written, by `errno`."""


def disk_full(path: Path, error: OSError) -> UserError | OSError:
    """Return a `UserError` if `REASONS` explains the error (such as a full disk), else `error`."""
    space = (errno.ENOSPC, errno.EDQUOT)
    if error.errno not in REASONS:
        return error
    return UserError(
        f"cannot write {path}: {REASONS[error.errno]}. Nothing was left there. "
        f"{'Free some space or name' if error.errno in space else 'Name'} another directory."
    )


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk."""
    path.write_bytes(data)
    sync(path)


def check_local(path: str | Path, kind: Literal["file", "directory"], option: str = "") -> None:
    """Raise a UserError if a path is in a bucket or, instead of a file, a directory or device."""
    if scheme(path) is not None:
        raise UserError(f"{option}{path} is in a bucket; name a local {kind}, then upload it")
    if kind == "file" and os.path.exists(path) and not os.path.isfile(path):
        what = "directory" if os.path.isdir(path) else "device or a pipe"
        raise UserError(f"{option}{path} is a {what}; name a file")


@contextlib.contextmanager
def staged_file(path: Path) -> Iterator[Any]:
    """Open a temporary binary file, which replaces `path` when the body succeeds.

    If the body fails, nothing is left. Create parents; remove temporary files of dead processes.
    Raise a UserError if the disk is full, or the directory is in a bucket or cannot be written.
    """
    check_local(path, "file")
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{glob.escape(path.name)}.tmp-[0-9]*"):
            if not left.name.rpartition("-")[2].isdigit():  # a user's own file
                continue
            with contextlib.suppress(OSError):  # a new file may be in use but not locked yet
                if time.time() - left.stat().st_mtime > _YOUNG_SECONDS and _is_abandoned(left):
                    left.unlink()
        with open(temporary, "w+b") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise disk_full(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, which appears only when it is complete (see `staged_file`)."""
    with staged_file(path) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the body ends.

    No exception can then occur between creating a directory and noting that it must be removed.
    The function has no effect outside the main thread, since Python handles signals only there.
    """
    came: list[int] = []
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not None:  # None: the handler was set outside Python
                before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class StagedDirectory(contextlib.AbstractContextManager["StagedDirectory"]):
    """A directory that is built under a temporary name beside `target` and renamed when complete.

    Use it as a context manager: the body fills `.path` and calls `commit()`. Without a commit, the
    temporary directory is removed. The process locks a file in it, which the kernel unlocks when
    the process dies; the next build of the target removes unlocked directories. Raise a UserError
    for a target in a bucket, and for one with files unless `overwrite` and `replaceable(target)`.

    If `resume` is set, the temporary directory is `target.unfinished`. It stays if a build ends
    without a commit, and the next build continues with its files. One build at a time may use it.
    """

    def __init__(
        self, target: str | Path, replaceable: Callable[[Path], bool], *, overwrite: bool = False,
        resume: bool = False,
    ) -> None:  # fmt: skip
        check_local(target, "directory")
        self.target = Path(os.path.realpath(target))  # a link may lead to another disk
        self._replaceable, self._resume = replaceable, resume
        self._overwrite = overwrite
        self._committed = False
        self._lock = -1
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._recover()
            self._check_target()
            with signals_wait():
                self.path = self._take() if resume else self._make()
        except OSError as error:
            raise disk_full(self.target, error) from error
        except BaseException:
            if self._lock >= 0:
                self.close()
            raise

    def _siblings(self, kind: str) -> list[Path]:
        ours = re.compile(rf"{re.escape(self.target.name)}\.{kind}-\d+(-\d+)?")
        return sorted(p for p in self.target.parent.iterdir() if ours.fullmatch(p.name))

    def _recover(self) -> None:
        """Remove what dead processes left. Restore the old target after an interrupted commit."""
        for old in self._siblings("replaced-by"):
            if not self.target.exists():
                old.rename(self.target)
            elif self._replaceable(self.target):
                shutil.rmtree(old, ignore_errors=True)
        for left in self._siblings("tmp"):
            if _is_abandoned(left):
                shutil.rmtree(left, ignore_errors=True)

    def _check_target(self) -> None:
        if not self.target.exists():
            return
        if self.target.samefile(".") or self.target.is_mount():  # no directory can be renamed to it
            how = "it would be replaced; name a directory in it that does not exist yet."
            raise UserError(f"{self.target} is the current directory or a mount point: {how}")
        if not self.target.is_dir():
            raise UserError(f"{self.target} is a file; name a directory that does not exist yet.")
        if not any(self.target.iterdir()):
            return
        if not self._replaceable(self.target):
            raise UserError(
                f"{self.target} exists and holds files of another kind, so it is not overwritten. "
                "Name a directory that does not exist yet."
            )
        if not self._overwrite:
            raise UserError(
                f"{self.target} already exists and is complete. Name another directory, or ask for "
                "it to be overwritten (--overwrite)."
            )

    def _make(self) -> Path:
        for attempt in range(1000):
            name = f"{self.target.name}.tmp-{os.getpid()}" + (f"-{attempt}" if attempt else "")
            path = self.target.with_name(name)
            try:
                path.mkdir()
            except FileExistsError:
                continue
            self._lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            # Some network file systems have no locks. Abandoned directories there stay.
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return path
        raise UserError(f"{self.target} has 1,000 unfinished builds; remove {self.target}.tmp-*.")

    def _take(self) -> Path:
        path = self.target.with_name(f"{self.target.name}.unfinished")
        path.mkdir(exist_ok=True)
        self._lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another build is writing {self.target}; its temporary directory is {path}. Wait "
                "for that build, stop it, or name another directory."
            ) from error
        except OSError:  # a file system without locks
            pass
        return path

    def commit(self) -> None:
        """Flush all written files to the disk and rename the directory to the target."""
        self._check_target()
        (self.path / _LOCK).unlink()
        for folder, _, names in os.walk(self.path):
            for name in (*names, ""):
                sync(Path(folder, name))
        with signals_wait():  # else the old target may stay beside the new one
            if self.target.exists() and any(self.target.iterdir()):
                old = self.target.with_name(f"{self.target.name}.replaced-by-{os.getpid()}")
                self.target.rename(old)
                self.path.rename(self.target)
                shutil.rmtree(old, ignore_errors=True)
            else:
                self.path.rename(self.target)
            sync(self.target.parent)
            self._committed = True

    def close(self) -> None:
        """Release the lock and remove `path` unless it is committed or resumable. Call once."""
        if not self._committed and not self._resume:
            _remove(self.path)
        os.close(self._lock)

    def __exit__(self, *exception: object) -> None:
        self.close()


def _remove(path: Path) -> None:
    """Remove a directory. Retry for a second, since threads of a failed save may still write."""
    for _ in range(50):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.02)


def _is_abandoned(path: Path) -> bool:
    """Return true if no living process locks a temporary directory or file."""
    try:
        descriptor = os.open(path / _LOCK if path.is_dir() else path, os.O_RDWR)
        with open(descriptor, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        # A young directory without a lock file was just created, or is being committed.
        try:
            return time.time() - path.stat().st_mtime > _UNLOCKED_GRACE_SECONDS
        except FileNotFoundError:
            return False
    except OSError:
        return False

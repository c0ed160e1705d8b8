"""Directories and files that appear complete or not at all."""

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
from typing import Any

from bert_jax.errors import UserError

_LOCK = ".lock"
_UNLOCKED_GRACE_SECONDS, _YOUNG_SECONDS = 3600.0, 60.0
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "the directory is not writable",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EEXIST: "a part of the path is a file",
    errno.ENOENT: "no directory can be made there",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EPERM: "it is not permitted",
    errno.EIO: "the disk reports an error",
    errno.EFBIG: "the file would be larger than the file system or `ulimit -f` allows",
}


def disk_full(path: Path, error: OSError) -> UserError | OSError:
    """Return the error of a failed write: a `UserError` for disk, quota or rights."""
    space = (errno.ENOSPC, errno.EDQUOT)
    if error.errno not in _REASONS:
        return error
    return UserError(
        f"cannot write {path}: {_REASONS[error.errno]}. Nothing was left there. "
        f"{'Free some space or name' if error.errno in space else 'Name'} another directory."
    )


def write_synced(path: Path, data: bytes) -> None:
    """Write a file; its bytes are on the disk on return."""
    path.write_bytes(data)
    sync(path)


@contextlib.contextmanager
def staged_file(path: Path) -> Iterator[Any]:
    """Open a binary file that appears whole when the body ends well, and else not at all.

    A missing directory is made. What a dead process, which holds no lock, has left is removed. A
    full disk, or a directory that cannot be written, is a `UserError`.
    """
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{glob.escape(path.name)}.tmp-*"):
            with contextlib.suppress(OSError):  # between opening and locking, it is a young one
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
    """Write a file that appears whole or not at all; see `staged_file`."""
    with staged_file(path) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Ctrl-C and SIGTERM that come in the body are acted on at its end.

    Between making a thing and knowing that it is to be removed, nothing may be raised. It only acts
    in the main thread, the one that Python lets handle signals.
    """
    came: list[int] = []
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not None:  # else it was set outside Python
                before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class StagedDirectory:
    """Builds `target` under a temporary name beside it; one rename makes it appear.

    As a context manager: the body fills `.path` and calls `commit()`; leaving without a commit
    removes what was written. A directory left by a process that died is removed by the next build
    of the same target: its owner holds a file lock, which the kernel drops with the process, so a
    recycled process number cannot mislead.

    An existing `target` is replaced if `overwrite` is set and `replaceable` says that it is of the
    kind built here, after the new one is complete; else it is refused. With `resume` the temporary
    name is `target.unfinished`, one build at a time may have it, and leaving without a commit keeps
    what was written for the next build.
    """

    def __init__(
        self, target: str | Path, replaceable: Callable[[Path], bool], *, overwrite: bool = False,
        resume: bool = False,
    ) -> None:  # fmt: skip
        self.target = Path(os.path.abspath(target))
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
        """Remove what dead processes left; put an old target back that lost its successor."""
        for old in self._siblings("old"):
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
        if not self.target.is_dir():
            raise UserError(f"{self.target} is a file; name a directory that does not exist yet.")
        if not any(self.target.iterdir()):
            return
        if not self._replaceable(self.target):
            raise UserError(
                f"{self.target} exists and holds something else; it is left alone. Name a "
                "directory that does not exist yet."
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
            # Some network file systems have no locks; a leftover is then never removed.
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return path
        raise UserError(f"too many unfinished builds beside {self.target}; remove its .tmp-* ones.")

    def _take(self) -> Path:
        path = self.target.with_name(f"{self.target.name}.unfinished")
        path.mkdir(exist_ok=True)
        self._lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another build is writing {self.target}; its work is in {path}. Wait for it, stop "
                "it, or name another directory."
            ) from error
        except OSError:  # a file system without locks
            pass
        return path

    def commit(self) -> None:
        """Put all that was written on the disk, and rename to the target's name."""
        self._check_target()
        (self.path / _LOCK).unlink()
        for folder, _, names in os.walk(self.path):
            for name in (*names, ""):
                sync(Path(folder, name))
        if self.target.exists() and any(self.target.iterdir()):
            old = self.target.with_name(f"{self.target.name}.old-{os.getpid()}")
            self.target.rename(old)
            self.path.rename(self.target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            self.path.rename(self.target)
        sync(self.target.parent)
        self._committed = True

    def close(self) -> None:
        """Remove what was written unless it was committed or is to be resumed; once only."""
        if not self._committed and not self._resume:
            _remove(self.path)
        os.close(self._lock)

    def __enter__(self) -> "StagedDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _remove(path: Path) -> None:
    """Remove a directory into which threads of a save that failed may write a little longer."""
    for _ in range(50):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.02)


def _is_abandoned(path: Path) -> bool:
    """Return true when no living process holds the lock of a temporary directory or file."""
    try:
        descriptor = os.open(path / _LOCK if path.is_dir() else path, os.O_RDWR)
    except FileNotFoundError:
        # Between mkdir and the lock, or committed this moment: do not touch a young one.
        try:
            return time.time() - path.stat().st_mtime > _UNLOCKED_GRACE_SECONDS
        except FileNotFoundError:
            return False
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)

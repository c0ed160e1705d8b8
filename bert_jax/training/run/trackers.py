"""Experiment trackers, which show the metrics of many runs side by side, and TensorBoard.

Trackers have no influence on a run's result. If a tracker fails or waits, training continues.
`Board` uses the protocol buffers and the checksum of tensorboardX, but not its `SummaryWriter`: on
a full disk, the writer's thread dies, and the training loop would then wait for it forever.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Protocol, runtime_checkable

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from typing_extensions import override

from bert_jax.errors import needs_package
from bert_jax.files.remote import WorkDir

_SECONDS = 60.0
_log = logging.getLogger("bert_jax")


@runtime_checkable
class Tracker(Protocol):
    """Receiver of the metrics of a run. A run object of `wandb` or `trackio` is a tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add metrics of a step."""

    def finish(self) -> None:
        """Send all metrics, and close the tracker."""


def check_installed(packages: Sequence[str]) -> None:
    """Raise a UserError if the package of a tracker is not installed."""
    for package in packages:
        with needs_package(f"--track={package} needs a package: pip install 'bert_jax[{package}]'"):
            importlib.import_module(package)


class PackageTracker(Tracker):
    """Tracker that runs the package `wandb` or `trackio` in a thread, where it may wait or fail.

    The first failure is logged as a warning. After that, the tracker receives nothing more.
    """

    def __init__(self, package: str, work: WorkDir):
        """Start the thread, which opens or resumes the tracker of the run in `work`."""
        self._package, self._work, self._failed = package, work, False
        self._rows: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._track, daemon=True)
        self._thread.start()

    @override
    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._thread.is_alive():
            self._rows.put((values, step))

    @override
    def finish(self) -> None:
        self._rows.put(None)
        self._thread.join(_SECONDS)
        if self._thread.is_alive():
            self._warn(f"no answer for {_SECONDS:g} seconds")

    def _track(self) -> None:
        try:
            tracker = self._open()
            for values, step in iter(self._rows.get, None):
                # A restart repeats steps; wandb would refuse each of them with a message.
                if step >= getattr(tracker, "step", 0):
                    tracker.log(values, step=step)
            tracker.finish()
        except BaseException as error:  # the end of input at a login raises KeyboardInterrupt
            self._warn(f"{type(error).__name__}: {error}")

    def _open(self) -> Tracker:
        record = json.loads((self._work.local / "config.json").read_bytes())
        run, more = record["run_id"], {}
        if self._package == "wandb":  # trackio knows a run by its name
            limits = {"finish_timeout": _SECONDS, "login_timeout": _SECONDS}
            more = {"id": run, "allow_val_change": True, "settings": limits}
        tracker: Tracker = importlib.import_module(self._package).init(
            project=os.environ.get(f"{self._package.upper()}_PROJECT", "bert_jax"),
            name=f"{PurePath(self._work.name).name}-{run}",
            config=record["config"], resume="allow", **more,
        )  # fmt: skip
        return tracker

    def _warn(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            _log.warning(
                "%s has failed (%s) and shows nothing more until the run restarts; metrics.jsonl "
                "has all metrics", self._package, reason,
            )  # fmt: skip


class Board(Tracker):
    """Event file of a run. If a write fails, a warning is logged, and nothing more is written."""

    def __init__(self, directory: Path, *, purge_step: int):
        """Open a new file, so that TensorBoard hides older files' events from `purge_step` on."""
        self._directory = directory
        self._file: int | None = None
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        with self._given_up_if_it_fails():
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(
                directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
        started = SessionLog(status=SessionLog.START)
        self._append(
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=purge_step, session_log=started),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the metrics of a step."""
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def sync(self) -> None:
        """Wait until all events are on disk, not only in the operating system's buffers."""
        if self._file is not None:
            with self._given_up_if_it_fails():
                os.fsync(self._file)

    def finish(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)

    def _append(self, *events: Any) -> None:
        if self._file is None:
            return
        data = b"".join(_record(event.SerializeToString()) for event in events)
        with self._given_up_if_it_fails():
            if os.fstat(self._file).st_nlink == 0:
                raise FileNotFoundError("the event file was removed")
            while data:
                data = data[os.write(self._file, data) :]

    @contextlib.contextmanager
    def _given_up_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # TensorBoard accepts an incomplete record only at the end, so write nothing after it.
            self.finish()
            _log.warning(
                "%s cannot be written (%s). TensorBoard shows nothing more until the run restarts; "
                "metrics.jsonl has all metrics", self._directory, error.strerror or error,
            )  # fmt: skip


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row of metrics. A list gives one curve for each trial."""
    return {
        tag: float(value)
        for name, entry in row.items()
        for tag, value in _curves(name, entry)
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _curves(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, list):
        return [(name, value)]
    return [(f"{name}/trial_{number}", each) for number, each in enumerate(value)]


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    checks = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + checks[0] + data + checks[1]

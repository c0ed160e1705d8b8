"""Scalars for TensorBoard.

This module uses the protocol buffers and the checksum of tensorboardX, but not its `SummaryWriter`:
on a full disk, the writer's thread dies, and the training loop would then wait for it forever.
"""

import contextlib
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from bert_jax.training.run.trackers import Tracker

_log = logging.getLogger("bert_jax")


class Board(Tracker):
    """Event file of a run. If a write fails, a warning is logged, and nothing more is written."""

    def __init__(self, directory: Path, *, purge_step: int):
        """Open a new file. It makes TensorBoard hide earlier files' events from `purge_step` on."""
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
            # No record may follow an incomplete one: TensorBoard accepts it at the end only.
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

"""One start of a run in a process: access to the work directory, signals, and other resources."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.files.lease import Lease, Times
from bert_jax.files.remote import WorkDir, open_workdir
from bert_jax.model.attention import attend
from bert_jax.model.layers import compute_dtype
from bert_jax.objectives.objective import Objective
from bert_jax.training.run.events import Events
from bert_jax.training.run.goodput import Clock, Goodput
from bert_jax.training.run.telemetry import Telemetry, peak_flops
from bert_jax.training.run.trackers import PackageTracker, check_installed
from bert_jax.training.run.watchdog import Watchdog

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_asked = itertools.count(1)  # JAX needs consecutive numbers; step numbers may jump


class StopRequest:
    """Context manager: on SIGTERM or SIGINT (Ctrl-C), the run stops after the current step.

    A second signal ends the process at once. If there are several processes, JAX's preemption
    service watches for SIGTERM instead: a signal to one process stops all processes after the same
    step. `StopRequest` works only in the main thread, since Python handles signals only there.
    """

    def __init__(self) -> None:
        self.name = ""
        """Name of the signal that was received; "" if there was no signal."""
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def due(self) -> bool:
        """Return true if the run must stop now. All processes call this and get the same answer."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(next(_asked)):
            self.name = "SIGTERM"
        return bool(self.name)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.name:
            os._exit(128 + number)
        self.name = signal.Signals(number).name
        # os.write, because the signal may have interrupted a print.
        text = f"\n{self.name}: saving after this step; a second signal exits at once\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())


@contextlib.contextmanager
def hold_workdir(
    path: Path | str, *, echo: Callable[[str], None] | None = None, times: Times | None = None
) -> Iterator[WorkDir]:
    """Open a work directory, and keep other runs from writing to it during the `with` block.

    All processes must call this function; process 0 holds the lease for all of them. A missing
    directory is made. In process 0, `echo` receives lines to print; the default is `print`. Raise a
    UserError if another run uses the directory, or the directory cannot be written.
    """
    work, times = open_workdir(path), times or Times()
    lease = Lease(work.claims(), work.name, times, say=echo or functools.partial(print, flush=True))

    def take() -> bool:
        with work.failures_named("cannot write to the work directory"):
            return lease.take()

    # Sleep outside `by_first`, in which all other processes would wait until they time out.
    while not by_first(take):
        time.sleep(times.poll)
    try:
        if work.mirror is not None:  # another run may have written since the download
            work = open_workdir(path)
        yield dataclasses.replace(work, confirm=lease.confirm)
    finally:
        if jax.process_index() == 0:
            lease.release()


class Session:
    """Events, watchdog, clock, goodput and telemetry of one start of a run."""

    out: Telemetry
    """Outputs of the run. The method `telling` sets them."""

    def __init__(
        self,
        work: WorkDir,
        *,
        stall_seconds: float,
        clock: Clock | None = None,
        echo: Callable[[str], None] | None = None,
        track: Sequence[str] = (),
    ):
        """Prepare a session. If `stall_seconds` is 0, the watchdog never ends the process.

        Raise a UserError if a package in `track` is not installed.
        """
        check_installed(track)
        self._track = track
        self.work, self.clock = work, clock or Clock()
        self._echo, self._index = echo, jax.process_index()
        self.events = Events(work.local / "events.jsonl", self._index)
        stacks = work.local / f"stacks.{self._index}.txt"
        self._watchdog = Watchdog(stall_seconds, stacks, events=self.events)
        self.alive = self._watchdog.alive
        self.step = 0
        """Number of steps whose metrics have been read."""

    @contextlib.contextmanager
    def open(self, prepare: Callable[[], None]) -> Iterator[contextlib.ExitStack]:
        """Run the `with` block under the watchdog, and write an event if an error ends the block.

        `prepare` makes the first files of the work directory, which is uploaded before and after
        the block. The block may add callbacks to the yielded `ExitStack`, to be called at its end.
        """
        with self._watchdog:
            prepare()
            by_first(lambda: self.work.sync(required=True))
            with contextlib.ExitStack() as closing:
                closing.callback(self.work.sync)
                attend.log.addFilter(self._note_attention)
                closing.callback(attend.log.removeFilter, self._note_attention)
                try:
                    yield closing
                except BaseException as error:
                    self.events.write(
                        "error", f"{type(error).__name__}: {error}", step=self.step,
                        code=getattr(error, "exit_code", None),
                    )  # fmt: skip
                    raise

    @contextlib.contextmanager
    def telling(
        self, step: int, objective: Objective, *, num_steps: int, num_devices: int
    ) -> Iterator[Telemetry]:
        """Open the outputs (`out`) of a run that has done `step` steps."""
        self.step = step
        self.alive("the restore")
        kind = jax.devices()[0].device_kind
        peak = peak_flops(kind, compute_dtype(objective.model).name)
        path = self.work.local / "goodput.json" if self._index == 0 else None
        self._goodput = Goodput(path, self.clock, step, f"{num_devices} x {kind}")
        with Telemetry(
            self.work.local, num_steps=num_steps, restored_step=step,
            peak=peak and peak * num_devices, metrics=objective.metrics, goodput=self._goodput,
            echo=self._echo,
            trackers=[PackageTracker(each, self.work) for each in self._track if self._index == 0],
        ) as self.out:  # fmt: skip
            yield self.out

    def report(self, kind: str, step: int, message: str) -> None:
        """Write an event about a checkpoint (see `checkpoint.manager.Report`)."""
        self.events.write(kind, message, step=step)
        if hasattr(self, "out"):  # `out` is not set yet while the run is restored
            self.out.write(self.step, {f"event/{kind}": step})

    def _note_attention(self, record: logging.LogRecord) -> bool:
        """Write a warning about attention as an event; return True, so that it is also logged."""
        self.event("attention", record.getMessage())
        return True

    def event(self, kind: str, message: str, **values: Any) -> None:
        """Write an event about the whole run, in process 0 only."""
        if self._index == 0:
            self.events.write(kind, message, step=self.step, **values)

    def warn(
        self, kind: str, message: str, number: int, error: Exception | None, **values: Any
    ) -> None:
        """Write an event; then raise `error` or, if it is None, print the message.

        `number`, the event's batch or step, goes into the metrics. `values` are added to the event.
        """
        self.out.write(self.step, {f"event/{kind}": number})
        self.event(kind, message, **values)
        if error:
            raise error
        self.out.say(message if kind == "recovered" else f"Warning: {message}")

    def end(self) -> None:
        """Write goodput and all outputs after the last step."""
        self._goodput.record(self.step)
        self.sync()

    def sync(self) -> None:
        """Flush the metrics to disk, and upload the small files that have changed."""
        self.out.sync()
        self.work.sync()

    @contextlib.contextmanager
    def saving(self, what: str) -> Iterator[None]:
        """Flush all outputs and run the `with` block, which saves; count the time as `save`."""
        with self.clock.spend("save"):
            self.sync()
            yield
        self.alive(what)

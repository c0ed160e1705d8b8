"""The session of a run in a process: its hold on the work directory, signals, and resources."""

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
from collections.abc import Callable, Iterator
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
from bert_jax.training.run.watchdog import Watchdog

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_asked = itertools.count(1)  # not the step, which jumps: processes agree on a future number


class StopRequest:
    """Context manager that stops a run after the current step at SIGTERM or SIGINT (Ctrl-C).

    A second signal ends the process at once. With several processes JAX's preemption service
    watches for SIGTERM instead, so that one process's signal stops all of them after the same step.
    `StopRequest` works only in the main thread: Python lets no other thread handle signals.
    """

    def __init__(self) -> None:
        self.name = ""
        """Name of the signal that was received; "" if none was."""
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
        """Return true if the run is to stop now; collective, the same answer in all processes."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(next(_asked)):
            self.name = "SIGTERM"
        return bool(self.name)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.name:
            os._exit(128 + number)
        self.name = signal.Signals(number).name
        # Not print: the signal may have interrupted a print.
        text = f"\n{self.name}: saving after this step; a second signal exits at once\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())


@contextlib.contextmanager
def hold_workdir(
    path: Path | str, *, echo: Callable[[str], None] | None = None, times: Times | None = None
) -> Iterator[WorkDir]:
    """Open a work directory, and keep other runs from writing to it meanwhile.

    Collective: process 0 holds the lease for all processes.

    The directory is made if missing. `echo` receives lines to print, in process 0; None: `print`.

    Raises:
        UserError: Another run holds the directory, or the directory cannot be written.
    """
    work, times = open_workdir(path), times or Times()
    lease = Lease(work.claims(), work.name, times, say=echo or functools.partial(print, flush=True))

    def take() -> bool:
        with work.failures_named("cannot write to the work directory"):
            return lease.take()

    # Sleep outside the collective, which would time out in the other processes.
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
    """Outputs of the run; set inside `telling`."""

    def __init__(
        self,
        work: WorkDir,
        *,
        stall_seconds: float,
        clock: Clock | None = None,
        echo: Callable[[str], None] | None = None,
    ):
        """Prepare a session without outputs; if `stall_seconds` is 0, the watchdog has no limit."""
        self.work, self.clock = work, clock or Clock()
        self._echo, self._index = echo, jax.process_index()
        self.events = Events(work.local / "events.jsonl", self._index)
        stacks = work.local / f"stacks.{self._index}.txt"
        self._watchdog = Watchdog(stall_seconds, stacks, events=self.events)
        self.alive = self._watchdog.alive
        self.step = 0
        """Number of updates whose metrics have been read."""

    @contextlib.contextmanager
    def open(self, prepare: Callable[[], None]) -> Iterator[contextlib.ExitStack]:
        """Watch over the run in the body; record an error that ends it; upload the work directory.

        `prepare` makes the files of the work directory. The yielded stack is closed at the end.
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
        """Open the outputs of a run that continues after `step` updates."""
        self.step = step
        self.alive("the restore")
        dtype = compute_dtype(objective.model).name
        peak = peak_flops(jax.devices()[0].device_kind, dtype)
        path = self.work.local / "goodput.json" if self._index == 0 else None
        self._goodput = Goodput(path, self.clock, step)
        with Telemetry(
            self.work.local, num_steps=num_steps, restored_step=step,
            peak=peak and peak * num_devices, metrics=objective.metrics, goodput=self._goodput,
            echo=self._echo,
        ) as self.out:  # fmt: skip
            yield self.out

    def report(self, kind: str, step: int, message: str) -> None:
        """Write an event about a checkpoint (see `checkpoint.manager.Report`)."""
        self.events.write(kind, message, step=step)
        if hasattr(self, "out"):  # it is not set while the run is restored
            self.out.write(self.step, {f"event/{kind}": step})

    def _note_attention(self, record: logging.LogRecord) -> bool:
        """Write an event with a warning about attention; True lets the warning be printed, too."""
        self.event("attention", record.getMessage())
        return True

    def event(self, kind: str, message: str, **values: Any) -> None:
        """Write an event about the whole run, in process 0 only."""
        if self._index == 0:
            self.events.write(kind, message, step=self.step, **values)

    def warn(
        self, kind: str, message: str, number: int, error: Exception | None, **values: Any
    ) -> None:
        """Write an event; then raise `error`, which stops the run, or print the message.

        `number` is the number of the batch or step; `values` are added to the event.
        """
        self.out.write(self.step, {f"event/{kind}": number})
        self.event(kind, message, **values)
        if error:
            raise error
        self.out.say(message if kind == "recovered" else f"Warning: {message}")

    def end(self) -> None:
        """Bring goodput and outputs up to date after the last step."""
        self._goodput.record(self.step)
        self.sync()

    def sync(self) -> None:
        """Flush metrics and upload files; called before a checkpoint is written."""
        self.out.sync()
        self.work.sync()

    @contextlib.contextmanager
    def saving(self, what: str) -> Iterator[None]:
        """Flush all outputs, then run the save in the body; book the time on saving."""
        with self.clock.spend("save"):
            self.sync()
            yield
        self.alive(what)

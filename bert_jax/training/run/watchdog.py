"""A watchdog for stalled runs: it writes all stacks and exits with a code that asks for a restart.

All processes take part in each step. If one is dead, stopped or waiting for a file, the others hang
within a step. No exception or signal handler can end such a step, but the watchdog's thread can.
"""

import contextlib
import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bert_jax.distributed.parallel import processes
from bert_jax.training.run.events import Events

EXIT_CODE = 6

_POLL_SECONDS = 10.0
# Writing the report may block, too: on a file system, or on a pipe that nobody reads.
_REPORT_SECONDS = 10.0
_STDERR = 2  # not sys.stderr, whose lock the stalled thread may hold


class Watchdog:
    """Context manager that ends the process with code 6 if no work is completed for some time.

    The stacks of all threads go to standard error and to the end of a file, and an event `stalled`
    is written. While a C call holds the GIL, the watchdog's thread cannot run. In this case, a
    thread of `faulthandler` writes the stacks to standard error and exits with code 1, after at
    most twice the time limit.
    """

    def __init__(
        self,
        seconds: float,
        report: Path,
        *,
        events: Events | None = None,
        exit: Callable[[int], Any] = processes.end,
    ):
        """Prepare the watch, which begins when the context is entered.

        `seconds` is the longest time between two calls of `alive`; 0 means no limit. Stacks are
        appended to the file `report`, if its directory still exists. `exit` ends the process.
        """
        self._seconds, self._report, self._events, self._exit = seconds, report, events, exit
        self._last = (time.monotonic(), "its start")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._seconds:
            self.alive("its start")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._seconds:
            self._thread.join()

    def alive(self, what: str) -> None:
        """Note, from any thread, that work such as "step 12" was completed."""
        self._last = (time.monotonic(), what)

    def _watch(self) -> None:
        poll = min(self._seconds / 4, _POLL_SECONDS)
        try:
            while True:
                # Postpone the backstop while this thread runs. The backstop must act later than
                # this thread, which notices a call of `alive` only after the poll.
                _arm_backstop(self._seconds + 2 * poll)
                at, what = self._last
                left = at + self._seconds - time.monotonic()
                if left <= 0:
                    break
                if self._done.wait(min(poll, left)):
                    return
            self._stalled(what)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _stalled(self, what: str) -> None:
        _arm_backstop(2 * _REPORT_SECONDS)
        who = processes.label() or "the run"
        message = (
            f"{who} stands still: nothing was completed for {self._seconds:g} s "
            f"(training.stall_seconds); last completed: {what}"
        )
        writer = threading.Thread(
            target=self._write, args=(message, what), name="watchdog report", daemon=True
        )
        writer.start()
        writer.join(_REPORT_SECONDS)
        self._exit(EXIT_CODE)

    def _write(self, message: str, what: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        main = f"Thread 0x{threading.main_thread().ident:016x}"
        # A local file receives the stacks first, since faulthandler holds the interpreter's lock
        # while it writes, and a write to standard error or to the work directory may block.
        try:
            with tempfile.TemporaryFile() as local:
                faulthandler.dump_traceback(local)
                local.seek(0)
                stacks = local.read().decode(errors="replace")
        except OSError as error:
            stacks = f"the stacks could not be collected: {error}\n"
        text = f"\n{now} {message}; exit code {EXIT_CODE}. The main thread: {main}\n\n{stacks}"
        _print(text)
        try:
            with self._report.open("a") as file:
                file.write(text)
        except OSError as error:
            _print(f"the stacks could not be written to a file: {error}\n")
        if self._events is not None:
            self._events.write("stalled", message, seconds=self._seconds, last=what)


def _arm_backstop(seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def _print(text: str) -> None:
    with contextlib.suppress(OSError), open(_STDERR, "w", closefd=False, errors="replace") as file:
        file.write(text)

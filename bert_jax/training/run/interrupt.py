"""Stopping a run from outside: finish the step, save, leave."""

import itertools
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_asked = itertools.count(1)  # processes agree on a number to come: steps jump and begin anew


class StopRequest:
    """Context manager that stops a run after the current step at SIGTERM or SIGINT (Ctrl-C).

    A second signal ends the process at once. With several processes JAX's preemption service
    watches for SIGTERM instead, so that one process's signal stops all of them after the same step.
    It acts only in the main thread, because Python lets no other thread handle signals.
    """

    def __init__(self) -> None:
        self.name = ""
        """Name of the signal that came; "": none."""
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
        """Say whether to stop now; collective, with one answer for all processes."""
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

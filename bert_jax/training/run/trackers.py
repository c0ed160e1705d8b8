"""Experiment trackers, which show the metrics of many runs side by side.

A tracker is no part of what determines a run. If a tracker fails or waits, training continues.
"""

import importlib
import json
import logging
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override

from bert_jax.errors import needs_package
from bert_jax.files.remote import WorkDir

_SECONDS = 60.0
_log = logging.getLogger("bert_jax")


@runtime_checkable
class Tracker(Protocol):
    """Receiver of the metrics of a run. The runs of `wandb` and of `trackio` are trackers."""

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
    """Tracker of the package `wandb` or `trackio`, which may wait or fail in a thread of its own.

    The first failure is a warning. The tracker then receives nothing more.
    """

    def __init__(self, package: str, work: WorkDir):
        """Start the thread, which opens the tracker for the run in `work`, or continues there."""
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
        except BaseException as error:  # an end of the input at a login is a KeyboardInterrupt
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
                "%s has failed (%s) and shows no more of this run until it restarts; metrics.jsonl "
                "has all metrics", self._package, reason,
            )  # fmt: skip

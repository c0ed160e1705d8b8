"""`events.jsonl`: the events of a run, from all its starts and processes.

Each line is a JSON object with `time` (ISO 8601, UTC), `process`, `kind`, `step` (or null),
`message`, and fields that depend on the kind. The kinds are start, finished, stopped, error,
save_failed, damaged, bad_step, skipped_step, plateau, diverged, recovered, early_stop, stalled and
attention (a warning about the attention implementation).
"""

import contextlib
import datetime
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_jax.files.line_log import LineLog

_MAX_MESSAGE = 4000  # characters: a line goes to the file in one write
_MAX_WAITING = 1000
_MAX_READ = 64 << 20  # bytes; of a larger file, only the end is read


class Events:
    """Writer of events to a file that all processes of a run share."""

    def __init__(self, path: Path, process: int = 0):
        """Prepare the log, without opening the file."""
        self._log = LineLog(path, shared=True, limit=_MAX_WAITING)
        self._process = process
        self._lock = threading.Lock()  # a watchdog writes from its own thread

    def write(self, kind: str, message: str, *, step: int | None = None, **values: Any) -> None:
        """Add an event that happened after `step` steps; `message` describes it in words.

        No error is raised: logging must never stop a run. `repr` replaces values unfit for JSON.
        """
        event = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "process": self._process,
            "kind": kind,
            "step": step,
            "message": message[:_MAX_MESSAGE],
            **{name: _plain(value) for name, value in values.items()},
        }
        # The watchdog's thread must write its event even if the main thread hangs in a write.
        held = self._lock.acquire(timeout=5)
        try:
            self._log.write(json.dumps(event))
        finally:
            if held:
                self._lock.release()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file, the oldest first. A missing file has no events.

    Incomplete lines and objects whose `kind`, `message` or `time` is not a string are left out.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MAX_READ))
            data = file.read(_MAX_READ)
    except (FileNotFoundError, NotADirectoryError):
        return []
    texts = ("time", "kind", "message")
    events = (event for _, event in json_lines(data))
    return [event for event in events if all(type(event.get(name)) is str for name in texts)]


def json_lines(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each object of a JSON Lines file, and the byte offset at which the next line begins.

    `data` is the content of the file. Incomplete and damaged lines are left out.
    """
    end = 0
    for line in data.splitlines(keepends=True):
        end += len(line)
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if line.endswith(b"\n") and isinstance(row, dict):
                yield end, row


def _plain(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)[:_MAX_MESSAGE]
    return value

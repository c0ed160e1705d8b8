"""The use of a run's wall time, over all its starts.

Goodput is the share of the time in which steps ran that count towards the result, without waits for
input. The rest, badput, is divided by reason: `startup` (all other time before the first step),
`compile`, `restore`, `save`, `evaluation`, `input`, and `lost` (steps after the last checkpoint of
a start that died, which were repeated). Time between starts is counted separately, as `down`.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bert_jax.files.untrusted.json_file import read_json

REASONS = ("startup", "compile", "restore", "save", "evaluation", "input", "lost")
"""Reasons for lost time, in the order in which they are shown."""
_PRODUCTIVE = "productive"
_MAX_STARTS = 200  # in goodput.json; older ones are added up
_EVERY_SECONDS = 10.0
_MAX_BYTES = 16 << 20
_log = logging.getLogger("bert_jax")


class Clock:
    """Clock that divides one start's wall time between steps and the reasons in `REASONS`."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, *, age: float = 0.0):
        """Start now; `age` seconds of start-up have already gone by."""
        self._now = now
        self._mark = now()
        self._start = self._mark - age
        self._on = _PRODUCTIVE
        self._seconds = {_PRODUCTIVE: 0.0} | ({"startup": age} if age else {})

    @contextlib.contextmanager
    def spend(self, on: str) -> Iterator[None]:
        """Book the time of a `with` block on a reason, without the time of blocks nested in it."""
        before = self._switch(on)
        try:
            yield
        finally:
            self._switch(before)

    def started(self) -> None:
        """Mark the beginning of the steps; book all other time so far as start-up."""
        self._switch(self._on)
        startup = self._seconds.get("startup", 0.0) + self._seconds[_PRODUCTIVE]
        self._seconds |= {"startup": startup, _PRODUCTIVE: 0.0}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent on each reason, and on steps (`productive`); the sum is `elapsed`."""
        self._switch(self._on)
        return dict(self._seconds)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds spent on each reason, without the steps."""
        return {name: s for name, s in self.seconds.items() if name != _PRODUCTIVE}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    @property
    def stepping(self) -> float:
        """Seconds of training, waiting for input included: the denominator of rates."""
        seconds = self.seconds
        return seconds[_PRODUCTIVE] + seconds.get("input", 0.0)

    @property
    def goodput(self) -> float:
        """Share of the wall time in which steps ran without waiting for input."""
        return self.seconds[_PRODUCTIVE] / max(self.elapsed, 1e-9)

    def _switch(self, on: str) -> str:
        now = self._now()
        self._seconds[self._on] = self._seconds.get(self._on, 0.0) + now - self._mark
        before, self._on, self._mark = self._on, on, now
        return before


def process_age() -> float:
    """Return the seconds since this process began, imports included; 0 if it is unknown."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


@dataclass
class Start:
    """Record of one start of a run, or of several old starts added up."""

    begin: float
    """Time of the start, in seconds since 1970."""
    last: float
    """Time of the last sign of life, in seconds since 1970."""
    first_step: int
    """Number of updates made before the start."""
    last_step: int
    """Number of updates made before the last sign of life."""
    kept_step: int
    """Newest step that no later start has repeated."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent on each reason and on steps (`productive`)."""
    count: int = 1
    """Number of starts added up here."""
    down: float = 0.0
    """Seconds between the starts added up here."""


class Goodput:
    """Record of the wall time of this start and of all starts before it."""

    def __init__(
        self,
        path: Path | None,
        clock: Clock,
        restored_step: int,
        *,
        wall: Callable[[], float] = time.time,
    ):
        """Read the record of earlier starts; count their steps beyond `restored_step` as lost.

        `path` is the path of `goodput.json`; None (all processes except 0): keep no file.
        """
        self.clock = clock
        self._path, self._wall = path, wall
        self._failing = False
        self._earlier = [] if path is None else read_starts(path)
        for start in self._earlier:
            _lose(start, restored_step)
        while len(self._earlier) >= _MAX_STARTS:
            self._earlier[:2] = [_sum(*self._earlier[:2])]
        clock.started()  # a start that dies before its first step has no productive time
        now = wall()
        self._this = Start(now - clock.elapsed, now, restored_step, restored_step, restored_step)
        self.record(restored_step)

    def record(self, step: int) -> None:
        """Write the run's record after its update `step`; a failed write does not stop the run."""
        self._update(step)
        self._written = self.clock.elapsed
        if self._path is None:
            return
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        record = {"starts": [asdict(start) for start in [*self._earlier, self._this]]}
        try:
            temporary.write_text(json.dumps(record) + "\n")
            temporary.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not self._failing:
                _log.warning("%s cannot be written: %s", self._path, error.strerror or error)
            self._failing = True
        else:
            self._failing = False

    def tick(self, step: int) -> None:
        """Call `record` every few seconds, so that the work of a killed start is known."""
        if self.clock.elapsed - self._written >= _EVERY_SECONDS:
            self.record(step)

    def shares(self) -> dict[str, float]:
        """Return `perf/goodput` and `perf/badput_<reason>` over all starts; they sum to 1."""
        self._update(self._this.last_step)
        shares = time_shares([*self._earlier, self._this])
        return {
            "perf/goodput": shares.pop(_PRODUCTIVE),
            **{f"perf/badput_{reason}": share for reason, share in shares.items()},
        }

    def _update(self, step: int) -> None:
        self._this.seconds = self.clock.seconds
        self._this.last = max(self._this.last, self._wall())
        self._this.last_step = self._this.kept_step = step


def read_starts(path: Path) -> list[Start]:
    """Return the starts in a `goodput.json`, the oldest first; [] if it is unreadable."""
    try:
        if not path.is_file():
            return []
        rows = read_json(path, max_bytes=_MAX_BYTES)["starts"]
        return [_start(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s cannot be read, so a new record begins: %r", path, error)
        return []


def total_seconds(starts: Sequence[Start]) -> dict[str, float]:
    """Add up the seconds of all starts: `productive`, then the reasons that occurred."""
    names = [_PRODUCTIVE, *REASONS, *(name for start in starts for name in start.seconds)]
    totals = {
        name: sum((start.seconds.get(name, 0.0) for start in starts), 0.0)
        for name in dict.fromkeys(names)
    }
    return {name: total for name, total in totals.items() if total or name == _PRODUCTIVE}


def time_shares(starts: Sequence[Start]) -> dict[str, float]:
    """Return `total_seconds` as shares of their sum."""
    totals = total_seconds(starts)
    whole = max(sum(totals.values()), 1e-9)
    return {name: seconds / whole for name, seconds in totals.items()}


def down_seconds(starts: Sequence[Start]) -> float:
    """Add up the seconds between the starts."""
    gaps = (max(0.0, b.begin - a.last) for a, b in itertools.pairwise(starts))
    return sum(gaps, sum((start.down for start in starts), 0.0))


def _lose(start: Start, restored_step: int) -> None:
    """Move the time of the steps that a later start repeats from productive to lost."""
    kept = max(start.first_step, restored_step)
    if kept >= start.kept_step:
        return
    productive = start.seconds.get(_PRODUCTIVE, 0.0)
    lost = productive * (start.kept_step - kept) / (start.kept_step - start.first_step)
    start.seconds[_PRODUCTIVE] = productive - lost
    start.seconds["lost"] = start.seconds.get("lost", 0.0) + lost
    start.kept_step = kept


def _sum(a: Start, b: Start) -> Start:
    return replace(
        b, begin=a.begin, first_step=a.first_step, seconds=total_seconds([a, b]),
        count=a.count + b.count, down=down_seconds([a, b]),
    )  # fmt: skip


def _start(row: dict[str, Any]) -> Start:
    start = Start(**row)
    times = [start.begin, start.last, start.down, *start.seconds.values()]
    counts = [start.first_step, start.last_step, start.kept_step, start.count]
    if not all(type(count) is int for count in counts):
        raise TypeError(f"{counts} are not whole numbers")
    if not all(type(time) in (int, float) and math.isfinite(time) for time in times):
        raise TypeError(f"{times} are not numbers")
    return start

"""Where the wall time of a run goes, over all its starts.

Goodput is the share of it in which steps ran that are part of the result and did not wait for
input. The rest has reasons, and is called badput: `startup` (until the first step, without what
follows), `compile`, `restore`, `save`, `evaluation`, `input`, and `lost`: steps after the last
checkpoint of a start that died, which the next start does again. The time between two starts is not
the run's own and is counted apart, as `down`.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bert_jax.untrusted.json_file import read_json

REASONS = ("startup", "compile", "restore", "save", "evaluation", "input", "lost")
"""Reasons for lost time, in the order in which they are shown."""
_PRODUCTIVE = "productive"
_MAX_STARTS = 200  # in goodput.json; older ones are added up
_EVERY_SECONDS = 10.0
_MAX_BYTES = 16 << 20
_log = logging.getLogger("bert_jax")


class Clock:
    """Where the wall time of one start goes."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, *, age: float = 0.0):
        """Start now.

        Args:
            now: Seconds.
            age: Seconds that have gone by before, which were start-up.
        """
        self._now = now
        self._mark = now()
        self._start = self._mark - age
        self._on = _PRODUCTIVE
        self._seconds = {_PRODUCTIVE: 0.0}
        if age:
            self._seconds["startup"] = age

    @contextlib.contextmanager
    def spend(self, on: str) -> Iterator[None]:
        """Books the time of the block on something other than steps; the inner of two counts."""
        before = self._switch(on)
        try:
            yield
        finally:
            self._switch(before)

    def started(self) -> None:
        """Begin the steps: time that was booked on nothing else was start-up."""
        self._switch(self._on)
        startup = self._seconds.get("startup", 0.0) + self._seconds[_PRODUCTIVE]
        self._seconds |= {"startup": startup, _PRODUCTIVE: 0.0}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by reason, and `productive`; their sum is `elapsed`."""
        self._switch(self._on)
        return dict(self._seconds)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds by reason, without the productive ones."""
        return {name: s for name, s in self.seconds.items() if name != _PRODUCTIVE}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    @property
    def stepping(self) -> float:
        """Seconds of training, waiting for input included: what rates are over."""
        seconds = self.seconds
        return seconds[_PRODUCTIVE] + seconds.get("input", 0.0)

    @property
    def goodput(self) -> float:
        """Share of the wall time in which steps ran and did not wait for input."""
        return self.seconds[_PRODUCTIVE] / max(self.elapsed, 1e-9)

    def _switch(self, on: str) -> str:
        now = self._now()
        self._seconds[self._on] = self._seconds.get(self._on, 0.0) + now - self._mark
        before, self._on, self._mark = self._on, on, now
        return before


def process_age() -> float:
    """Seconds since this process began, its imports included; 0 where the system does not say."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


@dataclass
class Start:
    """One start of a run, or several old ones added up."""

    begin: float
    """Seconds since 1970."""
    last: float
    """When it was last heard of."""
    first_step: int
    """Updates made when it began."""
    last_step: int
    """Updates made when it was last heard of."""
    kept_step: int
    """Newest step from which a later start continued; later steps were lost."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by reason, and `productive`."""
    count: int = 1
    """Starts that this stands for."""
    down: float = 0.0
    """Seconds between those."""


class Goodput:
    """The clock of this start, and what is known of those before it."""

    def __init__(self, path: Path | None, clock: Clock, *, wall: Callable[[], float] = time.time):
        """Read nothing yet.

        Args:
            path: `goodput.json`; None: nothing is kept (all processes but the first).
            clock: Clock of this start.
            wall: Seconds since 1970.
        """
        self.clock = clock
        self._path, self._wall = path, wall
        self._earlier: list[Start] = []
        self._this: Start | None = None
        self._written = -_EVERY_SECONDS
        self._failing = False

    def begin(self, restored_step: int) -> None:
        """Take up what the starts before left; steps that they made beyond this one are lost."""
        if self._path is not None:
            self._earlier = read_starts(self._path)
        for start in self._earlier:
            _lose(start, restored_step)
        while len(self._earlier) >= _MAX_STARTS:
            self._earlier[:2] = [_sum(*self._earlier[:2])]
        self.clock.started()  # the file shall not call a restart productive that has no step yet
        now = self._wall()
        self._this = Start(
            begin=now - self.clock.elapsed,
            last=now,
            first_step=restored_step,
            last_step=restored_step,
            kept_step=restored_step,
        )
        self.record(restored_step)

    def record(self, step: int) -> None:
        """Write the file; a file that cannot be written does not stop the run.

        Args:
            step: Updates made.
        """
        if self._this is None or self._path is None:
            return
        self._update(step)
        self._written = self.clock.elapsed
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
        """`record`, if the last one is some seconds old: what a killed start did is then known."""
        if self.clock.elapsed - self._written >= _EVERY_SECONDS:
            self.record(step)

    def shares(self) -> dict[str, float]:
        """Metrics: `perf/goodput` over all starts, and `perf/badput_<reason>`; they sum to 1."""
        starts = list(self._earlier)
        if self._this is None:  # before begin
            starts.append(Start(0.0, 0.0, 0, 0, 0, self.clock.seconds))
        else:
            self._update(self._this.last_step)
            starts.append(self._this)
        shares = time_shares(starts)
        return {
            "perf/goodput": shares.pop(_PRODUCTIVE),
            **{f"perf/badput_{reason}": share for reason, share in shares.items()},
        }

    def _update(self, step: int) -> None:
        assert self._this is not None
        self._this.seconds = self.clock.seconds
        self._this.last = max(self._this.last, self._wall())
        self._this.last_step = self._this.kept_step = step


def read_starts(path: Path) -> list[Start]:
    """Return the starts in a `goodput.json`, the oldest first.

    A file that is missing or not such a file has none: it is of no use to the training itself.
    """
    try:
        if not path.is_file():
            return []
        rows = read_json(path, max_bytes=_MAX_BYTES)["starts"]
        return [_start(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s is not readable, and begins anew: %r", path, error)
        return []


def total_seconds(starts: Sequence[Start]) -> dict[str, float]:
    """Seconds by reason over all starts: `productive` first, then the reasons that occurred."""
    totals: dict[str, float] = {_PRODUCTIVE: 0.0}
    names = [*REASONS, *(name for start in starts for name in start.seconds)]
    for name in dict.fromkeys([_PRODUCTIVE, *names]):
        seconds = sum((start.seconds.get(name, 0.0) for start in starts), 0.0)
        if seconds or name == _PRODUCTIVE:
            totals[name] = seconds
    return totals


def time_shares(starts: Sequence[Start]) -> dict[str, float]:
    """`total_seconds` as shares of their sum."""
    totals = total_seconds(starts)
    whole = max(sum(totals.values()), 1e-9)
    return {name: seconds / whole for name, seconds in totals.items()}


def down_seconds(starts: Sequence[Start]) -> float:
    """Seconds between the starts."""
    gaps = (max(0.0, b.begin - a.last) for a, b in itertools.pairwise(starts))
    return sum(gaps, sum((start.down for start in starts), 0.0))


def _lose(start: Start, restored_step: int) -> None:
    """Move the time of the steps that a later start does again from productive to lost."""
    kept = max(start.first_step, restored_step)
    if kept >= start.kept_step:
        return
    productive = start.seconds.get(_PRODUCTIVE, 0.0)
    lost = productive * (start.kept_step - kept) / (start.kept_step - start.first_step)
    start.seconds[_PRODUCTIVE] = productive - lost
    start.seconds["lost"] = start.seconds.get("lost", 0.0) + lost
    start.kept_step = kept


def _sum(a: Start, b: Start) -> Start:
    names = dict.fromkeys([*a.seconds, *b.seconds])
    return Start(
        begin=a.begin,
        last=b.last,
        first_step=a.first_step,
        last_step=b.last_step,
        kept_step=b.kept_step,
        seconds={name: a.seconds.get(name, 0.0) + b.seconds.get(name, 0.0) for name in names},
        count=a.count + b.count,
        down=a.down + b.down + max(0.0, b.begin - a.last),
    )


def _start(row: dict[str, Any]) -> Start:
    values: dict[str, Any] = {name: _number(row[name]) for name in ("begin", "last", "down")}
    for name in ("first_step", "last_step", "kept_step", "count"):
        if type(row[name]) is not int:
            raise TypeError(f"{name} is {row[name]!r}")
        values[name] = row[name]
    seconds = {name: _number(value) for name, value in row["seconds"].items()}
    return Start(seconds=seconds, **values)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a number")
    return float(value)

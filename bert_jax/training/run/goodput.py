"""The use of a run's wall time, over all its starts.

Goodput is the fraction of the time in which the run computed steps that count towards its result,
without waits for input. Badput is all other time, divided by reason: `compile`, `restore`, `save`,
`evaluation`, `input`, `profile`, `startup` (other time before the first step) and `lost` (steps
that a later start repeated, because they were not saved). Time between starts counts as `down`.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from bert_jax.artefacts.saved import runs
from bert_jax.artefacts.saved.runs import PRODUCTIVE, Start

_MAX_STARTS = 200  # records in goodput.json; the records of the oldest starts are added up
_EVERY_SECONDS = 10.0
_log = logging.getLogger("bert_jax")


class Clock:
    """Clock that divides one start's wall time between steps and reasons such as `save`."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, *, age: float = 0.0):
        """Start the clock; the start-up of the process has already taken `age` seconds."""
        self._now = now
        self._mark = now()
        self._start = self._mark - age
        self._on = PRODUCTIVE
        self._seconds = {PRODUCTIVE: 0.0} | ({"startup": age} if age else {})

    @contextlib.contextmanager
    def spend(self, on: str) -> Iterator[None]:
        """Count the time of the `with` block, without nested blocks, for the reason `on`."""
        before = self._switch(on)
        try:
            yield
        finally:
            self._switch(before)

    def started(self) -> None:
        """Mark the first step; count all earlier time without another reason as `startup`."""
        self._switch(self._on)
        startup = self._seconds.get("startup", 0.0) + self._seconds[PRODUCTIVE]
        self._seconds |= {"startup": startup, PRODUCTIVE: 0.0}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent on each reason and on steps (`productive`). Their sum is `elapsed`."""
        self._switch(self._on)
        return dict(self._seconds)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds spent on each reason, without the steps."""
        return {name: s for name, s in self.seconds.items() if name != PRODUCTIVE}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    @property
    def stepping(self) -> float:
        """Seconds spent on steps and on waits for input: the denominator of rates."""
        seconds = self.seconds
        return seconds[PRODUCTIVE] + seconds.get("input", 0.0)

    @property
    def goodput(self) -> float:
        """Fraction of the wall time that was spent on steps, without waits for input."""
        return self.seconds[PRODUCTIVE] / max(self.elapsed, 1e-9)

    def _switch(self, on: str) -> str:
        now = self._now()
        self._seconds[self._on] = self._seconds.get(self._on, 0.0) + now - self._mark
        before, self._on, self._mark = self._on, on, now
        return before


def process_age() -> float:
    """Return the number of seconds since this process began; 0 if it is unknown."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


class Goodput:
    """Record of the wall time of a run: this start and all starts before it."""

    def __init__(
        self,
        path: Path | None,
        clock: Clock,
        restored_step: int,
        devices: str = "",
        *,
        wall: Callable[[], float] = time.time,
    ):
        """Read the record of earlier starts, and count their steps after `restored_step` as lost.

        `path` is goodput.json in process 0, else None. An example of `devices` is "8 x TPU v4".
        """
        self.clock = clock
        self._path, self._wall = path, wall
        self._failing = False
        self._earlier = [] if path is None else runs.read_starts(path)
        for start in self._earlier:
            kept = max(start.first_step, restored_step)
            if kept >= start.kept_step:
                continue
            productive = start.seconds.get(PRODUCTIVE, 0.0)
            lost = productive * (start.kept_step - kept) / (start.kept_step - start.first_step)
            start.seconds[PRODUCTIVE] = productive - lost
            start.seconds["lost"] = start.seconds.get("lost", 0.0) + lost
            start.kept_step = kept
        while len(self._earlier) >= _MAX_STARTS:
            a, b = self._earlier[:2]
            seconds, down = runs.total_seconds([a, b]), runs.down_seconds([a, b])
            b = replace(b, begin=a.begin, first_step=a.first_step, count=a.count + b.count)
            self._earlier[:2] = [replace(b, seconds=seconds, down=down, flops=a.flops + b.flops)]
        clock.started()  # a start that dies before its first step has no productive time
        now = wall()
        self._this = Start(now - clock.elapsed, now, restored_step, restored_step, restored_step)
        self._this.devices = devices
        self.record(restored_step)

    def record(self, step: int) -> None:
        """Write the record after step `step` of the run. A failed write does not stop the run."""
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

    def tick(self, step: int, flops: int = 0) -> None:
        """Add the FLOPs of a step; call `record` if 10 s have passed since the last call."""
        self._this.flops += flops
        if self.clock.elapsed - self._written >= _EVERY_SECONDS:
            self.record(step)

    def shares(self) -> dict[str, float]:
        """Return `perf/goodput` and `perf/badput_<reason>` over all starts, which sum to 1."""
        self._update(self._this.last_step)
        totals = runs.total_seconds([*self._earlier, self._this])
        whole = max(sum(totals.values()), 1e-9)
        return {
            "perf/goodput": totals.pop(PRODUCTIVE) / whole,
            **{f"perf/badput_{reason}": seconds / whole for reason, seconds in totals.items()},
        }

    def _update(self, step: int) -> None:
        self._this.seconds = self.clock.seconds
        self._this.last = max(self._this.last, self._wall())
        self._this.last_step = self._this.kept_step = step

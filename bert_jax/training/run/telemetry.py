"""Telemetry of a run: metrics on disk, printed lines, a progress bar, rates and goodput.

Only process 0 writes and prints. In all other processes, the methods produce no output.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from bert_jax.chips import ACCELERATORS
from bert_jax.files.line_log import LineLog
from bert_jax.objectives.objective import Metric
from bert_jax.terminal import Intervals
from bert_jax.training.run.events import json_lines
from bert_jax.training.run.goodput import Clock, Goodput
from bert_jax.training.run.trackers import Board, Tracker, scalars

_FIRST_LINE = 5
"""Number of steps after which a start prints its first progress line."""


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of one JAX device, or None if the peak is unknown.

    The peak is known for bfloat16 only; float32 products use other units or take several passes.
    """
    accelerator = ACCELERATORS.get(device_kind)
    if accelerator is None or dtype != "bfloat16":
        return None
    return accelerator.bf16_flops / accelerator.devices_per_chip


class MetricsLog(LineLog):
    """Writer of `metrics.jsonl`: each line is a JSON object (row), in ascending order of `step`.

    A run that continues from a checkpoint cuts off the rows of later steps and writes them again.
    """

    def __init__(self, path: Path, restored_step: int):
        """Cut off the rows after `restored_step` and an incomplete last line.

        Raise an OSError if the file exists but cannot be cut.
        """
        super().__init__(path)
        if path.exists():
            kept = 0
            for end, row in _rows(path.read_bytes()):
                if row["step"] > restored_step:
                    break
                kept = end
            os.truncate(path, kept)  # in place, which works on a full disk

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Add a row. Numbers that are not finite become null, since JSON cannot express them."""

        def plain(value: Any) -> Any:
            if isinstance(value, list):
                return [plain(each) for each in value]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        row = {name: plain(value) for name, value in values.items()}
        self.write(json.dumps({"step": step, **row}))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl` that have an integer `step`, one row per step.

    Incomplete lines are left out, and a missing file has no rows. Some values, such as a failed
    save, become known only after the row of their step was written. They are on another line of the
    file, with the same step. This function merges the lines of a step into one row.
    """
    rows: dict[int, dict[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for _, row in _rows(path.read_bytes()):
            rows.setdefault(row["step"], {}).update(row)
    return list(rows.values())


def points(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return (step, value) for each row in which the column `name` is a finite number."""
    return [
        (float(row["step"]), float(row[name]))
        for row in rows
        if type(row.get(name)) in (int, float) and math.isfinite(row[name])
    ]


def _rows(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row that has a step, and the byte offset at which the next line begins."""
    return ((end, row) for end, row in json_lines(data) if type(row.get("step")) is int)


class Rates:
    """Rates of training since the last `take`, without the time spent on other work."""

    def __init__(self, clock: Clock, peak: float | None):
        """Start to count. Without `peak`, the peak FLOP/s of all devices, no MFU is computed."""
        self._clock, self._peak = clock, peak
        self._restart()

    def add(self, num_tokens: float, flops: int) -> None:
        """Count a step with its tokens and its model FLOPs."""
        self._tokens += num_tokens
        self._flops += flops
        self._steps += 1

    def take(self) -> dict[str, float]:
        """Return tokens and steps per second and the MFU, and start to count anew."""
        seconds = max(self._clock.stepping - self._since, 1e-9)
        values = {
            "perf/tokens_per_second": self._tokens / seconds,
            "perf/steps_per_second": self._steps / seconds,
        }
        if self._peak:
            values["perf/mfu"] = self._flops / seconds / self._peak
        self._restart()
        return values

    def _restart(self) -> None:
        self._tokens, self._flops, self._steps = 0.0, 0, 0
        self._since = self._clock.stepping


class Telemetry:
    """Context manager of the outputs of a run: metrics, printed lines, and a progress bar."""

    def __init__(
        self,
        workdir: Path,
        *,
        num_steps: int,
        restored_step: int,
        peak: float | None,
        metrics: Sequence[Metric],
        goodput: Goodput,
        echo: Callable[[str], None] | None = None,
        trackers: Sequence[Tracker] = (),
    ):
        """Open `metrics.jsonl` and `tensorboard/` in `workdir`.

        Rows after step `restored_step` are dropped. `peak` is the peak FLOP/s of all devices
        together; without it, no MFU is computed. `goodput` is recorded with each row. `echo`
        receives each line. By default, lines are printed, and a terminal shows a progress bar.
        The `trackers` receive all metrics, too, and are finished at the end.
        """
        self._active = jax.process_index() == 0
        self._num_steps, self._metrics = num_steps, metrics
        self._goodput, self._clock = goodput, goodput.clock
        self._row_rates, self._line_rates = (Rates(self._clock, peak) for _ in range(2))
        self._first_line = restored_step + _FIRST_LINE
        self._intervals = Intervals(lambda: self._clock.elapsed)
        self._echo = echo or self._print
        self._bar: Any = None
        self._row: dict[str, Any] = {}
        if not self._active:
            return
        if echo is None and sys.stderr.isatty():
            self._bar = tqdm(
                total=num_steps, initial=restored_step, unit="step", dynamic_ncols=True, leave=False
            )
        self._log = MetricsLog(workdir / "metrics.jsonl", restored_step)
        self._board = Board(workdir / "tensorboard", purge_step=restored_step + 1)
        self._trackers = (self._board, *trackers)

    def __enter__(self) -> "Telemetry":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._active:
            self._end_row()
            self._log.close()
            for tracker in self._trackers:
                tracker.finish()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._active:
            self._echo(text)

    def step_done(self, step: int, num_tokens: float, flops: int, value: float) -> None:
        """Count a step for the rates, and advance the progress bar, which shows `value`.

        `num_tokens` is the number of the batch's tokens without padding, `flops` the model FLOPs.
        """
        if self._row.get("step") != step:
            self._end_row()
        for rates in (self._row_rates, self._line_rates):
            rates.add(num_tokens, flops)
        self._goodput.tick(step, flops)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._metrics[0].short} {value:.3f}", refresh=False)
            self._bar.update(1)

    def rates(self) -> dict[str, float]:
        """Return the rates since the last call, and the goodput (see `Goodput.shares`)."""
        return self._row_rates.take() | self._goodput.shares()

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Add values to the row of a step. The row is written once a later step is done."""
        if self._active:
            if self._row.get("step") != step:
                self._end_row()
            self._row |= {"step": step, **values}
            self._goodput.record(step)

    def _end_row(self) -> None:
        row, self._row = self._row, {}
        if row:
            step = row.pop("step")
            self._log.add(step, row)
            for tracker in self._trackers:
                tracker.log(scalars(row), step)

    def line_due(self, step: int) -> bool:
        """Return true if a progress line is due: five steps after the start, then at intervals.

        For the intervals see `Intervals`. With a progress bar, no line is due.
        """
        if self._bar is not None or not self._active or step < self._first_line:
            return False
        return self._intervals.due() or step == self._first_line

    def progress_line(self, step: int, values: Mapping[str, float]) -> None:
        """Print metrics, by name, on a line with the rates and the time left."""
        rates = self._line_rates.take()
        parts = [f"step {step:,}/{self._num_steps:,}"] + [
            f"{metric.short} {values[metric.name]:.3f}"
            for metric in self._metrics
            if metric.short and metric.name in values
        ]
        left = (self._num_steps - step) / rates["perf/steps_per_second"]
        parts += [f"{rates['perf/tokens_per_second']:,.0f} tokens/s", f"{duration(left)} left"]
        if "perf/mfu" in rates:
            parts.append(f"MFU {100 * rates['perf/mfu']:.1f}%")
        self.say("  ".join(parts))

    def sync(self) -> None:
        """Wait until all rows are on disk; ignore failures."""
        if self._active:
            self._end_row()
            self._log.sync()
            self._board.sync()

    def _print(self, text: str) -> None:
        try:
            if self._bar is not None:
                tqdm.write(text, file=sys.stdout)
            else:
                print(text, flush=True)
        except BrokenPipeError:
            raise
        except OSError:  # the output goes to a file whose disk is full
            pass


def duration(seconds: float) -> str:
    """Format a duration for reading: `45 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    whole, units = round(seconds), ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    for (unit, name), (smaller, small_name) in pairwise(units):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // smaller} {small_name}"
    return f"{whole} s"


def readout(
    metrics: Sequence[Metric], row: Mapping[str, Any], split: str, baseline: float | None
) -> str:
    """Describe a row's first metric, then others with short names; "" if the first is missing.

    `split` is the prefix of the columns: `train` or `eval`. `baseline` is for the first metric.
    """
    first, *others = metrics
    value = row.get(f"{split}/{first.name}")
    if not isinstance(value, float):
        return ""
    parts = [f"{first.short} {compare(first, value, baseline)}"]
    for metric in others:
        value = row.get(f"{split}/{metric.name}")
        if not metric.short or not isinstance(value, float):
            continue
        parts.append(f"{metric.short} {value:.3f}")
        floor = row.get(f"{split}/{metric.floor}")
        if isinstance(floor, float):
            parts[-1] += f" (majority label {floor:.3f})"
    return "; ".join(parts)


def compare(metric: Metric, value: float, baseline: float | None) -> str:
    """Describe a value relative to a baseline: `6.512 nats, 0.431 below unigram entropy`."""
    text = f"{value:.3f} {metric.unit.partition(' ')[0]}".rstrip()
    if baseline is None:
        return text
    side = "below" if value <= baseline else "above"
    return f"{text}, {abs(baseline - value):.3f} {side} {metric.baseline}"

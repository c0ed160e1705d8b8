"""Telemetry of a run: metrics on disk, lines and a bar on the terminal, rates and goodput.

Only process 0 writes and prints; on the others every method here is quiet.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from bert_jax.chips import find_accelerator
from bert_jax.files.line_log import LineLog
from bert_jax.model.config import ModelConfig
from bert_jax.model.layers import compute_dtype
from bert_jax.objectives.objective import Metric
from bert_jax.run.board import Board
from bert_jax.run.console import Console
from bert_jax.run.goodput import Clock, Goodput


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """FLOP/s at best of what JAX calls one device, or None when it is not known.

    Only bfloat16 has an entry: a float32 product runs on other units, or on the same ones in three
    passes, as the compiler decides.
    """
    accelerator = find_accelerator(device_kind)
    if accelerator is None or dtype != "bfloat16":
        return None
    return accelerator.bf16_flops / accelerator.devices_per_chip


def whole_peak(model: ModelConfig, num_devices: int) -> float | None:
    """Return the FLOP/s of all devices at best, or None when it is not known."""
    peak = peak_flops(jax.devices()[0].device_kind, compute_dtype(model).name)
    return None if peak is None else peak * num_devices


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line, `step` (updates made) first, in ascending order.

    A step is never there twice: what a run wrote after its last checkpoint is dropped when it
    continues from there, since it is about to be written again. Rows that cannot be written wait
    (see `LineLog`).
    """

    def __init__(self, path: Path, restored_step: int):
        """Cuts off what comes after the last row of `restored_step` or before.

        Raises:
            OSError: The file is there and cannot be cut.
        """
        self._lines = LineLog(path)
        if path.exists():
            kept = 0
            for end, row in _rows(path.read_bytes()):
                if row["step"] > restored_step:
                    break
                kept = end
            os.truncate(path, kept)  # in place: it takes no room

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Add a row; a number that is not finite becomes null, which JSON can hold."""
        row = {"step": step, **values}
        self._lines.write(
            json.dumps(
                {
                    key: None if isinstance(value, float) and not math.isfinite(value) else value
                    for key, value in row.items()
                }
            )
        )

    def sync(self) -> None:
        """Wait until all rows are on the disk, if the disk takes them."""
        self._lines.sync()

    def close(self) -> None:
        """Try a last time to write the rows that wait."""
        self._lines.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl`; lines that are not whole rows are left out.

    Every row has a `step`, an integer. A file that is missing has no rows.
    """
    try:
        return [row for _, row in _rows(path.read_bytes())]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _rows(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row, and the byte at which the line after it begins."""
    end = 0
    for line in data.splitlines(keepends=True):
        end += len(line)
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if line.endswith(b"\n") and isinstance(row, dict) and type(row.get("step")) is int:
                yield end, row


@dataclass
class Means:
    """Means over the steps since the last row; its state goes into the checkpoint."""

    sums: dict[str, float] = field(default_factory=dict)
    count: int = 0

    def add(self, values: dict[str, float]) -> None:
        """Take the metrics of one step."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.count += 1

    def take(self) -> dict[str, float]:
        """Return the means, and starts anew."""
        means = {name: total / self.count for name, total in self.sums.items()}
        self.sums, self.count = {}, 0
        return means


class Telemetry:
    """The outputs of one run. A context manager."""

    def __init__(
        self,
        workdir: Path,
        *,
        num_steps: int,
        restored_step: int,
        peak: float | None,
        clock: Clock,
        metrics: Sequence[Metric],
        goodput: Goodput | None = None,
        echo: Callable[[str], None] | None = None,
    ):
        """Open the files.

        Args:
            workdir: Gets `metrics.jsonl` and `tensorboard/`.
            num_steps: Length of the run.
            restored_step: Rows beyond it are dropped.
            peak: FLOP/s of all devices together; None: no MFU.
            clock: Clock of this start.
            metrics: Metrics of the objective, for lines.
            goodput: Over all starts; its `record` is called with what is written here.
            echo: Gets each line for people; None: standard output, around the bar.
        """
        self._active = jax.process_index() == 0
        self._num_steps, self._clock, self._metrics = num_steps, clock, metrics
        self._goodput = goodput or Goodput(None, clock)
        self._peak = peak
        self._tokens, self._flops, self._since = 0.0, 0.0, clock.stepping
        self._steps = 0
        self._console = Console(num_steps, restored_step, echo)
        if not self._active:
            return
        self._log = MetricsLog(workdir / "metrics.jsonl", restored_step)
        self._board = Board(workdir / "tensorboard", purge_step=restored_step + 1)

    def __enter__(self) -> "Telemetry":
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            self._console.close()
            self._log.close()
            self._board.close()

    def say(self, text: str) -> None:
        """Print a line for people."""
        self._console.say(text)

    def step_done(self, step: int, num_tokens: float, flops: int, value: float) -> None:
        """Count a step towards the rates and move the bar, beside which `value` stands.

        Args:
            step: Updates made.
            num_tokens: Tokens of the batch, without padding.
            flops: Analytic floating-point operations of the step.
            value: Value of the first metric.
        """
        self._tokens += num_tokens
        self._flops += flops
        self._steps += 1
        self._goodput.tick(step)
        self._console.tick(f"{self._metrics[0].short} {value:.3f}")

    def rates(self) -> dict[str, float]:
        """Rates since they were last asked for."""
        seconds = max(self._clock.stepping - self._since, 1e-9)
        values = {
            "perf/tokens_per_second": self._tokens / seconds,
            "perf/steps_per_second": self._steps / seconds,
        }
        if self._peak:
            values["perf/mfu"] = self._flops / seconds / self._peak
        values |= self._goodput.shares()
        self._tokens, self._flops, self._since, self._steps = 0.0, 0.0, self._clock.stepping, 0
        return values

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write a row of metrics to the file and to TensorBoard."""
        if not self._active:
            return
        self._log.write(step, values)
        self._goodput.record(step)
        self._board.write(step, values)

    def progress_line(self, step: int, values: dict[str, float]) -> None:
        """Print a row of training metrics, where no bar shows the progress."""
        if self._console.has_bar:
            return
        parts = [f"step {step:,}/{self._num_steps:,}"] + [
            f"{metric.short} {values[f'train/{metric.name}']:.3f}"
            for metric in self._metrics
            if metric.short and f"train/{metric.name}" in values
        ]
        if values.get("perf/steps_per_second"):
            parts.append(f"{values['perf/tokens_per_second']:,.0f} tokens/s")
            left = (self._num_steps - step) / values["perf/steps_per_second"]
            parts.append(f"{duration(left)} left")
        if "perf/mfu" in values:
            parts.append(f"MFU {100 * values['perf/mfu']:.1f}%")
        self.say("  ".join(parts))

    def sync(self) -> None:
        """Wait until all rows are on the disk, if the disk takes them."""
        if self._active:
            self._log.sync()
            self._board.sync()


def duration(seconds: float) -> str:
    """Seconds for people: `45 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = round(seconds)
    for unit, name, smaller, small_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // smaller} {small_name}"
    return f"{whole} s"

"""Telemetry of a run: metrics on disk, lines and a bar on the terminal, rates and goodput.

Only process 0 writes and prints; on the others every method here is quiet.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from bert_jax.chips import ACCELERATORS
from bert_jax.files.line_log import LineLog
from bert_jax.objectives.objective import Metric
from bert_jax.training.run.board import Board
from bert_jax.training.run.events import json_lines
from bert_jax.training.run.goodput import Goodput


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of one device in JAX's sense, or None where it is not known.

    Only bfloat16 has one: float32 products run on other units, or on the same in three passes.
    """
    accelerator = ACCELERATORS.get(device_kind)
    if accelerator is None or dtype != "bfloat16":
        return None
    return accelerator.bf16_flops / accelerator.devices_per_chip


class MetricsLog(LineLog):
    """`metrics.jsonl`: one JSON object a line, `step` (updates made) first, in ascending order.

    A run that continues from a checkpoint writes the later rows again, so no step occurs twice.
    """

    def __init__(self, path: Path, restored_step: int):
        """Cut off the rows after `restored_step`, all before the first step, and a torn last line.

        Raises:
            OSError: The file is there and cannot be cut.
        """
        super().__init__(path)
        if path.exists():
            kept = 0
            for end, row in _rows(path.read_bytes()):
                if row["step"] > restored_step or not restored_step:
                    break
                kept = end
            os.truncate(path, kept)  # in place: it takes no room

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Add a row; a number that is not finite becomes null, because JSON has no other."""

        def plain(value: Any) -> Any:
            if isinstance(value, list):
                return [plain(each) for each in value]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        row = {name: plain(value) for name, value in values.items()}
        self.write(json.dumps({"step": step, **row}))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl` with an integer `step`, leaving out torn lines.

    A file that is missing has no rows. What a start adds to a step whose row was written, such as
    the failure of its save, is a line of its own there and part of the row here.
    """
    rows: dict[int, dict[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for _, row in _rows(path.read_bytes()):
            rows.setdefault(row["step"], {}).update(row)
    return list(rows.values())


def points(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return (step, value) of each row in which a column is a finite number."""
    return [
        (float(row["step"]), float(row[name]))
        for row in rows
        if type(row.get(name)) in (int, float) and math.isfinite(row[name])
    ]


def _rows(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row with a step, and the byte at which the next line begins."""
    return ((end, row) for end, row in json_lines(data) if type(row.get("step")) is int)


class Telemetry:
    """Outputs of one start of a run: rows, lines, and a bar on a terminal. A context manager."""

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
    ):
        """Open `metrics.jsonl` and `tensorboard/` in `workdir`.

        Rows after `restored_step` updates are dropped. `peak` is the FLOP/s of all devices, None:
        no MFU. `goodput` is recorded with each row. `echo` gets each line for people; None:
        standard output, around a bar on a terminal.
        """
        self._active = jax.process_index() == 0
        self._num_steps, self._metrics = num_steps, metrics
        self._goodput, self._clock = goodput, goodput.clock
        self._peak = peak
        self._echo = echo or self._print
        self._bar: Any = None
        self._row: dict[str, Any] = {}
        self._restart_rates()
        if not self._active:
            return
        if echo is None and sys.stderr.isatty():
            self._bar = tqdm(
                total=num_steps, initial=restored_step, unit="step", dynamic_ncols=True, leave=False
            )
        self._log = MetricsLog(workdir / "metrics.jsonl", restored_step)
        self._board = Board(workdir / "tensorboard", purge_step=restored_step + 1)

    def __enter__(self) -> "Telemetry":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._active:
            self._end_row()
            self._log.close()
            self._board.close()

    def say(self, text: str) -> None:
        """Print a line for people, in process 0."""
        if self._active:
            self._echo(text)

    def step_done(self, step: int, num_tokens: float, flops: int, value: float) -> None:
        """Count a step towards the rates, and move the bar, which shows `value`.

        `num_tokens` are the batch's without padding, `flops` the analytic operations of the step.
        """
        if self._row.get("step") != step:
            self._end_row()
        self._tokens += num_tokens
        self._flops += flops
        self._steps += 1
        self._goodput.tick(step)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._metrics[0].short} {value:.3f}", refresh=False)
            self._bar.update(1)

    def rates(self) -> dict[str, float]:
        """Return the rates since the last call, and the shares of goodput."""
        seconds = max(self._clock.stepping - self._since, 1e-9)
        values = {
            "perf/tokens_per_second": self._tokens / seconds,
            "perf/steps_per_second": self._steps / seconds,
        }
        if self._peak:
            values["perf/mfu"] = self._flops / seconds / self._peak
        values |= self._goodput.shares()
        self._restart_rates()
        return values

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Add values to the row of a step, which is written once a later step is done."""
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
            self._board.write(step, row)

    def progress_line(self, step: int, values: dict[str, float]) -> None:
        """Print a row of training metrics, where no bar shows the progress."""
        if self._bar is not None:
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
            self._end_row()
            self._log.sync()
            self._board.sync()

    def _restart_rates(self) -> None:
        self._tokens, self._flops, self._steps = 0.0, 0.0, 0
        self._since = self._clock.stepping

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
    """Write seconds for people: `45 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = round(seconds)
    for unit, name, smaller, small_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // smaller} {small_name}"
    return f"{whole} s"


def readout(
    metrics: Sequence[Metric], row: Mapping[str, Any], split: str, baseline: float | None
) -> str:
    """Describe the shown metrics of a row of metrics.jsonl; empty where the first is missing.

    `split` is their prefix, `train` or `eval`; `baseline` belongs to the first metric, if known.
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
    """Set a value beside its baseline: `6.512 nats, 0.431 below unigram entropy`."""
    text = f"{value:.3f} {metric.unit.partition(' ')[0]}".rstrip()
    if baseline is None:
        return text
    side = "below" if value <= baseline else "above"
    return f"{text}, {abs(baseline - value):.3f} {side} {metric.baseline}"

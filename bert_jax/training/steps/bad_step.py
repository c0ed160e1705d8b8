"""Messages about a step that the guard (`guard.py`) rejected, and a recomputation of the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bert_jax.training.steps.guard import cleared

_MOST_PROCESSES = 16
"""Largest number of processes whose devices a message lists."""


@dataclass(frozen=True)
class BadStep:
    """Step with a non-finite loss or gradient, or a loss spike."""

    batch: int
    """Index of the bad batch."""
    metrics: Mapping[str, np.ndarray]
    """Metrics of the step, as scalar arrays."""

    @property
    def halted(self) -> bool:
        """Whether the step stopped the run; otherwise its batch was skipped."""
        return bool(self.metrics["halted"])

    @property
    def in_a_row(self) -> int:
        """Number of batches skipped in a row, including this one if it was skipped."""
        return int(self.metrics["guard_skipped"])

    @property
    def statistics(self) -> dict[str, float]:
        """Loss, gradient norm, and the statistics that the loss was compared with."""
        names = ("loss", "grad_norm", "guard_mean", "guard_std", "guard_limit")
        return {name: float(self.metrics[name]) for name in names}

    def describe(self) -> str:
        """Describe the fault and the statistics, without a full stop."""
        loss, norm, mean, std, limit = self.statistics.values()
        judged = f"{limit:.4f}" if np.isfinite(limit) else "not set"
        if np.isfinite(loss) and np.isfinite(norm):
            what = f"the loss of batch {self.batch:,} is {loss:.4f}, a spike"
        else:
            what = f"the loss of batch {self.batch:,} is {loss:g} and its gradient norm {norm:g}"
        return (
            f"{what} (recent losses: mean {mean:.4f}, standard deviation {std:.4f}; limit {judged})"
        )


def find_bad_step(batch: int, metrics: Mapping[str, Any]) -> BadStep | None:
    """Return a `BadStep` if `metrics` show that the step of batch `batch` was bad, else None."""
    return BadStep(batch, _scalars(metrics)) if np.any(metrics["bad"]) else None


def _scalars(metrics: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return one run's metrics as scalars. The given arrays may have an axis for a single trial."""
    return {name: np.asarray(value).reshape(()) for name, value in metrics.items()}


def skipped_message(bad: BadStep, look: str = "") -> str:
    """Describe a skipped batch on one line; `look` is a command that shows the batch."""
    row = f", {bad.in_a_row:,} in a row" if bad.in_a_row > 1 else ""
    text = f"batch {bad.batch:,} was skipped{row}: {bad.describe()}"
    return f"{text}. See it with `{look}`" if look else text


@dataclass(frozen=True)
class Comparison:
    """Comparison of two computations of one step from the same inputs."""

    differing: Mapping[str, tuple[float, float]]
    """First and second values of the metrics whose bits differ; two NaNs count as equal."""
    devices: str
    """Devices that computed the step."""
    platform: str
    """Platform of the devices: cpu, gpu or tpu."""

    def describe(self) -> str:
        """Explain the likely cause of the bad step."""
        if not self.differing:
            return (
                "Computed again from the same inputs, the step gave the same result to the last "
                "bit: the cause is the data, the learning rate or the model, not the hardware"
            )
        pairs = (f"{name} {a:.9g}, then {b:.9g}" for name, (a, b) in self.differing.items())
        text = (
            "Computed again from the same inputs, the step gave a different result "
            f"({'; '.join(pairs)}): suspect the hardware ({self.devices})"
        )
        if self.platform == "gpu":
            text += (
                ". But GPU kernels may add in a different order each time: if only the last digits "
                "differ, the hardware is not at fault"
            )
        return text


def compute_again(
    train_step: Any, state: Any, batch: Any, first: Mapping[str, np.ndarray]
) -> Comparison:
    """Repeat the step that halted the run, and compare its metrics with the first result.

    Collective. The halted step got `batch`, and returned `state` (now donated) and metrics `first`.
    """
    _, again = train_step(state._replace(guard=cleared(state.guard)), batch)
    devices = sorted(again["loss"].sharding.device_set, key=lambda device: device.id)
    second = _scalars({name: jax.device_get(again[name]) for name in first})
    return Comparison(
        differing={
            name: (float(first[name]), float(second[name]))
            for name in sorted(second)
            if first[name].tobytes() != second[name].tobytes()
            and not (np.isnan(first[name]) and np.isnan(second[name]))
        },
        devices=listed_devices(devices),
        platform=devices[0].platform,
    )


def listed_devices(devices: Sequence[Any]) -> str:
    """Describe devices of one kind by their ids and processes."""
    ids: dict[int, list[str]] = {}
    for device in devices:
        ids.setdefault(device.process_index, []).append(str(device.id))
    parts = [f"{', '.join(of)} of process {process}" for process, of in sorted(ids.items())]
    if len(parts) > _MOST_PROCESSES:
        parts = [*parts[:_MOST_PROCESSES], f"and of {len(parts) - _MOST_PROCESSES} more processes"]
    return f"{devices[0].device_kind}, device ids {'; '.join(parts)}"


class BadStepError(RuntimeError):
    """Error about a bad step that stops the run. All checkpoints are from before this step."""

    exit_code = 4

    def __init__(self, bad: BadStep, comparison: Comparison, last_saved: str, look: str = ""):
        """Write a message that names the fault, its likely cause and the remedies.

        `last_saved` is the newest checkpoint's path, `look` a command that shows the batch (or "").
        """
        checkpoint = last_saved or "none was saved"
        look = f"See the batch with `{look}`. " if look else ""
        skipped = ""
        if bad.in_a_row:
            batches = "batch" if bad.in_a_row == 1 else f"{bad.in_a_row:,} batches"
            skipped = f"; the {batches} before it had to be skipped"
        super().__init__(
            f"{bad.describe()}{skipped}; the run stops, and the step was not taken. "
            f"{comparison.describe()}. {look}The last good checkpoint: {checkpoint}. Rerun the "
            "command to continue from this checkpoint, if there is one. With "
            "--config.guard.on_bad_step=skip the run skips bad batches; with a higher "
            "--config.guard.spike_sigmas (0 means no limit) fewer losses count as spikes. Most "
            "often the learning rate is too high or the warm-up too short; to change these, start "
            "a run in another work directory"
        )
        self.step = bad.batch
        """Index of the bad batch."""
        self.comparison = comparison

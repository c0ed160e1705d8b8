"""What is said and done about a step that the guard did not take (`guard.py` decides)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.training.guard import GUARD_METRICS, cleared

_MOST_PROCESSES = 16
"""Whose devices a message lists."""


@dataclass(frozen=True)
class BadStep:
    """A step whose loss or gradient was not finite, or whose loss was a spike."""

    batch: int
    """Its number."""
    metrics: Mapping[str, np.ndarray]
    """Of the step as the device gave them, scalars."""

    @property
    def halted(self) -> bool:
        """Whether it stopped the run; else its batch was skipped."""
        return bool(self.metrics["halted"])

    @property
    def in_a_row(self) -> int:
        """Batches skipped in a row, this one included where it was skipped."""
        return int(self.metrics["guard_skipped"])

    @property
    def statistics(self) -> dict[str, float]:
        """Loss, gradient norm, and what the loss was judged by."""
        names = ("loss", "grad_norm", "guard_mean", "guard_std", "guard_limit")
        return {name: float(self.metrics[name]) for name in names}

    def describe(self) -> str:
        """What was bad, with the statistics, as a clause."""
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
    """The bad step that these metrics tell of, or None.

    Args:
        batch: Number of the batch they are of.
        metrics: Of one step, on the device or not; waits for them.
    """
    if not np.asarray(metrics["bad"]):
        return None
    return BadStep(batch, {name: np.asarray(value) for name, value in metrics.items()})


def without_guard(values: Mapping[str, float]) -> dict[str, float]:
    """Metrics without the guard's, which are not for means: a limit may be infinite."""
    return {name: value for name, value in values.items() if name not in GUARD_METRICS}


def skipped_message(bad: BadStep, workdir: Path | str) -> str:
    """A line for a batch that was left out."""
    row = f", {bad.in_a_row:,} in a row" if bad.in_a_row > 1 else ""
    return (
        f"batch {bad.batch:,} was skipped{row}: {bad.describe()}. "
        f"See it with `{replay_command(workdir, bad.batch)}`"
    )


def replay_command(workdir: Path | str, batch: int) -> str:
    """The command that shows a batch as text."""
    return f"bert-jax replay {workdir} --step {batch}"


@dataclass(frozen=True)
class Verdict:
    """A step computed twice from the same inputs."""

    differing: Mapping[str, tuple[float, float]]
    """Metrics whose bits differ: the first value and the second."""
    devices: str
    """That computed it."""
    platform: str
    """cpu, gpu or tpu."""

    @property
    def same(self) -> bool:
        """Whether all metrics were the same to the last bit; one NaN equals another."""
        return not self.differing

    def describe(self) -> str:
        """What follows from it, as sentences."""
        if self.same:
            return (
                "Computed again from the same inputs, it came out the same to the last bit: the "
                "cause is the data, the learning rate or the model, not the hardware"
            )
        pairs = (f"{name} {a:.9g}, then {b:.9g}" for name, (a, b) in self.differing.items())
        text = (
            f"Computed again from the same inputs, it came out otherwise ({'; '.join(pairs)}): "
            f"suspect the hardware ({self.devices})"
        )
        if self.platform == "gpu":
            text += (
                ". Kernels of a GPU may add in another order each time: where only last digits "
                "differ, this is no fault"
            )
        return text


def rerun(train_step: Any, state: Any, batch: Any, first: Mapping[str, np.ndarray]) -> Verdict:
    """Computes the step that halted the run once more, and compares.

    A collective: with several processes all call it, and all do, since they read the same metrics.

    Args:
        train_step: The compiled step.
        state: As a halted step returned it. It is donated, so it is gone afterwards.
        batch: Of that step, on the mesh.
        first: Its metrics.
    """
    _, again = train_step(state._replace(guard=cleared(state.guard)), batch)
    devices = sorted(again["loss"].sharding.device_set, key=lambda device: device.id)
    second = jax.device_get(again)
    return Verdict(
        differing={
            name: (float(first[name]), float(second[name]))
            for name in sorted(second)
            if not _same_bits(np.asarray(first[name]), np.asarray(second[name]))
        },
        devices=_listed(devices),
        platform=devices[0].platform,
    )


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    both_nan = np.issubdtype(a.dtype, np.floating) and np.isnan(a).all() and np.isnan(b).all()
    return bool(both_nan or a.tobytes() == b.tobytes())


def _listed(devices: list[Any]) -> str:
    ids: dict[int, list[str]] = {}
    for device in devices:
        ids.setdefault(device.process_index, []).append(str(device.id))
    parts = [f"{', '.join(of)} of process {process}" for process, of in sorted(ids.items())]
    if len(parts) > _MOST_PROCESSES:
        parts = [*parts[:_MOST_PROCESSES], f"and of {len(parts) - _MOST_PROCESSES} more processes"]
    return f"{devices[0].device_kind}, device ids {'; '.join(parts)}"


class BadStepError(RuntimeError):
    """A step is bad and the configuration says to stop; nothing of it or after it was saved."""

    exit_code = 4

    def __init__(self, bad: BadStep, verdict: Verdict, workdir: Path | str, last_saved: int | None):
        """Says what happened, why, and what can be done.

        Args:
            bad: The step.
            verdict: Of its second run.
            workdir: Of the run.
            last_saved: Step of the newest checkpoint; None: there is none.
        """
        checkpoint = "none was saved"
        if last_saved is not None:
            checkpoint = f"{workdir}/checkpoints/{last_saved}"
        skipped = ""
        if bad.in_a_row:
            batches = "batch" if bad.in_a_row == 1 else f"{bad.in_a_row:,} batches"
            skipped = f"; the {batches} before it had to be skipped"
        super().__init__(
            f"{bad.describe()}{skipped}; the run stops, and the step was not taken. "
            f"{verdict.describe()}. See the batch with `{replay_command(workdir, bad.batch)}`. "
            f"The last good checkpoint: {checkpoint}. Given again, the command goes on from there; "
            "with --config.guard.on_bad_step=skip it leaves such batches out, with a higher "
            "--config.guard.spike_sigmas (0: none) fewer losses count as spikes. Most often the "
            "learning rate is too high or the warm-up too short; a run with other values of these "
            "needs a work directory of its own"
        )
        self.step = bad.batch
        """Number of the batch."""
        self.bad, self.verdict = bad, verdict

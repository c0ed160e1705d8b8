"""Metrics of a run as words: for progress lines, evaluations, status and the end of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.objectives.objective import Metric


def readout(
    metrics: Sequence[Metric], row: Mapping[str, Any], split: str, baseline: float | None
) -> str:
    """Describe the shown metrics of a row; empty where the first metric is missing.

    Args:
        metrics: Metrics of the objective.
        row: Values by name, as in metrics.jsonl.
        split: Prefix of the names: `train` or `eval`.
        baseline: Value of the first metric for a model that ignores its input, if known.
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

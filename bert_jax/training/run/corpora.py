"""Corpora of a mixture in the metrics of a run: text seen, epochs, and held-out loss of each.

A row of `metrics.jsonl` has `data/LABEL/tokens` and `data/LABEL/epochs` with the training metrics,
and `eval/METRIC/LABEL` with the held-out metrics. A run of one corpus has only the sums over all
text, `data/rows` and `data/tokens`, which every run has.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeGuard

from bert_jax.objectives.objective import Metric


@dataclass(frozen=True)
class CorpusCurve:
    """One corpus of a mixture over a run."""

    label: str
    tokens: float
    """Tokens of text that were read."""
    epochs: float
    """Passes over the text."""
    heldout: list[tuple[float, float]]
    """Points (step, first metric on the held-out text of the corpus)."""

    def describe(self) -> str:
        """Return the amounts and the newest loss on one line."""
        loss = f", held-out {self.heldout[-1][1]:.3f}" if self.heldout else ""
        return f"{amount(self.tokens)} tokens, {self.epochs:.3g} epochs{loss}"


def corpus_labels(names: Sequence[str]) -> tuple[str, ...]:
    """Shorten paths to their shortest distinct ends: work/de and work/en become de and en."""
    paths = [PurePath(name).parts for name in names]
    most = max((len(parts) for parts in paths), default=1)
    for count in range(1, most + 1):
        labels = tuple("/".join(parts[-count:]) for parts in paths)
        if len(set(labels)) == len(labels):
            return labels
    return tuple(names)


def amounts(
    labels: Sequence[str], tokens: Iterable[int], epochs: Iterable[float]
) -> dict[str, Any]:
    """Return the values of a row of metrics for the text that was read so far."""
    row: dict[str, Any] = {}
    for label, number, passes in zip(labels, tokens, epochs, strict=True):
        row |= {f"data/{label}/tokens": number, f"data/{label}/epochs": round(passes, 6)}
    return row


def corpus_curves(rows: Sequence[Mapping[str, Any]], metric: Metric) -> list[CorpusCurve]:
    """Return the corpora that rows of `metrics.jsonl` name; none in a run of one corpus."""
    seen: dict[str, tuple[float, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("data/") and name.endswith("/epochs") and _is_number(value):
                label = name[len("data/") : -len("/epochs")]
                tokens = row.get(f"data/{label}/tokens")
                seen[label] = (float(tokens) if _is_number(tokens) else 0.0, float(value))
    return [
        CorpusCurve(
            label,
            *read,
            [
                (float(row["step"]), float(row[name]))
                for row in rows
                if _is_number(row.get(name := f"eval/{metric.name}/{label}"))
            ],
        )
        for label, read in seen.items()
    ]


def amount(number: float) -> str:
    """Write a number of tokens for people: 950, 1.2 M, 34.5 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float)

"""The loss curve of a run as a picture, beside the unigram entropy of its corpus."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_TRAIN, _EVAL, _BASELINE, _INK = "#2b6cb0", "#c2410c", "#4a5568", "#1a202c"


def draw_loss_curve(
    rows: Sequence[dict[str, Any]],
    baseline: float,
    path: Path,
    *,
    title: str = "",
    phase_ends: Sequence[tuple[int, str]] = (),
) -> None:
    """Writes `loss_figure` as a PNG, replacing the file in one rename."""
    figure = loss_figure(rows, baseline, title=title, phase_ends=phase_ends)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def loss_figure(
    rows: Sequence[dict[str, Any]],
    baseline: float,
    *,
    title: str = "",
    phase_ends: Sequence[tuple[int, str]] = (),
) -> Any:
    """Masked-LM loss of training and held-out text, and next-sentence accuracy below.

    The dashed lines are what a model that ignores its input reaches: the unigram entropy, and the
    share of the more frequent sentence-pair label among the held-out rows.

    Args:
        rows: Of `metrics.jsonl`.
        baseline: Unigram entropy, nats.
        title: Above the picture.
        phase_ends: Steps at which the row length changes, with a label each.

    Returns:
        A matplotlib `Figure`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: no global state, no window system

    train = _series(rows, "train/mlm_loss")
    held_out = _series(rows, "eval/mlm_loss")
    accuracy = _series(rows, "train/nsp_accuracy"), _series(rows, "eval/nsp_accuracy")
    has_pairs = any(len(steps) for steps, _ in accuracy)

    figure = Figure(figsize=(8, 6.2 if has_pairs else 4.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        2 if has_pairs else 1, 1, sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": [2.2, 1] if has_pairs else [1]},
    )[:, 0]  # fmt: skip
    loss = axes[0]
    loss.axhline(baseline, color=_BASELINE, linestyle="--", linewidth=1.2, zorder=1)
    _curve(loss, train, "training", _TRAIN)
    _points(loss, held_out, "held-out", _EVAL)
    loss.set_ylabel("masked-LM loss (nats per token)")
    _limits(loss, baseline, train, held_out)
    _margin_label(loss, baseline, f"unigram\nentropy\n{baseline:.2f}")
    if has_pairs:
        _, majority = _series(rows, "eval/nsp_majority")
        if len(majority):
            share = float(majority[-1])
            axes[1].axhline(share, color=_BASELINE, linestyle="--", linewidth=1.0, zorder=1)
            _margin_label(axes[1], share, f"majority\nlabel\n{share:.2f}")
        _curve(axes[1], accuracy[0], "training", _TRAIN)
        _points(axes[1], accuracy[1], "held-out", _EVAL)
        axes[1].set_ylabel("sentence-pair accuracy")
        low = min([0.4, *(value for steps, values in accuracy for value in values)])
        axes[1].set_ylim(max(0.0, low - 0.03), 1.03)
    for step, label in phase_ends:
        for axis in axes:
            axis.axvline(step, color="#cbd5e0", linewidth=1.0, zorder=0)
        loss.annotate(
            label, (step, 0), xycoords=("data", "axes fraction"), xytext=(4, 5),
            textcoords="offset points", color=_BASELINE, fontsize=8,
        )  # fmt: skip
    for axis in axes:
        axis.grid(axis="y", color="#edf2f7", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=_INK, labelsize=9)
        axis.set_xlim(left=0)
        if axis.get_legend_handles_labels()[0]:
            place = "best" if axis is loss else "upper left"
            axis.legend(loc=place, fontsize=9, framealpha=0.85, edgecolor="none")
    axes[-1].set_xlabel("step (optimizer updates)")
    if title:
        figure.suptitle(title, fontsize=11, color=_INK, x=0.01, ha="left")
    return figure


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Centred mean over `span` neighbours, over fewer at both ends."""
    half = max(0, span // 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    result: np.ndarray = (sums[high] - sums[low]) / (high - low)
    return result


def _series(rows: Sequence[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(row["step"], row[name]) for row in rows if type(row.get(name)) in (int, float)]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps, float), np.array(values, float)


def _curve(axis: Any, series: tuple[np.ndarray, np.ndarray], label: str, colour: str) -> None:
    steps, values = series
    if not len(steps):
        return
    span = max(1, len(values) // 25)
    if span > 1:
        axis.plot(steps, values, color=colour, alpha=0.22, linewidth=0.8, zorder=2)
    smoothed = smooth(values, span)
    text = f"{label}: {smoothed[-1]:.2f}" + (f" (mean of {span} points)" if span > 1 else "")
    axis.plot(steps, smoothed, color=colour, linewidth=1.6, label=text, zorder=3)


def _points(axis: Any, series: tuple[np.ndarray, np.ndarray], label: str, colour: str) -> None:
    steps, values = series
    if not len(steps):
        return
    axis.plot(
        steps, values, color=colour, marker="o", markersize=4, linewidth=0.9, zorder=4,
        label=f"{label}: {values[-1]:.2f}",
    )  # fmt: skip


def _margin_label(axis: Any, value: float, text: str) -> None:
    """To the right of the axes, at a value: no curve runs through it."""
    axis.annotate(
        text, (1, value), xycoords=("axes fraction", "data"), xytext=(5, 0),
        textcoords="offset points", va="center", color=_BASELINE, fontsize=9,
    )  # fmt: skip


def _limits(axis: Any, baseline: float, *series: tuple[np.ndarray, np.ndarray]) -> None:
    """Room for the curve and the baseline; the fall of the first steps may leave the picture."""
    values = np.concatenate([values for _, values in series])
    if not len(values):
        return
    low = min(baseline, values.min())
    high = max(baseline, np.quantile(values, 0.99))
    margin = 0.08 * max(high - low, 0.5)
    axis.set_ylim(low - margin, high + margin)

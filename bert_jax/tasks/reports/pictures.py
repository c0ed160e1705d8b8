"""Plots of a report: confusion matrix, predictions against labels, calibration."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_jax.files.pictures import INK, MARK, dress, new_figure

_MOST_NUMBERS = 15  # largest number of classes for which cells show counts
_COLOUR = "#2b6cb0"


def report_figure(kind: str, report: Mapping[str, Any], *, title: str = "") -> Any:
    """Draw a part of a report (confusion, points or calibration) as a matplotlib `Figure`."""
    draw = {
        "confusion": _confusion_figure, "points": _scatter_figure,
        "calibration": _calibration_figure,
    }[kind]  # fmt: skip
    return draw(report[kind], title)


def _confusion_figure(confusion: Mapping[str, Any], title: str) -> Any:
    """Draw a confusion matrix, shaded by share of the row, with counts if classes are few."""
    labels = [name if len(name) <= 24 else f"{name[:23]}…" for name in confusion["labels"]]
    counts = np.array(confusion["counts"], float)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(14.0, 2.6 + 0.5 * len(labels))
    figure = new_figure((side + 0.6, side), title)
    axis = figure.subplots()
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(labels) <= _MOST_NUMBERS:
        for (row, column), count in np.ndenumerate(counts):
            colour = "white" if shares[row, column] > 0.5 else INK
            axis.text(column, row, f"{count:,.0f}", ha="center", va="center", color=colour,
                      fontsize=8)  # fmt: skip
    plain = {"fontsize": 8, "parse_math": False}  # a label may hold dollar signs
    axis.set_xticks(range(len(labels)), labels, rotation=45, ha="right", **plain)
    axis.set_yticks(range(len(labels)), labels, **plain)
    axis.set_xlabel("predicted")
    axis.set_ylabel("in the data (shades: share of the row)")
    axis.tick_params(colors=INK, length=0)
    return figure


def _scatter_figure(points: Any, title: str) -> Any:
    """Draw predictions against labels, and the dashed line on which they are equal."""
    labels, predicted = np.array(points, float).T
    figure = new_figure((5.2, 4.8), title)
    axis = figure.subplots()
    ends = [min(labels.min(), predicted.min()), max(labels.max(), predicted.max())]
    axis.plot(ends, ends, linestyle="--", color=MARK, linewidth=1.2)
    axis.plot(labels, predicted, "o", color=_COLOUR, markersize=3, alpha=0.5, markeredgewidth=0)
    axis.set_xlabel("in the data")
    axis.set_ylabel("predicted")
    dress(axis, lines="both")
    return figure


def _calibration_figure(calibration: Mapping[str, Any], title: str) -> Any:
    """Draw observed frequency against probability, before and after calibration, and bin counts."""
    figure = new_figure((7.6, 4.6), title)
    names = {"before": "as trained", "after": f"temperature {calibration['temperature']:.3g}"}
    upper, lower = figure.subplots(2, 2, sharex=True, height_ratios=[3, 1])
    for axis, below, (name, words) in zip(upper, lower, names.items(), strict=True):
        part = calibration[name]
        counts, confidence, accuracy = (
            np.array(part[key], float) for key in ("counts", "confidence", "accuracy")
        )
        edges = np.linspace(0, 1, len(counts) + 1)
        width, full = edges[1], counts > 0
        axis.plot([0, 1], [0, 1], linestyle="--", color=MARK, linewidth=1.2)
        axis.bar(edges[:-1][full], accuracy[full], width, align="edge", color=_COLOUR, alpha=0.35,
                 edgecolor=_COLOUR)  # fmt: skip
        axis.plot(confidence[full], accuracy[full], "o", color=_COLOUR, markersize=4)
        axis.set_title(f"{words}: error {part['ece']:.3f}", fontsize=10, color=INK)
        axis.set_ylim(0, 1)
        below.bar(edges[:-1], counts, width, align="edge", color=MARK, alpha=0.5)
        below.set_xlabel("probability")
        below.set_xlim(0, 1)
        for each in (axis, below):
            each.spines[["top", "right"]].set_visible(False)
            each.tick_params(colors=INK, labelsize=8)
    upper[0].set_ylabel("share that came true")
    lower[0].set_ylabel("number")
    return figure

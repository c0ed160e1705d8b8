"""The loss curve of a run, as a picture and as text, with a line for the baseline of the loss.

In pretraining, the columns `data/rows` and `data/tokens` of metrics.jsonl tell how much text has
been read. A run that mixes corpora has more columns for each corpus: `data/LABEL/tokens` and
`data/LABEL/epochs` with the training metrics, and `eval/METRIC/LABEL` with the held-out metrics.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.phases import Phase
from bert_jax.files.pictures import MARK, dress, new_figure, write_picture
from bert_jax.objectives.objective import Metric
from bert_jax.training.run.telemetry import points, read_metrics

Points = Sequence[tuple[float, float]]

_HEIGHT = 16
_LEAST_WIDTH = 40
_TO_ASCII = str.maketrans("─┈│┊┌┐└┘├┤┬┴┼", "--||+++++++++")
_CORPORA = ("#2f855a", "#6b46c1", "#b7791f", "#0987a0", "#b83280", "#718096")
_TRAIN, _EVAL = "#2b6cb0", "#c2410c"
PROBE = "eval/probe/"
"""Prefix of the columns with scores of probes."""
_EPOCHS = re.compile("data/(.*)/epochs")


@dataclass(frozen=True)
class CorpusCurve:
    """Progress of one corpus of a mixture during a run."""

    label: str
    tokens: float
    """Number of tokens read."""
    epochs: float
    """Number of passes over the corpus."""
    heldout: list[tuple[float, float]]
    """Points (step, value of the first metric on the held-out text of the corpus)."""

    def describe(self) -> str:
        """Describe the amounts of text and the newest held-out loss on one line."""
        loss = f", held-out {self.heldout[-1][1]:.3f}" if self.heldout else ""
        return f"{amount(self.tokens)} tokens, {self.epochs:.3g} epochs{loss}"


def corpus_curves(rows: Sequence[Mapping[str, Any]], metric: Metric) -> list[CorpusCurve]:
    """Return a curve for each corpus in rows of `metrics.jsonl`; [] if the run mixes no corpora."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = []
    for label in (parts[1] for name in names if (parts := _EPOCHS.fullmatch(name))):
        tokens, epochs = (points(rows, f"data/{label}/{each}") for each in ("tokens", "epochs"))
        if epochs:
            read = tokens[-1][1] if tokens else 0.0
            heldout = points(rows, f"eval/{metric.name}/{label}")
            found.append(CorpusCurve(label, read, epochs[-1][1], heldout))
    return found


def amount(number: float) -> str:
    """Format a number of tokens for reading: 950, 1.2 M, 34.5 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def draw_loss_curve(
    metrics_file: Path,
    metrics: Sequence[Metric],
    baseline: float | None,
    path: Path,
    *,
    title: str = "",
    phases: Sequence[Phase] = (),
) -> None:
    """Draw `loss_figure` from a `metrics.jsonl` and write it to the PNG file `path` atomically."""
    rows = read_metrics(metrics_file)
    write_picture(loss_figure(rows, metrics, baseline, title=title, phases=phases), path)


def loss_figure(
    rows: Sequence[dict[str, Any]],
    metrics: Sequence[Metric],
    baseline: float | None,
    *,
    title: str = "",
    phases: Sequence[Phase] = (),
) -> Any:
    """Draw the first metric on training and held-out text, and below it other metrics and probes.

    `rows` come from `metrics.jsonl`. Dashed lines show scores of a model that ignores its input:
    the baseline of the first metric (for masked words, the unigram entropy), and the frequency of
    the majority label. Vertical lines mark new phases. Return a matplotlib `Figure`.
    """
    first = metrics[0]
    shares = [
        metric
        for metric in metrics[1:]
        if metric.short and any(points(rows, f"{kind}/{metric.name}") for kind in ("train", "eval"))
    ]
    probes = dict.fromkeys(name for row in rows for name in row if name.startswith(PROBE))
    figure = new_figure((8.0, 4.4 + 1.8 * (len(shares) + len(probes))), title)
    axes = figure.subplots(
        1 + len(shares) + len(probes), 1, sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": [2.2, *(1 for _ in [*shares, *probes])]},
    )[:, 0]  # fmt: skip
    loss = axes[0]
    shown = _panel(loss, rows, first)
    loss.set_ylabel(first.title + (f" ({first.unit})" if first.unit else ""))
    for corpus, colour in zip(corpus_curves(rows, first), itertools.cycle(_CORPORA)):
        shown += corpus.heldout
        loss.plot(
            *_columns(corpus.heldout), color=colour, marker=".", markersize=4, linewidth=0.9,
            zorder=3, label=f"{corpus.label}: {corpus.describe()}",
        )  # fmt: skip
    if shown:
        low, high, margin = limits(shown, baseline)
        loss.set_ylim(low - margin, high + margin)
    if baseline is not None:
        loss.axhline(baseline, color=MARK, linestyle="--", linewidth=1.2, zorder=1)
        margin_label(loss, baseline, f"{first.baseline} {baseline:.2f}".replace(" ", "\n"))
    for axis, metric in zip(axes[1:], shares, strict=False):
        _share(axis, rows, metric)
    for axis, name in zip(axes[1 + len(shares) :], probes, strict=True):
        _points(axis, points(rows, name), "probe")
        axis.set_ylabel(name.removeprefix(PROBE).replace("/", "\n"))
    starts = itertools.accumulate(phase.num_steps for phase in phases)
    for start, phase in zip(starts, phases[1:], strict=False):
        for axis in axes:
            axis.axvline(start, color="#cbd5e0", linewidth=1.0, zorder=0)
        loss.annotate(
            f"length {phase.length}", (start, 0), xycoords=("data", "axes fraction"), xytext=(4, 5),
            textcoords="offset points", color=MARK, fontsize=8,
        )  # fmt: skip
    for axis in axes:
        dress(axis)
        axis.set_xlim(left=0)
        if axis.get_legend_handles_labels()[0]:
            corner = "best" if axis is loss else "upper left"
            axis.legend(loc=corner, fontsize=9, framealpha=0.85, edgecolor="none")
    axes[-1].set_xlabel("step (optimizer updates)")
    return figure


def margin_label(axis: Any, value: float, text: str) -> None:
    """Write a label at height `value` in the right margin, where no curve crosses the label."""
    axis.annotate(
        text, (1, value), xycoords=("axes fraction", "data"), xytext=(5, 0),
        textcoords="offset points", va="center", color=MARK, fontsize=9,
    )  # fmt: skip


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Return the centred moving average over `span` values, or over fewer values at both ends."""
    half = max(0, span // 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _panel(axis: Any, rows: Sequence[dict[str, Any]], metric: Metric) -> list[tuple[float, float]]:
    """Draw a metric on training and held-out text, and return the points."""
    train, held_out = (points(rows, f"{kind}/{metric.name}") for kind in ("train", "eval"))
    if train:
        steps, values = _columns(train)
        span = max(1, len(values) // 25)
        if span > 1:
            axis.plot(steps, values, color=_TRAIN, alpha=0.22, linewidth=0.8, zorder=2)
        smoothed = smooth(np.array(values), span)
        text = f"training: {smoothed[-1]:.2f}" + (f" (mean of {span} points)" if span > 1 else "")
        axis.plot(steps, smoothed, color=_TRAIN, linewidth=1.6, label=text, zorder=3)
    _points(axis, held_out, "held-out")
    return train + held_out


def _share(axis: Any, rows: Sequence[dict[str, Any]], metric: Metric) -> None:
    """Draw a metric between 0 and 1, with a line for the best constant answer."""
    if floor := points(rows, f"eval/{metric.floor}"):
        _, share = floor[-1]
        axis.axhline(share, color=MARK, linestyle="--", linewidth=1.0, zorder=1)
        margin_label(axis, share, f"majority\nlabel\n{share:.2f}")
    low = min([0.4, *(value for _, value in _panel(axis, rows, metric))])
    axis.set_ylabel(metric.title)
    axis.set_ylim(max(0.0, low - 0.03), 1.03)


def _points(axis: Any, found: Points, label: str) -> None:
    if found:
        axis.plot(
            *_columns(found), color=_EVAL, marker="o", markersize=4, linewidth=0.9, zorder=4,
            label=f"{label}: {found[-1][1]:.2f}",
        )  # fmt: skip


def limits(found: Points, baseline: float | None) -> tuple[float, float, float]:
    """Return the lowest and the highest loss to show, and the margin to leave on both sides.

    The highest 1% of the losses may lie above the limit, because the loss falls steeply at first.
    """
    values = np.array([value for _, value in found])
    marks = [] if baseline is None else [baseline]
    low, high = min([*marks, values.min()]), max([*marks, np.quantile(values, 0.99)])
    return low, high, 0.08 * max(high - low, 0.5)


def terminal_curve(
    train: Points, heldout: Points, baseline: float | None, *, width: int, plain: bool
) -> list[str]:
    """Draw the losses as lines of text, or return no lines if there are no points.

    Points are (step, nats), in order; `width` is in characters; `plain` is ASCII without colours.
    """
    import plotext

    shown = [*train, *heldout]
    if not shown:
        return []
    end = max(1.0, *(x for x, _ in shown))
    low, high, margin = limits(shown, baseline)

    figure = plotext.figure  # plotext has a single figure, which is global
    figure.clear()
    try:
        plotext.terminal.limit(False, False)
        figure.theme("colorless")
        figure.canvas("default")
        figure.plot_size(max(_LEAST_WIDTH, width), _HEIGHT)
        figure.legend(False)
        figure.axes(False, side=1)
        if baseline is not None:
            line = figure.signal([0, end], [baseline] * 2, marker=plotext.marker("-", "gray"))
            figure.draw(line.lines(True))
        curve = figure.signal(
            *_columns(train), marker=plotext.marker("*" if plain else "braille", "blue")
        )
        figure.draw(curve.lines(True))
        if heldout:
            figure.draw(figure.signal(*_columns(heldout), marker=plotext.marker("o", "orange")))
        figure.ruler("x").lim(0, end)
        figure.ruler("y").lim(low - margin, high + margin)
        steps = sorted({round(end * i / 4) for i in range(5)})
        figure.ruler("x").ticks(steps, [f"{step:,}" for step in steps])
        losses = [float(loss) for loss in np.linspace(low, high, 4)]
        figure.ruler("y").ticks(losses, [f"{loss:.2f}" for loss in losses])
        text = figure.build().string(colorless=plain)
    finally:
        figure.clear()
    return [line.rstrip() for line in (text.translate(_TO_ASCII) if plain else text).splitlines()]


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]

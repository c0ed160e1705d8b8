"""Losses by position and masking rate for people: a table and a picture."""

import bisect
import itertools
from pathlib import Path
from typing import Any

from bert_jax.cli.inspection.by_position import PositionLosses
from bert_jax.files.staging import staged_file

_COLOURS = ["#2b6cb0", "#c2410c", "#2f855a", "#6b46c1", "#b7791f", "#4a5568"]
_MARK, _INK = "#4a5568", "#1a202c"


def position_lines(losses: PositionLosses) -> list[str]:
    """Tabulate loss, accuracy and number of masked tokens: a row a bucket, a column a rate."""
    entropy = losses.unigram_entropy
    lines = [
        f"step {losses.step:,}: {losses.num_rows:,} held-out rows of {losses.length:,} tokens"
        + ("" if entropy is None else f"; unigram entropy {entropy:.3f} nats"),
        "nats, accuracy and number of the masked tokens, by masking rate and by position in the "
        "document:",
        "",
        " " * 14 + "".join(f"{f'{100 * rate:g}% masked':>27}" for rate in losses.rates),
    ]
    columns = [
        [*rate["positions"], rate | {"from": None}] for rate in losses.as_json()["masking_rates"]
    ]
    for cells in zip(*columns, strict=True):
        begin = cells[0]["from"]
        name = "all" if begin is None else f"{begin}-{cells[0]['to']}"
        lines.append(f"{name:>14}" + "".join(_cell(cell) for cell in cells))
    return lines


def _cell(cell: dict[str, Any]) -> str:
    if cell["loss"] is None:
        return f"{'-':>9}{'-':>8}{0:>10}"
    return f"{cell['loss']:>9.3f}{100 * cell['accuracy']:>7.1f}%{cell['num_masked']:>10,}"


def draw_positions(losses: PositionLosses, path: Path, *, title: str = "") -> None:
    """Write `position_figure` as a PNG, replacing the file in one rename."""
    figure = position_figure(losses, title=title)
    with staged_file(path) as file:
        figure.savefig(file, format="png")


def position_figure(losses: PositionLosses, *, title: str = "") -> Any:
    """Draw the loss over the buckets of positions, a line a masking rate.

    Where rows are longer than in training, a vertical line marks the longest row of training.

    Returns:
        A matplotlib `Figure`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: no global state, no window system

    figure = Figure(figsize=(8, 4.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    edges = losses.edges
    for number, rate in enumerate(losses.as_json()["masking_rates"]):
        known = [(k, b["loss"]) for k, b in enumerate(rate["positions"]) if b["loss"] is not None]
        whole = "" if rate["loss"] is None else f", {rate['loss']:.2f} over all"
        axis.plot(
            [k for k, _ in known], [loss for _, loss in known], marker="o", markersize=4,
            linewidth=1.6, color=_COLOURS[number % len(_COLOURS)],
            label=f"{100 * rate['masking_rate']:g}% masked{whole}",
        )  # fmt: skip
    if losses.trained_length < losses.length:
        bucket = bisect.bisect_right(edges, losses.trained_length) - 1
        inside = losses.trained_length - edges[bucket]
        at = bucket - 0.5 + inside / (edges[bucket + 1] - edges[bucket])
        axis.axvline(at, color=_MARK, linestyle="--", linewidth=1.2)
        axis.annotate(
            f"trained up to {losses.trained_length:,}", (at, 0), xycoords=("data", "axes fraction"),
            xytext=(4, 5), textcoords="offset points", color=_MARK, fontsize=8,
        )  # fmt: skip
    names = [f"{begin:,}\u2013{end - 1:,}" for begin, end in itertools.pairwise(edges)]
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.5, len(names) - 0.5)
    axis.set_xlabel("position in the document, or in its piece of a row's length (tokens)")
    axis.set_ylabel("held-out masked-LM loss (nats per token)")
    axis.grid(axis="y", color="#edf2f7", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=_INK, labelsize=9)
    axis.legend(loc="best", fontsize=9, framealpha=0.85, edgecolor="none")
    if title:
        figure.suptitle(title, fontsize=11, color=_INK, x=0.01, ha="left")
    return figure

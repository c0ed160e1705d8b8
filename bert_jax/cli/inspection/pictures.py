"""Pictures of losses by position, and of the lengths of documents."""

import bisect
import itertools
from typing import Any

import numpy as np

from bert_jax.cli.inspection.by_position import PositionLosses
from bert_jax.cli.inspection.corpus import CorpusLook
from bert_jax.files.pictures import MARK, dress, new_figure

_COLOURS = ["#2b6cb0", "#c2410c", "#2f855a", "#6b46c1", "#b7791f", "#4a5568"]


def position_figure(losses: PositionLosses, *, title: str = "") -> Any:
    """Return a matplotlib `Figure` of the loss by bucket of positions, one line per masking rate.

    If rows are longer than in training, a vertical line marks the longest row of training.
    """
    figure = new_figure((8.0, 4.4), title)
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
        axis.axvline(at, color=MARK, linestyle="--", linewidth=1.2)
        axis.annotate(
            f"trained up to {losses.trained_length:,}", (at, 0), xycoords=("data", "axes fraction"),
            xytext=(4, 5), textcoords="offset points", color=MARK, fontsize=8,
        )  # fmt: skip
    names = [f"{begin:,}\u2013{end - 1:,}" for begin, end in itertools.pairwise(edges)]
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.5, len(names) - 0.5)
    axis.set_xlabel("position in the document, or in its piece if it is longer than a row (tokens)")
    axis.set_ylabel("held-out masked-LM loss (nats per token)")
    dress(axis)
    axis.legend(loc="best", fontsize=9, framealpha=0.85, edgecolor="none")
    return figure


def lengths_figure(look: CorpusLook) -> Any:
    """Return a matplotlib `Figure`: histograms of documents and of tokens by document length."""
    read = ", a sample" if look.is_sample else ""
    title = f"{look.path}: {look.documents_read:,} documents{read}"
    tokens, figure = look.lengths, new_figure((8.0, 4.8), title)
    upper, lower = figure.subplots(2, 1, sharex=True)
    least, most = tokens.min(), tokens.max()
    edges = np.unique(np.geomspace(least, most + 1, 49).round())
    for axis, weights, label in (
        (upper, np.full(tokens.size, 1 / tokens.size), "share of the documents"),
        (lower, tokens / tokens.sum(), "share of the tokens"),
    ):
        axis.hist(tokens, bins=edges, weights=weights, color=_COLOURS[0])
        axis.set_ylabel(label)
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        dress(axis)
    median = look.quantiles["0.5"]
    upper.axvline(median, color=MARK, linestyle="--", linewidth=1.2)
    upper.annotate(
        f"half have at most {median:,}", (median, 1), xycoords=("data", "axes fraction"),
        xytext=(0, 3), textcoords="offset points", ha="center", color=MARK, fontsize=8,
    )  # fmt: skip
    lower.set_xscale("log")
    lower.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lower.set_xlabel("tokens of the document")
    return figure

"""A look at a corpus for people: lines, and a picture of the lengths."""

from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.cli.inspection.corpus import CorpusLook
from bert_jax.files.staging import staged_file
from bert_jax.terminal import table_lines

_BAR, _MARK, _INK = "#2b6cb0", "#4a5568", "#1a202c"
_TEXT_WIDTH = 76
_SCRIPTS = ["script", "share", "words", "tokens", "per word"]


def corpus_lines(look: CorpusLook) -> list[str]:
    """Describe a corpus: counts, lengths, documents, scripts, duplicates and rows."""
    counts = look.counts
    shards = f" in {counts['shards']:,} shards" if counts["shards"] > 1 else ""
    read = "all documents" if not look.is_sample else f"{look.documents_read:,} documents, a sample"
    quantiles = look.lengths.quantiles
    scripts = [_script(name, one, counts["tokens"]) for name, one in look.scripts.items()]
    return [
        f"{look.path}: {counts['documents']:,} documents, {counts['sentences']:,} sentences, "
        f"{counts['tokens']:,} tokens{shards}; {look.unknown_rate:.2%} of the tokens [UNK]",
        "",
        f"tokens of a document ({read}): mean {look.lengths.mean:,.1f}",
        "  " + "  ".join(f"{_share(name)} {tokens:,}" for name, tokens in quantiles.items()),
        "",
        "longest documents",
        *map(_document, look.longest),
        "",
        "shortest documents",
        *map(_document, look.shortest),
        "",
        "tokens per word, by script of the token (the whole corpus)",
        *(f"  {line}" for line in table_lines([_SCRIPTS, *scripts])),
        "",
        _duplicates(look),
        *(f"  {one['count']:,} times{_document(one)}" for one in look.duplicate_groups),
        "",
        look.rows,
    ]


def _share(name: str) -> str:
    return {"0": "least", "0.5": "half", "1": "most"}.get(name, f"p{100 * float(name):g}")


def _document(one: dict[str, Any]) -> str:
    text = "".join(c if c.isprintable() else " " for c in one["text"])
    place = f"{one['shard']}/{one['document']:,}" if one["shard"] else f"{one['document']:,}"
    short = text if len(text) <= _TEXT_WIDTH else text[: _TEXT_WIDTH - 4] + " ..."
    return f"  document {place}, {one['tokens']:,} tokens: {short}"


def _script(name: str, one: dict[str, Any], tokens: int) -> list[str]:
    ratio = "-" if one["tokens_per_word"] is None else f"{one['tokens_per_word']:.2f}"
    return [name, f"{one['tokens'] / tokens:.2%}", f"{one['words']:,}", f"{one['tokens']:,}", ratio]


def _duplicates(look: CorpusLook) -> str:
    share = look.duplicates / look.documents_read
    least = "at least, in a sample: --full reads all" if look.is_sample else "all were read"
    return (
        f"exact duplicates: {look.duplicates:,} of {look.documents_read:,} documents ({share:.2%}) "
        f"equal an earlier one ({least})"
    )


def draw_lengths(look: CorpusLook, path: Path) -> None:
    """Write `lengths_figure` as a PNG, replacing the file in one rename."""
    figure = lengths_figure(look)
    with staged_file(path) as file:
        figure.savefig(file, format="png")


def lengths_figure(look: CorpusLook) -> Any:
    """Draw the numbers of documents, and of their tokens, by length of the document.

    Returns:
        A matplotlib `Figure`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: no global state, no window system

    tokens = look.lengths.tokens
    figure = Figure(figsize=(8, 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    least, most = tokens.min(), tokens.max()
    edges = np.unique(np.geomspace(least, most + 1, 49).round())
    for axis, weights, label in (
        (upper, np.full(tokens.size, 1 / tokens.size), "share of the documents"),
        (lower, tokens / tokens.sum(), "share of the tokens"),
    ):
        axis.hist(tokens, bins=edges, weights=weights, color=_BAR)
        axis.set_ylabel(label)
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        axis.grid(axis="y", color="#edf2f7", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=_INK, labelsize=9)
    median = look.lengths.quantiles["0.5"]
    upper.axvline(median, color=_MARK, linestyle="--", linewidth=1.2)
    upper.annotate(
        f"half have at most {median:,}", (median, 1), xycoords=("data", "axes fraction"),
        xytext=(0, 3), textcoords="offset points", ha="center", color=_MARK, fontsize=8,
    )  # fmt: skip
    lower.set_xscale("log")
    lower.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lower.set_xlabel("tokens of the document")
    read = ", a sample" if look.is_sample else ""
    title = f"{look.path}: {look.documents_read:,} documents{read}"
    figure.suptitle(title, fontsize=11, color=_INK, x=0.01, ha="left")
    return figure

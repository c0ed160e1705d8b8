"""Reports as Markdown that is readable in a terminal too, and plots of their parts."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.files.pictures import INK, MARK, dress, new_figure
from bert_jax.tasks.reports.classes import NOISE
from bert_jax.tasks.reports.intervals import LEVEL
from bert_jax.terminal import markdown_table

_MOST_COLUMNS = 12  # largest number of classes in a printed confusion matrix
_MOST_PAIRS = 20
_INERT, _JOINERS = str.maketrans("|`<>", "/'\u2039\u203a"), "\u200c\u200d"
_TITLES = {"dev": "the set that chose the epoch", "test": "not used for selection"}


def report_lines(name: str, report: Mapping[str, Any], *, mistakes: bool = True) -> list[str]:
    """Write the report of the split `name`, made by `Split.report`, as lines of Markdown."""
    role = _TITLES.get(name.removesuffix("_matched") if report.get("chose", True) else "test")
    title = f"{name}, {role}" if role else name
    lines = [f"## {title}: {report['examples']:,} examples", "", *_scores(report)]
    if classes := report.get("classes"):
        lines += ["", *_classes(classes, report, "scores by class")]
    if strict := report.get("strict"):
        lines += ["", *_classes(strict["classes"], strict, "strict: only tags that follow IOB2")]
    if report.get("confusion"):
        lines += ["", *_confusion(report["confusion"])]
    if calibration := report.get("calibration"):
        lines += ["", *_calibration(calibration)]
    if residuals := report.get("residuals"):
        values = {**residuals, **{f"{k} quantile": v for k, v in residuals["quantiles"].items()}}
        del values["quantiles"]
        rows = [[name.replace("_", " "), _number(value)] for name, value in values.items()]
        lines += ["", *_table(["prediction minus label", "value"], rows)]
    if groups := report.get("groups"):
        rows = [
            [row["by"], row["group"], f"{row['questions']:,}", _number(row["exact"]),
             _number(row["f1"]), _interval(row["f1_interval"])]
            for row in groups
        ]  # fmt: skip
        heads = ["by", "group", "questions", "exact", "f1", f"{LEVEL:.0%} of f1"]
        lines += ["", *_table(heads, rows)]
    if (noise := report.get("label_noise")) is not None:
        lines += ["", f"The models contradict {noise:,} labels ({NOISE}, surest first)."]
    if mistakes and report.get("mistakes"):
        lines += ["", "### Mistakes that the model is surest of", ""]
        lines += [_mistake(each) for each in report["mistakes"]]
    return lines


def difference_lines(
    ours: Sequence[Path | str], theirs: Sequence[Path | str],
    differences: Mapping[str, Mapping[str, Any]],
) -> list[str]:  # fmt: skip
    """Write a table of the paired differences between the runs of two models, by split and score.

    A sentence below the table names the units of the intervals, such as examples or seeds.
    """
    sides = " minus ".join(", ".join(Path(run).name for run in side) for side in (ours, theirs))
    found = [(split, name, each) for split, scores in differences.items()
             for name, each in scores.items()]  # fmt: skip
    rows = [
        [split, name, f"{each['difference']:+.4f}",
         _interval(each["interval"], each["no_interval"], signed=True), _verdict(each["interval"])]
        for split, name, each in found
    ]  # fmt: skip
    heads = ["split", sides, "difference", f"{LEVEL:.0%}, paired"]
    over = " and ".join(dict.fromkeys(each["over"] for *_, each in found))
    said = "Differences are means over pairs of seeds, with intervals of Student's t."
    if over != "seeds":
        said = f"Intervals are over {over}, with one run a side, not over seeds (see --other-seed)."
    return [*_table([*heads, "the difference is"], rows), *(["", said] if over else [])]


def _verdict(ends: Sequence[float] | None) -> str:
    if ends is None:
        return "not judged: no interval"
    if ends[0] <= 0 <= ends[1]:
        return "not distinguishable from zero (the interval contains 0)"
    return "distinguishable from zero"


def _scores(report: Mapping[str, Any]) -> list[str]:
    found, missing = report.get("intervals", {}), report.get("no_intervals", {})
    name, count = report.get("units", ("examples", report["examples"]))
    over = f"{LEVEL:.0%}, over {count:,} {name}"
    rows = [
        [name, _number(value), _interval(found.get(name), missing.get(name))]
        for name, value in report["scores"].items()
    ]
    lines = _table(["score", "value", over], rows)
    if report.get("constant") is not None:
        name = report.get("baseline", "the baseline")
        lines += ["", f"{name[0].upper()}{name[1:]} scores {_number(report['constant'])}."]
    return lines


def _classes(rows: Sequence[Mapping[str, Any]], report: Mapping[str, Any], title: str) -> list[str]:
    names = ("precision", "recall", "f1")
    table = [
        [row["label"], *(_number(row[name]) for name in names), f"{row['support']:,}",
         f"{row['predicted']:,}"]
        for row in rows
    ]  # fmt: skip
    for mean in ("macro", "micro"):
        if mean in report:
            table.append([f"({mean})", *(_number(report[mean][name]) for name in names), "", ""])
    return _table([title, *names, "support", "predicted"], table)


def _confusion(found: Mapping[str, Any]) -> list[str]:
    labels, counts = found["labels"], found["counts"]
    if len(labels) <= _MOST_COLUMNS and len(labels) == found["classes"]:
        named = zip(labels, counts, strict=True)
        rows = [[label, *(f"{count:,}" for count in row)] for label, row in named]
        return _table(["in the data / predicted", *labels], rows)
    pairs = [(n, labels[i], labels[j]) for (i, j), n in np.ndenumerate(counts) if n and i != j]
    worst = sorted(pairs, key=lambda pair: -pair[0])[:_MOST_PAIRS]
    rows = [[truth, guess, f"{count:,}"] for count, truth, guess in worst]
    return _table(["in the data", "predicted as", "examples"], rows)


def _calibration(found: Mapping[str, Any]) -> list[str]:
    after, before = found["after"], found["before"]
    bins = zip(after["counts"], after["confidence"], after["accuracy"], strict=True)
    rows = [[_number(mean), _number(true), f"{count:,}"] for count, mean, true in bins if count]
    said = (
        f"Calibration error {before['ece']:.4f} as trained, {after['ece']:.4f} at temperature "
        f"{found['temperature']:.4g}; probabilities in bins of width 1/{len(after['counts'])}:"
    )
    return [said, "", *_table(["mean probability", "came true", "number"], rows)]


def _mistake(each: Mapping[str, Any]) -> str:
    sure = f"{each['probability']:.3f}" if "probability" in each else f"off by {each['error']:+.4g}"
    label = " / ".join(each["label"]) if isinstance(each["label"], list) else f"{each['label']}"
    texts = " | ".join(_flat(each[name]) for name in ("text", "text_pair") if name in each)
    word = f", the word {_flat(each['word'])!r}" if "word" in each else ""
    where = f" (line {each['line']}{word})" if "line" in each else ""
    predicted = f"{each['predicted']}" or "no answer"
    return f"- {sure} `{_flat(predicted)}`, not `{_flat(label) or 'no answer'}`{where}: {texts}"


def _flat(text: str) -> str:
    """Turn a text into one line without control characters, Markdown or HTML markup."""
    shown = "".join(c if c.isprintable() or c in _JOINERS else " " for c in text)
    return " ".join(shown.translate(_INERT).replace("](", "] (").split())


def _number(value: float | None) -> str:
    if value is None:
        return "not a number"
    return f"{value:.2f}" if abs(value) > 1 else f"{value:.4f}"


def _interval(
    ends: Sequence[float] | None, reason: str | None = None, *, signed: bool = False
) -> str:
    if ends is None:
        return f"none: {reason}" if reason else "-"
    return " to ".join(f"{end:+.4f}" if signed else _number(end) for end in ends)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table with names aligned to the left and figures to the right."""
    cells = [[_flat(cell) for cell in row] for row in (heads, *rows)]
    return markdown_table(cells, figures=True).splitlines()


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

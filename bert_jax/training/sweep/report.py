"""The statistics of a set of runs, as text, as JSON and as a picture."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.files.pictures import INK, MARK, dress, new_figure, write_picture
from bert_jax.files.staging import replace_file
from bert_jax.terminal import table_lines
from bert_jax.training.run.loss_curve import margin_label
from bert_jax.training.sweep import statistics
from bert_jax.training.sweep.statistics import Group, Outcome, Summary, TestSummary, rate_name

_COLOURS = ["#2b6cb0", "#c2410c", "#2f855a", "#6b46c1", "#b7791f", "#4a5568"]
_FAILED = "#c53030"
_LONGEST_NAME = 40
_MAX_FAILED = 10
"""Largest number of failed runs that the text lists."""
_HUNDREDTHS = {
    "accuracy", "f1", "macro_f1", "matthews", "pearson", "spearman", "precision", "recall",
    "las", "uas", "ndcg@10", "mrr@10", "recall@100", "map",
}  # fmt: skip
"""Names of scores that are fractions or correlations, and are printed times 100."""
_TEST_COLUMNS = ("init", "rate", "runs", "lost", "median", "quartiles", "mean", "std")
_COLUMNS = (
    "init", "rate", "runs", "failed", "lost", "median", "quartiles", "best", "mean", "std", "epoch",
    "last", "seconds",
)  # fmt: skip


def summary_lines(summary: Summary, *, percent: bool = False) -> list[str]:
    """Describe the runs in fixed-width lines; scores are times 100, unless `percent` is true."""
    scale = 1.0 if percent else 100.0
    head = f"{summary.metric}{'' if percent else ' x 100'}: best evaluation of each run"
    if summary.evaluations > 1:
        head = head.replace("evaluation", f"of the {summary.evaluations_named} evaluations")
    if summary.constant_score is not None:
        head += f"; {summary.baseline} gets {summary.constant_score * scale:.1f}"
    unnamed = "no test data are named (task.test)"
    tested = "below on test, not used for selection" if summary.test else unnamed
    lines = [head, f"on {summary.dev}; {tested}"]
    if summary.goal is not None and math.isfinite(summary.goal):
        goal = f"{summary.goal * scale:.1f}"
        lines.append(f"failed: a run that is not above {goal} at its last evaluation, or diverged")
    several = len(summary.learning_rates) > 1
    lines += _group_table(
        summary.groups, _COLUMNS, scale, summary.best_learning_rates if several else {}
    )
    lines.append("epoch: median of the best evaluations; last: median of the last evaluations")
    if several:
        lines.append("* the best learning rate by the median")
    if any(group.lost for group in summary.groups):
        lines.append("lost: runs without a finite score; they count as the worst")
    lines += _others_lines(summary, summary.groups, percent, "at the best evaluations")
    lines += _comparison_lines(summary.comparisons, scale)
    if summary.test:
        lines += _test_lines(summary, summary.test, percent, scale)
    return [*lines, *_failed_lines(summary)]


def summary_json(summary: Summary) -> dict[str, Any]:
    """Return the fields as JSON values. Numbers that are not finite become None."""
    return json.loads(json.dumps(asdict(summary)), parse_constant=lambda _: None)


def write_summary(
    summary: Summary, directory: Path, *, title: str = "", percent: bool = False
) -> list[Path]:
    """Write statistics.txt, statistics.png and, last, statistics.json; return their paths.

    Files are written atomically. `title` is for the picture. `percent` is as in `summary_lines`.
    """
    text = "\n".join(summary_lines(summary, percent=percent)) + "\n"
    values = json.dumps(summary_json(summary), indent=1, allow_nan=False) + "\n"
    figure = statistics_figure(summary, title=title, percent=percent)
    files = [directory / f"statistics.{suffix}" for suffix in ("txt", "png", "json")]
    replace_file(files[0], text.encode())
    write_picture(figure, files[1])
    replace_file(files[2], values.encode())
    return files


def _test_lines(summary: Summary, test: TestSummary, percent: bool, scale: float) -> list[str]:
    head = (
        f"{summary.metric}{'' if percent else ' x 100'} on test: each run scored once, with the "
        "parameters of its best evaluation on dev"
    )
    if test.constant_score is not None:
        head += f"; {summary.baseline} gets {test.constant_score * scale:.1f}"
    lines = ["", head, *_group_table(test.groups, _TEST_COLUMNS, scale, {})]
    lines += _others_lines(summary, test.groups, percent, "on test")
    return lines + _comparison_lines(test.comparisons, scale, ", on test")


def _group_table(
    groups: Sequence[Group], columns: Sequence[str], scale: float, best: Mapping[str, float]
) -> list[str]:
    """Lay out `columns` of each group. A star marks the `best` rate of each initialisation."""

    def cell(value: float | None, without: str = "-") -> str:
        return without if value is None else f"{value * scale:.1f}"

    rows = []
    for group in groups:
        low, high = cell(group.low_quartile, "lost"), cell(group.high_quartile, "lost")
        mark = "*" if group.learning_rate and best.get(group.init) == group.learning_rate else ""
        values = {
            "init": group.init,
            "rate": f"{rate_name(group.learning_rate)}{mark}",
            "median": cell(group.median, "lost"),
            "quartiles": f"{low} to {high}",
            "epoch": "-" if group.best_epoch is None else f"{group.best_epoch:.3g}",
            "last": cell(group.last, "lost"),
            "seconds": f"{group.seconds:.0f}",
            **{name: f"{getattr(group, name)}" for name in ("runs", "failed", "lost")},
            **{name: cell(getattr(group, name)) for name in ("best", "mean", "std")},
        }
        rows.append([values[name] for name in columns])
    return table_lines([columns, *rows])


def _others_lines(
    summary: Summary, groups: Sequence[Group], percent: bool, where: str
) -> list[str]:
    lines = []
    for group in groups:
        found = []
        for name, value in group.medians.items():
            hundred = not percent and name.rsplit("/", 1)[-1] in _HUNDREDTHS
            text = f"{value * 100:.1f}" if hundred else f"{value:.4g}"
            found += [] if name == summary.metric else [f"{name} {text}"]
        if found:
            lines.append(f"  {group.init}, {rate_name(group.learning_rate)}: {', '.join(found)}")
    return ["", f"medians of the other scores {where}:", *lines] if lines else []


def _comparison_lines(
    comparisons: Sequence[statistics.Comparison], scale: float, where: str = ""
) -> list[str]:
    tables: dict[str, list[list[str]]] = {}
    for each in comparisons:
        head = f"{each.first} less {each.second}{where}"
        columns = [head, "mean", f"{statistics.LEVEL:.0%} by t", "better in"]
        name = "all learning rates"
        if each.learning_rates is not None:
            rates = [rate_name(rate) for rate in each.learning_rates]
            name = f"each at its best: {rates[0]}, {rates[1]}" if each.chosen else rates[0]
        better = f"{each.wins} of {each.pairs}"
        better += f", {each.ties} equal" if each.ties else ""
        better += f", {each.unpaired} runs unpaired" if each.unpaired else ""
        mean = "-" if each.mean is None else f"{each.mean * scale:+z.1f}"
        student = " to ".join(f"{end * scale:+z.1f}" for end in each.student or ())
        tables.setdefault(head, [columns]).append([f"  {name}", mean, student or "-", better])
    lines = [line for table in tables.values() for line in ("", *table_lines(table))]
    if any(c.seeds == 1 for c in comparisons):
        lines.append("one seed in common: no interval")
    return lines


def _failed_lines(summary: Summary) -> list[str]:
    failed = [outcome for outcome in summary.outcomes if outcome.failed]
    if not failed:
        return []
    lines = ["", f"failed: {len(failed)} of {len(summary.outcomes)} runs"]
    for each in failed[:_MAX_FAILED]:
        where = f"{each.member.init}, {rate_name(each.member.learning_rate)}"
        lines.append(f"  {where}, seed {each.member.seed}: {each.failed}")
    if len(failed) > _MAX_FAILED:
        lines.append(f"  and {len(failed) - _MAX_FAILED} more")
    return lines


def statistics_figure(summary: Summary, *, title: str = "", percent: bool = False) -> Any:
    """Draw the score of each run as a point, with box plots for each initialisation and rate.

    A box shows quartiles; its whiskers reach from the worst run to the best. Scores on test data
    are diamonds, right of the dev scores. Failed runs are crosses. Runs without a finite score
    (crosses) and such quartiles are at the bottom. `percent` is as in `summary_lines`.
    """
    scale = 1.0 if percent else 100.0
    inits, rates = summary.inits, summary.learning_rates
    inches = min(14.0, max(4.2, 2.2 + 0.75 * len(inits) * len(rates)))
    figure = new_figure((inches, 4.4), title)
    axis = figure.subplots()
    if summary.constant_score is not None:
        constant = summary.constant_score * scale
        axis.axhline(constant, color=MARK, linestyle="--", linewidth=1.2, zorder=1)
        name = summary.baseline.removeprefix("a ").replace(" ", "\n")
        margin_label(axis, constant, f"{name}\n{constant:.1f}")
    _limits(axis, summary, scale)
    step = 0.8 / max(len(inits), 1)
    # A seed has the same offset in every box, so that equal scores do not hide each other.
    seeds = sorted({outcome.member.seed for outcome in summary.outcomes})
    offsets = {seed: (n + 0.5) / len(seeds) - 0.5 for n, seed in enumerate(seeds)}
    for i, init in enumerate(inits):
        colour = _COLOURS[i % len(_COLOURS)]
        name = init if len(init) <= _LONGEST_NAME else f"…{init[1 - _LONGEST_NAME :]}"
        axis.plot([], [], "o", color=colour, markersize=5, label=name.replace("$", r"\$"))
        for r, rate in enumerate(rates):
            key = init, rate
            runs = [o for o in summary.outcomes if (o.member.init, o.member.learning_rate) == key]
            at, width = r + (i - (len(inits) - 1) / 2) * step, 0.62 * step
            if summary.test:  # to the right of dev
                width /= 2
                at += width / 2
                tested = [run.test.get(summary.metric) for run in runs]
                if len(runs) > 1:
                    _box(axis, at, width, tested, scale, colour)
                for run, score in zip(runs, tested, strict=True):
                    if score is not None:
                        x = at + 0.8 * width * offsets[run.member.seed]
                        axis.plot([x], [score * scale], "D", mfc="none", color=colour, markersize=4)
                at -= width
            if len(runs) > 1:
                _box(axis, at, width, [run.best for run in runs], scale, colour)
            for run in runs:
                _point(axis, at + 0.8 * width * offsets[run.member.seed], run, scale, colour)
    if any(outcome.failed for outcome in summary.outcomes):
        lost = any(group.lost for group in summary.groups)
        label = "failed: the last evaluation"
        if summary.goal is not None and np.isfinite(summary.goal):
            label += f" is not above {summary.goal * scale:.1f}"
        label += "\n(at the bottom: lost, no finite score)" if lost else ""
        axis.plot([], [], "x", color=_FAILED, markersize=6, label=label)
    axis.set_xticks(range(len(rates)), [rate_name(rate) for rate in rates])
    axis.set_xlim(-0.5, max(len(rates), 1) - 0.5)
    if summary.test:
        axis.plot([], [], "D", mfc="none", color=INK, markersize=4, label="test, scored once")
    axis.set_xlabel(f"learning rate\n(scores on {summary.dev})")
    several = summary.evaluations > 1
    which = f"best of {summary.evaluations_named} evaluations" if several else "best evaluation"
    axis.set_ylabel(f"{summary.metric}{'' if percent else ' x 100'}, {which}")
    dress(axis)
    if axis.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=1, fontsize=9, frameon=False)
    return figure


def _box(
    axis: Any, at: float, width: float, scores: list[float | None], scale: float, colour: str
) -> None:
    """Draw a box of quartiles. A quartile without a finite value is at the bottom of the axis."""
    bottom = axis.get_ylim()[0]
    ends = [statistics.quantile(scores, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    values = [bottom if end is None else end * scale for end in ends]
    axis.bxp(
        [dict(zip(("whislo", "q1", "med", "q3", "whishi"), values, strict=True))],
        positions=[at], widths=width, manage_ticks=False, showfliers=False, zorder=2,
        patch_artist=True, boxprops={"facecolor": colour, "alpha": 0.18, "edgecolor": colour},
        whiskerprops={"color": colour, "alpha": 0.6}, capprops={"color": colour, "alpha": 0.6},
        medianprops={"color": colour, "linewidth": 2},
    )  # fmt: skip


def _point(axis: Any, x: float, run: Outcome, scale: float, colour: str) -> None:
    cross = {"color": _FAILED, "markersize": 6, "zorder": 4}
    if run.best is None or not np.isfinite(run.best):
        axis.plot([x], [0.015], "x", transform=axis.get_xaxis_transform(), **cross)
    elif run.failed:
        axis.plot([x], [run.best * scale], "x", **cross)
    else:
        axis.plot(
            [x], [run.best * scale], "o", color=colour, markersize=5, alpha=0.85,
            markeredgecolor="white", markeredgewidth=0.5, zorder=3,
        )  # fmt: skip


def _limits(axis: Any, summary: Summary, scale: float) -> None:
    """Set limits of the axis that show all scores, at least four percentage points apart."""
    tested = (run.test.get(summary.metric) for run in summary.outcomes)
    scores = [*(run.best for run in summary.outcomes), *tested, summary.constant_score]
    values = [score for score in scores if score is not None and np.isfinite(score)]
    if not values:
        axis.set_ylim(0, 100)
        return
    low, high = min(values) * scale, max(values) * scale
    margin = max(0.08 * (high - low), (4.0 - (high - low)) / 2)
    axis.set_ylim(low - margin, high + margin)

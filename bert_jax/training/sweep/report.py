"""The statistics of a set of runs as text, as JSON and, with the plot, as files."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bert_jax.files.pictures import write_picture
from bert_jax.files.staging import replace_file
from bert_jax.terminal import table_lines
from bert_jax.training.sweep.plot import statistics_figure
from bert_jax.training.sweep.statistics import (
    LEVEL,
    Comparison,
    Group,
    Summary,
    TestSummary,
    rate_name,
)

_MAX_FAILED = 10
"""Largest number of failed runs to list."""
_HUNDREDTHS = {
    "accuracy", "f1", "macro_f1", "matthews", "pearson", "spearman", "precision", "recall",
}  # fmt: skip
"""Scores that are printed times 100, unless they are percentages already."""
_TEST_COLUMNS = ("init", "rate", "runs", "lost", "median", "quartiles", "mean", "std")
_COLUMNS = (
    "init", "rate", "runs", "failed", "lost", "median", "quartiles", "best", "mean", "std", "epoch",
    "last", "seconds",
)  # fmt: skip


def summary_lines(summary: Summary, *, percent: bool = False) -> list[str]:
    """Describe the runs for people, in a fixed-width font.

    Scores are printed times 100, unless they are `percent` already, as SQuAD's.
    """
    scale = 1.0 if percent else 100.0
    head = f"{summary.metric}{'' if percent else ' x 100'}: best evaluation of each run"
    if summary.evaluations > 1:
        head = head.replace("evaluation", f"of the {summary.evaluations_named} evaluations")
    if summary.constant_score is not None:
        head += f"; a constant prediction gets {summary.constant_score * scale:.1f}"
    tested = "below, on test, which chose nothing"
    if summary.test is None:
        tested = "no test data are named (task.*.test)"
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
    """Return the fields as JSON: numbers that are not finite become null."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(summary)), parse_constant=lambda _: None)
    return found


def write_summary(
    summary: Summary, directory: Path, *, title: str = "", percent: bool = False
) -> list[Path]:
    """Write statistics.txt, .png and, last, .json, each in one rename, and return the files.

    `title` stands above the picture; `percent` is as in `summary_lines`.
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
    """Return the table and the comparisons of the test data."""
    head = (
        f"{summary.metric}{'' if percent else ' x 100'} on test: each run scored once, with the "
        "parameters of its best evaluation on dev"
    )
    if test.constant_score is not None:
        head += f"; a constant prediction gets {test.constant_score * scale:.1f}"
    lines = ["", head, *_group_table(test.groups, _TEST_COLUMNS, scale, {})]
    lines += _others_lines(summary, test.groups, percent, "on test")
    return lines + _comparison_lines(test.comparisons, scale, ", on test")


def _group_table(
    groups: Sequence[Group],
    columns: Sequence[str],
    scale: float,
    best: Mapping[str, float],
) -> list[str]:
    """Lay out `columns` of each group; a star marks the rate that is `best` for its `init`."""

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
    comparisons: Sequence[Comparison], scale: float, where: str = ""
) -> list[str]:
    tables: dict[str, list[list[str]]] = {}
    for each in comparisons:
        head = f"{each.first} less {each.second}{where}"
        columns = [head, "mean", f"{LEVEL:.0%} by t", "better in"]
        tables.setdefault(head, [columns]).append(_comparison_row(each, scale))
    lines = [line for table in tables.values() for line in ("", *table_lines(table))]
    if any(c.seeds == 1 for c in comparisons):
        lines.append("one seed in common: no interval")
    return lines


def _comparison_row(comparison: Comparison, scale: float) -> list[str]:
    if comparison.learning_rates is None:
        name = "all learning rates"
    else:
        names = [rate_name(rate) for rate in comparison.learning_rates]
        name = f"each at its best: {names[0]}, {names[1]}" if comparison.chosen else names[0]
    better = f"{comparison.wins} of {comparison.pairs}"
    better += f", {comparison.ties} equal" if comparison.ties else ""
    better += f", {comparison.unpaired} runs unpaired" if comparison.unpaired else ""
    mean = "-" if comparison.mean is None else f"{comparison.mean * scale:+z.1f}"
    student = [f"{end * scale:+z.1f}" for end in comparison.student or ()]
    return [f"  {name}", mean, " to ".join(student) or "-", better]


def _failed_lines(summary: Summary) -> list[str]:
    failed = [outcome for outcome in summary.outcomes if outcome.failed]
    if not failed:
        return []
    lines = ["", f"failed: {len(failed)} of {len(summary.outcomes)} runs"]
    for outcome in failed[:_MAX_FAILED]:
        trial = outcome.member
        where = f"{trial.init}, {rate_name(trial.learning_rate)}, seed {trial.seed}"
        lines.append(f"  {where}: {outcome.failed}")
    if len(failed) > _MAX_FAILED:
        lines.append(f"  and {len(failed) - _MAX_FAILED} more")
    return lines

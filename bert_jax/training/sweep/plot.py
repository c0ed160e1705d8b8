"""The scores of a set of runs as a picture: a point a run, a box a group."""

from typing import Any

import numpy as np

from bert_jax.files.pictures import INK, MARK, dress, new_figure
from bert_jax.training.run.loss_curve import margin_label
from bert_jax.training.sweep.statistics import Outcome, Summary, quantile, rate_name

_COLOURS = ["#2b6cb0", "#c2410c", "#2f855a", "#6b46c1", "#b7791f", "#4a5568"]
_FAILED = "#c53030"
_LONGEST_NAME = 40


def statistics_figure(summary: Summary, *, title: str = "", percent: bool = False) -> Any:
    """Draw strips of points with boxes of the quartiles, side by side for each learning rate.

    Scores on test data are diamonds to the right of the dev scores. Failed runs are crosses; lost
    runs are crosses on the axis, to which their boxes reach down. Whiskers reach the worst and best
    run.

    `title` stands above the picture. Scores are drawn times 100, unless they are `percent` already.
    """
    scale = 1.0 if percent else 100.0
    inits, rates = summary.inits, summary.learning_rates
    inches = min(14.0, max(4.2, 2.2 + 0.75 * len(inits) * len(rates)))
    figure = new_figure((inches, 4.4), title)
    axis = figure.subplots()
    if summary.constant_score is not None:
        constant = summary.constant_score * scale
        axis.axhline(constant, color=MARK, linestyle="--", linewidth=1.2, zorder=1)
        margin_label(axis, constant, f"constant\nprediction\n{constant:.1f}")
    _limits(axis, summary, scale)
    step = 0.8 / max(len(inits), 1)
    # A seed has the same offset in every box, and equal scores do not hide each other.
    seeds = sorted({outcome.member.seed for outcome in summary.outcomes})
    offsets = {seed: (n + 0.5) / len(seeds) - 0.5 for n, seed in enumerate(seeds)}
    for i, init in enumerate(inits):
        colour = _COLOURS[i % len(_COLOURS)]
        name = init if len(init) <= _LONGEST_NAME else f"…{init[1 - _LONGEST_NAME :]}"
        axis.plot([], [], "o", color=colour, markersize=5, label=name)
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
        label += "\n(on the axis: lost, no finite score)" if lost else ""
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
    """Draw the quartiles; a quartile of lost runs is at the bottom of the picture."""
    bottom = axis.get_ylim()[0]
    ends = [quantile(scores, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
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
    """Make room for all points and the line: at least four percentage points."""
    tested = (run.test.get(summary.metric) for run in summary.outcomes)
    scores = [*(run.best for run in summary.outcomes), *tested, summary.constant_score]
    values = [score for score in scores if score is not None and np.isfinite(score)]
    if not values:
        axis.set_ylim(0, 100)
        return
    low, high = min(values) * scale, max(values) * scale
    margin = max(0.08 * (high - low), (4.0 - (high - low)) / 2)
    axis.set_ylim(low - margin, high + margin)

"""The text, the JSON and the picture of a sweep's statistics."""

import dataclasses
import json
import math

import numpy as np
import pytest

from bert_jax.tasks.config import METRICS
from bert_jax.tasks.retrieval.metrics import RANKING_METRICS
from bert_jax.training.progress import failure_reason
from bert_jax.training.sweep.report import (
    statistics_figure,
    summary_json,
    summary_lines,
    write_summary,
)
from bert_jax.training.sweep.statistics import Outcome, Trial, rate_name, summarise


def run(init, rate, seed, best, **scores):
    row = {"step": 10, "epoch": 1.0, "accuracy": best, **scores}
    failed = failure_reason(best, best, 0.72, best is not None)
    return Outcome(Trial(init, rate, seed), [row, row], best, 10, failed, 2.0, 1.0, best)


@pytest.fixture
def sweep():
    """Two initialisations, two learning rates, three seeds; the last run has no score."""
    scores = {
        ("wiki", 2e-5): [0.80, 0.81, 0.83],
        ("wiki", 1e-4): [0.82, 0.83, 0.90],
        ("random", 2e-5): [0.70, 0.72, 0.60],
        ("random", 1e-4): [0.70, 0.70, None],
    }
    return summarise(
        [
            run(init, rate, seed, best, f1=best, mean_loss=0.5)
            for (init, rate), values in scores.items()
            for seed, best in enumerate(values)
        ],
        "accuracy",
        0.68,
        0.72,
    )


def test_a_run_that_stopped_early_has_fewer_evaluations(sweep):
    first, *others = sweep.outcomes
    early = summarise([dataclasses.replace(first, scores=first.scores[:1]), *others], "accuracy")
    assert summary_lines(early)[0] == "accuracy x 100: best of the 1 to 2 evaluations of each run"


def test_the_text_says_what_is_known(sweep):
    lines = summary_lines(sweep)
    assert lines[:22] == [
        "accuracy x 100: best of the 2 evaluations of each run; a constant prediction gets 68.0",
        "on dev, the set that chose the epoch; no test data are named (task.test)",
        "failed: a run that is not above 72.0 at its last evaluation, or diverged",
        "init     rate  runs  failed  lost  median     quartiles  best  mean  std  epoch  last  "
        "seconds",
        "wiki     2e-5     3       0     0    81.0  80.5 to 82.0  83.0  81.3  1.5      1  81.0  "
        "      6",
        "wiki    1e-4*     3       0     0    83.0  82.5 to 86.5  90.0  85.0  4.4      1  83.0  "
        "      6",
        "wiki      all     6       0     0    82.5  81.2 to 83.0  90.0  83.2  3.5      1  82.5  "
        "     12",
        "random  2e-5*     3       3     0    70.0  65.0 to 71.0  72.0  67.3  6.4      1  70.0  "
        "      6",
        "random   1e-4     3       3     1    70.0  lost to 70.0  70.0     -    -      1  70.0  "
        "      6",
        "random    all     6       6     1    70.0  62.5 to 70.0  72.0     -    -      1  70.0  "
        "     12",
        "epoch: median of the best evaluations; last: median of the last evaluations",
        "* the best learning rate by the median",
        "lost: runs without a finite score; they count as the worst",
        "",
        "medians of the other scores at the best evaluations:",
        "  wiki, 2e-5: f1 81.0, mean_loss 0.5",
        "  wiki, 1e-4: f1 83.0, mean_loss 0.5",
        "  wiki, all: f1 82.5, mean_loss 0.5",
        "  random, 2e-5: f1 70.0, mean_loss 0.5",
        "  random, 1e-4: f1 70.0, mean_loss 0.5",
        "  random, all: f1 70.0, mean_loss 0.5",
        "",
    ]
    assert [" ".join(line.split()) for line in lines[22:31]] == [
        "wiki less random mean 95% by t better in",
        "2e-5 +14.0 -5.4 to +33.4 3 of 3",
        "1e-4 +18.3 -6.8 to +43.5 3 of 3",
        "all learning rates +16.2 -6.1 to +38.4 6 of 6",
        "each at its best: 1e-4, 2e-5 +17.7 -8.9 to +44.2 3 of 3",
        "",
        "failed: 6 of 12 runs",
        "random, 2e-5, seed 0: the last evaluation's score 0.7000 is not above 0.7200",
        "random, 2e-5, seed 1: the last evaluation's score 0.7200 is not above 0.7200",
    ]
    assert lines[-1] == "  random, 1e-4, seed 2: no evaluation gave a finite score"


def test_all_metrics_of_a_task_are_shown_on_one_scale():
    for names in METRICS.values():
        row = {"step": 1, "epoch": 1.0, **dict.fromkeys(names, 0.5)}
        outcomes = [Outcome(Trial("a", 1e-5, 0), [row], 0.5, 1, "", 1.0)]
        shown = ", ".join(f"{name} 50.0" for name in names[1:])
        assert f"  a, 1e-5: {shown}" in summary_lines(summarise(outcomes, names[0]))


@pytest.mark.parametrize("names", [("las", "uas"), RANKING_METRICS])
def test_metrics_of_parsers_and_of_searches_are_shown_on_one_scale(names):
    outcomes = [run("a", 1e-5, 0, 0.5, **dict.fromkeys(names, 0.5))]
    shown = ", ".join(f"{name} 50.0" for name in names)
    assert f"  a, 1e-5: {shown}" in summary_lines(summarise(outcomes, "accuracy"))


def test_one_seed_and_percent():
    outcomes = [
        Outcome(Trial(init, 3e-5, 0), [{"step": 10, "recall": best}], best, 10, "", 60.0, 2.0, 60.5)
        for init, best in (("wiki", 61.25), ("random", 61.251))
    ]
    lines = summary_lines(summarise(outcomes, "f1"), percent=True)
    assert lines == [
        "f1: best evaluation of each run",
        "on dev, the set that chose the epoch; no test data are named (task.test)",
        "init    rate  runs  failed  lost  median     quartiles  best  mean  std  epoch  last  "
        "seconds",
        "wiki    3e-5     1       0     0    61.2  61.2 to 61.2  61.2  61.2    -      2  60.5  "
        "     60",
        "random  3e-5     1       0     0    61.3  61.3 to 61.3  61.3  61.3    -      2  60.5  "
        "     60",
        "epoch: median of the best evaluations; last: median of the last evaluations",
        "",
        "medians of the other scores at the best evaluations:",
        "  wiki, 3e-5: recall 61.25",
        "  random, 3e-5: recall 61.25",
        "",
        "wiki less random  mean  95% by t  better in",
        "  3e-5            +0.0         -     0 of 1",
        "one seed in common: no interval",
    ]


def test_shares_are_shown_on_one_scale():
    names = {name for listed in METRICS.values() for name in listed} - {"accuracy"}
    outcome = run("a", 1e-5, 0, 0.5, **dict.fromkeys(names, 0.25))
    (shown,) = [line for line in summary_lines(summarise([outcome], "accuracy")) if "macro" in line]
    assert all(f"{name} 25.0" in shown for name in names)


def test_many_failed_runs_are_counted():
    lines = summary_lines(summarise([run("a", 1e-5, s, None) for s in range(14)], "accuracy"))
    assert lines[-12] == "failed: 14 of 14 runs"
    assert lines[-1] == "  and 4 more"


def test_files_appear_whole(sweep, tmp_path, monkeypatch):
    (tmp_path / "statistics.txt").write_text("old")
    files = write_summary(sweep, tmp_path, title="MRPC")
    assert sorted(files) == sorted(tmp_path.iterdir())
    text, picture, values = files
    assert text.read_text().splitlines() == summary_lines(sweep)
    assert picture.read_bytes().startswith(b"\x89PNG")
    read = json.loads(values.read_text())
    assert (read["metric"], read["goal"], read["evaluations"]) == ("accuracy", 0.72, 2)
    assert read["groups"][0]["median"] == 0.81
    assert read["outcomes"][-1]["best"] is None
    assert (read["outcomes"][0]["best_epoch"], read["outcomes"][0]["last"]) == (1.0, 0.8)
    assert read["outcomes"][0]["member"] == {"init": "wiki", "learning_rate": 2e-5, "seed": 0}

    def fail(*_, **__):
        raise OSError("no space left")

    before = {path: path.read_bytes() for path in files}
    monkeypatch.setattr("bert_jax.files.staging.os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_summary(sweep, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_baseline_has_its_name(sweep):
    """The first stage of a reranker was called a constant prediction."""
    named = dataclasses.replace(sweep, baseline="the first stage (task.scores)")
    assert summary_lines(named)[0].endswith("; the first stage (task.scores) gets 68.0")
    assert "constant" not in "\n".join(summary_lines(named))


def test_json_has_no_nan():
    outcome = Outcome(Trial("a", 1e-5, 0), [{"step": 1, "f1": math.nan}], math.inf, 1, "x", 1.0)
    read = json.dumps(summary_json(summarise([outcome], "f1")), allow_nan=False)
    assert json.loads(read)["outcomes"][0]["scores"] == [{"step": 1, "f1": None}]


def test_the_picture_has_every_run(sweep):
    (axis,) = statistics_figure(sweep, title="MRPC").axes
    points = [line for line in axis.lines if line.get_marker() == "o" and len(line.get_xdata())]
    crosses = [line for line in axis.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert sorted(round(line.get_ydata()[0]) for line in points) == [80, 81, 82, 83, 83, 90]
    *failed, lost = crosses
    assert [round(line.get_ydata()[0]) for line in failed] == [70, 72, 60, 70, 70]
    assert lost.get_transform() == axis.get_xaxis_transform()  # on the axis, whatever the scores
    low, high = axis.get_ylim()
    assert low < 60
    assert high > 90
    dashed = [line for line in axis.lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in dashed] == [68]
    assert "constant\nprediction\n68.0" in [each.get_text() for each in axis.texts]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["2e-5", "1e-4"]
    assert axis.get_ylabel() == "accuracy x 100, best of 2 evaluations"
    assert "the last evaluation is not above 72.0" in axis.get_legend_handles_labels()[1][-1]
    # The seeds of a group stand apart, and in the same order everywhere.
    at = [line.get_xdata()[0] for line in points[:3]]
    assert np.diff(at).min() > 0.01


def test_dollars_in_paths_are_not_formulas(tmp_path):
    runs = [run(f"runs/$a_${name}", 1e-5, 0, 0.8) for name in "bc"]
    assert write_summary(summarise(runs, "accuracy"), tmp_path)


def test_names_of_rates():
    assert [rate_name(r) for r in (2e-5, 1e-4, 2.5e-5, 1.0, None)] == [
        "2e-5", "1e-4", "2.5e-5", "1e+0", "all",
    ]  # fmt: skip


def test_boxes_reach_down_to_lost_runs():
    """Of five runs, one and four are lost."""
    outcomes = [
        run(init, 1e-4, seed, None if seed < lost else 0.8 + seed / 100)
        for init, lost in (("a", 1), ("b", 4))
        for seed in range(5)
    ]
    (axis,) = statistics_figure(summarise(outcomes, "accuracy", 0.68, 0.72)).axes
    bottom = axis.get_ylim()[0]
    boxes = [sorted(set(patch.get_path().vertices[:, 1].round(6))) for patch in axis.patches]
    assert boxes == [pytest.approx([81, 83]), pytest.approx([bottom])]


def test_scores_on_test_data_are_beside_those_on_dev(sweep):
    """Rates are compared at their best on dev; a run that is lost on dev is lost on test."""
    shift = {"wiki": -0.05, "random": -0.02}
    tested = [
        dataclasses.replace(
            each,
            test={}
            if each.best is None
            else {"accuracy": each.best + shift[each.member.init], "f1": 0.5},
        )
        for each in sweep.outcomes
    ]
    summary = summarise(tested, "accuracy", 0.68, 0.72, 0.6)
    assert (summary.groups, summary.comparisons) == (sweep.groups, sweep.comparisons)
    for group, ours in zip(summary.test.groups, summary.groups, strict=True):
        assert (group.init, group.lost, group.failed) == (ours.init, ours.lost, ours.failed)
        assert group.median == pytest.approx(ours.median + shift[group.init])
        assert group.last is None
    assert [c.learning_rates for c in summary.test.comparisons] == [
        c.learning_rates for c in summary.comparisons
    ]
    first, ours = summary.test.comparisons[0], summary.comparisons[0]
    assert first.mean == pytest.approx(ours.mean - 0.03)
    assert first.student == pytest.approx(tuple(end - 0.03 for end in ours.student))
    lines = summary_lines(summary)
    assert lines[1] == "on dev, the set that chose the epoch; below on test, not used for selection"
    assert lines[22:27] == summary_lines(sweep)[22:27]  # comparisons on dev
    begin = next(n for n, line in enumerate(lines) if line.startswith("accuracy x 100 on test"))
    assert lines[begin].endswith("a constant prediction gets 60.0")
    assert lines[begin + 1].split() == [
        "init", "rate", "runs", "lost", "median", "quartiles", "mean", "std",
    ]  # fmt: skip
    assert lines[begin + 2].split()[:5] == ["wiki", "2e-5", "3", "0", "76.0"]
    assert any(line.startswith("wiki less random, on test") for line in lines)
    assert "  wiki, 2e-5: f1 50.0" in lines
    assert lines[-1].startswith("  random, 1e-4, seed 2")
    read = summary_json(summary)
    assert read["test"]["groups"][0]["median"] == pytest.approx(0.76)
    assert summary_json(sweep)["test"] is None
    assert Outcome.from_json(read["outcomes"][0]) == tested[0]
    (axis,) = statistics_figure(summary).axes
    diamonds = [n for n in axis.lines if n.get_marker() == "D" and len(n.get_xdata())]
    assert len(diamonds) == 11
    assert {round(line.get_ydata()[0]) for line in diamonds} >= {58, 75, 85}

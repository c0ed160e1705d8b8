"""Scores by class and their resamples, against the metrics and against scikit-learn and seqeval."""

import io
import json
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.tasks.reports.classes import (
    MOST_CONFUSED,
    SHOWN,
    class_statistic,
    confusion,
    contradicted,
    label_set_statistic,
    most_confident,
    of_classes,
    of_label_sets,
    shortened,
)
from bert_jax.tasks.reports.intervals import DRAWS, Grounds, intervals, means, weights
from bert_jax.tasks.reports.lines import difference_lines, report_figure, report_lines
from bert_jax.tasks.text.metrics import METRICS, text_grounds
from bert_jax.training.sweep.statistics import student_interval

RANDOM = np.random.default_rng(0)
TRUTH = RANDOM.integers(0, 4, 60)
GUESS = np.where(RANDOM.random(60) < 0.6, TRUTH, RANDOM.integers(0, 4, 60))


def drawn(count: int) -> np.ndarray:
    return np.concatenate([*weights(count)])


def repeated(weights: np.ndarray) -> np.ndarray:
    """Return the examples of a resample."""
    return np.repeat(np.arange(len(weights)), weights.astype(int))


def of_mean(each: np.ndarray, units: np.ndarray | None = None, **more) -> Grounds:
    units = np.arange(len(each)) if units is None else units
    return Grounds(means(["accuracy"], each[:, None].astype(float)), units, each, **more)


def test_resamples_are_the_same_for_the_same_number_of_units():
    times = drawn(37)
    assert times.shape == (DRAWS, 37)
    assert (times == drawn(37)).all()
    assert (times.sum(axis=1) == 37).all()
    # Each unit is drawn once a resample on average.
    assert np.abs(times.mean(axis=0) - 1).max() < 0.15
    assert len(np.unique(times, axis=0)) == DRAWS


def test_no_two_resamples_of_many_examples_are_equal():
    """They are drawn in several parts."""
    parts = [times[:, :64] for times in weights(10_000)]
    assert len(parts) > 1
    assert len(np.unique(np.concatenate(parts), axis=0)) == DRAWS


def test_a_block_of_few_units_suits_many_examples():
    parts = [*weights(20, 1_000_000)]
    assert max(map(len, parts)) <= 4 < max(map(len, weights(20)))
    assert (np.concatenate(parts) == drawn(20)).all()


def test_an_interval_is_t_on_the_scale_of_log_odds():
    def score(w: np.ndarray) -> dict[str, np.ndarray]:
        found = 0.6 + 0.3 * np.arange(DRAWS) / DRAWS if len(w) == DRAWS else np.array([0.8])
        return {"f1": found, "pearson": found}

    found = intervals(Grounds(score, np.arange(37))).found
    error = 0.3 / math.sqrt(12) * math.sqrt(37 / 36)  # of a uniform distribution
    times = scipy.stats.t.ppf(0.975, 36)
    ends = [scipy.special.logit(0.8) + side * times * error / 0.16 for side in (-1, 1)]
    assert found["f1"] == pytest.approx(scipy.special.expit(ends), rel=1e-4)
    ends = [math.atanh(0.8) + side * times * error / (1 - 0.8**2) for side in (-1, 1)]
    assert found["pearson"] == pytest.approx(np.tanh(ends), rel=1e-4)  # Fisher's z


def test_classes_of_resamples_are_the_metrics_of_resamples():
    times = drawn(60)[:40]
    found = class_statistic(TRUTH, GUESS)(times)
    for number, at in enumerate(map(repeated, times)):
        expected = METRICS["single_label"](TRUTH[at], GUESS[at])
        assert {name: values[number] for name, values in found.items()} == pytest.approx(expected)
    constant = class_statistic(np.zeros(5, int), np.zeros(5, int))(np.ones((1, 5)))
    assert {name: values[0] for name, values in constant.items()} == {
        "accuracy": 1.0, "f1": 0.0, "macro_f1": 1.0, "matthews": 0.0,
    }  # fmt: skip


def test_label_sets_of_resamples_are_the_metrics_of_resamples():
    truth, guess = RANDOM.random((2, 50, 3)) < 0.4
    times = drawn(50)[:40]
    found = label_set_statistic(truth, guess)(times)
    for number, at in enumerate(map(repeated, times)):
        expected = METRICS["multi_label"](truth[at], guess[at])
        assert {name: values[number] for name, values in found.items()} == pytest.approx(expected)


def test_correlations_of_resamples_are_the_metrics_of_resamples():
    truth = RANDOM.integers(0, 6, 40).astype(float)  # with ties
    guess = truth + RANDOM.normal(size=40).round(1)
    times = drawn(40)[:20]
    found = text_grounds("regression", truth, guess, np.arange(40)).score(times)
    for number, at in enumerate(map(repeated, times)):
        expected = METRICS["regression"](truth[at], guess[at])
        assert {name: values[number] for name, values in found.items()} == pytest.approx(expected)


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_intervals_of_correlations_do_not_depend_on_the_unit_of_scores(unit):
    truth, noise = np.random.default_rng(5).normal(size=(2, 40))
    whole = intervals(text_grounds("regression", truth, truth + noise, np.arange(40)))
    found = intervals(text_grounds("regression", unit * truth, truth + noise, np.arange(40)))
    assert found.found["pearson"] == pytest.approx(whole.found["pearson"])
    equal = text_grounds("regression", truth, np.full(40, unit / 3), np.arange(40))
    assert not intervals(equal).found


def test_an_interval_covers_the_share_of_successes():
    """The 95% interval of an accuracy holds the true rate in about 95 of 100 sets."""
    inside = 0
    for seed in range(100):
        low, high = intervals(of_mean(np.random.default_rng(seed).random(200) < 0.7)).found[
            "accuracy"
        ]
        inside += low <= 0.7 <= high
    assert 88 <= inside <= 99


def test_groups_are_resampled_whole():
    """40 groups whose accuracies differ: without the groups, 57 of 100 intervals hold the rate."""
    inside = 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        right = random.random((40, 25)) < random.beta(3, 1, (40, 1))
        groups = np.repeat(np.arange(40), 25)
        low, high = intervals(of_mean(right.ravel(), groups)).found["accuracy"]
        inside += low <= 0.75 <= high
    assert 88 <= inside <= 99


def test_few_units():
    """Wilson's interval of rows, Student's t of groups, or a reason."""
    right = np.arange(50) < 47
    ends = scipy.stats.binomtest(47, 50).proportion_ci(method="wilson")
    assert intervals(of_mean(right)).found["accuracy"] == pytest.approx((ends.low, ends.high))
    percent = Grounds(means(["exact"], 100.0 * right[:, None]), np.arange(50), right, most=100.0)
    assert intervals(percent).found["exact"] == pytest.approx((100 * ends.low, 100 * ends.high))
    each, groups = np.random.default_rng(0).normal(0.5, 0.1, 10), np.repeat(np.arange(10), 5)
    low, high = intervals(of_mean(np.repeat(each, 5), groups)).found["accuracy"]
    wanted = student_interval(each)
    assert (low, high) == pytest.approx(wanted, abs=0.015 * (wanted[1] - wanted[0]))
    near = of_mean(np.where(groups, 0.99, 0.2), groups)
    low, high = intervals(near).found["accuracy"]
    assert 0.911 < high < 1  # the greatest score
    times_100 = Grounds(means(["exact"], 100 * near.right[:, None]), groups, near.right, most=100.0)
    assert intervals(times_100).found["exact"] == pytest.approx((100 * low, 100 * high))
    few = intervals(of_mean(np.repeat(each[:5], 5), np.repeat(np.arange(5), 5)))
    assert few == ({}, {"accuracy": "only 5 units"})
    groups = np.repeat(np.arange(40), 5)
    right = (groups >= 12) | (RANDOM.random(200) < 0.5)  # wrong in 12 of the 40
    ends = intervals(of_mean(right, groups)).found["accuracy"]
    each = right.reshape(40, 5).mean(1)
    half = scipy.stats.t.ppf(0.975, 39) * scipy.stats.sem(each)
    half /= each.mean() * (1 - each.mean())
    wanted = scipy.special.expit(scipy.special.logit(each.mean()) + np.array([-half, half]))
    assert ends == pytest.approx(wanted, abs=0.05 * (wanted[1] - wanted[0]))
    differing = intervals(of_mean(right, groups), of_mean(right ^ (groups < 5), groups))
    assert differing.missing["accuracy"] == "only 5 units differ"
    truth = np.arange(200) < 100
    guess = np.where(np.arange(200) % 40, truth, ~truth).astype(int)
    found = intervals(text_grounds("single_label", truth.astype(int), guess, np.arange(200)))
    assert found.missing["f1"] == "only 5 units are wrong"
    assert found.found.keys() == {"accuracy"}


@pytest.mark.parametrize(("name", "middle"), [("deviance", 1.4), ("fit", -0.2), ("pearson", -1.2)])
def test_a_score_out_of_range_is_named(name, middle):
    """Its interval, on the scale of log-odds, would not be a number."""
    each = middle + np.linspace(-0.1, 0.1, 50)[:, None]
    with pytest.raises(ValueError, match=rf"{name} is {middle}; expected from (0|-1) to 1$"):
        intervals(Grounds(means([name], each), np.arange(50)))


@pytest.mark.parametrize("end", [0.0, 1.0])
def test_a_score_at_an_end_of_its_range_has_no_interval(end):
    """A tagger whose few entities are all right: some resamples have none of these."""

    def score(w: np.ndarray) -> dict[str, np.ndarray]:
        return {"precision": np.where(np.arange(len(w)) % 10 if len(w) > 1 else 1, end, 1 - end)}

    found = intervals(Grounds(score, np.arange(50)))
    assert found.found == {}
    assert found.missing == {"precision": "the score is an end of its range"}


def test_a_rare_class():
    truth = (np.arange(400) < 8).astype(int)
    guess = np.where(np.arange(400) % 5, truth, 1 - truth)
    found = intervals(text_grounds("single_label", truth, guess, np.arange(400)))
    assert found.missing["macro_f1"] == "only 8 examples of a class"
    assert found.found.keys() == {"accuracy"}


def test_paired_differences_are_narrower():
    ours = RANDOM.random(400) < 0.8
    theirs = np.where(np.arange(400) % 10, ours, ~ours)
    low, high = intervals(of_mean(ours), of_mean(theirs)).found["accuracy"]
    alone = intervals(of_mean(ours)).found["accuracy"]
    assert low <= ours.mean() - theirs.mean() <= high
    assert high - low < alone[1] - alone[0]
    same = intervals(of_mean(ours), of_mean(ours))
    assert same == ({}, {"accuracy": "only 0 units differ"})
    lost = Grounds(lambda w: {"pearson": np.full(len(w), np.nan)}, np.arange(40))
    assert intervals(lost).missing == {"pearson": "the score is undefined in some resamples"}


def test_the_mean_over_classes_is_the_metric():
    """A class that never occurs is left out; a label that never occurs counts as 0."""
    sets = [np.eye(5, dtype=bool)[each] for each in (TRUTH, GUESS)]
    found = [of_classes([*"abcde"], TRUTH, GUESS), of_label_sets([*"abcde"], *sets)]
    assert [each["classes"] for each in found] == [found[0]["classes"]] * 2
    assert found[0]["classes"][4] == {
        "label": "e", "precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0, "predicted": 0,
    }  # fmt: skip
    wanted = [METRICS["single_label"](TRUTH, GUESS), METRICS["multi_label"](*sets)]
    assert [each["macro"]["f1"] for each in found] == pytest.approx(
        [each["macro_f1"] for each in wanted]
    )
    of_four, of_five = (np.array([*each["macro"].values()]) for each in found)
    np.testing.assert_allclose(of_five, 0.8 * of_four)


@pytest.mark.parity
@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_classes_are_those_of_scikit_learn(seed):
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    random = np.random.default_rng(seed)
    truth, guess = random.integers(0, random.integers(1, 6), (2, 30))
    found = of_classes([*"abcdef"], truth, guess)
    expected = precision_recall_fscore_support(truth, guess, labels=range(6), zero_division=0)
    rows = [[row[name] for row in found["classes"]]
            for name in ("precision", "recall", "f1", "support")]  # fmt: skip
    np.testing.assert_allclose(rows, expected)
    macro = precision_recall_fscore_support(truth, guess, average="macro", zero_division=0)
    assert [*found["macro"].values()] == pytest.approx(macro[:3])
    assert found["confusion"]["counts"] == confusion_matrix(truth, guess, labels=range(6)).tolist()


@pytest.mark.parity
def test_label_sets_are_those_of_scikit_learn():
    from sklearn.metrics import precision_recall_fscore_support

    truth, guess = RANDOM.random((2, 40, 3)) < 0.4
    found = of_label_sets([*"abc"], truth, guess)
    expected = precision_recall_fscore_support(truth, guess, zero_division=0)
    rows = [[row[name] for row in found["classes"]]
            for name in ("precision", "recall", "f1", "support")]  # fmt: skip
    np.testing.assert_allclose(rows, expected)


def test_of_many_classes_the_most_confused_are_shown():
    names = [f"class {number}" for number in range(MOST_CONFUSED + 5)]
    truth = np.arange(len(names)).repeat(2)
    guess = truth.copy()
    guess[[0, 2, 4]] = [7, 7, 8]
    found = confusion(names, truth, guess)
    assert len(found["labels"]) == MOST_CONFUSED
    assert {f"class {n}" for n in (0, 1, 2, 7, 8)} <= {*found["labels"]}
    lines = report_lines("x", {"examples": 2, "scores": {}, "confusion": found})
    assert "class 2" in "\n".join(lines)
    assert len([line for line in lines if "class" in line]) == 3  # mistakes, not a matrix


def test_mistakes_are_the_surest_first():
    wrong = np.arange(100) % 3 == 0
    sure = np.cos(np.arange(100))
    chosen = most_confident(wrong, sure)
    assert len(chosen) == SHOWN
    assert wrong[chosen].all()
    assert (np.diff(sure[chosen]) <= 0).all()
    assert sure[chosen[-1]] >= np.sort(sure[wrong])[-SHOWN]
    assert most_confident(np.zeros(3, bool), sure[:3]) == []
    assert len(shortened("a" * 10_000)) < 700


def test_labels_are_contradicted_above_the_mean_of_the_other_class():
    """By hand: class 0 has the mean 0.7 where it is the label, class 1 0.55, class 2 no label."""
    shares = np.array([
        [0.90, 0.10, 0.0], [0.95, 0.05, 0.0], [0.25, 0.75, 0.0],
        [0.05, 0.95, 0.0], [0.15, 0.85, 0.0], [0.69, 0.31, 0.0], [0.75, 0.25, 0.0],
        [0.20, 0.39, 0.41],
    ])  # fmt: skip
    truth = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    least = [shares[truth == label, label].mean() for label in (0, 1)]
    assert least == pytest.approx([0.7, 0.55])
    assert contradicted(shares, truth) == [2, 6]  # the margins are both 0.5; of row 5 0.69 < 0.7
    shares[6, :2] = 0.76, 0.24
    assert contradicted(shares, truth) == [6, 2]
    assert contradicted(shares, shares.argmax(axis=1)) == []


def test_planted_labels_are_found():
    """Of 400 points in three classes 24 have a planted label; other folds' means predict them."""
    random = np.random.default_rng(3)
    truth = random.integers(0, 3, 400)
    points = np.eye(3)[truth] * 4 + random.normal(size=(400, 3))
    planted = random.choice(400, 24, replace=False)
    given = truth.copy()
    given[planted] = (truth[planted] + 1) % 3
    shares = np.zeros((400, 3))
    for fold in range(5):
        held = np.arange(400) % 5 == fold
        centres = [points[~held & (given == label)].mean(axis=0) for label in range(3)]
        gaps = [((points[held] - centre) ** 2).sum(axis=1) / 2 for centre in centres]
        shares[held] = scipy.special.softmax(-np.stack(gaps, axis=1), axis=1)
    found = contradicted(shares, given)
    assert len({*planted.tolist()} & {*found}) >= 21
    assert len({*found} - {*planted.tolist()}) <= 4


def test_the_lines_say_over_what_a_difference_is_judged():
    def lines(over, **ends):
        found = {name: {"difference": 0.01, "by_seed": [0.01], "over": over, "interval": each,
                        "no_interval": None if each else "only 3 units"}
                 for name, each in ends.items()}  # fmt: skip
        return difference_lines(["work/a"], ["b"], {"dev": found})

    told = lines("examples", accuracy=(0.001, 0.02), f1=(-0.001, 0.02), recall=None)
    apart = [line.split("|")[-2].strip() for line in told[2:5]]
    assert apart == ["distinguishable from zero",
                     "not distinguishable from zero (the interval contains 0)",
                     "not judged: no interval"]  # fmt: skip
    assert "over examples, with one run a side, not over seeds" in told[-1]
    assert "not over seeds" not in "\n".join(lines("seeds", accuracy=(-0.02, -0.001)))
    assert lines("seeds", accuracy=(-0.02, -0.001))[2].endswith("| distinguishable from zero |")


def test_only_the_middle_of_a_long_text_is_cut_out():
    longest = "b" * 300 + "e" * 300
    assert shortened(longest) == longest
    assert shortened(f"{longest[:300]}middle{longest[300:]}") == "b" * 300 + " … " + "e" * 300


def test_labels_and_texts_stay_text():
    label = "a|b\x1b[31m`<img src=http://x>\u202e![p](http://x)\u200d"
    report_figure(
        "confusion", {"confusion": {"labels": ["$^$", "$_$"], "counts": np.eye(2)}}, title="$^$"
    ).savefig(io.BytesIO())
    mistake = {"label": label, "predicted": label, "probability": 1.0, "text": label}
    row = {"label": label, "precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1, "predicted": 1}
    report = {
        "examples": 1,
        "scores": {},
        "classes": [row],
        "mistakes": [mistake],
        "confusion": {"labels": [label, "c"], "counts": [[0, 1]] * 2, "classes": 2},
    }
    lines = report_lines("test", report)
    text = "\n".join(lines)
    assert not set("\x1b\u202e<>") & set(text)
    assert "- 1.000 `a/b [31m'\u2039img src=http://x\u203a ![p] (http://x)\u200d`" in text
    assert {line.count("|") for line in lines if "a/b [31m'" in line[:12]} == {7, 4}


def test_a_report_is_json_lines_and_a_picture():
    report = {
        "examples": 60, "scores": {"accuracy": 0.5, "f1": None}, "constant": 0.25,
        "intervals": {"accuracy": (0.4, 0.6)}, **of_classes(["a|b", "c", "d", "e"], TRUTH, GUESS),
        "mistakes": [{"label": "c", "predicted": "a|b", "probability": 0.5, "line": 3,
                      "text": "one\ntwo | three"}],
    }  # fmt: skip
    assert json.loads(json.dumps(report, allow_nan=False))["intervals"] == {"accuracy": [0.4, 0.6]}
    lines = report_lines("test", report)
    assert lines[0] == "## test, not used for selection: 60 examples"
    for name in ("dev", "dev_matched"):
        assert report_lines(name, report)[0].startswith(f"## {name}, the set that chose the epoch:")
    for name in ("dev_2024.csv", "dev_mismatched"):
        assert report_lines(name, report)[0] == f"## {name}: 60 examples"
    assert any(line.startswith("| accuracy") and "0.4000 to 0.6000" in line for line in lines)
    assert any(line.startswith("| f1") and "not a number" in line for line in lines)
    assert lines[-1] == "- 0.500 `a/b`, not `c` (line 3): one two / three"
    assert "Mistakes" not in "".join(report_lines("test", report, mistakes=False))
    tables = [line for line in lines if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    axis = report_figure("confusion", report, title="x").axes[0]
    assert [text.get_text() for text in axis.texts] == [
        f"{count}" for row in report["confusion"]["counts"] for count in row
    ]
    points = {"points": [[0.0, 1.0], [2.0, 3.0]]}
    assert len(report_figure("points", points).axes[0].lines) == 2

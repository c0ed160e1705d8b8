"""Scores by class and their resamples, against the metrics and against scikit-learn and seqeval."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.tasks.reports.bootstrap import DRAWS, differences, interval, resampled, resamples
from bert_jax.tasks.reports.classes import (
    MOST_CONFUSED,
    confusion,
    of_classes,
    of_label_sets,
    resampled_classes,
    resampled_label_sets,
)
from bert_jax.tasks.reports.lines import report_lines
from bert_jax.tasks.reports.mistakes import SHOWN, most_confident, shortened
from bert_jax.tasks.reports.pictures import report_figure
from bert_jax.tasks.text.metrics import METRICS, multi_label_f1

RANDOM = np.random.default_rng(0)
TRUTH = RANDOM.integers(0, 4, 60)
GUESS = np.where(RANDOM.random(60) < 0.6, TRUTH, RANDOM.integers(0, 4, 60))


def drawn(count: int) -> np.ndarray:
    return np.concatenate([*resamples(count)])


def test_resamples_are_the_same_for_the_same_number_of_examples():
    at = drawn(37)
    assert at.shape == (DRAWS, 37)
    assert (at == drawn(37)).all()
    assert (at.min(), at.max()) == (0, 36)
    # Each example is drawn once a resample on average.
    assert np.abs(np.bincount(at.ravel()) / DRAWS - 1).max() < 0.15
    assert len(np.unique(at, axis=0)) == DRAWS


def test_classes_of_resamples_are_the_metrics_of_resamples():
    found = resampled_classes(TRUTH, GUESS)
    for number, at in enumerate(drawn(60)[:40]):
        for name in ("accuracy", "f1", "macro_f1", "matthews"):
            assert found[name][number] == pytest.approx(METRICS[name](TRUTH[at], GUESS[at]))
    constant = resampled_classes(np.zeros(5, int), np.zeros(5, int))
    assert {name: values[0] for name, values in constant.items()} == {
        "accuracy": 1.0, "f1": 0.0, "macro_f1": 1.0, "matthews": 0.0,
    }  # fmt: skip


def test_label_sets_of_resamples_are_the_metrics_of_resamples():
    truth, guess = RANDOM.random((2, 50, 3)) < 0.4
    found = resampled_label_sets(truth, guess)
    for number, at in enumerate(drawn(50)[:40]):
        micro, macro = multi_label_f1(truth[at], guess[at])
        same = (truth[at] == guess[at]).all(axis=1).mean()
        values = [found[name][number] for name in ("f1", "macro_f1", "accuracy")]
        assert values == pytest.approx([micro, macro, same])


def test_an_interval_covers_the_share_of_successes():
    """The 95% interval of an accuracy holds the true rate in about 95 of 100 sets."""
    inside, at = 0, drawn(200)
    for seed in range(100):
        right = np.random.default_rng(seed).random(200) < 0.7
        low, high = interval(right[at].mean(axis=1))
        inside += low <= 0.7 <= high
    assert 88 <= inside <= 99


def test_paired_differences_are_narrower():
    right = RANDOM.random(300) < 0.8
    ours, theirs = right, np.where(RANDOM.random(300) < 0.1, ~right, right)
    one, other = (
        {"accuracy": resampled(300, lambda at, each=each: each[at].mean(axis=1))}
        for each in (ours, theirs)
    )
    low, high = differences(one, other)["accuracy"]
    alone = interval(one["accuracy"])
    assert low <= ours.mean() - theirs.mean() <= high
    assert high - low < alone[1] - alone[0]
    assert differences(one, one)["accuracy"] == (0.0, 0.0)
    assert differences(one, {"f1": one["accuracy"]}) == {}
    assert interval(np.full(DRAWS, np.nan)) is None


@pytest.mark.parity
@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
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


def test_a_report_is_json_lines_and_a_picture():
    report = {
        "examples": 60, "scores": {"accuracy": 0.5, "f1": None}, "constant": 0.25,
        "intervals": {"accuracy": (0.4, 0.6)}, **of_classes(["a|b", "c", "d", "e"], TRUTH, GUESS),
        "mistakes": [{"label": "c", "predicted": "a|b", "probability": 0.5, "line": 3,
                      "text": "one\ntwo | three"}],
    }  # fmt: skip
    assert json.loads(json.dumps(report, allow_nan=False))["intervals"] == {"accuracy": [0.4, 0.6]}
    lines = report_lines("test", report)
    assert lines[0] == "## test, data that chose nothing: 60 examples"
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

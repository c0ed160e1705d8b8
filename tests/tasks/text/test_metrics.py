"""Scores of classification and regression: by hand, and against scikit-learn and scipy."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.tasks.text.metrics import class_metrics, correlations, label_set_metrics


def accuracy(labels, guesses):
    return class_metrics(labels, guesses)["accuracy"]


def f1(labels, guesses):
    return class_metrics(labels, guesses)["f1"]


def macro_f1(labels, guesses):
    return class_metrics(labels, guesses)["macro_f1"]


def matthews(labels, guesses):
    return class_metrics(labels, guesses)["matthews"]


def pearson(labels, guesses):
    return correlations(labels, guesses)["pearson"]


def spearman(labels, guesses):
    return correlations(labels, guesses)["spearman"]


def multi_label_f1(labels, guesses):
    found = label_set_metrics(labels, guesses)
    return found["f1"], found["macro_f1"]


def test_classes_by_hand():
    labels, guesses = [1, 0, 1, 1], [1, 1, 1, 0]
    assert accuracy(labels, guesses) == 0.5
    assert f1(labels, guesses) == pytest.approx(2 * 2 / (3 + 3))
    assert macro_f1(labels, guesses) == pytest.approx((0 + 2 / 3) / 2)
    # (2 * 0 - 1 * 1) / sqrt(3 * 3 * 1 * 1)
    assert matthews(labels, guesses) == pytest.approx(-1 / 3)
    # Three classes: (2 hits * 4 - (1 + 1 + 4)) / sqrt((16 - 6) * (16 - 6))
    assert matthews([0, 1, 2, 2], [0, 2, 2, 1]) == pytest.approx(0.2)
    # Other shares among the predictions: (1 * 3 - 0 * 1) / sqrt(1 * 2 * 3 * 4)
    assert matthews([0, 0, 0, 1, 1], [0, 0, 0, 0, 1]) == pytest.approx(3 / math.sqrt(24))
    # A class that is only predicted counts too.
    assert macro_f1([0, 0, 1], [0, 2, 1]) == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_scores_by_hand():
    assert pearson([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 5)
    assert pearson([1, 2, 3], [-2, -4, -6]) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4.
    assert spearman([1, 2, 2, 9], [0.1, 0.3, 0.2, 7]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert spearman([1.0, 2.0, 3.0], [0.0, 1.0, math.inf]) == pytest.approx(1)


def test_several_labels_by_hand():
    labels = [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    found = multi_label_f1(labels, [[1, 0, 0], [0, 1, 0], [0, 1, 0]])
    assert found == pytest.approx((2 * 2 / (3 + 3), 4 / 9))
    assert label_set_metrics(labels, [[1, 0, 0], [0, 1, 0], [0, 1, 0]])["accuracy"] == 1 / 3
    table = np.array(labels, bool)
    assert multi_label_f1(table, table) == pytest.approx((1, 2 / 3))


def test_where_nothing_is_defined():
    assert f1([0, 0], [0, 0]) == 0
    assert matthews([0, 1, 1], [1, 1, 1]) == 0
    assert matthews([1, 1], [1, 1]) == 0
    for score in (pearson, spearman):
        assert math.isnan(score([1.0, 2.0, 3.0], [2.5, 2.5, 2.5]))
        assert math.isnan(score([1.0, 2.0, 3.0], [2.5, math.nan, 1.0]))
        assert math.isnan(score([1.0], [2.0]))
    assert math.isnan(pearson([1.0, 2.0, 3.0], [1.0, 2.0, math.inf]))


def test_large_counts_and_values():
    # The denominator has 6e21 where a 64-bit number ends at 9e18.
    labels = np.arange(400_000) % 2
    assert matthews(labels, labels) == pytest.approx(1)
    assert matthews(labels, 1 - labels) == pytest.approx(-1)
    for scale in (1e200, 1e-200):
        assert pearson([1, 2, 3, 4], np.array([1, 3, 2, 4]) * scale) == pytest.approx(0.8)


@pytest.mark.parametrize("score", [class_metrics, correlations])
def test_refuses_what_cannot_be_compared(score):
    for labels, guesses in (([], []), ([1, 0], [1, 0, 1]), ([[1, 0], [0, 1]],) * 2):
        with pytest.raises(ValueError, match="labels"):
            score(labels, guesses)


@pytest.mark.parity
@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 60),
    classes=st.integers(1, 5),
    right=st.floats(0, 1),
)
def test_as_scikit_learn(seed, count, classes, right):
    from sklearn import metrics as sk

    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, count)
    guesses = np.where(draw.random(count) < right, labels, draw.integers(0, classes, count))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scores that are not defined
        assert accuracy(labels, guesses) == pytest.approx(sk.accuracy_score(labels, guesses))
        assert matthews(labels, guesses) == pytest.approx(
            sk.matthews_corrcoef(labels, guesses), abs=1e-12
        )
        assert macro_f1(labels, guesses) == pytest.approx(
            sk.f1_score(labels, guesses, average="macro", zero_division=0)
        )
        assert f1(labels == 1, guesses == 1) == pytest.approx(
            sk.f1_score(labels == 1, guesses == 1, zero_division=0)
        )
        table, chosen = (draw.random((2, count, classes)) < right).astype(int)
        found = multi_label_f1(table, chosen)
        for value, average in zip(found, ("micro", "macro"), strict=True):
            expected = [
                2 * np.sum(t & c) / max(1, np.sum(t) + np.sum(c))
                for t, c in zip(table.T, chosen.T, strict=True)
            ]
            if classes > 1:  # a table of one column is a single class to scikit-learn
                expected = [sk.f1_score(table, chosen, average=average, zero_division=0)]
            assert value == pytest.approx(np.mean(expected))


@pytest.mark.parity
@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(2, 60),
    digits=st.integers(0, 3),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_as_scipy(seed, count, digits, scale):
    from scipy import stats

    draw = np.random.default_rng(seed)
    labels = np.round(draw.uniform(0, 5, count), digits)  # few digits give ties
    guesses = np.round(labels + draw.normal(0, 2, count), digits) * scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constants
        expected = stats.pearsonr(labels, guesses).statistic
        assert pearson(labels, guesses) == pytest.approx(expected, nan_ok=True, abs=1e-12)
        expected = stats.spearmanr(labels, guesses).statistic
        assert spearman(labels, guesses) == pytest.approx(expected, nan_ok=True, abs=1e-12)

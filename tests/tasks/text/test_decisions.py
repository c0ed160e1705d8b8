"""Temperature, thresholds and calibration error, each against what is written out or searched."""

import numpy as np
import pytest
from scipy.special import expit, log_softmax, logit

from bert_jax.tasks.text.metrics import (
    PLAIN,
    Decisions,
    fit_temperature,
    label_set_metrics,
    reliability,
)

RNG = np.random.default_rng(3)
LABELS = RNG.integers(0, 3, 400)
"""Of logits that would be right as they are, were they not three times as large."""
LOGITS = 3 * (RNG.gumbel(size=(400, 3)) + 1.5 * np.eye(3)[LABELS])
SEVERAL = RNG.normal(-1.5, 2, (300, 4))
HELD = RNG.random((300, 4)) < expit(SEVERAL / 2)


def log_loss(temperature):
    return -np.mean(log_softmax(LOGITS / temperature, axis=1)[np.arange(400), LABELS])


def test_the_temperature_has_the_least_log_loss():
    found = fit_temperature(LOGITS, LABELS)
    grid = [log_loss(each) for each in np.geomspace(0.05, 20, 400)]
    assert log_loss(found) <= min(grid)
    assert 2.2 < found < 4  # what the logits were multiplied with
    assert 1.6 < fit_temperature(SEVERAL, HELD) < 2.5
    # Of logits that are always right no finite temperature is the best.
    assert fit_temperature(10 * np.eye(3)[LABELS], LABELS) == pytest.approx(1 / 20, rel=1e-2)


def test_the_calibration_error_written_out():
    """Guo et al. 2017, equation 3."""
    shares, hits = RNG.random(500), RNG.random(500) < 0.6
    expected = 0.0
    for number in range(15):
        inside = (shares > number / 15) & (shares <= (number + 1) / 15)
        if inside.any():
            gap = abs(hits[inside].mean() - shares[inside].mean())
            expected += inside.sum() / 500 * gap
    found = reliability(shares, hits)
    assert found["ece"] == pytest.approx(expected)
    assert sum(found["counts"]) == 500
    borders = reliability(np.array([0.25, 0.5, 0.75]), np.ones(3, bool), bins=4)
    assert borders["counts"] == [1, 1, 1, 0]
    # Both ends have a bin.
    assert reliability(np.array([0.0, 1.0]), np.array([False, True]))["ece"] == 0


def test_calibration_changes_probabilities_and_no_class():
    fitted = Decisions.fitted(LOGITS, LABELS, calibrate=True, tune=False)
    scores = fitted.scores(LOGITS, LABELS, "abc", calibrate=True, tune=False)
    assert scores.keys() == {*Decisions.score_names("abc", calibrate=True, tune=False)}
    assert scores["ece"] < scores["ece_uncalibrated"] / 2
    assert scores["ece_uncalibrated"] == PLAIN.reliability(LOGITS, LABELS)["ece"]
    before, after = (each.shares(LOGITS, several=False) for each in (PLAIN, fitted))
    np.testing.assert_array_equal(before.argmax(axis=1), after.argmax(axis=1))
    assert Decisions.saved(scores, "abc") == fitted


def test_thresholds_have_the_highest_f1_of_each_label():
    fitted = Decisions.fitted(SEVERAL, HELD, calibrate=True, tune=True)
    shares = expit(SEVERAL / fitted.temperature)
    tuned = label_set_metrics(HELD, fitted.held(SEVERAL))["macro_f1"]
    best = [
        max(
            label_set_metrics(HELD[:, [k]], shares[:, [k]] > least)["f1"]
            for least in [*column, -1.0]
        )
        for k, column in enumerate(shares.T)
    ]
    assert tuned == pytest.approx(np.mean(best))
    assert tuned > label_set_metrics(HELD, PLAIN.held(SEVERAL))["macro_f1"]
    options = {"calibrate": True, "tune": True}
    scores = fitted.scores(SEVERAL, HELD, "abcd", **options)
    assert scores.keys() == {*Decisions.score_names("abcd", **options)}
    assert Decisions.saved(scores, "abcd") == fitted


def test_of_equal_f1_the_threshold_nearest_to_one_half_is_taken():
    """The first row alone, or all four, are two thirds."""
    shares = np.array([[0.9, 0.2, 0.15, 0.1], [0.9, 0.8, 0.7, 0.6]]).T
    held = np.array([[1, 0, 0, 1]] * 2, bool).T
    fitted = Decisions.fitted(logit(shares), held, calibrate=False, tune=True)
    assert fitted.thresholds == pytest.approx((0.55, 0.3))


def test_a_label_without_a_saved_threshold_has_one_half():
    assert Decisions.saved({"threshold/b": 0.3}, "abc").thresholds == (0.5, 0.3, 0.5)
    assert Decisions.saved({"temperature": 2.0}, "abc") == Decisions(2.0)


def test_probabilities_of_several_labels_are_calibrated_at_the_temperature_they_were_drawn_at():
    errors = [Decisions(each).reliability(SEVERAL, HELD)["ece"] for each in (1.0, 2.0, 4.0)]
    assert errors[1] < 0.04 < min(errors[0], errors[2])


def test_thresholds_without_a_choice():
    """A label that no row has; probabilities that are all equal, of which none is apart."""
    logits = np.stack([np.arange(4.0), np.zeros(4)], axis=1)
    held = np.array([[0, 1], [0, 0], [0, 1], [0, 1]], bool)
    fitted = Decisions.fitted(logits, held, calibrate=False, tune=True)
    assert fitted.thresholds == (0.5, 0.25)
    assert fitted.held(logits)[:, 1].all()

"""Weights of classes and repeated rows, from the labels alone."""

import dataclasses

import numpy as np
import pytest

from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.rows import NO_LABEL, Rows
from bert_jax.tasks.skew import class_weights, repeats


def rows(labels):
    tokens = [np.arange(5, dtype=np.int32)] * len(labels)
    return Rows(tokens, np.full(len(labels), 5, np.int32), labels)


ONE = rows(np.array([0] * 6 + [1] * 2, np.int32))
SEVERAL = rows(np.array([[1, 0], [1, 0], [1, 1], [0, 0]], np.float32))
TAGS = rows([np.array([NO_LABEL, 0, 0, 1, 0], np.int32), np.array([0, 0, 0, 0, 0], np.int32)])


def test_balanced_classes_count_the_same_in_sum():
    """Rows / (classes * rows of the class), as scikit-learn has it."""
    assert class_weights("balanced", ONE, ["a", "b"]) == (8 / (2 * 6), 8 / (2 * 2))
    assert class_weights("balanced", TAGS, ["O", "B-X"]) == (9 / (2 * 8), 9 / (2 * 1))
    # A label that no row has is no class of the data; its weight is used by nothing but smoothing.
    assert class_weights("balanced", ONE, ["a", "b", "c"]) == (8 / 12, 2.0, 1.0)
    # Of several labels: no against yes.
    assert class_weights("balanced", SEVERAL, ["x", "y"]) == (1 / 3, 3.0)


def test_given_weights():
    assert class_weights("", ONE, ["a", "b"]) == ()
    assert class_weights("b=2.5", ONE, ["a", "b"]) == (1.0, 2.5)
    assert class_weights(" b = 3 , a=0.5", ONE, ["a", "b"]) == (0.5, 3.0)
    assert class_weights("x=y=2", ONE, ["a", "x=y"]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("b", "'b'; expected 'balanced', or labels with weights above 0, such as a=2.5"),
        ("b=0", "'b=0'"),
        ("b=inf", "'b=inf'"),
        ("b=2,", "''"),
        ("balance=2", "the label 'balance' is not known"),
        ("b=2,b=3", "names 'b' twice"),
    ],
)
def test_weights_that_cannot_be(given, named):
    with pytest.raises(UserError, match="class_weights") as error:
        class_weights(given, ONE, ["a", "b"], "task.class_weights")
    assert named in str(error.value)


def test_rows_of_rare_classes_are_repeated():
    np.testing.assert_allclose(repeats(ONE, 2, 1.0), [1] * 6 + [3] * 2)
    np.testing.assert_allclose(repeats(ONE, 2, 0.5), [1] * 6 + [3**0.5] * 2)
    # The rarest label of a row decides; a row of none is there once.
    np.testing.assert_allclose(repeats(SEVERAL, 2, 1.0), [1, 1, 3, 1])
    np.testing.assert_allclose(repeats(TAGS, 2, 1.0), [2, 1])


def test_the_windows_of_a_text_count_as_one():
    """A text in three windows of class 0, and a text in one window of class 1."""
    share = np.array([1 / 3, 1 / 3, 1 / 3, 1], np.float32)
    one = dataclasses.replace(rows(np.array([0, 0, 0, 1], np.int32)), weights=share)
    assert class_weights("balanced", one, ["a", "b"]) == (1.0, 1.0)
    assert repeats(one, 2, 1.0).tolist() == [1.0] * 4
    labels = np.array([[1, 0], [1, 0], [1, 0], [1, 1]], np.float32)
    several = dataclasses.replace(rows(labels), weights=share)
    assert class_weights("balanced", several, ["x", "y"]) == (1.0, 1.0)
    assert repeats(several, 2, 1.0).tolist() == [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (
            {"problem_type": "regression", "class_weights": "balanced"},
            "class_weights is 'balanced'",
        ),
        ({"problem_type": "regression", "oversampling": 0.5}, "task.problem_type 'regression'"),
        (
            {"kind": "glue", "name": "stsb", "focal_gamma": 2.0},
            "task.focal_gamma is 2.0",
        ),
        (
            {"label_smoothing": 1.0},
            r"label_smoothing is 1.0; .* \[0, 1\)",
        ),
        ({"focal_gamma": -1.0}, "focal_gamma is -1.0"),
        ({"oversampling": 1.5}, "oversampling is 1.5"),
        (
            {"kind": "tagging", "focal_gamma": 2, "label_smoothing": 0.1},
            "set one of the two options",
        ),
    ],
)
def test_options_that_cannot_be(section, field):
    with pytest.raises(UserError, match=field):
        build(TaskConfig, section)

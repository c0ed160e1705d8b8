"""Rows of long texts: which tokens they have, and the answer of several rows."""

import numpy as np
import pytest
from task_examples import TOKENIZER, opened, put, read_json_lines

from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.long_texts import LongTexts, covered

WINDOWS = LongTexts("windows")


def task_of(tmp_path, *rows, **table):
    path = put(tmp_path / "a.csv", *rows)
    given = {"train": path, "dev": path, **table, "max_length": 10}
    return opened(build(TaskConfig, given))


def test_head_and_tail():
    """The published share, of 510 tokens; each text of a pair keeps its ends."""
    both = LongTexts("head_tail")
    assert both.parts([1000], 510) == [[[(0, 128), (618, 1000)]]]
    assert both.parts([5, 30], 21) == [[[(0, 5)], [(0, 4), (18, 30)]]]


@pytest.mark.parametrize("stride", [0, 1, 3, 7, 100])
@pytest.mark.parametrize("lengths", [[11], [12], [40], [4, 7], [7, 4], [3, 30], [30, 40], [6, 6]])
def test_windows_have_every_token_and_the_same_length(lengths, stride):
    rows = LongTexts("windows", stride=stride).parts(lengths, 10)
    sizes = {tuple(stop - start for ((start, stop),) in row) for row in rows}
    assert len(sizes) == 1
    assert sum(next(iter(sizes))) == 10
    cut = max(0, min(lengths) - 5) if len(lengths) == 2 else 0  # of the text that stays
    assert covered(rows) == sum(lengths) - cut
    moving = int(np.argmax(lengths))
    starts = [row[moving][0][0] for row in rows]
    assert starts == sorted(set(starts))
    if stride == 1:
        assert np.diff(starts).tolist() == [1] * (len(starts) - 1)


def test_pooled_logits_written_out():
    owners = np.array([0, 1, 1, 1, 2, 2])
    logits = np.random.default_rng(0).normal(size=(6, 3))
    for pooling, pool in {
        "mean": lambda rows: rows.mean(axis=0),
        "max": lambda rows: rows.max(axis=0),
        "first_last": lambda rows: (rows[0] + rows[-1]) / 2,
    }.items():
        expected = [pool(logits[owners == number]) for number in range(3)]
        found = LongTexts("windows", pooling).pooled(logits, owners)
        np.testing.assert_allclose(found, expected)


def test_rows_of_windows(tmp_path):
    """Labels and weights of the rows, scores of the texts, and a part of them."""
    task = task_of(
        tmp_path, "text,label", "abc,x", "abcdefghijkl,y", "ab,x", long="windows", window_stride=4
    )
    train, (dev,) = task.train_split(), task.dev_splits()
    (warning,) = train.warnings
    assert warning.endswith("1 texts of more than 8 tokens, read in 2 windows (line 3)")
    ids = TOKENIZER.encode("abcdefghijkl").ids.tolist()
    assert [row[1:-1].tolist() for row in train.rows.tokens[1:3]] == [ids[:8], ids[4:]]
    assert train.rows.labels.tolist() == [0, 1, 1, 0]
    assert train.rows.weights.tolist() == [1, 0.5, 0.5, 1]
    assert dev.num_scored == 3
    # By itself the second window is wrong; the mean is not.
    logits = np.array([[2.0, 1.0], [0.0, 5.0], [1.0, 0.0], [2.0, 0.0]], np.float32)
    assert dev.score(logits)["accuracy"] == 1.0
    dev.write_predictions(logits, tmp_path / "out", {})
    found = read_json_lines(tmp_path / "out" / "predictions.jsonl")
    assert [row["label"] for row in found] == ["x", "y", "x"]
    part, rows = dev.select([1, 2])
    assert rows.tolist() == [1, 2, 3]
    assert part.score(logits[rows])["accuracy"] == 1.0
    with pytest.raises(ValueError, match="outputs"):
        dev.score(logits[:3])


def test_short_texts_have_rows_without_weights(tmp_path):
    task = task_of(tmp_path, "text,label", "abc,x", "ab,y", long="windows")
    assert task.train_split().rows.weights is None
    assert task.train_split().warnings == ()


def test_what_is_left_out_is_counted(tmp_path):
    rows = ["text,pair,label", "abcdefgh,abcdefghij,x", "a,b,y"]
    task = task_of(tmp_path, *rows, text_pair="pair", long="windows")
    (warning,) = task.train_split().warnings
    # 7 tokens of room: 3 of the first text in each row, and 4 of the second.
    assert "read in 4 windows; 5 of their 18 tokens are left out (line 2)" in warning
    assert task.train_split().rows.second_start[:4].tolist() == [5] * 4
    task = task_of(tmp_path, "text,label", "abcdefghijkl,x", "a,y", long="head_tail")
    (warning,) = task.train_split().warnings
    assert "read at both ends; 4 of their 12 tokens are left out (line 2)" in warning


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"window_stride": 4}, "long is 'cut'; set task.long to 'windows'"),
        ({"window_pooling": "max"}, "long is 'cut'"),
        ({"long": "windows", "window_stride": -1}, "window_stride is -1"),
        (
            {"long": "windows", "window_pooling": "max", "problem_type": "regression"},
            "choose mean or first_last",
        ),
        (
            {"thresholds": "tuned"},
            r"works only with task.problem_type='multi_label', not 'single_label'",
        ),
        ({"calibrate": True, "problem_type": "regression"}, "no probabilities"),
    ],
)
def test_options_that_cannot_be(table, said):
    with pytest.raises(UserError, match=said):
        build(TaskConfig, table)

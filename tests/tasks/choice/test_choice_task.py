"""Choices in, a row for each, scores and predictions out."""

import numpy as np
import pytest
from task_examples import TOKENIZER, opened, put, put_json, read_json_lines

from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.examples import Origin, TextExample
from bert_jax.tasks.long_texts import text_rows
from bert_jax.tasks.opening import restore_task

HEAD = "video-id,sent1,sent2,ending0,ending1,ending2,ending3,label"
ROWS = (
    "v1,a man sits.,He,eats,runs,flies off,is a big cat,1",
    "v2,b,c,d,e,f,g,3",
    "v3,x,,d,e,f,g,1",
)


def config(train: str, dev: str = "", **fields) -> TaskConfig:
    section = {"train": train, "dev": dev or train, **fields}
    return build(TaskConfig, {"kind": "choice", "max_length": 20, **section})


def test_rows_are_the_text_with_each_choice(tmp_path):
    """As `run_swag.py` of Transformers pairs them: the beginning before each ending."""
    task = opened(config(put(tmp_path / "swag.csv", HEAD, *ROWS)))
    split = task.train_split()
    rows = split.rows
    assert (len(rows), rows.group, len(rows.tokens)) == (3, 4, 12)
    assert rows.labels.tolist() == [1, 3, 1]
    endings = ("He eats", "He runs", "He flies off", "He is a big cat")
    pairs = [TextExample("", "a man sits.", end, None, Origin("", 1)) for end in endings]
    expected = text_rows(pairs, TOKENIZER, 20, None).rows
    for ours, theirs in zip(rows.tokens, expected.tokens, strict=False):
        np.testing.assert_array_equal(ours, theirs)
    assert rows.second_start[:4].tolist() == expected.second_start.tolist()
    assert split.texts()[2] == ("x", "d", "e", "f", "g")
    assert task.num_outputs == 1
    assert split.constant_score == pytest.approx(2 / 3)
    (warning,) = split.warnings
    assert "1 texts of more than 20 tokens together with one of their choices, cut" in warning
    assert "(line 2)" in warning


def test_scores_and_predictions(tmp_path):
    task = opened(config(put(tmp_path / "swag.csv", HEAD, *ROWS)))
    split = task.dev_splits()[0]
    logits = np.float32([[0, 2, 1, 0], [0, 0, 9, 0], [1, 5, 2, 3]])
    assert split.score(logits) == {"accuracy": pytest.approx(2 / 3)}
    report = split.report(logits)
    low, high = report["intervals"]["accuracy"]
    assert low < 2 / 3 < high
    assert np.isnan(split.score(np.full((3, 4), np.inf, np.float32))["accuracy"])
    (path,) = split.write_predictions(logits, tmp_path / "out", {})
    first, second, _ = read_json_lines(path)
    assert (first["id"], first["label"], first["choice"]) == ("0", "1", "He runs")
    assert second["label"] == "2"
    assert sum(first["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    some, numbers = split.select([0, 2])
    assert numbers.tolist() == [0, 2]
    assert some.score(logits[numbers]) == {"accuracy": 1.0}
    with pytest.raises(ValueError, match=r"shape \(3, 2\); the first axes must be \(3, 4\)"):
        split.score(logits[:, :2])


def test_other_columns_and_names(tmp_path):
    """JSON lines of questions with named answers; a file without labels is predicted alone."""
    rows = [{"q": f"q {n}", "a": "x", "b": "y", "c": "z", "right": "CBA"[n % 3], "key": f"k{n}"}
            for n in range(4)]  # fmt: skip
    train = put_json(tmp_path / "train.jsonl", *rows)
    fields = {"text": "q", "beginning": "", "choices": ["a", "b", "c"], "label": "right",
              "labels": ["A", "B", "C"], "id": "key"}  # fmt: skip
    task = restore_task(opened(config(train, **fields)).describe(), TOKENIZER)
    for row in rows:
        del row["right"]
    bare = task.open_split(put_json(tmp_path / "bare.jsonl", *rows))
    assert bare.rows.labels is None
    assert "there is no column 'right', so its rows have no labels" in bare.warnings[0]
    with pytest.raises(UserError, match=r"bare.jsonl has no labels"):
        bare.score(np.zeros((4, 3), np.float32))
    logits = np.eye(4, 3, dtype=np.float32)
    (path,) = bare.write_predictions(logits, tmp_path / "out", {})
    assert [entry["label"] for entry in read_json_lines(path)] == ["A", "B", "C", "A"]
    assert [entry["id"] for entry in read_json_lines(path)] == ["k0", "k1", "k2", "k3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("v,a,b,c,d,e,f,4", r"line 2: the label '4' is not known; labels: '0', '1', '2', '3'"),
        ("v,a,b,c,d,e,f,", r"line 2: column 'label' is empty; expected a label"),
        ("v,a,b,c,d,e,1", r"line 2"),
    ],
)
def test_wrong_rows(tmp_path, line, message):
    with pytest.raises(UserError, match=message):
        opened(config(put(tmp_path / "swag.csv", HEAD, line)))


def test_what_is_refused(tmp_path):
    path = put(tmp_path / "swag.csv", HEAD, *ROWS)
    with pytest.raises(UserError, match="no column 'ending4'"):
        opened(config(path, choices=["ending0", "ending4"]))
    with pytest.raises(UserError, match="at least 2 values, all different"):
        config(path, choices=["ending0"])
    with pytest.raises(UserError, match="4 names are needed, one for each"):
        config(path, labels=["A", "B"])
    twice = put(tmp_path / "twice.csv", HEAD, ROWS[0], ROWS[0])
    with pytest.raises(UserError, match="line 3: the id 'v1' is also the id of line 2"):
        opened(config(twice, id="video-id"))

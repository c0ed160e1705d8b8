"""Some examples of a split are scored by the rows that they have in it."""

import numpy as np
from squad_examples import UNCASED, question
from task_examples import opened, put

from bert_jax.tasks.config import SquadConfig, TableConfig, TaggingConfig
from bert_jax.tasks.examples import Data
from bert_jax.tasks.squad.task import SpanSplit, SpanTask
from bert_jax.tasks.task import LabelSpec, Split


def check_rows(split: Split, examples: list[int], num_rows: int) -> Split:
    part, rows = split.select(examples)
    assert len(part.rows) == len(rows) == num_rows
    for row, tokens in zip(rows.tolist(), part.rows.tokens, strict=True):
        assert split.rows.tokens[row].tolist() == tokens.tolist()
    assert part.texts() == [split.texts()[number] for number in examples]
    return part


def test_texts(tmp_path):
    path = put(tmp_path / "a.csv", "text,label", "good,yes", "bad,no", "so so,no", "fine,yes")
    config = TableConfig(train=path, dev=path)
    (split,) = opened(config).dev_splits()
    part = check_rows(split, [1, 3], 2)
    assert split.texts()[2] == ("so so",)
    assert part.score(np.eye(2)[[0, 0]])["accuracy"] == 0.5


def test_sentences_of_several_windows(tmp_path):
    lines = [f"{'abcd'[n % 4] * 5} {'B-X' if n % 3 else 'O'}" for n in range(9)]
    path = put(tmp_path / "a.txt", *lines[:6], "", *lines[6:7], "", *lines[7:])
    config = TaggingConfig(max_length=16, train=path, dev=path)
    (split,) = opened(config).dev_splits()
    assert len(split.rows) > 3
    check_rows(split, [0, 2], len(split.rows) - 1)


def test_questions_of_several_windows():
    questions = (
        question("the cat sat on the mat", "cat", id="a"),
        question("ab cd", "cd", id="b"),
        question("ef gh", "gh", id="c"),
    )
    config = SquadConfig(max_length=20, train="x", dev="x", stride=4, max_question=5)
    task = SpanTask(config, LabelSpec(rules="v1.1"), UNCASED)
    split = SpanSplit(task, Data("dev", questions))
    windows = len(split.rows)
    assert windows > 3
    part = check_rows(split, [0, 2], windows - 1)
    assert part.texts()[1] == ("who ?", "ef gh")

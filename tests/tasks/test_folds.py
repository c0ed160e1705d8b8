"""Folds: every example once, groups whole, labels mixed alike, whatever the order of the rows."""

from collections import Counter

import numpy as np
import pytest
from task_examples import opened, put

from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.opening import fold_parts
from bert_jax.tasks.overlap import deal, example_key, joined, strata


def keys_of(count: int) -> list[bytes]:
    return [example_key([f"{n}"]) for n in range(count)]


def test_single_examples_are_dealt_evenly():
    """Of each label each fold has its share, but for one."""
    random = np.random.default_rng(0)
    labels = random.choice(["a", "b", "c"], 103, p=[0.75, 0.2, 0.05]).tolist()
    parts = deal(labels, np.arange(103), keys_of(103), [0.2] * 5)
    sizes = Counter(parts.tolist())
    assert max(sizes.values()) - min(sizes.values()) <= 1
    for label, count in Counter(labels).items():
        found = Counter(p for p, mine in zip(parts.tolist(), labels, strict=True) if mine == label)
        assert all(count // 5 <= found[part] <= -(-count // 5) for part in range(5))


def test_groups_stay_whole_and_the_mixture_is_near():
    random = np.random.default_rng(1)
    groups = random.integers(0, 60, 600)
    rare = random.random(60) < 0.2  # groups differ in their labels
    labels = (random.random(600) < np.where(rare[groups], 0.6, 0.05)).tolist()
    parts = deal(labels, groups, keys_of(600), [0.1, 0.9])
    for group in range(60):
        assert len(set(parts[groups == group].tolist())) == 1
    held = parts == 0
    assert abs(held.mean() - 0.1) < 0.02
    assert abs(np.mean(np.array(labels)[held]) - np.mean(labels)) < 0.04


def test_the_order_of_examples_does_not_count():
    random = np.random.default_rng(2)
    labels = random.integers(0, 3, 80).tolist()
    groups, keys = random.integers(0, 30, 80), keys_of(80)
    parts = deal(labels, groups, keys, [0.25] * 4)
    order = random.permutation(80)
    again = deal([labels[n] for n in order], 1000 - groups[order], [keys[n] for n in order],
                 [0.25] * 4)  # fmt: skip
    np.testing.assert_array_equal(parts[order], again)


def test_examples_that_share_any_key_are_of_one_group():
    """0 and 1 share a text, 1 and 3 an author, 2 and 4 nothing."""
    groups = joined(["x", "x", "y", "z", "w"], ["p", "q", "r", "q", "s"]).tolist()
    assert groups[0] == groups[1] == groups[3]
    assert len({groups[0], groups[2], groups[4]}) == 3


def test_kinds_of_scores_are_fifths():
    assert strata([0.5, 9.0, 2.0, 3.0, 1.0]) == [0, 4, 2, 3, 1]
    assert strata([1, 0, (1, 2)]) == [1, 0, (1, 2)]


def rows(count: int = 40) -> list[str]:
    """Four rows an author; the fifth of them about dogs."""
    return [f"text number {n},{'dog' if n % 5 == 0 else 'cat'},author {n // 4}"
            for n in range(count)]  # fmt: skip


def config(path: str, *, folds: int = 0, fold: int = 0, **table) -> TaskConfig:
    section = {"train": path, **table}
    return build(TaskConfig, {"kind": "table", "folds": folds, "fold": fold, **section})


def texts(split) -> list[str]:
    return [each[0] for each in split.texts()]


def test_rows_of_a_group_are_held_out_together(tmp_path):
    path = put(tmp_path / "a.csv", "text,label,author", *rows())
    task = opened(config(path, group="author", dev_rate=0.2))
    train, dev = task.train_split(), task.dev_splits()[0]
    author = {row.split(",")[0]: row.split(",")[2] for row in rows()}
    ours, theirs = ({author[text] for text in texts(split)} for split in (train, dev))
    assert len(ours) == 8
    assert len(theirs) == 2
    assert not ours & theirs
    assert np.bincount(dev.rows.labels).tolist() in ([6, 2], [7, 1])
    shuffled = put(tmp_path / "b.csv", "text,label,author", *rows()[::-1])
    again = opened(config(shuffled, group="author", dev_rate=0.2))
    assert set(texts(again.dev_splits()[0])) == set(texts(dev))
    other = task.open_split(put(tmp_path / "c.csv", "text,label", "a,cat"))  # groups are not needed
    assert texts(other) == ["a"]


def test_each_fold_is_held_out_once(tmp_path):
    """The folds of a task, one after another; all of it where no fold is chosen."""
    path = put(tmp_path / "a.csv", "text,label,author", *rows())
    whole = opened(config(path, folds=4, group="author"))
    assert len(whole.train_split().rows) == 40
    seen: list[str] = []
    for fold in range(1, 5):
        task = opened(config(path, folds=4, fold=fold, group="author"))
        train, dev = task.train_split(), task.dev_splits()[0]
        assert (train.name, dev.name) == ("train", "dev")
        assert sorted(texts(train) + texts(dev)) == sorted(texts(whole.train_split()))
        assert 1 <= np.bincount(dev.rows.labels, minlength=2)[1] <= 3
        assert task.config.dev_sources == {}
        assert task.describe()["learned"] == whole.describe()["learned"]
        seen += texts(dev)
    assert sorted(seen) == sorted(texts(whole.train_split()))
    parts = fold_parts(whole.train_split(), 4)
    assert np.bincount(parts).tolist()[1:] == [Counter(parts.tolist())[n] for n in range(1, 5)]


def test_held_out_rows_that_share_texts_are_named(tmp_path):
    lines = [f"text number {n // 10},{'dog' if n % 2 else 'cat'}" for n in range(40)]
    task = opened(config(put(tmp_path / "a.csv", "text,label", *lines), folds=4, fold=1))
    (dev,) = task.dev_splits()
    assert "rows share" in " ".join(dev.warnings)
    assert "rows share" not in " ".join(task.train_split().warnings)


def test_folds_of_other_kinds_of_tasks(tmp_path):
    """Tagged sentences, of which no dev file is needed."""
    lines = [line for n in range(6) for line in (f"w{n} {'BA'[n % 2]}", f"v{n} A", "")]
    path = put(tmp_path / "a.txt", *lines)
    sections = {"kind": "tagging", "folds": 3, "train": path, "scheme": "plain"}
    held = [opened(build(TaskConfig, {**sections, "fold": n})).dev_splits()[0] for n in (1, 2, 3)]
    assert sorted(text for split in held for text in texts(split)) == [
        f"w{n} v{n}" for n in range(6)
    ]


def test_what_is_refused(tmp_path):
    path = put(tmp_path / "a.csv", "text,label,author", *rows(8))
    with pytest.raises(UserError, match=r"folds is 3, but the training data have only 2 groups"):
        opened(config(path, folds=3, fold=1, group="author"))
    with pytest.raises(UserError, match=r"task.dev is set, but task.folds is 2"):
        opened(config(path, folds=2, fold=1, dev=path))
    with pytest.raises(UserError, match=r"task.folds is 1; it must be at least 2, or 0"):
        config(path, folds=1)
    with pytest.raises(UserError, match=r"task.fold is 3, but task.folds is 2; expected a fold"):
        config(path, folds=2, fold=3)
    for count, scores in ((4, (1, 2, 3, 4)), (2, (1, 1, 1, 2))):
        lines = [f"text {n},{score}" for n, score in enumerate(scores)]
        file = put(tmp_path / f"{count}.csv", "text,label", *lines)
        with pytest.raises(UserError, match=r"fold \d has equal scores, so their correlation is"):
            opened(config(file, folds=count, fold=1, problem_type="regression"))
    opened(config(f"{tmp_path}/2.csv", folds=2, fold=1))  # as classes
    pairs = {"kind": "embedding", "folds": 2, "fold": 1, "train": path}
    with pytest.raises(UserError, match=r"task.folds cannot divide embeddings"):
        opened(build(TaskConfig, pairs))
    one = put(tmp_path / "b.csv", "text,label,author", "a,cat,x", "b,dog,x", "c,cat,x")
    with pytest.raises(UserError, match=r"with 1 groups of 'author', task"):
        opened(config(one, group="author"))
    gap = put(tmp_path / "c.csv", "text,label,author", "a,cat,x", "b,dog,", "c,cat,y")
    with pytest.raises(UserError, match=r"line 3: column 'author' is empty; expected a group"):
        opened(config(gap, group="author"))

"""Questions about texts: what is read, learned, scored, written and brought back."""

import errno
import json
import math

import numpy as np
import pytest
from squad_files import entry, put_squad
from task_examples import TOKENIZER, opened

from bert_jax.errors import UserError
from bert_jax.files import staging
from bert_jax.tasks.config import SquadConfig
from bert_jax.tasks.opening import open_task, restore_task
from bert_jax.tasks.squad.metrics import score
from bert_jax.tasks.squad.sources import read_squad
from bert_jax.tasks.task import Split
from bert_jax.tokenization.load import load_tokenizer


def squad(max_length=0, **fields):
    return SquadConfig(max_length=max_length, **fields)


def empty(id):
    return entry(id, is_impossible=True)


def outputs(split, targets=None, weight=4.0):
    """Logits that point at the targets, with padding."""
    found = [np.zeros((len(ids) + 2, 2), np.float32) for ids in split.rows.tokens]
    targets = split.rows.labels if targets is None else targets
    for logits, (start, end) in zip(found, targets, strict=True):
        logits[start, 0] = logits[end, 1] = weight
        logits[len(logits) - 2 :] = np.nan
    return found


def test_answers_of_version_1(tmp_path):
    path = put_squad(tmp_path / "a.json", entry("1", "cat"), entry("2", "a mat", "mat"))
    task = opened(squad(train=path, dev=path))
    assert (task.objective, task.num_outputs, task.metric) == ("span", 2, "f1")
    assert task.spec.rules == "v1.1"
    train, [dev] = task.train_split(), task.dev_splits()
    head = 1 + 3 + 1 + 1  # [CLS] w h o ? [SEP], each letter a token
    assert train.rows.second_start.tolist() == [head] * 2
    cat = head + len("the")
    assert train.rows.labels.tolist()[0] == [cat, cat + 2]
    assert train.rows.labels.dtype == np.int32
    assert dev.score(outputs(dev)) == {"exact": 100, "f1": 100}
    assert dev.constant_score == 0
    other = dev.rows.labels[::-1]
    assert dev.score(outputs(dev, other)) == {"exact": 0, "f1": 0}
    # An answer of articles alone is the same as none to the rules of 2.0.
    articles = put_squad(tmp_path / "articles.json", entry("1", "the"))
    assert opened(squad(train=path, dev=articles)).dev_splits()[0].constant_score == 0
    paths = dev.write_predictions(outputs(dev), tmp_path / "out", {})
    assert [each.name for each in paths] == ["predictions.json", "nbest.json"]
    assert json.loads(paths[0].read_text()) == {"1": "cat", "2": "a mat"}


def test_answers_of_version_2(tmp_path):
    """The threshold is found on dev, saved, and used elsewhere."""
    path = put_squad(tmp_path / "a.json", entry("1", "cat"), empty("2"), entry("3", "mat"))
    train = put_squad(tmp_path / "train.json", entry("4", "sat"))
    task = opened(squad(train=train, dev=path))
    assert task.spec.rules == "v2.0"
    [dev] = task.dev_splits()
    assert dev.constant_score == pytest.approx(100 / 3)
    assert dev.rows.labels[1].tolist() == [0, 0]
    scores = dev.score(outputs(dev))
    assert scores == {
        "exact": 100, "f1": 100, "f1_answerable": 100, "f1_unanswerable": 100,
        "null_threshold": -8.0,
    }  # fmt: skip
    shifted = outputs(dev)
    for logits in shifted:
        logits[0] += 100  # "no answer" is likelier throughout
    assert dev.score(shifted)["f1"] == 100
    assert dev.score(shifted)["null_threshold"] == 192
    assert dev.score(shifted, scores)["f1"] == dev.constant_score
    assert dev.score(shifted, scores)["null_threshold"] == -8
    for saved, answers in ((scores, ["", "", ""]), (dev.score(shifted), ["cat", "", "mat"])):
        paths = dev.write_predictions(shifted, tmp_path / "out", saved)
        assert [each.name for each in paths] == ["predictions.json", "nbest.json", "null_odds.json"]
        assert list(json.loads(paths[0].read_text()).values()) == answers
    with pytest.raises(UserError, match="the saved scores have no null_threshold"):
        dev.write_predictions(shifted, tmp_path / "out", {"f1": 1.0})


def test_scores_are_those_of_the_files_written(tmp_path):
    path = put_squad(tmp_path / "a.json", *(entry(f"{n}", "cat sat") for n in range(5)), empty("e"))
    task = opened(squad(train=path, dev=path))
    [dev] = task.dev_splits()
    random = np.random.default_rng(0)
    logits = [random.normal(size=(len(ids), 2)) for ids in dev.rows.tokens]
    scores = dev.score(logits)
    [answers, *_] = dev.write_predictions(logits, tmp_path, scores)
    found = score(read_squad(path).examples, json.loads(answers.read_text()))
    assert (found["exact"], found["f1"]) == (scores["exact"], scores["f1"])


def test_windows_without_a_known_target_are_not_learned_from(tmp_path):
    entries = [entry("1", "cat"), entry("2", "cat", start=0), entry("3")]
    path = put_squad(tmp_path / "a.json", *entries)
    with pytest.raises(UserError, match="1 answer not at the offset given"):
        opened(squad(train=path, dev=path))
    dev = put_squad(tmp_path / "dev.json", entry("1", "cat"), entry("2", "mat", start=1))
    task = opened(squad(train=path, dev=dev, misplaced="keep"))
    train, [dev] = task.train_split(), task.dev_splits()
    assert (len(train.rows), len(train.rows.labels)) == (1, 1)
    assert any(
        "2 questions have no known answer and are not used" in each for each in train.warnings
    )
    assert any("1 question is without a target" in each for each in train.warnings)
    assert any("kept only for scores" in each for each in dev.warnings)
    assert (len(dev.rows), dev.rows.labels) == (2, None)
    both = [train.rows.labels[0]] * 2
    assert dev.score(outputs(dev, both)) == {"exact": 50, "f1": 50}
    split = task.open_split(put_squad(tmp_path / "b.json", entry("3")))
    assert math.isnan(split.constant_score)
    assert isinstance(split, Split)  # which looks at every property
    [answers, *_] = split.write_predictions(outputs(split, both[:1]), tmp_path, {})
    assert json.loads(answers.read_text()) == {"3": "cat"}
    with pytest.raises(UserError, match="has no reference answers"):
        split.score(outputs(split, both[:1]))


def test_files_that_do_not_fit(tmp_path):
    good = put_squad(tmp_path / "good.json", entry("1", "cat"))
    unknown = put_squad(tmp_path / "unknown.json", entry("1", "cat"), entry("2"), entry("3"))
    none = put_squad(tmp_path / "none.json", empty("1"))
    with pytest.raises(UserError, match=r"\(id '2'\) has no reference answers \(2 questions"):
        opened(squad(train=good, dev=unknown))
    with pytest.raises(UserError, match=r"task\.dev or, for task\.folds, task\.train\) needs"):
        opened(squad(train=unknown, dev=unknown))
    with pytest.raises(UserError, match="no question has a known answer to learn from"):
        opened(squad(train=put_squad(tmp_path / "bare.json", entry("2")), dev=good))
    with pytest.raises(
        UserError, match=r"rules is 'v1.1', but .*none.json, question 1 .* task.rules to 'v2.0'"
    ):
        opened(squad(train=good, dev=none, rules="v1.1"))
    assert opened(squad(train=good, dev=good, rules="v2.0")).spec.rules == "v2.0"
    with pytest.raises(UserError, match=r"none.json, question 1 .* has no answer, which the rules"):
        opened(squad(train=good, dev=good, test=none)).test_splits()


def test_long_contexts_are_read_in_windows(tmp_path):
    path = put_squad(tmp_path / "a.json", entry("1", "cat"), entry("2", "mat"))
    task = opened(squad(16, train=path, dev=path, max_question=3))
    train, [dev] = task.train_split(), task.dev_splits()
    assert len(train.rows) > 2 == train.num_scored
    assert max(train.rows.lengths) == 16
    assert "2 questions are longer than 3 tokens, cut there" in train.warnings[0]
    assert dev.score(outputs(dev)) == {"exact": 100, "f1": 100}


def test_outputs_that_are_not_finite(tmp_path):
    path = put_squad(tmp_path / "a.json", entry("1", "cat"), empty("2"))
    [dev] = opened(squad(train=path, dev=path)).dev_splits()
    logits = outputs(dev)
    logits[0][3] = np.nan
    scores = dev.score(logits)
    assert all(math.isnan(value) for value in scores.values())
    assert set(scores) == set(dev.score(outputs(dev)))
    with pytest.raises(UserError, match="dev: outputs are not finite"):
        dev.write_predictions(logits, tmp_path, scores)


def test_a_restored_task(tmp_path):
    path = put_squad(tmp_path / "a.json", entry("1", "cat"), empty("2"))
    task = opened(squad(train=path, dev=path, num_best=2))
    restored = restore_task(json.loads(json.dumps(task.describe())), TOKENIZER)
    split = restored.open_split(path)
    assert (split.name, split.score(outputs(split))["f1"]) == ("a.json", 100)
    split.write_predictions(outputs(split), tmp_path, {"null_threshold": 0.0})
    assert len(json.loads((tmp_path / "nbest.json").read_text())["1"]) == 3
    with pytest.raises(UserError, match="no training data"):
        restored.train_split()
    with pytest.raises(UserError, match="no dev data"):
        restored.dev_splits()


def test_real_squad(real_data, tmp_path):
    """As many windows as read; pointing at the targets gives the references back."""
    tokenizer = load_tokenizer(real_data / "vocab" / "bert-base-uncased")
    small = put_squad(tmp_path / "train.json", entry("1", "cat"))
    path = f"{real_data / 'squad' / 'xquad.en.json'}"
    task = open_task(squad(train=small, dev=path), tokenizer, 512)
    assert task.spec.rules == "v1.1"
    [dev] = task.dev_splits()
    assert len(read_squad(path).examples) == 1190 < len(dev.rows)
    targets = outputs(dev)
    assert dev.score(targets)["exact"] > 99.7  # some answers end within a token


def test_a_full_disk(tmp_path, monkeypatch):
    """Files of an earlier prediction stay, and no part of a new one does."""

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = put_squad(tmp_path / "a.json", entry("1", "cat"), entry("2", "mat"))
    [dev] = opened(squad(train=path, dev=path)).dev_splits()
    out = tmp_path / "out"
    dev.write_predictions(outputs(dev), out, {})
    before = (out / "predictions.json").read_text()
    monkeypatch.setattr(staging.os, "fsync", full)
    with pytest.raises(UserError, match=r"predictions.json: the disk is full"):
        dev.write_predictions(outputs(dev, dev.rows.labels[::-1]), out, {})
    assert (out / "predictions.json").read_text() == before
    assert sorted(path.name for path in out.iterdir()) == ["nbest.json", "predictions.json"]


@pytest.mark.parametrize("positions", [8, 32, 64, 128, 200, 384])
def test_default_windows_of_a_model_of_few_positions(tmp_path, positions):
    path = put_squad(tmp_path / "a.json", entry("1", "cat"))
    task = opened(squad(train=path, dev=path), max_positions=positions)
    assert task.config.windows.max_length == positions
    assert task.train_split().rows.lengths.max() <= positions
    with pytest.raises(UserError, match=r"leaves|positions"):  # what is given is not changed
        opened(squad(train=path, dev=path, max_question=380), max_positions=positions)


def test_answers_of_any_length_and_number(tmp_path):
    path = put_squad(tmp_path / "a.json", entry("1", "cat"))
    task = opened(squad(train=path, dev=path, max_answer_tokens=10**12, num_best=10**12))
    (dev,) = task.dev_splits()
    assert dev.score(outputs(dev))["f1"] == 100
    dev.write_predictions(outputs(dev), tmp_path / "out", {})
    assert len(json.loads((tmp_path / "out" / "nbest.json").read_text())["1"]) > 20

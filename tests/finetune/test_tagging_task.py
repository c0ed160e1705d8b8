"""Words with tags: what is read, learned, scored, written and brought back."""

import json
import math

import numpy as np
import pytest
from task_examples import TOKENIZER, opened, pointing_at, put, put_json, read_json_lines

from bert_jax.data.tokenizer import load_tokenizer
from bert_jax.errors import UserError
from bert_jax.finetune.task import Split, open_task, restore_task
from bert_jax.finetune.task_config import TaggingConfig, TaskConfig
from bert_jax.tasks.entity_metrics import entity_scores
from bert_jax.tasks.tagging import read_columns

IOB1 = ("ann I-PER", "bea B-PER", "of O", "york I-LOC", "", "no O", "one O")
IOBES = ("ann S-PER", "bea S-PER", "of O", "york S-LOC", "", "no O", "one O")
LABELS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def tagging(max_length=0, **fields):
    return TaskConfig("tagging", max_length, tagging=TaggingConfig(**fields))


def outputs(split, classes, rows=None):
    """Logits that point at the labels, with padding that points elsewhere."""
    labels = split.rows.labels if rows is None else rows
    padding = np.full((3, classes), np.nan, np.float32)
    return [np.concatenate([pointing_at(np.maximum(row, 0), classes), padding]) for row in labels]


def test_two_schemes_are_one(tmp_path):
    train, dev = put(tmp_path / "train", *IOB1), put(tmp_path / "dev", *IOBES)
    task = opened(tagging(train=train, dev=dev))
    assert (task.objective, task.num_outputs, task.metric) == ("tags", 5, "f1")
    assert task.learned.labels == LABELS
    train, [dev] = task.train_split(), task.dev_splits()
    assert (train.name, dev.name, train.warnings) == ("train", "dev", ())
    first = [-1, 3, -1, -1, 3, -1, -1, 0, -1, 1, -1, -1, -1, -1]
    for split in (train, dev):
        assert [row.tolist() for row in split.rows.labels] == [first, [-1, 0, -1, 0, -1, -1, -1]]
        assert split.rows.second_at.tolist() == split.rows.lengths.tolist() == [14, 7]
    assert dev.score(outputs(dev, 5)) == {"f1": 1, "precision": 1, "recall": 1, "accuracy": 1}
    assert dev.constant_score == 0
    wrong = [np.where(row == 1, 0, row) for row in dev.rows.labels]
    found = dev.score(outputs(dev, 5, wrong))
    assert found["accuracy"] == pytest.approx(5 / 6)
    assert (found["precision"], found["recall"], found["f1"]) == (1, 2 / 3, 0.8)


def test_predictions_are_sound_iob2(tmp_path):
    path = put(tmp_path / "a", *IOB1)
    task = opened(tagging(train=path, dev=path))
    [dev] = task.dev_splits()
    # I that continues nothing, twice of different types.
    rows = [np.where(row == 3, 4, np.where(row == 1, 2, row)) for row in dev.rows.labels]
    paths = dev.write_predictions(outputs(dev, 5, rows), tmp_path / "out", {})
    assert [each.name for each in paths] == ["predictions.jsonl", "predictions.txt"]
    assert read_json_lines(paths[0])[0] == {
        "id": "0",
        "tokens": ["ann", "bea", "of", "york"],
        "tags": ["B-PER", "I-PER", "O", "B-LOC"],
    }
    assert paths[1].read_text() == (
        "ann B-PER B-PER\nbea B-PER I-PER\nof O O\nyork B-LOC B-LOC\n\nno O O\none O O\n"
    )
    # The score is that of the file.
    gold, guess = (
        [each.tags for each in read_columns(paths[1], tag_column=column)] for column in (2, 3)
    )
    scores = dev.score(outputs(dev, 5, rows))
    assert scores["f1"] == entity_scores(gold, guess).overall.f1 == 0.4


def test_files_without_tags(tmp_path):
    path = put(tmp_path / "a", *IOB1)
    task = opened(tagging(train=path, dev=path))
    bare = task.open_split(put(tmp_path / "bare", "ann", "bea", "", "no"))
    assert bare.rows.labels is None
    assert "there is no column '-1', so its words have no tags" in bare.warnings[0]
    with pytest.raises(UserError, match="bare has no tags, so it cannot be scored"):
        bare.score([np.zeros((9, 5))] * 2)
    assert math.isnan(bare.constant_score)
    assert isinstance(bare, Split)  # which looks at every property
    paths = bare.write_predictions([np.zeros((9, 5))] * 2, tmp_path, {})
    assert paths[1].read_text() == "ann O\nbea O\n\nno O\n"
    with pytest.raises(UserError, match="words and tags are the same column"):
        opened(tagging(train=path, dev=f"{tmp_path / 'bare'}"))


def test_lists_of_words(tmp_path):
    rows = [{"words": ["new york", "x"], "ner": [1, 0]}, {"words": ["y"], "ner": [0]}]
    path = put_json(tmp_path / "a.jsonl", *rows)
    fields = {"format": "rows", "tokens": "words", "tags": "ner", "tag_names": ("O", "B-LOC")}
    task = opened(tagging(train=path, dev=path, **fields))
    assert task.learned.labels == ("O", "B-LOC", "I-LOC")
    split = task.open_split(put_json(tmp_path / "b.jsonl", {"words": ["new york", "y"]}))
    assert split.rows.labels is None
    [_, path] = split.write_predictions([np.zeros((20, 3))], tmp_path, {})
    assert path.read_text() == "new york\tO\ny\tO\n"
    with pytest.raises(UserError, match="no column 'words'"):
        task.open_split(put_json(tmp_path / "c.jsonl", {"tokens": ["x"], "ner": ["O"]}))


def test_wikiann_and_words_alone(tmp_path):
    path = put(tmp_path / "a", "en:ann\tB-PER", "en:x\tO")
    task = opened(tagging(train=path, dev=path, format="wikiann"))
    assert task.train_split().rows.lengths.tolist() == [6]
    assert task.open_split(put(tmp_path / "b", "ann", "x")).rows.lengths.tolist() == [6]


def test_tags_that_are_not_of_entities(tmp_path):
    path = put(tmp_path / "a", "a DET", "dog NOUN", "is VERB", "a DET", "dog NOUN", "a DET")
    for scheme in ("auto", "plain"):
        task = opened(tagging(train=path, dev=path, scheme=scheme))
        assert (task.metric, task.learned.labels) == ("accuracy", ("DET", "NOUN", "VERB"))
        [dev] = task.dev_splits()
        assert dev.constant_score == 0.5
        assert dev.score(outputs(dev, 3)) == {"accuracy": 1}
        wrong = [np.where(row == 2, 0, row) for row in dev.rows.labels]
        assert dev.score(outputs(dev, 3, wrong)) == {"accuracy": pytest.approx(5 / 6)}
        dev.write_predictions(outputs(dev, 3, wrong), tmp_path, {})
        assert read_json_lines(tmp_path / "predictions.jsonl")[0]["tags"][2] == "DET"


def test_tags_that_cannot_be_learned(tmp_path):
    path = put(tmp_path / "train", *IOB1)
    dev = put(tmp_path / "dev", "a O", "", "b I-LOK", "c O")
    with pytest.raises(UserError, match=r"dev, line 3: the label 'B-LOK' .* mean 'B-LOC'"):
        opened(tagging(train=path, dev=dev))
    unsound = put(tmp_path / "unsound", "a I-LOC", "b B-LOC", "c O", "d B-LOC")
    with pytest.raises(UserError, match="say lenient"):
        opened(tagging(train=unsound, dev=path))
    lenient = opened(tagging(train=unsound, dev=unsound, lenient=True))
    assert [row.tolist() for row in lenient.train_split().rows.labels] == [[-1, 1, 1, 0, 1, -1]]
    only = put(tmp_path / "only", "a O", "b O")
    with pytest.raises(UserError, match="only: the only tag is 'O'"):
        opened(tagging(train=only, dev=only))


def test_long_sentences_are_read_in_windows(tmp_path):
    words = [f"{word} {tag}" for word, tag in zip("abcdefghijkl", "BIOBOOBIIOOB", strict=True)]
    lines = [line.replace(" B", " B-X").replace(" I", " I-X") for line in words]
    path = put(tmp_path / "a", *lines)
    task = opened(tagging(8, train=path, dev=path))
    [dev] = task.dev_splits()
    assert len(dev.rows) == 3
    assert "1 sentences of more than 6 sub-words, read in windows (line 1)" in dev.warnings[0]
    assert sum((row >= 0).sum() for row in dev.rows.labels) == 12
    assert dev.score(outputs(dev, 3))["f1"] == 1
    dev.write_predictions(outputs(dev, 3), tmp_path, {})
    assert read_json_lines(tmp_path / "predictions.jsonl")[0]["tags"] == [
        line.split()[1] for line in lines
    ]


def test_outputs_that_are_not_finite(tmp_path):
    path = put(tmp_path / "a", *IOB1)
    [dev] = opened(tagging(train=path, dev=path)).dev_splits()
    logits = outputs(dev, 5)
    logits[1][2] = np.inf
    assert all(math.isnan(value) for value in dev.score(logits).values())
    with pytest.raises(UserError, match="dev: outputs are not finite"):
        dev.write_predictions(logits, tmp_path, {})


def test_a_restored_task(tmp_path):
    path = put(tmp_path / "a", *IOB1)
    task = opened(tagging(train=path, dev=path))
    restored = restore_task(json.loads(json.dumps(task.describe())), TOKENIZER)
    split = restored.open_split(put(tmp_path / "b", *IOBES))
    assert (split.name, split.score(outputs(split, 5))["f1"]) == ("b", 1)
    with pytest.raises(UserError, match="no training data"):
        restored.train_split()
    with pytest.raises(UserError, match="no dev data"):
        restored.dev_splits()


def test_real_conll(real_data, tmp_path):
    tokenizer = load_tokenizer(real_data / "vocab" / "bert-base-cased")
    whole = (real_data / "ner" / "conll2003" / "eng.testa").read_text(encoding="utf-8")
    path = put(tmp_path / "part", *whole.split("\n")[:8000])
    task = open_task(tagging(train=path, dev=path), tokenizer, 128)
    kinds = ("LOC", "MISC", "ORG", "PER")
    assert task.learned.labels == ("O", *(f"{p}-{kind}" for kind in kinds for p in "BI"))
    [dev] = task.dev_splits()
    words = sum(len(each.tokens) for each in read_columns(path))
    assert sum((row >= 0).sum() for row in dev.rows.labels) == words > 7000
    assert dev.score(outputs(dev, 9)) == {"f1": 1, "precision": 1, "recall": 1, "accuracy": 1}

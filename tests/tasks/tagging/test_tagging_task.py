"""Words with tags: what is read, learned, scored, written and brought back."""

import dataclasses
import json
import math

import numpy as np
import pytest
from task_examples import TOKENIZER, opened, pointing_at, put, put_json, read_json_lines

from bert_jax.errors import UserError
from bert_jax.tasks.config import TaggingConfig
from bert_jax.tasks.opening import open_task, restore_task
from bert_jax.tasks.tagging.metrics import entity_scores
from bert_jax.tasks.tagging.sources import read_columns
from bert_jax.tasks.task import Split
from bert_jax.tokenization.load import load_tokenizer

IOB1 = ("ann I-PER", "bea B-PER", "of O", "york I-LOC", "", "no O", "one O")
IOBES = ("ann S-PER", "bea S-PER", "of O", "york S-LOC", "", "no O", "one O")
LABELS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def tagging(max_length=0, **fields):
    return TaggingConfig(max_length=max_length, **fields)


def outputs(split, classes, rows=None):
    """Logits that point at the labels, with padding that points elsewhere."""
    labels = split.rows.labels if rows is None else rows
    padding = np.full((3, classes), np.nan, np.float32)
    return [np.concatenate([pointing_at(np.maximum(row, 0), classes), padding]) for row in labels]


def test_two_schemes_are_one(tmp_path):
    train, dev = put(tmp_path / "train", *IOB1), put(tmp_path / "dev", *IOBES)
    task = opened(tagging(train=train, dev=dev))
    assert (task.objective, task.num_outputs, task.metric) == ("tags", 5, "f1")
    assert task.spec.labels == LABELS
    train, [dev] = task.train_split(), task.dev_splits()
    assert (train.name, dev.name, train.warnings) == ("train", "dev", ())
    first = [-1, 3, -1, -1, 3, -1, -1, 0, -1, 1, -1, -1, -1, -1]
    for split in (train, dev):
        assert [row.tolist() for row in split.rows.labels] == [first, [-1, 0, -1, 0, -1, -1, -1]]
        assert split.rows.second_start.tolist() == split.rows.lengths.tolist() == [14, 7]
    assert dev.score(outputs(dev, 5)) == {"f1": 1, "precision": 1, "recall": 1, "accuracy": 1}
    assert dev.constant_score == 2 * 2 / (6 + 3)  # B-PER for each word finds ann and bea
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
    assert scores["f1"] == entity_scores(gold, guess)["micro"]["f1"] == 0.4


def test_words_and_tags_with_white_space_keep_their_line(tmp_path):
    path = tmp_path / "a.jsonl"
    row = {"tokens": ["new\nyork", "a\tb", "c"], "tags": ["proper noun", "x", "x"]}
    path.write_text(json.dumps(row))
    task = opened(tagging(train=str(path), dev=str(path), format="rows", scheme="plain"))
    [dev] = task.dev_splits()
    *_, written = dev.write_predictions(outputs(dev, 2), tmp_path / "out", {})
    [sentence] = read_columns(written)
    assert sentence.tokens == ("new york", "a b", "c")
    assert sentence.tags == ("proper noun", "x", "x")


@pytest.mark.parametrize("metric", ["f1", "precision", "recall", "accuracy"])
def test_the_best_constant_of_entities(tmp_path, metric):
    """Against each tag for all words."""
    random = np.random.default_rng(0)
    for number in range(20):
        tags = random.choice(["O", "B-X", "I-X", "B-Y", "I-Y"], 24, p=[0.5, 0.2, 0.1, 0.1, 0.1])
        lines = [f"a {tag}" + "\n" * (random.random() < 0.4) for tag in tags]
        path = put(tmp_path / f"{number}", "a B-X", "a B-Y", "", *lines)
        config = dataclasses.replace(tagging(train=path, dev=path, lenient=True), metric=metric)
        [dev] = opened(config).dev_splits()
        best = max(
            dev.score(outputs(dev, 5, [np.full_like(row, tag) for row in dev.rows.labels]))[metric]
            for tag in range(5)
        )
        assert dev.constant_score == pytest.approx(best)


def test_predicting_needs_no_tags(tmp_path):
    path = put(tmp_path / "a", *IOB1)
    task = opened(tagging(train=path, dev=path))
    for lines in (["ann ?", "x ?"], ["ann _", "x O?"], ["ann", "x"], ["ann NN", "x VB"],
                  ["ann I-PER", "x B-LOC"]):  # fmt: skip
        source = put(tmp_path / "b", *lines)
        split = task.open_split(source, labelled=False)
        assert split.rows.labels is None
        assert "so its words have no tags" in split.warnings[0]
        [_, written] = split.write_predictions([np.zeros((9, 5))], tmp_path, {})
        assert written.read_text() == "ann O\nx O\n"
    with pytest.raises(UserError, match="set lenient"):
        task.open_split(source)
    with pytest.raises(UserError, match="2 columns"):
        task.open_split(put(tmp_path / "b", "a", "b", "c O"), labelled=False)
    known = task.open_split(path, labelled=False)
    assert [row.tolist() for row in known.rows.labels] == [
        row.tolist() for row in task.dev_splits()[0].rows.labels
    ]
    lists = [put_json(tmp_path / f"{name}.jsonl", {"tokens": ["ann", "x"], "tags": tags})
             for name, tags in (("c", ["B-PER", "O"]), ("d", None), ("e", ["?", "?"]))]  # fmt: skip
    task = opened(tagging(train=lists[0], dev=lists[0], format="rows"))
    for path in lists[1:]:
        assert task.open_split(path, labelled=False).rows.labels is None


def test_plain_tags_that_are_not_known(tmp_path):
    path = put(tmp_path / "a", "a DET", "dog NOUN", "is VERB", "a DET")
    task = opened(tagging(train=path, dev=path))
    split = task.open_split(put(tmp_path / "b", "a ?", "dog ?"))
    assert "the model knows none of its tags ('?')" in split.warnings[0]
    with pytest.raises(UserError, match="b has no tags, so it cannot be scored"):
        split.score([np.zeros((9, 3))])
    with pytest.raises(UserError, match=r"b: its tags \('\?'\) are not among the tags"):
        opened(tagging(train=path, dev=f"{tmp_path / 'b'}"))


def test_conllu(tmp_path):
    def words(*each):
        return ["\t".join([f"{n}", w, "_", u, x, *"_____"]) for n, (w, u, x) in enumerate(each, 1)]

    lines = words(("a", "DET", "DT"), ("dog", "NOUN", "_"), ("is", "VERB", "VBZ"))
    path = put(tmp_path / "a.conllu", "# x", "1-2\tadog" + "\t_" * 8, *lines)
    task = opened(tagging(train=path, dev=path))
    assert (task.metric, task.spec.labels) == ("accuracy", ("DET", "NOUN", "VERB"))
    task = opened(tagging(train=path, dev=path, conllu_column="xpos"))
    assert task.spec.labels == ("DT", "VBZ")
    [dev] = task.dev_splits()
    assert [row.tolist() for row in dev.rows.labels] == [[-1, 0, -1, -1, -1, 1, -1, -1]]
    # A word without a tag is no part of the score.
    assert dev.score(outputs(dev, 2)) == {"accuracy": 1}
    assert (
        dev.score(outputs(dev, 2, [np.zeros_like(r) for r in dev.rows.labels]))["accuracy"] == 0.5
    )
    assert dev.constant_score == 0.5
    [_, written] = dev.write_predictions(outputs(dev, 2), tmp_path, {})
    assert written.read_text() == "a DT DT\ndog _ DT\nis VBZ VBZ\n"
    with pytest.raises(UserError, match=r"a\.conllu: the column deprel is _ in every line"):
        opened(tagging(train=path, dev=path, conllu_column="deprel"))
    with pytest.raises(UserError, match=r"a\.conllu is CoNLL-U, but task\.tag_column is 5"):
        opened(tagging(train=path, dev=path, tag_column=5))
    # Another name does no harm, nor do columns.
    moved = put(tmp_path / "a.txt", *lines)
    assert opened(tagging(train=moved, dev=path)).spec.labels == ("DET", "NOUN", "VERB")
    numbers = opened(tagging(train=moved, dev=moved, token_column=2, tag_column=4))
    assert numbers.train_split().rows.lengths.tolist() == [8]
    assert task.open_split(put(tmp_path / "b", "a DT")).rows.labels[0].tolist() == [-1, 0, -1]
    letters = words(("a", "S", "M"), ("b", "B", "M"), ("c", "S", "M"))
    path = put(tmp_path / "b.conllu", *letters)
    assert opened(tagging(train=path, dev=path)).spec.labels == ("B", "S")


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
    assert task.spec.labels == ("O", "B-LOC", "I-LOC")
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
        assert (task.metric, task.spec.labels) == ("accuracy", ("DET", "NOUN", "VERB"))
        [dev] = task.dev_splits()
        assert dev.constant_score == 0.5
        assert dev.score(outputs(dev, 3)) == {"accuracy": 1}
        wrong = [np.where(row == 2, 0, row) for row in dev.rows.labels]
        assert dev.score(outputs(dev, 3, wrong)) == {"accuracy": pytest.approx(5 / 6)}
        dev.write_predictions(outputs(dev, 3, wrong), tmp_path, {})
        assert read_json_lines(tmp_path / "predictions.jsonl")[0]["tags"][2] == "DET"


def test_tags_of_dev_alone_are_misses(tmp_path):
    """What conlleval says of them: an entity that was not found."""
    path = put(tmp_path / "train", *IOB1)
    dev = put(tmp_path / "dev", "a O", "", "b I-LOK", "c I-LOK", "d I-ORG", "e O", "f I-LOC")
    task = opened(tagging(train=path, dev=dev))
    assert task.spec.labels == LABELS
    [split] = task.dev_splits()
    assert split.warnings == (
        f"{dev}: 3 words with tags that the model does not know, counted as misses: 'B-LOK', "
        "'B-ORG', 'I-LOK' (lines 3, 3, 3)",
    )
    found = split.score(outputs(split, 5))  # O where it is not known
    assert found == {"f1": 0.5, "precision": 1, "recall": 1 / 3, "accuracy": 3 / 6}
    assert split.constant_score == 2 * 1 / (6 + 3)  # B-ORG cannot be predicted


def test_labels_that_are_given(tmp_path):
    path = put(tmp_path / "train", *IOB1)
    names = ("B-ORG", "I-ORG", "O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    task = opened(tagging(train=path, dev=path, labels=names))
    assert (task.spec.labels, task.num_outputs) == (names, 7)
    row = [-1, 5, -1, -1, 5, -1, -1, 2, -1, 3, -1, -1, -1, -1]
    assert task.train_split().rows.labels[0].tolist() == row
    for wrong, message in [
        (names[:5], r"task\.labels \('B-ORG', .* lacks tags of .*train: 'B-PER'; add"),
        (names[:2], r"task\.labels .*train has entities, .* as IOB2"),
        (("O", "LOC", "PER"), r"as IOB2, so list only O and, .* task\.scheme=plain"),
        (("O", "O"), "occurs twice"),
    ]:
        with pytest.raises(UserError, match=message):
            opened(tagging(train=path, dev=path, labels=wrong))
    plain = put(tmp_path / "plain", "a DET", "dog NOUN")
    task = opened(tagging(train=plain, dev=plain, labels=("NOUN", "X", "DET")))
    assert task.train_split().rows.labels[0].tolist() == [-1, 2, 0, -1, -1, -1]


def test_tags_that_cannot_be_learned(tmp_path):
    path = put(tmp_path / "train", *IOB1)
    unsound = put(tmp_path / "unsound", "a I-LOC", "b B-LOC", "c O", "d B-LOC")
    with pytest.raises(UserError, match="set lenient"):
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
    assert (len(dev.rows), dev.num_scored) == (3, 1)
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
    assert task.spec.labels == ("O", *(f"{p}-{kind}" for kind in kinds for p in "BI"))
    [dev] = task.dev_splits()
    words = sum(len(each.tokens) for each in read_columns(path))
    assert sum((row >= 0).sum() for row in dev.rows.labels) == words > 7000
    assert dev.score(outputs(dev, 9)) == {"f1": 1, "precision": 1, "recall": 1, "accuracy": 1}

"""Texts with labels: what is read, learned, scored, written and brought back."""

import itertools
import json
import math

import numpy as np
import pytest
import tokenizers
from task_examples import TOKENIZER, opened, pointing_at, put, put_json, read_json_lines

from bert_jax.errors import UserError
from bert_jax.tasks.config import METRICS, GlueConfig, TableConfig
from bert_jax.tasks.glue import TASKS
from bert_jax.tasks.long_texts import pair_lengths
from bert_jax.tasks.opening import open_task, restore_task
from bert_jax.tasks.task import LabelSpec, Split
from bert_jax.tasks.text import sources as text_sources
from bert_jax.tasks.text.sources import read_glue, read_glue_source
from bert_jax.tasks.text.task import TextTask
from bert_jax.tokenization.load import load_tokenizer


def table(**fields):
    length = fields.pop("max_length", 0)
    return TableConfig(max_length=length, **fields)


def ids(text):
    return TOKENIZER.encode(text).ids.tolist()


def test_rows_of_a_table(tmp_path):
    """The file alone is enough."""
    path = put(tmp_path / "a.csv", "text,label", "good,yes", "bad,no", "so so,no", "fine,yes")
    task = opened(table(train=path))
    assert (task.objective, task.num_outputs, task.metric) == ("single_label", 2, "accuracy")
    assert task.spec.labels == ("no", "yes")
    train, [dev] = task.train_split(), task.dev_splits()
    assert (len(train.rows), len(dev.rows), train.name, dev.name) == (3, 1, "train", "dev")
    assert "1 of 4 rows are held out as dev" in train.warnings[0]
    both = zip(
        [*train.rows.tokens, *dev.rows.tokens],
        [*train.rows.labels, *dev.rows.labels],
        strict=True,
    )
    cls, sep = TOKENIZER.special_ids.cls, TOKENIZER.special_ids.sep
    expected = {"good": 1, "bad": 0, "so so": 0, "fine": 1}
    assert {tuple(tokens.tolist()): label for tokens, label in both} == {
        (cls, *ids(text), sep): label for text, label in expected.items()
    }
    assert train.rows.second_start.tolist() == train.rows.lengths.tolist()
    assert train.rows.labels.dtype == np.int32


@pytest.mark.parametrize("name", ["none.csv", "none.csv.gz", "none.jsonl.zst"])
def test_a_file_that_is_not_there(tmp_path, name):
    with pytest.raises(UserError, match=f"{name}.*: No such file"):
        opened(TableConfig(train=f"{tmp_path / name}"))


def test_rows_of_pairs_are_cut_as_by_tokenizers(tmp_path):
    rows = ["text,pair,label", "abcdef,gh,x", "ab,cd,y", "abcdefgh,ijklmnop,y"]
    path = put(tmp_path / "a.csv", *rows)
    task = opened(table(train=path, dev=path, text_pair="pair", max_length=10))
    train = task.train_split()
    cls, sep = TOKENIZER.special_ids.cls, TOKENIZER.special_ids.sep
    whole, cut = ids("abcdefgh"), ids("ijklmnop")
    assert train.rows.tokens[2].tolist() == [cls, *whole[:3], sep, *cut[:4], sep]
    assert train.rows.tokens[1].tolist() == [cls, *ids("ab"), sep, *ids("cd"), sep]
    assert train.rows.second_start.tolist() == [7, 4, 5]
    assert train.warnings == (
        f"{path}: 2 pairs of texts of more than 7 tokens, cut there (lines 2, 4)",
    )


def test_pair_lengths_are_those_of_tokenizers():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    for first, second, room in itertools.product(range(9), range(9), range(1, 12)):
        tokenizer.enable_truncation(room)
        ids = tokenizer.encode("a " * first, "b " * second).ids
        assert pair_lengths(first, second, room) == (ids.count(0), ids.count(1))


def test_the_same_texts_are_held_out_together(tmp_path):
    lines = [
        f"{text},{label}"
        for text, label in zip(["a b", "A  b", "c", "d e"] * 9, "xy" * 18, strict=True)
    ]
    lines += [f"text {number},x" for number in range(60)]
    one = opened(table(train=put(tmp_path / "a.csv", "text,label", *lines), dev_rate=0.2))
    two = opened(table(train=put(tmp_path / "b.csv", "text,label", *lines[::-1]), dev_rate=0.2))

    def texts(split):
        return {tuple(tokens.tolist()) for tokens in split.rows.tokens}

    assert not texts(one.train_split()) & texts(one.dev_splits()[0])
    assert texts(one.train_split()) == texts(two.train_split())
    assert len(texts(one.dev_splits()[0])) == math.ceil(0.2 * 63)


def test_too_few_texts_to_hold_one_out(tmp_path):
    path = put(tmp_path / "a.csv", "text,label", "same,x", "Same,y")
    with pytest.raises(UserError, match=r"a.csv has 1 distinct text; at least 2"):
        opened(table(train=path))


def test_a_label_that_is_held_out_alone_is_said(tmp_path):
    path = put(tmp_path / "a.csv", "text,label", *(f"text {n},label {n}" for n in range(4)))
    assert (
        "1 labels occur only in the rows held out"
        in (opened(table(train=path)).train_split().warnings[0])
    )


def test_labels_of_dev(tmp_path):
    train = put(tmp_path / "train.csv", "text,label", "a,sport", "b,politics", "c,art")
    dev = put(tmp_path / "dev.csv", "text,label", "a,art", "b,art")
    task = opened(table(train=train, dev=dev))
    [split] = task.dev_splits()  # not every class is there
    assert split.rows.labels.tolist() == [0, 0]
    assert split.constant_score == 1.0
    put(tmp_path / "dev.csv", "text,label", "a,art", "b,sports")
    with pytest.raises(UserError, match=r"dev.csv, line 3: the label 'sports' .* mean 'sport'"):
        opened(table(train=train, dev=dev))
    with pytest.raises(UserError, match=r"dev.csv, line 3: .* 'sports'"):
        task.open_split(dev)
    named = opened(table(train=train, dev=train, labels=("sport", "art", "politics", "sports")))
    assert named.train_split().rows.labels.tolist() == [0, 2, 1]
    assert named.num_outputs == 4


def test_files_without_labels(tmp_path):
    train = put(tmp_path / "train.csv", "text,label", "a,x", "b,y")
    bare = put_json(tmp_path / "bare.jsonl", {"text": "a"}, {"text": "b"})
    with pytest.raises(UserError, match="no labels in column 'label'"):
        opened(table(train=train, dev=bare))
    none = put_json(tmp_path / "none.jsonl", *[{"text": "a", "label": None}] * 2)
    with pytest.raises(UserError, match=r"none.jsonl has no labels in column 'label'"):
        opened(table(train=train, dev=none))
    with pytest.raises(UserError, match=r"none.jsonl has no labels in column 'label'"):
        opened(table(train=none, dev=train))
    task = opened(table(train=train, dev=train))
    for path in (bare, none, put(tmp_path / "bare.csv", "text,other", "a,1")):
        split = task.open_split(path)
        assert split.rows.labels is None
        assert split.name in path
        with pytest.raises(UserError, match="has no labels, so it cannot be scored"):
            split.score(pointing_at([0] * len(split.rows), 2))
        assert math.isnan(split.constant_score)
        assert isinstance(split, Split)  # which looks at every property
    assert "there is no column 'label', so its rows have no labels" in split.warnings[0]
    with pytest.raises(UserError, match="no column 'text'"):
        task.open_split(put(tmp_path / "c.csv", "txt,label", "a,x"))


def test_empty_texts_are_kept_and_counted(tmp_path):
    path = put(tmp_path / "a.csv", "text,label", "a,x", ",y", "b,y")
    train = opened(table(train=path, dev=path)).train_split()
    assert len(train.rows.tokens[1]) == 2
    assert train.warnings == (f"{path}: 1 rows with an empty text kept (line 3)",)
    skipped = opened(table(train=path, dev=path, empty="skip")).train_split()
    assert len(skipped.rows) == 2
    with pytest.raises(UserError, match="line 3: a text is empty"):
        opened(table(train=path, dev=path, empty="fail"))


def test_scores_of_classes(tmp_path):
    path = put(
        tmp_path / "a.csv", "text,label", *(f"{n},{label}" for n, label in enumerate("xxyxz"))
    )
    [dev] = opened(table(train=path, dev=path, metric="macro_f1")).dev_splits()
    found = dev.score(pointing_at([0, 0, 1, 0, 1], 3))
    assert found["accuracy"] == 0.8
    assert set(found) == {"accuracy", "macro_f1", "matthews"}
    assert dev.constant_score == pytest.approx(2 * 3 / 8 / 3)
    with pytest.raises(UserError, match="accuracy, macro_f1, matthews; f1 needs two labels"):
        opened(table(train=path, dev=path, metric="f1"))


def test_the_best_constant_for_f1_says_the_second_class(tmp_path):
    path = put(
        tmp_path / "a.csv", "text,label", *(f"{n},{label}" for n, label in enumerate("nnnyy"))
    )
    [dev] = opened(table(train=path, dev=path, metric="f1")).dev_splits()
    assert dev.constant_score == pytest.approx(2 * 2 / 7)
    assert set(dev.score(pointing_at([0] * 5, 2))) == {"accuracy", "f1", "macro_f1", "matthews"}


def test_several_labels_a_row(tmp_path):
    held = ["a", "a,b", "", "a,c", "b"]
    rows = [{"text": f"{n}", "label": each} for n, each in enumerate(held)]
    path = put_json(tmp_path / "a.jsonl", *rows)
    task = opened(table(train=path, dev=path, problem_type="multi_label"))
    assert (task.objective, task.num_outputs, task.metric) == ("multi_label", 3, "f1")
    [dev] = task.dev_splits()
    truth = [[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0]]
    assert dev.rows.labels.tolist() == truth
    assert dev.rows.labels.dtype == np.float32
    logits = np.where(np.array(truth) == 1, 0.1, -0.1).astype(np.float32)
    assert dev.score(logits) == {"f1": 1, "macro_f1": 1, "accuracy": 1}
    logits[4] = -0.1
    assert dev.score(logits)["accuracy"] == 0.8
    best = max(
        dev.score(np.where(guess, 1.0, -1.0) * np.ones((5, 3)))["f1"]
        for guess in itertools.product([False, True], repeat=3)
    )
    assert dev.constant_score == best > 0.5
    dev.write_predictions(logits, tmp_path, {})
    written = read_json_lines(tmp_path / "predictions.jsonl")
    assert written[3]["labels"] == ["a", "c"]
    assert written[3]["probabilities"]["b"] == pytest.approx(1 / (1 + math.exp(0.1)), abs=1e-6)
    flags = put(tmp_path / "b.csv", "text,a,b", "x,1,0", "y,0,0", "z,1,1")
    task = opened(
        table(train=flags, dev=flags, problem_type="multi_label", label_columns=("a", "b"))
    )
    assert task.train_split().rows.labels.tolist() == [[1, 0], [0, 0], [1, 1]]


@pytest.mark.parametrize("metric", METRICS["multi_label"])
def test_the_best_constant_of_several_labels(metric):
    """Against all constants; the labels of a row hang together, so prefixes are not enough."""
    random = np.random.default_rng(0)
    config = table(problem_type="multi_label", metric=metric)
    task = TextTask(config, LabelSpec(("a", "b", "c", "d")), TOKENIZER)
    for number in range(40):
        kinds = random.random((3, 4)) < random.random()
        truth = kinds[random.integers(0, 3, 1 + number % 9)]
        best = max(
            task.scores(truth, np.broadcast_to(guess, truth.shape))[metric]
            for guess in itertools.product([False, True], repeat=4)
        )
        assert task.best_constant(truth) == pytest.approx(best)
    rows = np.array([[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [1, 0, 1, 0], [1, 0, 0, 1]], bool)
    if metric == "accuracy":
        assert task.best_constant(rows) == 2 / 5


@pytest.mark.parametrize("metric", METRICS["single_label"])
def test_the_best_constant_of_one_label(metric):
    random = np.random.default_rng(0)
    task = TextTask(table(metric=metric), LabelSpec(("a", "b")), TOKENIZER)
    for number in range(40):
        truth = random.integers(0, 2, 1 + number % 9)
        guesses = [np.full_like(truth, label) for label in (0, 1)]
        best = max(task.scores(truth, guess)[metric] for guess in guesses)
        assert task.best_constant(truth) == pytest.approx(best)


def test_predicting_needs_no_labels(tmp_path):
    """Test sets as Kaggle and others write them."""
    head, label = (
        "text,label",
        {
            "single_label": ("x", "y"),
            "multi_label": ("x", "y"),
            "regression": ("1", "2"),
        },
    )
    for kind, (one, two) in label.items():
        train = put(tmp_path / "train.csv", head, f"a,{one}", f"b,{two}")
        task = opened(table(train=train, dev=train, problem_type=kind))
        for lines in (["a,?", "b,?"], ["a,", "b,"], ["a,-1", f"b,{one}"], ["a,nan", "b,"]):
            split = task.open_split(put(tmp_path / "test.csv", head, *lines), labelled=False)
            assert split.rows.labels is None
            assert split.warnings == ()
        bare = put(tmp_path / "bare.csv", "text,other", "a,1")
        assert task.open_split(bare, labelled=False).warnings == ()
        with pytest.raises(UserError, match="no column 'text'"):
            task.open_split(put(tmp_path / "c.csv", "txt,label", "a,x"), labelled=False)
        with pytest.raises(UserError, match="line 2: "):  # scores are of known labels
            task.open_split(put(tmp_path / "test.csv", head, "a,?x", "b,?"))
    train = put(tmp_path / "train.csv", "text,x,y", "a,0,1", "b,1,0")
    task = opened(
        table(train=train, dev=train, problem_type="multi_label", label_columns=("x", "y"))
    )
    for lines in (["text,x,y", "a,?,?"], ["text,x,y", "a,,"], ["text,x", "a,-1"], ["text", "a"]):
        path = put(tmp_path / "test.csv", *lines)
        assert task.open_split(path, labelled=False).rows.labels is None


def test_numbers_are_standardised(tmp_path):
    path = put(tmp_path / "a.csv", "text,label", "a,1", "b,2", "c,6")
    dev_path = put(tmp_path / "dev.csv", "text,label", "a,-4", "b,9", "c,10")
    task = opened(table(train=path, dev=dev_path, problem_type="regression"))
    assert (task.objective, task.num_outputs, task.metric) == ("regression", 1, "pearson")
    labels = task.train_split().rows.labels
    assert labels.dtype == np.float32
    assert [labels.mean(), labels.std()] == pytest.approx([0, 1], abs=1e-6)
    restored = restore_task(json.loads(json.dumps(task.describe())), TOKENIZER)
    dev = restored.open_split(dev_path)
    deviation = np.std([1, 2, 6])
    assert dev.rows.labels == pytest.approx((np.array([-4, 9, 10]) - 3) / deviation)
    outputs = dev.rows.labels[:, None]
    assert dev.score(outputs) == {"pearson": pytest.approx(1), "spearman": pytest.approx(1)}
    assert dev.constant_score == 0
    dev.write_predictions(outputs, tmp_path, {})
    written = [row["score"] for row in read_json_lines(tmp_path / "predictions.jsonl")]
    assert written == pytest.approx([-4, 9, 10], abs=1e-6)


@pytest.mark.parametrize("constant", ["train", "dev"])
def test_scores_that_are_all_the_same(tmp_path, constant):
    good = put(tmp_path / "good.csv", "text,label", "a,0.1", "b,2")
    same = put(tmp_path / "same.csv", "text,label", "a,0.1", "b,0.1", "c,0.1")
    files = {"train": good, "dev": good, constant: same}
    with pytest.raises(UserError, match=rf"same.csv \({constant}\): all 3 scores are 0.1"):
        opened(table(**files, problem_type="regression"))


def test_predictions_of_classes(tmp_path):
    path = put(tmp_path / "a.csv", "name,text,label", "first,a,x", "second,b,y")
    [dev] = opened(table(train=path, dev=path, id="name")).dev_splits()
    out = tmp_path / "out" / "deep"
    [written] = dev.write_predictions(np.array([[0.0, 1.0], [2.0, 2.0]]), out, {})
    assert written == out / "predictions.jsonl"
    share = math.e / (1 + math.e)
    assert read_json_lines(written) == [
        {
            "id": "first",
            "label": "y",
            "probabilities": {
                "x": pytest.approx(1 - share, abs=1e-6),
                "y": pytest.approx(share, abs=1e-6),
            },
        },
        {"id": "second", "label": "x", "probabilities": {"x": 0.5, "y": 0.5}},
    ]


def test_outputs_that_are_not_finite(tmp_path):
    path = put(tmp_path / "a.csv", "text,label", "a,x", "b,y")
    [dev] = opened(table(train=path, dev=path)).dev_splits()
    outputs = np.array([[0.0, 1.0], [np.nan, 0.0]])
    assert all(math.isnan(value) for value in dev.score(outputs).values())
    with pytest.raises(UserError, match="dev: outputs are not finite"):
        dev.write_predictions(outputs, tmp_path, {})
    with pytest.raises(ValueError, match=r"shape \(1, 2\); the first axes must be \(2, 2\)"):
        dev.score(outputs[:1])


def test_a_restored_task(tmp_path):
    path = put(tmp_path / "a.csv", "text,label", "a,x", "b,y")
    task = opened(table(train=path, dev=path))
    restored = restore_task(json.loads(json.dumps(task.describe())), TOKENIZER)
    assert restored.open_split(path).rows.labels.tolist() == [0, 1]
    assert (restored.metric, restored.num_outputs) == ("accuracy", 2)
    with pytest.raises(UserError, match="no training data"):
        restored.train_split()
    with pytest.raises(UserError, match="no dev data"):
        restored.dev_splits()
    with pytest.raises(UserError, match="'learned' is missing"):
        restore_task({"task": {}}, TOKENIZER)
    with pytest.raises(UserError, match="the description of the task: unknown field"):
        restore_task({"task": {"knd": "table"}, "learned": {}}, TOKENIZER)


def test_rows_longer_than_the_model(tmp_path):
    path = put(tmp_path / "a.csv", "text,label", "a,x", "b,y")
    with pytest.raises(UserError, match="max_length is 128, but the model has 64 positions"):
        opened(table(train=path, max_length=128), max_positions=64)
    opened(table(train=path, max_length=64), max_positions=64)


def test_the_default_length_is_at_most_the_positions(tmp_path):
    """Rows are cut there, and what is saved of the task says so."""
    path = put(tmp_path / "a.csv", "text,label", f"{'a' * 100},x", "b,y", "c,x")
    task = opened(table(train=path, dev=path), max_positions=64)
    assert task.train_split().rows.lengths.max() == 64
    restored = restore_task(task.describe(), TOKENIZER)
    assert restored.open_split(path).rows.lengths.max() == 64
    assert opened(table(train=path, dev=path)).train_split().rows.lengths.max() == 102


# GLUE


def small_glue(home):
    header = "sentence1\tsentence2\tgold_label"
    for split in ("train", "dev_matched", "dev_mismatched"):
        lines = [f"{split} {label}\tso\t{label}" for label in TASKS["mnli"].written]
        put(home / "MNLI" / f"{split}.tsv", header, *lines)
    for name, file, rows in (("MNLI", "test_matched", 3), ("diagnostic", "diagnostic", 1104)):
        lines = [f"{number}\ta\tb" for number in range(rows)]
        put(home / name / f"{file}.tsv", "index\tsentence1\tsentence2", *lines)


@pytest.mark.parametrize("own", [False, True])
def test_mnli(tmp_path, own):
    small_glue(tmp_path)
    home = tmp_path / "MNLI" if own else tmp_path
    task = opened(GlueConfig(name="mnli", data=f"{home}"))
    assert task.spec.labels == ("entailment", "neutral", "contradiction")
    assert [dev.name for dev in task.dev_splits()] == ["dev_matched", "dev_mismatched"]
    assert all(dev.rows.labels.tolist() == [0, 1, 2] for dev in task.dev_splits())
    assert task.dev_splits()[0].score(pointing_at([0, 1, 1], 3)) == {
        "accuracy": pytest.approx(2 / 3)
    }
    for source in ("ax", f"{tmp_path / 'diagnostic' / 'diagnostic.tsv'}"):
        split = task.open_split(source)
        paths = split.write_predictions(pointing_at([2] * 1104, 3), tmp_path / "out", {})
        assert [path.name for path in paths] == ["predictions.jsonl", "AX.tsv"]
        assert paths[1].read_text().splitlines()[:2] == ["index\tprediction", "0\tcontradiction"]
    # Part of a test set: the leaderboard does not take it, the predictions are there.
    part = task.open_split("test_matched")
    with pytest.raises(UserError, match=r"the leaderboard expects 9,796"):
        part.write_predictions(pointing_at([0] * 3, 3), tmp_path / "part", {})
    assert len(read_json_lines(tmp_path / "part" / "predictions.jsonl")) == 3


def test_glue_from_tfds(tmp_path, monkeypatch):
    small_glue(tmp_path)
    read = []

    def read_tfds(name, split):
        read.append((name, split))
        return read_glue(tmp_path, name, split)

    monkeypatch.setattr(text_sources, "read_glue_tfds", read_tfds)
    task = opened(GlueConfig(name="mnli", data="tfds"))
    assert len(task.open_split("ax").rows) == 1104
    splits = ("train", "dev_matched", "dev_mismatched")
    assert read == [*(("mnli", split) for split in splits), ("ax", "test")]


def test_other_files_for_a_task_of_glue(tmp_path):
    small_glue(tmp_path)
    task = opened(GlueConfig(name="mnli", data=f"{tmp_path}"))
    official = put_json(
        tmp_path / "a.jsonl", {"sentence1": "a", "sentence2": "b", "gold_label": "neutral"}
    )
    own = put(tmp_path / "b.csv", "premise,hypothesis,label", "a,b,contradiction")
    bare = put(tmp_path / "c.csv", "premise,hypothesis", "a,b")
    assert task.open_split(official).rows.labels.tolist() == [1]
    assert task.open_split(own).rows.labels.tolist() == [2]
    assert task.open_split(bare).rows.labels is None
    assert task.open_split(own).rows.second_start.tolist() == [3]
    unknown = put(tmp_path / "e.csv", "premise,hypothesis,label", "a,b,?")
    assert task.open_split(unknown, labelled=False).rows.labels is None
    with pytest.raises(UserError, match=r"d.csv: no column 'premise'"):
        task.open_split(put(tmp_path / "d.csv", "one,two", "a,b"))
    with pytest.raises(
        UserError, match=r"there is no file tset; give a file, or a split: train, .* ax"
    ):
        task.open_split("tset")
    with pytest.raises(UserError, match=r"task\.data is empty"):
        opened(GlueConfig(name="mnli"))


def test_the_named_file_of_glue_is_read_though_the_official_one_lies_below(tmp_path):
    small_glue(tmp_path)
    own = put(tmp_path / "dev_matched.tsv", "sentence1\tsentence2\tgold_label", "a\tb\tneutral")
    split = opened(GlueConfig(name="mnli", data=f"{tmp_path}")).open_split(own)
    assert split.rows.labels.tolist() == [1]


@pytest.mark.parametrize(
    ("name", "texts", "official", "other"),
    [
        ("cola", "sentence", ("is_acceptable", "1"), "acceptable"),
        ("qqp", "question1,question2", ("is_duplicate", "1"), "duplicate"),
        ("stsb", "sentence1,sentence2", ("score", "2.5"), "2.5"),
    ],
)
def test_only_the_label_has_another_name_in_tensorflow_datasets(
    tmp_path, name, texts, official, other
):
    config, row = GlueConfig(name=name), ",".join("ab"[: len(texts.split(","))])
    column, written = official
    paths = [
        put(tmp_path / "a.csv", f"{texts},{column}", f"{row},{written}"),
        put(tmp_path / "b.csv", f"{texts},label", f"{row},{other}"),
    ]
    found = [read_glue_source(config, path) for path in paths]
    assert [data.truth for data in found] == [[2.5 if name == "stsb" else 1]] * 2
    assert not any(data.warnings for data in found)
    bare = put(tmp_path / "c.csv", texts, row)
    data = read_glue_source(config, bare)
    assert data.truth is None
    assert "so its rows have no labels" in data.warnings[0]
    assert read_glue_source(config, bare, labelled=False).warnings == ()


@pytest.mark.parametrize(
    ("name", "labels", "constant"),
    [
        ("cola", ("unacceptable", "acceptable"), 0.0),
        ("mrpc", ("not_equivalent", "equivalent"), 0.6838),
        ("stsb", (), 0.0),
        ("rte", ("entailment", "not_entailment"), 0.5271),
        ("wnli", ("not_entailment", "entailment"), 0.5634),
    ],
)
def test_real_glue(real_data, tmp_path, name, labels, constant):
    tokenizer = load_tokenizer(real_data / "vocab" / "bert-base-uncased")
    config = GlueConfig(name=name, data=f"{real_data / 'glue'}")
    task = open_task(config, tokenizer, 512)
    assert task.spec.labels == labels
    [dev] = task.dev_splits()
    assert dev.constant_score == pytest.approx(constant, abs=1e-4)
    truth = dev.rows.labels
    perfect = pointing_at(truth, 2) if labels else truth[:, None]
    assert all(value == pytest.approx(1) for value in dev.score(perfect).values())
    assert max(task.train_split().rows.lengths) <= 128
    if name == "stsb":
        assert task.spec.mean == pytest.approx(2.701, abs=1e-3)
        [_, path] = task.open_split("test").write_predictions(np.zeros((1379, 1)), tmp_path, {})
        assert path.read_text().splitlines()[1] == "0\t2.701"


def test_what_was_fitted_on_dev_data_is_saved_with_the_scores(tmp_path):
    rows = ["text,label", "ab,x", "cd,y", "ef,x", "gh,x", "ij,y"]
    path = put(tmp_path / "a.csv", *rows)
    fields = {"train": path, "dev": path, "problem_type": "multi_label"}
    task = opened(table(**fields, calibrate=True, thresholds="tuned"))
    (dev,) = task.dev_splits()
    # Above -1 and above 3 are the labels that hold, where one half would be above 0.
    logits = np.array([[3, 1], [-2, 4], [0, 2], [-1, 2], [-3, 5]], np.float32)
    scores = dev.score(logits)
    assert scores.keys() == dict.fromkeys(dev._score_names).keys()
    assert scores["macro_f1"] == 1.0
    assert dev.score(np.full_like(logits, np.nan)).keys() == scores.keys()
    dev.write_predictions(logits, tmp_path / "out", scores)
    found = read_json_lines(tmp_path / "out" / "predictions.jsonl")
    assert [row["labels"] for row in found] == [["x"], ["y"], ["x"], ["x"], ["y"]]
    share = 1 / (1 + math.exp(-3 / scores["temperature"]))
    assert found[0]["probabilities"]["x"] == pytest.approx(share, abs=1e-6)
    # Others are scored with what was found on dev, in a task that was read back.
    other = restore_task(task.describe(), TOKENIZER).open_split(path)
    assert other.score(logits, scores) == scores
    assert other.score(logits + 9, scores)["temperature"] == scores["temperature"]
    assert task.thresholds(scores) == (scores["threshold/x"], scores["threshold/y"])
    assert task.units(scores) == (0.0, 1 / scores["temperature"])
    plain = opened(table(**fields))
    assert plain.dev_splits()[0].score(logits).keys() == {"f1", "macro_f1", "accuracy"}
    assert (plain.thresholds({}), plain.units({})) == ((), (0.0, 1.0))

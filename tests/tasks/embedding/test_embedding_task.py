"""Texts that belong together: what is read, held out, found and written."""

import itertools
import json
import math

import numpy as np
import pytest
from task_examples import TOKENIZER, opened, put, put_json, read_json_lines

from bert_jax.errors import UserError
from bert_jax.tasks.config import EmbeddingTaskConfig, RerankTaskConfig
from bert_jax.tasks.embedding import token_weights
from bert_jax.tasks.opening import restore_task
from bert_jax.tasks.retrieval import metrics as ranking
from bert_jax.tasks.retrieval.metrics import (
    RANKING_METRICS,
    chance,
    ranking_scores,
    search_scores,
)

CLS, SEP = TOKENIZER.special_ids.cls, TOKENIZER.special_ids.sep


def config(**fields):
    length = fields.pop("max_length", 0)
    return EmbeddingTaskConfig(max_length=length, **fields)


def row(text):
    return [CLS, *TOKENIZER.encode(text).ids.tolist(), SEP]


def rows_of(split):
    tokens = [ids.tolist() for ids in split.rows.tokens]
    size = split.rows.group
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


def pointing(split):
    """Vectors with which a text is near to those of its group or class alone."""
    ids = split.rows.text_ids.reshape(-1, split.rows.group)
    labels = split.rows.labels
    names = ids[:, -1] if labels is None else labels
    return np.eye(64, dtype=np.float32)[np.repeat(names[:, None], ids.shape[1], 1)]


def test_pairs_with_hard_negatives(tmp_path):
    """A group is as large as the largest; equal texts have equal numbers, whatever their case."""
    rows = [
        {"query": "a b", "document": "cd", "no": ["ef", "gh"], "more": "ij"},
        {"query": "a  B", "document": "kl", "no": None, "more": ""},
        {"query": "mn", "document": "ef", "no": [], "more": "Cd"},
    ]
    path = put_json(tmp_path / "a.jsonl", *rows)
    fields = {"negatives": ("no", "more"), "query_prefix": "q ", "document_prefix": "d "}
    task = opened(config(train=path, dev=path, max_query=8, max_length=9, **fields))
    assert (task.objective, task.metric) == ("embedding", "ndcg@10")
    split = task.train_split()
    assert (len(split.rows), split.rows.group) == (3, 5)
    rarity = token_weights(split.rows, TOKENIZER.vocab_size, idf=True)
    assert rarity[CLS] == pytest.approx(math.log1p(0.5 / 5.5))  # in all 5 documents
    first, second, third = rows_of(split)
    assert first == [row("q a b"), row("d cd"), row("d ef"), row("d gh"), row("d ij")]
    assert second == [row("q a B"), row("d kl"), [], [], []]
    assert third == [row("q mn"), row("d ef"), row("d Cd"), [], []]
    ids = split.rows.text_ids.reshape(3, 5).tolist()
    assert ids[0][0] == ids[1][0]
    assert ids[0][1] == ids[2][2]
    assert ids[0][2] == ids[2][1]
    assert ids[1][2:] == [-1] * 3
    assert len({*itertools.chain(*ids)} - {-1}) == 7
    few = opened(config(train=path, dev=path, max_negatives=1, **fields)).train_split()
    assert few.rows.group == 3
    assert [each.texts[2:] for each in few._data.examples] == [("ef",), (), ("Cd",)]


def test_a_part_of_a_file_may_have_smaller_groups(tmp_path):
    """Contaminated queries are scored apart, with outputs of the size of the file's groups."""
    counts = {"a": 3, "b": 0, "c": 1}
    rows = [
        {"query": name, "document": f"{name} x", "no": [f"{name} {n}" for n in range(count)]}
        for name, count in counts.items()
    ]
    path = put_json(tmp_path / "a.jsonl", *rows)
    [dev] = opened(config(train=path, dev=path, negatives=("no",))).dev_splits()
    vectors = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)
    part, at = dev.select([1, 2])
    assert (dev.rows.group, part.rows.group) == (5, 3)
    assert part.score([vectors[row] for row in at]) == part.score(vectors[1:, :3])


def test_scores_of_a_teacher(tmp_path):
    """They are read only from labelled files whose rows are ranked."""
    rows = [
        {"query": f"q{n}", "document": f"d{n}", "no": [f"e{n}"], "scores": [2, n]} for n in range(3)
    ]
    path = put_json(tmp_path / "a.jsonl", *rows)
    pairs = put_json(
        tmp_path / "sts.jsonl",
        *({"query": f"q{n}", "document": f"d{n}", "score": n} for n in range(3)),
    )
    fields = {"train": path, "negatives": ("no",), "scores": "scores"}
    task = opened(config(dev=pairs, dev_rows="scores", loss="margin_mse", **fields))
    assert task.train_split().rows.labels.tolist() == [[2, 0], [2, 1], [2, 2]]
    assert task.dev_splits()[0].rows.labels.tolist() == [0, 1, 2]
    for row in rows:
        del row["scores"]
    new = put_json(tmp_path / "new.jsonl", *rows)
    reranker = opened(RerankTaskConfig(dev=path, **fields))
    split = reranker.open_split(new, labelled=False)
    assert (len(split.rows), split.rows.group) == (3, 2)
    with pytest.raises(UserError, match="no column 'scores'"):
        reranker.open_split(new)


def test_pairs_without_negatives_are_scored(tmp_path):
    rows = [{"query": f"q{n}", "document": f"d{n}", "no": []} for n in range(3)]
    new = put_json(tmp_path / "new.jsonl", *rows)
    known = put_json(tmp_path / "a.jsonl", *({**each, "no": ["e"]} for each in rows))
    task = opened(RerankTaskConfig(train=known, dev=known, negatives=("no",)))
    split = task.open_split(new, labelled=False)
    assert (len(split.rows), split.rows.group) == (3, 2)
    split.write_predictions(np.zeros((3, 2), np.float32), tmp_path / "out", {})
    (found,) = (tmp_path / "out").iterdir()
    assert [len(row["scores"]) for row in read_json_lines(found)] == [1, 1, 1]
    report = task.dev_splits()[0]
    assert report.baseline == "a random ranking"


def test_long_texts_are_cut_and_counted(tmp_path):
    path = put(
        tmp_path / "a.csv", "query,document", "abcdefghij,ab", "ab,abcdefghijk", "a,b", "c,d"
    )
    split = opened(config(train=path, dev=path, max_query=8, max_length=10)).train_split()
    assert [len(ids) for ids in split.rows.tokens] == [8, 4, 4, 10, 3, 3, 3, 3]
    assert [warning.split(": ")[1] for warning in split.warnings] == [
        "1 rows with queries of more than 8 tokens, cut there (line 2)",
        "1 rows with documents of more than 10 tokens, cut there (line 3)",
    ]


def test_rows_of_a_document_are_held_out_together(tmp_path):
    lines = [f"question {n},document {n % 10}" for n in range(30)]
    path = put(tmp_path / "a.csv", "query,document", *lines)
    task = opened(config(train=path, dev_rate=0.2))
    train, [dev] = task.train_split(), task.dev_splits()
    documents = [{texts[1] for texts in split.texts()} for split in (train, dev)]
    assert (len(train.rows), len(dev.rows)) == (24, 6)
    assert len(documents[1]) == 2
    assert not documents[0] & documents[1]
    assert "6 of 30 rows are held out as dev" in train.warnings[0]
    with pytest.raises(UserError, match="2 distinct documents; at least 4"):
        opened(config(train=put(tmp_path / "b.csv", "query,document", "a,b", "c,d", "e,d")))


def test_scores_of_a_search(tmp_path):
    """Two queries of one document, one query of two documents, and a query's own text."""
    lines = ["a,one", "b,one", "c,two", "c,three", "d,a", "e,four"]
    path = put(tmp_path / "a.csv", "query,document", *lines)
    [dev] = opened(config(train=path, dev=path)).dev_splits()
    queries, documents, relevant, hidden = dev._search
    texts = [text for each in dev.texts() for text in each]
    names = [texts[place] for place in documents]
    found = {
        texts[q]: sorted(names[n] for n in wanted)
        for q, wanted in zip(queries, relevant, strict=True)
    }
    assert found == {
        "a": ["one"], "b": ["one"], "c": ["three", "two"], "d": ["a"], "e": ["four"]
    }  # fmt: skip
    assert [names[n] if n >= 0 else "" for n in hidden] == ["a", "", "", "", ""]
    vectors = np.random.default_rng(0).normal(size=(6, 2, 8)).astype(np.float32)
    scores = dev.score(list(vectors))
    flat = vectors.reshape(-1, 8) / np.linalg.norm(vectors.reshape(-1, 8), axis=1, keepdims=True)
    ranked = {}
    for query, own in zip(queries, hidden, strict=True):
        cosines = flat[documents] @ flat[query]
        order = [n for n in np.argsort(-cosines) if n != own]
        ranked[texts[query]] = [names[n] for n in order]
    expected = ranking_scores(ranked, {q: dict.fromkeys(d, 1.0) for q, d in found.items()})
    assert scores == pytest.approx(expected)
    report = dev.report(list(vectors))
    assert report["no_intervals"]["map"].startswith("only ")
    assert report["units"][0] == "queries"
    assert set(dev.score([np.full((2, 8), np.nan)] * 6)) == set(RANKING_METRICS)
    assert math.isnan(dev.score([np.full((2, 8), np.nan)] * 6)["map"])


def test_a_search_in_blocks(monkeypatch):
    random = np.random.default_rng(1)
    queries, documents = random.normal(size=(9, 4)), random.normal(size=(300, 4))
    relevant = [[int(n)] for n in random.integers(0, 300, 9)]
    whole = search_scores(queries, documents, relevant, [-1] * 9)
    assert 0 < whole["recall@100"].mean() < 1
    monkeypatch.setattr(ranking, "_BLOCK", 2)
    for name, values in search_scores(queries, documents, relevant, [-1] * 9).items():
        np.testing.assert_array_equal(values, whole[name])


@pytest.mark.parametrize("metric", RANKING_METRICS)
def test_chance_is_the_mean_of_all_orders(metric, monkeypatch):
    """Five documents in every order, with cutoffs that matter where a test can count."""
    monkeypatch.setattr(ranking, "CUTOFF", 100)
    names = "abcde"
    for count in (1, 2, 5):
        wanted = {"q": dict.fromkeys(names[:count], 1.0)}
        scores = [
            ranking_scores({"q": order}, wanted)[metric] for order in itertools.permutations(names)
        ]
        assert chance(metric, np.array([count]), 5) == pytest.approx(np.mean(scores))
    assert chance(metric, np.array([1]), 1000) < 0.11


def test_scored_pairs(tmp_path):
    path = put(tmp_path / "a.csv", "query,document,score", "a,b,1.5", "c,d,0", "e,f,5", "g,h,2")
    task = opened(config(train=path, dev=path, rows="scores"))
    [dev] = task.dev_splits()
    assert dev.rows.labels.tolist() == [1.5, 0.0, 5.0, 2.0]
    assert (task.metric, dev.constant_score) == ("spearman", 0.0)
    angles = np.array([1.0, 1.4, 0.1, 0.9])
    vectors = np.stack([np.stack([np.ones(4), np.zeros(4)], 1),
                        np.stack([np.cos(angles), np.sin(angles)], 1)], 1)  # fmt: skip
    assert dev.score(vectors)["spearman"] == pytest.approx(1.0)
    [out] = dev.write_predictions(vectors, tmp_path / "out", {})
    assert [each["cosine"] for each in read_json_lines(out)] == pytest.approx(
        np.cos(angles), abs=1e-6
    )
    unlabelled = put(tmp_path / "b.csv", "query,document", "a,b")
    other = task.open_split(unlabelled, labelled=False)
    assert other.rows.labels is None
    with pytest.raises(UserError, match="no scores"):
        other.score(vectors[:1])


def test_classes(tmp_path):
    lines = ["a,x", "b,x", "c,y", "d,y", "e,y", "f,z"]
    path = put(tmp_path / "a.csv", "text,label", *lines)
    task = opened(config(train=path, dev=path, rows="classes"))
    [dev] = task.dev_splits()
    assert task.spec.labels == ("x", "y", "z")
    assert (dev.rows.group, dev.rows.labels.tolist()) == (1, [0, 0, 1, 1, 1, 2])
    assert dev.score(pointing(dev))["map"] == 1.0
    # Of the five others one is like a and b, two are like each of c, d and e; f has none.
    assert dev.constant_score == pytest.approx(chance("ndcg@10", np.array([1, 1, 2, 2, 2]), 5))
    restored = restore_task(json.loads(json.dumps(task.describe())), TOKENIZER)
    again = restored.open_split(path)
    assert again.rows.labels.tolist() == dev.rows.labels.tolist()
    part, rows = again.select([0, 1, 5])
    assert (len(part.rows), rows.tolist()) == (3, [0, 1, 5])
    with pytest.raises(UserError, match="bert-jax embed"):
        dev.write_predictions(pointing(dev), tmp_path / "out", {})
    test = put(tmp_path / "b.csv", "text,label", "a,x", "c,y")
    task = opened(config(train=path, dev=path, test=test, rows="classes"))
    with pytest.raises(UserError, match="has no two texts of the same class"):
        task.test_splits()


def test_texts_alone(tmp_path):
    """A text is trained with itself; its second half is found by its first."""
    path = put(tmp_path / "a.csv", "text", "one two three four", "five six seven eight", "nine")
    task = opened(config(train=path, dev=path, rows="texts"))
    train, [dev] = task.train_split(), task.dev_splits()
    assert rows_of(train)[2] == rows_of(train.select([2], trains=True)[0])[0] == [row("nine")] * 2
    assert dev.texts() == [("one two", "three four"), ("five six", "seven eight")]
    assert "1 texts too short to be cut into halves" in dev.warnings[0]
    assert dev.score(pointing(dev))["ndcg@10"] == 1.0
    pairs = put(tmp_path / "b.csv", "query,document,score", "a,b,1", "c,d,2")
    scored = opened(config(train=path, dev=pairs, rows="texts", dev_rows="scores"))
    assert scored.metric == "spearman"
    assert len(scored.open_split(pairs).rows) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rows": "classes", "negatives": ("no",)},
            "task.scores need task.negatives, which need task.rows=pairs",
        ),
        ({"metric": "accuracy"}, "of this task are ndcg@10, mrr@10"),
        ({"rows": "scores", "metric": "map"}, "the metrics of this task are spearman, pearson"),
        ({"dev_rows": "scores"}, "task.dev is empty"),
        (
            {"kind": "rerank", "negatives": ("no",), "dev": "b.csv", "dev_rows": "scores"},
            "task.dev_rows is 'scores', but a reranker is scored on pairs; leave",
        ),
        ({"max_query": 4}, "at least 8, or 0"),
        ({"max_negatives": 0}, "at least 1"),
        ({"dev_rate": 1.0}, r"in \(0, 1\)"),
    ],
)
def test_settings_that_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        config(train="a.csv", **fields)


def test_files_that_are_refused(tmp_path):
    bad = put_json(tmp_path / "a.jsonl", {"query": "a", "document": "b", "no": [3]})
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: a column of negatives holds 3"):
        opened(config(train=bad, dev=bad, negatives=("no",)))
    with pytest.raises(UserError, match="no column 'nein'; there are"):
        opened(config(train=bad, dev=bad, negatives=("nein",)))
    empty = put(tmp_path / "b.csv", "query,document", "a,b", ",c")
    assert (
        "1 rows with an empty text skipped"
        in opened(config(train=empty, dev=empty)).train_split().warnings[0]
    )
    scores = put(tmp_path / "c.csv", "query,document,score", "a,b,much")
    with pytest.raises(UserError, match="column 'score' holds 'much', not a number"):
        opened(config(train=scores, dev=scores, rows="scores"))


def test_single_texts_have_no_predictions(tmp_path):
    """Their halves were compared."""
    path = put(tmp_path / "a.csv", "text", "one text of words", "another text of words")
    task = opened(config(train=path, dev=path, rows="texts"))
    split = task.open_split(path, labelled=False)
    assert len(split.rows.tokens) == 2
    with pytest.raises(UserError, match="bert-jax embed"):
        split.write_predictions(np.zeros((2, 1, 4), np.float32), tmp_path / "out", {})

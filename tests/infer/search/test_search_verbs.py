"""index, search, mine and evaluate from the command line, on a model of random weights."""

import dataclasses
import datetime
import io
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from asked_models import random_model, write_lines
from retrieval_sets import write_collection

import bert_jax
from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.cli import main as cli
from bert_jax.cli.verbs import search
from bert_jax.data.corpus.overlap.ngrams import normalised_words
from bert_jax.errors import UserError
from bert_jax.infer import embed
from bert_jax.infer.embed import text_vectors
from bert_jax.infer.forward import on_device
from bert_jax.infer.loaded import LoadedModel
from bert_jax.infer.predictor import Cuts, Given
from bert_jax.infer.records import Record
from bert_jax.infer.search import evaluation as evaluating
from bert_jax.infer.search import index as indexing
from bert_jax.infer.search.evaluation import Evaluation
from bert_jax.infer.search.index import Reranker, model_digest
from bert_jax.infer.search.snippets import snippet
from bert_jax.model.embedding import EmbeddingConfig
from bert_jax.tasks.long_texts import LongTexts
from bert_jax.tasks.retrieval.bm25 import BM25
from bert_jax.tasks.retrieval.collection import Collection, read_collection
from bert_jax.tasks.retrieval.metrics import ranking_scores, unit

TEXTS = ["the cat sat on a mat", "kim met lee in rome", "who ran under the hill ?", "a dog ran .",
         "lee sat", "the mat , the hill", "in rome the cat met a dog"]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("search")
    for name, kind, seed in (
        ("model", "pretrained", 0), ("other", "pretrained", 1), ("reranker", "score", 0),
        ("three", "class", 0),
    ):  # fmt: skip
        write_huggingface(random_model(kind, seed), home / name)
    rows = [{"id": f"t{n}", "text": text, "year": 2000 + n} for n, text in enumerate(TEXTS)]
    write_lines(home / "texts.jsonl", rows)
    arguments = ["index", home / "model", home / "texts.jsonl", "--out", home / "index"]
    assert cli.main([f"{each}" for each in arguments]) == 0
    return home


@pytest.fixture
def run(capsys):
    def run(*argv):
        capsys.readouterr()
        code = cli.main([str(each) for each in argv])
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return run


def test_a_directory_with_its_index_is_indexed_again(home, run, tmp_path):
    (tmp_path / "notes").mkdir()
    shutil.copy(home / "texts.jsonl", tmp_path / "notes")
    command = "index", home / "model", tmp_path / "notes", "--out", tmp_path / "notes" / "index"
    for more in ((), ("--overwrite",)):
        made = run(*command, *more)
        assert made.code == 0, made.err
        assert f"{len(TEXTS)} passages" in made.out
        assert "skipped" not in made.out + made.err


@pytest.fixture(scope="module")
def cosines(home):
    vectors = bert_jax.load(home / "model").embed([*TEXTS, "the dog"], normalize=True)
    return vectors[:-1] @ vectors[-1]


def test_search_by_vector_finds_what_embed_says(home, run, cosines):
    found = run("search", home / "index", "the dog", "--method=vector", "--top=3", "--json")
    answer = json.loads(found.out)
    best = np.argsort(-cosines)[:3]
    assert [hit["id"] for hit in answer["hits"]] == [f"t{n}" for n in best]
    assert [hit["text"] for hit in answer["hits"]] == [TEXTS[n] for n in best]
    assert [hit["year"] for hit in answer["hits"]] == [2000 + n for n in best]
    assert {hit["source"] for hit in answer["hits"]} == {f"{home / 'texts.jsonl'}"}
    assert {hit["passage"] for hit in answer["hits"]} == {1}
    np.testing.assert_allclose([hit["score"] for hit in answer["hits"]], cosines[best], atol=1e-5)
    options = "--method=vector", "--top=2"
    lines = run("search", home / "index", "the dog", *options).out.splitlines()
    assert lines[0] == "the dog"
    assert lines[1].split() == ["1", f"{cosines[best[0]]:.3f}", f"t{best[0]}"]
    assert lines[2].strip() == snippet(TEXTS[best[0]], "the dog")


def bm25(query: str) -> list[int]:
    return [int(n) for n in BM25(map(normalised_words, TEXTS)).ranked(normalised_words(query), 9)]


def test_search_by_words_is_bm25_and_needs_no_model(home, run, tmp_path):
    shutil.copytree(home / "index", tmp_path / "index", symlinks=True)
    (tmp_path / "index" / "model").unlink()
    for query in ("the dog met lee", "HILL?", '"a dog" OR (rome', "kim"):
        found = run("search", tmp_path / "index", query, "--method=words", "--json")
        hits = json.loads(found.out)["hits"]
        assert [hit["id"] for hit in hits] == [f"t{n}" for n in bm25(query)], query
    for query in ("zebra", "...", "首都"):
        found = run("search", tmp_path / "index", query, "--method=words", "--json")
        assert json.loads(found.out)["hits"] == []


def test_hybrid_search_is_the_mean_of_cosine_and_share_of_the_best_bm25(home, run, cosines):
    options = "the dog", "--method=words", "--json"
    hits = json.loads(run("search", home / "index", *options).out)["hits"]
    words = {hit["id"]: hit["score"] / hits[0]["score"] for hit in hits}
    assert 1 < len(words) < len(TEXTS)
    scores = {f"t{n}": (cosines[n] + words.get(f"t{n}", 0)) / 2 for n in range(len(TEXTS))}
    found = run("search", home / "index", "the dog", "--json")
    hits = json.loads(found.out)["hits"]
    assert {hit["id"]: hit["score"] for hit in hits} == pytest.approx(scores, abs=1e-5)
    assert [hit["id"] for hit in hits] == sorted(scores, key=lambda id: -scores[id])
    by_vector = run("search", home / "index", "zebra", "--method=vector", "--json").out
    hits = json.loads(run("search", home / "index", "zebra", "--json").out)["hits"]
    assert [hit["id"] for hit in hits] == [hit["id"] for hit in json.loads(by_vector)["hits"]]


def test_what_other_programs_change_with_lancedb_is_found(home, run, tmp_path):
    """An update, a new passage, a deletion and a filter, with the model's vectors."""
    shutil.copytree(home / "index", tmp_path / "index", symlinks=True)
    table = lancedb.connect(tmp_path / "index").open_table("passages")
    texts = ["zebra stripes", "a lion"]
    vectors = bert_jax.load(home / "model").embed(texts, kind="document", normalize=True)
    rows = [
        {"id": id, "passage": 1, "source": "me", "text": text, "vector": vector, "year": 2030}
        for id, text, vector in zip(("t0", "new"), texts, vectors, strict=True)
    ]
    merge = table.merge_insert(["id", "passage"]).when_matched_update_all()
    merge.when_not_matched_insert_all().execute(rows)
    table.delete("id = 't1'")

    def found(query):
        for method in ("words", "vector"):
            out = run("search", tmp_path / "index", query, f"--method={method}", "--json").out
            yield {hit["id"]: hit for hit in json.loads(out)["hits"]}

    by_words, by_vector = found("zebra lion")
    assert by_words.keys() == {"t0", "new"}
    assert by_vector.keys() == {"t0", "new", "t2", "t3", "t4", "t5", "t6"}
    assert by_vector["t0"]["text"] == "zebra stripes"
    kept = table.search(vectors[0], "vector").where("year < 2005").limit(9).to_list()
    assert {row["id"] for row in kept} == {"t2", "t3", "t4"}
    table.optimize()  # rewrites files
    assert next(found("lion")).keys() == {"new"}
    table.drop_columns(["passage"])
    lines = run("search", tmp_path / "index", "lion", "--method=words").out.splitlines()
    assert lines[1].split()[2] == "new"


def test_json_has_null_for_what_is_no_number(capsys):
    """A table's column may hold NaN, which JSON does not know."""
    hit = {"id": 1, "text": "é", "score": 0.5, "year": math.nan, "date": datetime.date(2020, 1, 2)}
    record = Record(Given("query", 1), {"query": "a", "id": math.inf})
    search.Search(index=Path(), json=True)._print_hits(record, [hit])
    line = capsys.readouterr().out
    found = json.loads(line, parse_constant=pytest.fail)
    assert found["id"] is None
    assert found["hits"] == [{**hit, "year": None, "date": "2020-01-02"}]
    assert '"é"' in line


def test_queries_from_files_and_standard_input(home, run, tmp_path, monkeypatch):
    # No score of "kim dog" lies within 3e-7 of a half in the sixth digit, where the last bits,
    # which differ between one query and two, would decide what is printed ("kim": 5e-8).
    write_lines(tmp_path / "q.jsonl", [{"id": 5, "query": "a cat"}, {"query": "kim dog"}])
    index = home / "index"
    answers = run("search", index, "--input", tmp_path / "q.jsonl", "--json").out.splitlines()
    first, second = map(json.loads, answers)
    assert (first["id"], first["query"], len(first["hits"])) == (5, "a cat", len(TEXTS))
    assert "id" not in second
    piped = SimpleNamespace(buffer=io.BytesIO(b"kim dog\n"), isatty=lambda: False, fileno=None)
    monkeypatch.setattr("sys.stdin", piped)
    monkeypatch.setattr(piped, "fileno", lambda: (_ for _ in ()).throw(OSError()))
    assert json.loads(run("search", index, "--json").out) == second


def test_an_index_is_written_block_by_block_with_columns_as_they_come(
    home, run, tmp_path, monkeypatch
):
    rows = [
        {"id": n, "text": text, "none": None, **({"late": [n]} if n > 3 else {})}
        for n, text in enumerate(TEXTS)
    ]
    write_lines(tmp_path / "texts.jsonl", rows)
    monkeypatch.setattr(indexing, "BLOCK", 2)
    out = tmp_path / "small"
    made = run("index", home / "model", tmp_path / "texts.jsonl", "--out", out)
    assert "7 passages of 1 file" in made.out
    table = lancedb.connect(out).open_table("passages").to_arrow()
    assert table.column_names == ["id", "passage", "source", "text", "vector", "late"]
    assert table["late"].to_pylist() == [None, None, None, None, [4], [5], [6]]
    for query in ("the dog", "a hill"):
        whole, small = (
            json.loads(run("search", index, query, "--json").out)["hits"]
            for index in (home / "index", out)
        )
        assert [hit["text"] for hit in small] == [hit["text"] for hit in whole]


def test_the_path_of_a_model_need_not_be_utf8(home, run, tmp_path):
    model, out = tmp_path / os.fsdecode(b"caf\xe9"), tmp_path / "out"
    shutil.copytree(home / "model", model)
    assert run("index", model, home / "texts.jsonl", "--out", out).code == 0
    found = run("search", out, "the dog", "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)["hits"]


@pytest.mark.parametrize(("fault", "code"), [(UserError("late"), 2), (KeyboardInterrupt(), 130)])
def test_an_index_that_is_not_finished_leaves_nothing(
    home, run, tmp_path, monkeypatch, fault, code
):
    """An error, or Ctrl-C, after LanceDB has written the first block."""
    written = []

    def text_vectors(*given, **options):
        written.append(list(tmp_path.glob("out.tmp-*/passages.lance/data/*")))
        if written[-1]:
            raise fault
        return embed.text_vectors(*given, **options)

    monkeypatch.setattr(indexing, "BLOCK", 2)
    monkeypatch.setattr(indexing, "text_vectors", text_vectors)
    found = run("index", home / "model", home / "texts.jsonl", "--out", tmp_path / "out")
    assert (found.code, len(written)) == (code, 2)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"year": "abc"}, "the column 'year' cannot be indexed: Could not convert 'abc'"),
        ({"year": 2**70}, "the column 'year' cannot be indexed: "),
        ({"a.b": 1}, "LanceDB fails: "),
        ({"vector": [1]}, "rename the column 'vector'; an index has its own"),
        ({"text": 3}, "line 2: the field 'text' holds 3, not text"),
    ],
)
def test_rows_that_cannot_be_indexed(home, run, tmp_path, row, message):
    write_lines(tmp_path / "bad.jsonl", [{"text": "a", "year": 1}, {"text": "b", **row}])
    refused = run("index", home / "model", tmp_path / "bad.jsonl", "--out", tmp_path / "out")
    assert refused.code == 2
    assert message in refused.err
    assert os.listdir(tmp_path) == ["bad.jsonl"]


@pytest.mark.parametrize(
    ("first", "later", "key"),
    [
        ({"a": 1}, {"b": 2}, "b"),
        ({}, {"b": 2}, "b"),
        ({"a": {"b": 1}}, {"a": {"c": 2}}, "a.c"),
        ({"a": {"b": 1}}, {"a.b": 2}, "a.b"),
        ([{"a": 1}], [{"a": 2, "b": 3}], "item.b"),
    ],
)
def test_no_key_of_a_later_block_is_lost(home, run, tmp_path, monkeypatch, first, later, key):
    monkeypatch.setattr(indexing, "BLOCK", 2)
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    command = "index", home / "model", path, "--out", out
    write_lines(path, [{"text": "a", "more": each} for each in (first, first, later)])
    refused = run(*command)
    assert (refused.code, out.exists()) == (2, False)
    assert f"the column 'more' cannot be indexed: its key '{key}' first occurs" in refused.err
    write_lines(path, [{"text": "a", "more": each} for each in (first, later, first, None, later)])
    made = run(*command)
    assert made.code == 0, made.err


def test_more_than_there_is_finds_all(home, run):
    found = run("search", home / "index", "the dog", f"--top={10**12}", "--json")
    assert len(json.loads(found.out)["hits"]) == len(TEXTS)


def test_the_command_that_searches_is_one_that_a_shell_takes(home, run, tmp_path):
    out = tmp_path / "my notes #1 %20?é"
    found = run("index", home / "model", home / "texts.jsonl", "--out", out)
    assert found.out.splitlines()[-1] == f"search them: bert-jax search '{out}' \"...\""


def test_fewer_numbers(home, run, tmp_path, cosines):
    out = tmp_path / "8"
    run("index", home / "model", home / "texts.jsonl", "--out", out, "--dimensions=8")
    vectors = bert_jax.load(home / "model").embed([*TEXTS, "the dog"], normalize=False)
    short = unit(vectors[:, :8])
    found = run("search", out, "the dog", "--method=vector", "--top=1", "--json")
    answer = json.loads(found.out)
    assert answer["hits"][0]["id"] == f"t{np.argmax(short[:-1] @ short[-1])}"
    assert answer["hits"][0]["score"] == pytest.approx(np.max(short[:-1] @ short[-1]), abs=1e-5)
    refused = run("index", home / "model", home / "texts.jsonl", "--out", out, "--dimensions=99")
    assert (refused.code, "it must be from 1 to 16" in refused.err) == (2, True)


def test_reranking_orders_candidates_anew(home, run, cosines):
    reranker = bert_jax.load(home / "reranker")
    scores = [answer["score"] for answer in reranker.classify(["the dog"] * len(TEXTS), TEXTS)]
    candidates = np.argsort(-cosines)[:4]
    wanted = sorted(candidates, key=lambda n: -scores[n])[:3]
    found = run(
        "search", home / "index", "the dog", "--rerank", home / "reranker",
        "--method=vector", "--candidates=4", "--top=3", "--json",
    )  # fmt: skip
    hits = json.loads(found.out)["hits"]
    assert [hit["id"] for hit in hits] == [f"t{n}" for n in wanted]
    assert [hit["score"] for hit in hits] == pytest.approx([scores[n] for n in wanted], abs=1e-4)
    refused = run("search", home / "index", "a", "--rerank", home / "three")
    assert (refused.code, "predicts 3 labels; a reranker" in refused.err) == (2, True)


def test_two_classes_rerank_by_the_second(home):
    three = random_model("class")
    outputs = dataclasses.replace(
        three.outputs, labels=("no", "yes"),
        head=dataclasses.replace(three.outputs.head, num_labels=2),
    )  # fmt: skip
    head = {name: leaf[..., :2] for name, leaf in three.params["head"].items()}
    params = {**three.params, "head": head}
    model = on_device(dataclasses.replace(three, outputs=outputs, params=params))
    found = Reranker(model).scores(["the dog"] * 3, TEXTS[:3])
    asked = LoadedModel(dataclasses.replace(three, outputs=outputs, params=params))
    answers = asked.classify(["the dog"] * 3, TEXTS[:3])
    chances = [answer["probabilities"]["yes"] for answer in answers]
    np.testing.assert_allclose(1 / (1 + np.exp(-found)), chances, atol=1e-5)


def test_a_pair_that_is_read_in_windows_has_one_score():
    saved = random_model("score")
    windows = dataclasses.replace(saved.outputs, long=LongTexts("windows"))
    saved = dataclasses.replace(saved, outputs=windows)
    texts = ["the cat " * 40, "a dog", "kim met lee"]
    answers = LoadedModel(saved).classify(["kim"] * 3, texts)
    reranker = Reranker(on_device(saved))
    np.testing.assert_allclose(
        reranker.scores(["kim"] * 3, texts), [answer["score"] for answer in answers], atol=1e-5
    )
    assert len(reranker.order("kim", [{"text": text} for text in texts])) == 3


def test_another_model_is_refused_and_a_moved_one_is_named(home, run, tmp_path):
    index = home / "index"
    refused = run("search", index, "a", "--model", home / "other")
    assert (refused.code, "was made with another model than " in refused.err) == (2, True)
    (home / "model").rename(home / "moved")
    try:
        refused = run("search", index, "a")
        assert (refused.code, "leads nowhere; give --model" in refused.err) == (2, True)
        assert run("search", index, "a", "--model", home / "moved").code == 0
    finally:
        (home / "moved").rename(home / "model")


def test_the_digest_knows_weights_prefixes_and_length():
    model = random_model("pretrained")
    changed = (
        random_model("pretrained", 1),
        dataclasses.replace(model, embedding=EmbeddingConfig(query_prefix="q: ")),
        dataclasses.replace(model, max_length=8),
    )
    digests = {model_digest(on_device(each)) for each in (model, *changed)}
    assert len(digests) == 4
    assert model_digest(on_device(model)) == model_digest(on_device(random_model("pretrained")))


def test_an_index_takes_no_format_of_tables(home, run, tmp_path):
    out = tmp_path / "index"
    refused = run("index", home / "model", home / "texts.jsonl", "--out", out,
                  "--columns=quoting=False")  # fmt: skip
    assert (refused.code, out.exists()) == (2, False)
    assert "--columns has quoting, but the index takes only text=COLUMN" in refused.err


def test_options_that_a_search_would_not_use(home, run):
    for option, more, needed in (
        ("--candidates=9", (), "--rerank"),
        (f"--model={home / 'other'}", ("--method=words",), "--method=vector or hybrid"),
    ):
        refused = run("search", home / "index", "a", option, *more)
        assert refused.code == 2
        assert f"{option.partition('=')[0]} works only with {needed}" in refused.err


def test_what_is_no_index(home, run, tmp_path):
    (tmp_path / "old.parquet").write_bytes(b"PAR1")
    lancedb.connect(tmp_path / "theirs").create_table("passages", [{"id": "a", "text": "b"}])
    for path, message in (
        (tmp_path / "none", "none does not exist; name a directory that `bert-jax index` wrote"),
        (tmp_path / "old.parquet", "old.parquet is no index; name a directory that"),
        (tmp_path / "theirs", "theirs is no index; name a directory that"),
        (home / "model", "model is no index; name a directory that"),
    ):
        refused = run("search", path, "a")
        assert (refused.code, message in refused.err) == (2, True), refused.err
    shutil.copytree(home / "index", tmp_path / "gone", symlinks=True)
    shutil.rmtree(tmp_path / "gone" / "passages.lance")
    assert (
        "gone: LanceDB fails: Table 'passages' was not" in run("search", tmp_path / "gone", "a").err
    )
    assert "a query is empty" in run("search", home / "index", "a", " ").err


def test_a_table_whose_vectors_are_gone_or_of_another_width(home, run, tmp_path):
    """What an update with LanceDB may have done."""
    for name, width, message in (
        ("none", 0, "LanceDB fails: "), ("wide", 99, "dimensions is 99; it must be from 1 to 16"),
    ):  # fmt: skip
        shutil.copytree(home / "index", tmp_path / name, symlinks=True)
        table = lancedb.connect(tmp_path / name).open_table("passages")
        table.drop_columns(["vector"])
        if width:
            table.add_columns([pa.field("vector", pa.list_(pa.float32(), width))])
        refused = run("search", tmp_path / name, "a")
        assert (refused.code, message in refused.err) == (2, True), refused.err


def test_an_index_is_replaced_only_when_asked(home, run, tmp_path):
    command = "index", home / "model", home / "texts.jsonl", "--out"
    assert run(*command, tmp_path / "out").code == 0
    refused = run(*command, tmp_path / "out")
    assert (refused.code, "(--overwrite)" in refused.err) == (2, True)
    (tmp_path / "one.txt").write_text("only this")
    assert run("index", home / "model", tmp_path / "one.txt", *command[3:], tmp_path / "out",
               "--overwrite").code == 0  # fmt: skip
    assert lancedb.connect(tmp_path / "out").open_table("passages").count_rows() == 1
    (tmp_path / "out" / "found.jsonl").write_text("mine")  # was deleted
    refused = run(*command, tmp_path / "out", "--overwrite")
    assert (refused.code, "another kind" in refused.err) == (2, True), refused.err
    assert (tmp_path / "out" / "found.jsonl").read_text() == "mine"
    for place in (home / "model", home / "texts.jsonl"):
        refused = run(*command, place, "--overwrite")
        assert (refused.code, "Name a directory" in refused.err or "is a file" in refused.err) == (
            2, True,
        )  # fmt: skip


def test_lancedb_is_an_extra(home, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lancedb", None)
    for command in (
        ("index", home / "model", home / "texts.jsonl", "--out", tmp_path / "out"),
        ("search", home / "index", "a"),
    ):
        refused = run(*command)
        assert (refused.code, "pip install 'bert_jax[lancedb]'" in refused.err) == (2, True)


def test_mine_writes_what_training_reads(home, run, tmp_path):
    pairs = [{"query": "kim", "document": TEXTS[1]}, {"query": "a dog", "document": TEXTS[3]}]
    write_lines(tmp_path / "pairs.jsonl", pairs)
    mined = run(
        "mine", home / "model", tmp_path / "pairs.jsonl", "--out", tmp_path / "mined.jsonl",
        "--input", home / "texts.jsonl", "--margin=-2", "--negatives=3",
    )  # fmt: skip
    assert mined.code == 0, mined.err
    assert "2 pairs, 7 distinct documents, 6 negatives" in mined.out
    rows = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]
    for row, pair in zip(rows, pairs, strict=True):
        assert {name: row[name] for name in pair} == pair
        vectors = bert_jax.load(home / "model").embed([*TEXTS, pair["query"]], normalize=True)
        order = [TEXTS[n] for n in np.argsort(-(vectors[:-1] @ vectors[-1]))]
        assert row["negatives"] == [text for text in order if text != pair["document"]][:3]
    refused = run("mine", home / "model", tmp_path / "pairs.jsonl", "--out=x.jsonl", "--ranks=7")
    assert (refused.code, "--ranks is '7'" in refused.err) == (2, True)
    (tmp_path / "more").mkdir()
    write_lines(tmp_path / "more" / "a.jsonl", [{"text": TEXTS[0]}])
    for given in (tmp_path / "more", tmp_path / "more" / "*.jsonl"):
        out = tmp_path / "more" / "a.jsonl"
        command = "mine", home / "model", tmp_path / "pairs.jsonl", "--input", given, "--out", out
        refused = run(*command)
        assert (refused.code, "is also an input" in refused.err) == (2, True)


def test_an_output_in_a_bucket_is_refused(home, run, tmp_path, monkeypatch):
    (tmp_path / "pairs.csv").write_text("query,document\nkim,a dog\n")
    monkeypatch.chdir(tmp_path)
    for command in (
        ("index", home / "model", home / "texts.jsonl", "--out=gs://bucket/index"),
        ("mine", home / "model", "pairs.csv", "--out=gs://bucket/mined.jsonl"),
    ):
        refused = run(*command)
        assert refused.code == 2
        assert re.search(r"gs:/bucket/\S+ is in a bucket; name a local ", refused.err)
    assert os.listdir() == ["pairs.csv"]


def test_mine_without_a_negative_writes_nothing(home, run, tmp_path):
    pairs, out = tmp_path / "pairs.csv", tmp_path / "mined.jsonl"
    pairs.write_text("query,document\n" + "".join(f"{text},{text} .\n" for text in TEXTS[:2]))
    found = run("mine", home / "model", pairs, "--out", out, "--margin=1.9")
    assert (found.code, found.out, out.exists()) == (2, "", False)
    assert "no pair has a negative: " in found.err
    assert "lower --margin (1.9) or widen --ranks (1-100)" in found.err


def test_a_table_without_names_is_read_as_the_message_says(home, run, tmp_path):
    pairs, out = tmp_path / "pairs.csv", tmp_path / "mined.jsonl"
    pairs.write_text("".join(f"{text};{text} .;{n}\n" for n, text in enumerate(TEXTS)))
    model = home / "model"
    found = run("mine", model, pairs, "--out", out, "--columns=delimiter=;")
    assert "set header=False and give columns by number" in found.err
    columns = "--columns=query=1,document=2,delimiter=;,header=False"
    found = run("mine", model, pairs, "--out", out, columns, "--margin=-2")
    assert found.code == 0
    assert "7 pairs" in found.out
    found = run("evaluate", model, "--sts", pairs, f"{columns},score=3", "--json")
    assert json.loads(found.out)["pairs"] == 7
    columns = "--columns=text=1,label=2,delimiter=;,header=False"
    found = run("evaluate", model, "--clustering", pairs, columns, "--json")
    assert json.loads(found.out)["classes"] == 7


def test_evaluate_retrieval(home, run, tmp_path):
    """The rankings by cosine, the whole width and less, and those of BM25 beside them."""
    ids = {f"t{n}": text for n, text in enumerate(TEXTS)}
    queries = {"a": "the dog", "t4": "lee sat on a mat"}
    made = Collection(ids, queries, {"a": {"t3": 1.0, "t6": 2.0}, "t4": {"t0": 1.0}})
    write_collection(tmp_path, {"test": made})
    found = run("evaluate", home / "model", "--retrieval", tmp_path, "--dimensions=8", "--json")
    result = json.loads(found.out)
    assert (result["documents"], result["queries"]) == (7, 2)
    vectors = bert_jax.load(home / "model").embed([*TEXTS, *queries.values()])
    for width in (16, 8):
        short = unit(vectors[:, :width])
        ranked = {
            query: [f"t{n}" for n in np.argsort(-(short[:7] @ row)) if f"t{n}" != query]
            for query, row in zip(queries, short[7:], strict=True)
        }
        wanted = ranking_scores(ranked, made.relevant)
        assert result["scores"][f"{width}"] == pytest.approx(wanted)
    assert result["scores"]["bm25"]["mrr@10"] == 1  # "dog", "sat"; a query's own id is left out
    table = run("evaluate", home / "model", "--retrieval", tmp_path).out.splitlines()
    assert table[0] == "7 documents, 2 queries"
    assert [line.split()[0] for line in table[2:]] == ["16", "bm25"]


def test_rankings_end_at_their_depth_whatever_the_ids_of_the_queries(monkeypatch):
    monkeypatch.setattr(evaluating, "DEPTH", 2)
    evaluation = Evaluation(on_device(random_model("pretrained")), (), lambda count: None)
    for query in ("a", "t0"):  # the id of a query, or of a document too
        documents = {f"t{n}": "the dog" for n in range(4)}
        for id in documents.keys() - {query}:
            made = Collection(documents, {query: "the dog"}, {query: {id: 1.0}})
            rank = [each for each in documents if each != query].index(id)
            scores = evaluation.retrieval(made)["scores"]
            wanted = 1 / (1 + rank) if rank < 2 else 0
            assert [scores[name]["map"] for name in ("16", "bm25")] == [wanted, wanted]


def test_evaluate_with_a_reranker(home, tmp_path):
    write_collection(tmp_path, {"test": Collection(
        {f"t{n}": text for n, text in enumerate(TEXTS)}, {"a": "the dog"}, {"a": {"t3": 1.0}}
    )})  # fmt: skip

    class Oracle(Reranker):
        def __init__(self):
            pass

        def scores(self, queries, passages, **more):
            return np.array([float(passage == TEXTS[3]) for passage in passages], np.float32)

    model = on_device(random_model("pretrained"))
    evaluation = Evaluation(model, (), lambda count: None)
    result = evaluation.retrieval(read_collection(tmp_path), Oracle(), 7)
    assert result["scores"]["reranked 7"]["mrr@10"] == 1


def test_evaluate_similarity_and_clustering(home, run, tmp_path):
    vectors = bert_jax.load(home / "model").embed(TEXTS, normalize=True)
    rows = [
        {"one": TEXTS[n], "two": TEXTS[n + 1], "score": float(vectors[n] @ vectors[n + 1])}
        for n in range(6)
    ]
    write_lines(tmp_path / "sts.jsonl", rows)
    found = run(
        "evaluate", home / "model", "--sts", tmp_path / "sts.jsonl", "--dimensions=4", "--json",
        "--columns=query=one,document=two",
    )  # fmt: skip
    scores = json.loads(found.out)["scores"]
    assert scores["16"] == {"spearman": pytest.approx(1), "pearson": pytest.approx(1)}
    assert scores["4"]["spearman"] < 1
    rows = [{"text": text, "label": n % 2} for n, text in enumerate(["the cat", "a hill ?"] * 5)]
    write_lines(tmp_path / "classes.jsonl", rows)
    found = run("evaluate", home / "model", "--clustering", tmp_path / "classes.jsonl", "--json")
    assert json.loads(found.out) == {
        "texts": 10, "classes": 2, "scores": {"16": {"v_measure": 1.0, "deviation": 0.0}},
    }  # fmt: skip


def test_evaluate_clustering_of_few_and_many_classes(home, run, tmp_path):
    """A task could not learn 25 classes from 30 texts, but a test set may have them."""
    path = tmp_path / "classes.csv"
    path.write_text("text,label\nthe cat,a\na dog,a\n")
    found = run("evaluate", home / "model", "--clustering", path)
    assert f"{path} has 1 class in column 'label'; name a column with at least 2" in found.err
    path.write_text("text,label\n" + "".join(f"the cat,c{n % 25}\n" for n in range(30)))
    found = run("evaluate", home / "model", "--clustering", path, "--json")
    assert json.loads(found.out)["classes"] == 25, found.err


def test_scores_that_are_not_defined_are_null_in_json(home, run, tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("query,document,score\nthe cat,a dog,1\n")
    found = run("evaluate", home / "model", "--sts", path, "--json")
    scores = json.loads(found.out, parse_constant=pytest.fail)["scores"]["16"]
    assert scores == {"spearman": None, "pearson": None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sts=a.csv", "--clustering=b.csv"), "--sts and --clustering: give exactly one of"),
        (("--dimensions=8",), "give exactly one of --retrieval, --sts, --clustering"),
        (("--sts=a.csv", "--rows=8"), "--rows cannot be used with --sts"),
        (("--sts=a.csv", "--rerank=x"), "--rerank works only with --retrieval, not with --sts"),
        (("--sts=a.csv", "--candidates=9"), "--candidates works only with --rerank"),
        (("--retrieval=a", "--candidates=9"), "--candidates works only with --rerank"),
        (("--retrieval=x", "--columns=a=b"), "--columns works only with --sts or --clustering"),
        (("--retrieval=x", "--dimensions=8,a"), "--dimensions is a; it must be a whole number"),
        (("--retrieval=x",), "not a directory in BEIR's layout"),
        (("--sts=a.csv", "--columns=a,b"), "'a,b'; write FIELD=COLUMN, separated by commas, where"),
    ],
)
def test_evaluate_refuses(home, run, options, message):
    refused = run("evaluate", home / "model", *options)
    assert (refused.code, message in refused.err) == (2, True), refused.err


def test_evaluate_does_not_cut_sparse_vectors(run):
    own = EmbeddingConfig("splade", normalize=False)
    model = on_device(dataclasses.replace(random_model("pretrained"), embedding=own))
    with pytest.raises(UserError, match="dimensions is 8; it must not be given for sparse vectors"):
        Evaluation(model, (8,), lambda count: None)
    dense = on_device(random_model("pretrained"))
    with pytest.raises(UserError, match="dimensions is 17; it must be from 1 to 16"):
        Evaluation(dense, (8, 17), lambda count: None)


def test_vectors_have_the_prefix_of_their_kind_and_cuts_are_counted():
    own = EmbeddingConfig(query_prefix="who ", document_prefix="the ", normalize=False)
    model = on_device(dataclasses.replace(random_model("pretrained"), embedding=own, max_length=6))
    plain = dataclasses.replace(model, embedding=None)
    cuts = Cuts()
    texts = ["kim", "a dog sat on a mat"]
    for kind, prefix in (("query", "who "), ("document", "the ")):
        found = text_vectors(model, texts, kind, cuts=cuts)
        np.testing.assert_array_equal(
            found, text_vectors(plain, [prefix + text for text in texts], kind)
        )
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert cuts.warning().startswith("2 of 4 texts are longer than 6 tokens")
    text_vectors(dataclasses.replace(model, max_length=9), texts[:1], "query", cuts=cuts)
    assert cuts.warning().startswith("2 of 5 texts are longer than 6 tokens")
    with pytest.raises(UserError, match="dimensions is 0"):
        text_vectors(model, texts, "query", dimensions=0)

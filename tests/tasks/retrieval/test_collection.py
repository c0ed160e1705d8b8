"""BEIR's layout: read, written, and what is wrong with files."""

import gzip

import pytest
from retrieval_sets import write_collection

from bert_jax.errors import UserError
from bert_jax.tasks.retrieval.collection import Collection, read_collection

MADE = Collection(
    {"d1": "a café", "d2": "the hill"}, {"q1": "café?"}, {"q1": {"d1": 1.0, "d2": 0.0}}
)


def test_collections_come_back_and_share_documents(tmp_path):
    other = Collection({"d3": "more"}, {"q2": "hill?"}, {"q2": {"d2": 2.0}})
    write_collection(tmp_path, {"test": MADE, "train": other})
    documents = {**MADE.documents, **other.documents}
    assert read_collection(tmp_path) == Collection(documents, MADE.queries, MADE.relevant)
    found = read_collection(tmp_path / "qrels" / "train.tsv")
    assert found == Collection(documents, other.queries, other.relevant)


def test_titles_numbers_and_compressed_files(tmp_path):
    write_collection(tmp_path, {"test": MADE})
    (tmp_path / "corpus.jsonl").unlink()
    rows = '{"_id": "d1", "title": "One", "text": "two"}\n\n{"_id": 7, "text": "three"}\n'
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "qrels" / "test.tsv").write_text("q1\td1\t1\r\nq1\t7\t0\r\n")  # no header
    found = read_collection(tmp_path)
    assert found.documents == {"d1": "One two", "7": "three"}
    assert found.relevant == {"q1": {"d1": 1.0, "7": 0.0}}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("qrels/test.tsv", "q1 d1 1\n", "line 1: .* is not a judgement"),
        ("qrels/test.tsv", "q1\td1\tnan\n", "is not a judgement"),
        ("qrels/test.tsv", "q1\td1\t0\n", "no document as relevant"),
        ("qrels/test.tsv", "q1\td9\t1\n", "lacks: document 'd9'"),
        ("corpus.jsonl", '{"_id": "d1"}\n', "line 1: expected an object"),
        ("corpus.jsonl", '{"_id": "d1", "text": "a"}\n' * 2, "line 2: the id 'd1' occurs twice"),
        ("queries.jsonl", '{"text": "a"}\n', "'_id' is None"),
        ("queries.jsonl", "\n", "holds no text"),
        ("qrels/dev.tsv", "", None),
    ],
)
def test_wrong_files_are_named(tmp_path, name, content, message):
    write_collection(tmp_path, {"test": MADE})
    (tmp_path / name).write_text(content)
    if message is None:  # test.tsv is the one that counts
        assert read_collection(tmp_path) == MADE
        return
    with pytest.raises(UserError, match=message):
        read_collection(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"has no judgements in qrels/test\.tsv"):
        read_collection(tmp_path)
    with pytest.raises(UserError, match="not a directory in BEIR's layout"):
        read_collection(tmp_path / "nowhere")
    write_collection(tmp_path, {"dev": MADE, "train": MADE})
    with pytest.raises(UserError, match=r"qrels holds dev\.tsv, train\.tsv"):
        read_collection(tmp_path)

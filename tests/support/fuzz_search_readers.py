"""Readers of test collections and of records of search indexes, for fuzz_readers.py."""

import json
from pathlib import Path


def judgements(directory: Path) -> list[bytes]:
    """Qrels with a header and without, beside a corpus and queries."""
    for name, id in (("corpus.jsonl", "d"), ("queries.jsonl", "q")):
        lines = [json.dumps({"_id": f"{id}{n}", "text": f"text {n}"}) for n in range(3)]
        (directory / name).write_text("\n".join(lines))
    rows = "q0\td1\t1\nq1\td2\t0.5\n"
    return [f"query-id\tcorpus-id\tscore\n{rows}".encode(), rows.replace("\n", "\r\n").encode()]


def corpora(directory: Path) -> list[bytes]:
    """Lines of a corpus, beside judgements and queries."""
    (directory / "qrels").mkdir(exist_ok=True)
    (directory / "qrels" / "test.tsv").write_text("q\t1\t1\n")
    (directory / "queries.jsonl").write_text('{"_id": "q", "text": "a"}\n')
    rows = [{"_id": "1", "title": "é", "text": "a"}, {"_id": 2, "text": ""}]
    return ["".join(json.dumps(row) + "\n" for row in rows).encode()]


def use_collection(path: Path) -> None:
    """Read the collection that a file is part of."""
    from bert_jax.tasks.retrieval.collection import read_collection

    read_collection(path if path.parent.name == "qrels" else path.parent)


def index_records(_: Path) -> list[bytes]:
    """The record of an index of two files."""
    record = {"model": "/m", "digest": "0" * 64, "crc32c": {"passages.lance/data/a.lance": "0" * 8}}
    return [json.dumps(record).encode()]


def use_index_record(path: Path) -> None:
    """Read a record, and compare the files that it names."""
    from bert_jax.files.checks import differing
    from bert_jax.infer.search.index import read_record

    _, digests = read_record(path.parent)
    differing(path.parent, digests, missing_ok=True)

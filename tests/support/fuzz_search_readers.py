"""Readers of test collections and of search indexes, for fuzz_readers.py."""

import io
import json
from pathlib import Path

import numpy as np


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


def indexes(_: Path) -> list[bytes]:
    """An index of three passages in two row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from bert_jax.infer.search.index import _KEY, _schema

    by = {"model": "/m", "digest": "0" * 64, "dimensions": 2}
    schema = _schema(2).with_metadata({_KEY: json.dumps(by)})
    vectors = np.eye(3, 2).tolist()
    texts = ["a", "é", "漢字"]
    table = pa.Table.from_arrays(
        [*map(pa.array, [texts, texts, texts]), pa.array(vectors, schema.field("vector").type)],
        schema=schema,
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=2)
    return [buffer.getvalue()]


def use_index(path: Path) -> None:
    """Read all vectors, and the passages that two queries find."""
    from bert_jax.infer.search.index import Index

    index = Index(path)
    for block in index._blocks():
        assert block.dtype == np.float32
    index._passages(np.arange(len(index)))

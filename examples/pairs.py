"""Make pairs for search from texts: the first sentence of a paragraph, and the rest of it.

    python examples/pairs.py my/text.txt my/pairs

reads what `bert-jax corpus --input` reads, and makes, in the directory `my/pairs`:

    pairs.jsonl       `query` and `document` to learn from, of nine in ten documents
    corpus.jsonl, queries.jsonl, qrels/test.tsv     a test in BEIR's layout: the queries of each
                      tenth document, to be searched among the paragraphs of all documents
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bert_jax.data.corpus.sentences import split_fast
from bert_jax.data.corpus.sources import resolve_sources

QUERY, DOCUMENT = 30, 60
"""Fewest characters of a query and of a document."""


def main(texts: str, directory: Path) -> None:
    """Write the pairs to learn from, and the test."""
    train: list[tuple[str, str]] = []
    test: list[tuple[str, str]] = []
    documents = (text for source in resolve_sources([texts]) for text in source.texts())
    for number, document in enumerate(documents):
        (train if number % 10 else test).extend(pairs(document))
    (directory / "qrels").mkdir(parents=True, exist_ok=True)
    write(directory / "pairs.jsonl", ({"query": a, "document": b} for a, b in train))
    write(
        directory / "corpus.jsonl",
        ({"_id": f"d{n}", "text": b} for n, (_, b) in enumerate(test + train)),
    )
    write(
        directory / "queries.jsonl", ({"_id": f"q{n}", "text": a} for n, (a, _) in enumerate(test))
    )
    answers = "".join(f"q{n}\td{n}\t1\n" for n in range(len(test)))
    (directory / "qrels" / "test.tsv").write_text(answers, encoding="utf-8")
    print(f"{len(train):,} pairs to learn from, {len(test):,} queries to test")


def pairs(document: str) -> Iterator[tuple[str, str]]:
    """Cut each paragraph, which is a line, after its first sentence."""
    for paragraph in document.split("\n"):
        first, *rest = split_fast(paragraph) or [""]
        if len(first) >= QUERY and len(" ".join(rest)) >= DOCUMENT:
            yield first, " ".join(rest)


def write(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write JSON lines."""
    lines = (f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

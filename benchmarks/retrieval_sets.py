r"""Retrieval sets in BEIR's layout, from question answering data and plain text.

    python benchmarks/retrieval_sets.py --data DATA --out work/retrieval
    bert-jax evaluate work/embedder --retrieval work/retrieval/squad

DATA holds squad/ and pretrain/textbooks.txt.xz. Written are

squad      questions to their paragraphs. Train: train-v1.1-part, also as squad/pairs.jsonl with the
           columns query and document. Test: the English questions of XQuAD. Dev: the answerable
           questions of dev-v2.0 about other paragraphs. One corpus of all their paragraphs, those
           of test-v2.0 among them.
xquad-ar, xquad-hi, xquad-zh
           questions in another language to the English paragraphs of XQuAD.
sections   first sentences to the rest of a section of a textbook; a fifth of the sections is test,
           the others are sections/pairs.jsonl.

Paragraphs are held out whole: no paragraph of a test question has a training question.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.sentences import split_fast
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.files.staging import replace_file
from bert_jax.tasks.examples import Question
from bert_jax.tasks.retrieval.collection import Collection
from bert_jax.tasks.squad.sources import read_squad

LANGUAGES = ("ar", "hi", "zh")
TEST_SHARE = 5
"""One of so many sections is held out."""
MAX_REST = 2000
"""Characters of the rest of a section."""


def name_of(text: str) -> str:
    """Return an id that is the same in all sets."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def to_paragraphs(questions: Iterable[Question]) -> Collection:
    """Return questions with the paragraph of each as the relevant document."""
    asked = {each.id: each for each in questions}
    return Collection(
        {name_of(each.context): each.context for each in asked.values()},
        {id: each.question for id, each in asked.items()},
        {id: {name_of(each.context): 1.0} for id, each in asked.items()},
    )


def with_documents(collection: Collection, more: Iterable[str]) -> Collection:
    """Return a collection with documents that answer no query."""
    others = {name_of(text): text for text in more}
    return Collection({**others, **collection.documents}, collection.queries, collection.relevant)


def write_collection(directory: Path, collections: Mapping[str, Collection]) -> None:
    """Write collections that share documents into one directory, with qrels/NAME.tsv for each."""
    documents: dict[str, str] = {}
    queries: dict[str, str] = {}
    for name, collection in collections.items():
        documents.update(collection.documents)
        queries.update(collection.queries)
        rows = ["query-id\tcorpus-id\tscore"] + [
            f"{query}\t{document}\t{grade:g}"
            for query, grades in collection.relevant.items()
            for document, grade in grades.items()
        ]
        replace_file(directory / "qrels" / f"{name}.tsv", "\n".join([*rows, ""]).encode())
    for name, texts, more in (
        ("corpus.jsonl", documents, {"title": ""}), ("queries.jsonl", queries, {})
    ):  # fmt: skip
        lines = [
            json.dumps({"_id": id, **more, "text": text}, ensure_ascii=False)
            for id, text in texts.items()
        ]
        replace_file(directory / name, "\n".join([*lines, ""]).encode())


def write_pairs(path: Path, collection: Collection) -> None:
    """Write the relevant pairs, as `task.kind=embedding` reads them."""
    rows = (
        {"query": collection.queries[query], "document": collection.documents[document]}
        for query, grades in collection.relevant.items()
        for document in grades
    )
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    replace_file(path, "\n".join([*lines, ""]).encode())


def squad_sets(squad: Path, out: Path) -> Iterator[str]:
    train = to_paragraphs(read_squad(squad / "train-v1.1-part.json").examples)
    english = read_squad(squad / "xquad.en.json").examples
    test = to_paragraphs(english)
    dev_questions = read_squad(squad / "dev-v2.0.json", misplaced="keep").examples
    dev = to_paragraphs(
        each
        for each in dev_questions
        if each.answers and name_of(each.context) not in test.documents
    )
    overlap = train.documents.keys() & (test.documents.keys() | dev.documents.keys())
    if overlap:
        raise SystemExit(f"{len(overlap)} training paragraphs have test questions")
    others = {each.context for each in read_squad(squad / "test-v2.0.json").examples}
    write_collection(
        out / "squad", {"train": train, "dev": dev, "test": with_documents(test, sorted(others))}
    )
    write_pairs(out / "squad" / "pairs.jsonl", train)
    yield f"squad: {len(train.queries)} training, {len(dev.queries)} dev, {len(test.queries)} test"
    contexts = {each.id: each.context for each in english}
    for language in LANGUAGES:
        theirs = read_squad(squad / f"xquad.{language}.json").examples
        foreign = Collection(
            test.documents,
            {each.id: each.question for each in theirs},
            {each.id: {name_of(contexts[each.id]): 1.0} for each in theirs},
        )
        write_collection(out / f"xquad-{language}", {"test": foreign})
        yield f"xquad-{language}: {len(foreign.queries)} test"


def section_sets(books: Path, out: Path) -> Iterator[str]:
    (source,) = resolve_sources([f"{books}"], ReadOptions())
    parts: tuple[dict[str, str], dict[str, str]] = {}, {}
    for text in source.texts():
        first, *rest = [each for line in text.split("\n") for each in split_fast(line)]
        if rest:
            name = name_of(text)
            parts[int(name, 16) % TEST_SHARE == 0][first] = " ".join(rest)[:MAX_REST]
    train, test = (
        Collection(
            {name_of(rest): rest for rest in part.values()},
            {name_of(first): first for first in part},
            {name_of(first): {name_of(rest): 1.0} for first, rest in part.items()},
        )
        for part in parts
    )
    write_collection(out / "sections", {"train": train, "test": test})
    write_pairs(out / "sections" / "pairs.jsonl", train)
    yield f"sections: {len(train.queries)} training, {len(test.queries)} test"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    for line in squad_sets(arguments.data / "squad", arguments.out):
        print(line)
    for line in section_sets(arguments.data / "pretrain" / "textbooks.txt.xz", arguments.out):
        print(line)


if __name__ == "__main__":
    main()

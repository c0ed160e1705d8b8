"""Evaluation texts in documents, against a search by strings."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from bert_jax.data.corpus.cleaning.clean import Cleaner, CleaningConfig, Dropped
from bert_jax.data.corpus.overlap import evaluation
from bert_jax.data.corpus.overlap.evaluation import (
    EvaluationSet,
    Example,
    read_evaluation,
    text_key,
)
from bert_jax.data.corpus.overlap.ngrams import (
    MIN_WORDS,
    NGRAM,
    NgramTable,
    ngram_hashes,
    normalised_words,
    word_hashes,
)
from bert_jax.data.corpus.overlap.search import read_report, search_sources
from bert_jax.data.corpus.sharded.engine import Engine
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import UserError

WORDS = [f"w{number}" for number in range(4000)]


def words_of(number: int, length: int) -> list[str]:
    return random.Random(number).choices(WORDS, k=length)


def test_words_are_normalised():
    assert normalised_words("The CAFÉ's “ﬁsh”, 10%") == ["the", "café", "s", "fish", "10"]
    assert normalised_words("東京へ go") == ["東", "京", "へ", "go"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("काल, कील, कुल", ["काल", "कील", "कुल"]),
        ("लड़का खाता है।", ["लड़का", "खाता", "है"]),
        ("café X̂Y", ["café", "x̂y"]),
        ("ที่นี่ กา 10", ["ที่", "นี่", "ก", "า", "10"]),
        ("東京・へ", ["東", "京", "へ"]),
    ],
)
def test_marks_stay_with_their_letters(text: str, words: list[str]):
    assert normalised_words(text) == words


def test_hashes_of_ngrams_tell_them_apart():
    words = words_of(0, 500) + words_of(0, 20)
    for size in (1, 5, 13):
        grams = [tuple(words[at : at + size]) for at in range(len(words) - size + 1)]
        hashes = ngram_hashes(word_hashes(words), size).tolist()
        assert len(hashes) == len(grams)
        assert len(set(zip(grams, hashes, strict=True))) == len(set(grams)) == len(set(hashes))
    assert not len(ngram_hashes(word_hashes(["few", "words"]), 5))


@pytest.fixture(scope="module")
def found() -> tuple[list[list[str]], list[list[str]], np.ndarray]:
    """Texts of all lengths, documents that hold parts of them, and (N, 2) counts of n-grams."""
    draw = random.Random(5)
    texts = [words_of(number, draw.randrange(1, 40)) for number in range(300)]
    documents = []
    for number in range(60):
        parts = [words_of(1000 + number, draw.randrange(30))]
        for _ in range(3):
            text = draw.choice(texts)
            begin = draw.randrange(len(text))
            parts += [
                text[begin : begin + draw.randrange(1, 40)],
                words_of(draw.randrange(10**6), 3),
            ]
        documents.append([word for part in parts for word in part])
    table = NgramTable(texts)
    seen = table.nothing_seen()
    for document in documents:
        for size, (_, numbers) in table.find(word_hashes(document)).items():
            seen[size][numbers] = True
    return texts, documents, np.column_stack(table.counts(seen))


def test_shares_are_those_of_a_search_by_strings(found):
    texts, documents, counts = found
    joined = [f" {' '.join(document)} " for document in documents]
    for text, (total, seen) in zip(texts, counts.tolist(), strict=True):
        size = min(len(text), NGRAM)
        if size < MIN_WORDS:
            assert total == seen == 0
            continue
        grams = [f" {' '.join(text[at : at + size])} " for at in range(len(text) - size + 1)]
        hits = sum(any(gram in document for document in joined) for gram in grams)
        assert (total, seen) == (len(grams), hits)
    assert 20 < (counts[:, 1] > 0).sum() < 200


def test_covered_words_are_those_of_ngrams():
    text = words_of(1, 20)
    table = NgramTable([text])
    document = [*words_of(2, 4), *text[3:18], *words_of(3, 5)]
    assert np.flatnonzero(table.covered(word_hashes(document))).tolist() == list(range(4, 19))
    assert not table.covered(word_hashes(text[:12])).any()
    assert not len(table.covered(word_hashes([])))


def test_the_report_says_which_examples_were_seen(tmp_path):
    lengths = [("dev", 30), ("dev", 8), ("test", 8), ("test", 3)]
    examples = tuple(
        Example(split, (" ".join(words_of(number, length)),))
        for number, (split, length) in enumerate(lengths)
    )
    evaluation = EvaluationSet("eval/set", (("a.tsv", "0" * 64),), examples)
    documents = [" ".join(words_of(0, 16)), f"so {' '.join(words_of(2, 8))}!"]
    (tmp_path / "books.txt").write_text("\n\n".join(documents))
    sources = resolve_sources([f"{tmp_path / 'books.txt'}"])
    report = search_sources("books", sources, evaluation, Engine(1))
    assert np.concatenate([*report.shares().values()])[:3] == pytest.approx((4 / 18, 0, 1))
    counts = report.counts()["all"]
    assert counts == {
        "examples": 4, "short": 1, "seen": 2, "half": 1, "whole": 1,
        "share": pytest.approx((4 / 18 + 1) / 3),
    }  # fmt: skip
    path = tmp_path / report.file_name
    assert path.name == "eval-set-00000000.json"
    report.save(path)
    again = read_report(path)
    assert (again.examples, again.texts) == (report.examples, report.texts)
    assert again.texts[text_key(examples[0].texts[0])] == (18, 4)
    assert again.counts()["test"]["seen"] == 1
    assert "eval/set in books" in report.lines()[0]
    path.write_text(path.read_text().replace('"texts"', '"textes"', 1))
    with pytest.raises(UserError, match="is damaged: KeyError: 'texts'"):
        read_report(path)


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.txt", "one\n\n two\n", [("one",), (" two",)]),
        ("a.tsv", "one\ttwo\nthree\n", [("one", "two"), ("three",)]),
        ("a.csv", 'one,"two\nlines"\n', [("one", "two\nlines")]),
        ("a.csv", 'text,label\n"it is a very long text",1\nso,2\n',
         [("it is a very long text", "1"), ("so", "2")]),
        ("a.tsv", "label\ttext\n1\tit is a very long text\n", [("1", "it is a very long text")]),
        ("a.csv", '"it is a very long text",1\nso,2\n',
         [("it is a very long text", "1"), ("so", "2")]),
        ("a.jsonl", '{"a": "1", "n": 3, "b": ["x", "y"], "c": [{"d": "z"}]}', [("1", "x y", "z")]),
        ("a.jsonl", '{"negatives": ["a cat", "no", "a dog"], "tokens": ["New York", "is", "big"]}',
         [("a cat", "no", "a dog", "New York is big")]),
    ],
)  # fmt: skip
def test_evaluation_files(tmp_path, name: str, content: str, texts: list):
    path = tmp_path / name
    path.write_text(content)
    evaluation = read_evaluation(f"{path}")
    assert [each.texts for each in evaluation.examples] == texts
    assert (evaluation.name, evaluation.files[0][0], len(evaluation.digest)) == (name, name, 64)


def test_squad_and_glue(tmp_path):
    (tmp_path / "squad.json").write_text(
        '{"data": [{"paragraphs": [{"context": "A context.", "qas": ['
        '{"id": "1", "question": "What is it?", "answers": []}]}]}]}'
    )
    found = read_evaluation(f"squad:{tmp_path / 'squad.json'}")
    assert found.examples == (Example("squad.json", ("What is it?", "A context.")),)
    home = tmp_path / "GLUE" / "RTE"
    home.mkdir(parents=True)
    (home / "dev.tsv").write_text(
        "index\tsentence1\tsentence2\tlabel\n0\tA first.\tA second.\tentailment\n"
    )
    for place in (home, home.parent):
        glue = read_evaluation(f"glue:{place}")
        assert glue.examples == (Example("rte/dev", ("A first.", "A second.")),)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("none.txt", "none.txt does not exist"),
        ("glue:none", "none is not a directory"),
        ("squad:none.json", "none.json does not exist"),
        ("x.json", "Is it squad:"),
        ("blank.txt", "has no text to search for"),
        ("bad.txt", "bad.txt, line 1, byte 3: 0xff is not UTF-8"),
        ("bad.csv", "bad.csv, line 2: a stray quote"),
    ],
)
def test_evaluation_texts_that_cannot_be_read(tmp_path, monkeypatch, spec: str, said: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    (tmp_path / "bad.csv").write_text('a,b\n"c" d,e\n')
    with pytest.raises(UserError, match=re.escape(said)):
        read_evaluation(spec)


def test_many_evaluation_texts_are_read_once(tmp_path):
    """Each block of a build has a `Cleaner` of its own."""
    names = [f"{tmp_path / f'{n}.txt'}" for n in range(6)]
    for number, name in enumerate(names):
        Path(name).write_text(" ".join(words_of(number, 20)))
    evaluation._read.cache_clear()
    for _ in range(2):
        Cleaner(CleaningConfig(without=tuple(names)))
    assert evaluation._read.cache_info().misses == 6


def test_passages_are_left_out(tmp_path):
    text = " ".join(words_of(7, 30))
    (tmp_path / "eval.txt").write_text(f"{text}\n")
    cleaner = Cleaner(CleaningConfig(without=(f"{tmp_path / 'eval.txt'}",)))
    own = " ".join(words_of(8, 20))
    across = text.split()
    document = f"{own}\n{' '.join(across[:8])}\n{' '.join(across[8:14]).upper()}\nthe end"
    assert cleaner.clean(0, document) == f"{own}\nthe end"
    assert cleaner.clean(1, own) == own
    gone = cleaner.clean(2, text)
    assert isinstance(gone, Dropped)
    assert cleaner.report.record() == {
        "dropped": {"evaluation-text": 1}, "dropped_lines": {"evaluation-text": 3}
    }  # fmt: skip
    (record,) = CleaningConfig(without=(f"{tmp_path / 'eval.txt'}",)).record()["without"]
    assert (record["name"], len(record["sha256"]), record["ngram"]) == ("eval.txt", 64, 13)

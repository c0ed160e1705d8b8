"""`bert-jax inspect`: counts, documents, duplicates and rows of small corpora."""

import json
from pathlib import Path

import numpy as np
import pytest
from one_shard import StoreWriter
from small_run import TOKENIZER

from bert_jax.cli.inspection import corpus as module
from bert_jax.cli.inspection.corpus import CorpusLook, corpus_lines, inspect_corpus
from bert_jax.cli.main import main
from bert_jax.data.corpus.overlap import search

DOCUMENTS = [[[5, 6], [7]], [[8, 9, 10]], [[5, 6, 7]], [[8, 9, 10]], [[10, 9, 8]], [[8, 9, 10]]]
"""Of sentences; the second, fourth and last are equal; the first has the tokens of the third."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    with StoreWriter(path / "train", TOKENIZER) as writer:
        for sentences in DOCUMENTS:
            writer.append(
                np.concatenate(sentences), np.array([*map(len, sentences)]),
                np.array([len(sentences)]),
            )  # fmt: skip
        long = np.resize(np.arange(5, 64), 200)
        writer.append(long, np.full(20, 10), np.array([20]))
        writer.store()
    return path


@pytest.fixture(scope="module")
def look(path: Path) -> CorpusLook:
    return inspect_corpus(str(path), rows=1, documents=2)


def test_lengths_and_documents(look: CorpusLook) -> None:
    assert look.counts == {"documents": 7, "sentences": 27, "tokens": 218, "shards": 1}
    assert look.quantiles == {
        "0": 3, "0.01": 3, "0.05": 3, "0.25": 3, "0.5": 3, "0.75": 3, "0.95": 200, "0.99": 200,
        "1": 200,
    }  # fmt: skip
    assert [each["document"] for each in look.longest] == [6, 0]
    assert look.shortest[0]["text"] == "5 6 7"
    assert look.longest[0]["text"].startswith("5 6 7 8")
    assert look.longest[0]["text"].endswith(" ...")


def test_equal_documents_are_counted(look: CorpusLook) -> None:
    """Division into sentences is no difference, order is."""
    assert look.duplicates == 3
    assert [(each["count"], each["document"]) for each in look.duplicate_groups] == [(3, 1), (2, 0)]
    assert not look.is_sample


def test_a_large_corpus_is_sampled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_TOKENS", 100)
    monkeypatch.setattr(search, "BLOCK_TOKENS", 32)
    look = inspect_corpus(str(path), documents=9)
    assert look.is_sample
    assert 0 < look.documents_read < 7
    every = {each["document"]: each["text"] for each in look.longest}
    assert every.keys() == {0, 3, 6}
    assert every[3] == "8 9 10"
    assert not inspect_corpus(str(path), full=True).is_sample
    assert "a sample; --full reads all" in "\n".join(corpus_lines(look))


def test_rows_are_those_of_a_run(look: CorpusLook, path: Path) -> None:
    assert look.rows.startswith("1 rows of 128: 128 tokens, 0 padding\n\nrow 0, stream 0,")
    assert "predict" not in look.rows
    seeds = {inspect_corpus(str(path), rows=1, length=16, seed=seed).rows for seed in range(4)}
    assert len(seeds) > 1


@pytest.mark.drawn
def test_the_verb_prints_and_draws(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "lengths.png"
    arguments = ["inspect", str(path), "--length", "32", "--pairing", "sop", "--rows", "2"]
    assert main([*arguments, "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "7 documents, 27 sentences, 218 tokens; 0.00% of the tokens [UNK]" in said
    assert "exact duplicates: 3 of 7 documents (42.86%)" in said
    assert "   A  [CLS]" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lengths"]["quantiles"]["1"] == 200
    assert found["scripts"]["digits and signs"]["tokens"] == 218


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "0"], "--rows is 0; it must be at least 1"),
        (["--part", "heldout"], "has no store heldout; use --part train"),
        (["--pairing", "translation"], "running text"),
        (["--length", "2"], "--length is 2; it must be in [8, 65535]"),
        (["--length", "65536"], "--length is 65536; it must be in [8, 65535]"),
    ],
)
def test_what_cannot_be_is_named(
    path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(path), *arguments]) == 2
    assert said in capsys.readouterr().err

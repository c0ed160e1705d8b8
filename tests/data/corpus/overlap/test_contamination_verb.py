"""From the command line: evaluation texts and held-out documents in a token store."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from one_shard import StoreWriter
from task_examples import TOKENIZER, put

from bert_jax.artefacts.saved.lineage import reports_on_ancestors
from bert_jax.cli.main import main
from bert_jax.data.corpus.overlap import heldout, search
from bert_jax.data.corpus.overlap.search import read_report, reports_of
from bert_jax.data.corpus.sharded.engine import Engine
from bert_jax.training.pretrain.corpus import store_openers

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DRAW = random.Random(0)
DOCUMENTS = [[DRAW.choices(LETTERS, k=30) for _ in range(4)] for _ in range(12)]
"""Sentences of words of one letter, each a token."""


def write_store(path: Path, documents: list[list[list[str]]]) -> str:
    with StoreWriter(path, TOKENIZER) as writer:
        for document in documents:
            tokens = TOKENIZER.encode_batch([" ".join(sentence) for sentence in document])
            lengths = np.array(list(map(len, tokens)))
            writer.append(np.concatenate(tokens), lengths, np.array([len(lengths)]))
        return writer.store().fingerprint


@pytest.fixture
def corpus(tmp_path) -> Path:
    changed = [sentence[:] for sentence in DOCUMENTS[7]]
    changed[2][5] = "q"
    write_store(tmp_path / "corpus" / "train", DOCUMENTS[:10])
    write_store(tmp_path / "corpus" / "heldout", [DOCUMENTS[10], changed, DOCUMENTS[11]])
    return tmp_path / "corpus"


def test_a_corpus_may_be_named_like_its_training_part(corpus, tmp_path):
    place = corpus.rename(tmp_path / "train")
    spec = put(tmp_path / "eval.txt", " ".join(DRAW.choices(LETTERS, k=20)))
    for name in (place, place / "train"):
        assert main(["contamination", f"{name}", "--against", spec, "--num-workers=1"]) == 0
    assert len(reports_of(place / "train")) == 1


def test_evaluation_texts_are_found_across_sentences(corpus, tmp_path, capsys):
    document = [word for sentence in DOCUMENTS[3] for word in sentence]
    seen = " ".join(document[20:50]).upper().replace("A", "Á")  # the tokenizer drops both
    put(tmp_path / "eval.txt", seen, " ".join(DRAW.choices(LETTERS, k=20)), "a b c")
    spec = f"{tmp_path / 'eval.txt'}"
    assert main(["contamination", f"{corpus}", "--against", spec, "--num-workers=1"]) == 0
    said = capsys.readouterr().out
    (report,) = reports_of(corpus / "train")
    (shares,) = report.shares().values()
    assert shares[:2].tolist() == [1, 0]
    assert np.isnan(shares[2])
    assert "eval.txt in corpus: 13-grams of normalised words" in said
    assert said.splitlines()[2].split() == ["eval.txt", "3", "1", "1", "1", "1", "50.00%"]
    assert f"report  {corpus / 'train' / 'contamination'}" in said
    text = put(tmp_path / "text.txt", " ".join(document))
    out = tmp_path / "report.json"
    assert main(["contamination", text, "--against", spec, f"--out={out}", "--num-workers=1"]) == 0
    (shares,) = read_report(out).shares().values()
    assert 0 < shares[0] < 1  # as it is written, a letter has an accent
    assert main(["contamination", text, "--against", spec, "--json", "--num-workers=1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["examples"] == 3


def test_reports_are_found_from_a_run(corpus, tmp_path):
    spec = put(tmp_path / "eval.txt", " ".join(DOCUMENTS[0][0]))
    assert main(["contamination", f"{corpus}", "--against", spec, "--num-workers=1"]) == 0
    run = tmp_path / "run"
    record = {"bert_jax": "0", "format": 2, "config": {"data": {"corpus": f"{corpus}"}}}
    put(run / "config.json", json.dumps(record))
    (report,) = reports_on_ancestors(run)
    (shares,) = report.shares().values()
    assert shares.tolist() == [1]
    for field, reports in (("init", 1), ("distil.teacher", 0), ("sweep.baseline", 0)):
        section, _, name = field.partition(".")  # a student has not read its teacher's text
        other = {section: {name: f"{run}"} if name else f"{run}"}
        put(tmp_path / field / "config.json", json.dumps({**record, "config": other}))
        assert len(reports_on_ancestors(tmp_path / field)) == reports
    other = {"distil": {"teacher": f"{run}", "from_teacher": True}}  # has the teacher's weights
    put(tmp_path / "student" / "config.json", json.dumps({**record, "config": other}))
    assert len(reports_on_ancestors(tmp_path / "student")) == 1
    record["corpus"] = "another fingerprint"
    put(run / "config.json", json.dumps(record))
    assert not reports_on_ancestors(run)
    assert not reports_on_ancestors(tmp_path / "nothing")


@pytest.mark.parametrize("block_tokens", [1 << 18, 300])  # one span of documents, and several
def test_heldout_near_duplicates_are_named(corpus, capsys, monkeypatch, block_tokens):
    pytest.importorskip("rensa")
    monkeypatch.setattr(search, "BLOCK_TOKENS", block_tokens)
    assert main(["contamination", f"{corpus}", "--against", "heldout", "--num-workers=1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("corpus: 1 of 3 held-out documents (33.33%) are near-duplicates")
    assert said[1].split()[1:5] == ["held-out", "1", "train", "7"]
    found = json.loads((corpus / "heldout" / "contamination" / "heldout.json").read_text())
    assert 0.8 <= found["twins"][0]["similarity"] < 1


def test_the_most_similar_document_is_named_and_the_most_similar_pair_comes_first(
    tmp_path, monkeypatch
):
    pytest.importorskip("rensa")
    monkeypatch.setattr(heldout, "MAX_DOCUMENTS", 2)  # of three, the first and the last

    def changed(number: int, *places: tuple[int, int]) -> list[list[str]]:
        document = [sentence[:] for sentence in DOCUMENTS[number]]
        for sentence, word in places:
            document[sentence][word] = "ab"
        return document

    train = [DOCUMENTS[0], DOCUMENTS[1], changed(0, (0, 15))]
    write_store(tmp_path / "train", train)
    held = [changed(1, (1, 9), (3, 9)), DOCUMENTS[5], changed(0, (2, 20))]
    write_store(tmp_path / "heldout", held)
    given = "corpus", store_openers(f"{tmp_path}"), Engine(1)
    report = heldout.heldout_twins(*given)
    assert [(twin.document, twin.train_document) for twin in report.twins] == [(0, 1), (2, 0)]
    between = (report.twins[0].similarity + report.twins[1].similarity) / 2
    assert report.twins[0].similarity < between
    assert heldout.heldout_twins(*given, threshold=between).twins == report.twins[1:]
    _, some, first, second = report.lines()
    assert "sample of the 3 held-out documents" in some
    assert "held-out 2  train 0" in first
    assert "held-out 0  train 1" in second


UNKNOWN = [[[*letters] * 3] * 4 for letters in ("αβγδεζηθ", "бвгдежзи", "אבגדהוזח")]
"""Sentences of words of one letter that the tokenizer does not know."""


@pytest.mark.parametrize("known", [0, 1])
def test_unknown_tokens_make_no_near_duplicates(tmp_path, known):
    pytest.importorskip("rensa")
    write_store(tmp_path / "train", [UNKNOWN[0], DOCUMENTS[0]])
    write_store(tmp_path / "heldout", [*UNKNOWN[1:], *DOCUMENTS[:known]])
    report = heldout.heldout_twins("corpus", store_openers(f"{tmp_path}"), Engine(1))
    assert [(twin.document, twin.train_document) for twin in report.twins] == [(2, 1)][:known]
    assert (report.documents, report.of) == (known, 2 + known)
    assert f"corpus: {known} of {known} held-out documents" in report.lines()[0]


def test_unknown_tokens_are_no_evidence(tmp_path):
    write_store(tmp_path / "train", [UNKNOWN[0], DOCUMENTS[0]])
    texts = [" ".join(UNKNOWN[1][0]), " ".join(DOCUMENTS[0][0])]
    spec = put(tmp_path / "eval.txt", *texts)
    assert main(["contamination", f"{tmp_path}", "--against", spec, "--num-workers=1"]) == 0
    (report,) = reports_of(tmp_path / "train")
    (shares,) = report.shares().values()
    np.testing.assert_array_equal(shares, [np.nan, 1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: --against"),
        (["--against", "none.txt"], "none.txt does not exist"),
        (["--against", "heldout", "--similarity=0.3"], "--similarity is 0.3"),
        (["--against", "a.txt", "--similarity=0.7"], "--similarity works only with --against held"),
        (["--against", "a.txt", "--against", "b.txt", "--out=c.json"], "--out names one file"),
    ],
)
def test_what_cannot_be_searched_is_an_error(corpus, capsys, arguments: list[str], said: str):
    assert main(["contamination", f"{corpus}", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(corpus.glob("*/contamination"))


def test_text_has_no_heldout_part(tmp_path, capsys):
    text = put(tmp_path / "text.txt", "a b c d e f")
    assert main(["contamination", text, "--against", "heldout"]) == 2
    assert "needs a corpus directory" in capsys.readouterr().err

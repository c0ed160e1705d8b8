"""Hard negatives against a search written out, with vectors that are set by hand."""

import json

import numpy as np
import pytest
from asked_models import random_model

from bert_jax.cli.verbs.options import read
from bert_jax.cli.verbs.search import Mine
from bert_jax.errors import UserError
from bert_jax.infer.search import mine as mining
from bert_jax.infer.search.mine import Pair, mine, read_pairs, write_mined

MODEL = random_model("pretrained")  # not asked
ANGLES = {
    "q": 0, "near": 5, "answer": 10, "far": 60, "other": 30, "p": 90,
    "its": 80, "also": 85,
}  # fmt: skip
PAIRS = [Pair("q", "answer"), Pair("p", "its"), Pair("p", "also"), Pair("Q", "answer")]
CORPUS = ["near", "far", "other", "Answer", "q"]


@pytest.fixture(autouse=True)
def vectors(monkeypatch):
    """Texts on a circle, in place of a model."""

    def text_vectors(model, texts, kind, **more):
        angles = np.deg2rad([{k.casefold(): v for k, v in ANGLES.items()}[t.casefold()]
                             for t in texts])  # fmt: skip
        return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)

    monkeypatch.setattr(mining, "text_vectors", text_vectors)


def mined(**config):
    return mine(MODEL, PAIRS, corpus=CORPUS, **config)


def test_negatives_are_near_and_neither_answers_nor_nearer_than_the_margin():
    found = mined(margin=0.0)
    assert found.documents == 7  # "Answer" is "answer"
    assert [list(each) for each in found.negatives] == [
        ["other", "far", "its", "also"],  # not "near", which is nearer; not the query itself
        ["far", "other", "answer", "near", "q"],  # not "also", which answers too
        ["far", "other", "answer", "near", "q"],
        ["other", "far", "its", "also"],  # "Q" is "q"
    ]
    assert found.too_near == 2


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"margin": -0.1}, ["near", "other", "far", "its", "also"]),
        ({"margin": 0.3}, ["far", "its", "also"]),
        ({"margin": 0.0, "negatives": 2}, ["other", "far"]),
        ({"margin": -0.1, "first": 2, "last": 3}, ["other", "far"]),
        ({"margin": 1.5}, []),
    ],
)
def test_margin_ranks_and_number(config, wanted):
    assert list(mined(**config).negatives[0]) == wanted


def test_files_in_and_out(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("question,text\nq,answer\nq,\n")
    pairs = read_pairs(f"{path}", "question", "text")
    assert pairs == [Pair("q", "answer")]
    found = mine(MODEL, pairs, margin=0.0, corpus=CORPUS)
    write_mined(tmp_path / "out.jsonl", found)
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    scores = row.pop("scores")  # of what `ANGLES` says
    np.testing.assert_allclose(scores, np.cos(np.deg2rad([10, 30, 60])), atol=1e-6)
    assert row == {"query": "q", "document": "answer", "negatives": ["other", "far"]}
    assert found.lines()[1] == "2 different documents are negatives, one of them for 1 pairs"
    assert "1 pairs, 5 distinct documents, 2 negatives" in found.lines()[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("--negatives=0", r"--negatives is 0; it must be at least 1"),
        ("--margin=3000", r"--margin is 3000\.0; it must be in \[-1000, 1000\]"),
    ],
)
def test_refusals(config, message):
    with pytest.raises(UserError, match=message):
        read(Mine, "mine", ["model", "pairs.csv", "--out=out.jsonl", config])
    with pytest.raises(UserError, match="--ranks is '5-4'; give the first rank, at least 1"):
        read(Mine, "mine", ["model", "pairs.csv", "--out=out.jsonl", "--ranks=5-4"])()

"""BM25 by hand, and against bm25s."""

import math

import numpy as np
import pytest

from bert_jax.tasks.retrieval.bm25 import BM25

DOCUMENTS = [["a", "b", "a"], ["b"], ["c", "c", "c", "c"], []]


def test_scores_by_hand():
    """Mean length 2; "a" stands in 1 of 4 documents, "b" in 2, "c" in 1."""
    found = BM25(DOCUMENTS).scores(["a", "b", "b", "unknown"])
    rare, common = math.log(1 + 3.5 / 1.5), math.log(1 + 2.5 / 2.5)
    long, short = 1.2 * (0.25 + 0.75 * 3 / 2), 1.2 * (0.25 + 0.75 / 2)
    assert found == pytest.approx(
        [rare * 2 / (2 + long) + 2 * common / (1 + long), 2 * common / (1 + short), 0, 0]
    )


def test_ranking_has_ties_in_order_and_only_documents_that_share_a_word():
    found = BM25([["a"], ["b"], ["a"], ["a"], ["a", "x"]])
    assert found.ranked(["a"], 2).tolist() == [0, 2]
    assert found.ranked(["a"], 9).tolist() == [0, 2, 3, 4]
    assert found.ranked(["?"], 9).tolist() == BM25([]).ranked(["a"], 3).tolist() == []


@pytest.mark.parity
def test_scores_are_those_of_bm25s():
    bm25s = pytest.importorskip("bm25s", reason="bm25s is not installed")
    random = np.random.default_rng(0)
    words = np.array([f"w{n}" for n in range(40)])
    documents = [list(random.choice(words, random.integers(1, 30))) for _ in range(50)]
    theirs = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    theirs.index(documents, show_progress=False)
    ours = BM25(documents)
    for _ in range(5):
        query = list(random.choice(words, 6, replace=False))
        np.testing.assert_allclose(ours.scores(query), theirs.get_scores(query), rtol=1e-5)

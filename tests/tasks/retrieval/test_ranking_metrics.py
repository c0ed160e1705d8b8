"""Scores of rankings: by hand, against independent definitions, and against ranx."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.tasks.retrieval.metrics import query_scores, ranking_scores


def test_scores_by_hand():
    ranked = {"a": ["x", "d2", "y", "d1"], "b": ["z"], "not judged": ["d1"]}
    relevant = {"a": {"d1": 1.0, "d2": 3.0, "x": 0.0}, "b": {"d9": 1.0}}
    found = query_scores(ranked, relevant)
    gain = 3 / math.log2(3) + 1 / math.log2(5)
    assert found["ndcg@10"] == pytest.approx([gain / (3 + 1 / math.log2(3)), 0])
    assert found["mrr@10"] == pytest.approx([1 / 2, 0])
    assert found["recall@100"] == pytest.approx([1, 0])
    assert found["map"] == pytest.approx([(1 / 2 + 2 / 4) / 2, 0])
    assert ranking_scores(ranked, relevant)["mrr@10"] == pytest.approx(1 / 4)


def test_depths():
    ranking = [f"other {n}" for n in range(10)] + ["d"] + [f"more {n}" for n in range(100)]
    scores = ranking_scores({"q": [*ranking, "e"]}, {"q": {"d": 1.0, "e": 1.0}})
    assert scores["ndcg@10"] == scores["mrr@10"] == 0
    assert scores["recall@100"] == 1 / 2
    assert scores["map"] == pytest.approx((1 / 11 + 2 / 112) / 2)


@pytest.mark.parametrize(
    ("rank", "ndcg", "mrr", "recall"),
    [(10, 1 / math.log2(11), 1 / 10, 1), (11, 0, 0, 1), (100, 0, 0, 1), (101, 0, 0, 0)],
)
def test_the_last_rank_that_counts(rank, ndcg, mrr, recall):
    ranking = [f"other {n}" for n in range(200)]
    ranking[rank - 1] = "d"
    scores = ranking_scores({"q": ranking}, {"q": {"d": 1.0}})
    assert [*scores.values()] == pytest.approx([ndcg, mrr, recall, 1 / rank])
    relevant = dict.fromkeys(ranking[:20], 1.0)  # more than nDCG reads: the best has 1
    assert ranking_scores({"q": ranking}, {"q": relevant})["ndcg@10"] == pytest.approx(1)


def test_queries_without_anything_score_zero_and_repeated_documents_count_once():
    found = query_scores({"b": ["d", "d"]}, {"a": {"d": 1.0}, "b": {"d": 1.0}, "c": {"d": 0.0}})
    assert all(values.tolist() == [0, 1, 0] for values in found.values())
    with pytest.raises(UserError, match="nothing to score"):
        ranking_scores({"a": ["d"]}, {})


RANX = """
import json, sys
import ranx
qrels, run, names = json.load(sys.stdin)
print(json.dumps(ranx.evaluate(ranx.Qrels(qrels), ranx.Run(run), names)))
"""


@pytest.mark.parity
def test_scores_are_those_of_ranx():
    """Compiled by numba, ranx takes minutes to start; interpreted, in a process of its own."""
    rng = np.random.default_rng(0)
    documents = [f"d{n}" for n in range(300)]
    relevant, run, ranked = {}, {}, {}
    for number in range(20):
        query = f"q{number}"
        judged = rng.choice(documents, rng.integers(2, 30), replace=False)
        relevant[query] = {name: int(rng.integers(0, 4)) for name in judged} | {"d0": 1}
        order = rng.permutation(documents)[: rng.integers(1, 300)]
        run[query] = {name: 1 - place / 1000 for place, name in enumerate(order)}
        ranked[query] = list(order)
    graded = {query: {d: float(g) for d, g in judged.items()} for query, judged in relevant.items()}
    found = ranking_scores(ranked, graded)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RANX],
        input=json.dumps([relevant, run, list(found)]), capture_output=True, text=True,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert found == pytest.approx(json.loads(done.stdout), abs=1e-12)

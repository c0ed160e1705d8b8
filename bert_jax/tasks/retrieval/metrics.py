"""Scores of rankings, as trec_eval and BEIR define them, and rankings of vectors by cosine."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Integer

from bert_jax.errors import UserError

_Id = TypeVar("_Id", str, int)

DEPTH = 1000
"""Number of documents ranked for a query; MAP reads all of them, as in BEIR."""
_NDCG_AT, _MRR_AT, _RECALL_AT = 10, 10, 100


def ranking_scores(
    ranked: Mapping[_Id, Sequence[_Id]], relevant: Mapping[_Id, Mapping[_Id, float]]
) -> dict[str, float]:
    """Return the means over the judged queries; see `query_scores`."""
    return {name: float(values.mean()) for name, values in query_scores(ranked, relevant).items()}


def query_scores(
    ranked: Mapping[_Id, Sequence[_Id]], relevant: Mapping[_Id, Mapping[_Id, float]]
) -> dict[str, np.ndarray]:
    """Score the ranking of each query.

    A document is relevant where its grade is above 0; only nDCG reads the grade itself, with linear
    gains (Järvelin and Kekäläinen, 2002). A query without ranking, or without a relevant document,
    scores 0. Rankings of queries that nobody judged do not count. A document that is ranked twice
    counts at its better rank. The given order decides: the ranker breaks ties.

    Returns:
        `ndcg@10`, `mrr@10`, `recall@100` and `map`, each of (Q,), in the order of `relevant`.

    Raises:
        UserError: No query is judged.
    """
    if not relevant:
        raise UserError("no query is judged, so there is nothing to score")
    names = f"ndcg@{_NDCG_AT}", f"mrr@{_MRR_AT}", f"recall@{_RECALL_AT}", "map"
    scores = [_scores(ranked.get(query, ()), grades) for query, grades in relevant.items()]
    return dict(zip(names, np.array(scores, np.float64).T, strict=True))


def _scores(ranking: Sequence[_Id], grades: Mapping[_Id, float]) -> tuple[float, ...]:
    ideal = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
    if not ideal:
        return 0.0, 0.0, 0.0, 0.0
    gains = np.array([max(grades.get(document, 0.0), 0.0) for document in dict.fromkeys(ranking)])
    hits = np.flatnonzero(gains > 0)
    first = hits[0] + 1 if len(hits) else _MRR_AT + 1
    return (
        _dcg(gains[:_NDCG_AT]) / _dcg(np.array(ideal[:_NDCG_AT])),
        1 / first if first <= _MRR_AT else 0.0,
        np.count_nonzero(hits < _RECALL_AT) / len(ideal),
        float(np.sum(np.arange(1, len(hits) + 1) / (hits + 1))) / len(ideal),
    )


def _dcg(gains: np.ndarray) -> float:
    return float(np.sum(gains / np.log2(np.arange(2, len(gains) + 2))))


CUTOFF = 100
"""Number of documents scored in a ranking."""
_BLOCK = 1024
"""Number of queries compared with all documents at a time."""


def unit(vectors: Float[np.ndarray, "... D"]) -> Float[np.ndarray, "... D"]:
    """Scale vectors to length 1; a vector of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12)


def search_scores(
    queries: Float[np.ndarray, "Q D"],
    documents: Float[np.ndarray, "N D"],
    relevant: Sequence[Sequence[int]],
    hidden: Sequence[int],
) -> dict[str, Float[np.ndarray, " q"]]:
    """Score each query's ranking by cosine (see `retrieval.metrics.query_scores`).

    `relevant` numbers the documents that answer each query; a query without any is left out.
    `hidden` numbers a document to leave out of each query's ranking, such as the query's own text;
    -1: none.
    """
    wanted = {n: dict.fromkeys(found, 1.0) for n, found in enumerate(relevant) if len(found)}
    ranked = dict(_rankings(unit(queries), unit(documents), list(wanted), hidden))
    return query_scores(ranked, wanted)


def _rankings(
    queries: np.ndarray, documents: np.ndarray, chosen: Sequence[int], hidden: Sequence[int]
) -> Iterator[tuple[int, list[int]]]:
    """Yield the nearest documents of each chosen query, in order."""
    for start in range(0, len(chosen), _BLOCK):
        block = chosen[start : start + _BLOCK]
        cosines = queries[block] @ documents.T
        for number, row in zip(block, cosines, strict=True):
            if hidden[number] >= 0:
                row[hidden[number]] = -np.inf
            count = min(CUTOFF, len(row))
            near = np.argpartition(-row, count - 1)[:count]
            near = near[np.isfinite(row[near])]
            yield number, near[np.lexsort((near, -row[near]))].tolist()


def chance(metric: str, counts: Integer[np.ndarray, " Q"], documents: int) -> float:
    """Return the expected score of documents in random order.

    `metric` is a score of `search_scores`; each of `counts` is at least 1.
    """
    distinct, which = np.unique(counts, return_inverse=True)
    scores = np.array([_chance(metric, int(count), documents) for count in distinct])
    return float(scores[which].mean())


def _chance(metric: str, relevant: int, documents: int) -> float:
    share = relevant / documents
    if metric == "recall@100":
        return min(CUTOFF, documents) / documents
    ranks = range(1, min(10 if "@10" in metric else CUTOFF, documents) + 1)
    if metric == "ndcg@10":
        gains = [1 / math.log2(rank + 1) for rank in ranks]
        return share * sum(gains) / sum(gains[:relevant])
    if metric == "map":  # the expected precision at each relevant rank
        others = (relevant - 1) / max(documents - 1, 1)
        return sum(share * (1 + (rank - 1) * others) / rank for rank in ranks) / relevant
    total, none_before = 0.0, 1.0
    for rank in ranks:
        first = relevant / (documents - rank + 1)
        total += none_before * first / rank
        none_before *= max(0.0, 1 - first)
        if none_before == 0:
            break
    return total

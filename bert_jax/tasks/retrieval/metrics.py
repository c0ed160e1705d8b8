"""Ranking metrics as in trec_eval and BEIR, search by vectors, and clustering.

Sources: Arthur and Vassilvitskii 2007 (k-means++); Rosenberg and Hirschberg 2007 (V-measure).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Float, Int64, Integer
from scipy.special import entr

from bert_jax.errors import UserError

PairKind = Literal["pairs", "scores", "classes", "texts"]
ListLoss = Literal["contrast", "margin_mse", "kl", "list_net"]
"""Loss of a query's scores for its own documents (see `objectives.losses.list_losses`)."""
RANKING_METRICS = ("ndcg@10", "mrr@10", "recall@100", "map")
EMBEDDING_METRICS: Mapping[PairKind, tuple[str, ...]] = {
    "pairs": RANKING_METRICS, "scores": ("spearman", "pearson"), "classes": RANKING_METRICS,
    "texts": RANKING_METRICS,
}  # fmt: skip
"""Metrics that can select the best checkpoint, by kind of rows; the first is the default."""

_Id = TypeVar("_Id", str, int)

DEPTH = 1000
"""Number of documents to rank for each query; MAP uses the whole ranking, as in BEIR."""
_NDCG_AT, _MRR_AT, _RECALL_AT = 10, 10, 100


def ranking_scores(
    ranked: Mapping[_Id, Sequence[_Id]], relevant: Mapping[_Id, Mapping[_Id, float]]
) -> dict[str, float]:
    """Return each metric's mean over the judged queries (see `query_scores`)."""
    return {name: float(values.mean()) for name, values in query_scores(ranked, relevant).items()}


def query_scores(
    ranked: Mapping[_Id, Sequence[_Id]], relevant: Mapping[_Id, Mapping[_Id, float]]
) -> dict[str, np.ndarray]:
    """Return `ndcg@10`, `mrr@10`, `recall@100` and `map` (Q,) of the queries in `relevant`.

    A document is relevant if its grade is above 0. Only nDCG uses the grade itself, as a linear
    gain (Järvelin and Kekäläinen, 2002). A query without a ranking, or without a relevant document,
    scores 0. Rankings of unjudged queries are ignored. A document that is ranked twice counts at
    its better rank. Rankings list the best document first, with ties already broken. Raise a
    UserError if no query is judged.
    """
    if not relevant:
        raise UserError("no query is judged, so there is nothing to score")
    scores = [_scores(ranked.get(query, ()), grades) for query, grades in relevant.items()]
    return dict(zip(RANKING_METRICS, np.array(scores, np.float64).T, strict=True))


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
"""Number of nearest documents that `search_scores` ranks for a query."""
_BLOCK = 1024
"""Number of queries compared with all documents at a time."""


def unit(vectors: Float[np.ndarray, "... D"]) -> Float[np.ndarray, "... D"]:
    """Scale vectors to length 1; a vector of zeros stays as it is."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def search_scores(
    queries: Float[np.ndarray, "Q D"],
    documents: Float[np.ndarray, "N D"],
    relevant: Sequence[Sequence[int]],
    hidden: Sequence[int],
) -> dict[str, Float[np.ndarray, " q"]]:
    """Rank the documents for each query by inner product; score the rankings by `query_scores`.

    `relevant` has the indices of each query's answers; queries without answers are left out.
    `hidden` has the index of one document to skip in each ranking, such as the query's text, or -1.
    """
    wanted = {n: dict.fromkeys(found, 1.0) for n, found in enumerate(relevant) if len(found)}
    chosen = list(wanted)
    ranked: dict[int, list[int]] = {}
    for start in range(0, len(chosen), _BLOCK):
        block = chosen[start : start + _BLOCK]
        for number, row in zip(block, queries[block] @ documents.T, strict=True):
            if hidden[number] >= 0:
                row[hidden[number]] = -np.inf
            count = min(CUTOFF, len(row))
            near = np.argpartition(-row, count - 1)[:count]
            near = near[np.isfinite(row[near])]
            ranked[number] = near[np.lexsort((near, -row[near]))].tolist()
    return query_scores(ranked, wanted)


def chance(metric: str, counts: Integer[np.ndarray, " Q"], documents: int) -> float:
    """Return the expected score when documents are ranked at random.

    `metric` is the name of a score that `search_scores` returns. `counts` has the number of
    relevant documents for each query, at least 1. `documents` is the number of all documents.
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


_MAX_STEPS = 100


def k_means(vectors: Float[np.ndarray, "N D"], clusters: int, seed: int) -> Int64[np.ndarray, " N"]:
    """Return the cluster of each vector, by Lloyd's algorithm from k-means++ centres.

    There must be at least as many vectors as clusters; equal vectors may yield fewer clusters.
    """
    random = np.random.default_rng(seed)
    vectors = vectors.astype(np.float32)
    centres = vectors[random.integers(len(vectors))][None]
    nearest = _distances(vectors, centres)[:, 0]
    while len(centres) < clusters:
        total = nearest.sum(dtype=np.float64)
        chances = nearest / total if total > 0 else None  # None: every vector equals a centre
        centre = vectors[random.choice(len(vectors), p=chances)][None]
        centres = np.concatenate([centres, centre])
        nearest = np.minimum(nearest, _distances(vectors, centre)[:, 0])
    before = np.full(len(vectors), -1)
    for _ in range(_MAX_STEPS):
        found = _distances(vectors, centres).argmin(1)
        if np.array_equal(found, before):
            break
        before = found
        sums = np.zeros_like(centres)
        np.add.at(sums, found, vectors)
        counts = np.bincount(found, minlength=clusters)[:, None]
        centres = np.where(counts > 0, sums / np.maximum(counts, 1), centres)  # empty: unchanged
    return found


def v_measure(classes: Integer[np.ndarray, " N"], clusters: Integer[np.ndarray, " N"]) -> float:
    """Return the harmonic mean of homogeneity and completeness; 1 if clusters equal classes."""
    _, rows = np.unique(classes, return_inverse=True)
    _, columns = np.unique(clusters, return_inverse=True)
    joint = np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(joint, (rows, columns), 1 / len(rows))
    of_classes, of_clusters = entr(joint.sum(1)).sum(), entr(joint.sum(0)).sum()
    shared = of_classes + of_clusters - entr(joint).sum()
    total = of_classes + of_clusters
    # The harmonic mean of shared / of_classes and shared / of_clusters:
    return float(2 * max(shared, 0.0) / total) if total > 0 else 1.0


def _distances(
    vectors: Float[np.ndarray, "N D"], centres: Float[np.ndarray, "K D"]
) -> Float[np.ndarray, "N K"]:
    """Return squared Euclidean distances, at least 0."""
    products = vectors @ centres.T
    squares = (vectors**2).sum(1)[:, None] + (centres**2).sum(1)
    return np.maximum(squares - 2 * products, 0)

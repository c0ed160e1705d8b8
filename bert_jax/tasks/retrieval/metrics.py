"""Scores of rankings against judged documents, as trec_eval and BEIR define them."""

from collections.abc import Mapping, Sequence

import numpy as np

from bert_jax.errors import UserError

DEPTH = 1000
"""Number of documents ranked for a query; MAP reads all of them, as in BEIR."""
_NDCG_AT, _MRR_AT, _RECALL_AT = 10, 10, 100


def ranking_scores(
    ranked: Mapping[str, Sequence[str]], relevant: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return the means over the judged queries; see `query_scores`."""
    return {name: float(values.mean()) for name, values in query_scores(ranked, relevant).items()}


def query_scores(
    ranked: Mapping[str, Sequence[str]], relevant: Mapping[str, Mapping[str, float]]
) -> dict[str, np.ndarray]:
    """Score the ranking of each query.

    A document is relevant where its grade is above 0; only nDCG reads the grade itself, with linear
    gains (Järvelin and Kekäläinen, 2002). A query without ranking, or without a relevant document,
    scores 0. Rankings of queries that nobody judged do not count. A document that is ranked twice
    counts at its better rank. The given order decides: the ranker breaks ties.

    Args:
        ranked: Documents of each query, best first.
        relevant: Grades of the judged documents of each query.

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


def _scores(ranking: Sequence[str], grades: Mapping[str, float]) -> tuple[float, ...]:
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

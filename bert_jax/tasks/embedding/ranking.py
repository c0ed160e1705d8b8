"""Scores of vectors: the ranks of the documents that a query should find."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int64, Integer

from bert_jax.tasks.retrieval.metrics import query_scores

CUTOFF = 100
"""Number of documents scored in a ranking."""
_BLOCK = 1024
"""Number of queries compared with all documents at a time."""


def unit(vectors: Float[np.ndarray, "... D"]) -> Float[np.ndarray, "... D"]:
    """Scale vectors to length 1; a vector of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: np.ndarray = vectors / np.maximum(lengths, 1e-12)
    return scaled


def search_scores(
    queries: Float[np.ndarray, "Q D"],
    documents: Float[np.ndarray, "N D"],
    relevant: Sequence[Sequence[int]],
    hidden: Sequence[int],
) -> dict[str, Float[np.ndarray, " q"]]:
    """Score each query's ranking by cosine (see `retrieval.metrics.query_scores`).

    Args:
        queries: Vectors of the queries.
        documents: Vectors of the documents.
        relevant: Numbers of the documents that answer each query; a query without any is left out.
        hidden: Number of a document to leave out of each query's ranking, such as the query's own
            text; -1: none.
    """
    names = [f"{number}" for number in range(len(documents))]
    chosen = [number for number, found in enumerate(relevant) if len(found)]
    ranked = {
        names_of: [names[document] for document in found]
        for names_of, found in _rankings(unit(queries), unit(documents), chosen, hidden)
    }
    wanted = {f"q{n}": {names[document]: 1.0 for document in relevant[n]} for n in chosen}
    return query_scores(ranked, wanted)


def _rankings(
    queries: np.ndarray, documents: np.ndarray, chosen: Sequence[int], hidden: Sequence[int]
) -> Iterator[tuple[str, Int64[np.ndarray, " k"]]]:
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
            yield f"q{number}", near[np.lexsort((near, -row[near]))]


def chance(metric: str, counts: Integer[np.ndarray, " Q"], documents: int) -> float:
    """Return the expected score of documents in random order.

    Args:
        metric: Name of a score of `search_scores`.
        counts: Relevant documents of each query, at least 1.
        documents: Number of all documents.
    """
    of_each: Mapping[int, float] = {
        int(count): _chance(metric, int(count), documents) for count in np.unique(counts)
    }
    return float(np.mean([of_each[int(count)] for count in counts]))


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

"""Scores of a model's vectors on labelled sets, and of their first numbers side by side."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.data.corpus.overlap.ngrams import normalised_words
from bert_jax.errors import UserError
from bert_jax.infer.exact_search import top_k
from bert_jax.infer.predictor import Cuts
from bert_jax.infer.search.rerank import Reranker, reranked
from bert_jax.infer.search.vectors import text_vectors
from bert_jax.tasks.config import TableConfig
from bert_jax.tasks.retrieval.bm25 import BM25
from bert_jax.tasks.retrieval.collection import Collection
from bert_jax.tasks.retrieval.metrics import DEPTH, k_means, ranking_scores, unit, v_measure
from bert_jax.tasks.text.metrics import pearson, spearman
from bert_jax.tasks.text.tables import read_texts
from bert_jax.terminal import table_lines

CLUSTERINGS = 10
"""Runs of k-means, from other first centres each."""

Advance = Callable[[int], object]
Result = dict[str, Any]
"""Counts; "scores", by what was scored and by metric; "warning" about texts that were cut."""


def evaluate_retrieval(
    model: SavedModel, collection: Collection, dimensions: Sequence[int] = (), *,
    reranker: Reranker | None = None, candidates: int = 100, advance: Advance = lambda count: None,
) -> Result:  # fmt: skip
    """Score the rankings of a collection by cosine, beside BM25's rankings.

    Of equal cosines the document that comes first in the corpus comes first. A document with the id
    of the query is left out of the query's ranking, as in BEIR.

    Args:
        model: A model on a device.
        collection: Documents, queries and judgements.
        dimensions: Numbers of vectors that are scored beside the whole width.
        reranker: Orders the first documents of the ranking by the whole width anew.
        candidates: Documents of a query that are reranked.
        advance: Takes the number of texts after each part of them.

    Raises:
        UserError: The model has fewer dimensions, or makes no vectors.
    """
    cuts, widths = Cuts(), _widths(model, dimensions)
    texts, queries = [*collection.documents.values()], [*collection.queries.values()]
    known = text_vectors(model, texts, "document", normalize=False, cuts=cuts, advance=advance)
    asked = text_vectors(model, queries, "query", normalize=False, cuts=cuts, advance=advance)
    scores: dict[str, dict[str, float]] = {}
    ranked: dict[str, list[str]] = {}
    for width in widths:
        _, numbers = top_k(unit(asked[:, :width]), unit(known[:, :width]), DEPTH + 1)
        rankings = _named(collection, numbers)
        ranked = ranked or rankings
        scores[f"{width}"] = ranking_scores(rankings, collection.relevant)
    if reranker is not None:
        second = _second_pass(reranker, collection, ranked, candidates, cuts, advance)
        scores[f"reranked {candidates}"] = ranking_scores(second, collection.relevant)
    words = BM25(map(normalised_words, texts))
    shared = [words.ranked(normalised_words(query), DEPTH + 1) for query in queries]
    scores["bm25"] = ranking_scores(_named(collection, shared), collection.relevant)
    counts = {"documents": len(texts), "queries": len(queries)}
    return {**counts, "scores": scores, "warning": cuts.warning()}


def evaluate_similarity(
    model: SavedModel, source: str, columns: Sequence[str], dimensions: Sequence[int] = (), *,
    advance: Advance = lambda count: None, **written: Any,
) -> Result:  # fmt: skip
    """Compare the cosines of pairs of texts with the scores that people gave.

    Args:
        model: A model on a device.
        source: Table of pairs.
        columns: Columns of the first text (a query), the second (a document) and the score.
        dimensions: Numbers of vectors that are scored beside the whole width.
        advance: Takes the number of texts after each part of them.
        **written: How the file is written, fields of `TableConfig` such as `header`.

    Raises:
        UserError: The file or a column cannot be read.
    """
    first, second, score = columns
    table = TableConfig(
        text=first,
        text_pair=second,
        label=score,
        problem_type="regression",
        empty="skip",
        **written,
    )
    cuts, widths = Cuts(), _widths(model, dimensions)
    examples = read_texts(source, table).examples
    if examples[0].label is None:
        raise UserError(f"{source} has no values in column {score!r}; --columns names another")
    wanted = np.array([each.label for each in examples], np.float64)
    firsts, seconds = [each.text for each in examples], [each.text_pair or "" for each in examples]
    asked = text_vectors(model, firsts, "query", normalize=False, cuts=cuts, advance=advance)
    known = text_vectors(model, seconds, "document", normalize=False, cuts=cuts, advance=advance)
    scores = {}
    for width in widths:
        pairs = unit(asked[:, :width]).astype(np.float64), unit(known[:, :width])
        cosines = np.multiply(*pairs).sum(1)
        scores[f"{width}"] = {
            "spearman": spearman(wanted, cosines), "pearson": pearson(wanted, cosines)
        }  # fmt: skip
    return {"pairs": len(examples), "scores": scores, "warning": cuts.warning()}


def evaluate_clustering(
    model: SavedModel, source: str, columns: Sequence[str], dimensions: Sequence[int] = (), *,
    advance: Advance = lambda count: None, **written: Any,
) -> Result:  # fmt: skip
    """Cluster the vectors of texts into as many clusters as there are classes, several times.

    Args:
        model: A model on a device.
        source: Table of texts with classes.
        columns: Columns of the text (a document) and of the class.
        dimensions: Numbers of vectors that are scored beside the whole width.
        advance: Takes the number of texts after each part of them.
        **written: How the file is written, fields of `TableConfig` such as `header`.

    Returns:
        Mean and standard deviation of the V-measure over `CLUSTERINGS` runs.

    Raises:
        UserError: The file or a column cannot be read, or there is only one class.
    """
    text, label = columns
    cuts, widths = Cuts(), _widths(model, dimensions)
    data = read_texts(source, TableConfig(text=text, label=label, empty="skip", **written))
    classes = np.array([-1 if each.label is None else each.label for each in data.examples])
    count = len(np.unique(classes))
    if count < 2:
        raise UserError(f"{source} has {count} class in column {label!r}; at least 2 are needed")
    texts = [each.text for each in data.examples]
    vectors = text_vectors(model, texts, "document", normalize=False, cuts=cuts, advance=advance)
    scores = {}
    for width in widths:
        own = unit(vectors[:, :width])
        found = [v_measure(classes, k_means(own, count, seed)) for seed in range(CLUSTERINGS)]
        scores[f"{width}"] = {"v_measure": float(np.mean(found)), "deviation": float(np.std(found))}
    counts = {"texts": len(texts), "classes": count}
    return {**counts, "scores": scores, "warning": cuts.warning()}


def score_lines(result: Result) -> list[str]:
    """Format a result as a table."""
    counts = ", ".join(
        f"{count:,} {name}" for name, count in result.items() if name not in ("scores", "warning")
    )
    rows: Mapping[str, Mapping[str, float]] = result["scores"]
    names = [*next(iter(rows.values()))]
    cells = [[name, *(f"{row[metric]:.4f}" for metric in names)] for name, row in rows.items()]
    return [counts, *table_lines([["numbers of a vector", *names], *cells])]


def _widths(model: SavedModel, dimensions: Sequence[int]) -> list[int]:
    """Return the widths to score, descending, the whole one first."""
    whole = model.config.hidden_dim
    for width in dimensions:
        if not 1 <= width <= whole:
            raise UserError(f"--dimensions names {width}; the vectors have {whole} numbers")
    return sorted({whole, *dimensions}, reverse=True)


def _named(collection: Collection, numbers: Iterable[np.ndarray]) -> dict[str, list[str]]:
    """Return the rankings by ids, without the query's own id."""
    ids = [*collection.documents]
    return {
        query: [ids[number] for number in row if ids[number] != query]
        for query, row in zip(collection.queries, numbers, strict=True)
    }


def _second_pass(
    reranker: Reranker, collection: Collection, ranked: Mapping[str, Sequence[str]],
    candidates: int, cuts: Cuts, advance: Advance,
) -> dict[str, list[str]]:  # fmt: skip
    pairs = [(query, id) for query, ranking in ranked.items() for id in ranking[:candidates]]
    scores: Float[np.ndarray, " N"] = reranker.scores(
        [collection.queries[query] for query, _ in pairs],
        [collection.documents[id] for _, id in pairs],
        cuts=cuts, advance=advance,
    )  # fmt: skip
    found, at = {}, 0
    for query, ranking in ranked.items():
        first = ranking[:candidates]
        found[query] = [*reranked(scores[at : at + len(first)], first), *ranking[len(first) :]]
        at += len(first)
    return found

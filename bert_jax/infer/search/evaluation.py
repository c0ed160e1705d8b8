"""Evaluation of text vectors on labelled data, at full width and cut to fewer dimensions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.data.corpus.overlap.ngrams import normalised_words
from bert_jax.errors import UserError
from bert_jax.infer.embed import Embedder, Kind, text_vectors
from bert_jax.infer.exact_search import top_k
from bert_jax.infer.predictor import Cuts
from bert_jax.infer.search.index import Reranker, reranked
from bert_jax.model.embedding import PLAIN
from bert_jax.tasks.config import TableConfig
from bert_jax.tasks.retrieval.bm25 import BM25
from bert_jax.tasks.retrieval.collection import Collection
from bert_jax.tasks.retrieval.metrics import DEPTH, k_means, ranking_scores, unit, v_measure
from bert_jax.tasks.text.metrics import correlations
from bert_jax.tasks.text.tables import class_name, read_labelled, read_texts
from bert_jax.terminal import table_lines

CLUSTERINGS = 10
"""Number of runs of k-means, each with different initial centres."""

Result = dict[str, Any]
"""JSON object: sizes of the data; "scores" by width or method and by metric; "warning" of cuts."""


@dataclass
class Evaluation:
    """Evaluator of a model's text vectors, at full width and cut to fewer dimensions."""

    model: SavedModel
    """Model from `forward.on_device`."""
    dimensions: Sequence[int]
    """Widths to score in addition to the full width."""
    advance: Callable[[int], object]
    """Function that is called after each part of the texts with the number of texts in the part."""

    def __post_init__(self) -> None:
        self._unit = (lambda each: each) if (self.model.embedding or PLAIN).is_sparse else unit
        asked = [Embedder(self.model, dimensions=each) for each in (None, *self.dimensions)]
        self._widths = sorted({embedder.width for embedder in asked}, reverse=True)
        self._cuts, self._worse = Cuts(), ""

    def retrieval(
        self, collection: Collection, reranker: Reranker | None = None, candidates: int = 100
    ) -> Result:
        """Rank the documents for each query by cosine and, for comparison, by BM25; score both.

        Documents with equal cosines keep the order of the corpus. If a query and a document
        have the same id, the ranking of this query leaves out the document, as in BEIR. A reranker
        reorders the first `candidates` documents of the ranking at full width.
        """
        texts, queries = [*collection.documents.values()], [*collection.queries.values()]
        known, asked = self._vectors(texts, "document"), self._vectors(queries, "query")
        scores: dict[str, dict[str, float]] = {}
        ranked: dict[str, list[str]] = {}
        for width in self._widths:
            vectors = self._unit(asked[:, :width]), self._unit(known[:, :width])
            _, numbers = top_k(*vectors, DEPTH + 1)
            rankings = _named(collection, numbers)
            ranked = ranked or rankings
            scores[f"{width}"] = ranking_scores(rankings, collection.relevant)
        if reranker is not None:
            pairs = [(query, id) for query, row in ranked.items() for id in row[:candidates]]
            found: Float[np.ndarray, " N"] = reranker.scores(
                [collection.queries[query] for query, _ in pairs],
                [collection.documents[id] for _, id in pairs],
                cuts=self._cuts, advance=self.advance,
            )  # fmt: skip
            second, at = {}, 0
            for query, row in ranked.items():
                first = row[:candidates]
                own = found[at : at + len(first)]
                second[query] = [*reranked(own, first), *row[len(first) :]]
                at += len(first)
            after = scores[f"reranked {candidates}"] = ranking_scores(second, collection.relevant)
            if after["ndcg@10"] <= scores[f"{self._widths[0]}"]["ndcg@10"]:
                self._worse = "the reranker does not beat its first stage (nDCG@10)"
        words = BM25(map(normalised_words, texts))
        shared = [words.ranked(normalised_words(query), DEPTH + 1) for query in queries]
        scores["bm25"] = ranking_scores(_named(collection, shared), collection.relevant)
        return self._result(scores, documents=len(texts), queries=len(queries))

    def similarity(self, source: str, columns: Sequence[str], **written: Any) -> Result:
        """Correlate the cosines of text pairs with human scores.

        `columns` names three columns of the table `source`: first text (a query), second text (a
        document) and score. `written` has fields of `TableConfig` such as `header`. Raise a
        UserError if the file or a column cannot be read, or there are no scores.
        """
        fields: dict[str, Any] = dict(zip(("text", "text_pair", "label"), columns, strict=True))
        table = TableConfig(**fields, problem_type="regression", empty="skip", **written)
        examples = read_labelled(source, table, None).examples
        wanted = np.array([each.label for each in examples], np.float64)
        asked = self._vectors([each.text for each in examples], "query")
        known = self._vectors([each.text_pair or "" for each in examples], "document")
        scores = {}
        for width in self._widths:
            pairs = self._unit(asked[:, :width]).astype(np.float64), self._unit(known[:, :width])
            scores[f"{width}"] = correlations(wanted, np.multiply(*pairs).sum(1))
        return self._result(scores, pairs=len(examples))

    def clustering(self, source: str, columns: Sequence[str], **written: Any) -> Result:
        """Compare k-means clusters of text vectors with labelled classes, by V-measure.

        There are as many clusters as classes. The scores are the mean and standard deviation over
        `CLUSTERINGS` runs. `columns` name the columns of the text (a document) and of the class.
        `source` and `written` are as in `similarity`. Raise a UserError if the file or a column
        cannot be read, or there is only one class.
        """
        text, label = columns
        data = read_texts(
            source, TableConfig(text=text, empty="skip", **written), labelled=False, more=[label],
            texts_of=lambda origin, values: [class_name(origin, label, *values)],
        )  # fmt: skip
        names, classes = np.unique([each.more[0] for each in data.examples], return_inverse=True)
        if (count := len(names)) < 2:
            raise UserError(
                f"{source} has {count} class in column {label!r}; name a column with at least 2"
            )
        vectors = self._vectors([each.text for each in data.examples], "document")
        scores = {}
        for width in self._widths:
            own = unit(vectors[:, :width])
            found = [v_measure(classes, k_means(own, count, seed)) for seed in range(CLUSTERINGS)]
            mean, deviation = float(np.mean(found)), float(np.std(found))
            scores[f"{width}"] = {"v_measure": mean, "deviation": deviation}
        return self._result(scores, texts=len(data.examples), classes=count)

    def _vectors(self, texts: Sequence[str], kind: Kind) -> Float[np.ndarray, "N D"]:
        return text_vectors(
            self.model, texts, kind, normalize=False, cuts=self._cuts, advance=self.advance
        )

    def _result(self, scores: Mapping[str, Mapping[str, float]], **counts: int) -> Result:
        warning = "; ".join(filter(None, (self._cuts.warning(), self._worse)))
        return {**counts, "scores": scores, "warning": warning}


def score_lines(result: Result) -> list[str]:
    """Format a result as a table."""
    counts = ", ".join(
        f"{count:,} {name}" for name, count in result.items() if name not in ("scores", "warning")
    )
    rows: Mapping[str, Mapping[str, float]] = result["scores"]
    names = [*next(iter(rows.values()))]
    cells = [[name, *(f"{row[metric]:.4f}" for metric in names)] for name, row in rows.items()]
    return [counts, *table_lines([["dimensions", *names], *cells])]


def _named(collection: Collection, numbers: Iterable[np.ndarray]) -> dict[str, list[str]]:
    """Return the ids of each query's `DEPTH` best documents, without the id of the query."""
    ids = [*collection.documents]
    return {
        query: [ids[number] for number in row if ids[number] != query][:DEPTH]
        for query, row in zip(collection.queries, numbers, strict=True)
    }

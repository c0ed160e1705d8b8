"""Vectors of texts that belong together: pairs, scored pairs, classes, single texts."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from bert_jax.errors import UserError
from bert_jax.tasks.config import EMBEDDING_METRICS, EmbeddingTaskConfig
from bert_jax.tasks.embedding.sources import GroupData, group_rows, open_groups, read_dev_groups
from bert_jax.tasks.examples import LabelSet
from bert_jax.tasks.reports.intervals import Grounds, means
from bert_jax.tasks.retrieval.metrics import chance, search_scores, unit
from bert_jax.tasks.task import Examined, HeadKind, LabelSpec, Outputs, Split, Task
from bert_jax.tasks.text.metrics import METRICS, text_grounds


class EmbeddingSplit(Split):
    """Texts of one file."""

    _task: "EmbeddingTask"
    _data: GroupData
    LABELS = "scores"

    def __init__(self, task: "EmbeddingTask", data: GroupData) -> None:
        self._task, self._data = task, data
        rows, cut = group_rows(data, task.config, task.tokenizer)
        super().__init__(data, rows, EMBEDDING_METRICS[data.kind], cut)

    @cached_property
    def constant_score(self) -> float:
        """Score of randomly ordered documents, or of one constant for all pairs; NaN unlabelled."""
        if self._data.kind in ("scores", "classes") and self._data.truth is None:
            return math.nan
        if self._data.kind == "scores":
            return 0.0
        _, documents, relevant, hidden = self._search
        counts = np.array([len(found) for found in relevant if len(found)])
        # A query's own text is not among the documents that it can find.
        return chance(self._task.metric, counts, len(documents) - (min(hidden) >= 0))

    @cached_property
    def _search(
        self,
    ) -> tuple[Int64[np.ndarray, " Q"], Int64[np.ndarray, " N"], list[list[int]], list[int]]:
        """Return queries, documents, and the answers to each query.

        Returns positions of the queries and of the documents among all rows (N G), the numbers of
        the documents that answer each query, and the number of each query's own text, or -1.
        """
        group = self.rows.group
        assert self.rows.text_ids is not None
        ids = self.rows.text_ids.reshape(-1, group)
        places = np.arange(ids.size).reshape(ids.shape)
        there = self.rows.row_lengths.reshape(ids.shape) > 0
        first = 1 if group > 1 else 0
        known, at = np.unique(ids[:, first:][there[:, first:]], return_index=True)
        documents = places[:, first:][there[:, first:]][at]
        number_of = {int(text): number for number, text in enumerate(known)}
        queries, at = np.unique(ids[:, 0], return_index=True)
        relevant: list[list[int]] = [[] for _ in queries]
        query_of = {int(text): number for number, text in enumerate(queries)}
        if group > 1:
            for query, document in {(int(q), int(d)) for q, d in ids[:, :2]}:
                relevant[query_of[query]].append(number_of[document])
        elif self._data.truth is not None:
            classes = np.array(self._data.truth)[at]
            for query, label in enumerate(classes):
                alike = np.flatnonzero(classes == label)
                relevant[query] = [int(n) for n in alike if n != query]
        hidden = [number_of.get(int(text), -1) for text in queries]
        own = zip(hidden, relevant, strict=True)
        hidden = [-1 if number in found else number for number, found in own]
        return places[at, 0], documents, relevant, hidden

    def _score(self, outputs: Outputs, saved: Mapping[str, float] | None) -> dict[str, float]:
        vectors = self._vectors(outputs)
        if self._data.kind == "scores":
            truth, found = np.array(self._gold, np.float32), self._cosines(vectors)
            return {name: METRICS[name](truth, found) for name in self._score_names}
        scores = self._of_queries(vectors)
        return {name: float(scores[name].mean()) for name in self._score_names}

    def _examine(self, outputs: Outputs, scores: Mapping[str, float]) -> Examined:
        """Return the data for intervals over pairs or queries."""
        vectors = self._vectors(outputs)
        if self._data.kind == "scores":
            truth, cosines = np.array(self._gold, np.float32), self._cosines(vectors)
            return Examined(text_grounds("regression", truth, cosines, self.units), {})
        values = self._of_queries(vectors)
        each = np.stack([values[name] for name in self._score_names], axis=1)
        units, right = np.arange(len(each)), each.mean(axis=1)
        found = Grounds(means(self._score_names, each), units, right)
        return Examined(found, {"queries": len(each), "units": ["queries", len(each)]})

    def _of_queries(
        self, vectors: Float[np.ndarray, "N G D"]
    ) -> dict[str, Float[np.ndarray, " q"]]:
        """Return the scores of each query that has an answer."""
        queries, documents, relevant, hidden = self._search
        if not any(relevant):
            raise UserError(
                f"{self.name} has no two texts of a class, so no text has one to find; give texts "
                "with a class that occurs twice"
            )
        flat = vectors.reshape(-1, vectors.shape[-1])
        return search_scores(flat[queries], flat[documents], relevant, hidden)

    def _entries(self, outputs: Outputs, scores: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return the cosine of the two texts of each row."""
        if self.rows.group == 1:
            raise UserError(
                f"{self.name} has texts alone, and no pairs to compare; `bert-jax embed` writes "
                "the vectors of texts"
            )
        return [{"cosine": round(float(x), 6)} for x in self._cosines(self._vectors(outputs))]

    @staticmethod
    def _cosines(vectors: Float[np.ndarray, "N G D"]) -> Float[np.ndarray, " N"]:
        pairs = unit(vectors[:, :2].astype(np.float64))
        return (pairs[:, 0] * pairs[:, 1]).sum(axis=-1)

    def _vectors(self, outputs: Outputs) -> Float[np.ndarray, "N G D"]:
        return self._stacked(outputs, len(self.rows), self.rows.group, dtype=np.float32)


class EmbeddingTask(Task[EmbeddingTaskConfig]):
    """A task of an embedding model."""

    SPLIT = EmbeddingSplit
    objective: HeadKind = "embedding"
    num_outputs = 0

    @classmethod
    def _read(cls, config: EmbeddingTaskConfig) -> tuple[LabelSpec, Sequence[GroupData]]:
        found = open_groups(config)
        labels = found[0].labels
        return LabelSpec(() if labels is None else labels.names), found

    def _read_other(self, source: str, labelled: bool) -> GroupData:
        labels = LabelSet(self.spec.labels) if self.spec.labels and labelled else None
        return read_dev_groups(source, self.config, labels, labelled=labelled)

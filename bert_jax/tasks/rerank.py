"""Rerankers, which read a query and a document together and give them a score.

Source: Nogueira and Cho 2019 (Passage Re-ranking with BERT).
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.tasks.choice import grouped_rows
from bert_jax.tasks.embedding import EmbeddingSplit, EmbeddingTask, GroupData, wanted_scores
from bert_jax.tasks.examples import counted
from bert_jax.tasks.retrieval.metrics import chance, query_scores
from bert_jax.tasks.task import Examined, HeadKind, Outputs, Split, SplitScores


class RerankSplit(EmbeddingSplit):
    """Queries of one file, each with its candidates: the document and the negatives of a row."""

    def __init__(self, task: "RerankTask", data: GroupData) -> None:
        self._task, length = task, task.config.length
        if not task.config.negatives:
            raise UserError(
                "task.negatives is (); a reranker needs a list of negatives in each row"
            )
        groups = [(each, each.texts[1:]) for each in data.examples]
        self._sizes = [len(texts) for _, texts in groups]
        rows, cut = grouped_rows(groups, task.tokenizer, length)
        if data.truth is not None:
            self.baseline = "the first stage (task.scores)"
        rows = replace(rows, labels=wanted_scores(data.examples, rows.group))
        what = f"queries of more than {length} tokens together with a candidate, cut there"
        Split.__init__(self, data, rows, task.metrics, counted(what, cut))

    @cached_property
    def constant_score(self) -> float:
        """Score of the ranking by `task.scores` or, without such scores, of a random ranking."""
        if self._data.truth is not None:
            return self.score(wanted_scores(self._examples, self.rows.group))[self._task.metric]
        one = np.ones(1, np.int64)
        return float(np.mean([chance(self._task.metric, one, size) for size in self._sizes]))

    def _examine(self, outputs: Outputs, scores: SplitScores) -> Examined:
        # Among equal scores, the document (candidate 0) ranks last, so that ties do not help it.
        ranked = {
            n: np.lexsort((-np.arange(size), -row[:size])).tolist()
            for n, (row, size) in enumerate(zip(outputs, self._sizes, strict=True))
        }
        return self._graded(query_scores(ranked, {n: {0: 1.0} for n in ranked}))

    def _entries(self, outputs: Outputs, scores: SplitScores) -> list[dict[str, Any]]:
        pairs = zip(outputs, self._sizes, strict=True)
        return [{"scores": np.round(row[:size], 6).tolist()} for row, size in pairs]


class RerankTask(EmbeddingTask):
    """A reranking task, configured by `kind: rerank`."""

    SPLIT = RerankSplit
    objective: HeadKind = "ranking"
    num_outputs = 1

"""The section `task` for pairs of queries and documents: vectors and rerankers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from bert_jax.config.bounds import AtLeast, Count, Or
from bert_jax.errors import UserError
from bert_jax.tasks.fields import TaskConfig, WrittenConfig

PairKind = Literal["pairs", "scores", "classes", "texts"]
ListLoss = Literal["contrast", "margin_mse", "kl", "list_net"]
"""Loss of a query's scores for its own documents (see `objectives.losses.list_losses`)."""

RANKING_METRICS = ("ndcg@10", "mrr@10", "recall@100", "map")
EMBEDDING_METRICS: Mapping[PairKind, tuple[str, ...]] = {
    "pairs": RANKING_METRICS, "scores": ("spearman", "pearson"), "classes": RANKING_METRICS,
    "texts": RANKING_METRICS,
}  # fmt: skip
"""Metrics that can select the best checkpoint, by kind of rows; the first is the default."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingTaskConfig(WrittenConfig):
    """Settings of the task kind `embedding`: vectors that are similar if texts belong together.

    A column is given by its name or, in CSV and TSV, by its number (the first column is 1).
    """

    LENGTH: ClassVar = 256
    FILES: ClassVar = "a file of texts (.csv, .tsv, .jsonl, .parquet)"
    RENAMED: ClassVar = {"kind": "rows", "dev_kind": "dev_rows"}

    kind: str = "embedding"
    rows: PairKind = "pairs"
    """Content of a row. pairs: a query and a document that answers the query; the columns named in
    `negatives` add hard negatives. scores: two texts and their similarity. classes: a text and its
    class. texts: one text, which is compared with itself under different dropout (SimCSE)."""
    dev_rows: Literal["auto", "pairs", "scores"] = "auto"
    """Content of a row in the dev and test files. auto means the same as `rows`. If that is texts,
    each text is cut in two: the first half is a query, and the second half is its document. With
    rows=classes or without a dev file, dev_rows must be auto."""
    query: str = "query"
    """Column of the query, or of the first text (pairs, scores)."""
    document: str = "document"
    """Column of the document, or of the second text (pairs, scores)."""
    negatives: tuple[str, ...] = ()
    """Columns of documents that do not answer the query (pairs). An entry is a text or nothing; in
    JSON lines and parquet it may also be a list of texts."""
    max_negatives: Count = 8
    """Largest number of hard negatives read from a row; further negatives are left out. All rows
    are padded to the largest number of negatives in the file, which takes memory."""
    score: str = "score"
    """Column of the score; a higher score means more similar texts (scores)."""
    text: str = "text"
    """Column of the text (classes, texts)."""
    label: str = "label"
    """Column of the class (classes)."""
    query_prefix: str = ""
    """Text to put before each query, such as "query: ", in training and in every later use."""
    document_prefix: str = ""
    """Text to put before each document, or before each text if `rows` is classes or texts."""
    loss: ListLoss = "contrast"
    """Loss (pairs). contrast: the query's document against all documents of the batch, or, if kind
    is rerank, against the row's negatives. margin_mse, kl and list_net compare the scores of the
    row's own documents with `scores`, by differences or as distributions."""
    scores: str = ""
    """Column with a teacher's scores of the row's document and of each negative, a list of numbers
    (pairs). If empty, the document has 1 and negatives have 0. With kind=rerank, the scores of the
    dev rows are those of the first stage, which the reranker must beat."""
    max_query: Annotated[int, AtLeast(8), Or(0)] = 0
    """Largest number of tokens in a query, including special tokens. 0 means `task.max_length`,
    which also limits documents. If queries are short, a low limit saves time."""

    def __post_init__(self) -> None:
        """Raise a UserError for options that do not apply to the kind of rows."""
        super().__post_init__()
        if self.negatives and self.rows != "pairs":
            raise UserError(
                f"task.negatives is {self.negatives}; only pairs have hard negatives, but "
                f"task.rows is {self.rows!r}"
            )
        listed, rerank = self.loss != "contrast" or self.scores, self.kind == "rerank"
        if (listed or rerank) and (self.rows != "pairs" or not self.negatives):
            raise UserError(
                f"task.kind is {self.kind!r}, task.loss {self.loss!r} and task.scores "
                f"{self.scores!r}; they need task.rows 'pairs', not {self.rows!r}, and columns in "
                "task.negatives"
            )
        if rerank and (self.query_prefix or self.document_prefix or self.max_query):
            raise UserError(
                "task.query_prefix, document_prefix and max_query are for vectors, but task.kind "
                "is 'rerank'; leave them out"
            )
        if self.dev_rows != "auto" and (self.rows == "classes" or not self.dev):
            reason = "task.rows is 'classes'" if self.rows == "classes" else "task.dev is empty"
            raise UserError(f"task.dev_rows is {self.dev_rows!r}, but {reason}; leave it at 'auto'")

    @property
    def kind_of_dev(self) -> PairKind:
        """Content of a dev row: `dev_rows`, or `rows` if `dev_rows` is auto."""
        return self.rows if self.dev_rows == "auto" else self.dev_rows

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of the dev rows."""
        return EMBEDDING_METRICS[self.kind_of_dev]

    @property
    def query_length(self) -> int:
        """Largest number of tokens in a query, including special tokens."""
        return min(self.max_query or self.length, self.length)

    def with_folds(self) -> TaskConfig:
        """Raise a UserError: embeddings are scored on all dev texts at once, never in folds."""
        raise UserError(
            f"task.folds is {self.folds}, but embeddings are scored by a search among all dev "
            "texts, not example by example; leave folds out, and name a file in task.dev"
        )


@dataclass(frozen=True, kw_only=True)
class RerankConfig(EmbeddingTaskConfig):
    """Settings of the task kind `rerank`: a score of a query and a document that are read together.

    Rows are pairs with negatives, as for `embedding`; a row's negatives are also its candidates.
    """

    kind: str = "rerank"
    negatives: tuple[str, ...] = ("negatives",)

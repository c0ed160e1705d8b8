"""Texts that belong together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from bert_jax.config.bounds import AtLeast, Count, Or
from bert_jax.errors import UserError
from bert_jax.tasks.kinds.fields import TaskConfig
from bert_jax.tasks.kinds.table import WrittenConfig

PairKind = Literal["pairs", "scores", "classes", "texts"]

RANKING_METRICS = ("ndcg@10", "mrr@10", "recall@100", "map")
EMBEDDING_METRICS: Mapping[PairKind, tuple[str, ...]] = {
    "pairs": RANKING_METRICS, "scores": ("spearman", "pearson"), "classes": RANKING_METRICS,
    "texts": RANKING_METRICS,
}  # fmt: skip
"""Metrics that can choose a checkpoint, the default first."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingTaskConfig(WrittenConfig):
    """Texts that belong together.

    A column is a name; without a header, its number from 1.
    """

    LENGTH: ClassVar = 256
    FILES: ClassVar = "a file of texts (.csv, .tsv, .jsonl, .parquet)"
    RENAMED: ClassVar = {"kind": "rows", "dev_kind": "dev_rows"}

    kind: str = "embedding"
    rows: PairKind = "pairs"
    """Content of a row. pairs: a query and a document that answers it, with hard negatives where
    `negatives` names columns. scores: two texts and their similarity. classes: a text and its
    class. texts: one text, which is compared with itself under other dropout (SimCSE)."""
    dev_rows: Literal["auto", "pairs", "scores"] = "auto"
    """Rows of the dev and test files where `rows` is pairs, scores or texts. auto: as `rows`; for
    texts, the first half of each text searches for the second half."""
    query: str = "query"
    """Column of the query, or of the first text (pairs, scores)."""
    document: str = "document"
    """Column of the document, or of the second text (pairs, scores)."""
    negatives: tuple[str, ...] = ()
    """Columns of documents that do not answer the query (pairs): a text, nothing, or in JSON lines
    and parquet also a list of texts."""
    max_negatives: Count = 8
    """Number of hard negatives read from a row, from the first on. Every row of a batch takes the
    space of the row with the most negatives."""
    score: str = "score"
    """Column of the score: the higher, the more alike (scores)."""
    text: str = "text"
    """Column of the text (classes, texts)."""
    label: str = "label"
    """Column of the class (classes)."""
    query_prefix: str = ""
    """Text put before each query, in training and in every later use, such as "query: "."""
    document_prefix: str = ""
    """Text put before each document, and before each text of rows classes and texts."""
    max_query: Annotated[int, AtLeast(8), Or(0)] = 0
    """Largest number of tokens in a query, special tokens included; 0: `task.max_length`, the limit
    of a document. Where queries are short, a low number saves time."""

    def __post_init__(self) -> None:
        """Refuse options that do not apply to the kind of rows."""
        super().__post_init__()
        if self.negatives and self.rows != "pairs":
            raise UserError(
                f"task.negatives is {self.negatives}; only pairs have hard negatives, and "
                f"task.rows is {self.rows!r}"
            )
        if self.dev_rows != "auto" and (self.rows == "classes" or not self.dev):
            reason = "task.rows is 'classes'" if self.rows == "classes" else "dev names no file"
            raise UserError(f"task.dev_rows is {self.dev_rows!r}, and {reason}; leave it at 'auto'")

    @property
    def kind_of_dev(self) -> PairKind:
        """Kind of the dev rows."""
        return self.rows if self.dev_rows == "auto" else self.dev_rows

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of the dev rows."""
        return EMBEDDING_METRICS[self.kind_of_dev]

    @property
    def query_length(self) -> int:
        """Largest number of tokens in a query, special tokens included."""
        return min(self.max_query or self.length, self.length)

    def with_folds(self) -> TaskConfig:
        """Refuse folds."""
        raise UserError(
            f"task.folds is {self.folds}, but embeddings are scored by a search among all dev "
            "texts, not example by example; leave folds out, and name task.dev"
        )

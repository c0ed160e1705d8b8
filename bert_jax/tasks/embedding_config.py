"""The section `task.embedding`: texts that belong together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from bert_jax.config.bounds import Above, AtLeast, Below, Bounded, Count, Or
from bert_jax.errors import UserError
from bert_jax.tasks.tables.delimited import TableFormat

PairKind = Literal["pairs", "scores", "classes", "texts"]

RANKING_METRICS = ("ndcg@10", "mrr@10", "recall@100", "map")
EMBEDDING_METRICS: Mapping[PairKind, tuple[str, ...]] = {
    "pairs": RANKING_METRICS, "scores": ("spearman", "pearson"), "classes": RANKING_METRICS,
    "texts": RANKING_METRICS,
}  # fmt: skip
"""Metrics that can choose a checkpoint, the default first."""


@dataclass(frozen=True)
class EmbeddingTaskConfig(Bounded, section="task.embedding"):
    """Texts that belong together: CSV, TSV, JSON lines, parquet or tfds:NAME:SPLIT.

    A column is a name; without a header, its number from 1.
    """

    train: str = ""
    """File to train on."""
    dev: str = ""
    """File to choose the best checkpoint by; empty holds rows of the training file out."""
    test: str = ""
    """File of the kind of the dev rows that is scored once, after training; empty: none."""
    dev_rate: Annotated[float, Above(0), Below(1)] = 0.1
    """Share of the distinct documents (of classes and texts, of the texts) that is held out where
    dev is empty; rows with the same document go together."""
    kind: PairKind = "pairs"
    """pairs: a query and a document that answers it, with hard negatives where `negatives` names
    columns. scores: two texts and how alike they are. classes: a text and its class. texts: texts
    alone, each of which is compared with itself under other dropout (SimCSE)."""
    dev_kind: Literal["auto", "pairs", "scores"] = "auto"
    """Kind of the dev file of pairs, scores and texts. auto: as `kind`; of texts, the second half
    of a text is to be found by the first."""
    query: str = "query"
    """Column of the query, or of the first text (pairs, scores)."""
    document: str = "document"
    """Column of the document, or of the second text (pairs, scores)."""
    negatives: tuple[str, ...] = ()
    """Columns of documents that do not answer the query (pairs): a text, nothing, or in JSON lines
    and parquet also a list of texts."""
    max_negatives: Count = 8
    """Hard negatives of a row that are read; the first ones. Every row of a batch has room for as
    many as the richest row has."""
    score: str = "score"
    """Column of the score: the higher, the more alike (scores)."""
    text: str = "text"
    """Column of the text (classes, texts)."""
    label: str = "label"
    """Column of the class (classes)."""
    id: str = ""
    """Column that names the rows; empty numbers them from 0."""
    query_prefix: str = ""
    """Text put before each query, in training and ever after, such as "query: "."""
    document_prefix: str = ""
    """Text put before each document, and before texts of classes and texts."""
    max_query: Annotated[int, AtLeast(8), Or(0)] = 0
    """Tokens of a query, special tokens included; 0: as many as of a document, which
    `task.max_length` says. Where queries are short, a low number saves time."""
    metric: str = ""
    """Metric that chooses the best checkpoint. pairs, classes, texts: ndcg@10, mrr@10, recall@100
    or map, of the dev rows' documents. scores: spearman or pearson. Empty: the first of these."""
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "tfds"] = "auto"
    """Format of the files; auto goes by the suffix."""
    header: bool | None = None
    """Whether line 1 of a CSV or TSV file has the names of the columns; None: it has where columns
    are named, and it must be said where they are numbered."""
    quoting: bool | None = None
    """Whether a field may stand in double quotes; None: in CSV yes, in TSV no."""
    delimiter: str = ""
    """Character between the fields; empty: a comma in CSV, a tab in TSV."""
    ragged: Literal["fail", "skip"] = "fail"
    """Treatment of rows with more or fewer fields than the first."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        where = self.SECTION
        if self.negatives and self.kind != "pairs":
            raise UserError(
                f"{where}.negatives is {self.negatives}; only pairs have hard negatives, and kind "
                f"is {self.kind!r}"
            )
        if self.dev_kind != "auto" and (self.kind == "classes" or not self.dev):
            reason = "kind is 'classes'" if self.kind == "classes" else "dev names no file"
            raise UserError(
                f"{where}.dev_kind is {self.dev_kind!r}, and {reason}; leave it at 'auto'"
            )
        if self.metric and self.metric not in self.metrics:
            raise UserError(
                f"{where}.metric is {self.metric!r}; for dev rows of kind {self.kind_of_dev!r} it "
                f"is one of {', '.join(self.metrics)}"
            )

    @property
    def kind_of_dev(self) -> PairKind:
        """Kind of the dev rows."""
        return self.kind if self.dev_kind == "auto" else self.dev_kind

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of the dev rows."""
        return EMBEDDING_METRICS[self.kind_of_dev]

    @property
    def file_format(self) -> TableFormat:
        """How the files are written."""
        return TableFormat(self.format, self.header, self.quoting, self.delimiter, self.ragged)

"""The section `task` of a fine-tuning configuration: each kind of task, with its fields."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from typing_extensions import override

from bert_jax.config.bounds import AtLeast, Bounded, Count, Distinct, Natural, Or
from bert_jax.errors import UserError
from bert_jax.tasks.fields import FileTaskConfig, ProblemType, WrittenConfig
from bert_jax.tasks.fields import TaskConfig as TaskConfig
from bert_jax.tasks.glue import GlueConfig as GlueConfig
from bert_jax.tasks.long_texts import LongTexts, Pooling
from bert_jax.tasks.retrieval.metrics import EMBEDDING_METRICS, ListLoss, PairKind
from bert_jax.tasks.skew import SkewConfig
from bert_jax.tokenization.tokenizer import MAX_SPECIAL

METRICS: dict[ProblemType, tuple[str, ...]] = {
    "single_label": ("accuracy", "f1", "macro_f1", "matthews"),
    "multi_label": ("f1", "macro_f1", "accuracy"),
    "regression": ("pearson", "spearman"),
}
"""Metrics that can select the best checkpoint, by problem type; the first is the default."""
_SEVERAL = "which works only with task.problem_type='multi_label'"


@dataclass(frozen=True, kw_only=True)
class TableConfig(SkewConfig, WrittenConfig):
    """Settings of the task kind `table`: a table of texts with labels.

    A column is given by its name or, in CSV and TSV, by its number (the first column is 1).
    """

    FILES: ClassVar = "a file with texts and labels (.csv, .tsv, .jsonl, .parquet)"
    RENAMED: ClassVar = {"kind": "problem_type"}

    problem_type: ProblemType = "single_label"
    """Kind of prediction for each row: one label, any number of labels, or a score."""
    text: str = "text"
    """Column of the text."""
    text_pair: str = ""
    """Column of the second text of a pair. If empty, each row has a single text."""
    label: str = "label"
    """Column of the label."""
    label_columns: tuple[str, ...] = ()
    """Columns of zeros and ones, one column for each label; they replace `label` (multi_label)."""
    labels: tuple[str, ...] = ()
    """Labels in the order of the outputs. If empty, the training file's labels are used, sorted."""
    separator: str = ","
    """Separator between the labels of a row (multi_label)."""
    group: str = ""
    """Column of each row's group, such as an author. When rows are held out, groups stay together,
    and both parts get the same mix of labels. If empty, only equal texts stay together."""
    empty: Literal["fail", "skip", "keep"] = "keep"
    """Treatment of rows with an empty text; a warning counts the rows skipped or kept."""
    long: Literal["cut", "head_tail", "windows"] = "cut"
    """Treatment of texts of more than task.max_length tokens. cut: read only the beginning.
    head_tail: fill a quarter of the row with the beginning and the rest with the end (Sun et al.
    2019). windows: read everything in overlapping rows; for a pair, each row has a part of the
    longer text and the beginning of the shorter text, which takes at most half of the row. Every
    window is trained on its text's label. The loss weights of a text's windows sum to 1."""
    window_pooling: Pooling = "mean"
    """Rule that combines the logits of a text's windows (long=windows). mean: their mean. max: the
    highest logit of each class. first_last: the mean of the first and the last window."""
    window_stride: Natural = 0
    """Number of tokens from the start of one window to the start of the next (long=windows), at
    most a window's length. 0 means half a window."""
    calibrate: bool = False
    """Whether to divide logits by a temperature, fitted to the dev data, so that probabilities tell
    how often predictions are right (Guo et al. 2017). The predicted classes do not change."""
    thresholds: Literal["half", "tuned"] = "half"
    """Probability above which a label is predicted (multi_label). half: 0.5. tuned: for each label,
    the threshold that gives the label's highest F1 on the dev data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, several = self.problem_type, self.problem_type == "multi_label"
        if number := kind == "regression":
            self.check_has_classes("task.problem_type 'regression'")
        windowed = self.window_stride or self.window_pooling != "mean"
        for is_wrong, message in (
            (number and self.calibrate, "calibrate is set, but a regression has no probabilities"),
            (number and self.window_pooling == "max",
             "window_pooling is 'max', the highest logit of each class, but a regression has no "
             "classes; choose mean or first_last"),
            (number and self.labels, f"labels is {self.labels}, but a regression has no labels"),
            (kind == "single_label" and len(self.labels) == 1,
             f"labels is {self.labels}; expected at least 2 labels"),
            (self.label_columns and self.labels,
             "labels is set, but task.label_columns names the labels"),
            (self.label_columns and not several,
             f"label_columns is {self.label_columns}, {_SEVERAL}, not {kind!r}"),
            (several and not self.separator.strip(),
             f"separator is {self.separator!r}; expected a mark such as a comma"),
            (self.thresholds != "half" and not several,
             f"thresholds is {self.thresholds!r}, {_SEVERAL}, not {kind!r}"),
            (self.long != "windows" and windowed,
             f"window_pooling or task.window_stride is set, but task.long is {self.long!r}; set "
             "task.long to 'windows', or leave them out"),
        ):  # fmt: skip
            if is_wrong:
                raise UserError(f"task.{message}" + ("" if ";" in message else "; leave it out"))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of the problem type. With single_label, f1 requires exactly two labels."""
        return METRICS[self.problem_type]

    @property
    def long_texts(self) -> LongTexts:
        """Treatment of texts that do not fit in a row."""
        return LongTexts(self.long, self.window_pooling, self.window_stride)


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
    """Content of a dev or test row. auto means the same as `rows`; for rows=texts, a text is cut in
    two: the first half is a query, the second half its document. With rows=classes or without a
    dev file, dev_rows must be auto. With kind=rerank, dev_rows must not be scores."""
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
    """Loss (pairs). contrast: the query's document against all documents of the batch or, if kind
    is rerank, against the row's negatives. margin_mse (by differences), kl and list_net (as
    distributions) compare the scores of the row's own documents with `scores`."""
    scores: str = ""
    """Column with a teacher's scores of the row's document and of each negative, a list of numbers
    (pairs). If empty, the document has 1 and negatives have 0. With kind=rerank, the scores of the
    dev rows come from the first stage, which the reranker must beat."""
    max_query: Annotated[int, AtLeast(8), Or(0)] = 0
    """Largest number of tokens in a query, including special tokens. 0 means `task.max_length`,
    which also limits documents. If queries are short, a low limit saves time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = self.loss != "contrast" or self.scores
        if (listed or self.negatives) and (self.rows != "pairs" or not self.negatives):
            raise UserError(
                f"task.negatives is {self.negatives} and task.rows is {self.rows!r}; "
                "task.loss and task.scores need task.negatives, which need task.rows=pairs"
            )
        if self.kind == "rerank" and (self.query_prefix or self.document_prefix or self.max_query):
            raise UserError("task.*_prefix and max_query are for vectors, not kind 'rerank'")
        reason = "" if self.dev else "task.dev is empty"
        if self.rows == "classes":
            reason = "task.rows is 'classes'"
        elif self.kind == "rerank" and self.dev_rows == "scores":
            reason = "a reranker is scored on pairs"
        if self.dev_rows != "auto" and reason:
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
        raise UserError("task.folds cannot divide embeddings, which a search scores; set task.dev")


@dataclass(frozen=True)
class RerankTaskConfig(EmbeddingTaskConfig):
    """Settings of the task kind `rerank`: a score for each pair of query and document."""

    kind: str = "rerank"


@dataclass(frozen=True, kw_only=True)
class ChoiceConfig(FileTaskConfig):
    """Settings of the task kind `choice`: texts with several choices, one of them correct.

    Files are CSV, TSV, JSON lines, parquet or tfds:NAME:SPLIT; the default columns are SWAG's.
    """

    FILES: ClassVar = "a file of texts with choices (.csv, .tsv, .jsonl, .parquet)"
    METRICS: ClassVar = ("accuracy",)

    kind: str = "choice"
    text: str = "sent1"
    """Column of the text, a context or a question."""
    beginning: str = "sent2"
    """Column of a text with which every choice begins. If empty, choices stay as they are."""
    choices: Annotated[tuple[str, ...], Distinct(2)] = ("ending0", "ending1", "ending2", "ending3")
    """Columns of the choices, in their order."""
    label: str = "label"
    """Column that holds the name of the correct choice, one of `labels`."""
    labels: tuple[str, ...] = ()
    """Names of the choices in the column `label`, such as A,B,C,D. If empty, they are 0, 1, ..."""
    id: str = ""
    """Column of the rows' ids. If empty, rows are numbered from 0."""
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "tfds"] = "auto"
    """Format of the files; auto detects the format by the suffix of the file name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels and len(set(self.labels)) != len(self.choices):
            raise UserError(
                f"task.labels is {self.labels}; {len(self.choices)} names are needed, one for each "
                "of task.choices"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the choices, as written in the column `label`."""
        return self.labels or tuple(map(str, range(len(self.choices))))


@dataclass(frozen=True, kw_only=True)
class SquadConfig(FileTaskConfig):
    """Settings of the task kind `squad`: questions about texts, in SQuAD's JSON."""

    LENGTH: ClassVar = 384
    FILES: ClassVar = "a file in SQuAD's JSON"
    METRICS: ClassVar = ("f1", "exact")

    kind: str = "squad"
    misplaced: Literal["fail", "skip", "keep"] = "fail"
    """Treatment of answers whose text is not at the given offset. fail: raise an error. skip: drop
    these answers. keep: use them only for scoring. A warning counts the answers skipped or kept."""
    stride: Natural = 0
    """Number of tokens from one window's start to the next; 0 means a third of max_length."""
    max_question: Count = 64
    """Largest number of tokens in a question; longer questions are cut and counted in a warning."""
    num_best: Count = 20
    """Number of candidate answers kept for each question."""
    max_answer_tokens: Count = 30
    """Largest number of tokens in an answer."""
    rules: Literal["auto", "v1.1", "v2.0"] = "auto"
    """SQuAD's scoring rules. auto: v2.0 if a question in train or dev has no answer, else v1.1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.windows  # raises a UserError for wrong lengths

    @property
    def windows(self) -> "WindowOptions":
        """Lengths that determine how contexts are cut into windows."""
        try:
            return WindowOptions(self.length, self.stride or self.length // 3, self.max_question)
        except UserError as error:
            raise UserError(f"task: {error}") from None

    @override
    def fitted(self, max_positions: int) -> "SquadConfig":
        if self.max_length or self.length <= max_positions:
            return self
        question = self.max_question
        if question == SquadConfig.max_question:
            question = min(question, max_positions // 4)
        return replace(self, max_length=max_positions, max_question=question)


@dataclass(frozen=True)
class WindowOptions(Bounded):
    """Lengths, in tokens, of a long context's windows; the defaults are from `run_squad.py`.

    Raise a UserError if a length is below 1, or the stride is so large that windows leave gaps.
    """

    max_length: Count = 384
    """Largest number of tokens in a row, including special tokens."""
    stride: Count = 128
    """Tokens from one window's start to the next (in `transformers`, `stride` is the overlap)."""
    max_question: Count = 64
    """Largest number of tokens in a question; longer questions are cut and counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        room = self.max_length - self.max_question - MAX_SPECIAL
        if room < self.stride:
            raise UserError(
                f"max_length {self.max_length} leaves {max(room, 0)} tokens for the context, after "
                f"{self.max_question} tokens of the question and {MAX_SPECIAL} special tokens. "
                f"Windows at stride {self.stride} would skip tokens. Set max_length to at least "
                f"{self.max_question + MAX_SPECIAL + self.stride}, or lower stride or max_question"
            )


@dataclass(frozen=True, kw_only=True)
class TaggingConfig(SkewConfig, FileTaskConfig):
    """Settings of the task kind `tagging`: words with tags, such as named entities."""

    FILES: ClassVar = "a file of words with tags"

    kind: str = "tagging"
    format: Literal["columns", "conllu", "wikiann", "rows"] = "columns"
    """Format of the files. columns: one word per line, as in CoNLL files; CoNLL-U files are
    detected. conllu: CoNLL-U only. wikiann: each line has en:WORD, a tab and the tag. rows: each
    row of JSON lines, parquet or tfds:NAME:SPLIT has a list of words and a list of tags."""
    token_column: int = 1
    """Column of the words, by number (format=columns). 1 is the first column, -1 the last."""
    tag_column: int = -1
    """Column of the tags, by number (format=columns). 1 is the first column, -1 the last."""
    comment: str = ""
    """Prefix of lines to skip (format=columns). If empty, no line is skipped."""
    conllu_column: Literal["upos", "xpos", "deprel"] = "upos"
    """Column of the tags (format=conllu)."""
    tokens: str = "tokens"
    """Column of the words (format=rows)."""
    tags: str = "tags"
    """Column of the tags (format=rows)."""
    tag_names: tuple[str, ...] = ()
    """Names of the tag ids 0, 1, ..., for files with integer tags (format=rows)."""
    labels: tuple[str, ...] = ()
    """Tags in the order of the model's outputs (IOB2 with O, for entities). If empty, the training
    file's tags are used. Unlisted tags are an error in that file, but misses in other files."""
    scheme: Literal["auto", "plain"] = "auto"
    """Scheme of the tags. plain: tags are classes of words, and the metric is accuracy. auto:
    detect IOB1, IOB2 or IOBES; tags without entities are plain."""
    lenient: bool = False
    """Whether to accept entity tags that violate every scheme, and read them as conlleval does."""
    stride: Natural = 0
    """Sub-words from one window's start to the next (long sentences); 0 means max_length / 2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lenient and self.scheme == "plain":
            raise UserError(
                "task.lenient is for entity tags, but task.scheme is 'plain'; unset one of them"
            )
        if not 1 <= self.tag_stride <= self.length - 2:
            raise UserError(
                f"task.stride is {self.stride}; it must be from 1 to {self.length - 2}, which is "
                "task.max_length minus 2"
            )

    @property
    def tag_stride(self) -> int:
        """Number of sub-words from the start of a window to the start of the next."""
        return self.stride or self.length // 2


@dataclass(frozen=True, kw_only=True)
class ParsingConfig(FileTaskConfig):
    """Settings of the task kind `parsing`: words with heads and relations, in CoNLL-U.

    Subtypes of relations (nsubj:pass) are learned and written, but do not count in scores.
    """

    FILES: ClassVar = "a file of trees in CoNLL-U"
    METRICS: ClassVar = ("las", "uas")

    kind: str = "parsing"
    labels: tuple[str, ...] = ()
    """Relations in the order of the model's outputs. If empty, the training file's relations are
    used. Unlisted relations are an error in that file, but misses in other files."""


TaskConfig.VARIANTS = {
    "glue": GlueConfig, "table": TableConfig, "tagging": TaggingConfig, "squad": SquadConfig,
    "choice": ChoiceConfig, "parsing": ParsingConfig, "embedding": EmbeddingTaskConfig,
    "rerank": RerankTaskConfig,
}  # fmt: skip

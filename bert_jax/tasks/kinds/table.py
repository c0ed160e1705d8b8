"""Tables of texts with labels."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from bert_jax.config.bounds import Above, Below, Natural
from bert_jax.errors import UserError
from bert_jax.tasks.kinds.fields import FileTaskConfig
from bert_jax.tasks.long_texts import LongTexts, Pooling
from bert_jax.tasks.skew import SkewConfig
from bert_jax.tasks.tables.delimited import TableFormat

ProblemType = Literal["single_label", "multi_label", "regression"]
METRICS: dict[ProblemType, tuple[str, ...]] = {
    "single_label": ("accuracy", "f1", "macro_f1", "matthews"),
    "multi_label": ("f1", "macro_f1", "accuracy"),
    "regression": ("pearson", "spearman"),
}
"""Metrics that can choose a checkpoint, the default first."""
_SEVERAL = "which is for several labels a row (task.problem_type='multi_label')"


@dataclass(frozen=True, kw_only=True)
class WrittenConfig(FileTaskConfig):
    """The format of a table: CSV, TSV, JSON lines, parquet or tfds:NAME:SPLIT."""

    id: str = ""
    """Column that names the rows; empty numbers them from 0."""
    dev_rate: Annotated[float, Above(0), Below(1)] = 0.1
    """Share of the distinct texts (for pairs: documents) held out where dev is empty; rows with the
    same text stay together."""
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "tfds"] = "auto"
    """Format of the files; auto goes by the suffix."""
    header: bool | None = None
    """Whether line 1 of a CSV or TSV file names the columns. None: true where the configuration
    names columns; required where the configuration numbers columns."""
    quoting: bool | None = None
    """Whether fields may stand in double quotes; None: yes in CSV, no in TSV."""
    delimiter: str = ""
    """Character between the fields; empty: a comma in CSV, a tab in TSV."""
    ragged: Literal["fail", "skip"] = "fail"
    """Treatment of rows with more or fewer fields than the first."""

    @property
    def file_format(self) -> TableFormat:
        """Format of the files."""
        return TableFormat(self.format, self.header, self.quoting, self.delimiter, self.ragged)


@dataclass(frozen=True, kw_only=True)
class TableConfig(SkewConfig, WrittenConfig):
    """A table of texts with labels.

    A column is a name; without a header, its number from 1.
    """

    FILES: ClassVar = "a file with texts and labels (.csv, .tsv, .jsonl, .parquet)"
    RENAMED: ClassVar = {"kind": "problem_type"}

    problem_type: ProblemType = "single_label"
    """Kind of prediction for a row: one label, any number of labels, or a number."""
    text: str = "text"
    """Column of the text."""
    text_pair: str = ""
    """Column of the second text of a pair; empty: there is none."""
    label: str = "label"
    """Column of the label."""
    label_columns: tuple[str, ...] = ()
    """Columns of 0 and 1, one for each label, in place of `label` (multi_label)."""
    labels: tuple[str, ...] = ()
    """Names of the labels in the order of the model's outputs; empty: the sorted labels of the
    training file."""
    separator: str = ","
    """Separator between the labels of a row (multi_label)."""
    group: str = ""
    """Column of a group, such as an author or a document: rows of one group are held out together,
    with the same mix of labels in both parts. Empty: only rows with the same text stay together."""
    empty: Literal["fail", "skip", "keep"] = "keep"
    """Treatment of rows with an empty text; a warning counts the rows skipped or kept."""
    long: Literal["cut", "head_tail", "windows"] = "cut"
    """Treatment of texts of more than task.max_length tokens. cut: read the beginning. head_tail:
    read the beginning, a quarter of the row, and the end (Sun et al. 2019). windows: read
    everything in overlapping rows; each row of a pair has a part of the longer text and all of the
    other text, up to half a row. Each window learns its text's label; all windows of a text weigh
    as much as one row."""
    window_pooling: Pooling = "mean"
    """Logits of a text in windows: the mean over windows, the highest logit of each class, or the
    mean of the first and the last window (long=windows)."""
    window_stride: Natural = 0
    """Tokens from one window to the next, at most a window; 0: half a window (long=windows)."""
    calibrate: bool = False
    """Whether to divide logits by the temperature with the least log loss on the dev data, which
    makes probabilities match the shares of right answers (Guo et al. 2017). Predicted classes do
    not change."""
    thresholds: Literal["half", "tuned"] = "half"
    """Least probability of a predicted label (multi_label). half: 0.5. tuned: for each label, the
    threshold with its highest F1 on the dev data."""

    def __post_init__(self) -> None:
        """Refuse options that do not apply to the kind of prediction."""
        super().__post_init__()
        kind, several = self.problem_type, self.problem_type == "multi_label"
        if number := kind == "regression":
            self.check_has_classes("task.problem_type 'regression'")
        windowed = self.window_stride or self.window_pooling != "mean"
        for is_wrong, message in (
            (number and self.calibrate, "calibrate is set, but a regression has no probabilities"),
            (number and self.window_pooling == "max",
             "window_pooling is 'max', the highest logit of each class, but a regression has none; "
             "choose mean or first_last"),
            (number and self.labels, f"labels is {self.labels}, but a regression has none"),
            (kind == "single_label" and len(self.labels) == 1,
             f"labels is {self.labels}; at least 2 are needed to choose"),
            (self.label_columns and self.labels,
             "labels is set, but task.label_columns names the labels"),
            (self.label_columns and not several,
             f"label_columns is {self.label_columns}, {_SEVERAL}, not {kind!r}"),
            (several and not self.separator.strip(),
             f"separator is {self.separator!r}; a mark is needed"),
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
        """Metrics of the kind of prediction; f1 is for two labels."""
        return METRICS[self.problem_type]

    @property
    def long_texts(self) -> LongTexts:
        """Treatment of texts with more tokens than a row."""
        return LongTexts(self.long, self.window_pooling, self.window_stride)

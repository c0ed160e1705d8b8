"""Tasks: which data, and how the data are written. One section for each kind of task."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Any, Literal

from bert_jax.config.bounds import Above, AtLeast, Below, Bounded, Natural, Or
from bert_jax.errors import UserError
from bert_jax.files.urls import scheme
from bert_jax.tasks.embedding_config import EmbeddingTaskConfig
from bert_jax.tasks.glue import TASKS, glue_sources, glue_task
from bert_jax.tasks.sections.choice import ChoiceConfig
from bert_jax.tasks.sections.parsing import ParsingConfig
from bert_jax.tasks.sections.squad import SquadConfig, WindowOptions
from bert_jax.tasks.skew import SkewConfig
from bert_jax.tasks.tables.delimited import TableFormat
from bert_jax.tasks.text_options import TextConfig

METRICS = {
    "class": ("accuracy", "f1", "macro_f1", "matthews"),
    "classes": ("f1", "macro_f1", "accuracy"),
    "score": ("pearson", "spearman"),
}
"""Metrics that can choose a checkpoint, the default first."""


@dataclass(frozen=True)
class GlueConfig(SkewConfig, section="task.glue"):
    """A task of GLUE."""

    name: str = ""
    """cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli. The diagnostic set ax is predicted with
    a model of mnli."""
    data: str = ""
    """The directory of the task's TSV files or the one that holds all tasks; or tfds, for what
    TensorFlow Datasets has prepared."""
    test: str = ""
    """A split with labels, or a file, that is scored once, after training; empty: none."""


@dataclass(frozen=True)
class TableConfig(TextConfig, section="task.table"):
    """A table of texts with labels: CSV, TSV, JSON lines, parquet or tfds:NAME:SPLIT.

    A column is a name; without a header, its number from 1.
    """

    train: str = ""
    """The file to train on."""
    dev: str = ""
    """The file to choose the best checkpoint by; empty holds rows of the training file out."""
    test: str = ""
    """A file that is scored once, after training; empty: none."""
    dev_rate: Annotated[float, Above(0), Below(1)] = 0.1
    """Share of the distinct texts that is held out where dev is empty; rows with the same text go
    together."""
    group: str = ""
    """Column of a group, such as an author or a document: rows of one group are held out together,
    with the same mixture of labels in both parts. Empty: rows with the same text alone."""
    text: str = "text"
    """Column of the text."""
    text_pair: str = ""
    """Column of the second text of a pair; empty: there is none."""
    label: str = "label"
    """Column of the label."""
    label_columns: tuple[str, ...] = ()
    """Instead of label: columns of 0 and 1, one for each of several labels (kind=classes)."""
    id: str = ""
    """Column that names the rows; empty numbers them from 0."""
    kind: Literal["class", "classes", "score"] = "class"
    """class: one label a row. classes: any number of them. score: a number."""
    labels: tuple[str, ...] = ()
    """Names of the labels in the order of the model's outputs; empty: those of the training file,
    sorted."""
    separator: str = ","
    """Between the labels of a row (kind=classes)."""
    metric: str = ""
    """Former name of task.metric."""
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "tfds"] = "auto"
    """auto goes by the suffix of the file."""
    header: bool | None = None
    """Whether line 1 of a CSV or TSV file has the names of the columns; None: it has where columns
    are named, and it must be said where they are numbered."""
    quoting: bool | None = None
    """Whether a field may stand in double quotes; None: in CSV yes, in TSV no."""
    delimiter: str = ""
    """Between the fields; empty: a comma in CSV, a tab in TSV."""
    ragged: Literal["fail", "skip"] = "fail"
    """Rows with more or fewer fields than the first."""
    empty: Literal["fail", "skip", "keep"] = "keep"
    """Rows with an empty text; those skipped or kept are counted in a warning."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        self.check_kind(self.kind)
        metrics = METRICS[self.kind]
        if self.metric and self.metric not in metrics:
            raise UserError(
                f"task.table.metric is {self.metric!r}; for kind {self.kind!r} it is one of "
                f"{', '.join(metrics)}"
            )
        if self.labels and self.kind == "score":
            raise UserError("task.table.labels is set, but kind 'score' has none; leave it out")
        if self.kind == "class" and len(self.labels) == 1:
            raise UserError(f"task.table.labels is {self.labels}; at least 2 are needed to choose")
        if self.label_columns and self.labels:
            raise UserError(
                "task.table.labels is set, but label_columns names the labels; leave one out"
            )
        if self.label_columns and self.kind != "classes":
            raise UserError(
                "task.table.label_columns are for several labels a row (kind='classes'), not "
                f"{self.kind!r}"
            )
        if self.kind == "classes" and not self.separator.strip():
            raise UserError(f"task.table.separator is {self.separator!r}; a mark is needed")

    @property
    def file_format(self) -> TableFormat:
        """How the files are written."""
        return TableFormat(self.format, self.header, self.quoting, self.delimiter, self.ragged)


@dataclass(frozen=True)
class TaggingConfig(SkewConfig, section="task.tagging"):
    """Words with tags: named entities, parts of speech."""

    train: str = ""
    """The file to train on."""
    dev: str = ""
    """The file to choose the best checkpoint by."""
    test: str = ""
    """A file that is scored once, after training; empty: none."""
    format: Literal["columns", "conllu", "wikiann", "rows"] = "columns"
    """columns: a word a line, as CoNLL has it; CoNLL-U is known by its columns. conllu: CoNLL-U
    alone. wikiann: en:WORD, tab, tag. rows: lists of words and of tags in JSON lines, parquet or
    tfds:NAME:SPLIT."""
    token_column: int = 1
    """Number of the word's column from 1, from -1 backwards (columns)."""
    tag_column: int = -1
    """Number of the tag's column, likewise (columns)."""
    comment: str = ""
    """Lines that begin with it are passed over (columns); empty: there are none."""
    conllu_column: Literal["upos", "xpos", "deprel"] = "upos"
    """Column of the tags (conllu)."""
    tokens: str = "tokens"
    """Column of the words (rows)."""
    tags: str = "tags"
    """Column of the tags (rows)."""
    tag_names: tuple[str, ...] = ()
    """Tags that numbers stand for, in their order, where tags are numbers (rows)."""
    labels: tuple[str, ...] = ()
    """Tags in the order of the model's outputs, those of entities as IOB2 with O; empty: those of
    the training file. A tag of another file that is not among them counts as a miss."""
    scheme: Literal["auto", "plain"] = "auto"
    """auto: IOB1, IOB2 and IOBES are told apart, and what is none of them is plain. plain: tags are
    not of entities; accuracy is the metric."""
    lenient: bool = False
    """Read tags that keep to no scheme as the CoNLL script does."""
    stride: int = 0
    """Sub-words from one window to the next where a sentence is longer than max_length; 0: half of
    max_length."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        if self.lenient and self.scheme == "plain":
            raise UserError("task.tagging.lenient is about entities, scheme is 'plain'; drop one")


@dataclass(frozen=True)
class TaskConfig(Bounded, section="task"):
    """The task; of the sections that of `kind` is read."""

    kind: Literal["glue", "table", "tagging", "squad", "choice", "parsing", "embedding"] = "table"
    """Section that describes the data."""
    max_length: Annotated[int, AtLeast(8), Or(0)] = 0
    """Tokens in a row, special tokens included; 0: 128, for squad 384, for embedding 256, or the
    model's positions where they are fewer. Longer texts are cut and counted in a warning; tagged
    sentences and the contexts of squad are read in windows."""
    folds: Annotated[int, AtLeast(2), Or(0)] = 0
    """Number of folds of the training data; each is held out of a run once, with the same mixture
    of labels and with groups kept together. 0: no folds."""
    fold: Natural = 0
    """Fold that a run holds out, from 1; 0: a run for each fold, one after another."""
    metric: str = ""
    """Metric that chooses the best checkpoint. glue: one of the task's. table: for class accuracy,
    f1 (of the second of two labels), macro_f1 or matthews; for classes f1 (micro), macro_f1 or
    accuracy; for score pearson or spearman. tagging: for entities f1, precision, recall or
    accuracy, else accuracy. squad: f1 or exact. Empty: the first of these."""
    glue: GlueConfig = field(default_factory=GlueConfig)
    table: TableConfig = field(default_factory=TableConfig)
    tagging: TaggingConfig = field(default_factory=TaggingConfig)
    squad: SquadConfig = field(default_factory=SquadConfig)
    embedding: EmbeddingTaskConfig = field(default_factory=EmbeddingTaskConfig)
    choice: ChoiceConfig = field(default_factory=ChoiceConfig)
    parsing: ParsingConfig = field(default_factory=ParsingConfig)

    def __post_init__(self) -> None:
        """Refuse lengths that leave no room."""
        super().__post_init__()
        if self.fold > self.folds:
            raise UserError(
                f"task.fold is {self.fold}, and task.folds {self.folds}; fold must be one of the "
                "folds from 1, or 0 for all"
            )
        name = self.glue.name if self.kind == "glue" else ""
        if name and "train" not in glue_task(name).files:
            raise UserError(
                f"task.glue.name is {name!r}, which has no training data; fine-tune mnli and "
                f"predict {name!r} with it"
            )
        if name and not glue_task(name).labels:
            self.glue.check_has_classes(f"task.glue.name {name!r}")
        if self.kind == "squad":
            _ = self.windows  # refuses its own errors
        if self.kind == "tagging" and not 1 <= self.tag_stride <= self.length - 2:
            raise UserError(
                f"task.tagging.stride is {self.tagging.stride}; it must be from 1 to "
                f"{self.length - 2}, which is task.max_length less 2"
            )

    @property
    def skew(self) -> SkewConfig:
        """Treatment of rare classes; without options where the kind of task has none."""
        section = getattr(self, self.kind)
        return section if isinstance(section, SkewConfig) else SkewConfig()

    @property
    def text_options(self) -> TextConfig:
        """Treatment of texts; without options where the kind of task has none."""
        return self.table if self.kind == "table" else TextConfig()

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of the sections that `kind` does not read."""
        sections = (
            each.name
            for each in dataclasses.fields(self)
            if each.default_factory is not dataclasses.MISSING
        )
        return tuple(name for name in sections if name != self.kind)

    def check_sections(self) -> None:
        """Refuse a section that would not be read.

        A saved configuration is not checked: defaults of earlier versions may have been others.

        Raises:
            UserError: names the first field.
        """
        for name in self.unread:
            section = getattr(self, name)
            for each in dataclasses.fields(section):
                if getattr(section, each.name) != each.default:
                    raise UserError(
                        f"task.{name}.{each.name} is set, but task.kind is {self.kind!r}; set "
                        f"task.kind to {name!r}, or leave task.{name} out"
                    )

    def choose_metric(self, metrics: Sequence[str]) -> str:
        """Return the metric that is asked for, of those that the task has; the first by default.

        Raises:
            UserError: the task has no such metric.
        """
        former = self.table.metric if self.kind == "table" else ""
        if self.metric and former and self.metric != former:
            raise UserError(
                f"task.metric is {self.metric!r} and task.table.metric {former!r}; leave the "
                "latter, its former name, out"
            )
        metric = self.metric or former or metrics[0]
        if metric not in metrics:
            hint = "; f1 is for two labels" if metric == "f1" and "macro_f1" in metrics else ""
            raise UserError(
                f"task.metric is {metric!r}; the metrics of this task are "
                f"{', '.join(metrics)}{hint}"
            )
        return metric

    @property
    def length(self) -> int:
        """Tokens in a row at most, special tokens included."""
        return self.max_length or _LENGTHS.get(self.kind, 128)

    def fitted(self, max_positions: int) -> "TaskConfig":
        """Lower the default length, and squad's default question, to what a model has room for."""
        if self.max_length or self.length <= max_positions:
            return self
        squad = self.squad
        if self.kind == "squad" and squad.max_question == SquadConfig.max_question:
            question = min(squad.max_question, max_positions // 4)
            squad = dataclasses.replace(squad, max_question=question)
        return dataclasses.replace(self, max_length=max_positions, squad=squad)

    @property
    def query_length(self) -> int:
        """Tokens in a query of an embedding task at most, special tokens included."""
        return min(self.embedding.max_query or self.length, self.length)

    @property
    def tag_stride(self) -> int:
        """Sub-words from one window of a tagged sentence to the next."""
        return self.tagging.stride or self.length // 2

    @property
    def windows(self) -> WindowOptions:
        """Lengths of the windows of questions and contexts."""
        try:
            stride = self.squad.stride or self.length // 3
            return WindowOptions(self.length, stride, self.squad.max_question)
        except UserError as error:
            raise UserError(f"task.squad: {error}") from None

    @property
    def sources(self) -> dict[str, str]:
        """Files that a run reads, or data sets as tfds:NAME, by the field that names them."""
        section = getattr(self, self.kind)
        if self.kind == "glue":
            names = glue_sources(section.name, section.data)
            return {f"task.glue.data/{PurePath(name).name}": name for name in names}
        parts = ("train", "dev", "test")
        named = {f"task.{self.kind}.{part}": getattr(section, part) for part in parts}
        return {name: value for name, value in named.items() if value}

    @property
    def dev_sources(self) -> dict[str, str]:
        """Dev data by the name of the split; none where rows of the training file are held out."""
        if self.folds:
            return {}
        if self.kind == "glue":
            splits = glue_task(self.glue.name).files
            return {split: split for split in splits if split.startswith("dev")}
        dev: str = getattr(self, self.kind).dev
        return {"dev": dev} if dev else {}

    @property
    def dev_named(self) -> bool:
        """Whether a file of dev data is named."""
        return bool(getattr(getattr(self, self.kind), "dev", ""))

    @property
    def test_sources(self) -> dict[str, str]:
        """Test data by the name of the split; none where no test data are named."""
        test: str = getattr(self, self.kind).test
        return {"test": test} if test else {}

    def located(self) -> "TaskConfig":
        """Return the configuration with absolute paths, for another working directory."""
        section: Any = getattr(self, self.kind)
        splits = glue_task(section.name).files if self.kind == "glue" and section.name else ()
        paths = {}
        for part in ("train", "dev", "test", "data"):
            value = getattr(section, part, "")
            if value and value not in ("tfds", *splits) and not value.startswith("tfds:"):
                paths[part] = value if scheme(value) else os.path.abspath(value)
        return dataclasses.replace(self, **{self.kind: dataclasses.replace(section, **paths)})

    def source(self, field: str) -> str:
        """Return a field of the section of `kind`, such as "train", that must not be empty."""
        value: str = getattr(getattr(self, self.kind), field)
        if not value:
            raise UserError(f"task.{self.kind}.{field} is empty; {_NEEDED[self.kind, field]}")
        return value


_LENGTHS = {"squad": 384, "embedding": 256}
_NEEDED = {
    ("glue", "name"): f"name one of {', '.join(name for name in TASKS if name != 'ax')}",
    ("glue", "data"): "name the directory of its TSV files, or say tfds",
    ("table", "train"): "name a file with texts and labels (.csv, .tsv, .jsonl, .parquet)",
    ("tagging", "train"): "name a file of words with tags",
    ("tagging", "dev"): "name a second file of words with tags, to choose the best checkpoint by",
    ("embedding", "train"): "name a file of texts (.csv, .tsv, .jsonl, .parquet)",
    ("choice", "train"): "name a file of texts with choices (.csv, .tsv, .jsonl, .parquet)",
    ("choice", "dev"): "name a second file with choices, to choose the best checkpoint by",
    ("parsing", "train"): "name a file of trees in CoNLL-U",
    ("parsing", "dev"): "name a second file in CoNLL-U, to choose the best checkpoint by",
    ("squad", "train"): "name a file in SQuAD's JSON",
    ("squad", "dev"): "name a second file in SQuAD's JSON, to choose the best checkpoint by",
}

"""Words with tags."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from bert_jax.config.bounds import Natural
from bert_jax.errors import UserError
from bert_jax.tasks.kinds.fields import FileTaskConfig
from bert_jax.tasks.skew import SkewConfig


@dataclass(frozen=True, kw_only=True)
class TaggingConfig(SkewConfig, FileTaskConfig):
    """Words with tags: named entities, parts of speech."""

    FILES: ClassVar = "a file of words with tags"

    kind: str = "tagging"
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
    stride: Natural = 0
    """Sub-words from one window to the next where a sentence is longer than max_length; 0: half of
    max_length."""

    def __post_init__(self) -> None:
        """Refuse a stride that leaves words out, and rules for tags that are not of entities."""
        super().__post_init__()
        if self.lenient and self.scheme == "plain":
            raise UserError("task.lenient is about entities, task.scheme is 'plain'; drop one")
        if not 1 <= self.tag_stride <= self.length - 2:
            raise UserError(
                f"task.stride is {self.stride}; it must be from 1 to {self.length - 2}, which is "
                "task.max_length less 2"
            )

    @property
    def tag_stride(self) -> int:
        """Sub-words from one window of a tagged sentence to the next."""
        return self.stride or self.length // 2

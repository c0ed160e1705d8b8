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
    """Format of the files. columns: a word a line, as in CoNLL's files; CoNLL-U is recognised by
    its columns. conllu: only CoNLL-U. wikiann: en:WORD, tab, tag. rows: lists of words and of tags
    in JSON lines, parquet or tfds:NAME:SPLIT."""
    token_column: int = 1
    """Number of the word's column: from 1, or from -1 backwards (columns)."""
    tag_column: int = -1
    """Number of the tag's column: from 1, or from -1 backwards (columns)."""
    comment: str = ""
    """Prefix of the lines to skip (columns); empty: no lines are skipped."""
    conllu_column: Literal["upos", "xpos", "deprel"] = "upos"
    """Column of the tags (conllu)."""
    tokens: str = "tokens"
    """Column of the words (rows)."""
    tags: str = "tags"
    """Column of the tags (rows)."""
    tag_names: tuple[str, ...] = ()
    """Names of the tags, in the order of their numbers, where tags are numbers (rows)."""
    labels: tuple[str, ...] = ()
    """Tags in the order of the model's outputs, entities as IOB2 with O; empty: the tags of the
    training file. A tag that is not listed counts as a miss in other files."""
    scheme: Literal["auto", "plain"] = "auto"
    """Scheme of the tags. auto: detect IOB1, IOB2 and IOBES; anything else is plain. plain: tags
    are not entities; the metric is accuracy."""
    lenient: bool = False
    """Whether to read tags that follow no scheme as the CoNLL script does."""
    stride: Natural = 0
    """Sub-words from one window to the next where a sentence is longer than max_length; 0: half of
    max_length."""

    def __post_init__(self) -> None:
        """Refuse a stride that leaves words out, and entity options for plain tags."""
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

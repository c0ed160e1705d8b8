"""Multiple choice."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from bert_jax.config.bounds import Distinct
from bert_jax.errors import UserError
from bert_jax.tasks.kinds.fields import FileTaskConfig


@dataclass(frozen=True, kw_only=True)
class ChoiceConfig(FileTaskConfig):
    """Texts with several continuations, one of them right; the default columns are SWAG's.

    Files are CSV, TSV, JSON lines, parquet or tfds:NAME:SPLIT.
    """

    FILES: ClassVar = "a file of texts with choices (.csv, .tsv, .jsonl, .parquet)"

    kind: str = "choice"
    text: str = "sent1"
    """Column of the text, a context or a question."""
    beginning: str = "sent2"
    """Column of a text that all choices begin with; empty: there is none."""
    choices: Annotated[tuple[str, ...], Distinct(2)] = ("ending0", "ending1", "ending2", "ending3")
    """Columns of the choices, in their order."""
    label: str = "label"
    """Column of the right choice: its number from 0, or a name of `labels`."""
    labels: tuple[str, ...] = ()
    """Names of the choices in the column of the label, such as A,B,C,D; empty: 0, 1, ..."""
    id: str = ""
    """Column that names the rows; empty numbers them from 0."""
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "tfds"] = "auto"
    """Format of the files; auto goes by the suffix."""

    def __post_init__(self) -> None:
        """Refuse `labels` unless they have exactly one name for each choice."""
        super().__post_init__()
        if self.labels and len(set(self.labels)) != len(self.choices):
            raise UserError(
                f"task.labels is {self.labels}; {len(self.choices)} names are needed, one for each "
                "of task.choices"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the choices in the column of the label."""
        return self.labels or tuple(map(str, range(len(self.choices))))

"""Dependency trees."""

from dataclasses import dataclass
from typing import ClassVar

from bert_jax.tasks.kinds.fields import FileTaskConfig


@dataclass(frozen=True, kw_only=True)
class ParsingConfig(FileTaskConfig):
    """Words with heads and relations, in CoNLL-U.

    Subtypes of relations (nsubj:pass) are learned and written, and do not count in scores.
    """

    FILES: ClassVar = "a file of trees in CoNLL-U"

    kind: str = "parsing"
    labels: tuple[str, ...] = ()
    """Relations in the order of the model's outputs; empty: the relations of the training file. A
    relation that is not listed counts as a miss in other files."""

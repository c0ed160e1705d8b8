"""What a fine-tuning task reads: texts, tagged sentences, questions; and the names of labels."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bert_jax.errors import UserError


class Origin(NamedTuple):
    """Where an example was read, for messages.

    Attributes:
        path: the file, or the name of a data set.
        line: the line, or for what has no lines the record, from 1.
    """

    path: str
    line: int

    @property
    def unit(self) -> str:
        """What `line` counts: "line", or "row" where a table has no lines."""
        has_rows = self.path.startswith("tfds:") or self.path.endswith(".parquet")
        return "row" if has_rows else "line"

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.line}"


@dataclass(frozen=True)
class TextExample:
    """A text or a pair of texts, to be classified or scored.

    Attributes:
        id: as the file names it, else its number from 0.
        text: the text, as it was read.
        text_pair: the second text of a pair, or None.
        label: the number of a class, a score, or the numbers of all classes that hold (multi-label,
            ascending, perhaps none); None where the file has no labels.
        origin: where it was read.
    """

    id: str
    text: str
    text_pair: str | None
    label: int | float | tuple[int, ...] | None
    origin: Origin


@dataclass(frozen=True)
class TaggedExample:
    """A sentence whose words have tags.

    Attributes:
        id: as the file names it, else its number from 0.
        tokens: the words.
        tags: one for each word; None where the file has none.
        document: number of the document the sentence belongs to, from 0.
        origin: where its first word was read.
    """

    id: str
    tokens: tuple[str, ...]
    tags: tuple[str, ...] | None
    document: int
    origin: Origin


class Answer(NamedTuple):
    """A reference answer.

    Attributes:
        text: the answer.
        start: character offset of its first character in the context.
    """

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
        id: as the file names it.
        question: the question.
        context: the text in which the answer stands.
        answers: the reference answers, none for a question that has no answer; None where the file
            has no answers at all.
        is_impossible: the file says that the context does not answer it.
        title: of the article.
        origin: where it was read.
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] | None
    is_impossible: bool
    title: str
    origin: Origin


@dataclass(frozen=True)
class LabelSet:
    """Names of labels; the number of a label is its position.

    Raises:
        UserError: no names, or a name that is empty or occurs twice.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise UserError("there are no labels; at least one is needed")
        for number, name in enumerate(self.names):
            if not name:
                raise UserError(f"label {number} has an empty name; labels: {_listed(self.names)}")
        if len(self._numbers) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise UserError(f"the label {twice!r} occurs twice; labels: {_listed(self.names)}")

    @classmethod
    def of(cls, names: Iterable[str]) -> "LabelSet":
        """The labels met in data: numbers in the order of numbers, anything else as text sorts."""
        met = set(names)
        if all(name.isascii() and name.isdigit() and len(name) < 10 for name in met):
            return cls(tuple(sorted(met, key=lambda name: (int(name), name))))
        return cls(tuple(sorted(met)))

    def __len__(self) -> int:
        return len(self.names)

    def id(self, name: str, origin: Origin) -> int:
        """The number of a label.

        Args:
            name: of the label.
            origin: where it was met, for the message.

        Raises:
            UserError: not a label of this set; names the nearest that is.
        """
        number = self._numbers.get(name)
        if number is None:
            # A number is not a misspelling of another.
            known = () if name.isdigit() else self.names
            near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
            folded = {known.casefold(): known for known in self.names}
            nearest = folded.get(name.strip().casefold(), near[0] if near else None)
            hint = f" Did you mean {nearest!r}?" if nearest is not None else ""
            raise UserError(
                f"{origin}: the label {name[:80]!r} is not known; known are "
                f"{_listed(self.names)}.{hint}"
            )
        return number

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(repr(name[:80]) for name in names[:20]) + more

"""Examples of fine-tuning tasks: texts, tagged sentences, questions; and the names of labels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bert_jax.errors import UserError, nearest


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
        """Unit of `line`: "line", or "row" where a table has no lines."""
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
        tags: one for each word, empty where a word has none; None where the file has no tags.
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
                raise UserError(f"label {number} has an empty name; labels: {listed(self.names)}")
        if len(self._numbers) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise UserError(f"the label {twice!r} occurs twice; labels: {listed(self.names)}")

    @classmethod
    def of(cls, names: Iterable[str]) -> "LabelSet":
        """Return the labels met in data: numbers in numerical order, others in that of text."""
        met = set(names)
        if all(name.isascii() and name.isdigit() and len(name) < 10 for name in met):
            return cls(tuple(sorted(met, key=lambda name: (int(name), name))))
        return cls(tuple(sorted(met)))

    def __len__(self) -> int:
        return len(self.names)

    def id(self, name: str, origin: Origin) -> int:
        """Return the number of a label.

        Args:
            name: of the label.
            origin: where it was met, for the message.

        Raises:
            UserError: not a label of this set; names the nearest that is.
        """
        number = self.find(name)
        if number is None:
            raise UnknownLabel(name, origin, self.names)
        return number

    def find(self, name: str) -> int | None:
        """Return the number of a label; None for a label that is not of this set."""
        return self._numbers.get(name)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}


class UnknownLabel(UserError):
    """A label that is not of a set.

    A file may have a million of them, of which five are shown: the message is made when it is read.

    Args:
        name: The label.
        origin: Its place.
        known: Names of the set.
    """

    def __init__(self, name: str, origin: Origin, known: tuple[str, ...]) -> None:
        super().__init__(name, origin, known)
        self._parts = name, origin, known

    def __str__(self) -> str:
        name, origin, known = self._parts
        folded = {each.casefold(): each for each in known}
        # A number is not a misspelling of another.
        near = folded.get(name.strip().casefold()) or nearest(name, () if name.isdigit() else known)
        hint = f" Did you mean {near!r}?" if near is not None else ""
        return f"{origin}: the label {name[:80]!r} is not known; known are {listed(known)}.{hint}"


def listed(names: Sequence[str], most: int = 20) -> str:
    """Names for a message, quoted; those after the first `most` are counted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name[:80]) for name in names[:most]) + more

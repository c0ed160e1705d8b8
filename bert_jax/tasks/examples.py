"""Examples of fine-tuning tasks: texts, tagged sentences, questions; and the names of labels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from bert_jax.errors import UserError, nearest

Example = TypeVar("Example", bound=Any)


class Origin(NamedTuple):
    """Place where an example was read, for messages."""

    path: str
    """File, or name of a data set."""
    line: int
    """Number of the line, or of the record where there are no lines; from 1."""

    @property
    def unit(self) -> str:
        """Unit of `line`: "line", or "row" where a table has no lines."""
        has_rows = self.path.startswith("tfds:") or self.path.endswith(".parquet")
        return "row" if has_rows else "line"

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.line}"


@dataclass(frozen=True)
class TextExample:
    """A text or a pair of texts to be classified, scored or embedded, or a text with choices."""

    id: str
    """Name of the example in the file, else its number from 0."""
    text: str
    text_pair: str | None
    label: int | float | tuple[int, ...] | None
    """Number of a class or choice, a score, or the ascending numbers of all classes that hold
    (multi-label); None where the file has no labels."""
    origin: Origin
    group: str | None = None
    """Group of the example; None where the table has none."""

    more: tuple[str, ...] = ()
    """Other texts: choices, each with the beginning that all choices share, or hard negatives."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that are not empty."""
        return tuple(filter(None, (self.text, self.text_pair, *self.more)))


@dataclass(frozen=True)
class TaggedExample:
    """A sentence whose words have tags."""

    id: str
    """Name of the example in the file, else its number from 0."""
    tokens: tuple[str, ...]
    tags: tuple[str, ...] | None
    """Tag of each word, empty where a word has none; None where the file has no tags."""
    origin: Origin
    """Place of the first word."""
    document: int = 0
    """Number of the document in the file; 0 for all where the file marks none."""

    @property
    def texts(self) -> tuple[str]:
        """The words, joined by spaces."""
        return (" ".join(self.tokens),)

    @property
    def label(self) -> tuple[str, ...] | None:
        """The tags."""
        return self.tags


class Answer(NamedTuple):
    """A reference answer."""

    text: str
    start: int
    """Character offset of the answer in the context."""


@dataclass(frozen=True)
class Question:
    """A question about a context."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] | None
    """Reference answers, () where the context does not answer the question; None where the file
    does not say."""
    origin: Origin

    @property
    def texts(self) -> tuple[str, str]:
        """The question and its context."""
        return self.question, self.context

    @property
    def label(self) -> tuple[Answer, ...] | None:
        """The reference answers."""
        return self.answers


@dataclass(frozen=True)
class Data(Generic[Example]):
    """Examples of one file."""

    name: str
    """Name of the file, or of the split."""
    examples: Sequence[Example]
    labels: "LabelSet | None" = None
    """Names of the classes; None for scores, and for examples without labels."""
    warnings: tuple[str, ...] = ()
    """Examples that were skipped, or kept although they look wrong, counted, with lines."""
    submission: tuple[str, str] | None = None
    """Task and split of GLUE for which the leaderboard takes predictions of these texts."""
    trains: bool = False
    """Whether a model learns from them."""

    @cached_property
    def truth(self) -> list[Any] | None:
        """Labels of all examples; None unless each has one."""
        labels = [each.label for each in self.examples]
        return None if None in labels else labels


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
        """Sort the labels met in data: numbers in numerical order, other labels as text."""
        met = set(names)
        if all(name.isascii() and name.isdigit() and len(name) < 10 for name in met):
            return cls(tuple(sorted(met, key=lambda name: (int(name), name))))
        return cls(tuple(sorted(met)))

    def __len__(self) -> int:
        return len(self.names)

    def id(self, name: str, origin: Origin) -> int:
        """Return the number of a label that was met at `origin`.

        Raises:
            UserError: the name is not in this set; the message gives the nearest label.
        """
        number = self.find(name)
        if number is None:
            raise UnknownLabel(name, origin, self.names)
        return number

    def find(self, name: str) -> int | None:
        """Return the number of a label; None for a label outside this set."""
        return self._numbers.get(name)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}


class UnknownLabel(UserError):
    """A label that a set does not have.

    A file may have a million unknown labels, and a message names only five of them: the text is
    made only when somebody reads it.
    """

    def __str__(self) -> str:
        name, origin, known = self.args
        folded = {each.casefold(): each for each in known}
        # A number is never a misspelling of another number.
        near = folded.get(name.strip().casefold()) or nearest(name, () if name.isdigit() else known)
        hint = f" Did you mean {near!r}?" if near is not None else ""
        return f"{origin}: the label {name[:80]!r} is not known; known are {listed(known)}.{hint}"


def listed(names: Sequence[str], most: int = 20) -> str:
    """Quote the first `most` names for a message, and count the other names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name[:80]) for name in names[:most]) + more


def file_name(source: str) -> str:
    """Return the name of a file without its directory; the name of a data set is its own."""
    return source if source.startswith("tfds:") else Path(source).name

"""Labelled examples, names of labels, and messages that list the faults of a data file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from bert_jax.errors import UserError, nearest
from bert_jax.files.untrusted.whole_file import read_text

SHOWN = 5
"""Largest number of lines that a message lists. Further lines are only counted."""
MAX_BYTES = 512 << 20
"""Largest size, in bytes, of a file of questions, or of tagged or parsed words."""
Example = TypeVar("Example", bound=Any)


class Origin(NamedTuple):
    """File and line from which an example was read, for messages."""

    path: str
    """File, or name of a data set."""
    line: int
    """Line number, or record number if the source has no lines. The first is 1."""

    @property
    def unit(self) -> str:
        """Unit of `line`: "line", or "row" if the table has no lines."""
        has_rows = self.path.startswith("tfds:") or self.path.endswith(".parquet")
        return "row" if has_rows else "line"

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.line}"


@dataclass(frozen=True)
class TextExample:
    """A text or a pair of texts to be classified, scored or embedded, or a text with choices."""

    id: str
    """Id from the file, else the number of the row, from 0; skipped rows count."""
    text: str
    text_pair: str | None
    label: int | float | tuple[int, ...] | tuple[float, ...] | None
    """Index of a class or choice, or a score, or (multi-label) the ascending indices of all classes
    of the text, or the scores of its other texts. None if the file has no labels."""
    origin: Origin
    group: str | None = None
    """Group of the example; None if the table has no groups."""
    more: tuple[str, ...] = ()
    """Other texts: hard negatives or choices. A choice includes the common beginning, if any."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that are not empty."""
        return tuple(filter(None, (self.text, self.text_pair, *self.more)))


@dataclass(frozen=True)
class TaggedExample:
    """A sentence of words, with a tag for each word."""

    id: str
    """Index of the sentence in the file."""
    tokens: tuple[str, ...]
    tags: tuple[str, ...] | None
    """Tag of each word, or "" for a word without a tag. None if the file has no tags."""
    origin: Origin
    """File and line of the first word."""
    document: int = 0
    """Index of the document in the file; always 0 if the file does not mark documents."""

    @property
    def texts(self) -> tuple[str]:
        """The words, joined by spaces."""
        return (" ".join(self.tokens),)

    @property
    def label(self) -> tuple[str, ...] | None:
        """The tags."""
        return self.tags


class Answer(NamedTuple):
    """A reference answer: its text and its offset."""

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
    """Reference answers. () means that the context has no answer; None means they are unknown."""
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
    """Names of the classes; None if there are no classes or the examples have no labels."""
    warnings: tuple[str, ...] = ()
    """Warnings, for example with the lines of examples that were skipped or that look wrong."""
    submission: tuple[str, str] | None = None
    """GLUE task and split if the leaderboard scores predictions for the examples, else None."""
    trains: bool = False
    """Whether a model is trained on the examples."""

    @cached_property
    def truth(self) -> list[Any] | None:
        """Labels of all examples; None if an example has no label."""
        labels = [each.label for each in self.examples]
        return None if None in labels else labels


@dataclass(frozen=True)
class LabelSet:
    """Names of labels, in the order of their indices.

    Raise a UserError if there are no names, or a name is empty or occurs twice.
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
        """Make a set of the labels in data. Sort by value if all are integers, else as text."""
        met = set(names)
        if all(name.isascii() and name.isdigit() and len(name) < 10 for name in met):
            return cls(tuple(sorted(met, key=lambda name: (int(name), name))))
        return cls(tuple(sorted(met)))

    def __len__(self) -> int:
        return len(self.names)

    def id(self, name: str, origin: Origin | str) -> int:
        """Return a label's index; if it is unknown, raise a UserError that begins with `origin`."""
        if (number := self.find(name)) is None:
            raise UnknownLabel(name, origin, self.names)
        return number

    def find(self, name: str) -> int | None:
        """Return the index of a label, or None if the label is not in this set."""
        return self._numbers.get(name)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}


class UnknownLabel(UserError):
    """Error for a label that is not in a `LabelSet`; the message is made only when it is shown."""

    def __str__(self) -> str:
        name, origin, known = self.args
        folded = {each.casefold(): each for each in known}
        # A number is never a misspelling of another number.
        near = folded.get(name.strip().casefold()) or nearest(name, () if name.isdigit() else known)
        hint = f" Did you mean {near!r}?" if near is not None else ""
        return f"{origin}: the label {name[:80]!r} is not known; labels: {listed(known)}.{hint}"


def listed(names: Sequence[str], most: int = 20) -> str:
    """Quote the first `most` names for a message, and count the other names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name[:80]) for name in names[:most]) + more


def file_name(source: str) -> str:
    """Return the name of a file without its directory, or the whole name of a data set."""
    return source if source.startswith("tfds:") else Path(source).name


class MissingColumn(UserError):
    """Error for a table without the column `column`."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(column, message)  # the arguments from which pickle makes a copy
        self.column = column

    def __str__(self) -> str:
        return f"{self.args[1]}"


class Problems:
    """Faults of a file, collected while it is read. Messages call the file's entries `what`."""

    def __init__(self, path: str, what: str = "rows") -> None:
        self._path = path
        self._what = what
        self._first: list[str] = []
        self.count = 0

    def add(self, message: str | UserError) -> None:
        """Add a problem, whose message begins with the file and line."""
        self.count += 1
        if self.count <= SHOWN:
            self._first.append(str(message))

    def check(self) -> None:
        """Raise a `UserError` if any problem was added."""
        if self.count == 1:
            raise UserError(self._first[0])
        if self.count:
            rest = [f"and {self.count - SHOWN:,} more"] if self.count > SHOWN else []
            lines = "\n  ".join([*self._first, *rest])
            raise UserError(f"{self._path}: {self.count:,} {self._what} are wrong:\n  {lines}")


def counted(what: str, origins: Iterable[Origin]) -> tuple[str, ...]:
    """Return one warning per file of the form "PATH: COUNT what (lines 1, 2, ...)"."""
    found = []
    for path, group in groupby(sorted(origins), key=attrgetter("path")):
        lines = list(group)
        named = ", ".join(f"{each.line}" for each in lines[:SHOWN])
        unit = f"{lines[0].unit}{'s' if len(lines) > 1 else ''}"
        more = ", ..." if lines[SHOWN:] else ""
        found.append(f"{path}: {len(lines):,} {what} ({unit} {named}{more})")
    return tuple(found)


def text_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file, which end with a line feed, a carriage return or both."""
    text = read_text(path, max_bytes=MAX_BYTES)
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")

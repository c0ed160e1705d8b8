"""All faults of a file in one message, which names the first lines and counts the rest."""

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.files.untrusted.whole_file import read_text
from bert_jax.tasks.examples import Origin

SHOWN = 5
"""Number of lines that a message names; the rest are counted."""


MAX_BYTES = 512 << 20
"""Largest file of tagged or parsed words."""


class MissingColumn(UserError):
    """A table lacks `column`."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(message)
        self.column = column


class Problems:
    """Faults of a file, gathered while the file is read; `what` is faulty, in the plural."""

    def __init__(self, path: str, what: str = "rows") -> None:
        self._path = path
        self._what = what
        self._first: list[str] = []
        self.count = 0

    def add(self, message: str | UserError) -> None:
        """Add a problem; its message begins with the file and line."""
        self.count += 1
        if self.count <= SHOWN:
            self._first.append(str(message))

    def check(self) -> None:
        """Raise a `UserError` if there was a problem."""
        if self.count == 1:
            raise UserError(self._first[0])
        if self.count:
            more = self.count - len(self._first)
            rest = [f"and {more:,} more"] if more else []
            lines = "\n  ".join([*self._first, *rest])
            raise UserError(f"{self._path}: {self.count:,} {self._what} are wrong:\n  {lines}")


def counted(what: str, origins: Iterable[Origin]) -> tuple[str, ...]:
    """Return a warning for each file of the origins: their number, and the first lines."""
    found = []
    for path, group in groupby(sorted(origins), key=attrgetter("path")):
        lines = list(group)
        named = ", ".join(f"{each.line}" for each in lines[:SHOWN])
        unit = f"{lines[0].unit}{'s' if len(lines) > 1 else ''}"
        more = ", ..." if lines[SHOWN:] else ""
        found.append(f"{path}: {len(lines):,} {what} ({unit} {named}{more})")
    return tuple(found)


def text_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file; a carriage return ends a line, too."""
    text = read_text(path, max_bytes=MAX_BYTES)
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")

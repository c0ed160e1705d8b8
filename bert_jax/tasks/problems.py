"""All faults of a file in one message, which names the first lines and counts the rest."""

from collections.abc import Sequence

from bert_jax.errors import UserError
from bert_jax.tasks.examples import Origin

SHOWN = 5
"""Number of lines that a message names; the rest are counted."""


class MissingColumn(UserError):
    """A table lacks `column`."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(message)
        self.column = column


class Problems:
    """Faults of a file, gathered while the file is read.

    Args:
        path: the file.
        what: noun for the faulty things, in the plural.
    """

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


def counted(path: str, what: str, lines: Sequence[int]) -> str:
    """Return a warning with the number of lines and the first of them."""
    unit = Origin(path, 0).unit
    named = ", ".join(f"{line}" for line in lines[:SHOWN]) + (", ..." if lines[SHOWN:] else "")
    return f"{path}: {len(lines):,} {what} ({unit}{'s' if len(lines) > 1 else ''} {named})"

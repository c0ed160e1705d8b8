"""Documents and paragraphs of one task that a scan of the whole corpus decided to drop."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from bert_jax.files.staging import staged_file


@dataclass(frozen=True)
class Drops:
    """Decisions about the documents of one task; a document is named by its number in the task."""

    filtered: np.ndarray
    """(k,) int64, documents that a filter drops, ascending."""
    duplicates: np.ndarray
    """(n,) int64, duplicates of documents that stay, ascending."""
    exact: np.ndarray
    """(n,) bool, true where the words of a duplicate are all the same."""
    firsts: np.ndarray
    """(n, 2) int64, task and number of the document that stays in the place of a duplicate."""
    paragraphs: np.ndarray
    """(m, 2) int64, document and number of each paragraph to leave out, ascending."""

    @classmethod
    def none(cls) -> "Drops":
        """Return decisions that drop nothing."""
        nothing, pairs = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
        return cls(nothing, nothing, np.zeros(0, bool), pairs, pairs)

    @classmethod
    def load(cls, path: Path) -> "Drops":
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return cls(**{each.name: arrays[each.name] for each in fields(cls)})

    def save(self, path: Path) -> None:
        """Write a file that appears whole or not at all."""
        with staged_file(path) as file:
            np.savez(file, **{each.name: getattr(self, each.name) for each in fields(self)})

    def is_filtered(self, number: int) -> bool:
        """Return true for a document that a filter drops."""
        return number in self._filtered

    def duplicate(self, number: int) -> tuple[bool, int, int] | None:
        """Return exactness, and task and number of the first; None for no duplicate."""
        at = self._duplicates.get(number)
        if at is None:
            return None
        task, first = self.firsts[at].tolist()
        return bool(self.exact[at]), task, first

    def dropped_paragraphs(self, number: int) -> Iterator[int]:
        """Yield the numbers of a document's paragraphs to leave out, ascending."""
        begin, end = np.searchsorted(self.paragraphs[:, 0], [number, number + 1])
        yield from map(int, self.paragraphs[begin:end, 1])

    @cached_property
    def _filtered(self) -> frozenset[int]:
        return frozenset(self.filtered.tolist())

    @cached_property
    def _duplicates(self) -> dict[int, int]:
        return {number: at for at, number in enumerate(self.duplicates.tolist())}

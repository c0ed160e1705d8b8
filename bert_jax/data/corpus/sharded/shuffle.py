"""Shuffle of rows from the tasks that write them to the ranges of keys that need them, over files.

A row is a few uint64 words; the first is its key. The upper 32 bits of a key are its unit: for a
hash any number, for a document the index of its task. Rows are written in runs, which are files
sorted by key. A run covers a span of units and is divided into `FAN` slices of this span.

A reducer gets a range of units, and reads one part of each run. Ranges follow from the number of
bytes. Where a slice of all runs is too large for a range, jobs first merge this slice, some runs at
a time, into runs that divide the slice again, as in a radix sort. A run is thus opened at most
`FAN` times, so that the number of opened files grows like the number of runs, not like its square.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data.corpus.sharded.workspace import Part, Workspace
from bert_jax.data.corpus.workers import grouped
from bert_jax.files.staging import staged_file

FAN = 64
"""Number of slices of a run."""
RANGE_BYTES = 1 << 27
"""Number of bytes in a range and in a run. A process takes about six times as much memory."""
HASHES = 1 << 32
"""Number of units of a hash."""
Span = tuple[int, int]
"""First unit, and the unit after the last."""


class Run(NamedTuple):
    """A file of rows in ascending order of keys."""

    name: str
    offsets: np.ndarray
    """(FAN + 1,) int64, offset in bytes of each slice, and the end of the last slice."""


class Range(NamedTuple):
    """A range of units, and the parts of runs that hold its rows."""

    span: Span
    parts: tuple[Part, ...]


class Spill:
    """Rows that are written in runs, so that memory holds only one run.

    Args:
        root: directory of the files.
        name: beginning of the names of the runs.
        span: units that the keys may have.
        limit: number of bytes of a run.
        settle: function that reduces the rows of a run before they are written.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        span: Span,
        limit: int,
        settle: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
    ) -> None:
        self._root, self._name, self._span, self._limit = root, name, span, limit
        self._settle = settle
        self._rows: list[np.ndarray] = []
        self._size = 0
        self._runs: list[Run] = []

    def add(self, rows: np.ndarray) -> None:
        """Add rows, (n, width) uint64. Rows with equal keys stay in the order of their addition."""
        self._rows.append(rows)
        self._size += rows.nbytes
        if self._size >= self._limit:
            self.finish()

    def finish(self) -> list[Run]:
        """Write the remaining rows, and return all runs."""
        if self._size:
            rows = self._settle(np.concatenate(self._rows))
            self._rows, self._size = [], 0
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
            name = f"{self._name}-{len(self._runs)}"
            with staged_file(self._root / name) as file:
                file.write(rows.data)
            slices = np.searchsorted(units(rows), np.array(_edges(self._span), np.uint64))
            self._runs.append(Run(name, slices * rows.shape[1] * rows.itemsize))
        return self._runs


def units(rows: np.ndarray) -> np.ndarray:
    """Return the units of the keys of rows, (n,) uint64."""
    return rows[:, 0] >> np.uint64(32)


@dataclass(frozen=True)
class Inputs:
    """Input of a reducer."""

    space: Workspace
    root: Path
    """Local directory; its files join the workspace when the reducer is done."""
    span: Span
    parts: tuple[Part, ...]
    width: int
    limit: int

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all rows, (n, width) uint64, in arrays of about `limit` bytes."""
        for parts in grouped(self.parts, lambda part: part.end - part.begin, self.limit):
            words = np.frombuffer(b"".join(self.space.read_parts(parts)), np.uint64)
            yield words.reshape(-1, self.width)

    def rows(self) -> np.ndarray:
        """Return all rows, (n, width) uint64; parts follow one another, each sorted by key."""
        return np.concatenate([np.zeros((0, self.width), np.uint64), *self.blocks()])


Reducer = Callable[[Inputs, Callable[[str, np.ndarray], None]], Any]
"""Picklable function (inputs, emit). `emit(kind, rows)` writes rows for another shuffle."""
Map = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Function like `map` that may use several processes; results come in the order of the items."""


@dataclass(frozen=True)
class Shuffle:
    """Shuffles over the files of a workspace."""

    space: Workspace
    map_: Map
    limit: int = field(default_factory=lambda: RANGE_BYTES)

    def reduce(
        self,
        name: str,
        reducer: Reducer,
        runs: Sequence[Run],
        width: int,
        num_units: int,
        outputs: Mapping[str, int],
        weights: np.ndarray | None = None,
        *,
        every: bool = False,
    ) -> tuple[list[Any], dict[str, list[Run]]]:
        """Call a reducer for each range of units.

        Args:
            name: directory for the files.
            reducer: see `Reducer`.
            runs: the rows.
            width: number of words of a row.
            num_units: number of units that the keys have.
            outputs: for each kind of rows that the reducer emits: number of units of its keys.
            weights: (num_units,) bytes that a reducer reads for each unit besides the rows.
            every: whether ranges without rows have reducers too.

        Returns:
            Values that the reducers returned, in the order of the ranges; and runs by kind.
        """
        total = None if weights is None else np.concatenate([[0], np.cumsum(weights)])
        ranges: list[Range] = []
        spans: list[tuple[Span, Sequence[Run]]] = [((0, num_units), runs)]
        for level in itertools.count():
            large: list[tuple[Span, list[Range]]] = []
            for span, found in spans:
                whole, divided = plan(span, found, total, self.limit)
                ranges += [each for each in whole if each.parts or every]
                large += divided
            if not large:
                break
            merges = [each for _, groups in large for each in groups]
            work = _Stage(self.space, f"{name}/{level}", width, self.limit, _merge, {"rows": None})
            merged = iter(self.map_(work, [*enumerate(merges)]))
            spans = [
                (span, [run for _ in groups for run in next(merged)[1]["rows"]])
                for span, groups in large
            ]
        kinds = {kind: (0, units) for kind, units in outputs.items()}
        work = _Stage(self.space, f"{name}/rows", width, self.limit, reducer, kinds)
        results = [*self.map_(work, [*enumerate(ranges)])]
        written = {kind: [run for _, each in results for run in each[kind]] for kind in outputs}
        return [value for value, _ in results], written


def plan(
    span: Span, runs: Sequence[Run], total: np.ndarray | None, limit: int
) -> tuple[list[Range], list[tuple[Span, list[Range]]]]:
    """Divide the span of some runs into ranges.

    Args:
        span: the units.
        runs: runs that cover the span.
        total: (units + 1,) bytes that reducers read for all units below a unit besides the runs.
        limit: number of bytes of a range.

    Returns:
        Ranges of at most about `limit` bytes; and slices that are larger, each with the merges that
        divide its rows.
    """
    edges = _edges(span)
    sizes = sum((np.diff(run.offsets) for run in runs), np.zeros(FAN, np.int64))
    if total is not None:
        sizes = sizes + np.diff(total[edges])
    is_large = (sizes > limit) & (np.diff(edges) > 1)
    ranges: list[Range] = []
    large = []
    for divides, slices in itertools.groupby(range(FAN), is_large.item):
        groups = grouped(slices, sizes.item, 1 if divides else max(1, limit // 2))
        for group in groups:
            first, end = group[0], group[-1] + 1
            inner = edges[first], edges[end]
            parts = [
                Part(run.name, int(run.offsets[first]), int(run.offsets[end]))
                for run in runs
                if run.offsets[first] < run.offsets[end]
            ]
            if divides:
                merges = grouped(parts, lambda part: part.end - part.begin, limit)
                large.append((inner, [Range(inner, tuple(each)) for each in merges]))
            elif inner[0] < inner[1]:
                ranges.append(Range(inner, tuple(parts)))
    return ranges, large


def _edges(span: Span) -> list[int]:
    low, high = span
    return [low + (high - low) * number // FAN for number in range(FAN + 1)]


@dataclass(frozen=True)
class _Stage:
    """A reducer, and where its rows go."""

    space: Workspace
    name: str
    width: int
    limit: int
    reducer: Reducer
    outputs: Mapping[str, Span | None]
    """For each kind of rows: the span of its keys; None for the span of the range."""

    def __call__(self, item: tuple[int, Range]) -> tuple[Any, dict[str, list[Run]]]:
        number, (span, parts) = item
        with self.space.scratch() as root:
            spills = {
                kind: Spill(root, f"{self.name}/{number:06d}-{kind}", keys or span, self.limit)
                for kind, keys in self.outputs.items()
            }
            inputs = Inputs(self.space, root, span, parts, self.width, self.limit)
            value = self.reducer(inputs, lambda kind, rows: spills[kind].add(rows))
            return value, {kind: spill.finish() for kind, spill in spills.items()}


def _merge(inputs: Inputs, emit: Callable[[str, np.ndarray], None]) -> None:
    for block in inputs.blocks():
        emit("rows", block)

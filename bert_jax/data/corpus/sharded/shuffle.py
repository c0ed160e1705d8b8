"""Shuffle of rows, by key, from the tasks that write them to the reducers that need them.

A row is a few uint64 words; the first word is the key. The upper 32 bits of a key are its unit. If
the key is a document, the unit is the index of its task. Rows are written in runs, which are files
sorted by key. A run covers a span of units, divided into `FAN` slices of similar length.

A reducer gets a range of units, and reads one part of each run. A range has about `RANGE_BYTES`. If
a slice exceeds this size over all runs, its rows are first merged, some runs at a time, into new
runs that divide the slice again, as in a radix sort. A run is thus opened at most `FAN` times, so
that the number of opened files grows like the number of runs, not like its square.
"""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data.corpus.sharded.workspace import Part, Workspace
from bert_jax.data.corpus.workers import grouped
from bert_jax.files.staging import staged_file

FAN = 64
"""Number of slices of a run."""
RANGE_BYTES = 3 << 25
"""Number of bytes in a range and in a run. A process takes up to ten times as much memory."""
HASHES = 1 << 32
"""Number of units that keys can have if they are hashes."""
Span = tuple[int, int]
"""First unit of keys (their upper 32 bits), and the unit after the last."""


class Run(NamedTuple):
    """A file of rows in ascending order of keys."""

    name: str
    offsets: np.ndarray
    """(FAN + 1,) int64, offset in bytes of each slice, and the end of the last slice."""


def write_run(root: Path, name: str, span: Span, rows: np.ndarray) -> Run:
    """Sort rows, (n, width) uint64, by key and write them. Equal keys keep their order."""
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    with staged_file(root / name) as file:
        file.write(rows.data)
    slices = np.searchsorted(units(rows), np.array(_edges(span), np.uint64))
    return Run(name, slices * rows.shape[1] * rows.itemsize)


def units(rows: np.ndarray) -> np.ndarray:
    """Return the units of the keys of rows, (n,) uint64."""
    return rows[:, 0] >> np.uint64(32)


Range = tuple[Span, list[Part]]
"""A range of units, and the parts of runs that hold its rows."""


@dataclass(frozen=True)
class Inputs:
    """Input of a reducer."""

    space: Workspace
    root: Path
    """Local directory; its files join the workspace when the reducer is done."""
    span: Span
    parts: Sequence[Part]
    width: int
    limit: int

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all rows, (n, width) uint64, in arrays of about `limit` bytes."""
        for parts in grouped(self.parts, _size, self.limit):
            words = np.frombuffer(b"".join(self.space.read_parts(parts)), np.uint64)
            yield words.reshape(-1, self.width)

    def rows(self) -> np.ndarray:
        """Return all rows, (n, width) uint64; parts follow one another, each sorted by key."""
        return np.concatenate([np.zeros((0, self.width), np.uint64), *self.blocks()])


Rows = Iterator[tuple[str, np.ndarray]]
"""Pairs (kind, array of rows of this kind). Each kind is the input of another shuffle."""
Reducer = Callable[[Inputs], Rows]
"""Picklable function that makes rows from the input of a reducer."""
Map = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Function like `map` that may use several processes; results come in the order of the items."""


def reduce(
    space: Workspace, map_: Map, name: str, reducer: Reducer, runs: Sequence[Run], width: int,
    num_units: int, kinds: Mapping[str, int], weights: np.ndarray | None = None,
) -> dict[str, list[Run]]:  # fmt: skip
    """Call a reducer for each range of units, and return the runs of its rows by kind.

    `runs` hold the rows, of `width` words each, with keys of `num_units` units. The new runs are in
    directory `name` of `space`. `kinds` has the kinds of rows that the reducer yields, each with
    the number of units of its keys. `weights` (num_units,) has the bytes that a reducer reads per
    unit besides the rows. `map_` gets only functions and items that can be pickled.
    """
    total = None if weights is None else np.concatenate([[0], np.cumsum(weights)])
    stage = functools.partial(_run, space, width, RANGE_BYTES)
    ranges: list[Range] = []
    spans: list[tuple[Span, Sequence[Run]]] = [((0, num_units), runs)]
    for level in itertools.count():
        planned = [plan(span, found, total, RANGE_BYTES) for span, found in spans]
        ranges += [each for whole, _ in planned for each in whole]
        if not (large := [each for _, divided in planned for each in divided]):
            break
        merges = enumerate(each for _, groups in large for each in groups)
        merge = functools.partial(stage, f"{name}/{level}", _merge, None)
        merged = iter(map_(merge, [*merges]))
        spans = [
            (span, [run for _ in groups for run in next(merged)["rows"]]) for span, groups in large
        ]
    work = functools.partial(stage, f"{name}/rows", reducer, kinds)
    results = [*map_(work, [*enumerate(ranges)])]
    return {kind: [run for each in results for run in each[kind]] for kind in kinds}


def plan(
    span: Span, runs: Sequence[Run], total: np.ndarray | None, limit: int
) -> tuple[list[Range], list[tuple[Span, list[Range]]]]:
    """Divide the span of some runs into ranges of at most about `limit` bytes.

    `total[u]`, (units + 1,), is the number of bytes, beside the runs, that reducers read for units
    below u. Also return each slice larger than `limit`, with its parts in groups to be merged.
    """
    edges = _edges(span)
    sizes = sum((np.diff(run.offsets) for run in runs), np.zeros(FAN, np.int64))
    if total is not None:
        sizes = sizes + np.diff(total[edges])
    is_large = (sizes > limit) & (np.diff(edges) > 1)
    ranges: list[Range] = []
    large = []
    for divides, slices in itertools.groupby(range(FAN), is_large.item):
        for group in grouped(slices, sizes.item, 1 if divides else max(1, limit // 2)):
            first, end = group[0], group[-1] + 1
            inner = edges[first], edges[end]
            parts = [
                Part(run.name, int(run.offsets[first]), int(run.offsets[end]))
                for run in runs
                if run.offsets[first] < run.offsets[end]
            ]
            if divides:
                large.append((inner, [(inner, each) for each in grouped(parts, _size, limit)]))
            elif parts or (total is not None and inner[0] < inner[1]):
                ranges.append((inner, parts))
    return ranges, large


def _edges(span: Span) -> list[int]:
    low, high = span
    return [low + (high - low) * number // FAN for number in range(FAN + 1)]


def _size(part: Part) -> int:
    return part.end - part.begin


def _run(
    space: Workspace, width: int, limit: int, name: str, reducer: Reducer,
    kinds: Mapping[str, int] | None, item: tuple[int, Range],
) -> dict[str, list[Run]]:  # fmt: skip
    """Write the rows of a reducer as runs of about `limit` bytes; `kinds` are None for a merge."""
    number, (span, parts) = item
    runs: dict[str, list[Run]] = defaultdict(list)
    waiting: dict[str, list[np.ndarray]] = defaultdict(list)
    sizes = Counter[str]()
    with space.scratch() as root:

        def write(kind: str) -> None:
            keys = span if kinds is None else (0, kinds[kind])
            file = f"{name}/{number:06d}/{kind}-{len(runs[kind])}"
            if sizes.pop(kind):
                rows = np.concatenate(waiting.pop(kind))
                runs[kind].append(write_run(root, file, keys, rows))

        for kind, rows in reducer(Inputs(space, root, span, parts, width, limit)):
            waiting[kind].append(rows)
            sizes[kind] += rows.nbytes
            if sizes[kind] >= limit:
                write(kind)
        for kind in [*waiting]:
            write(kind)
    return runs


def _merge(inputs: Inputs) -> Rows:
    for block in inputs.blocks():
        yield "rows", block

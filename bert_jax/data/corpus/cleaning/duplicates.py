"""Search for duplicates, between the first and the second reading of the tasks.

In the first reading, a scan of each task writes the signatures of the documents that pass the
filters into arrays, an index sorted by key (a hash), so that a range of keys takes few reads.

The search divides all keys into ranges. For each range, a worker reads the entries of all scans,
finds pairs of documents with equal keys, and compares these documents. A worker holds one range in
memory. Pairs join documents into groups, and only the first document of each group is kept. The
result therefore does not depend on the number of ranges, tasks or processes.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.corpus.cleaning.clean import Cleaner, CleaningConfig, Drops
from bert_jax.data.corpus.overlap.ngrams import Signatures, sign, similarity
from bert_jax.data.corpus.workers import grouped, map_ordered
from bert_jax.files.staging import disk_full, staged_file

_BLOCK_CHARS = 1 << 20


@dataclass(frozen=True)
class Scan:
    """Signatures, as memory maps, of the n documents of a task that pass the filters.

    A row is the index of a document among these n documents.
    """

    numbers: np.ndarray
    """(n,) int64, index of each row's document in the task, ascending."""
    filtered: np.ndarray
    """(k,) int64, indices in the task of the documents that filters drop, ascending."""
    hashes: np.ndarray
    """(n,) uint64, hash of the words of each row's document."""
    sketches: np.ndarray
    """(s,) uint32, sketches of all rows in succession; see `Signatures`."""
    sketch_offsets: np.ndarray
    """(n + 1,) int64, start of each row's sketch in `sketches`, and the end of the last sketch."""
    document_keys: np.ndarray
    """(e,) uint64, hashes and band keys of all documents, ascending."""
    document_places: np.ndarray
    """(e, 1) uint32, row of each document key."""
    paragraph_keys: np.ndarray
    """(m,) uint64, hashes of all paragraphs, ascending."""
    paragraph_places: np.ndarray
    """(m, 2) uint32 for each paragraph key: row, and the paragraph's index in the document."""

    def sketch(self, row: int) -> np.ndarray:
        """Return the sketch of a row's document."""
        return self.sketches[self.sketch_offsets[row] : self.sketch_offsets[row + 1]]


def scan(
    documents: Iterable[str], config: CleaningConfig, directory: Path, *, num_workers: int = 1
) -> None:
    """Read the documents of a task, and write their scan into an existing directory.

    Memory grows by about 400 bytes per document.

    Raises:
        UserError: The disk is full, or rensa is needed (see `ngrams.sign`) and not installed.
    """
    blocks = grouped(enumerate(documents), lambda item: len(item[1]), _BLOCK_CHARS)
    sign_block = functools.partial(_sign_block, config)
    # The empty block gives the arrays of a task without documents their shapes.
    signed = itertools.chain([sign_block([])], map_ordered(sign_block, blocks, num_workers))
    numbers, filtered, signatures, lengths = [], [], [], [0]
    sketches = directory / "sketches.bin"
    try:
        with open(sketches, "wb") as file:
            for kept, unwanted, found in signed:
                numbers.append(kept)
                filtered.append(unwanted)
                file.writelines(each.data for each in found.sketches)
                lengths += map(len, found.sketches)
                signatures.append(found._replace(sketches=[]))
        arrays = _arrays(numbers, signatures)
        arrays |= {"filtered": np.concatenate(filtered), "sketch_offsets": np.cumsum(lengths)}
        for name, array in arrays.items():
            np.save(directory / f"{name}.npy", array)
    except OSError as error:
        raise disk_full(directory, error) from error


def _sign_block(
    config: CleaningConfig, block: list[tuple[int, str]]
) -> tuple[np.ndarray, np.ndarray, Signatures]:
    """Return the indices of kept and of filtered documents, and the kept documents' signatures."""
    cleaner = Cleaner(config)
    cleaned = {number: cleaner.clean(number, text) for number, text in block}
    kept = {number: text for number, text in cleaned.items() if isinstance(text, str)}
    filtered = np.array([number for number in cleaned if number not in kept], np.int64)
    near, paragraphs = config.near_duplicates is not None, config.duplicate_paragraphs
    found = sign(list(kept.values()), near=near, paragraphs=paragraphs)
    return np.array(list(kept), np.int64), filtered, found


def _arrays(
    numbers: Sequence[np.ndarray], signatures: Sequence[Signatures]
) -> dict[str, np.ndarray]:
    firsts = np.cumsum([0, *map(len, numbers)])  # row of each block's first document
    keys, rows, paragraphs, places = [], [], [], []
    for first, each in zip(firsts, signatures, strict=False):
        block = np.column_stack([each.hashes, each.bands])
        keys.append(block.reshape(-1))
        rows.append(np.repeat(first + np.arange(len(block)), block.shape[1])[:, None])
        paragraphs.append(each.paragraphs[:, 0])
        places.append(each.paragraphs[:, 1:] + np.array([first, 0], np.uint64))
    arrays = {
        "numbers": _joined(numbers, np.int64),
        "hashes": _joined([each.hashes for each in signatures], np.uint64),
    }
    for name, parts, where in (("document", keys, rows), ("paragraph", paragraphs, places)):
        found = _joined(parts, np.uint64)
        order = np.argsort(found, kind="stable")
        arrays[f"{name}_keys"] = found[order]
        arrays[f"{name}_places"] = _joined(where, np.uint32)[order]
    return arrays


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype)


RANGE_ENTRIES = 1 << 22
"""Number of index entries in a range; the search needs about 0.5 GB of memory for a range."""

Map = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Function like `map` that may use several processes; results come in the order of the items."""


def find_duplicates(
    scans: Sequence[Path], config: CleaningConfig, directory: Path, *, map_: Map = map
) -> list[Path]:
    """Decide which documents and paragraphs to drop, and write the decisions to files.

    Args:
        scans: directories that `scan` wrote, one per task, in the order of the corpus.
        config: the rules, as for the scans.
        directory: existing, empty, for the decisions; all processes must reach it and the scans.
        map_: see `Map`. It is called only with functions and items that can be pickled.

    Returns:
        A file for each task, to be read with `Drops.load`.

    Raises:
        UserError: The disk is full.
    """
    work = _Work(scans, directory, config)
    try:
        parents = np.memmap(
            directory / "parents.bin", np.int64, mode="w+", shape=(int(work.bases[-1]) + 1,)
        )
        parents[:] = np.arange(len(parents))
        for path in map_(functools.partial(_document_pairs, work), _ranges(work.document_keys)):
            for later, first in np.load(path, mmap_mode="r"):
                _join(parents, int(later), int(first))
        for begin in range(0, len(parents), RANGE_ENTRIES):
            nodes = np.arange(begin, min(begin + RANGE_ENTRIES, len(parents)))
            while ((above := parents[nodes]) != nodes).any():
                nodes = above
            parents[begin : begin + RANGE_ENTRIES] = nodes
        parents.flush()
        ranges = _ranges(work.paragraph_keys)
        spills = list(map_(functools.partial(_repeated_paragraphs, work), ranges))
        for task in range(len(scans)):
            _drops(work, task, parents, spills).save(directory / f"{task:05d}.npz")
    except OSError as error:
        raise disk_full(directory, error) from error
    return [directory / f"{task:05d}.npz" for task in range(len(scans))]


class _Work:
    """The scans of all tasks; each process keeps some of them open."""

    def __init__(self, scans: Sequence[Path], directory: Path, config: CleaningConfig) -> None:
        self.directory = directory
        self.threshold = 1.0 if config.near_duplicates is None else config.near_duplicates
        # The file's time tells a new scan from one that a process has cached for the same path.
        self._scans = [(path, (path / "numbers.npy").stat().st_mtime_ns) for path in scans]
        rows, self.document_keys, self.paragraph_keys = [0], 0, 0
        for task in range(len(scans)):
            scan = self.scan(task)
            rows.append(len(scan.numbers))
            self.document_keys += len(scan.document_keys)
            self.paragraph_keys += len(scan.paragraph_keys)
        self.bases = np.cumsum(rows)
        """(tasks + 1,), number of rows before each task; the last entry is the total."""

    def scan(self, task: int) -> Scan:
        """Return the scan of a task."""
        return _opened(*self._scans[task])

    def locate(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Convert corpus rows (counted over all tasks) to tasks and rows in them, (n,) each."""
        tasks = np.searchsorted(self.bases, documents, side="right") - 1
        return tasks, documents - self.bases[tasks]

    def entries(self, name: str, span: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the sorted keys in a range, and each key's place.

        Keys are (n,) uint64. Places are (n, 1) or (n, 2) int64: the corpus row (see
        `locate`) and, for paragraphs, also the paragraph's index in the document.
        """
        keys, places = [np.zeros(0, np.uint64)], []
        for task in range(len(self._scans)):
            scan = self.scan(task)
            sorted_keys, found = (getattr(scan, f"{name}_{what}") for what in ("keys", "places"))
            # Search for the range's last key, since the end of the last range, 2^64, has 65 bits.
            begin = np.searchsorted(sorted_keys, np.uint64(span[0]))
            end = np.searchsorted(sorted_keys, np.uint64(span[1] - 1), side="right")
            keys.append(sorted_keys[begin:end])
            place = found[begin:end].astype(np.int64)
            place[:, 0] += self.bases[task]
            places.append(place)
        key, place = np.concatenate(keys), np.concatenate(places)
        order = np.lexsort((*place.T[::-1], key))
        return key[order], place[order]


@functools.lru_cache(32)  # few, since a memory map holds a file descriptor
def _opened(directory: Path, stamp: int) -> Scan:
    """Open the scan that `scan` wrote into a directory."""
    arrays = {
        each.name: np.load(directory / f"{each.name}.npy", mmap_mode="r")
        for each in fields(Scan)
        if each.name != "sketches"
    }
    file = directory / "sketches.bin"
    empty = not file.stat().st_size
    sketches = np.zeros(0, np.uint32) if empty else np.memmap(file, np.uint32, mode="r")
    return Scan(sketches=sketches, **arrays)


def _ranges(num_entries: int) -> list[tuple[int, int]]:
    """Divide the 64-bit keys into ranges of about `RANGE_ENTRIES` entries each."""
    count = -(-num_entries // RANGE_ENTRIES)
    edges = [(number << 64) // max(count, 1) for number in range(count + 1)]
    return list(itertools.pairwise(edges))


def _document_pairs(work: _Work, span: tuple[int, int]) -> Path:
    """Find equal or similar documents in a range; write pairs of corpus rows (later, earlier)."""
    keys, places = work.entries("document", span)
    documents, local = np.unique(places[:, 0], return_inverse=True)
    tasks, rows = work.locate(documents)
    hashes = np.zeros(len(documents), np.uint64)
    for task in np.unique(tasks).tolist():
        mine = tasks == task
        hashes[mine] = work.scan(task).hashes[rows[mine]]

    def sketch(document: int) -> np.ndarray:
        return work.scan(int(tasks[document])).sketch(int(rows[document]))

    parents = list(range(len(documents)))
    pairs = []
    for first, later in _candidates(keys, local):
        if _root(parents, first) == _root(parents, later):
            continue
        if hashes[first] == hashes[later] or (
            work.threshold < 1 and similarity(sketch(first), sketch(later)) >= work.threshold
        ):
            _join(parents, first, later)
            pairs.append((documents[later], documents[first]))
    path = work.directory / f"pairs-{span[0]:020d}.npy"
    with staged_file(path) as file:
        np.save(file, np.array(pairs, np.int64).reshape(-1, 2))
    return path


def _candidates(keys: np.ndarray, documents: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield pairs (earlier, later) of documents with a key in common, each pair once.

    Each document is paired with the first and with the preceding document of the same key.
    """
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)])
    first = np.repeat(starts, np.diff(starts, append=len(keys)))
    others = np.flatnonzero(np.arange(len(keys)) != first)
    pairs = np.concatenate(
        [
            np.column_stack([documents[first[others]], documents[others]]),
            np.column_stack([documents[others - 1], documents[others]]),
        ]
    )
    yield from map(tuple, np.unique(pairs, axis=0).tolist())


def _repeated_paragraphs(work: _Work, span: tuple[int, int]) -> Path:
    """Find paragraphs in a range that repeat earlier ones; write (corpus row, paragraph index)."""
    keys, places = work.entries("paragraph", span)
    parents = np.memmap(work.directory / "parents.bin", np.int64, mode="r")
    stays = parents[places[:, 0]] == places[:, 0]
    keys, places = keys[stays], places[stays]
    repeated = places[1:][keys[1:] == keys[:-1]]
    path = work.directory / f"paragraphs-{span[0]:020d}.npy"
    with staged_file(path) as file:
        np.save(file, repeated[np.lexsort((repeated[:, 1], repeated[:, 0]))])
    return path


def _drops(work: _Work, task: int, parents: np.ndarray, spills: Sequence[Path]) -> Drops:
    scan, base = work.scan(task), work.bases[task]
    roots = np.asarray(parents[base : base + len(scan.numbers)])
    rows = np.flatnonzero(roots != base + np.arange(len(roots)))
    tasks, there = work.locate(roots[rows])
    firsts, exact = np.zeros((len(rows), 2), np.int64), np.zeros(len(rows), bool)
    for other in np.unique(tasks).tolist():
        mine, first = tasks == other, work.scan(other)
        firsts[mine] = np.column_stack([tasks[mine], first.numbers[there[mine]]])
        exact[mine] = first.hashes[there[mine]] == scan.hashes[rows[mine]]
    paragraphs = [np.zeros((0, 2), np.int64)]
    for path in spills:
        spill = np.load(path, mmap_mode="r")
        begin, end = np.searchsorted(spill[:, 0], [base, base + len(scan.numbers)])
        paragraphs.append(spill[begin:end] - np.array([base, 0]))
    places = np.concatenate(paragraphs)
    places = places[np.lexsort((places[:, 1], places[:, 0]))]
    places[:, 0] = scan.numbers[places[:, 0]]
    return Drops(
        filtered=np.array(scan.filtered),
        duplicates=np.array(scan.numbers[rows]),
        exact=exact,
        firsts=firsts,
        paragraphs=places,
    )


def _root(parents: MutableSequence[int] | np.ndarray, node: int) -> int:
    """Return the root of a node, the first document of its group; shorten the path to the root."""
    while (parent := int(parents[node])) != node:
        parents[node] = parents[parent]
        node = parent
    return node


def _join(parents: MutableSequence[int] | np.ndarray, one: int, other: int) -> None:
    one, other = _root(parents, one), _root(parents, other)
    parents[max(one, other)] = min(one, other)

"""Search for duplicates, between the first and the second reading of the tasks.

In the first reading, a scan of each task writes rows (key, hash of the words, document) for the
documents that pass the filters. A document's keys are the hash of its words and its band keys.
Documents are numbered in the order of the corpus: the index of the task times 2^32, plus the index
in the task. The search is a series of shuffles (see `shuffle`):

1. by key: documents with equal words are duplicates, others with equal keys are candidates;
2. by the later document of each pair of candidates, which adds the later document's sketch;
3. by the earlier document, whose sketch is compared with the later document's sketch;
4. by document, in rounds: pairs join documents into groups (see `_grouped`);
5. by document: every document of a group but the first is dropped;
6. by the hash of a paragraph, if repeated paragraphs are left out, and back by document.

No step depends on the division of the corpus into tasks and ranges, so the result does not either.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.corpus.cleaning.clean import Cleaner, CleaningConfig, Drops
from bert_jax.data.corpus.overlap.ngrams import Signatures, sign, similarity
from bert_jax.data.corpus.sharded import shuffle
from bert_jax.data.corpus.sharded.shuffle import HASHES, Inputs, Map, Run, Shuffle, Spill, units
from bert_jax.data.corpus.sharded.workspace import Workspace
from bert_jax.data.corpus.workers import grouped, map_ordered
from bert_jax.files.staging import disk_full, staged_file

_BLOCK_CHARS = 1 << 20
_TASK = np.uint64(32)
"""Number of bits of a document's index in its task."""
_INDEX = np.uint64((1 << 32) - 1)
_SKETCH_WORDS = 16
"""Number of words of a row that holds part of a sketch."""

Emit = Callable[[str, np.ndarray], None]


def scan(
    documents: Iterable[str],
    config: CleaningConfig,
    root: Path,
    task: int = 0,
    *,
    num_workers: int = 1,
) -> dict[str, Any]:
    """Read the documents of a task, and write their signatures to files in `root`/scans.

    Memory does not grow with the task.

    Returns:
        The runs of rows, and the sizes of other files, as JSON values for `find_duplicates`.

    Raises:
        UserError: The disk is full, or rensa is needed (see `ngrams.sign`) and not installed.
    """
    directory = root / "scans" / f"{task:05d}"
    blocks = grouped(enumerate(documents), lambda item: len(item[1]), _BLOCK_CHARS)
    signed = map_ordered(functools.partial(_sign_block, config), blocks, num_workers)
    number = np.uint64(task) << _TASK
    end = 0
    with contextlib.ExitStack() as stack:
        filtered, ends_file, sketches, paragraphs, equal = (
            stack.enter_context(staged_file(directory / name))
            for name in ("filtered.bin", "documents.bin", "sketches.bin", "paragraphs.bin",
                         "equal.bin")
        )  # fmt: skip

        def settle(rows: np.ndarray) -> np.ndarray:
            rows, pairs = _distinct_texts(rows)
            equal.write(pairs.data)
            return rows

        keys = f"scans/{task:05d}/keys"
        spill = Spill(root, keys, (0, HASHES), shuffle.RANGE_BYTES, settle)
        for kept, unwanted, found in signed:
            filtered.write(unwanted.data)
            names = kept.astype(np.uint64) + number
            block = np.column_stack([found.hashes, found.bands])
            rows = np.stack(np.broadcast_arrays(block, found.hashes[:, None], names[:, None]), -1)
            spill.add(rows.reshape(-1, 3))
            ends = end + np.cumsum([len(each) for each in found.sketches], dtype=np.uint64)
            ends_file.write(np.column_stack([names, ends]).data)
            end = int(ends[-1]) if len(ends) else end
            sketches.writelines(each.data for each in found.sketches)
            hashes, places, indices = found.paragraphs.T
            paragraphs.write(np.column_stack([hashes, names[places], indices]).data)
        runs = [[run.name, run.offsets.tolist()] for run in spill.finish()]
        return {"runs": runs, "sketches": end * 4, "paragraphs": paragraphs.tell()}


def _sign_block(
    config: CleaningConfig, block: list[tuple[int, str]]
) -> tuple[np.ndarray, np.ndarray, Signatures]:
    """Return the indices of kept and of filtered documents, and the kept documents' signatures."""
    cleaner = Cleaner(config)
    cleaned = {number: cleaner.clean(number, text) for number, text in block}
    kept = {number: text for number, text in cleaned.items() if isinstance(text, str)}
    filtered = np.array([number for number in cleaned if number not in kept], np.int64)
    near, paragraphs = _threshold(config), config.duplicate_paragraphs
    found = sign(list(kept.values()), near=near, paragraphs=paragraphs)
    return np.array(list(kept), np.int64), filtered, found


def _threshold(config: CleaningConfig) -> float | None:
    """Return the similarity of near-duplicates; None if only equal documents are dropped."""
    return None if config.near_duplicates == 1 else config.near_duplicates


def _distinct_texts(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep the first document of each key and text, from rows (key, hash, document).

    Returns:
        Rows that are kept, by key and hash; and pairs (duplicate, document that is kept) of
        documents with equal words.
    """
    rows = rows[np.lexsort(rows.T[::-1])]
    begins = _changes(rows[:, :2])
    first = np.maximum.accumulate(np.where(begins, np.arange(len(rows)), 0))
    equal = ~begins & (rows[:, 0] == rows[:, 1])
    return rows[begins], np.column_stack([rows[equal, 2], rows[first[equal], 2]])


def _changes(rows: np.ndarray) -> np.ndarray:
    """Mark the rows that differ from the row before, (n,) bool."""
    return np.concatenate([np.ones(1, bool), (rows[1:] != rows[:-1]).any(1)])[: len(rows)]


def find_duplicates(
    scans: Sequence[Mapping[str, Any]], config: CleaningConfig, space: Workspace, map_: Map = map
) -> None:
    """Decide which documents and paragraphs to drop.

    Write the decisions for each task to `drops/NNNNN.npz`, a file for `Drops.load`.

    Args:
        scans: what `scan` returned, for each task in the order of the corpus.
        config: the rules, as for the scans.
        space: workspace with the files of the scans.
        map_: see `Map`. It is called only with functions and items that can be pickled.

    Raises:
        UserError: The disk is full.
    """
    tasks, whole, paragraphs = len(scans), Shuffle(space, map_), config.duplicate_paragraphs
    sizes = {name: np.array([scan[name] for scan in scans]) for name in ("sketches", "paragraphs")}
    keys = [Run(name, np.array(offsets)) for scan in scans for name, offsets in scan["runs"]]
    try:
        to_tasks = {"pairs": tasks, "equal": tasks}
        _, found = whole.reduce("keys", _candidates, keys, 3, HASHES, to_tasks)
        equal, similar = found["equal"], found["pairs"]
        if (threshold := _threshold(config)) is not None:
            _, found = whole.reduce(
                "sketches", _add_sketches, similar, 2, tasks, {"sketches": tasks}, sizes["sketches"]
            )
            compare = functools.partial(_similar, threshold)
            _, found = whole.reduce(
                "similar", compare, found["sketches"], _SKETCH_WORDS, tasks, {"pairs": tasks},
                sizes["sketches"],
            )  # fmt: skip
            similar = found["pairs"]
        _, found = whole.reduce(
            "drops", functools.partial(_decide, paragraphs),
            [*_grouped(whole, [*equal, *similar], tasks), *equal], 2, tasks,
            {"paragraphs": HASHES, "repeated": tasks}, sizes["paragraphs"], every=True,
        )  # fmt: skip
        if paragraphs:
            repeated = found["repeated"]
            _, found = whole.reduce(
                "paragraphs",
                _repeated_paragraphs,
                found["paragraphs"],
                3,
                HASHES,
                {"repeated": tasks},
            )
            whole.reduce(
                "repeated", _drop_paragraphs, [*repeated, *found["repeated"]], 2, tasks, {}
            )
    except OSError as error:
        raise disk_full(Path(space.place), error) from error


def _candidates(inputs: Inputs, emit: Emit) -> None:
    """Emit pairs (later, earlier) of documents with equal words, and of documents to compare.

    Each document is to be compared with the first and with the preceding document of the same key.
    """
    rows, equal = _distinct_texts(inputs.rows())
    emit("equal", equal)
    rows = rows[np.lexsort((rows[:, 2], rows[:, 0]))]
    begins = _changes(rows[:, :1])
    first = np.maximum.accumulate(np.where(begins, np.arange(len(rows)), 0))
    later = np.flatnonzero(~begins)
    others = np.concatenate([first[later], later - 1])
    emit("pairs", _unique(np.column_stack([rows[np.tile(later, 2), 2], rows[others, 2]])))


def _unique(rows: np.ndarray) -> np.ndarray:
    """Sort rows, and leave out repetitions."""
    rows = rows[np.lexsort(rows.T[::-1])]
    return rows[_changes(rows)]


@contextlib.contextmanager
def _open_sketches(space: Workspace, task: int) -> Iterator[Callable[[int], np.ndarray]]:
    """Yield a function from a document of a task to its sketch."""
    directory = f"scans/{task:05d}"
    with contextlib.ExitStack() as stack:
        names, values = (
            stack.enter_context(space.local_copy(f"{directory}/{name}.bin"))
            for name in ("documents", "sketches")
        )
        documents = np.fromfile(names, np.uint64).reshape(-1, 2)
        sketches = np.memmap(values, np.uint32, mode="r")

        def sketch(document: int) -> np.ndarray:
            row = int(np.searchsorted(documents[:, 0], np.uint64(document)))
            begin = documents[row - 1, 1] if row else 0
            return np.array(sketches[int(begin) : int(documents[row, 1])])

        yield sketch


def _by_task(rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (task, rows) for each task that has rows; the keys, documents, are ascending."""
    tasks, begins = np.unique(units(rows), return_index=True)
    yield from zip(tasks.tolist(), np.split(rows, begins[1:]), strict=False)


def _add_sketches(inputs: Inputs, emit: Emit) -> None:
    """Emit (earlier, later, length, sketch of the later document) for pairs (later, earlier)."""
    for task, pairs in _by_task(_unique(inputs.rows())):
        with _open_sketches(inputs.space, task) as sketch:
            for later, earlier in pairs.tolist():
                found = sketch(later)
                size = 4 + len(found)  # in words of 32 bits, with `later` and the length
                rows = -(-size // (2 * (_SKETCH_WORDS - 1)))
                values = np.zeros(rows * (_SKETCH_WORDS - 1), np.uint64)
                values[:2] = later, len(found)
                values.view(np.uint32)[4:size] = found
                key = np.full((rows, 1), earlier, np.uint64)
                emit("sketches", np.hstack([key, values.reshape(rows, -1)]))


def _similar(threshold: float, inputs: Inputs, emit: Emit) -> None:
    """Emit the pairs (later, earlier) whose similarity reaches the threshold."""
    for block in inputs.blocks():
        rows = block[np.argsort(block[:, 0], kind="stable")]
        for task, mine in _by_task(rows):
            with _open_sketches(inputs.space, task) as sketch:
                pairs = [
                    (later, earlier)
                    for earlier, later, other in _sketches(mine)
                    if similarity(sketch(earlier), other) >= threshold
                ]
            emit("pairs", np.array(pairs, np.uint64).reshape(-1, 2))


def _sketches(rows: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (earlier, later, sketch of the later document) from what `_add_sketches` emitted."""
    at = 0
    while at < len(rows):
        earlier, later, length = rows[at, :3].tolist()
        end = at + -(-(4 + length) // (2 * (_SKETCH_WORDS - 1)))
        yield earlier, later, rows[at:end, 1:].reshape(-1).view(np.uint32)[4 : 4 + length]
        at = end


def _grouped(whole: Shuffle, pairs: Sequence[Run], tasks: int) -> list[Run]:
    """Join pairs (later, earlier) into groups.

    Each round joins the pairs of a range of later documents into stars, in which each document is
    paired with the first; then each document gives its later neighbours to its first neighbour.
    Groups are complete if a round changes nothing. The number of rounds grows with the logarithm
    of the number of documents in a chain (Kiveris et al. 2014, "Connected Components in MapReduce
    and Beyond", small-star and large-star).

    Returns:
        Pairs (document, first document of its group), for each document but the first.
    """
    for step in itertools.count():
        starred, found = whole.reduce(f"stars/{step}", _stars, pairs, 2, tasks, {"pairs": tasks})
        linked, found = whole.reduce(
            f"links/{step}", _links, found["pairs"], 2, tasks, {"pairs": tasks}
        )
        pairs = found["pairs"]
        if not any([*starred, *linked]):
            break
    return list(pairs)


def _stars(inputs: Inputs, emit: Emit) -> bool:
    """Emit the stars of pairs (later, earlier), in both directions; tell whether pairs changed."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    pairs = _unique(inputs.rows())
    documents, ends = np.unique(pairs, return_inverse=True)
    ends = ends.reshape(pairs.shape).T
    graph = coo_array((np.ones(len(pairs), bool), tuple(ends)), shape=2 * documents.shape)
    _, groups = connected_components(graph, directed=False)
    firsts = documents[np.unique(groups, return_index=True)[1]][groups]
    stars = np.column_stack([documents, firsts])[documents != firsts]
    emit("pairs", np.concatenate([stars, stars[:, ::-1]]))
    return not np.array_equal(stars, pairs)


def _links(inputs: Inputs, emit: Emit) -> bool:
    """Emit (later, first) for the later neighbours of each document in pairs of both directions.

    `first` is the first document among the document and its neighbours. Return true if any pair
    changed.
    """
    pairs = _unique(inputs.rows())
    documents, begins, counts = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    firsts = np.repeat(np.minimum(documents, pairs[begins, 1]), counts)
    later = pairs[:, 1] > pairs[:, 0]
    emit("pairs", np.column_stack([pairs[later, 1], firsts[later]]))
    return bool((firsts != pairs[:, 0])[later].any())


def _decide(paragraphs: bool, inputs: Inputs, emit: Emit) -> None:
    """Save the decisions on documents; emit the `paragraphs` of the documents that are kept.

    The inputs are pairs (document, first of its group), and pairs (document, first with the same
    words). A document is an exact duplicate of the first of its group if these two are the same.
    """
    pairs = inputs.rows()
    pairs = pairs[np.lexsort(pairs.T[::-1])]
    documents, begins, counts = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    firsts = pairs[begins, 1]
    exact = (counts > 1) & (pairs[begins + counts - 1, 1] == firsts)
    for task in range(*inputs.span):
        name = f"scans/{task:05d}"
        filtered, equal = (
            inputs.space.read(f"{name}/{each}.bin") for each in ("filtered", "equal")
        )
        # Documents whose words another document of the same run has share the fate of the latter.
        twins, kept = np.frombuffer(equal or b"", np.uint64).reshape(-1, 2).T
        is_dropped, at = np.isin(kept, documents), np.searchsorted(documents, kept)
        mine = slice(*np.searchsorted(documents, np.array([task, task + 1], np.uint64) << _TASK))
        first, is_exact = kept.copy(), np.ones(len(kept), bool)
        first[is_dropped], is_exact[is_dropped] = firsts[at[is_dropped]], exact[at[is_dropped]]
        dropped = np.concatenate([documents[mine], twins])
        order = np.argsort(dropped)
        first = np.concatenate([firsts[mine], first])[order]
        Drops(
            filtered=np.frombuffer(filtered or b"", np.int64),
            duplicates=(dropped[order] & _INDEX).astype(np.int64),
            exact=np.concatenate([exact[mine], is_exact])[order],
            firsts=np.column_stack([first >> _TASK, first & _INDEX]).astype(np.int64),
            paragraphs=np.zeros((0, 2), np.int64),
        ).save(inputs.root / f"drops/{task:05d}.npz")
        with contextlib.ExitStack() as stack:
            if paragraphs:
                path = stack.enter_context(inputs.space.local_copy(f"{name}/paragraphs.bin"))
                file = stack.enter_context(open(path, "rb"))
                while len(words := np.fromfile(file, np.uint64, 3 * max(1, inputs.limit // 24))):
                    rows = words.reshape(-1, 3)
                    begins_text, repeated = _repeated(rows[~np.isin(rows[:, 1], dropped)])
                    emit("paragraphs", begins_text)
                    emit("repeated", repeated)


def _repeated(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divide rows (hash, document, index) of paragraphs.

    Returns:
        Rows of the first paragraph of each hash; and (document, index) of the others.
    """
    rows = rows[np.lexsort(rows.T[::-1])]
    begins = _changes(rows[:, :1])
    return rows[begins], rows[~begins, 1:]


def _repeated_paragraphs(inputs: Inputs, emit: Emit) -> None:
    """Emit (document, index) of paragraphs that occur earlier."""
    emit("repeated", _repeated(inputs.rows())[1])


def _drop_paragraphs(inputs: Inputs, emit: Emit) -> None:
    """Add paragraphs (document, index) to the decisions on their documents."""
    del emit
    for task, rows in _by_task(_unique(inputs.rows())):
        name = f"drops/{task:05d}.npz"
        drops = Drops.load(inputs.space.read(name) or b"")
        paragraphs = (rows & _INDEX).astype(np.int64)
        drops._replace(paragraphs=paragraphs).save(inputs.root / name)

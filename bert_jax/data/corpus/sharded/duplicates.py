"""Search for duplicates, between the first and the second reading of the tasks.

In the first reading, a scan of each task writes rows (key, hash of the words, document) for the
documents that pass the filters. A document's keys are the hash of its words and its band keys.
Documents are numbered in the order of the corpus: the index of the task times 2^32, plus the index
in the task. The search is a series of shuffles (see `shuffle`):

1. by key: documents with equal words are duplicates, others with equal keys are candidates;
2. by the later document of each pair of candidates: the document's sketch joins the row;
3. by the earlier document of each pair: its sketch is compared with the sketch in the row;
4. by document, in rounds: duplicates are joined into groups (see `grouped_pairs`);
5. by document: every document of a group but the first is dropped;
6. only if repeated paragraphs are left out: by the hash of a paragraph, then by document.

No step depends on the division of the corpus into tasks and ranges, so the result does not either.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.corpus.cleaning.clean import Cleaner, CleaningConfig, Drops
from bert_jax.data.corpus.overlap.ngrams import Signatures, sign, similarity
from bert_jax.data.corpus.sharded import shuffle
from bert_jax.data.corpus.sharded.shuffle import HASHES, Inputs, Rows, Run, units, write_run
from bert_jax.data.corpus.sharded.workspace import Workspace
from bert_jax.data.corpus.workers import grouped, map_ordered
from bert_jax.files.staging import staged_file

_BLOCK_CHARS = 1 << 20
_TASK = np.uint64(32)
"""Number of bits of a document's index in its task."""
_INDEX = np.uint64((1 << 32) - 1)
_WORDS = 16
"""Number of uint64 words per row of a sketch: a key, and 30 uint32s of header (4) and sketch."""


def scan(
    documents: Iterable[str], config: CleaningConfig, root: Path, task: int, *, num_workers: int = 1
) -> dict[str, Any]:
    """Read the documents of a task, and write their signatures to files in `root`/scans.

    Memory does not grow with the task. Return JSON values for `find_duplicates`. Raise a UserError
    if the disk is full, or rensa is needed (see `ngrams.sign`) and not installed.
    """
    name = f"scans/{task:05d}"
    blocks = grouped(enumerate(documents), lambda item: len(item[1]), _BLOCK_CHARS)
    signed = map_ordered(functools.partial(_sign_block, config), blocks, num_workers)
    with contextlib.ExitStack() as stack:
        filtered, ends, sketches, paragraphs, equal = (
            stack.enter_context(staged_file(root / name / f"{each}.bin"))
            for each in ("filtered", "ends", "sketches", "paragraphs", "equal")
        )

        def key_rows() -> Iterator[np.ndarray]:
            for kept, unwanted, found in signed:
                filtered.write(unwanted.data)
                numbers = kept.astype(np.uint64) + (np.uint64(task) << _TASK)
                sizes = np.array([len(each) for each in found.sketches], np.uint64)
                end = np.uint64(sketches.tell() // 4) + np.cumsum(sizes, dtype=np.uint64)
                ends.write(np.column_stack([numbers, end]).data)
                sketches.writelines(each.data for each in found.sketches)
                hashes, places, indices = found.paragraphs.T
                paragraphs.write(np.column_stack([hashes, numbers[places], indices]).data)
                keys = np.column_stack([found.hashes, found.bands])
                columns = keys, found.hashes[:, None], numbers[:, None]
                yield np.stack(np.broadcast_arrays(*columns), -1).reshape(-1, 3)

        runs = list[list[Any]]()
        for parts in grouped(key_rows(), lambda rows: rows.nbytes, shuffle.RANGE_BYTES):
            rows, pairs = _distinct_texts(np.concatenate(parts))
            equal.write(pairs.data)
            run = write_run(root, f"{name}/keys-{len(runs)}", (0, HASHES), rows)
            runs.append([run.name, run.offsets.tolist()])
        return {"runs": runs, "sketches": sketches.tell(), "paragraphs": paragraphs.tell()}


def _sign_block(
    config: CleaningConfig, block: list[tuple[int, str]]
) -> tuple[np.ndarray, np.ndarray, Signatures]:
    """Return the indices of kept and of filtered documents, and the kept documents' signatures."""
    cleaner = Cleaner(config)
    cleaned = {number: cleaner.clean(number, text) for number, text in block}
    kept = {number: text for number, text in cleaned.items() if isinstance(text, str)}
    filtered = np.array([number for number in cleaned if number not in kept], np.int64)
    near, paragraphs = config.near_duplicates, config.duplicate_paragraphs
    found = sign(list(kept.values()), near=near, paragraphs=paragraphs)
    return np.array(list(kept), np.int64), filtered, found


def _sorted(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T[::-1])]


def _begins(rows: np.ndarray) -> np.ndarray:
    """Return a mask, (n,) bool, of the first row and of rows that differ from the row before."""
    return np.concatenate([np.ones(1, bool), (rows[1:] != rows[:-1]).any(1)])[: len(rows)]


def _unique(rows: np.ndarray) -> np.ndarray:
    rows = _sorted(rows)
    return rows[_begins(rows)]


def _distinct_texts(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row (key, hash, document) of each key and hash.

    Also return pairs (duplicate, document that is kept) of documents with equal words.
    """
    rows = _sorted(rows)
    begins = _begins(rows[:, :2])
    kept, group = rows[begins], np.cumsum(begins) - 1
    equal = ~begins & (rows[:, 0] == rows[:, 1])
    return kept, np.column_stack([rows[equal, 2], kept[group[equal], 2]])


def find_duplicates(
    scans: Sequence[Mapping[str, Any]],
    config: CleaningConfig,
    space: Workspace,
    map_: shuffle.Map = map,
) -> None:
    """Decide which documents and paragraphs to drop.

    The decisions are written to files for `read_drops`. `scans` has the result of `scan` for each
    task, in the order of the corpus. `space` has the files of the scans. For `map_`, see
    `shuffle.reduce`. Raise a UserError if the disk is full.
    """
    tasks, reduce = len(scans), functools.partial(shuffle.reduce, space, map_)
    sketches, texts = (np.array([s[each] for s in scans]) for each in ("sketches", "paragraphs"))
    keys = [Run(name, np.array(offsets)) for scan in scans for name, offsets in scan["runs"]]
    pairs = {"pairs": tasks}
    found = reduce("keys", _candidates, keys, 3, HASHES, {"equal": tasks} | pairs)
    equal, similar = found["equal"], found["pairs"]
    if (threshold := config.near_duplicates) is not None:
        found = reduce("later", _add_sketches, similar, 2, tasks, {"sketches": tasks}, sketches)
        sent, compare = found["sketches"], functools.partial(_similar, threshold)
        similar = reduce("earlier", compare, sent, _WORDS, tasks, pairs, sketches)["pairs"]
    links, _ = grouped_pairs(reduce, [*equal, *similar], tasks)
    decide = functools.partial(_decide, config.duplicate_paragraphs)
    kinds = {"paragraphs": HASHES, "repeated": tasks}
    found = reduce("documents", decide, [*links, *equal], 2, tasks, kinds, texts)
    if config.duplicate_paragraphs:
        hashes, repeated = found["paragraphs"], found["repeated"]
        found = reduce("paragraphs", _repeats, hashes, 3, HASHES, {"repeated": tasks})
        reduce("repeated", _drop_paragraphs, repeated + found["repeated"], 2, tasks, {})


def read_drops(space: Workspace, task: int) -> bytes:
    """Return the decisions on the documents of a task, for `Drops.load`."""
    return space.read(f"scans/{task:05d}/drops.npz") or b""


def grouped_pairs(
    reduce: Callable[..., dict[str, list[Run]]], pairs: list[Run], tasks: int
) -> tuple[list[Run], int]:
    """Join pairs (later, earlier) of documents into groups.

    Two steps alternate until nothing changes. Each step finds the first among a document and its
    neighbours. One step links the earlier neighbours to this first document; the other step links
    the later neighbours. The number of rounds grows with log(size of a group) (Kiveris et al.
    2014, "Connected Components in MapReduce and Beyond", small-star and large-star). Return pairs
    (document, first document of its group), and the number of rounds.
    """
    changed = [True, True]
    while len(changed) % 2 or any(changed[-2:]):
        link = functools.partial(_links, len(changed) % 2 == 0)
        kinds = {"pairs": tasks, "changed": tasks}
        found = reduce(f"links-{len(changed)}", link, pairs, 2, tasks, kinds)
        pairs = found["pairs"]
        changed.append(bool(found["changed"]))
    return pairs, len(changed) // 2 - 1


def _candidates(inputs: Inputs) -> Rows:
    """Yield pairs (later, earlier) of documents with equal words, and of documents to compare.

    Each document is to be compared with the first and with the preceding document of the same key.
    """
    rows, equal = _distinct_texts(inputs.rows())
    yield "equal", equal
    rows = _sorted(rows[:, ::2])
    begins = _begins(rows[:, :1])
    firsts, others = rows[begins][np.cumsum(begins) - 1], np.flatnonzero(~begins)
    pairs = [
        np.column_stack([rows[others, 1], each[:, 1]])
        for each in (firsts[others], rows[others - 1])
    ]
    yield "pairs", _unique(np.concatenate(pairs))


class _Sketches(contextlib.ExitStack):
    """Reader of the sketches of documents, which keeps open the files of only one task."""

    def __init__(self, space: Workspace) -> None:
        super().__init__()
        self._space, self._task = space, -1

    def find(self, document: int) -> np.ndarray:
        """Return the sketch of a document."""
        if (task := document >> 32) != self._task:
            self.close()
            names, values = (
                self.enter_context(self._space.local_copy(f"scans/{task:05d}/{name}.bin"))
                for name in ("ends", "sketches")
            )
            self._documents, self._ends = np.fromfile(names, np.uint64).reshape(-1, 2).T
            self._values, self._task = np.memmap(values, np.uint32, mode="r"), task
        row = int(np.searchsorted(self._documents, np.uint64(document)))
        return np.array(self._values[int(self._ends[row - 1]) if row else 0 : int(self._ends[row])])


def _add_sketches(inputs: Inputs) -> Rows:
    """Yield (earlier, later, length, sketch of the later document) for pairs (later, earlier)."""
    with _Sketches(inputs.space) as sketches:
        for later, earlier in map(np.ndarray.tolist, _unique(inputs.rows())):
            found = sketches.find(later)
            values = np.zeros((-(-(4 + len(found)) // (2 * _WORDS - 2)), _WORDS - 1), np.uint64)
            values.reshape(-1)[:2] = later, len(found)
            values.reshape(-1).view(np.uint32)[4 : 4 + len(found)] = found
            yield "sketches", np.insert(values, 0, np.uint64(earlier), axis=1)


def _similar(threshold: float, inputs: Inputs) -> Rows:
    """Yield the pairs (later, earlier) whose similarity reaches the threshold."""
    with _Sketches(inputs.space) as sketches:
        for block in inputs.blocks():
            rows = block[np.argsort(block[:, 0], kind="stable")]
            at, pairs = 0, []
            while at < len(rows):
                earlier, later, length = rows[at, :3].tolist()
                end = at + -(-(4 + length) // (2 * _WORDS - 2))
                other = rows[at:end, 1:].reshape(-1).view(np.uint32)[4 : 4 + length]
                if similarity(sketches.find(earlier), other) >= threshold:
                    pairs.append((later, earlier))
                at = end
            yield "pairs", np.array(pairs, np.uint64).reshape(-1, 2)


def _links(earlier: bool, inputs: Inputs) -> Rows:
    """Do a step of `grouped_pairs` on earlier neighbours or, if not `earlier`, on later neighbours.

    Yield links (document, first document). If `earlier` is true, also yield the reverse of each
    link, for the next step. If the step changed any pairs, yield one of them as "changed".
    """
    pairs = _unique(inputs.rows())
    documents, begins, counts = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    firsts = np.repeat(np.minimum(documents, pairs[begins, 1]), counts)
    if earlier:
        changed = pairs[:, 1] != firsts
        for links in (pairs[begins], np.column_stack([pairs[:, 1], firsts])[changed]):
            yield "pairs", links
            yield "pairs", links[:, ::-1]
    else:
        later = pairs[:, 1] > pairs[:, 0]
        yield "pairs", np.column_stack([pairs[later, 1], firsts[later]])
        changed = later & (firsts != pairs[:, 0])
    yield "changed", pairs[changed][:1]


def _decide(paragraphs: bool, inputs: Inputs) -> Rows:
    """Save the decisions on documents; if `paragraphs`, yield the paragraphs of kept documents.

    The inputs are pairs (document, first of its group), and pairs (document, first with the same
    words). A document is an exact duplicate of the first of its group if both firsts are equal.
    """
    pairs = _sorted(inputs.rows())
    documents, begins, counts = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    firsts = pairs[begins, 1]
    exact = (counts > 1) & (pairs[begins + counts - 1, 1] == firsts)
    for task in range(*inputs.span):
        name = f"scans/{task:05d}"
        filtered, equal = (
            inputs.space.read(f"{name}/{each}.bin") for each in ("filtered", "equal")
        )
        # A twin has the words of an earlier document in its run and is kept or dropped like it.
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
        ).save(inputs.root / name / "drops.npz")
        if not paragraphs:
            continue
        with inputs.space.local_copy(f"{name}/paragraphs.bin") as path, open(path, "rb") as file:
            while len(words := np.fromfile(file, np.uint64, 3 * max(1, inputs.limit // 24))):
                rows = words.reshape(-1, 3)
                rows = _sorted(rows[~np.isin(rows[:, 1], dropped)])
                begins = _begins(rows[:, :1])
                yield "paragraphs", rows[begins]
                yield "repeated", rows[~begins, 1:]


def _repeats(inputs: Inputs) -> Rows:
    """Yield (document, index) of repeated paragraphs, from rows (hash, document, index)."""
    rows = _sorted(inputs.rows())
    yield "repeated", rows[~_begins(rows[:, :1]), 1:]


def _drop_paragraphs(inputs: Inputs) -> Rows:
    """Add paragraphs (document, index) to the decisions on their documents."""
    rows = _unique(inputs.rows())
    tasks, begins = np.unique(units(rows), return_index=True)
    for task, mine in zip(tasks.tolist(), np.split(rows, begins[1:]), strict=True):
        drops = Drops.load(read_drops(inputs.space, task))
        drops = drops._replace(paragraphs=(mine & _INDEX).astype(np.int64))
        drops.save(inputs.root / f"scans/{task:05d}/drops.npz")
    yield from ()

"""Recall and precision of the search for near-duplicates, and what it costs at any size.

Each document gets a copy in which 1 to 20% of the words are replaced by words of the corpus. Truth
is the Jaccard similarity of word 5-shingles, computed by sets of strings, of all pairs that are
found, planted or not.

    python benchmarks/near_duplicates.py --input 'my/*.txt' --words 300 --documents 2000

With --simulate, the search runs over the documents of the input, of which a share of copies is
made, in about a hundred ranges. What each reducer reads and writes is measured. Then the search
runs for so many documents with the same decisions about ranges and merges, but no file is written:
sizes are scaled. Memory is measured in processes that work on ranges of the full size.

    python benchmarks/near_duplicates.py --input 'my/*.txt' --documents 3000 --simulate 1e9 1e10
"""

import argparse
import collections
import functools
import itertools
import math
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.corpus.cleaning.clean import CleaningConfig, Drops
from bert_jax.data.corpus.overlap.ngrams import banding, normalised_words
from bert_jax.data.corpus.sharded import duplicates, shuffle
from bert_jax.data.corpus.sharded.duplicates import find_duplicates, read_drops, scan
from bert_jax.data.corpus.sharded.workspace import Part, Workspace
from bert_jax.data.corpus.sources import resolve_sources

SHARES = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
TASK_BYTES = 1 << 30
"""Text of a task, as `bert-jax corpus` divides it by default."""
RANGES = 100
"""Number of ranges in the search that is measured."""
EQUAL = 1 / 3
"""Share of the copies with the same words."""


def read_words(inputs: list[str], count: int) -> list[str]:
    """The first words of the sources, or words of a made-up vocabulary with frequencies of Zipf."""
    if not inputs:
        draw = random.Random(0)
        names = [f"w{rank}" for rank in range(1, 20_000)]
        weights = [1 / rank for rank in range(1, 20_000)]
        return draw.choices(names, weights, k=count)
    words: list[str] = []
    for source in resolve_sources(inputs):
        for text in source.texts():
            words += normalised_words(text)
            if len(words) >= count:
                return words[:count]
    return words


def shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return set(zip(*(words[at:] for at in range(5)), strict=False))


def jaccard(one: str, other: str) -> float:
    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


def measure_recall(arguments: argparse.Namespace) -> None:
    length = arguments.words
    words = read_words(arguments.input, arguments.documents * length)
    originals = [words[at : at + length] for at in range(0, len(words) - length + 1, length)]
    draw = random.Random(1)
    copies = []
    for number, document in enumerate(originals):
        copy = list(document)
        share = SHARES[number % len(SHARES)]
        for at in draw.sample(range(length), max(1, round(share * length))):
            copy[at] = draw.choice(words)
        copies.append(copy)
    texts = [" ".join(document) for document in (*originals, *copies)]
    config = CleaningConfig(near_duplicates=arguments.threshold)
    with tempfile.TemporaryDirectory() as place:
        begin = time.process_time()
        scanned = scan(texts, config, Path(place), 0)
        middle = time.process_time()
        find_duplicates([scanned], config, Workspace(place))
        end = time.process_time()
        drops = Drops.load(read_drops(Workspace(place), 0))
    found = set(zip(drops.firsts[:, 1].tolist(), drops.duplicates.tolist(), strict=True))
    rows = collections.defaultdict(list)
    for number in range(len(originals)):
        pair = (number, number + len(originals))
        value = jaccard(texts[pair[0]], texts[pair[1]])
        rows[SHARES[number % len(SHARES)]].append((value, pair in found))
    print(f"{len(originals):,} documents of {length} words, each with an edited copy")
    print("edited  mean Jaccard  at or above  found of these  found of the others")
    for share, pairs in rows.items():
        above = [hit for value, hit in pairs if value >= arguments.threshold]
        others = [hit for value, hit in pairs if value < arguments.threshold]
        mean = sum(value for value, _ in pairs) / len(pairs)
        print(f"{share:6.0%}  {mean:12.3f}  {len(above):11,}  {sum(above):14,}  {sum(others):19,}")
    pairs = [pair for each in rows.values() for pair in each]
    similar = [hit for value, hit in pairs if value >= arguments.threshold]
    wrong = sum(jaccard(texts[a], texts[b]) < arguments.threshold for a, b in found)
    print(f"recall {sum(similar) / len(similar):.4f}, precision {1 - wrong / len(found):.4f}")
    size = sum(map(len, texts)) / 1e6
    print(f"{size:.1f} MB: signatures {size / (middle - begin):.1f} MB/s of processor time, "
          f"search {end - middle:.2f} s")  # fmt: skip


def read_texts(inputs: list[str], count: int, length: int, copies: float) -> list[str]:
    """Documents of the sources; a share of them are copies of random others, copies included."""
    draw = random.Random(2)
    distinct = round(count * (1 - copies))
    if inputs:
        found = (text for source in resolve_sources(inputs) for text in source.texts())
        texts = list(itertools.islice(found, distinct))
    else:
        words = read_words([], distinct * length)
        texts = [" ".join(words[at : at + length]) for at in range(0, len(words), length)]
    for number in range(round(len(texts) * copies / (1 - copies))):
        words = draw.choice(texts).split(" ")
        if number % round(1 / EQUAL):
            share = 0.2 ** draw.uniform(1.8, 4)  # 0.2 to 5% of the words
            for at in draw.choices(range(len(words)), k=max(1, round(share * len(words)))):
                words[at] = f"other{draw.randrange(10_000)}"
        texts.append(" ".join(words))
    draw.shuffle(texts)
    return texts


class Measured:
    """A map that notes what each reducer reads and writes, in bytes."""

    def __init__(self) -> None:
        self.read: collections.Counter[str] = collections.Counter()
        self.written: dict[str, collections.Counter[str]] = {}

    def __call__(self, function: Any, items: Sequence[Any]) -> list[Any]:
        """Apply a stage of `shuffle.reduce` to its ranges."""
        name = function.args[3]
        results = [function(item) for item in items]
        self.read[name] += sum(part.end - part.begin for _, (_, parts) in items for part in parts)
        written = self.written.setdefault(name, collections.Counter())
        for kind, runs in ((kind, runs) for each in results for kind, runs in each.items()):
            written[kind] += int(sum(run.offsets[-1] for run in runs))
        return results


class Simulated:
    """A map that makes runs of the sizes that `Measured` foretells, and counts what it would do."""

    def __init__(self, measured: Measured, rounds: int, sketches: np.ndarray) -> None:
        self.measured, self.rounds, self.sketches = measured, rounds, sketches
        self.opens = self.bytes_read = self.bytes_written = 0
        self.rows: collections.Counter[str] = collections.Counter()

    def __call__(self, function: Any, items: Sequence[Any]) -> list[Any]:
        """Return the runs that a stage of `shuffle.reduce` would write."""
        _, _, limit, name, _, kinds = function.args
        results = []
        for _, (span, parts) in items:
            size = sum(part.end - part.begin for part in parts)
            self.opens += len(parts)
            self.bytes_read += size
            if name in ("later/rows", "earlier/rows") and parts:
                blocks = 1 if name.startswith("later") else -(-size // limit)
                self.opens += 2 * blocks * (span[1] - span[0])
                self.bytes_read += int(self.sketches[slice(*span)].sum())
            if name == "documents/rows":
                self.opens += 5 * (span[1] - span[0])  # two read, one written, then read twice
            made = {}
            for kind in kinds or ("rows",):
                wanted = int(size * self._share(name, kind))
                whole, rest = divmod(wanted, limit)
                runs = [limit] * whole + [rest] * (rest > 0)
                made[kind] = [
                    shuffle.Run("", np.linspace(0, each, shuffle.FAN + 1).astype(np.int64))
                    for each in runs
                ]
                self.rows[f"{name}:{kind}"] += wanted
                self.opens += len(runs)
                self.bytes_written += wanted
            results.append(made)
        return results

    def _share(self, name: str, kind: str) -> float:
        if kind == "rows":
            return 1.0
        if name.startswith("links-"):
            step = int(name[6:-5]) - 2
            if kind == "changed":
                return 1e-9 if step < 2 * self.rounds - 2 else 0.0
            name = f"links-{min(step, self._steps - 2 + step % 2) + 2}/rows"
        read = self.measured.read[name]
        return self.measured.written[name][kind] / read if read else 0.0

    @functools.cached_property
    def _steps(self) -> int:
        return sum(name.startswith("links-") for name in self.measured.read)


def rounds_of(number: int, *, is_chain: bool) -> int:
    """Rounds that the groups of so many documents take: one chain, or groups of all sizes."""
    draw, tasks = np.random.default_rng(0), 64
    documents = np.arange(number, dtype=np.uint64)
    documents = (documents % np.uint64(tasks) << np.uint64(32)) + documents // np.uint64(tasks)
    documents = draw.permutation(documents)
    later = np.arange(1, number)
    earlier = later - 1 if is_chain else draw.integers(0, later)
    if not is_chain:  # two of three documents begin a group, or are alone
        kept = draw.random(number - 1) < 1 / 3
        later, earlier = later[kept], earlier[kept]
    pairs = np.sort(np.column_stack([documents[later], documents[earlier]]), axis=1)[:, ::-1]
    with tempfile.TemporaryDirectory() as name:
        run = shuffle.write_run(Path(name), "pairs", (0, tasks), pairs)
        shuffle.RANGE_BYTES = pairs.nbytes // 16
        reduce = functools.partial(shuffle.reduce, Workspace(name), map)
        return duplicates.grouped_pairs(reduce, [run], tasks)[1]


def _memory(kind: str) -> int:
    """Peak memory in bytes of this process, which works on a range of the full size."""
    limit, draw = shuffle.RANGE_BYTES, np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if kind == "scan":
            vocabulary = [f"w{number}" for number in range(5000)]
            texts = (" ".join(random.choices(vocabulary, k=10)) for _ in range(limit // 480))
            scan(texts, CleaningConfig(near_duplicates=0.8), root, 0)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        width = {"keys": 3, "links": 2, "sketches": 16}[kind]
        rows = np.zeros((limit * 3 // 2 // (8 * width), width), np.uint64)
        rows[:, 0] = draw.integers(0, 1 << 62, len(rows), np.uint64) >> np.uint64(2)
        if kind == "links":
            rows[:, 1] = draw.integers(0, 1 << 59, len(rows), np.uint64)
        else:
            rows[::3, 0] = rows[: len(rows[::3]), 0]  # a third of the keys are repeated
            rows[:, 1:3] = np.arange(2 * len(rows), dtype=np.uint64).reshape(-1, 2)
        run = shuffle.write_run(root, "rows", (0, shuffle.HASHES), rows)
        del rows
        part = Part(run.name, 0, int(run.offsets[-1]))
        reducers: dict[str, Callable[..., Any]] = {
            "keys": duplicates._candidates, "links": functools.partial(duplicates._links, True),
            "sketches": shuffle._merge,
        }  # fmt: skip
        kinds = dict.fromkeys(("equal", "pairs", "changed", "rows"), shuffle.HASHES)
        shuffle._run(Workspace(name), width, limit, "out", reducers[kind], kinds,
                     (0, ((0, shuffle.HASHES), [part])))  # fmt: skip
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def union_find_seconds(number: int = 200_000) -> float:
    """Seconds that one edge takes in a serial union-find in Python."""
    parents, draw = np.arange(number), np.random.default_rng(0)
    edges = draw.integers(0, number, (number // 4, 2)).tolist()

    def root(node: int) -> int:
        while (parent := int(parents[node])) != node:
            parents[node] = parents[parent]
            node = parent
        return node

    begin = time.process_time()
    for one, other in edges:
        one, other = root(one), root(other)
        parents[max(one, other)] = min(one, other)
    return (time.process_time() - begin) / len(edges)


class Sample:
    """The search that is measured."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        texts = read_texts(arguments.input, arguments.documents, arguments.words, arguments.copies)
        config = CleaningConfig(near_duplicates=arguments.threshold)
        self.measured, (bands, rows) = Measured(), banding(arguments.threshold)
        full, half = shuffle.RANGE_BYTES, len(texts) // 2
        with tempfile.TemporaryDirectory() as name:
            shuffle.RANGE_BYTES = max(1, len(texts) * (bands + 1) * 24 // RANGES)
            scans = [scan(each, config, Path(name), at)
                     for at, each in enumerate((texts[:half], texts[half:]))]  # fmt: skip
            find_duplicates(scans, config, Workspace(name), self.measured)
            drops = [Drops.load(read_drops(Workspace(name), at)) for at in range(2)]
            keys = [np.fromfile(Path(name, run), np.uint64).reshape(-1, 3)[:, 0]
                    for each in scans for run, _ in each["runs"]]  # fmt: skip
        shuffle.RANGE_BYTES = full
        dropped = sum(len(each.duplicates) for each in drops) / len(texts)
        self.text = sum(len(each.encode()) for each in texts) / len(texts)
        self.sketch = sum(each["sketches"] for each in scans) / len(texts)
        self.keys = sum(map(len, keys)) * 24 / len(texts)
        self.share = np.unique(np.concatenate(keys), return_counts=True)[1].max() / len(texts)
        print(f"measured: {len(texts):,} documents of {self.text:,.0f} bytes, "
              f"{arguments.copies:.0%} of them copies; {bands} bands of {rows} rows for a "
              f"similarity of {arguments.threshold:g}; {dropped:.1%} are dropped")  # fmt: skip
        print(f"a document has {self.keys:,.0f} bytes of keys and {self.sketch:,.0f} of sketch; "
              f"the most frequent key has {self.share:.2%} of the documents")  # fmt: skip


def simulate(arguments: argparse.Namespace) -> None:
    sample, sizes = Sample(arguments), (1000, 8000, 64_000)
    full, rounds = shuffle.RANGE_BYTES, {}
    for shape in ("groups of all sizes", "one chain"):
        rounds[shape] = [rounds_of(size, is_chain=shape == "one chain") for size in sizes]
        print(f"rounds for 1,000, 8,000 and 64,000 documents in {shape}: {rounds[shape]}")
    shuffle.RANGE_BYTES = full
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {kind: pool.apply(_memory, (kind,)) / 2**30
                  for kind in ("scan", "keys", "links", "sketches")}  # fmt: skip
    edge = union_find_seconds()
    for number in arguments.simulate:
        first, *_, last = rounds["groups of all sizes"]
        steps = last + math.ceil((last - first) / 2 * max(0.0, math.log(number / sizes[-1], 8)))
        report(number, sample, steps, memory, edge)


def report(
    number: float, sample: Sample, rounds: int, memory: dict[str, float], edge: float
) -> None:
    """Run the search for so many documents without files, and print what it would take."""
    tasks = max(1, round(number * sample.text / TASK_BYTES))
    whole, rest = divmod(int(number * sample.keys / tasks), shuffle.RANGE_BYTES)
    runs = [["", np.linspace(0, each, shuffle.FAN + 1).astype(np.int64)]
            for each in [shuffle.RANGE_BYTES] * whole + [rest] * (rest > 0)]  # fmt: skip
    each = {"runs": runs, "sketches": int(number * sample.sketch / tasks), "paragraphs": 0}
    simulated = Simulated(sample.measured, rounds, np.full(tasks, each["sketches"]))
    simulated.opens = tasks * (5 + len(runs))
    simulated.bytes_written = int(number * (sample.keys + sample.sketch))
    find_duplicates([each] * tasks, CleaningConfig(near_duplicates=0.8), Workspace("/"), simulated)
    hot = sample.share * number * 24
    processes = memory | {"driver": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    processes["keys"] *= 1 + hot / (1.5 * shuffle.RANGE_BYTES)
    candidates, equal, similar = (
        simulated.rows[name] / 16
        for name in ("keys/rows:pairs", "keys/rows:equal", "earlier/rows:pairs")
    )
    seconds = (equal + similar) * edge
    print(f"{number:.0e} documents, {tasks:,} tasks of {TASK_BYTES >> 30} GiB of text:")
    lines = {
        "opened files": f"{simulated.opens:,}, {simulated.opens / tasks:,.0f} a task",
        "signatures": f"{number * (sample.keys + sample.sketch) / 1e12:,.2f} TB",
        "written, read": f"{simulated.bytes_written / 1e12:,.2f} TB, "
        f"{simulated.bytes_read / 1e12:,.2f} TB",
        "candidates": f"{candidates:,.3g}, those with several common keys several times",
        "edges": f"{equal:,.3g} of equal and {similar:,.3g} of similar words; in one process, "
        f"{seconds / 3600:.2f} hours and {number * 8 / 2**30:,.1f} GiB",
        "rounds": f"{rounds}",
        "memory of processes": ", ".join(f"{kind} {each:.2f}" for kind, each in processes.items())
        + f" GiB (a key of {hot / 24:,.0f} documents with it)",
        "largest": f"{max(processes.values()):.2f} GiB (bar 4)",
    }
    for name, value in lines.items():
        print(f"  {name:21}{value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", action="append", default=[])
    parser.add_argument("--documents", type=int, default=1200)
    parser.add_argument("--words", type=int, default=300, help="in each document")
    parser.add_argument("--threshold", type=float, default=0.8)
    parser.add_argument("--simulate", type=float, nargs="+", metavar="DOCUMENTS")
    parser.add_argument(
        "--copies", type=float, default=0.3, help="share of copies, with --simulate"
    )
    arguments = parser.parse_args()
    if arguments.simulate:
        simulate(arguments)
    else:
        measure_recall(arguments)


if __name__ == "__main__":
    main()

"""Planted duplicates are found; the same documents stay however the corpus is divided."""

import functools
import itertools
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from bert_jax.data.corpus.cleaning.clean import Cleaner, CleaningConfig, Dropped, Drops
from bert_jax.data.corpus.overlap.ngrams import SKETCH, banding, sign, similarity
from bert_jax.data.corpus.sharded import duplicates, shuffle
from bert_jax.data.corpus.sharded.duplicates import find_duplicates, scan
from bert_jax.data.corpus.sharded.shuffle import Inputs
from bert_jax.data.corpus.sharded.workspace import Part, Workspace

pytest.importorskip("rensa")

VOCABULARY = [f"w{number}" for number in range(5000)]


def drops_of(tasks: Sequence[list[str]], config: CleaningConfig, directory: Path) -> list[Drops]:
    directory.mkdir(parents=True, exist_ok=True)
    scans = [scan(each, config, directory, number) for number, each in enumerate(tasks)]
    find_duplicates(scans, config, Workspace(directory))
    paths = [directory / "scans" / f"{number:05d}" / "drops.npz" for number in range(len(tasks))]
    return [Drops.load(path.read_bytes()) for path in paths]


def cleaned(tasks: Sequence[list[str]], config: CleaningConfig, directory: Path) -> list[str]:
    found = []
    for documents, drops in zip(tasks, drops_of(tasks, config, directory), strict=True):
        cleaner = Cleaner(config, drops)
        found += [cleaner.clean(number, text) for number, text in enumerate(documents)]
    return [text if isinstance(text, str) else text.reason for text in found]


def planted(count: int, *, length: int, seed: int) -> Iterator[tuple[str, str]]:
    """Pairs of texts, the second with 1 to 20% of its words replaced, most of them few."""
    draw = random.Random(seed)
    for _ in range(count):
        words = draw.choices(VOCABULARY, k=length)
        changed = list(words)
        for at in draw.sample(range(length), max(1, round(length * 0.2 ** draw.uniform(1, 2.86)))):
            changed[at] = draw.choice(VOCABULARY)
        yield " ".join(words), " ".join(changed)


def shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return set(zip(*(words[at:] for at in range(5)), strict=False))


def jaccard(one: str, other: str) -> float:
    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8])
def test_planted_near_duplicates_are_found(tmp_path, threshold):
    """Most of the planted pairs are near the threshold, on both sides."""
    share = 1 - (2 * threshold / (1 + threshold)) ** 0.2  # of words, for this similarity
    pairs = []
    for length, count in ((60, 120), (200, 250), (1000, 30)):
        draw = random.Random(length)
        for one, _ in planted(count, length=length, seed=length):
            words = one.split()
            for at in draw.sample(
                range(length), max(1, round(length * share * draw.uniform(0.6, 1.3)))
            ):
                words[at] = draw.choice(VOCABULARY)
            pairs.append((one, " ".join(words)))
    texts = [one for one, _ in pairs] + [other for _, other in pairs]
    (drops,) = drops_of([texts], CleaningConfig(near_duplicates=threshold), tmp_path)
    found = set(zip(drops.firsts[:, 1].tolist(), drops.duplicates.tolist(), strict=True))
    values = [jaccard(one, other) for one, other in pairs]
    similar = {(at, at + len(pairs)) for at, value in enumerate(values) if value >= threshold}
    assert 100 < len(similar) < 300
    right = [pair for pair in found if jaccard(*(texts[at] for at in pair)) >= threshold]
    recall, precision = len(found & similar) / len(similar), len(right) / len(found)
    print(f"{len(similar)} of {len(pairs)} pairs: recall {recall:.3f}, precision {precision:.3f}")
    assert recall >= 0.95
    assert precision >= 0.95


def test_similarity_of_long_documents_is_close():
    draw = random.Random(0)
    for share in (0.003, 0.02):
        words = draw.choices(VOCABULARY, k=12_000)
        changed = [draw.choice(VOCABULARY) if draw.random() < share else word for word in words]
        texts = " ".join(words), " ".join(changed)
        found = sign(texts)
        assert list(map(len, found.sketches)) == [SKETCH, SKETCH]
        value = similarity(*found.sketches)
        assert value == pytest.approx(jaccard(*texts), abs=4 * 0.016)


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    draw = random.Random(3)
    documents = [f"{one}\n{other}" for one, other in planted(30, length=60, seed=2)]
    documents += [draw.choice(documents).upper() for _ in range(15)]  # the same words
    documents += [f"{draw.choice(documents)} w1 w2" for _ in range(15)]
    documents += ["too short"]
    starts = [draw.choice(documents).split("\n")[0] for _ in range(9)]
    documents += [f"{start}\n{f'{n} ' * 9}" for n, start in enumerate(starts)]
    draw.shuffle(documents)
    return documents


CONFIG = CleaningConfig(filters=("words=9:",), near_duplicates=0.8, duplicate_paragraphs=True)


def test_the_division_changes_nothing(corpus, tmp_path, monkeypatch):
    whole = cleaned([corpus], CONFIG, tmp_path / "one")
    assert {"words", "duplicate", "near-duplicate"} <= set(whole)
    assert any("\n" not in text and len(text) > 20 for text in whole)  # a paragraph is gone
    monkeypatch.setattr(shuffle, "RANGE_BYTES", 1000)
    monkeypatch.setattr(shuffle, "FAN", 4)
    several = cleaned([corpus[:20], [], corpus[20:27], corpus[27:]], CONFIG, tmp_path / "four")
    assert several == whole


def test_the_first_document_stays_and_is_named(tmp_path):
    tasks = [["One text about rivers."], ["Another.", "one TEXT, about rivers!"]]
    config = CleaningConfig(duplicates=True)
    drops = drops_of(tasks, config, tmp_path)
    assert not len(drops[0].duplicates)
    found = Cleaner(config, drops[1]).clean(1, tasks[1][1])
    assert found == Dropped("duplicate", "document 0 of task 0 is kept instead")


def test_a_filtered_document_is_nobodys_first(tmp_path):
    tasks = [["# a b # c d", "A b, c d."], ["a b c d"]]
    config = CleaningConfig(filters=("symbols",), duplicates=True)
    assert cleaned(tasks, config, tmp_path) == ["symbols", "A b, c d.", "duplicate"]


def test_a_paragraph_of_a_dropped_document_is_nobodys_first(tmp_path):
    long = "\n".join(f"{' '.join(VOCABULARY[at : at + 30])}" for at in range(0, 300, 30))
    tasks = [[long, f"{long}\nonly here"], ["only here\nand this", "only here", "***\n***"]]
    config = CleaningConfig(near_duplicates=0.8, duplicate_paragraphs=True)
    assert cleaned(tasks, config, tmp_path) == [
        long, "near-duplicate", "only here\nand this", "no-lines-left", "***\n***"
    ]  # fmt: skip


def test_all_repeated_paragraphs_of_a_document_go(tmp_path):
    tasks = [["one here\ntwo there"], ["one here\nfresh\ntwo there\nlast\none here"]]
    config = CleaningConfig(duplicate_paragraphs=True)
    assert cleaned(tasks, config, tmp_path) == ["one here\ntwo there", "fresh\nlast"]


@pytest.mark.parametrize("block", [1 << 20, 10])  # characters of a block: all, and a document
def test_documents_are_named_by_their_numbers_in_the_task(tmp_path, monkeypatch, block):
    """Documents that a filter drops before them count, too."""
    monkeypatch.setattr("bert_jax.data.corpus.sharded.duplicates._BLOCK_CHARS", block)
    tasks = [
        ["# # #", "one here\ntwo there", "all the same"],
        ["# # #", "# # #", "fresh", "All the same!", "last\none here\ntwo there"],
    ]
    config = CleaningConfig(filters=("symbols",), duplicates=True, duplicate_paragraphs=True)
    first, second = drops_of(tasks, config, tmp_path)
    assert not len(first.duplicates) + len(first.paragraphs)
    assert second.filtered.tolist() == [0, 1]
    assert second.duplicates.tolist() == [3]
    assert second.firsts.tolist() == [[0, 2]]
    assert second.paragraphs.tolist() == [[4, 1], [4, 2]]


def test_near_duplicates_are_as_similar_as_asked_for(tmp_path):
    changed = list(VOCABULARY[:200])
    changed[50] = changed[100] = changed[150] = "other"
    texts = [" ".join(VOCABULARY[:200]), " ".join(changed)]
    assert 0.85 < jaccard(*texts) < 0.87
    for threshold, count in ((0.8, 1), (0.95, 0)):
        config = CleaningConfig(near_duplicates=threshold)
        (drops,) = drops_of([texts], config, tmp_path / f"{threshold}")
        assert len(drops.duplicates) == count


def results(reducer, rows: Sequence[tuple[int, ...]], directory: Path) -> dict[str, list]:
    """What a reducer yields for rows of one range, by kind."""
    written = shuffle.write_run(directory, "rows", (0, 1), np.array(rows, np.uint64))
    part = Part(written.name, 0, int(written.offsets[-1]))
    given = Inputs(Workspace(directory), directory, (0, 1), [part], len(rows[0]), 1 << 20)
    return {kind: found.tolist() for kind, found in reducer(given)}


def test_a_document_is_compared_with_the_first_and_the_one_before_of_its_key(tmp_path):
    """The one before may be near where the first is not; of equal texts, only the first counts."""
    rows = [(0, 10, 0), (0, 12, 2), (0, 13, 3), (0, 12, 5), (0, 17, 7), (1, 11, 1), (2, 12, 2),
            (2, 13, 3), (12, 12, 5), (12, 12, 2)]  # fmt: skip
    found = results(duplicates._candidates, rows, tmp_path)
    assert found["pairs"] == [[2, 0], [3, 0], [3, 2], [7, 0], [7, 3]]
    assert found["equal"] == [[5, 2]]


def test_signatures_do_not_depend_on_the_process():
    found = sign(["One two, three four five six.\nSeven!"], paragraphs=True)
    keys = [*found.hashes.tolist(), *found.bands[0, :2].tolist()]
    assert [f"{key:x}" for key in keys] == [
        "7b31044b6296df1f", "53419f2b47be247a", "442679536097dc26"
    ]  # fmt: skip
    assert np.array_equal(found.paragraphs[:, 1:], [[0, 0], [0, 1]])


def test_bands_follow_the_threshold():
    for threshold in (0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0):
        bands, rows = banding(threshold)
        assert 1 - (1 - min(threshold, 0.99) ** rows) ** bands > 0.997
        assert bands * rows <= 144
    assert banding(0.8) == (20, 6)


def test_a_chain_is_one_group_however_it_is_divided(tmp_path, monkeypatch):
    """Only neighbours in the chain are similar; their order in the corpus is another."""
    draw = random.Random(5)
    words = draw.choices(VOCABULARY, k=200)
    chain = []
    for at in range(60):
        words[3 * at] = f"new{at}"
        chain.append(" ".join(words))
    others = [" ".join(draw.choices(VOCABULARY, k=50)) for _ in range(60)]
    corpus = draw.sample([*chain, *others], k=120)
    places = sorted(corpus.index(text) for text in chain)
    monkeypatch.setattr(shuffle, "RANGE_BYTES", 2000)
    monkeypatch.setattr(shuffle, "FAN", 4)
    tasks = [corpus[at : at + 9] for at in range(0, 120, 9)]
    dropped, firsts = [], []
    for number, drops in enumerate(drops_of(tasks, CleaningConfig(near_duplicates=0.8), tmp_path)):
        dropped += (9 * number + drops.duplicates).tolist()
        firsts += (9 * drops.firsts[:, 0] + drops.firsts[:, 1]).tolist()
        assert not drops.exact.any()
    assert dropped == places[1:]
    assert set(firsts) == {places[0]}


def test_groups_of_any_graph(tmp_path, monkeypatch):
    """Against breadth-first search; a chain of n documents takes a number of rounds like log n."""
    monkeypatch.setattr(shuffle, "RANGE_BYTES", 600)
    monkeypatch.setattr(shuffle, "FAN", 4)
    monkeypatch.setattr("bert_jax.files.staging.os.fsync", lambda _: None)
    draw, tasks, size = np.random.default_rng(0), 16, 20
    nodes = draw.permutation([task << 32 | at for task in range(tasks) for at in range(size)])
    chain = np.column_stack([nodes[:200], nodes[1:201]])
    pairs = np.concatenate([chain, draw.choice(nodes[201:], (60, 2))])
    pairs = np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1)[:, ::-1].astype(np.uint64)
    near: dict[int, list[int]] = {}
    for one, other in pairs.tolist():
        near.setdefault(one, []).append(other)
        near.setdefault(other, []).append(one)
    expected = set()
    for first in sorted(near):
        if first not in {one for one, _ in expected}:
            group, waiting = {first}, [first]
            while waiting:
                new = set(near[waiting.pop()]) - group
                group |= new
                waiting += new
            expected |= {(each, first) for each in group - {first}}
    runs = [shuffle.write_run(tmp_path, "pairs", (0, tasks), pairs)]
    reduce = functools.partial(shuffle.reduce, Workspace(tmp_path), map)
    links, rounds = duplicates.grouped_pairs(reduce, runs, tasks)
    files = [np.fromfile(tmp_path / run.name, np.uint64).reshape(-1, 2) for run in links]
    assert len(files) > 4
    assert {tuple(pair) for pair in np.concatenate(files).tolist()} == expected
    assert rounds < 12


@pytest.fixture(scope="module")
def opened() -> Iterator[list[str]]:
    """Names of the files that are opened."""
    found: list[str] | None = []

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and found is not None:
            found.append(f"{arguments[0]}")

    sys.addaudithook(note)  # for the life of the process
    yield found
    found = None


@pytest.mark.parametrize("range_bytes", [1 << 27, 8000])
def test_opened_files_grow_like_the_number_of_tasks(tmp_path, monkeypatch, opened, range_bytes):
    """In one range, and where the number of ranges grows like the number of tasks."""
    monkeypatch.setattr(shuffle, "RANGE_BYTES", range_bytes)
    monkeypatch.setattr(shuffle, "FAN", 16)
    monkeypatch.setattr("bert_jax.files.staging.os.fsync", lambda _: None)
    draw, counts = random.Random(0), {}
    for number in (10, 100, 1000):
        tasks = [[" ".join(draw.choices(VOCABULARY, k=8)) for _ in range(4)] for _ in range(number)]
        tasks[-1] = tasks[0][::-1]
        opened.clear()
        config = CleaningConfig(near_duplicates=0.8)
        drops = drops_of(tasks, config, tmp_path / f"{number}")
        assert sum(len(each.duplicates) for each in drops) == 4
        counts[number] = sum(name.startswith(f"{tmp_path}") for name in opened)
    print(counts)
    assert counts[100] > 500
    assert counts[1000] < 11 * counts[100]
    assert counts[1000] < 1000 * (2 * 16 + 25)


def test_memory_does_not_grow_with_a_task_or_with_the_corpus(tmp_path, monkeypatch):
    """The memory of each scan and of each reducer is measured, that of the driver is not."""
    monkeypatch.setattr(shuffle, "RANGE_BYTES", 50_000)
    monkeypatch.setattr("bert_jax.files.staging.os.fsync", lambda _: None)
    monkeypatch.setattr("bert_jax.data.corpus.sharded.duplicates._BLOCK_CHARS", 10_000)
    draw = random.Random(0)
    config = CleaningConfig(near_duplicates=0.8, duplicate_paragraphs=True)
    peaks: list[int] = []

    def measured(function: Callable, items: Sequence) -> list:
        results = []
        for item in items:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            results.append(function(item))
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        return results

    def search(number: int, directory: Path) -> tuple[int, int]:
        """The largest memory of a scan of all documents, and of the reducers of tasks of 500."""
        directory.mkdir()
        groups = [draw.choices(VOCABULARY, k=19) for _ in range(number)]
        texts = [" ".join([*words, f"end{at}"]) for words in groups for at in range(10)]
        peaks.clear()
        measured(lambda _: scan(iter(texts), config, directory, 0), [0])
        (whole,) = peaks
        draw.shuffle(texts)
        tasks = [texts[at : at + 500] for at in range(0, len(texts), 500)]
        scans = [scan(each, config, directory, at) for at, each in enumerate(tasks)]
        peaks.clear()
        find_duplicates(scans, config, Workspace(directory), measured)
        return whole, max(peaks)

    sign([" ".join([*VOCABULARY, *(f"end{at}" for at in range(10))])])  # fills a cache
    tracemalloc.start()
    # The first, as large as the last, imports and fills caches.
    _, (few, _), (many, reducers) = (search(size, tmp_path / f"{size}") for size in (249, 50, 250))
    tracemalloc.stop()
    print(few, many, reducers)
    assert many < 1.4 * few
    assert reducers < 15 * 50_000
    sent = [path.stat().st_size for path in tmp_path.glob("250/later/rows/*/sketches-*")]
    assert len(sent) > 5  # of five tasks
    assert max(sent) < 51_000


def test_sketches_of_a_scan_of_several_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("bert_jax.data.corpus.sharded.duplicates._BLOCK_CHARS", 10)
    texts = ["one two three four five six", "# # #", "", "seven eight nine ten eleven", "short"]
    config = CleaningConfig(filters=("symbols",), near_duplicates=0.8)
    scan(texts, config, tmp_path, 3)
    signed = dict(zip((0, 2, 3, 4), sign([texts[at] for at in (0, 2, 3, 4)]).sketches, strict=True))
    with duplicates._Sketches(Workspace(tmp_path)) as sketches:
        for number, expected in signed.items():
            assert sketches.find((3 << 32) + number).tolist() == expected.tolist()


def test_ranges_are_bounded_by_bytes():
    """Ranges cover the span, in order; a slice that is too large is divided, if it has units."""
    sizes = np.full(shuffle.FAN, 100)
    sizes[[3, 7]] = 5000
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    runs = [shuffle.Run("a", offsets), shuffle.Run("b", offsets)]
    ranges, large = shuffle.plan((0, 2 * shuffle.FAN), runs, None, 2000)
    assert [span for span, _ in large] == [(6, 8), (14, 16)]
    assert [[part.name for part in parts] for _, ((_, parts), *_) in large] == [["a"], ["a"]]
    assert {len(merges) for _, merges in large} == {2}  # each of some 2,000 bytes or more
    assert 5 < len(ranges) < 15
    for _, parts in ranges:
        assert sum(part.end - part.begin for part in parts) <= 3000
    spans = sorted(span for span, _ in [*ranges, *large])
    assert [spans[0][0], spans[-1][1]] == [0, 2 * shuffle.FAN]
    assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
    _, large = shuffle.plan((0, shuffle.FAN), runs, None, 2000)
    assert large == []  # a slice of one unit cannot be divided
    total = np.arange(2 * shuffle.FAN + 1) * 3000  # what a reducer reads besides
    _, large = shuffle.plan((0, 2 * shuffle.FAN), runs, total, 4000)
    assert len(large) == shuffle.FAN

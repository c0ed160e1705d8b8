"""Planted duplicates are found; the same documents stay however the corpus is divided."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from bert_jax.data.corpus.cleaning.clean import Cleaner, CleaningConfig, Dropped, Drops
from bert_jax.data.corpus.overlap.ngrams import SKETCH, sign, similarity
from bert_jax.data.corpus.sharded import shuffle
from bert_jax.data.corpus.sharded.duplicates import find_duplicates, scan
from bert_jax.data.corpus.sharded.workspace import Workspace

pytest.importorskip("rensa")

VOCABULARY = [f"w{number}" for number in range(5000)]


def drops_of(tasks: Sequence[list[str]], config: CleaningConfig, directory: Path) -> list[Drops]:
    directory.mkdir(parents=True, exist_ok=True)
    scans = [scan(each, config, directory, number) for number, each in enumerate(tasks)]
    find_duplicates(scans, config, Workspace(directory))
    paths = [directory / "drops" / f"{number:05d}.npz" for number in range(len(tasks))]
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


def test_planted_near_duplicates_are_found(tmp_path):
    pairs = list(planted(400, length=200, seed=0)) + list(planted(40, length=1500, seed=1))
    texts = [one for one, _ in pairs] + [other for _, other in pairs]
    config = CleaningConfig(near_duplicates=0.8)
    (drops,) = drops_of([texts], config, tmp_path)
    found = {
        (int(first), int(number))
        for number, (_, first) in zip(drops.duplicates, drops.firsts, strict=True)
    }
    values = [jaccard(one, other) for one, other in pairs]
    similar = {(at, at + len(pairs)) for at, value in enumerate(values) if value >= 0.8}
    assert 100 < len(similar) < 350  # edits on both sides of the threshold
    recall, precision = len(found & similar) / len(similar), len(found & similar) / len(found)
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


def test_a_document_is_compared_with_the_first_and_the_one_before_of_its_key():
    """The one before may be near where the first is not."""
    keys = np.repeat(np.arange(3, dtype=np.uint64), [4, 1, 2])
    pairs = list(duplicates._candidates(keys, np.array([0, 2, 3, 7, 1, 2, 3])))
    assert pairs == [(0, 2), (0, 3), (0, 7), (2, 3), (3, 7)]


def test_signatures_do_not_depend_on_the_process():
    found = sign(["One two, three four five six.\nSeven!"], paragraphs=True)
    keys = [*found.hashes.tolist(), *found.bands[0, :2].tolist()]
    assert [f"{key:x}" for key in keys] == [
        "7b31044b6296df1f", "53419f2b47be247a", "442679536097dc26"
    ]  # fmt: skip
    assert np.array_equal(found.paragraphs[:, 1:], [[0, 0], [0, 1]])

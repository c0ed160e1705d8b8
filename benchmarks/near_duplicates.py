"""Recall and precision of the search for near-duplicates, on planted ones.

Each document gets a copy in which 1 to 20% of the words are replaced by words of the corpus. Truth
is the Jaccard similarity of word 5-shingles, computed by sets of strings, of all pairs that are
found, planted or not.

    python benchmarks/near_duplicates.py --input 'my/*.txt' --words 300 --documents 2000
"""

import argparse
import collections
import random
import tempfile
import time
from pathlib import Path

from bert_jax.data.corpus.cleaning.clean import CleaningConfig, Drops
from bert_jax.data.corpus.cleaning.duplicates import find_duplicates, scan
from bert_jax.data.corpus.overlap.ngrams import normalised_words
from bert_jax.data.corpus.sources import resolve_sources

SHARES = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", action="append", default=[])
    parser.add_argument("--documents", type=int, default=1200)
    parser.add_argument("--words", type=int, default=300, help="in each document")
    parser.add_argument("--threshold", type=float, default=0.8)
    arguments = parser.parse_args()
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
        scanned, decided = Path(place, "scan"), Path(place, "drops")
        scanned.mkdir()
        decided.mkdir()
        begin = time.process_time()
        scan(texts, config, scanned)
        middle = time.process_time()
        (file,) = find_duplicates([scanned], config, decided)
        end = time.process_time()
        drops = Drops.load(file)
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


if __name__ == "__main__":
    main()

"""Hashes of words and n-grams, tables of n-grams, and signatures of documents.

N-grams find evaluation texts in a corpus. A text of 13 words or more is recognised by its 13-grams
(Brown et al. 2020, GPT-3, appendix C). A text of 5 to 12 words is a single n-gram, so that only the
complete text is recognised. Shorter texts are skipped, since so few words may occur by chance.

Signatures find duplicate documents without comparing texts. A signature holds MinHashes (Broder
1997) of the document's word 5-shingles, in b bands of r rows. Two documents with Jaccard similarity
s share a band with probability 1 - (1 - s^r)^b. To find documents from s = 0.8 up, `banding` gives
b = 20 and r = 6: the probability is 0.998 for s = 0.8, but 0.27 for s = 0.5. Documents that share a
band are then compared by their smallest shingle hashes (see `similarity`).
"""

import functools
import hashlib
import itertools
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.errors import needs_package

NEEDS_RENSA = "finding near-duplicates needs rensa: pip install 'bert_jax[corpora]'."
_SPACELESS = (
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Japanese and Chinese
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer
)
# Vowel signs and accents belong to the letter before them, but `\w` does not match them.
_MARKS = "".join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c)[0] == "M")
_LETTER = rf"[^\W{_SPACELESS}]"
_ASCII_WORD = re.compile(r"\w+")
WORD = re.compile(rf"{_LETTER}+(?:[{_MARKS}]+{_LETTER}*)*|(?=\w)[{_SPACELESS}][{_MARKS}]*")
_MAX_CACHED = 1 << 18
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that the multiplication loses no bit
_MIX = np.uint64(0xD6E8FEB86659FD93)


def normalised_words(text: str) -> list[str]:
    """Return the words of a text, normalised (NFKC) and lower-cased, without punctuation.

    Words are maximal runs of letters with their marks, digits and underscores. Each letter of a
    script without spaces between words, such as Chinese or Thai, is a word.
    """
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return WORD.findall(unicodedata.normalize("NFKC", text).lower())


def hash_text(text: str) -> int:
    """Return the 64-bit BLAKE2b digest of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


_hash_word = functools.lru_cache(_MAX_CACHED)(hash_text)


def word_hashes(words: Sequence[str]) -> np.ndarray:
    """Return the hashes of words, (n,) uint64."""
    return np.fromiter(map(_hash_word, words), np.uint64, len(words))


def ngram_hashes(hashes: np.ndarray, size: int) -> np.ndarray:
    """Return the hashes, (max(0, n - size + 1),), of n-grams of `size` words with `hashes` (n,)."""
    ((_, found),) = several_ngram_hashes(hashes, [size])
    return found


def several_ngram_hashes(
    hashes: np.ndarray, sizes: Sequence[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (size, hashes of all n-grams of this size) for each of `sizes`, smallest first."""
    found = np.zeros(len(hashes), np.uint64)
    for size in range(1, max(sizes, default=0) + 1):
        count = max(0, len(hashes) - size + 1)
        found = found[:count] * _FACTOR + hashes[len(hashes) - count :]
        if size in sizes:
            yield size, mixed(found)


def covered_words(num_words: int, ngrams: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """Return which words are covered by n-grams, (num_words,) bool.

    Each item of `ngrams` is (size, positions of the n-grams' first words).
    """
    edges = np.zeros(num_words + 1, np.int64)
    for size, starts in ngrams:
        np.add.at(edges, starts, 1)
        np.add.at(edges, starts + size, -1)
    return np.cumsum(edges)[:-1] > 0


def mixed(hashes: np.ndarray) -> np.ndarray:
    """Return mixed hashes: a difference in a few bits of the input spreads over all 64 bits."""
    hashes = (hashes ^ (hashes >> np.uint64(32))) * _MIX
    return hashes ^ (hashes >> np.uint64(32))


NGRAM = 13
MIN_WORDS = 5
_FILTER_BITS = 22


class NgramTable:
    """Table of n-grams of texts (each given as its words), to find these n-grams in documents."""

    def __init__(self, texts: Iterable[Sequence[str]]) -> None:
        hashes: dict[int, list[np.ndarray]] = {}
        owners: dict[int, list[np.ndarray]] = {}
        self.num_texts = 0
        for number, words in enumerate(texts):
            self.num_texts += 1
            size = min(len(words), NGRAM)
            if size >= MIN_WORDS:
                found = ngram_hashes(word_hashes(words), size)
                hashes.setdefault(size, []).append(found)
                owners.setdefault(size, []).append(np.full(len(found), number))
        self._sizes = sorted(hashes)
        self._owners = {size: np.concatenate(owners[size]) for size in self._sizes}
        self._grams: dict[int, np.ndarray] = {}
        """For each size: ascending hashes of the distinct n-grams."""
        self._entries: dict[int, np.ndarray] = {}
        """For each size: the index in `_grams` of each n-gram of the texts."""
        self._filters: dict[int, np.ndarray] = {}
        """For each size: (2^22,) bool, true at each index that is the first 22 bits of a hash."""
        for size in self._sizes:
            self._grams[size], self._entries[size] = np.unique(
                np.concatenate(hashes[size]), return_inverse=True
            )
            self._filters[size] = np.zeros(1 << _FILTER_BITS, bool)
            self._filters[size][_bits(self._grams[size])] = True

    def find(self, hashes: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Find n-grams of the texts in a document, which is given as the hashes (n,) of its words.

        Return, for each size with k > 0 matches: the positions (k,) of the matches' first words,
        and the indices (k,) of the matching n-grams in `_grams`.
        """
        found = {}
        for size, grams in several_ngram_hashes(hashes, self._sizes):
            at = np.flatnonzero(self._filters[size][_bits(grams)])
            numbers = np.searchsorted(self._grams[size], grams[at])
            numbers[numbers == len(self._grams[size])] = 0
            same = self._grams[size][numbers] == grams[at]
            if same.any():
                found[size] = at[same], numbers[same]
        return found

    def covered(self, hashes: np.ndarray) -> np.ndarray:
        """Return a mask, (n,) bool, of the document's words that n-grams of the texts cover."""
        found = self.find(hashes)
        return covered_words(len(hashes), ((size, starts) for size, (starts, _) in found.items()))

    def nothing_seen(self) -> dict[int, np.ndarray]:
        """Return an initial `seen` for `counts`: for each size, False for each distinct n-gram."""
        return {size: np.zeros(len(self._grams[size]), bool) for size in self._sizes}

    def counts(self, seen: dict[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Count all n-grams of each text, and the n-grams of each text that are true in `seen`.

        Both arrays are (num_texts,) int64. They are 0 for a text with fewer than `MIN_WORDS` words.
        """
        total, marked = np.zeros((2, self.num_texts), np.int64)
        for size in self._sizes:
            np.add.at(total, self._owners[size], 1)
            np.add.at(marked, self._owners[size], seen[size][self._entries[size]])
        return total, marked


def _bits(hashes: np.ndarray) -> np.ndarray:
    return hashes >> np.uint64(64 - _FILTER_BITS)


SHINGLE = 5
_MISSED = 0.0025
"""Largest probability of missing two documents whose similarity equals the threshold."""
_MAX_HASHES = 144
SKETCH = 1024
"""Largest number of hashes in a sketch. A sketch keeps a document's smallest shingle hashes."""
_SEED = 1


class Signatures(NamedTuple):
    """Signatures of n documents."""

    hashes: np.ndarray
    """(n,) uint64: for each document, a hash of its sequence of words."""
    bands: np.ndarray
    """(n, b) uint64 keys; b is 0 if near=None. Documents that share a key may be similar."""
    sketches: list[np.ndarray]
    """(s,) uint32 for each document: the smallest hashes of its shingles, ascending."""
    paragraphs: np.ndarray
    """(m, 3) uint64 for each paragraph with words: hash, document, and index in the document."""


@functools.cache
def banding(threshold: float) -> tuple[int, int]:
    """Return the number of bands, and of rows per band, to find documents with this similarity.

    Documents of similarity `threshold` share a band with a probability of at least 0.9975. The
    number of rows is the largest within `_MAX_HASHES`; more rows mean fewer comparisons.
    """

    def bands(rows: int) -> int:
        return math.ceil(math.log(_MISSED) / math.log1p(-(min(threshold, 0.99) ** rows)))

    rows = next(r for r in range(_MAX_HASHES, 0, -1) if bands(r) * r <= _MAX_HASHES)
    return bands(rows), rows


def sign(texts: Sequence[str], *, near: float | None = 0.8, paragraphs: bool = False) -> Signatures:
    """Compute the signatures of documents, whose paragraphs are separated by newlines.

    Bands find documents of the similarity `near`. If `near` is None, bands and sketches are empty.
    Raise a UserError if `near` is given, but rensa is not installed.
    """
    hashes = np.zeros(len(texts), np.uint64)
    words: list[np.ndarray] = []
    places: list[tuple[int, int, int]] = []
    for number, text in enumerate(texts):
        lines = [word_hashes(normalised_words(line)) for line in text.split("\n")]
        words.append(np.concatenate(lines))
        hashes[number] = _digest(words[-1]) if len(words[-1]) else hash_text(text)
        if paragraphs:
            places += [(_digest(line), number, at) for at, line in enumerate(lines) if len(line)]
    if near is None:
        bands = np.zeros((len(texts), 0), np.uint64)
        sketches = [np.zeros(0, np.uint32)] * len(texts)
    else:
        shingles, offsets = _shingles(words, hashes)
        bands = _bands(shingles, offsets, near)
        sketches = [
            np.unique((shingles[begin:end] >> np.uint64(32)).astype(np.uint32))[:SKETCH]
            for begin, end in itertools.pairwise(offsets)
        ]
    return Signatures(hashes, bands, sketches, np.array(places, np.uint64).reshape(-1, 3))


def similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Compute the Jaccard similarity of two documents from their sketches.

    The result is exact if both documents have fewer than `SKETCH` distinct shingles. For longer
    documents it is a bottom-k estimate (Cohen and Kaplan 2007) from the range of hashes in which
    both sketches are complete, with a standard deviation of at most 0.016.
    """
    last = min((s[-1] for s in (one, other) if len(s) == SKETCH), default=None)
    if last is not None:
        one, other = (s[: np.searchsorted(s, last, side="right")] for s in (one, other))
    union = np.sort(np.concatenate([one, other]))
    common = int((union[1:] == union[:-1]).sum())
    return common / max(len(union) - common, 1)


def _digest(hashes: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(hashes.tobytes(), digest_size=8).digest(), "little")


def _shingles(words: Sequence[np.ndarray], hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the shingle hashes of all documents, one or more each, and the offsets, (n + 1,)."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    counts = np.maximum(lengths - SHINGLE + 1, 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    # Windows that cross from one document into the next are not used.
    windows = ngram_hashes(np.concatenate([np.zeros(0, np.uint64), *words]), SHINGLE)
    starts = np.cumsum(lengths) - lengths
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    shingles = np.zeros(offsets[-1], np.uint64)
    long = np.repeat(lengths >= SHINGLE, counts)
    shingles[long] = windows[index[long]]
    shingles[~long] = mixed(hashes[lengths < SHINGLE])
    return shingles, offsets


def _bands(shingles: np.ndarray, offsets: np.ndarray, near: float) -> np.ndarray:
    with needs_package(NEEDS_RENSA):
        from rensa import RMinHash
    bands, rows = banding(near)
    digests = RMinHash.digest_matrix_from_flat_token_hashes(
        shingles, offsets.astype(np.uint64), num_perm=bands * rows, seed=_SEED
    )
    hashes = np.array(digests.to_rows(), np.uint64).reshape(-1, bands, rows)
    keys = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64), hashes.shape[:2]).copy()
    for row in range(rows):
        keys = keys * _FACTOR + hashes[:, :, row]
    return mixed(keys)

"""Signatures of documents, from which duplicates are found without their texts.

MinHash (Broder 1997) of word 5-shingles in 20 bands of 6 rows: a pair of documents of Jaccard
similarity s shares a band with probability 1 - (1 - s^6)^20, which is 0.998 at 0.8 and 0.27 at 0.5.
Pairs that share a band are compared by the bottom of their sets of shingles (see `similarity`).
"""

import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.corpus.overlap.ngrams import (
    hash_text,
    mixed,
    ngram_hashes,
    normalised_words,
    word_hashes,
)
from bert_jax.errors import needs_package

SHINGLE = 5
BANDS, ROWS = 20, 6
SKETCH = 1024
"""Smallest hashes of shingles that are kept of a document: all of most documents."""
_SEED = 1
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Signatures(NamedTuple):
    """Signatures of n documents."""

    hashes: np.ndarray
    """(n,) uint64, of each document's words in their order."""
    bands: np.ndarray
    """(n, BANDS) uint64 keys, (n, 0) without near-duplicates; equal keys name a candidate."""
    sketches: np.ndarray
    """(s,) uint32, the smallest hashes of each document's shingles, ascending."""
    sketch_lengths: np.ndarray
    """(n,) int64, entries of each document in `sketches`."""
    paragraphs: np.ndarray
    """(m, 3) uint64, hash, document (from 0) and number of each paragraph with words."""


def sign(texts: Sequence[str], *, near: bool = True, paragraphs: bool = False) -> Signatures:
    """Return the signatures of documents, paragraphs joined by newlines.

    Without `near` bands and sketches are empty, without `paragraphs` paragraphs.

    Raises:
        UserError: near-duplicates are asked for, and rensa is not installed.
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
    if not near:
        bands = np.zeros((len(texts), 0), np.uint64)
        sketches, lengths = np.zeros(0, np.uint32), np.zeros(len(texts), np.int64)
    else:
        shingles, offsets = _shingles(words, hashes)
        bands = _bands(shingles, offsets)
        kept = [
            np.unique((shingles[begin:end] >> np.uint64(32)).astype(np.uint32))[:SKETCH]
            for begin, end in itertools.pairwise(offsets)
        ]
        sketches = np.concatenate([np.zeros(0, np.uint32), *kept])
        lengths = np.fromiter(map(len, kept), np.int64, len(kept))
    hashed = np.array(places, np.uint64).reshape(-1, 3)
    return Signatures(hashes, bands, sketches, lengths, hashed)


def similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Return the Jaccard similarity of two sets of shingles from their sketches.

    It is exact for documents of up to `SKETCH` shingles. Beyond that it is the similarity of the
    hashes up to the last that both sketches hold, a bottom-k estimate (Cohen and Kaplan 2007) with
    a standard deviation of at most 0.016.
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
    """Hashes of all shingles, and the (n + 1,) bounds of each document among them.

    A document of fewer words is one shingle.
    """
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    counts = np.maximum(lengths - SHINGLE + 1, 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    # Windows of all words run across documents; those are not taken.
    windows = ngram_hashes(np.concatenate([np.zeros(0, np.uint64), *words]), SHINGLE)
    starts = np.cumsum(lengths) - lengths
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    shingles = np.zeros(offsets[-1], np.uint64)
    long = np.repeat(lengths >= SHINGLE, counts)
    shingles[long] = windows[index[long]]
    shingles[~long] = mixed(hashes[lengths < SHINGLE])
    return shingles, offsets


def _bands(shingles: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    with needs_package("finding near-duplicates needs rensa: pip install 'bert_jax[corpora]'."):
        from rensa import RMinHash
    digests = RMinHash.digest_matrix_from_flat_token_hashes(
        shingles, offsets.astype(np.uint64), num_perm=BANDS * ROWS, seed=_SEED
    )
    rows = np.array(digests.to_rows(), np.uint64).reshape(-1, BANDS, ROWS)
    keys = np.broadcast_to(np.arange(1, BANDS + 1, dtype=np.uint64), rows.shape[:2]).copy()
    for row in range(ROWS):
        keys = keys * _FACTOR + rows[:, :, row]
    return mixed(keys)

"""Shares of a document that repeat themselves (Rae et al. 2021, Gopher, table A1).

A line or an n-gram is repeated where it has occurred earlier in the document; its first occurrence
is not counted. Characters are those of words, without spaces.
"""

from collections.abc import Sequence

import numpy as np

from bert_jax.corpus.overlap.words import ngram_hashes, word_hashes


def repeated_lines(lines: Sequence[str], *, characters: bool = False) -> float:
    """Return the share of the lines, or of their characters, that repeats an earlier line."""
    seen: set[str] = set()
    total = repeated = 0
    for line in lines:
        weight = len(line) if characters else 1
        total += weight
        if line in seen:
            repeated += weight
        seen.add(line)
    return repeated / max(total, 1)


def top_ngram(words: Sequence[str], size: int) -> float:
    """Return the share of the characters in the n-gram that has most of them; 0 if none repeats."""
    lengths, total = _lengths(words)
    hashes = ngram_hashes(word_hashes(words), size)
    if not len(hashes):
        return 0.0
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    characters = _sums(lengths, size)[first] * counts
    return float(characters[counts > 1].max(initial=0)) / total


def repeated_ngrams(words: Sequence[str], size: int) -> float:
    """Return the share of the characters in repeated n-grams; overlaps are counted once."""
    lengths, total = _lengths(words)
    hashes = ngram_hashes(word_hashes(words), size)
    repeated = np.ones(len(hashes), bool)
    repeated[np.unique(hashes, return_index=True)[1]] = False
    edges = np.zeros(len(words) + 1, np.int64)
    starts = np.flatnonzero(repeated)
    np.add.at(edges, starts, 1)
    np.add.at(edges, starts + size, -1)
    return float(lengths[np.cumsum(edges)[:-1] > 0].sum()) / total


def _lengths(words: Sequence[str]) -> tuple[np.ndarray, int]:
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    return lengths, max(int(lengths.sum()), 1)


def _sums(lengths: np.ndarray, size: int) -> np.ndarray:
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return ends[size:] - ends[:-size]

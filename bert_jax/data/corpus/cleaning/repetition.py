"""Shares of a document that repeat themselves (Rae et al. 2021, Gopher, table A1).

A line or an n-gram is repeated where it has occurred earlier in the document; its first occurrence
is not counted. Only characters of words are counted, without spaces.
"""

from collections.abc import Sequence

import numpy as np

from bert_jax.data.corpus.overlap.words import ngram_hashes


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


def top_ngram(hashes: np.ndarray, lengths: np.ndarray, size: int) -> float:
    """Return the share of the characters in the n-gram that has most of them; 0 if none repeats.

    Args:
        hashes: (n,) uint64, of the words.
        lengths: (n,) int64, characters of the words.
        size: words of an n-gram.
    """
    grams = ngram_hashes(hashes, size)
    if not _repeats(grams):
        return 0.0
    _, first, counts = np.unique(grams, return_index=True, return_counts=True)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    characters = (ends[first + size] - ends[first]) * counts
    return float(characters[counts > 1].max() / ends[-1])


def repeated_ngrams(hashes: np.ndarray, lengths: np.ndarray, size: int) -> float:
    """Return the share of the characters in repeated n-grams; overlaps are counted once.

    For the arguments, see `top_ngram`.
    """
    grams = ngram_hashes(hashes, size)
    if not _repeats(grams):
        return 0.0
    repeated = np.ones(len(grams), bool)
    repeated[np.unique(grams, return_index=True)[1]] = False
    starts = np.flatnonzero(repeated)
    edges = np.zeros(len(hashes) + 1, np.int64)
    np.add.at(edges, starts, 1)
    np.add.at(edges, starts + size, -1)
    return float(lengths[np.cumsum(edges)[:-1] > 0].sum() / lengths.sum())


def _repeats(grams: np.ndarray) -> bool:
    """Return true if two n-grams are equal; to sort is all that most documents take."""
    ordered = np.sort(grams)
    return bool((ordered[1:] == ordered[:-1]).any())

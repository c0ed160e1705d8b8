"""Normalised words of a text, and hashes of words and n-grams that are equal in all processes."""

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_ASCII_WORD = re.compile(r"\w+")
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_MAX_CACHED = 1 << 18
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of a word is lost
_MIX = np.uint64(0xD6E8FEB86659FD93)


def normalised_words(text: str) -> list[str]:
    """Return the words of a text, NFKC and lower-cased, without punctuation.

    Words are maximal runs of letters, digits and underscores. Each Chinese or Japanese character
    is a word, since those scripts put no spaces between words.
    """
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


class _WordHashes(dict[str, int]):
    """Hashes of words met so far, at most `_MAX_CACHED`."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _MAX_CACHED:
            self.clear()
        value = hash_text(word)
        self[word] = value
        return value


_hashes = _WordHashes()


def hash_text(text: str) -> int:
    """Return 64 bits of the BLAKE2b digest of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def word_hashes(words: Sequence[str]) -> np.ndarray:
    """Return the hashes of words, (n,) uint64."""
    return np.fromiter(map(_hashes.__getitem__, words), np.uint64, len(words))


def ngram_hashes(hashes: np.ndarray, size: int) -> np.ndarray:
    """Return the hashes of all n-grams of `size` words, (max(0, n - size + 1),) uint64.

    Args:
        hashes: (n,) uint64, from `word_hashes`.
        size: words in an n-gram, at least 1.
    """
    ((_, found),) = several_ngram_hashes(hashes, [size])
    return found


def several_ngram_hashes(
    hashes: np.ndarray, sizes: Sequence[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the hashes of all n-grams of several sizes, ascending, as `ngram_hashes` returns them.

    Keys of one size are made from the keys of the size below.
    """
    found = np.zeros(len(hashes), np.uint64)
    for size in range(1, max(sizes, default=0) + 1):
        count = max(0, len(hashes) - size + 1)
        found = found[:count] * _FACTOR + hashes[len(hashes) - count :]
        if size in sizes:
            yield size, mixed(found)


def mixed(hashes: np.ndarray) -> np.ndarray:
    """Spread the differences of hashes over all of their 64 bits."""
    hashes = (hashes ^ (hashes >> np.uint64(32))) * _MIX
    return hashes ^ (hashes >> np.uint64(32))

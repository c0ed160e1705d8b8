"""BM25: documents ranked by the words that they share with a query.

Source: Robertson and Zaragoza 2009 (The Probabilistic Relevance Framework: BM25 and Beyond). The
formula and the constants are as in Lucene 8 and later, which omits the factor k1 + 1.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int64, Integer
from scipy.sparse import csc_array

K1, B = 1.2, 0.75


def rarity(found_in: Integer[np.ndarray, " V"], documents: int) -> Float[np.ndarray, " V"]:
    """Return the inverse document frequency of words that `found_in` documents have."""
    return np.log1p((documents - found_in + 0.5) / (found_in + 0.5))


class BM25:
    """Index of all documents' words, which computes BM25 scores.

    score(q, d) = sum over all words t of q, repeats included, of ln(1 + (N - n(t) + 0.5) / (n(t) +
    0.5)) * f(t, d) / (f(t, d) + k1 (1 - b + b |d| / mean |d|))

    where n(t) counts the documents with t, f(t, d) counts t in d, and |d| is the number of words of
    d. k1 controls how soon repeated words stop raising the score, b how much the length counts.
    """

    def __init__(self, documents: Iterable[Sequence[str]], k1: float = K1, b: float = B) -> None:
        self._numbers: dict[str, int] = {}
        number = self._numbers
        numbers = ([number.setdefault(word, len(number)) for word in words] for words in documents)
        rows = [np.array([*each], np.int64) for each in numbers]
        lengths = np.array([*map(len, rows)], np.int64)
        terms = np.concatenate([np.zeros(0, np.int64), *rows])
        places = np.repeat(np.arange(len(rows)), lengths), terms
        counts = csc_array((np.ones(len(terms)), places), (len(rows), len(number)))  # of f(t, d)
        found_in = np.diff(counts.indptr)
        rarities = np.repeat(rarity(found_in, len(rows)), found_in)
        norms = k1 * (1 - b + b * lengths / max(lengths.mean() if rows else 0.0, 1e-12))
        counts.data *= rarities / (counts.data + norms[counts.indices])
        self._weights = counts

    def scores(self, query: Sequence[str]) -> Float[np.ndarray, " N"]:
        """Return the score of each document; 0 if it shares no word with the query."""
        known = [self._numbers[word] for word in query if word in self._numbers]
        return np.asarray(self._weights[:, known].sum(axis=1))

    def ranked(self, query: Sequence[str], k: int) -> Int64[np.ndarray, " K"]:
        """Return indices of the k best documents that share a query word; ties keep their order."""
        scores = self.scores(query)
        some = np.flatnonzero(scores)
        if len(some) > k:
            least = np.partition(scores[some], len(some) - k)[len(some) - k]
            some = some[scores[some] >= least]
        return some[np.argsort(-scores[some], kind="stable")][:k]

"""BM25: documents ranked by the words that they share with a query.

Source: Robertson and Zaragoza 2009 (The Probabilistic Relevance Framework: BM25 and Beyond), in the
form and with the constants of Lucene 8 and later, whose scores lack the factor k1 + 1.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int64

K1, B = 1.2, 0.75


class BM25:
    """Index of all documents' words, which computes BM25 scores.

    score(q, d) = sum over all words t of q, repeats included, of ln(1 + (N - n(t) + 0.5) / (n(t) +
    0.5)) * f(t, d) / (f(t, d) + k1 (1 - b + b |d| / mean |d|))

    where n(t) counts the documents with t, f(t, d) counts t in d, and |d| is the number of words of
    d. k1 sets the saturation of repeated words, b the weight of the length.
    """

    def __init__(self, documents: Iterable[Sequence[str]], k1: float = K1, b: float = B) -> None:
        self._numbers: dict[str, int] = {}
        number = self._numbers
        numbers = ([number.setdefault(word, len(number)) for word in words] for words in documents)
        rows = [np.unique(np.array(each, np.int64), return_counts=True) for each in numbers]
        self.count = len(rows)
        lengths = np.array([counts.sum() for _, counts in rows], np.float64)
        owners = np.repeat(np.arange(self.count), [len(terms) for terms, _ in rows])
        terms = np.concatenate([np.zeros(0, np.int64), *(terms for terms, _ in rows)])
        counts = np.concatenate([np.zeros(0, np.int64), *(counts for _, counts in rows)])
        order = np.argsort(terms, kind="stable")
        self._owners, terms = owners[order], terms[order]
        self._starts = np.searchsorted(terms, np.arange(len(self._numbers) + 1))
        found_in = np.diff(self._starts)
        rarity = np.log1p((self.count - found_in + 0.5) / (found_in + 0.5))
        norms = k1 * (1 - b + b * lengths / max(lengths.mean() if self.count else 0.0, 1e-12))
        frequency = counts[order]
        self._weights = rarity[terms] * frequency / (frequency + norms[self._owners])

    def scores(self, query: Sequence[str]) -> Float[np.ndarray, " N"]:
        """Return the score of each document; 0 for a document that shares no word."""
        found = np.zeros(self.count)
        for word in query:
            if (number := self._numbers.get(word)) is not None:
                own = slice(self._starts[number], self._starts[number + 1])
                found[self._owners[own]] += self._weights[own]
        return found

    def ranked(self, query: Sequence[str], k: int) -> Int64[np.ndarray, " K"]:
        """Return the k best documents that share a word, the best first; ties keep their order."""
        scores = self.scores(query)
        some = np.flatnonzero(scores)
        if len(some) > k:
            least = np.partition(scores[some], len(some) - k)[len(some) - k]
            some = some[scores[some] >= least]
        return some[np.argsort(-scores[some], kind="stable")][:k]

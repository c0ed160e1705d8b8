"""Mixtures: which corpus gives each row of a phase.

Rows come in blocks of 1,000. In block b the corpora divide the interval [0, 1) by their shares, and
the points (p + t) / 1000, p = 0 to 999, fall into them; t is the b-th number of van der Corput's
sequence. So each corpus has its share of every block, exact within one row, and of all blocks
together as well (the discrepancy of the sequence grows with the logarithm of b; Niederreiter 1992,
section 3.1). How many rows a corpus has had before a block is a sum with a closed form, and a keyed
permutation mixes the rows within a block.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bert_jax.data.kept import Kept
from bert_jax.data.rows import ShardOrder, StoreRows
from bert_jax.data.store import TokenStore
from bert_jax.hashing import hash_key, permute

BLOCK = 1000
_ONE = 1 << 32  # a point's place is an integer in [0, BLOCK * _ONE)
_BLOCKS = 256
"""Number of blocks whose corpora are kept."""


@dataclass(frozen=True)
class Mixture:
    """Corpora and their weights."""

    names: tuple[str, ...]
    """Directories, as given."""
    stores: tuple[TokenStore, ...]
    weights: tuple[float, ...]
    """Positive; shares are their ratios."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the corpora in their order; weights belong to the configuration."""
        joined = "\n".join(store.fingerprint for store in self.stores)
        return hashlib.sha256(joined.encode()).hexdigest()


def weights_of(
    stores: Sequence[TokenStore], weights: Sequence[float], temperature: float
) -> tuple[float, ...]:
    """Weigh corpora by size: weight x tokens^temperature (Conneau et al. 2020, section 3.1)."""
    sizes = [store.num_tokens for store in stores]
    # Ratios to the largest, which neither overflow nor lose small ones.
    return tuple(
        weight * (size / max(sizes)) ** temperature
        for weight, size in zip(weights, sizes, strict=True)
    )


class Mixing:
    """The corpus of each row; a pure function of positive weights and key."""

    def __init__(self, weights: Sequence[float], key: int) -> None:
        total = math.fsum(weights)
        shares = [math.fsum(weights[: n + 1]) / total for n in range(len(weights))]
        self._ends = [round(BLOCK * _ONE * share) for share in shares]
        self._ends[-1] = BLOCK * _ONE
        self._key = key
        self._blocks = Kept(self._make_block, _BLOCKS)

    def split(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of rows, given by their (n,) int64 numbers, and its number there."""
        corpora, rows = np.empty((2, numbers.size), np.int64)
        blocks, positions = np.divmod(numbers, BLOCK)
        for block in np.unique(blocks):
            chosen = np.flatnonzero(blocks == block)
            made = self._blocks(int(block))
            corpora[chosen], rows[chosen] = made[:, positions[chosen]]
        return corpora, rows

    def counts(self, num_rows: int) -> list[int]:
        """Count the rows of each corpus among the first ones."""
        block, rest = divmod(num_rows, BLOCK)
        begins = self._before(block)
        more = np.bincount(self._blocks(block)[0, :rest], minlength=len(begins)).tolist()
        return [before + after for before, after in zip(begins, more, strict=True)]

    def _before(self, block: int) -> list[int]:
        """Count the rows of each corpus in the blocks before one."""
        below = [0, *(_points_below(end, block) for end in self._ends)]
        return [after - before for before, after in itertools.pairwise(below)]

    def _make_block(self, block: int) -> np.ndarray:
        """Return (2, BLOCK) int64: the corpora of a block's rows, and their numbers there."""
        places = permute(np.arange(BLOCK), BLOCK, hash_key(self._key, block)) * _ONE
        corpora = np.searchsorted(self._ends, places + _van_der_corput(block), side="right")
        by_corpus = np.argsort(corpora, kind="stable")
        counts = np.bincount(corpora, minlength=len(self._ends))
        rank = np.empty(BLOCK, np.int64)
        rank[by_corpus] = np.arange(BLOCK) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.stack([corpora, rank + np.array(self._before(block))[corpora]])


def _van_der_corput(number: int) -> int:
    """Return a number of van der Corput's sequence in base 2, times 2^32 and rounded down."""
    return int(f"{number % _ONE:032b}"[::-1], 2)


def _points_below(end: int, blocks: int) -> int:
    """Count the points below `end` in the first blocks; places are multiples of 1 / _ONE."""
    whole, part = divmod(end, _ONE)
    periods, rest = divmod(blocks, _ONE)  # the sequence, rounded down, has each value once
    count = blocks * whole + periods * part
    first = 0
    for bit in reversed(range(32)):
        if rest >> bit & 1:
            # Numbers first to first + 2^bit: their values are `offset` + m * step, m < 2^bit.
            step, offset = _ONE >> bit, _van_der_corput(first)
            count += min(max(-(-(part - offset) // step), 0), 1 << bit)
            first += 1 << bit
    return count


class CorpusRows(NamedTuple):
    """A corpus of a phase."""

    name: str
    rows: StoreRows
    order: ShardOrder


class CorpusProgress(NamedTuple):
    """Reading of a corpus up to a step."""

    name: str
    """Directory, as given; empty for the run's corpus."""
    rows: int
    tokens: int
    """Tokens of text: `epochs` times the tokens of the corpus."""
    epochs: float
    """Passes over the text; each of `data.num_passes` counts."""


class PhaseRows:
    """Rows of a phase by number, from one corpus, which needs no mixing, or several."""

    def __init__(self, corpora: Sequence[CorpusRows], mixing: Mixing | None) -> None:
        self.corpora, self._mixing = tuple(corpora), mixing
        self._prepared = [0] * len(corpora)
        self.most_shards = sum(corpus.order.window for corpus in corpora)
        """Largest number of shards that rows of one time come from."""

    def counts(self, num_rows: int) -> list[int]:
        """Count the rows of each corpus among the first ones of the phase."""
        return [num_rows] if self._mixing is None else self._mixing.counts(num_rows)

    def batch(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Build rows, given by their (n,) int64 numbers in the phase; all but `row_index`.

        The next windows of the corpora are planned ahead.
        """
        if self._mixing is None:
            return self._of_corpus(0, numbers)
        corpora, rows = self._mixing.split(numbers)
        batch: dict[str, np.ndarray] = {}
        for corpus in np.unique(corpora).tolist():
            chosen = np.flatnonzero(corpora == corpus)
            for name, array in self._of_corpus(corpus, rows[chosen]).items():
                if name not in batch:
                    batch[name] = np.empty((numbers.size, *array.shape[1:]), array.dtype)
                batch[name][chosen] = array
        return batch

    def _of_corpus(self, corpus: int, numbers: np.ndarray) -> dict[str, np.ndarray]:
        _, rows, order = self.corpora[corpus]
        if order.num_windows > 1:
            after = order.window_of(int(numbers.max())) + 1
            if after > self._prepared[corpus]:  # two threads may both begin; plans are made once
                self._prepared[corpus] = after
                rows.prepare(order.shards_of(after))
        return rows.batch(order.places(numbers))

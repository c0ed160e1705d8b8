"""Order of the rows of a phase: shards of a store, plans of their rows, and mixtures of corpora.

An epoch reads all shards once. Shards are permuted and divided into windows, and rows are permuted
within a window. So a host keeps the plans and files of only two windows, the current and the next.

The number of rows of a shard is known only after planning, so the order uses estimates, the quotas.
In every epoch, a shard fills as many positions as its quota. Its position j in epoch e is row
(e * quota + j) mod n of its n rows, so rows occur equally often, even with a wrong quota.

The rows of a mixture come in blocks of 1,000. The interval [0, 1) is divided into one part for each
corpus, as long as the corpus's share. Block b has the points (p + t) / 1000 for p = 0 to 999, where
t is term b of van der Corput's sequence. Each point is one row, from the corpus whose part contains
the point. So the number of rows of a corpus differs from its share by at most one in a block, and
over the first b blocks by O(log b) (the discrepancy of the sequence; Niederreiter 1992, section
3.1). A keyed permutation mixes the rows within a block.
"""

import contextlib
import hashlib
import itertools
import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from bert_jax.data.kept import Kept
from bert_jax.data.pairings import PAIRINGS, DataConfig, ExamplePlan
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError
from bert_jax.hashing import hash_key, permute

_EPOCHS = 4  # number of epochs whose order of shards is cached


class Places(NamedTuple):
    """Rows, each identified by its shard and by how many rows of the shard were read before it."""

    shards: np.ndarray
    """(n,) int64: index of the shard of each row."""
    visits: np.ndarray
    """(n,) int64: number of rows of the same shard before this row, counted over all epochs."""


class Window(NamedTuple):
    """Shards that are read together."""

    shards: np.ndarray
    """(w,) int64: indices of the shards."""
    first_row: int
    """Index of the window's first row in the epoch."""
    begins: np.ndarray
    """(w + 1,) int64: rows `begins[i]` to `begins[i + 1]` - 1 of the window are in `shards[i]`."""


class ShardOrder:
    """Order of the rows of all epochs, as a pure function of the arguments.

    An epoch has `quotas[i]` positions, at least 1, of shard i. `window` shards are read together; 0
    means all. The integers `shuffle` are part of the keys of the random permutations.
    """

    def __init__(self, quotas: Sequence[int], window: int, shuffle: Sequence[int]) -> None:
        self.quotas = np.array(quotas, np.int64)
        self.num_rows = int(self.quotas.sum())  # rows in an epoch
        self.window = min(window or len(self.quotas), len(self.quotas))  # shards in a window
        self.num_windows = -(-len(self.quotas) // self.window)  # windows in an epoch
        self._shuffle = tuple(shuffle)
        self._windows = Kept(self._make_windows, _EPOCHS)

    def places(self, numbers: np.ndarray) -> Places:
        """Return the shards and visits of rows, given as indices over all epochs, (n,) int64."""
        shards, visits = np.empty((2, numbers.size), np.int64)
        epochs, positions = np.divmod(numbers, self.num_rows)
        for epoch in np.unique(epochs):
            windows = self._windows(int(epoch))
            first_rows = [window.first_row for window in windows]
            of_window = np.searchsorted(first_rows, positions, side="right") - 1
            for number in np.unique(of_window[epochs == epoch]):
                chosen = np.flatnonzero((epochs == epoch) & (of_window == number))
                window = windows[number]
                key = hash_key(*self._shuffle, int(epoch), *([int(number)] if number else []))
                local = permute(positions[chosen] - window.first_row, int(window.begins[-1]), key)
                at = np.searchsorted(window.begins, local, side="right") - 1
                shards[chosen] = window.shards[at]
                visits[chosen] = local - window.begins[at] + epoch * self.quotas[window.shards[at]]
        return Places(shards, visits)

    def window_of(self, number: int) -> int:
        """Return the index of the window of row `number`. Both indices run over all epochs."""
        epoch, position = divmod(number, self.num_rows)
        first_rows = [window.first_row for window in self._windows(epoch)]
        at = int(np.searchsorted(first_rows, position, side="right")) - 1
        return epoch * self.num_windows + at

    def shards_of(self, window: int) -> list[int]:
        """Return the shards of window `window`. Window indices run over all epochs."""
        epoch, number = divmod(window, self.num_windows)
        return self._windows(epoch)[number].shards.tolist()

    def _make_windows(self, epoch: int) -> list[Window]:
        count = len(self.quotas)
        # Windows have smaller numbers than `count`, so no permutation of rows has this key.
        order = permute(np.arange(count), count, hash_key(*self._shuffle, epoch, count))
        windows, first_row = [], 0
        for begin in range(0, count, self.window):
            shards = np.sort(order[begin : begin + self.window])
            begins = np.concatenate([[0], np.cumsum(self.quotas[shards])])
            windows.append(Window(shards, first_row, begins))
            first_row += int(begins[-1])
        return windows


_PLAN = 0  # constant hashed into the random key of a plan; `pipeline` has constants of other keys
_POSITIONS = 1 << 17
"""Number of positions (rows x L) to build at once. Their indices, 8 bytes each, fit in a cache."""


class StoreRows:
    """Rows of `length` tokens from a store. Several threads may read them.

    A shard is planned when its rows are first read; the last `num_plans` plans are cached. Raise a
    UserError if the corpus does not suit the pairing, `config.pairing`.
    """

    def __init__(
        self, store: TokenStore, config: DataConfig, length: int, seed: int, num_plans: int
    ) -> None:
        self.store, self._config, self._length, self._seed = store, config, length, seed
        self._pairing = PAIRINGS[config.pairing]
        self._pairing.check(store)
        self.plan = Kept(self._make_plan, num_plans)
        """Function that maps a shard's index to the shard's plan. It raises a UserError if `length`
        is too short, or if the shard is damaged or has no rows."""

    @cached_property
    def quotas(self) -> list[int]:
        """Number of rows of each shard: exact for the first shard, estimated for the others."""
        each = self._pairing.empty_share * self._length + 2  # places that a document leaves empty
        sizes = [shard.num_tokens + each * shard.num_documents for shard in self.store.counts]
        rows = len(self.plan(0))
        return [rows, *(max(1, round(size * rows / sizes[0])) for size in sizes[1:])]

    def batch(self, places: Places) -> dict[str, np.ndarray]:
        """Build all arrays of a batch except `row_index`. Rows of a shard are read together."""
        shards, visits = places
        at_once = max(1, _POSITIONS // self._length)
        # For narrow integers, numpy uses radix sort, which is fast.
        by_shard = np.argsort(shards.astype(np.min_scalar_type(shards.max())), kind="stable")
        ends = np.flatnonzero(np.diff(shards[by_shard])) + 1
        parts, order = [], []
        for chosen in np.split(by_shard, ends):
            number = int(shards[chosen[0]])
            plan, shard = self.plan(number), self.store.shards[number]
            rows = visits[chosen] % len(plan)
            lie = np.argsort(rows, kind="stable")
            for first in range(0, lie.size, at_once):
                parts.append(plan.batch(shard, rows[lie[first : first + at_once]]))
            order.append(chosen[lie])
        place = np.empty(shards.size, np.int64)
        place[np.concatenate(order)] = np.arange(shards.size)
        # `take` copies rows twice as fast as an assignment by index.
        return {
            name: np.concatenate([part[name] for part in parts]).take(place, axis=0, mode="clip")
            for name in parts[0]
        }

    def prepare(self, shards: Iterable[int]) -> None:
        """Plan shards in advance, in a thread. An error is raised later, when the shard is read."""

        def work() -> None:
            with contextlib.suppress(Exception):
                for shard in shards:
                    self.plan(shard)

        threading.Thread(target=work, daemon=True, name="plan ahead").start()

    def _make_plan(self, shard: int) -> ExamplePlan:
        try:
            # The key of the first shard is the same as in old versions, which had only one shard.
            seed = hash_key(self._seed, _PLAN, *([shard] if shard else []))
            return self._pairing.plan(self.store.shards[shard], self._config, self._length, seed)
        except UserError as error:
            if len(self.store.counts) == 1:
                raise
            raise UserError(f"shard {shard} of {len(self.store.counts)}: {error}") from error


BLOCK = 1000
_ONE = 1 << 32  # points are scaled to integers in [0, BLOCK * _ONE)
_BLOCKS = 256  # number of blocks whose rows are cached


@dataclass(frozen=True)
class Mixture:
    """Corpora and their weights."""

    names: tuple[str, ...]
    """Directories of the corpora, as in the configuration."""
    stores: tuple[TokenStore, ...]
    weights: tuple[float, ...]
    """Positive weights. The share of a corpus is its weight divided by the sum of all weights."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the corpora in their order, without weights."""
        joined = "\n".join(store.fingerprint for store in self.stores)
        return hashlib.sha256(joined.encode()).hexdigest()


def weights_of(
    stores: Sequence[TokenStore], weights: Sequence[float], temperature: float
) -> tuple[float, ...]:
    """Return weight x tokens^temperature, up to a factor (Conneau et al. 2020, section 3.1)."""
    sizes = [store.num_tokens for store in stores]
    # Divide by the largest size, so that powers neither overflow nor become 0.
    return tuple(
        weight * (size / max(sizes)) ** temperature
        for weight, size in zip(weights, sizes, strict=True)
    )


class Mixing:
    """Choice of a corpus for each row, as a pure function of positive weights and a key."""

    def __init__(self, weights: Sequence[float], key: int) -> None:
        total = math.fsum(weights)
        shares = [math.fsum(weights[: n + 1]) / total for n in range(len(weights))]
        self._ends = [round(BLOCK * _ONE * share) for share in shares]
        self._ends[-1] = BLOCK * _ONE
        self._key = key
        self._blocks = Kept(self._make_block, _BLOCKS)

    def split(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of each row and the row's index in the corpus, (n,) int64 each."""
        corpora, rows = np.empty((2, numbers.size), np.int64)
        blocks, positions = np.divmod(numbers, BLOCK)
        for block in np.unique(blocks):
            chosen = np.flatnonzero(blocks == block)
            corpora[chosen], rows[chosen] = self._blocks(int(block))[:, positions[chosen]]
        return corpora, rows

    def counts(self, num_rows: int) -> list[int]:
        """Count the rows of each corpus among the first `num_rows` rows."""
        block, rest = divmod(num_rows, BLOCK)
        begins = self._before(block)
        more = np.bincount(self._blocks(block)[0, :rest], minlength=len(begins)).tolist()
        return [before + after for before, after in zip(begins, more, strict=True)]

    def _before(self, block: int) -> list[int]:
        """Count the rows of each corpus before a block."""
        below = [0, *(_points_below(end, block) for end in self._ends)]
        return [after - before for before, after in itertools.pairwise(below)]

    def _make_block(self, block: int) -> np.ndarray:
        """Return each row's corpus and index in the corpus, for a block, (2, BLOCK) int64."""
        places = permute(np.arange(BLOCK), BLOCK, hash_key(self._key, block)) * _ONE
        corpora = np.searchsorted(self._ends, places + _van_der_corput(block), side="right")
        by_corpus = np.argsort(corpora, kind="stable")
        counts = np.bincount(corpora, minlength=len(self._ends))
        rank = np.empty(BLOCK, np.int64)
        rank[by_corpus] = np.arange(BLOCK) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.stack([corpora, rank + np.array(self._before(block))[corpora]])


def _van_der_corput(number: int) -> int:
    """Return a term of van der Corput's sequence in base 2, times 2^32 and rounded down."""
    return int(f"{number % _ONE:032b}"[::-1], 2)


def _points_below(end: int, blocks: int) -> int:
    """Count the points below `end` in the first `blocks` blocks; `end` is scaled by `_ONE`."""
    whole, part = divmod(end, _ONE)
    periods, rest = divmod(blocks, _ONE)  # a period has each rounded value once
    count = blocks * whole + periods * part
    first = 0
    for bit in reversed(range(32)):
        if rest >> bit & 1:
            # The terms `first` to `first` + 2^bit - 1 are `offset` + m * step for m < 2^bit.
            step, offset = _ONE >> bit, _van_der_corput(first)
            count += min(max(-(-(part - offset) // step), 0), 1 << bit)
            first += 1 << bit
    return count


class CorpusRows(NamedTuple):
    """A corpus that a phase reads, with its rows and their order."""

    name: str
    rows: StoreRows
    order: ShardOrder


class CorpusProgress(NamedTuple):
    """Amount of text that was read from a corpus before a step."""

    name: str
    """Directory, as in the configuration, or the empty string for the corpus of the run."""
    rows: int
    tokens: int
    """Number of tokens of text that were read, summed over the phases."""
    epochs: float
    """Number of passes over the text. An epoch of rows has `data.num_passes` passes."""


class PhaseRows:
    """Rows of a phase, read by index from one corpus (`mixing` is None) or several corpora."""

    def __init__(self, corpora: Sequence[CorpusRows], mixing: Mixing | None) -> None:
        self.corpora, self._mixing = tuple(corpora), mixing
        self._prepared = [0] * len(corpora)
        self.most_shards = sum(corpus.order.window for corpus in corpora)
        """Number of shards that are read at a time, in one window of each corpus."""

    def counts(self, num_rows: int) -> list[int]:
        """Count the rows of each corpus among the first `num_rows` of the phase."""
        return [num_rows] if self._mixing is None else self._mixing.counts(num_rows)

    def batch(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Build the rows `numbers`, (n,) int64, without `row_index`, and plan the next windows."""
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
            if after > self._prepared[corpus]:  # two threads may do this; plans are made once
                self._prepared[corpus] = after
                rows.prepare(order.shards_of(after))
        return rows.batch(order.places(numbers))

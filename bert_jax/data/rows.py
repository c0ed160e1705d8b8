"""Rows of a store: their order, the plans of its shards, and batches of rows of several shards.

An epoch reads all shards once, in windows of some shards: the shards are permuted over the epoch,
and the rows within each window. So a host holds the plans and reads the files of one window and of
the next, whatever the size of the corpus; a store of one shard, or a window of all shards, is
permuted as a whole.

How many rows a shard has is known only when its rows are planned. The order goes by quotas,
estimates that are known at once: a shard takes its quota of places of every epoch, and its place j
in epoch e is row (e * quota + j) mod n of its n rows. Every row then comes equally often, whatever
the estimate.
"""

import contextlib
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from bert_jax.data.kept import Kept
from bert_jax.data.pairings import PAIRINGS, DataConfig, ExamplePlan
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError
from bert_jax.hashing import hash_key, permute

_EPOCHS = 4
"""Epochs whose order of shards is kept."""


class Places(NamedTuple):
    """Rows by the number of their shard and their place in it."""

    shards: np.ndarray
    """(n,) int64."""
    visits: np.ndarray
    """(n,) int64: rows of the shard that were read before, over all epochs."""


class Window(NamedTuple):
    """Shards that are read together."""

    shards: np.ndarray
    """(w,) int64 numbers."""
    first_row: int
    """Number of the first row in its epoch."""
    begins: np.ndarray
    """(w + 1,) int64: shard i has the rows `begins[i]` to `begins[i + 1]` of the window."""


class ShardOrder:
    """The order of the rows of all epochs; a pure function of quotas, window and key.

    Args:
        quotas: Places of each shard in an epoch, at least 1.
        window: Shards read together; 0: all.
        shuffle: Words of the key of the order.
    """

    def __init__(self, quotas: Sequence[int], window: int, shuffle: Sequence[int]) -> None:
        self.quotas = np.array(quotas, np.int64)
        self.num_rows = int(self.quotas.sum())
        """Rows of an epoch."""
        self.window = min(window or len(self.quotas), len(self.quotas))
        """Shards of a window."""
        self.num_windows = -(-len(self.quotas) // self.window)
        """Windows of an epoch."""
        self._shuffle = tuple(shuffle)
        self._windows = Kept(self._make_windows, _EPOCHS)

    def places(self, numbers: np.ndarray) -> Places:
        """Return the places of rows, given by their (n,) int64 numbers over all epochs."""
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
        """Return the number of the window, over all epochs, that holds a row."""
        epoch, position = divmod(number, self.num_rows)
        first_rows = [window.first_row for window in self._windows(epoch)]
        at = int(np.searchsorted(first_rows, position, side="right")) - 1
        return epoch * self.num_windows + at

    def shards_of(self, window: int) -> list[int]:
        """Return the shards of a window, given by its number over all epochs."""
        epoch, number = divmod(window, self.num_windows)
        return self._windows(epoch)[number].shards.tolist()

    def _make_windows(self, epoch: int) -> list[Window]:
        count = len(self.quotas)
        # No window has this number, so no permutation of rows has this key.
        order = permute(np.arange(count), count, hash_key(*self._shuffle, epoch, count))
        windows, first_row = [], 0
        for begin in range(0, count, self.window):
            shards = np.sort(order[begin : begin + self.window])
            begins = np.concatenate([[0], np.cumsum(self.quotas[shards])])
            windows.append(Window(shards, first_row, begins))
            first_row += int(begins[-1])
        return windows


_PLAN = 0
"""Purpose of a random number; part of its key."""
_POSITIONS = 1 << 17
"""Positions (rows x L) whose indices, 8 bytes each, stay in a core's cache while they are built."""


class StoreRows:
    """Rows of one length of a store; safe to read from several threads.

    Shards are planned when their rows are first read, and `num_plans` plans are kept. A plan is a
    pure function of (store, config, length, seed, number of the shard).

    Raises:
        UserError: The corpus cannot serve the pairing.
    """

    def __init__(
        self, store: TokenStore, config: DataConfig, length: int, seed: int, num_plans: int
    ) -> None:
        self.store, self._config, self._length, self._seed = store, config, length, seed
        self._pairing = PAIRINGS[config.pairing]
        self._pairing.check(store)
        self._plans = Kept(self._make_plan, num_plans)

    def plan(self, shard: int) -> ExamplePlan:
        """Return the rows of a shard.

        Raises:
            UserError: The length is too short, the shard is damaged, or has no row.
        """
        return self._plans(shard)

    @cached_property
    def quotas(self) -> list[int]:
        """Estimated rows of each shard; rows of the first shard are counted."""
        counts = self.store.counts
        rows, tokens = len(self.plan(0)), counts[0].num_tokens
        others = [max(1, round(each.num_tokens * rows / tokens)) for each in counts[1:]]
        return [rows, *others]

    def batch(self, places: Places) -> dict[str, np.ndarray]:
        """Build rows, all of a batch but `row_index`: a shard's together, as they lie there."""
        shards, visits = places
        at_once = max(1, _POSITIONS // self._length)
        # Of narrow integers numpy sorts by radix.
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
        # `take` copies rows twice as fast as a store by index does.
        return {
            name: np.concatenate([part[name] for part in parts]).take(place, axis=0, mode="clip")
            for name in parts[0]
        }

    def prepare(self, shards: Iterable[int]) -> None:
        """Plan shards ahead, in a thread; an error is left to who reads the shard."""

        def work() -> None:
            with contextlib.suppress(Exception):
                for shard in shards:
                    self.plan(shard)

        threading.Thread(target=work, daemon=True, name="plan ahead").start()

    def _make_plan(self, shard: int) -> ExamplePlan:
        try:
            # The first shard keeps the key of the times when a store was one shard.
            seed = hash_key(self._seed, _PLAN, *([shard] if shard else []))
            return self._pairing.plan(self.store.shards[shard], self._config, self._length, seed)
        except UserError as error:
            if len(self.store.counts) == 1:
                raise
            raise UserError(f"shard {shard} of {len(self.store.counts)}: {error}") from error

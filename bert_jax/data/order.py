"""The order in which a phase reads the rows of a store of several shards.

An epoch reads all shards once, in windows of some shards: the shards are permuted over the epoch,
and the rows within each window. So a host holds the plans and reads the files of one window and of
the next, whatever the size of the corpus; a store of one shard, or a window of all shards, is
permuted as a whole.

How many rows a shard has is known only when its rows are planned. The order goes by quotas,
estimates that are known at once: a shard takes its quota of places of every epoch, and its place j
in epoch e is row (e * quota + j) mod n of its n rows. Every row then comes equally often, whatever
the estimate.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from bert_jax.data.kept import Kept
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
    """The order of the rows of all epochs; a pure function of quotas, window and key."""

    def __init__(self, quotas: Sequence[int], window: int, shuffle: Sequence[int]) -> None:
        """Permute nothing yet.

        Args:
            quotas: Places of each shard in an epoch, at least 1.
            window: Shards read together; 0: all.
            shuffle: Words of the key of the order.
        """
        self.quotas = np.array(quotas, np.int64)
        self.num_rows = int(self.quotas.sum())
        """Rows of an epoch."""
        self.window = min(window or len(self.quotas), len(self.quotas))
        """Shards of a window."""
        self._shuffle = tuple(shuffle)
        self._windows = Kept(self._make_windows, _EPOCHS)

    @cached_property
    def num_windows(self) -> int:
        """Windows of an epoch."""
        return -(-len(self.quotas) // self.window)

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

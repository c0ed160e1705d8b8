"""Rows of a store: the plans of its shards, and batches of rows of several shards."""

import contextlib
import threading
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from bert_jax.data.kept import Kept
from bert_jax.data.order import Places
from bert_jax.data.pairings import PAIRINGS, DataConfig, ExamplePlan
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError
from bert_jax.hashing import hash_key

_PLAN = 0
"""Purpose of a random number; part of its key."""
_POSITIONS = 1 << 17
"""Positions (rows x L) whose indices, 8 bytes each, stay in a core's cache while they are built."""


class StoreRows:
    """Rows of one length of a store; safe to read from several threads.

    Shards are planned when their rows are first read. A plan is a pure function of (store, config,
    length, seed, number of the shard).
    """

    def __init__(
        self, store: TokenStore, config: DataConfig, length: int, seed: int, num_plans: int
    ) -> None:
        """Plan nothing yet.

        Args:
            store: Text.
            config: Way to make rows.
            length: Tokens of a row.
            seed: Seed of the plans.
            num_plans: Plans to keep.

        Raises:
            UserError: The corpus cannot serve the pairing.
        """
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
        """Plan shards ahead, in a thread.

        An error is left to who reads the shard.
        """

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

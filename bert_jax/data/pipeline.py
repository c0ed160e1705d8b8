"""From a token store to batches: which rows make step n, and their delivery in time.

A batch is a dict of numpy arrays, B rows of length L::

  tokens       (B, L) the store's dtype
  type_ids     (B, L) uint8: sentence A 0, sentence B 1
  segment_ids  (B, L) uint8, of packed rows above 767 tokens uint16: 0 padding, 1.. packed segments;
                      a sentence pair is all 1
  pair_labels   (B,)   int32: 0 as in the text, 1 random or swapped; -1 no label
  row_index    (B,)   uint32: the row's number in the stream of examples, which never repeats and
                      keys its masking and dropout

Rows of translations hold sources of type 0, packed, no pair_labels, and the targets:

  target_tokens       (B, T) the store's dtype: [CLS] text of each target, the decoder's input
  target_segment_ids  (B, T) as segment_ids: 0 padding, else the number of the target's source

`ExampleStream.batch(step)` is a pure function of (store, config, phases, seed, step). Grain reads
ahead in threads; its state is one integer, the next step.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import grain
import numpy as np

from bert_jax.data.pairings import MAX_LENGTH, PAIRINGS, DataConfig, ExamplePlan
from bert_jax.data.phases import Phase
from bert_jax.data.shuffle import hash_key, permute
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError

_MAX_ROWS = 2**32  # of all phases
_ORDER_BLOCK = 1 << 14  # positions permuted at once: the cost is then per row, not call

# What a random number is for; part of its key.
_PLAN, _SHUFFLE, _EVALUATION = range(3)


def plan_examples(store: TokenStore, config: DataConfig, length: int, seed: int) -> ExamplePlan:
    """Plan the rows of one length; a pure function of its arguments.

    Raises:
      UserError: the length is too short, or the corpus cannot serve the pairing.
    """
    pairing = PAIRINGS[config.pairing]
    pairing.check(store)
    return pairing.plan(store.shards[0], config, length, hash_key(seed, _PLAN))


class ExampleStream:
    """Training batches by step number; safe to read from several threads.

    Each phase reads the plan of its text and length from the start, every row once in an order of
    its own, then again in another order. Plans are made when a phase is first read, and kept.
    """

    def __init__(
        self,
        store: TokenStore,
        config: DataConfig,
        phases: Sequence[Phase],
        seed: int = 0,
        stores: Mapping[int, TokenStore] | None = None,
    ) -> None:
        """Check the phases.

        Args:
          store: training text.
          config: how examples are made.
          phases: phases of the run.
          seed: seed of pairing and order.
          stores: text in the place of `store`, by the number of the phase.

        Raises:
          UserError: no phase; a length, batch size or step count that cannot be; more than 2^32
            rows in all; a store that the pairing cannot serve.
        """
        self.config, self.phases, self._seed = config, tuple(phases), seed
        self._stores = [(stores or {}).get(number, store) for number in range(len(phases))]
        if not self.phases:
            raise UserError("training.phases is empty; at least one phase is needed")
        lengths = (PAIRINGS[config.pairing].min_length, MAX_LENGTH)
        ranges = {"length": lengths, "batch_size": (1, _MAX_ROWS), "num_steps": (1, _MAX_ROWS)}
        for i, phase in enumerate(self.phases):
            for name, (least, most) in ranges.items():
                if not least <= (value := getattr(phase, name)) <= most:
                    raise UserError(
                        f"training.phases[{i}].{name} is {value}; with pairing '{config.pairing}' "
                        f"it must be {least} to {most:,}"
                    )
        # Python integers: the sum must not wrap.
        rows = (phase.num_rows for phase in self.phases)
        self._first_row = list(accumulate(rows, initial=0))
        self._first_step = list(accumulate((p.num_steps for p in self.phases), initial=0))
        if self._first_row[-1] > _MAX_ROWS:
            raise UserError(
                f"training.phases hold {self._first_row[-1]} rows in all; a row's number in the "
                f"stream has 32 bits, so {_MAX_ROWS} is the most"
            )
        for each in {id(each): each for each in self._stores}.values():
            PAIRINGS[config.pairing].check(each)  # now, not when the first batch is asked for
        self._lock = threading.Lock()
        self._plans: dict[tuple[int, int], ExamplePlan] = {}
        # Recent blocks of the visiting order; bounded, and two threads may both make one.
        self._order_block = lru_cache(maxsize=8)(self._make_order_block)

    @property
    def num_steps(self) -> int:
        """Steps of all phases."""
        return self._first_step[-1]

    def phase_of(self, step: int) -> int:
        """Return the index of the phase that holds a step; IndexError beyond the last."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is not in [0, {self.num_steps})")
        return int(np.searchsorted(self._first_step, step, side="right")) - 1

    def store(self, phase: int) -> TokenStore:
        """Return the text of a phase."""
        return self._stores[phase]

    def plan(self, phase: int) -> ExamplePlan:
        """Return the rows that a phase reads; made on first use."""
        store, length = self._stores[phase], self.phases[phase].length
        key = id(store), length
        with self._lock:
            if key not in self._plans:
                self._plans[key] = plan_examples(store, self.config, length, self._seed)
            return self._plans[key]

    def batch(
        self, step: int, process_index: int = 0, process_count: int = 1
    ) -> dict[str, np.ndarray]:
        """Return one process's rows of a step: a contiguous slice, without building the others.

        Raises:
          UserError: the batch does not divide among the processes, or the store is damaged.
          IndexError: the step is beyond the last phase.
        """
        number = self.phase_of(step)
        start, batch_size = self.phases[number].rows_of(step - self._first_step[number])
        rows = _share(batch_size, process_count)
        start += process_index * rows
        plan = self.plan(number)
        batch = plan.batch(
            self._stores[number].shards[0], self._rows(number, len(plan), start, start + rows)
        )
        first = self._first_row[number] + start
        batch["row_index"] = np.arange(first, first + rows, dtype=np.uint32)
        return batch

    def _rows(self, phase: int, num_rows: int, start: int, stop: int) -> np.ndarray:
        """Return the plan's rows [start, stop) of a phase in visiting order, epoch after epoch."""
        parts = []
        while start < stop:
            epoch, position = divmod(start, num_rows)
            block, offset = divmod(position, _ORDER_BLOCK)
            part = self._order_block(phase, num_rows, epoch, block)[offset : offset + stop - start]
            parts.append(part)
            start += part.size
        return np.concatenate(parts)

    def _make_order_block(self, phase: int, num_rows: int, epoch: int, block: int) -> np.ndarray:
        positions = np.arange(block * _ORDER_BLOCK, min((block + 1) * _ORDER_BLOCK, num_rows))
        return permute(positions, num_rows, hash_key(self._seed, _SHUFFLE, phase, epoch))


class TrainBatches:
    """Batches of one process from a step to the end, built ahead in threads by Grain.

    The state is `next_step`, one integer for any number of processes: to resume, start there.
    """

    def __init__(
        self,
        stream: ExampleStream,
        start_step: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Begin to read.

        Raises:
          UserError: a batch does not divide among the processes, or the step is beyond the end.
        """
        for phase in stream.phases:
            for _, rows in phase.stages:
                _share(rows, process_count)
        if not 0 <= start_step <= stream.num_steps:
            raise UserError(
                f"the first step is {start_step}; training has the steps 0 to {stream.num_steps}"
            )
        self.next_step = start_step
        dataset = grain.MapDataset.range(start_step, stream.num_steps).map(
            lambda step: stream.batch(step, process_index, process_count)
        )
        num_threads = stream.config.num_threads
        options = grain.ReadOptions(
            num_threads=num_threads,
            prefetch_buffer_size=stream.config.prefetch_batches if num_threads else 0,
        )
        self._batches = iter(dataset.to_iter_dataset(options)) if len(dataset) else iter(())

    def __iter__(self) -> "TrainBatches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._batches)
        self.next_step += 1
        return batch

    def close(self) -> None:
        """End the threads; without it they end when the iterator is collected."""
        if hasattr(self._batches, "close"):
            self._batches.close()
        self._batches = iter(())


class EvalBatches:
    """One pass over a held-out store, for as many iterations as wanted; the plan is made once.

    The last batch is filled up with rows of segment ids 0 and pair_label -1. All processes see the
    same number of batches.
    """

    def __init__(
        self,
        store: TokenStore,
        config: DataConfig,
        length: int,
        batch_size: int,
        *,
        max_rows: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
        seed: int = 0,
    ) -> None:
        """Plan the rows.

        Args:
          config: pairing, target_length and short_rate are used.
          batch_size: B over all processes.
          max_rows: most rows, a fixed random sample.
          process_index, process_count: slice of each batch to read, and number of slices.
          seed: not the training seed: runs are compared on the same rows.

        Raises:
          UserError: the batch does not divide among the processes, or the store cannot serve the
            pairing.
        """
        self._store, self._batch_size, self._process_index = store, batch_size, process_index
        self._share = _share(batch_size, process_count)
        self._key = hash_key(seed, _EVALUATION)
        self._pairing = PAIRINGS[config.pairing]
        self._plan = plan_examples(store, replace(config, num_passes=1), length, self._key)
        self.num_rows = len(self._plan) if max_rows is None else min(max_rows, len(self._plan))
        """Real rows over all batches and processes."""

    def __len__(self) -> int:
        return -(-self.num_rows // self._batch_size)

    @property
    def majority_rate(self) -> float | None:
        """Share of the more frequent label in the rows of all processes; None without labels."""
        return self._pairing.majority_rate(self._plan, self._rows(0, self.num_rows))

    def _rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows in a fixed order other than the store's: the first are a sample of all."""
        return permute(np.arange(start, stop), len(self._plan), self._key)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for number in range(len(self)):
            first = number * self._batch_size + self._process_index * self._share
            yield self._filled(self._rows(first, min(first + self._share, self.num_rows)), first)

    def _filled(self, rows: np.ndarray, first: int) -> dict[str, np.ndarray]:
        """Return the batch of some rows, filled up to this process's share."""
        pad = self._store.special_ids.pad
        filler = {"tokens": pad, "target_tokens": pad, "pair_labels": -1}
        batch = self._plan.batch(self._store.shards[0], np.resize(rows, self._share))
        for name, array in batch.items():
            array[rows.size :] = filler.get(name, 0)
        batch["row_index"] = np.arange(first, first + self._share, dtype=np.uint32)
        return batch


def _share(batch_size: int, process_count: int) -> int:
    """Rows of one process."""
    if batch_size % process_count:
        raise UserError(
            f"a batch of {batch_size} rows does not divide among {process_count} processes; make "
            f"the batch size a multiple of {process_count}"
        )
    return batch_size // process_count

"""Batches from a token store: the rows of each step, and threads that build batches in advance.

A batch is a dict of numpy arrays, with B rows of length L::

  tokens       (B, L) dtype of the store
  type_ids     (B, L) uint8: 0 for sentence A, 1 for sentence B
  segment_ids  (B, L) uint8, or uint16 for packed rows longer than 767 tokens: 0 for padding, 1, 2,
                      ... for packed segments, and 1 for all tokens of a sentence pair
  pair_labels  (B,)   int32: 0 if the pair is as in the text, 1 if random or swapped, -1 if no label
  row_index    (B,)   uint32: key of the row's masking and dropout, made from the index of the row
                      in the stream of examples (see `row_keys`)

For translation, these arrays hold packed sources of type 0. Instead of pair_labels, there are:

  target_tokens       (B, T) dtype of the store: [CLS] and text of each target, for the decoder
  target_segment_ids  (B, T) dtype of segment_ids: 0 for padding, else the segment id of the source

`ExampleStream.batch(step)` is a pure function of (store, config, phases, seed, step).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import grain
import numpy as np

from bert_jax.data.kept import Kept
from bert_jax.data.mixture import (
    CorpusProgress,
    CorpusRows,
    Mixing,
    Mixture,
    PhaseRows,
    Places,
    ShardOrder,
    StoreRows,
)
from bert_jax.data.pairings import MAX_LENGTH, PAIRINGS, DataConfig, ExamplePlan
from bert_jax.data.phases import Phase, Share, stages_from
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError
from bert_jax.hashing import hash_key, permute

_MOST = 2**32  # largest number of rows in a batch, and of steps in a phase

_BLOCK_POSITIONS = (1 << 20, 1 << 18, 1 << 23)
"""Size of a block of rows built at once, in positions (rows x L): lower limit, size per shard in
use, upper limit. In large blocks, rows that are neighbours in a shard are read together."""
_BLOCK_STEPS = 4096  # largest number of steps in a block
_BLOCKS = 4  # number of blocks that are cached

# Purposes of random numbers, which are part of their keys; `data.mixture` has 0.
_SHUFFLE, _EVALUATION, _MIXING, _HIGH = range(1, 5)


def row_keys(first: int, count: int) -> np.ndarray:
    """Return the `row_index` of consecutive rows of the stream, (count,) uint32.

    The keys of the first 2^32 rows are their indices. Each further 2^32 rows have the same keys in
    another order, so that repeated text gets other masks.
    """
    if first + count <= 1 << 32:
        return np.arange(first, first + count, dtype=np.uint32)
    numbers = np.arange(first, first + count, dtype=np.uint64)
    keys = numbers.astype(np.uint32)
    high = numbers >> np.uint64(32)
    for word in np.unique(high[high > 0]).tolist():
        keys[high == word] ^= np.uint32(hash_key(_HIGH, word) >> 32)
    return keys


class ExampleStream:
    """Training batches by step number. Several threads may read them.

    Each phase reads its corpus, or its mixture of corpora, from the start (see `data.mixture`).
    """

    def __init__(
        self,
        store: TokenStore,
        config: DataConfig,
        phases: Sequence[Phase],
        seed: int = 0,
        stores: Mapping[int, TokenStore | Mixture] | None = None,
    ) -> None:
        """Check the phases. `stores` maps indices of phases to the stores that replace `store`.

        Raise a UserError if there is no phase, a size is wrong, or the pairing cannot use a store.
        """
        self.config, self.phases, self._seed = config, tuple(phases), seed
        texts = [(stores or {}).get(number, store) for number in range(len(phases))]
        self._texts = [
            text if isinstance(text, Mixture) else Mixture(("",), (text,), (1.0,)) for text in texts
        ]
        if not self.phases:
            raise UserError("training.phases is empty; give at least one phase")
        lengths = (PAIRINGS[config.pairing].min_length, MAX_LENGTH)
        ranges = {"length": lengths, "batch_size": (1, _MOST), "num_steps": (1, _MOST)}
        for i, phase in enumerate(self.phases):
            for name, (least, most) in ranges.items():
                if not least <= (value := getattr(phase, name)) <= most:
                    raise UserError(
                        f"training.phases[{i}].{name} is {value}; with pairing '{config.pairing}' "
                        f"it must be {least} to {most:,}"
                    )
        # Use Python integers, which cannot overflow.
        self._first_row = list(accumulate((p.num_rows for p in self.phases), initial=0))
        self._first_step = list(accumulate((p.num_steps for p in self.phases), initial=0))
        self.num_steps = self._first_step[-1]
        # Check the stores now, before the first batch is requested.
        self._store_rows: dict[tuple[int, int], StoreRows] = {}
        for phase, text in zip(self.phases, self._texts, strict=True):
            for each in text.stores:
                shards, window = len(each.counts), config.window
                num_plans = min(shards, 2 * window + 1) if window else shards
                rows_of = StoreRows(each, config, phase.length, seed, num_plans)
                self._store_rows.setdefault((id(each), phase.length), rows_of)
        self._of_phase = Kept(self._open_phase, len(self.phases))
        self._row_block = Kept(self._make_row_block, _BLOCKS)

    def phase_of(self, step: int) -> int:
        """Return the index of the phase of a step. Raise an IndexError if there is no such step."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is not in [0, {self.num_steps})")
        return int(np.searchsorted(self._first_step, step, side="right")) - 1

    def plan(self, phase: int) -> ExamplePlan:
        """Return the plan of shard 0 of the first corpus that a phase reads."""
        return self.corpora(phase)[0].rows.plan(0)

    def corpora(self, phase: int) -> tuple[CorpusRows, ...]:
        """Return the corpora that a phase reads."""
        return self._of_phase(phase).corpora

    def rows_of_corpora(self, phase: int) -> list[int]:
        """Count the rows that a phase reads from each of its corpora."""
        return self._of_phase(phase).counts(self.phases[phase].num_rows)

    def first_row(self, step: int) -> int:
        """Return the index of a step's first row, counted over all phases."""
        number = self.phase_of(step)
        start, _ = self.phases[number].rows_of(step - self._first_step[number])
        return self._first_row[number] + start

    def progress(self, step: int) -> list[CorpusProgress]:
        """Count the text read from each corpus in the steps before `step`, in all phases."""
        seen: dict[str, CorpusProgress] = {}
        for number, phase in enumerate(self.phases):
            steps = min(step - self._first_step[number], phase.num_steps)
            if steps <= 0:
                break
            rows = phase.num_rows if steps == phase.num_steps else phase.rows_of(steps)[0]
            of_phase = self._of_phase(number)
            for corpus, count in zip(of_phase.corpora, of_phase.counts(rows), strict=True):
                old = seen.get(corpus.name, CorpusProgress(corpus.name, 0, 0, 0.0))
                epochs = count * self.config.num_passes / corpus.order.num_rows
                tokens = round(epochs * corpus.rows.store.num_tokens)
                seen[corpus.name] = CorpusProgress(
                    corpus.name, old.rows + count, old.tokens + tokens, old.epochs + epochs
                )
        return list(seen.values())

    def batch(
        self, step: int, process_index: int = 0, process_count: int = 1
    ) -> dict[str, np.ndarray]:
        """Build the slice of a step's rows that one process reads.

        Raise a UserError if `process_count` does not divide the batch, or the store is damaged.
        """
        number = self.phase_of(step)
        step -= self._first_step[number]
        share = Share(process_index, process_count)
        start, count = share.rows(self.phases[number], step)
        block, within = divmod(step, self._block_steps(number, share))
        ends, arrays = self._row_block((number, block, share))
        batch = {name: array[ends[within] :][:count] for name, array in arrays.items()}
        batch["row_index"] = row_keys(self._first_row[number] + start, count)
        return batch

    def wait_for_checks(self) -> None:
        """Wait for the checks of all files read so far; raise a UserError if a digest differs."""
        for text in self._texts:
            for store in text.stores:
                store.checks.wait()

    def _open_phase(self, number: int) -> PhaseRows:
        text, length, corpora = self._texts[number], self.phases[number].length, []
        for corpus, (name, store) in enumerate(zip(text.names, text.stores, strict=True)):
            rows = self._store_rows[id(store), length]
            words = [self._seed, _SHUFFLE, number]
            if corpus:  # the first corpus has the same order as without a mixture
                words = [hash_key(self._seed, _MIXING, number, corpus)]
            try:
                order = ShardOrder(rows.quotas, self.config.window, words)
            except UserError as error:
                raise UserError(f"{name}: {error}" if name else f"{error}") from error
            corpora.append(CorpusRows(name, rows, order))
        if len(corpora) == 1:
            return PhaseRows(corpora, None)
        return PhaseRows(corpora, Mixing(text.weights, hash_key(self._seed, _MIXING, number)))

    def _block_steps(self, number: int, share: Share) -> int:
        """Return the number of steps whose rows are built at once."""
        phase, (least, of_shard, most) = self.phases[number], _BLOCK_POSITIONS
        positions = min(max(least, of_shard * self._of_phase(number).most_shards), most)
        of_step = share.of(phase.batch_size) * phase.length
        return min(max(1, positions // of_step), _BLOCK_STEPS)

    def _make_row_block(
        self, key: tuple[int, int, Share]
    ) -> tuple[list[int], dict[str, np.ndarray]]:
        """Build the rows of several steps; return each step's first row, and the arrays."""
        number, block, share = key
        phase, steps = self.phases[number], self._block_steps(number, share)
        first = block * steps
        parts = []
        for step in range(first, min(first + steps, phase.num_steps)):
            # The rows of a finished warm-up step need not divide among the present processes.
            divides = phase.rows_of(step)[1] % share.process_count == 0
            parts.append(share.rows(phase, step) if divides else (0, 0))
        numbers = np.concatenate([np.arange(start, start + count) for start, count in parts])
        ends = list(accumulate((count for _, count in parts), initial=0))
        return ends, self._of_phase(number).batch(numbers)


class TrainBatches:
    """Batches of one process, from a start step to the end. Grain's threads build them in advance.

    The state is `next_step`, the same integer in all processes. To resume, start at this step.
    """

    def __init__(
        self,
        stream: ExampleStream,
        start_step: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Raise a UserError if processes cannot share a batch, or `start_step` is out of range."""
        share = Share(process_index, process_count)
        for _, rows in stages_from(stream.phases, start_step):
            share.of(rows)
        if not 0 <= start_step <= stream.num_steps:
            raise UserError(f"the first step is {start_step}; it must be 0 to {stream.num_steps}")
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
        """Stop the threads now. Otherwise, they stop when the iterator is garbage-collected."""
        if hasattr(self._batches, "close"):
            self._batches.close()
        self._batches = iter(())


class EvalBatches:
    """One pass over a held-out store. It is planned once and may be iterated many times.

    The last batch is filled up with padding rows, which have only segment ids 0 and the pair label
    -1. All processes get the same number of batches.
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
        """Plan rows of `length` tokens; a batch has `batch_size` rows in all processes together.

        Only pairing, target_length and short_rate of `config` are used. If there are more than
        `max_rows` rows, a fixed random sample is read. Each batch is cut into `process_count`
        slices; this process reads slice `process_index`, from 0. `seed` is not the run's seed, so
        all runs read the same rows. Raise a UserError if processes cannot share a batch equally, or
        `config.pairing` cannot use the store.
        """
        self._store, self._batch_size, self._process_index = store, batch_size, process_index
        self._share = Share(process_index, process_count).of(batch_size)
        self._key = hash_key(seed, _EVALUATION)
        shards, once = range(len(store.counts)), replace(config, num_passes=1)
        self._store_rows = StoreRows(store, once, length, self._key, len(shards))
        self._ends = np.cumsum([len(self._store_rows.plan(shard)) for shard in shards])
        rows = int(self._ends[-1])
        self.num_rows = rows if max_rows is None else min(max_rows, rows)
        """Number of real rows in all batches of all processes."""

    def __len__(self) -> int:
        return -(-self.num_rows // self._batch_size)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for number in range(len(self)):
            yield self._filled(number * self._batch_size + self._process_index * self._share)
        self._store.checks.wait()

    def _filled(self, first: int) -> dict[str, np.ndarray]:
        """Build rows from `first` on of a fixed random order, filled up with padding rows."""
        size, pad = self._share, self._store.special_ids.pad
        filler = {"tokens": pad, "target_tokens": pad, "pair_labels": -1}
        numbers = np.arange(first, min(first + size, self.num_rows))
        rows = permute(numbers, int(self._ends[-1]), self._key)
        shards = np.searchsorted(self._ends, rows, side="right")
        visits = rows - np.concatenate([[0], self._ends])[shards]
        batch = self._store_rows.batch(Places(np.resize(shards, size), np.resize(visits, size)))
        for name, array in batch.items():
            array[rows.size :] = filler.get(name, 0)
        batch["row_index"] = row_keys(first, size)
        return batch

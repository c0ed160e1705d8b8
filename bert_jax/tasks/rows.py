"""Rows of token ids with labels, and batches of rows padded to a few lengths (buckets).

A row is padded to the shortest bucket that holds it, and XLA compiles a step for each bucket. Rows
that do not fill a batch of their bucket move up to the next bucket, so every epoch has ceil(N / B)
batches; at most one is not full. Only integer arithmetic assigns rows, so all machines agree.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Float32, Int32, Int64, Integer

from bert_jax.errors import UserError
from bert_jax.hashing import hash_key, permute

NO_LABEL = -1
"""Marker of positions that have no label."""

Batch = dict[str, np.ndarray]
"""Rows padded to one length. If M trials are trained at once, all arrays have a leading axis (M).

tokens, type_ids, segment_ids: (..., B, L) int32, or (..., B, G, L) for groups of G rows;
    segment_ids are 1 for tokens and 0 for padding.
labels: as in `Rows`, with B in place of N; absent if the rows have no labels. Tags and arcs are
    arrays (..., B, L), padded with `NO_LABEL`.
text_ids: (..., B, G) int32, as in `Rows`; absent if the rows have none.
weights: (..., B) float32, `Rows.weights` or 1; 0 for copies of a row that pad the batch.
row_index: (..., B) uint32, 0 to B - 1, so that each row has its own dropout.
"""


@dataclass(frozen=True, eq=False)
class Rows:
    """N examples of `group` rows each; rows are not padded, so each has its own length n."""

    tokens: Sequence[Int32[np.ndarray, " _"]]
    """N * group arrays (n,): [CLS] ... [SEP]. The rows of an example are adjacent. Groups of fewer
    texts are padded with empty rows."""
    second_start: Int32[np.ndarray, " rows"]
    """Position in each row where the second text (type 1) begins; n if there is no second text."""
    labels: np.ndarray | Sequence[Int32[np.ndarray, " _"]] | None = None
    """Labels to predict; None if they are not known. The form depends on the kind of head.
    single_label: (N,) int32. multi_label: (N, K) float32 of 0 and 1. regression: (N,) float32,
    standardised. span: (N, 2) int32, positions of the first and the last token. tags: N arrays (n,)
    int32, with `NO_LABEL` at positions without a tag. arcs: N arrays (n,) int32 like tags; a label
    is (head's position) * (number of relations) + (relation's index). choice: (N,) int32, index of
    the right row in the group. embedding: (N,) int32 classes or float32 scores."""
    group: int = 1
    """Number of rows of an example, such as a query and its documents, or a text's choices."""
    text_ids: Int32[np.ndarray, " rows"] | None = None
    """Id of each row's text, -1 for an empty row. Equal texts have equal ids."""
    weights: Float32[np.ndarray, " N"] | None = None
    """Weight of each example in the loss, above 0; None means that every weight is 1."""

    def __len__(self) -> int:
        return len(self.tokens) // self.group

    @cached_property
    def row_lengths(self) -> Int64[np.ndarray, " rows"]:
        """Number of tokens in each row."""
        return np.fromiter((len(ids) for ids in self.tokens), np.int64, len(self.tokens))

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """Number of tokens in each example's longest row."""
        if self.group == 1:
            return self.row_lengths
        return self.row_lengths.reshape(-1, self.group).max(axis=1)

    @property
    def has_tags(self) -> bool:
        """Whether each row's labels are an array with a label for each token."""
        return self.labels is not None and not isinstance(self.labels, np.ndarray)


_MULTIPLE = 8
# Purposes of random numbers; `hash_key` takes them as inputs.
_ROWS, _ORDER, _DRAWN = 0x726F7773, 0x6F726465, 0x64726177


def choose_buckets(
    lengths: Integer[np.ndarray, " N"], max_buckets: int, *, limit: int | None = None
) -> tuple[int, ...]:
    """Choose at most `max_buckets` bucket lengths that minimise padding (dynamic programming).

    The lengths are ascending multiples of 8, and the longest row fits in the last. `limit`, the
    model's number of positions, caps the last length, which then need not be a multiple of 8. Raise
    a UserError if there are no rows.
    """
    if len(lengths) == 0:
        raise UserError("there are no rows to choose lengths for")
    rounded = -(-lengths // _MULTIPLE) * _MULTIPLE
    # A length between two of these would hold the same rows as the lower, with more padding.
    ends, counts = np.unique(rounded.clip(max=limit or rounded.max()), return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    num_ends = len(ends)
    # cost[j]: tokens, padding included, of the rows in ends[:j] if the last bucket is ends[j - 1].
    cost = np.full(num_ends + 1, np.inf)
    cost[0] = 0
    froms: list[np.ndarray] = []
    for _ in range(min(max_buckets, num_ends)):
        through = cost[:, None] + ends[None] * (below[None, 1:] - below[:, None])
        through[np.tri(num_ends + 1, num_ends, -1, dtype=bool)] = np.inf  # from j to j' > j only
        froms.append(through.argmin(axis=0))
        cost = np.concatenate([[np.inf], through.min(axis=0)])
    buckets = []
    at = num_ends
    for came_from in reversed(froms):
        buckets.append(int(ends[at - 1]))
        at = int(came_from[at - 1])
    return tuple(reversed(buckets))


class TrainBatches:
    """Training batches, epoch by epoch, for several trials at once.

    All trials have batches of the same lengths, so they run as one array program. The rows of a
    batch depend only on (rows, buckets, batch size, trial's seed, epoch). An epoch of N rows (with
    repeats) has `num_batches` = ceil(N / batch_size) batches; `batches_of` counts them by length.
    """

    def __init__(
        self,
        rows: Rows,
        buckets: Sequence[int],
        batch_size: int,
        pad_id: int,
        repeats: Float[np.ndarray, " N"] | None = None,
    ):
        """Plan batches. `buckets` ascend, and the longest row must fit in the last bucket.

        `repeats` is how often each row occurs in an epoch on average, at least 1; None means 1.
        """
        if len(rows) == 0:
            raise UserError("there are no rows to train on")
        self._padded = _Padded(rows, pad_id)
        self._oversampled = None if repeats is None else _Oversampled(rows, buckets, repeats)
        lengths = rows.lengths
        if self._oversampled is not None:
            lengths = lengths[self._oversampled.epoch(0)]
        self._buckets = _Buckets(lengths, buckets, min(batch_size, len(lengths)))
        self.num_batches = len(self._buckets.batch_lengths)
        lengths, counts = np.unique(self._buckets.batch_lengths, return_counts=True)
        self.batches_of = dict(zip(lengths.tolist(), counts.tolist(), strict=True))

    def epoch(self, epoch: int, seeds: Sequence[int], start: int = 0) -> Iterator[Batch]:
        """Yield an epoch's batches from batch `start` on: arrays (M, B, ...) for M trial seeds."""
        plans = np.stack([self._trial(epoch, seed) for seed in seeds])
        count = self.num_batches
        for batch in permute(np.arange(count), count, hash_key(_ORDER, epoch))[start:].tolist():
            length = int(self._buckets.batch_lengths[batch])
            yield self._padded.batch(plans[:, batch], length, self._buckets.num_real(batch))

    def _trial(self, epoch: int, seed: int) -> Int64[np.ndarray, "T B"]:
        key = hash_key(_ROWS, seed, epoch)

        def shuffle(pool: np.ndarray) -> np.ndarray:
            return pool[permute(np.arange(len(pool)), max(len(pool), 1), key)]

        filled = self._buckets.fill(shuffle)
        if self._oversampled is None:
            return filled
        return self._oversampled.epoch(hash_key(_DRAWN, seed, epoch))[filled]


def eval_batches(
    rows: Rows, buckets: Sequence[int], batch_size: int, pad_id: int
) -> Iterator[tuple[Int64[np.ndarray, " b"], Batch]]:
    """Yield batches that contain every example once, from the shortest length to the longest.

    Each item has the indices of a batch's examples, and the batch itself: arrays (B, ...) in the
    same order. The last batch is padded with rows of weight 0.
    """
    if len(rows) == 0:
        return
    padded = _Padded(rows, pad_id)
    plan = _Buckets(rows.lengths, buckets, batch_size)
    for batch, index in enumerate(plan.fill(lambda pool: pool)):
        num_real = plan.num_real(batch)
        yield index[:num_real], padded.batch(index, int(plan.batch_lengths[batch]), num_real)


class _Buckets:
    """Lengths (ascending) and rows of an epoch's batches; only the last may hold fewer rows."""

    def __init__(self, lengths: np.ndarray, buckets: Sequence[int], batch_size: int):
        ascending = np.array(buckets)
        if lengths.max() > ascending[-1]:
            raise ValueError(f"a row has {lengths.max()} tokens, but the buckets are {buckets}")
        self.batch_size = batch_size
        self.num_rows = len(lengths)
        bucket_of = np.searchsorted(ascending, lengths)
        # Rows never move beyond the longest row's bucket, even if `buckets` has longer lengths.
        self._own = [np.flatnonzero(bucket_of == b) for b in range(bucket_of.max() + 1)]
        full = np.cumsum([len(own) for own in self._own]) // batch_size
        full[-1] = -(-self.num_rows // batch_size)
        self.batch_lengths = np.repeat(ascending[: len(full)], np.diff(full, prepend=0))

    def num_real(self, batch: int) -> int:
        """Count the rows of a batch, without the copies that pad the batch."""
        return min(self.batch_size, self.num_rows - batch * self.batch_size)

    def fill(self, shuffle: Callable[[np.ndarray], np.ndarray]) -> Int64[np.ndarray, "T B"]:
        """Return the row indices of each batch. The last batch is padded with copies of one row.

        Rows left over from a bucket move up to the next, where `shuffle` orders them with its own.
        """
        batches: list[np.ndarray] = []
        rest = np.zeros(0, np.int64)
        for own in self._own:
            pool = shuffle(np.concatenate([rest, own]))
            num_full = len(pool) // self.batch_size * self.batch_size
            batches.append(pool[:num_full])
            rest = pool[num_full:]
        if len(rest):
            batches += [rest, np.repeat(rest[:1], self.batch_size - len(rest))]
        return np.concatenate(batches).reshape(-1, self.batch_size)


class _Oversampled:
    """Rows of an epoch, with rows of rare classes repeated.

    Rows with equal bucket and `repeats` form a kind. Each row occurs floor(`repeats`) times or once
    more; its kind occurs round(sum of `repeats`) times. Entry i has the same bucket in every epoch.
    """

    def __init__(self, rows: Rows, buckets: Sequence[int], repeats: Float[np.ndarray, " N"]):
        bucket_of = np.searchsorted(np.array(buckets), rows.lengths)
        kinds = np.unique(np.stack([bucket_of, repeats]), axis=1, return_inverse=True)[1]
        self._parts: list[tuple[np.ndarray, int]] = []
        """Draws of an epoch: (rows of a kind, number of rows to draw from them)."""
        for kind in range(kinds.max() + 1):
            own = np.flatnonzero(kinds == kind)
            whole, rest = divmod(round(repeats[own[0]] * len(own)), len(own))
            self._parts += [(own, len(own))] * whole + ([(own, rest)] if rest else [])

    def epoch(self, key: int) -> Int64[np.ndarray, " T"]:
        """Return the row indices of an epoch, in a fixed order of buckets."""
        parts = []
        for number, (own, count) in enumerate(self._parts):
            order = np.arange(count)
            if count < len(own):
                order = permute(order, len(own), hash_key(_DRAWN, key, number))
            parts.append(own[order])
        return np.concatenate(parts)


class _Padded:
    """Rows as flat arrays, from which padded batches are gathered."""

    def __init__(self, rows: Rows, pad_id: int):
        self._rows, self._pad_id = rows, pad_id
        self._lengths, labels = rows.row_lengths, rows.labels
        self._begins = np.cumsum(self._lengths) - self._lengths
        self._tokens = np.concatenate([np.zeros(0, np.int32), *rows.tokens])
        if labels is not None and not isinstance(labels, np.ndarray):
            labels = np.concatenate([np.zeros(0, np.int32), *labels])
        self._labels = labels

    def batch(self, index: Int64[np.ndarray, "... B"], length: int, num_real: int) -> Batch:
        """Return the examples `index`, padded; weights after a trial's first `num_real` are 0."""
        whole, at = self._rows, np.arange(length)
        group = np.arange(whole.group)
        each = index if whole.group == 1 else index[..., None] * whole.group + group
        inside = at < self._lengths[each][..., None]
        source = np.where(inside, self._begins[each][..., None] + at, 0)
        in_second = at >= whole.second_start[each][..., None]
        rows = np.arange(index.shape[-1])
        weights = np.broadcast_to((rows < num_real).astype(np.float32), index.shape)
        if whole.weights is not None:
            weights = weights * whole.weights[index]
        batch = {
            "tokens": np.where(inside, self._tokens[source], np.int32(self._pad_id)),
            "type_ids": (in_second & inside).astype(np.int32),
            "segment_ids": inside.astype(np.int32),
            "weights": weights,
            "row_index": np.broadcast_to(rows.astype(np.uint32), index.shape),
        }
        if self._labels is not None:
            batch["labels"] = (
                np.where(inside, self._labels[source], np.int32(NO_LABEL))
                if whole.has_tags
                else self._labels[index]
            )
        if whole.text_ids is not None:
            batch["text_ids"] = whole.text_ids[each].reshape(*index.shape, whole.group)
        return batch

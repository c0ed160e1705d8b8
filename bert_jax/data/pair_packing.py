"""Packed rows of source and target texts for translation (pairing `translation`).

A pair is a document of two sentences, source and target. A row has S positions for sources and T
for targets. A source becomes [CLS] text [SEP], or text [SEP] if [CLS] does not open rows (see
`SpecialIds.opens`). A target becomes [CLS] text, the input of the decoder; the end token is only a
label. Source and target of a pair have the same segment id: a target attends only to its source.

A pair that is too long for a row is left out. Cutting it would teach wrong labels: the target would
end in the middle of its text, or say more than its source.

Packing works on the histogram of pair sizes, as `packing` does on the histogram of piece lengths. A
row begins with the largest remaining pair. Pairs are then added until none fits, each time the pair
that minimises the larger of the two remaining rooms, so that both rooms fill evenly (a
heuristic for vector bin packing; Panigrahy et al. 2011). As many rows as possible get the same pair
sizes, so that the cost depends on the number of different sizes, not on the number of pairs.
"""

from dataclasses import dataclass

import numpy as np

from bert_jax.data.packing import deal, lay_out, pieces_of
from bert_jax.data.shard import Shard
from bert_jax.errors import UserError
from bert_jax.hashing import hash_key

TARGET_SPECIAL = 1  # [CLS] target
MIN_LENGTH = 2  # source [SEP]
MIN_TARGET_LENGTH = TARGET_SPECIAL + 1

_MANY_LEFT_OUT = 0.01  # share of left-out pairs above which `losses` warns


def pair_segment_dtype(length: int, target_length: int) -> np.dtype:
    """Return the smallest integer type for the segment ids of sources and targets."""
    return np.min_scalar_type(min(length // MIN_LENGTH, target_length // MIN_TARGET_LENGTH))


@dataclass(frozen=True)
class TranslationPlan:
    """Plan of packed pairs. It takes 8 bytes per pair (12 above 2^32 tokens) and 8 per row."""

    length: int
    """S, number of source positions in a row, including special tokens."""
    target_length: int
    """T, number of target positions in a row, including special tokens."""
    row_offsets: np.ndarray
    """(num_rows + 1,) int64: row r has the pairs `row_offsets[r]` to `row_offsets[r + 1]` - 1."""
    source_start: np.ndarray
    """(num_pairs,) uint32 or int64: position of the source in the shard. The target follows."""
    source_len: np.ndarray
    """(num_pairs,) uint16: tokens of the source, at least 1, without special tokens."""
    target_len: np.ndarray
    """(num_pairs,) uint16: tokens of the target, at least 1, without special tokens."""
    num_left_out: int
    """Number of pairs of the shard that are in no row because they are too long."""
    num_special: int
    """Number of special tokens of a source."""

    def __len__(self) -> int:
        return self.row_offsets.size - 1

    @property
    def real_shares(self) -> tuple[float, float]:
        """Shares of the source positions and of the target positions that are not padding."""
        pairs, rows = self.source_len.size, len(self)
        source = int(self.source_len.sum(dtype=np.int64)) + self.num_special * pairs
        target = int(self.target_len.sum(dtype=np.int64)) + TARGET_SPECIAL * pairs
        return source / (rows * self.length), target / (rows * self.target_length)

    def batch(self, shard: Shard, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Build the rows with indices `rows`, (B,) int64; `pipeline` describes the arrays."""
        pair, counts = pieces_of(self.row_offsets, rows)
        dtype = pair_segment_dtype(self.length, self.target_length)
        start, source_len = self.source_start[pair], self.source_len[pair]
        tokens, segment_ids = lay_out(shard, start, source_len, counts, self.length, dtype)
        target_tokens, target_segment_ids = lay_out(
            shard, start.astype(np.int64) + source_len, self.target_len[pair], counts,
            self.target_length, dtype, closed=False,
        )  # fmt: skip
        return {
            "tokens": tokens,
            "type_ids": np.zeros(tokens.shape, np.uint8),
            "segment_ids": segment_ids,
            "target_tokens": target_tokens,
            "target_segment_ids": target_segment_ids,
        }

    def losses(self, shard: Shard) -> tuple[str, str | None]:
        """Describe padding and left-out pairs. Also return a warning if many are left out."""
        pairs = self.source_len.size
        source, target = self.real_shares
        clause = (
            f"{source:.1%} of source places and {target:.1%} of target places real, "
            f"{pairs / len(self):.1f} pairs a row"
        )
        if not self.num_left_out:
            return clause, None
        share = self.num_left_out / shard.num_documents
        clause += f"; {self.num_left_out:,} pairs longer than a row left out"
        if share <= _MANY_LEFT_OUT:
            return clause, None
        return clause, (
            f"Warning: {share:.1%} of the pairs are longer than a row of {self.length} source and "
            f"{self.target_length} target tokens, and are in no row. Make rows longer "
            "(training.phases[0].length, data.target_length)"
        )


def check_pairs(shard: Shard) -> None:
    """Raise a UserError if the documents of a shard are not pairs."""
    name = shard.path or "in memory"
    if not shard.is_pairs:
        raise UserError(
            f"the corpus {name} is running text; pairing 'translation' needs a corpus of pairs, "
            "made by `bert-jax corpus --pairs SOURCE TARGET`. To use running text, change "
            "data.pairing"
        )
    documents = np.asarray(shard.document_offsets)
    if (documents != 2 * np.arange(documents.size)).any():
        raise UserError(
            f"the token store {name} is damaged: corpus.json says that it holds pairs, but not "
            "every document has two sentences. Build the corpus again."
        )


def some_pairs(shard: Shard, most: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return up to `most` pairs, spread over the shard: token ids (n,) of source and target."""
    check_pairs(shard)
    ends, count = shard.sentence_offsets, min(most, shard.num_documents)
    return [
        (shard.tokens[ends[n] : ends[n + 1]], shard.tokens[ends[n + 1] : ends[n + 2]])
        for n in (2 * (number * shard.num_documents // count) for number in range(count))
    ]


def plan_translations(
    shard: Shard, length: int, target_length: int, *, seed: int = 0, num_passes: int = 1
) -> TranslationPlan:
    """Plan rows of pairs. In each pass, every pair that fits in a row is in exactly one row.

    Passes differ in the pairs that share a row. Raise a UserError if a length is out of range, the
    shard does not hold pairs, or no pair fits a row.
    """
    special = np.array([1 + shard.special_ids.opens, TARGET_SPECIAL])
    lengths = zip(("length", "target_length"), (length, target_length), special + 1, strict=True)
    for name, value, least in lengths:
        if not least <= value <= 65535:
            raise UserError(f"{name} is {value}; for translation, it must be {least} to 65,535")
    check_pairs(shard)
    offsets = np.asarray(shard.sentence_offsets)
    sizes = np.diff(offsets).reshape(-1, 2) + special
    fitting = np.flatnonzero((sizes <= np.array([length, target_length])).all(axis=1))
    if not fitting.size:
        shortest = sizes.min(axis=0)
        raise UserError(
            f"no pair of the corpus {shard.path or 'in memory'} fits a row of {length} source and "
            f"{target_length} target tokens: the shortest source takes {shortest[0]}, the shortest "
            f"target {shortest[1]}. Make training.phases[0].length and data.target_length larger"
        )
    cells, kinds, histogram = np.unique(
        sizes[fitting] @ np.array([target_length + 1, 1]), return_inverse=True, return_counts=True
    )
    patterns = pack_pairs(*np.divmod(cells, target_length + 1), histogram, length, target_length)
    dealt = [
        deal(kinds, histogram, patterns, hash_key(seed, number)) for number in range(num_passes)
    ]
    pairs = fitting[np.concatenate([order for order, _ in dealt])]
    row_sizes = np.concatenate([row_sizes for _, row_sizes in dealt])
    position = np.uint32 if shard.tokens.size < 2**32 else np.int64
    return TranslationPlan(
        length,
        target_length,
        row_offsets=np.concatenate([[0], np.cumsum(row_sizes)]),
        source_start=offsets[2 * pairs].astype(position),
        source_len=(sizes[pairs, 0] - special[0]).astype(np.uint16),
        target_len=(sizes[pairs, 1] - TARGET_SPECIAL).astype(np.uint16),
        num_left_out=shard.num_documents - fitting.size,
        num_special=int(special[0]),
    )


def pack_pairs(
    source: np.ndarray, target: np.ndarray, histogram: np.ndarray, length: int, target_length: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Pack pairs into rows of `length` source positions and `target_length` target positions.

    All arrays are (k,). The `histogram[i]` >= 1 pairs of kind i each take `source[i]` and
    `target[i]` positions. Return items (number of rows, ascending kinds of the pairs in each).
    """
    # Largest pairs first. The size of a pair is the larger of its shares of source and target.
    kinds = np.argsort(-np.maximum(source * target_length, target * length), kind="stable")
    source, target, left = source[kinds], target[kinds], histogram[kinds]
    patterns = []
    while left.size:
        taken = np.zeros(left.size, np.int64)
        pick, room, target_room = 0, length, target_length
        while True:
            taken[pick] += 1
            room, target_room = room - source[pick], target_room - target[pick]
            fitting = np.flatnonzero((source <= room) & (target <= target_room) & (taken < left))
            if not fitting.size:
                break
            rest = np.maximum(room - source[fitting], target_room - target[fitting])
            pick = fitting[rest.argmin()]
        used = np.flatnonzero(taken)
        rows = int((left[used] // taken[used]).min())
        left -= rows * taken
        pattern = np.repeat(kinds[used], taken[used])
        patterns.append((rows, tuple(np.sort(pattern).tolist())))
        if (left[used] == 0).any():
            some = left > 0
            kinds, source, target, left = kinds[some], source[some], target[some], left[some]
    return patterns

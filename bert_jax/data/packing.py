"""Packed rows of consecutive text for masked language modelling without pairs (pairing `none`).

Each document is cut into pieces of at most L - 2 tokens, and each piece becomes [CLS] piece [SEP].
Shorter pieces (ends of long documents, and short documents) are packed, several to a row. Each
piece is a segment, and tokens attend only within their segment. RoBERTa's FULL-SENTENCES (Liu et
al. 2019, section 4.2) instead fill a row with the next document, and attend across documents.

Packing works on the histogram of piece lengths (Krell et al. 2021, "Efficient sequence packing
without cross-contamination"), so its cost depends on L, not on the corpus. The longest pieces are
placed first, each into the row with the least sufficient room (best-fit decreasing; the paper calls
it longest-pack-first). A hash of (seed, pass) decides which pieces of equal length share a row.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from bert_jax.data.shard import Shard
from bert_jax.errors import UserError
from bert_jax.hashing import below, hash_key, hash_u64

NUM_SPECIAL = 2  # [CLS] piece [SEP]
MIN_LENGTH = NUM_SPECIAL + 1

# Purposes of random numbers, which are part of their keys.
_OFFSET, _ORDER = range(2)


def segment_dtype(length: int) -> np.dtype:
    """Return the smallest integer type for the segment ids of packed rows."""
    return np.min_scalar_type(length // MIN_LENGTH)


@dataclass(frozen=True)
class PackedPlan:
    """Plan of packed rows. It takes 6 bytes per piece (10 above 2^32 tokens) and 8 per row."""

    length: int
    """L, including special tokens."""
    row_offsets: np.ndarray
    """(num_rows + 1,) int64: row r has the pieces `row_offsets[r]` to `row_offsets[r + 1]` - 1."""
    piece_start: np.ndarray
    """(num_pieces,) uint32 or int64: position of the first token of each piece in the shard."""
    piece_len: np.ndarray
    """(num_pieces,) uint16: number of tokens, at least 1, without special tokens."""

    def __len__(self) -> int:
        return self.row_offsets.size - 1

    def batch(self, shard: Shard, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Build the rows with indices `rows`, (B,) int64; `pipeline` describes the arrays."""
        piece, counts = pieces_of(self.row_offsets, rows)
        tokens, segment_ids = lay_out(
            shard, self.piece_start[piece], self.piece_len[piece], counts, self.length,
            segment_dtype(self.length),
        )  # fmt: skip
        return {
            "tokens": tokens,
            "type_ids": np.zeros(tokens.shape, np.uint8),
            "segment_ids": segment_ids,
            "pair_labels": np.full(rows.size, -1, np.int32),
        }

    def losses(self, shard: Shard) -> tuple[str, str | None]:
        """Return an empty description and no warning, since every token is in a row."""
        return "", None


def pieces_of(row_offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices (n,) of the pieces, row by row, and the number of pieces per row (B,)."""
    first = row_offsets[rows]
    counts = row_offsets[rows + 1] - first
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(first - before, counts), counts


def lay_out(
    shard: Shard,
    starts: np.ndarray,
    lens: np.ndarray,
    counts: np.ndarray,
    length: int,
    dtype: np.dtype,
    *,
    closed: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Build packed rows. A piece becomes [CLS] piece [SEP] or, if not `closed`, [CLS] piece.

    If the tokenizer has no [CLS] to open rows, a closed piece becomes piece [SEP]. Return tokens
    (B, L) with the shard's dtype, and segment ids (B, L): 1, 2, ... for pieces, 0 elsewhere.

    Args:
        starts, lens: (n,) position of each piece's first token in the shard, and number of tokens.
        counts: (B,) number of pieces in each row, at least 1. Their sum is n.
        dtype: Type of the segment ids, which must hold the largest number of pieces in a row.
    """
    last_piece = np.cumsum(counts)
    first_piece = last_piece - counts
    opened = shard.special_ids.opens or not closed
    sizes = lens.astype(np.int64) + opened + closed
    used = np.add.reduceat(sizes, first_piece)
    # The span of the last piece includes the padding at the end of the row.
    spans = sizes.copy()
    spans[last_piece - 1] += length - used
    tokens, real = shard.take_spans(starts.astype(np.int64) - opened, spans, used[:, None], length)
    flat = tokens.reshape(-1)
    begins = np.cumsum(spans) - spans
    if opened:
        flat[begins] = shard.special_ids.cls
    if closed:
        flat[begins + sizes - 1] = shard.special_ids.sep
    numbers = np.arange(1, starts.size + 1) - np.repeat(first_piece, counts)
    segment_ids = np.repeat(numbers.astype(dtype), spans).reshape(tokens.shape)
    segment_ids *= real
    return tokens, segment_ids


def plan_packing(shard: Shard, length: int, *, seed: int = 0, num_passes: int = 1) -> PackedPlan:
    """Plan rows of consecutive text. In each pass, every token is in exactly one piece.

    In a pass after the first, a document longer than a row is first cut at a random offset, so that
    rows differ. Raise a UserError if the length is not from 3 to 65,535, or the corpus is empty.
    """
    if not MIN_LENGTH <= length <= 65535:
        raise UserError(
            f"length is {length}; a row needs 3 to 65,535 tokens: two special tokens and at least "
            "one token of text"
        )
    if not shard.num_tokens:
        raise UserError(f"the corpus {shard.path or 'in memory'} has no tokens")
    starts, lens, counts = [], [], []
    for number in range(num_passes):
        piece_start, piece_len = _pieces(shard, length - NUM_SPECIAL, seed, number)
        order, row_sizes = _pack(piece_len, length, hash_key(seed, number, _ORDER))
        starts.append(piece_start[order])
        lens.append(piece_len[order])
        counts.append(row_sizes)
        del piece_start, piece_len, order
    row_offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return PackedPlan(length, row_offsets, np.concatenate(starts), np.concatenate(lens))


def _pieces(shard: Shard, room: int, seed: int, pass_number: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into pieces of up to `room` tokens; return their positions and lengths."""
    first_token = np.asarray(shard.sentence_offsets)[np.asarray(shard.document_offsets)]
    document_len = np.diff(first_token)
    head = np.zeros(document_len.size, np.int64)  # tokens before the first full piece
    if pass_number:
        long = np.flatnonzero(document_len > room)
        head[long] = below(hash_u64(hash_key(seed, pass_number, _OFFSET), long), room)
    num_pieces = -(-(document_len - head) // room) + (head > 0)
    document = np.repeat(np.arange(document_len.size), num_pieces)
    number = np.arange(document.size) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    # With a head, piece 0 would begin `room - head` tokens before the document, so cut it there.
    begin = number * room - np.where(head > 0, room - head, 0)[document]
    end = np.minimum(begin + room, document_len[document])
    begin = np.maximum(begin, 0)
    position = np.uint32 if shard.tokens.size < 2**32 else np.int64
    return (first_token[:-1][document] + begin).astype(position), (end - begin).astype(np.uint16)


def _pack(piece_len: np.ndarray, length: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces in the order of the rows, and the number of pieces in each row."""
    histogram = np.bincount(piece_len, minlength=length + 1)
    return deal(piece_len, histogram, pack_histogram(histogram, length), key)


def deal(
    kinds: np.ndarray, histogram: np.ndarray, patterns: list[tuple[int, tuple[int, ...]]], key: int
) -> tuple[np.ndarray, np.ndarray]:
    """Assign pieces to rows. `key` decides which pieces of a kind go to which rows.

    `kinds` (n,) has the kind of each piece, such as its length; `histogram` counts each kind.
    `patterns` are items (number of rows, kinds of the pieces in each), with equal kinds adjacent.
    Return the indices of the pieces, (n,) row by row, and how many each row has, (num_rows,).
    """
    # Sort by kind and, within a kind, by hash. Pieces of a kind are assigned in this order.
    width = np.uint64(max(16, (histogram.size - 1).bit_length()))
    bits = hash_u64(key, np.arange(kinds.size)) >> width
    bits |= kinds.astype(np.uint64) << (np.uint64(64) - width)
    # A stable sort, since numpy's default sort may order ties differently on another CPU.
    by_kind = np.argsort(bits, kind="stable")
    del bits
    dealt = np.concatenate([[0], np.cumsum(histogram)])  # next piece of each kind
    order = np.empty(kinds.size, np.int64)
    row_sizes = []
    filled = 0
    for repeat, pattern in patterns:
        table = order[filled : filled + repeat * len(pattern)].reshape(repeat, len(pattern))
        column = 0
        for kind, equal in itertools.groupby(pattern):
            columns, next_piece = len(list(equal)), dealt[kind]
            dealt[kind] += columns * repeat
            pieces = by_kind[next_piece : dealt[kind]].reshape(columns, repeat)
            table[:, column : column + columns] = pieces.T
            column += columns
        filled += table.size
        row_sizes.append(np.full(repeat, len(pattern)))
    return order, np.concatenate(row_sizes)


def pack_histogram(histogram: np.ndarray, length: int) -> list[tuple[int, tuple[int, ...]]]:
    """Pack pieces into rows of `length` by best-fit decreasing.

    `histogram[k]` is the number of pieces of length k. Such a piece takes k + 2 positions. Return
    items (number of rows, lengths of the pieces in each of these rows, longest first).
    """
    # Rows that are not full, by their room (number of free positions), as items (number of rows,
    # their pieces). The result is in the order in which each room was first considered.
    open_rows: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    done: list[tuple[int, tuple[int, ...]]] = []
    has_rows = looked_at = 0  # bit r stands for the room r

    def put(rows: int, pieces: tuple[int, ...], room: int) -> None:
        nonlocal has_rows, looked_at
        if room <= NUM_SPECIAL:
            done.append((rows, pieces))
            return
        open_rows.setdefault(room, []).append((rows, pieces))
        has_rows |= 1 << room
        looked_at |= 1 << room

    def least_room(size: int) -> int:
        """Return the smallest room of at least `size` that a row has; `length` + 1 if none has."""
        nonlocal looked_at
        fitting = has_rows >> size << size
        room = _lowest_bit(fitting) if fitting else length + 1
        until_room = (2 << min(room, length)) - (1 << size)
        new, looked_at = until_room & ~looked_at, looked_at | until_room
        while new:
            open_rows[_lowest_bit(new)] = []
            new &= new - 1
        return room

    for piece_length in range(len(histogram) - 1, 0, -1):
        size = piece_length + NUM_SPECIAL
        left = int(histogram[piece_length])
        while left:
            room = least_room(size)
            if room > length:  # fill new rows, each with as many of these pieces as possible
                per_row = length // size
                repeat, last = divmod(left, per_row)
                for rows, each in ((repeat, per_row), (1, last)):
                    if rows and each:
                        put(rows, (piece_length,) * each, length - each * size)
                break
            rows, pieces = open_rows[room].pop()
            # Put as many pieces of this length into these rows as possible, in one step.
            each = min(room // size, max(left // rows, 1))
            used = min(rows, left // each)
            if used < rows:
                open_rows[room].append((rows - used, pieces))
            elif not open_rows[room]:
                has_rows ^= 1 << room
            left -= used * each
            put(used, pieces + (piece_length,) * each, room - each * size)
    return done + [entry for entries in open_rows.values() for entry in entries]


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1

"""Sentence pairs: a plan of the token ranges of each row, computed only from offsets.

`nsp` is the next-sentence task of Devlin et al. 2018 (section 3.1 and appendix A.2, with the rules
of the published code). A chunk has consecutive sentences of a document, up to a target length. It
is divided at a random sentence boundary into A and B. In half of the chunks, and in all chunks of
one sentence, B is replaced by text of another document that begins at a random sentence; the
replaced sentences begin the next chunk. A pair longer than a row loses tokens of the longer part,
each at a random end. Whether the target is short is drawn per chunk (in BERT's code, per document).

`sop` is the sentence-order task of Lan et al. 2019 (ALBERT, section 3.1). Chunks are made as for
`nsp`, but B always follows A, and the two are swapped in half of the chunks. A chunk of one
sentence is cut at a random token. A chunk of a single token has no order and is left out.

For fast array operations, every document is a lane, and in each turn many lanes make one row each.
Documents longer than `_BLOCK_ROWS` rows are cut into several lanes; a lane ends like a document.
Every random number is a hash of (seed, pass, first sentence of the chunk).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bert_jax.data.shard import Shard
from bert_jax.errors import UserError
from bert_jax.hashing import below, hash_key, hash_u64

NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]
LABELS = {
    "nsp": {0: "B is next", 1: "B is random"},
    "sop": {0: "A and B in order", 1: "A and B swapped"},
}
"""Meaning of the pair labels, for each pairing."""
MIN_LENGTH = NUM_SPECIAL + 2
# The cuts of long documents depend on the first constant, the order of the rows on the second.
_BLOCK_ROWS = 256
_POOL = 1 << 15  # number of lanes that advance together, to limit memory

_BELOW_2_64 = 2**64 - 2**11  # the largest float below 2^64: a rate of 1 must not wrap

_HIGH_UNHELD, _HIGH_RANDOM, _MANY_ALONE = 0.25, 0.75, 0.1
"""Shares above which `losses` warns of tokens in no row, random pairs, or one-sentence documents.
Books in rows of 128 have the shares 0.07, 0.52 and 0."""
_LONGEST = 128  # tokens; twice the limit of `bert-jax corpus` (`corpus.encode.LONGEST_SENTENCE`)

# Purposes of random numbers, which are part of their keys.
_NUM_PURPOSES = 8
_SHORT, _TARGET, _SPLIT, _COIN, _DOCUMENT, _SENTENCE, _FRONT_A, _FRONT_B = range(_NUM_PURPOSES)


@dataclass(frozen=True)
class PairPlan:
    """Plan of sentence pairs, by column. It takes 13 bytes per row (21 above 2^32 tokens)."""

    length: int
    """L, including special tokens."""
    a_start: np.ndarray
    """(num_rows,) uint32 or int64: position of the first token of A in the shard."""
    a_len: np.ndarray
    """(num_rows,) uint16: number of tokens of A, at least 1."""
    b_start: np.ndarray
    """(num_rows,) uint32 or int64: position of the first token of B in the shard."""
    b_len: np.ndarray
    """(num_rows,) uint16: number of tokens of B."""
    label: np.ndarray
    """(num_rows,) uint8. nsp: 0 next, 1 random. sop: 0 in order, 1 swapped."""
    pairing: Literal["nsp", "sop"] = "nsp"

    def __len__(self) -> int:
        return self.label.size

    def unheld_rate(self, num_tokens: int) -> float:
        """Compute the share of the shard's tokens that are in no row of any pass."""
        starts = np.concatenate([self.a_start, self.b_start]).astype(np.uint64)
        spans = starts << np.uint64(16) | np.concatenate([self.a_len, self.b_len])
        spans.sort()  # by start; an argsort of two arrays takes 10 times as long
        starts = (spans >> np.uint64(16)).astype(np.int64)
        ends = np.maximum.accumulate(starts + (spans & np.uint64(0xFFFF)).astype(np.int64))
        new = ends - np.maximum(starts, np.concatenate([[0], ends[:-1]]))
        return 1 - int(np.maximum(new, 0).sum()) / num_tokens

    def batch(self, shard: Shard, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Build the rows [CLS] A [SEP] B [SEP] with indices `rows`, (B,) int64 (see `pipeline`)."""
        length = self.length
        a_end = self.a_len[rows].astype(np.int64)[:, None] + 2  # where B begins
        row_end = a_end + self.b_len[rows][:, None] + 1
        starts = np.stack([self.a_start[rows].astype(np.int64) - 1, self.b_start[rows]], axis=1)
        spans = np.concatenate([a_end, length - a_end], axis=1)
        tokens, real = shard.take_spans(starts.ravel(), spans.ravel(), row_end, length)
        tokens[:, 0] = shard.special_ids.cls
        seps = np.concatenate([a_end, row_end], axis=1) - 1
        np.put_along_axis(tokens, seps, shard.special_ids.sep, axis=1)
        of_b = np.arange(length, dtype=np.int32) >= a_end.astype(np.int32)
        return {
            "tokens": tokens,
            "type_ids": (real & of_b).view(np.uint8),
            "segment_ids": real.view(np.uint8),
            "pair_labels": self.label[rows].astype(np.int32),
        }

    def losses(self, shard: Shard) -> tuple[str, str | None]:
        """Describe the shares of tokens in no row and of random pairs; warn if a share is high."""
        unheld, random = self.unheld_rate(shard.num_tokens), float(self.label.mean())
        clause = f"{unheld:.1%} of the tokens in no row"
        trouble, cures = [], ["data.pairing='none' uses every token"]
        if unheld > _HIGH_UNHELD:
            sentences = np.diff(shard.sentence_offsets)
            half = (self.length - NUM_SPECIAL) // 2
            long = sentences[sentences > half].sum() / shard.num_tokens
            lines = ": each line is a sentence" if shard.meta.get("splitter") == "lines" else ""
            trouble.append(
                f"{unheld:.0%} of the corpus's tokens are in no row ({long:.0%} lie in "
                f"sentences longer than half a row{lines}; what does not fit is cut off)"
            )
            cures.append("longer rows hold more")
            if sentences.max() > _LONGEST:
                cures.append("`bert-jax corpus` cuts long sentences, which older versions did not")
        if self.pairing == "nsp":
            clause += f", {random:.1%} random pairs"
            if random > _HIGH_RANDOM:
                alone = np.mean(np.diff(shard.document_offsets) == 1)
                trouble.append(
                    f"{random:.0%} of the pairs are random (a chunk of one sentence always takes a "
                    f"random partner; {alone:.0%} of the documents are one sentence)"
                )
                if alone > _MANY_ALONE:
                    cures.append("longer documents give more pairs in order")
        if not trouble:
            return clause, None
        return clause, (
            f"Warning: rows of {self.length} tokens under pairing '{self.pairing}': "
            f"{' and '.join(trouble)}. What helps: {'; '.join(cures)}"
        )


def check_documents(path: Path | None, num_documents: int) -> None:
    """Raise a UserError if there is no second document, which pairing `nsp` needs."""
    if num_documents < 2:
        advice = "Separate documents in the text by blank lines, add more files"
        number, shards = (path.name, path.parent) if path else ("", Path())
        # A bucket's shards come one by one, so other shards may not be here yet.
        if shards.name == "shards" and (number != "00000" or len([*shards.glob("*")]) > 1):
            advice = "Build the corpus again with a larger --shard-mb or --heldout-rate"
        raise UserError(
            f"the corpus {path or 'in memory'} has {num_documents} document(s); pairing 'nsp' "
            f"takes half of its second sentences from another document. {advice}, or set "
            "data.pairing to 'sop' or 'none'"
        )


def plan_pairs(
    shard: Shard,
    length: int,
    *,
    pairing: Literal["nsp", "sop"] = "nsp",
    short_rate: float = 0.1,
    seed: int = 0,
    num_passes: int = 1,
) -> PairPlan:
    """Plan sentence pairs of at most `length` tokens over a complete shard.

    The target length of a chunk is L - 3 or, for a share `short_rate` of the chunks, random from 2
    to L - 3. Each pass contains the full shard, with other random numbers. Raise a UserError if the
    length is not from 5 to 65,535, or no pair can be made from the corpus.
    """
    if not MIN_LENGTH <= length <= 65535:
        raise UserError(
            f"length is {length}; a sentence pair needs 5 to 65,535 tokens: three special tokens "
            "and at least one token of each sentence"
        )
    if pairing == "nsp":
        check_documents(shard.path, shard.num_documents)
    parts = [
        part
        for number in range(num_passes)
        for part in _plan_pass(shard, length, pairing, short_rate, (seed, number))
    ]
    if not any(part[0].size for part in parts):
        raise UserError(
            f"pairing '{pairing}' makes no rows from the corpus {shard.path or 'in memory'}, which "
            f"has {shard.num_tokens} token(s) in {shard.num_documents} document(s). Add more text"
        )
    # Join column by column, so that memory holds only one column twice.
    columns = (np.concatenate([part.pop(0) for part in parts]) for _ in range(5))
    a_start, a_len, b_start, b_len, label = columns
    return PairPlan(length, a_start, a_len, b_start, b_len, label, pairing)


def truncate(
    a_len: np.ndarray, b_len: np.ndarray, room: int, a_key: int, b_key: int, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut pairs to `room` tokens with the same result as BERT's loop over tokens, in closed form.

    BERT removes tokens one by one from the longer of A and B, or from B if they are equally long.
    The removals first make the lengths equal and then alternate, so the final lengths are known. A
    fair coin decides between front and back. The number of tokens removed at the front is therefore
    a count of set random bits, which are hashes of the keys and of the counters `rows` (k,). Return
    this number for A, A's new length, and the same two for B.
    """
    excess = np.maximum(a_len + b_len - room, 0)
    level = np.minimum(np.abs(a_len - b_len), excess)
    a_cut = np.where(a_len > b_len, level, 0) + (excess - level) // 2
    b_cut = excess - a_cut
    a_front = _fair_coins(a_key, rows, a_cut)
    b_front = _fair_coins(b_key, rows, b_cut)
    return a_front, a_len - a_cut, b_front, b_len - b_cut


def _fair_coins(key: int, rows: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Count the heads (k,) int64 in `count` (k,) coin tosses, which are bits of hashes."""
    heads = np.zeros(count.shape, np.int64)
    left = count.copy()
    todo = np.flatnonzero(left > 0)
    word, num_words = 0, 1
    while todo.size:
        words = np.arange(word, word + num_words, dtype=np.uint64)
        bits = hash_u64(key, hash_u64(key, rows[todo])[:, None] + words)
        used = np.clip(left[todo][:, None] - 64 * np.arange(num_words), 0, 64)
        bits >>= (64 - np.maximum(used, 1)).astype(np.uint64)
        heads[todo] += (np.bitwise_count(bits) * (used > 0)).sum(axis=1, dtype=np.int64)
        left[todo] -= 64 * num_words
        todo = todo[left[todo] > 0]
        word += num_words
        # Take more words per turn, so that a sentence of a million tokens needs few turns.
        num_words = max(1, min(num_words * 2, (1 << 18) // max(todo.size, 1)))
    return heads


def _lanes(shard: Shard, block_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each lane, the index of the first sentence and the index after the last."""
    sentences, documents = np.asarray(shard.sentence_offsets), np.asarray(shard.document_offsets)
    first_token = sentences[documents]
    extra = np.maximum(np.diff(first_token) // block_tokens, 1) - 1
    document = np.repeat(np.arange(extra.size), extra)
    block = np.arange(document.size) - np.repeat(np.cumsum(extra) - extra, extra) + 1
    cuts = np.searchsorted(sentences, first_token[document] + block * block_tokens)
    # A sentence longer than a block leads to equal cuts, or to cuts at the end of the document.
    edges = np.unique(np.concatenate([documents, cuts])) if cuts.size else documents
    return edges[:-1], edges[1:]


def _plan_pass(
    shard: Shard, length: int, pairing: str, short_rate: float, seed: tuple[int, int]
) -> Iterator[list[np.ndarray]]:
    """Yield each turn's columns of `PairPlan`. In a turn, up to `_POOL` lanes make one row each."""
    sentences, documents = np.asarray(shard.sentence_offsets), np.asarray(shard.document_offsets)
    keys = [hash_key(*seed, purpose) for purpose in range(_NUM_PURPOSES)]
    room = length - NUM_SPECIAL
    position = np.uint32 if shard.tokens.size < 2**32 else np.int64
    dtypes = (position, np.uint16, position, np.uint16, np.uint8)
    lane_starts, lane_ends = _lanes(shard, _BLOCK_ROWS * length)
    cursor, end = lane_starts[:0], lane_ends[:0]
    taken = 0
    while taken < lane_starts.size or cursor.size:
        if cursor.size <= _POOL // 2 and taken < lane_starts.size:
            fresh = slice(taken, taken + _POOL - cursor.size)
            cursor = np.concatenate([cursor, lane_starts[fresh]])
            end = np.concatenate([end, lane_ends[fresh]])
            taken = min(fresh.stop, lane_starts.size)

        # A chunk has sentences of the lane up to the target length, and at least one sentence.
        target = np.where(
            hash_u64(keys[_SHORT], cursor) < np.uint64(int(short_rate * _BELOW_2_64)),
            2 + below(hash_u64(keys[_TARGET], cursor), room - 1),
            room,
        )
        a_start = sentences[cursor]
        chunk_end = np.minimum(np.searchsorted(sentences, a_start + target), end)
        count = chunk_end - cursor
        a_end = cursor + 1 + below(hash_u64(keys[_SPLIT], cursor), np.maximum(count - 1, 1))
        a_end = np.minimum(a_end, chunk_end)
        b_start = sentences[a_end]
        a_len = b_start - a_start
        b_len = sentences[chunk_end] - b_start
        label = (hash_u64(keys[_COIN], cursor) >> np.uint64(63)).astype(bool)
        next_cursor = chunk_end

        if pairing == "nsp":
            label |= count == 1
            other = np.flatnonzero(label)
            next_cursor = np.where(label, a_end, chunk_end)
            b_start[other], b_len[other] = _random_partners(
                sentences, documents, cursor[other], target[other] - a_len[other], keys
            )
        else:
            alone = np.flatnonzero(count == 1)
            total = a_len[alone]
            a_len[alone] = 1 + below(
                hash_u64(keys[_SPLIT], cursor[alone]), np.maximum(total - 1, 1)
            )
            b_start[alone] = a_start[alone] + a_len[alone]
            b_len[alone] = total - a_len[alone]
            a_start, b_start = np.where(label, b_start, a_start), np.where(label, a_start, b_start)
            a_len, b_len = np.where(label, b_len, a_len), np.where(label, a_len, b_len)

        a_front, a_len, b_front, b_len = truncate(
            a_len, b_len, room, keys[_FRONT_A], keys[_FRONT_B], cursor
        )
        columns = [a_start + a_front, a_len, b_start + b_front, b_len, label]
        if pairing == "sop":
            paired = np.minimum(a_len, b_len) > 0
            columns = [column[paired] for column in columns]
        yield [column.astype(dtype) for column, dtype in zip(columns, dtypes, strict=True)]
        alive = np.flatnonzero(next_cursor < end)
        cursor, end = next_cursor[alive], end[alive]


def _random_partners(
    sentences: np.ndarray,
    documents: np.ndarray,
    cursor: np.ndarray,
    target: np.ndarray,
    keys: list[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first token and length of a random B, from another document, for each row.

    B begins at a random sentence, and continues until it has `target` tokens or the document ends.
    """
    own = np.searchsorted(documents, cursor, side="right") - 1
    other = below(hash_u64(keys[_DOCUMENT], cursor), documents.size - 2)
    other += other >= own  # the row's own document is left out
    # Read in the order of memory, which is twice as fast for 39 million sentences.
    order = np.argsort(other)
    other = other[order]
    first, last = documents[other], documents[other + 1]
    first += below(hash_u64(keys[_SENTENCE], cursor[order]), last - first)
    start = sentences[first]
    filled = np.searchsorted(sentences, start + np.maximum(target[order], 1))
    first_token, length = np.empty((2, cursor.size), np.int64)
    first_token[order] = start
    length[order] = sentences[np.minimum(filled, last)] - start
    return first_token, length

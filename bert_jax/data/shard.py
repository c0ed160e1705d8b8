"""A shard of a token store: memory-mapped arrays, and checks of these arrays."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bert_jax.data.kept import Kept
from bert_jax.errors import UserError
from bert_jax.files.checks import DIGESTS, differing, json_crc
from bert_jax.tokenization.special_ids import SpecialIds

OFFSET_DTYPE = np.dtype("<i8")
MAX_HEADER_BYTES = 256 << 20  # largest corpus.json, enough for a million sources or shards
_CHECK_BLOCK = 1 << 20
_CHECKED_OFFSETS = 1 << 22
"""Number of offsets that are checked when a shard is opened. `verify` checks all offsets."""
OPEN_SHARDS = 64  # number of shards that a store keeps open; each has three open files


@runtime_checkable
class StoreTokenizer(Protocol):
    """The part of `bert_jax.tokenization.tokenizer.Tokenizer` that a store needs."""

    vocab_size: int
    special_ids: SpecialIds
    fingerprint: str

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files into a new directory."""


@dataclass(frozen=True)
class Shard:
    """Documents of sentences, as offsets into one flat array of token ids without special tokens.

    Sentence s is `tokens[sentence_offsets[s]:sentence_offsets[s + 1]]`. Document d has sentences
    `document_offsets[d]` to `document_offsets[d + 1]` - 1. No sentence or document is empty.
    """

    tokens: np.ndarray
    """(num_tokens,) uint16, or uint32 for a vocabulary above 65,536. May be a memory map."""
    sentence_offsets: np.ndarray
    """(num_sentences + 1,) int64: token positions at which sentences begin, and num_tokens."""
    document_offsets: np.ndarray
    """(num_documents + 1,) int64: sentences with which documents begin, and num_sentences."""
    vocab_size: int
    special_ids: SpecialIds
    path: Path | None = None
    """Directory of the arrays, for messages."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the store's `corpus.json` that have no field of their own."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def num_sentences(self) -> int:
        """Number of sentences."""
        return len(self.sentence_offsets) - 1

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_offsets) - 1

    @property
    def is_pairs(self) -> bool:
        """Whether each document is a pair of two sentences, a source and its target."""
        return self.meta.get("pairs") is True

    def take_spans(
        self, starts: np.ndarray, spans: np.ndarray, used: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fill the rows of a batch with consecutive spans of tokens, and with padding.

        Span i fills the next `spans[i]` positions with the tokens that begin at `starts[i]`,
        perhaps outside the array. Both are (k,) int64; the spans add up to B * L, where L is
        `length`. `used` (B, 1) is the number of positions in each row that are not padding ([PAD]).
        Ids at special tokens are arbitrary: the caller must overwrite them.

        Return tokens (B, L) with the dtype of the store, and (B, L) bool, false for padding. Raise
        a UserError for an id outside the vocabulary. (jax would silently read it as another id.)
        """
        # Indices are int64, because numpy would convert narrower indices.
        index = np.repeat(starts - (np.cumsum(spans) - spans), spans)
        index += np.arange(index.size)
        rows = np.empty((used.size, length), self.tokens.dtype)
        # "clip" is numpy's fastest mode. What an index outside the array reads is overwritten.
        np.take(self.tokens, index, mode="clip", out=rows.reshape(-1))
        highest = int(rows.max(initial=0))
        if highest >= self.vocab_size:
            said = f"it has the id {highest}, but its vocabulary has {self.vocab_size} ids"
            raise damaged(self.path, said)
        real = np.arange(length, dtype=np.int32) < used.astype(np.int32)
        np.copyto(rows, np.asarray(self.special_ids.pad, rows.dtype), where=~real)
        return rows, real


class Shards:
    """Shards of a store by index, opened on use; `num_open` stay open. Threads may share them."""

    def __init__(
        self, count: int, open_shard: Callable[[int], Shard], num_open: int = OPEN_SHARDS
    ) -> None:
        self._count, self._open = count, Kept(open_shard, num_open)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Shard]:
        return (self[number] for number in range(self._count))

    def __getitem__(self, number: int) -> Shard:
        if not 0 <= number < self._count:
            raise IndexError(f"shard index {number} is out of range for {self._count} shard(s)")
        return self._open(number)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the integer type of stored ids: uint16 for up to 65,536 ids, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def map_array(path: Path, name: str, dtype: np.dtype, length: int) -> np.ndarray:
    """Map an array file of a store or shard; raise a UserError if missing or of a wrong size."""
    file = path / f"{name}.bin"
    size = file.stat().st_size if file.is_file() else None
    if size != length * dtype.itemsize:
        found = "is missing" if size is None else f"has {size} bytes"
        raise damaged(path, f"{file.name} {found}, corpus.json asks for {length * dtype.itemsize}")
    return np.memmap(file, dtype=dtype, mode="r", shape=(length,))


def check_offsets(path: Path, name: str, offsets: np.ndarray, end: int, *, whole: bool) -> None:
    """Raise a UserError if `offsets` (n,) do not increase strictly from 0 to `end`.

    `name` is "sentence" or "document". `whole` checks all, not only the first `_CHECKED_OFFSETS`.
    """
    if offsets[0] != 0 or offsets[-1] != end:
        ends = f"{offsets[0]} to {offsets[-1]}, not 0 to {end}"
        raise damaged(path, f"{name}_offsets.bin runs from {ends}")
    offsets = offsets if whole else offsets[:_CHECKED_OFFSETS]
    for begin in range(0, len(offsets) - 1, _CHECK_BLOCK):
        falls = np.flatnonzero(np.diff(offsets[begin : begin + _CHECK_BLOCK + 1]) <= 0)
        if falls.size:
            at = begin + int(falls[0])
            said = f"{offsets[at]} is followed by {offsets[at + 1]} at position {at}"
            raise damaged(path, f"{name}_offsets.bin: {said}")


def check_tokens(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Read all tokens. Raise a UserError for the first id outside the vocabulary."""
    for begin in range(0, len(tokens), _CHECK_BLOCK):
        block = tokens[begin : begin + _CHECK_BLOCK]
        if block.max() >= vocab_size:
            at = begin + int(np.argmax(block >= vocab_size))
            said = f"the id {tokens[at]} at position {at}, but vocab_size is {vocab_size}"
            raise damaged(path, f"tokens.bin has {said}")


def check_manifest(path: Path, header: Mapping[str, Any]) -> None:
    """Raise a UserError if the manifest, or a file whose digest the manifest lists, has changed."""
    header = dict(header)
    if header.pop("crc32", None) not in (None, json_crc(header)):
        raise damaged(path, "corpus.json was changed (if this is intended, remove its entry crc32)")
    check_digests(path, header.get(DIGESTS))


def check_digests(path: Path, digests: Any) -> None:
    """Raise a UserError if a file differs from its digest. `digests` maps file names to digests."""
    if name := differing(path, digests):
        raise damaged(path, f"{name} does not have the digest that corpus.json names")


def damaged(path: Path | None, what: str) -> UserError:
    """Return the error for a damaged store or shard."""
    if path is not None and path.parent.name == "shards":
        return UserError(
            f"the shard {path.name} of the token store {path.parent.parent} is damaged: {what}. "
            f"Copy {path} again from where the corpus was built, or build the corpus again."
        )
    return UserError(f"the token store {path} is damaged: {what}. Build the corpus again.")

"""Encoding of blocks of documents as arrays of token ids, in the processes of a corpus build."""

import hashlib
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bert_jax.data.corpus.cleaning.clean import Cleaner
from bert_jax.data.corpus.intake import DropReport
from bert_jax.data.corpus.sentences import Splitter, get_splitter
from bert_jax.data.corpus.workers import grouped
from bert_jax.data.shard import token_dtype
from bert_jax.data.store_writer import check_ids
from bert_jax.tokenization.tokenizer import Tokenizer

LONGEST_SENTENCE = 62
"""Largest number of tokens in a sentence, so that a row of 128 tokens holds a pair without loss.
Longer sentences (text without full stops) are cut into pieces of about half as many tokens."""
_ENCODE_CHARS = 1 << 16  # tokenized per call; this bounds memory for a huge document


class PairBlock(NamedTuple):
    """Pairs of the source `name`, for `encode_pairs`."""

    name: str
    numbers: list[int]  # line number or row number of each pair in the source
    texts: list[str]
    """Source and target of the first pair, then of the second, and so on."""


class EncodedPairs(NamedTuple):
    """Tokens of a block of n pairs, including pairs that have no tokens on one side."""

    name: str
    numbers: np.ndarray
    """(n,) int64, line number or row number of each pair in the source."""
    tokens: np.ndarray
    """(num_tokens,), token ids of all texts in order, in the dtype of the store."""
    lengths: np.ndarray
    """(n, 2) int64, number of tokens in source and target."""
    hashes: np.ndarray
    """(n, 2) uint64, hashes of the texts of source and target."""
    text_bytes: int


class Block(NamedTuple):
    """A block of documents of the same corpus, for `clean_and_encode`."""

    corpus: str  # name of the documents' corpus; empty if there is only one corpus
    source: str  # name of the documents' source; empty if there may be several sources
    numbers: list[int]
    """Index of each document among the documents that the pass reads, counted from 0."""
    data: bytes
    """Texts of the documents in UTF-8, separated by two newlines."""


class EncodedBlock(NamedTuple):
    """A block's documents as arrays; documents without tokens are left out."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Arguments for `ShardWriter.append`."""
    hashes: np.ndarray
    """(documents,) uint64, hash of each document's text."""
    text_bytes: int
    """UTF-8 bytes of the block, including documents without tokens."""


_worker: tuple[Tokenizer, Splitter] | None = None
_new_cleaner: Callable[..., Cleaner] | None = None


def start_worker(
    tokenizer: Tokenizer, splitter: str, new_cleaner: Callable[..., Cleaner] | None = None
) -> None:
    """Set up this process for encoding; `new_cleaner(source=NAME)`, if given, makes cleaners."""
    global _worker, _new_cleaner
    _new_cleaner = new_cleaner
    # There is one process per core, so threads inside a process would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = tokenizer, get_splitter(splitter)


def clean_and_encode(block: Block) -> tuple[str, EncodedBlock, DropReport | None]:
    """Clean, split and tokenize documents; raise a UserError for an id that cannot be stored.

    Return the corpus's name, the encoded block, and a report on omissions (None without cleaning).
    """
    if _new_cleaner is None:
        return block.corpus, encode_block(block.data), None
    cleaner = _new_cleaner(source=block.source)
    texts = zip(block.numbers, block.data.decode().split("\n\n"), strict=True)
    cleaned = (cleaner.clean(number, text) for number, text in texts)
    data = "\n\n".join(text for text in cleaned if isinstance(text, str)).encode()
    return block.corpus, encode_block(data), cleaner.report


def encode_block(block: bytes) -> EncodedBlock:
    """Split and tokenize the documents of a block, which has the form of `Block.data`."""
    assert _worker is not None
    tokenizer, split = _worker
    documents = block.split(b"\n\n")
    sentences: list[str] = []
    ends: list[int] = []  # end of each document in `sentences`
    for document in documents:
        for paragraph in document.decode().split("\n"):
            sentences += split(paragraph)
        ends.append(len(sentences))
    # Each sentence begins like a new word, since nearly all sentences follow another one in a row.
    tokens, lengths = _encode(tokenizer, [tokenizer.word_prefix + each for each in sentences])
    lengths, pieces = _cut(tokens, lengths, tokenizer.continues_word)
    # Sentences and documents without tokens (control characters, lone marks) are dropped.
    filled = np.concatenate([[0], np.cumsum(pieces)])
    counts = np.diff(filled[np.array([0, *ends])])
    filled_counts = counts[counts > 0].astype(np.int32)
    hashes = _hashes(documents)[counts > 0]
    return EncodedBlock((tokens, lengths, filled_counts), hashes, len(block))


def encode_pairs(block: PairBlock) -> EncodedPairs:
    """Tokenize pairs; each side is one sentence and is not cut, however long it is."""
    assert _worker is not None
    both = enumerate((_worker[0], _worker[0].target))
    sides = [_encode(tokenizer, block.texts[side::2]) for side, tokenizer in both]
    lengths = np.stack([sizes for _, sizes in sides], axis=1).astype(np.int64)
    tokens = np.empty(lengths.sum(), sides[0][0].dtype)
    is_target = np.repeat(np.arange(lengths.size) % 2 == 1, lengths.ravel())
    tokens[~is_target], tokens[is_target] = sides[0][0], sides[1][0]
    encoded = [text.encode() for text in block.texts]
    return EncodedPairs(
        block.name, np.array(block.numbers, np.int64), tokens, lengths,
        _hashes(encoded).reshape(-1, 2), sum(map(len, encoded)),
    )  # fmt: skip


def _hashes(texts: list[bytes]) -> np.ndarray:
    digests = [hashlib.blake2b(text, digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(digests), "<u8")


def _encode(tokenizer: Tokenizer, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return all ids in one array of the store's dtype, and the number of ids of each sentence."""
    dtype = token_dtype(tokenizer.vocab_size)
    lengths: list[int] = []
    parts: list[np.ndarray] = []
    for group in grouped(sentences, len, _ENCODE_CHARS):
        arrays = tokenizer.encode_batch(group)
        lengths += map(len, arrays)
        joined = np.concatenate(arrays)
        check_ids(joined, tokenizer)  # before a wrong id could wrap around in the narrow type
        parts.append(joined.astype(dtype))
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype)
    return tokens, np.array(lengths, np.int32)


def _cut(
    tokens: np.ndarray, lengths: np.ndarray, continues_word: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of all pieces of sentences, and the number of pieces of each sentence.

    Only long sentences are cut, into equal pieces. A cut inside a word moves to the word's end.
    """
    pieces = np.where(
        lengths > LONGEST_SENTENCE, -(-lengths // (LONGEST_SENTENCE // 2)), np.minimum(lengths, 1)
    )
    sentence = np.repeat(np.arange(lengths.size), pieces)
    number = np.arange(sentence.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    before = number * lengths[sentence] // pieces[sentence]  # tokens before the piece
    starts = (np.cumsum(lengths) - lengths)[sentence] + before
    words = np.append(np.flatnonzero(~continues_word[tokens]), tokens.size)
    moved = words[np.searchsorted(words, starts)]
    # In text without spaces, which is one long word, the cuts stay where they are.
    starts = np.where((number > 0) & (moved - starts < LONGEST_SENTENCE // 8), moved, starts)
    return np.diff(starts, append=tokens.size).astype(np.int32), pieces

"""Work of a corpus build's processes: a block of documents to arrays of token ids."""

import hashlib
import os
from typing import NamedTuple

import numpy as np

from bert_jax.corpus.sentences import Splitter, get_splitter
from bert_jax.corpus.workers import grouped
from bert_jax.data.store import token_dtype
from bert_jax.data.store_writer import check_ids
from bert_jax.tokenization.tokenizer import Tokenizer

LONGEST_SENTENCE = 62
"""Tokens; half a row of 128. Longer sentences (a line that is a paragraph, a text without full
stops) become pieces of at most half as many: what a sentence pair cannot hold is in no row."""
_ENCODE_CHARS = 1 << 16  # tokenized in one call: bounds memory for one huge document


class EncodedBlock(NamedTuple):
    """A block's documents as arrays; documents that gave no token are left out."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Arguments for `StoreWriter.append`."""
    hashes: np.ndarray
    """(documents,) uint64, of each document's text."""
    text_bytes: int
    """UTF-8 bytes of the block, documents without tokens included."""


_worker: tuple[Tokenizer, Splitter] | None = None


def start_worker(tokenizer: Tokenizer, splitter: str) -> None:
    """Set up this process for `encode_block`."""
    global _worker
    # One process for each core: threads inside would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = tokenizer, get_splitter(splitter)


def encode_block(block: bytes) -> EncodedBlock:
    """Split and tokenize documents: UTF-8, paragraphs end in a newline, documents in two.

    Raises:
        UserError: the tokenizer gave an id that cannot be stored.
    """
    assert _worker is not None
    tokenizer, split = _worker
    documents = block.split(b"\n\n")
    sentences: list[str] = []
    ends: list[int] = []  # in `sentences`, of each document
    for document in documents:
        for paragraph in document.decode().split("\n"):
            sentences += split(paragraph)
        ends.append(len(sentences))
    tokens, lengths = _encode(tokenizer, sentences)
    lengths, pieces = _cut(tokens, lengths, tokenizer.continues_word)
    # Sentences and documents without tokens (control characters, lone marks) are dropped.
    filled = np.concatenate([[0], np.cumsum(pieces)])
    counts = np.diff(filled[np.array([0, *ends])])
    hashes = [hashlib.blake2b(document, digest_size=8).digest() for document in documents]
    return EncodedBlock(
        (tokens, lengths, counts[counts > 0].astype(np.int32)),
        np.frombuffer(b"".join(hashes), "<u8")[counts > 0],
        len(block),
    )


def _encode(tokenizer: Tokenizer, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """All ids in one array of the store's type, and the number of them in each sentence."""
    dtype = token_dtype(tokenizer.vocab_size)
    prefix = tokenizer.word_prefix  # nearly all sentences of a row follow another one
    lengths: list[int] = []
    parts: list[np.ndarray] = []
    for group in grouped(sentences, len, _ENCODE_CHARS):
        arrays = tokenizer.encode_batch([prefix + each for each in group])
        lengths += map(len, arrays)
        joined = np.concatenate(arrays)
        check_ids(joined, tokenizer)  # before the narrow type could wrap a wrong one around
        parts.append(joined.astype(dtype))
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype)
    return tokens, np.array(lengths, np.int32)


def _cut(
    tokens: np.ndarray, lengths: np.ndarray, continues_word: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of what is left of sentences once long ones are cut, and how many each became.

    A sentence becomes equal pieces, but for the rest of a word that a cut would divide.
    """
    pieces = np.where(
        lengths > LONGEST_SENTENCE, -(-lengths // (LONGEST_SENTENCE // 2)), np.minimum(lengths, 1)
    )
    sentence = np.repeat(np.arange(lengths.size), pieces)
    number = np.arange(sentence.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    before = number * lengths[sentence] // pieces[sentence]  # tokens of the same sentence
    starts = (np.cumsum(lengths) - lengths)[sentence] + before
    words = np.append(np.flatnonzero(~continues_word[tokens]), tokens.size)
    moved = words[np.searchsorted(words, starts)]
    # A language written without spaces is one long word: its pieces are cut where they are.
    starts = np.where((number > 0) & (moved - starts < LONGEST_SENTENCE // 8), moved, starts)
    return np.diff(starts, append=tokens.size).astype(np.int32), pieces

"""Lengths of documents, and hashes by which equal documents of a token store are found."""

import numpy as np

from bert_jax.data.corpus.overlap.search import Span
from bert_jax.data.store import TokenStore
from bert_jax.hashing import hash_key, hash_u64
from bert_jax.tokenization.tokenizer import Tokenizer

_DUPLICATES = 0x64757065  # "dupe", so that no other hash has these keys


def measure(store: TokenStore, tokenizer: Tokenizer, span: Span) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of tokens (n,), int64, and hashes (n,), uint64, of a span's documents."""
    del tokenizer
    shard = store.shards[span[0]]
    starts = np.asarray(shard.sentence_offsets[shard.document_offsets[span[1] : span[2] + 1]])
    tokens = np.asarray(shard.tokens[starts[0] : starts[-1]]).astype(np.uint64)
    sizes, begins = np.diff(starts), starts[:-1] - starts[0]
    place = np.arange(tokens.size) - np.repeat(begins, sizes)
    tokens += np.uint64(1)
    tokens *= hash_u64(hash_key(_DUPLICATES), place) | np.uint64(1)
    return sizes, np.add.reduceat(tokens, begins) ^ hash_u64(hash_key(_DUPLICATES), sizes)

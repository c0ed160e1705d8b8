"""Token stores in memory, for tests of what reads them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bert_jax.data.shard import Shard
from bert_jax.data.store import TokenStore
from bert_jax.tokenization.special_ids import SpecialIds

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


def make_shard(
    documents: Sequence[Sequence[int]], dtype: type = np.uint32, meta: dict | None = None
) -> Shard:
    """A shard of documents given as sentence lengths; token t is 5 + its place, so all differ."""
    lengths = np.array([n for document in documents for n in document], np.int64)
    sentences = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    sizes = np.array([len(document) for document in documents], np.int64)
    vocab_size = int(sentences[-1]) + 5
    return Shard(
        tokens=np.arange(5, vocab_size, dtype=dtype),
        sentence_offsets=sentences,
        document_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        vocab_size=vocab_size,
        special_ids=SPECIAL,
        meta=meta or {},
    )


def store_of(*shards: Shard) -> TokenStore:
    """A store in memory."""
    store = TokenStore.of(shards, np.ones(shards[0].vocab_size, np.int64))
    return replace(store, tokenizer_fingerprint="tokenizer", fingerprint="store")


def make_store(*arguments: Any, **options: Any) -> TokenStore:
    """A store of one shard; see `make_shard`."""
    return store_of(make_shard(*arguments, **options))


def make_pairs(sizes: Sequence[Sequence[int]]) -> TokenStore:
    """A store of pairs; see `make_pair_shard`."""
    return store_of(make_pair_shard(sizes))


def make_pair_shard(sizes: Sequence[Sequence[int]]) -> Shard:
    """A shard of pairs, given as the numbers of tokens of source and target."""
    return make_shard(sizes, meta={"pairs": True, "target_entropy": 1.0})


def random_store(*arguments: Any, **options: Any) -> TokenStore:
    """A store of one shard; see `random_shard`."""
    return store_of(random_shard(*arguments, **options))


def random_shard(num_documents: int, seed: int = 0, sentences: int = 8) -> Shard:
    """Documents of 1 to 2 * `sentences` sentences of 1 to 29 tokens."""
    rng = np.random.default_rng(seed)
    return make_shard(
        [
            rng.integers(1, 30, rng.integers(1, 2 * sentences + 1)).tolist()
            for _ in range(num_documents)
        ]
    )


def document_of(shard: Shard, token_places: np.ndarray) -> np.ndarray:
    """Which document holds each place of the token array."""
    first = shard.sentence_offsets[shard.document_offsets]
    return np.searchsorted(first, token_places, side="right") - 1

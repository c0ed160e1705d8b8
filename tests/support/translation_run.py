"""A corpus of pairs with something to learn, and a run on it that takes seconds."""

from pathlib import Path
from typing import Any

import numpy as np
from one_shard import StoreWriter
from small_run import TOKENIZER, VOCAB_SIZE, small_config

from bert_jax.data.store import TokenStore
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus


def write_pairs(path: Path, count: int, seed: int) -> TokenStore:
    """Sources at random; a target is its source backwards, token 63 - n for token 5 + n."""
    random = np.random.default_rng(seed)
    counts, ends = np.zeros(VOCAB_SIZE), 0
    with StoreWriter(path, TOKENIZER) as writer:
        for _ in range(count):
            source = random.integers(5, VOCAB_SIZE, random.integers(2, 9))
            target = (VOCAB_SIZE + 4 - source)[::-1]
            writer.append(np.concatenate([source, target]), np.full(2, len(source)), np.array([2]))
            np.add.at(counts, target, 1)
            ends += 1
        rates = np.append(counts[counts > 0], ends) / (counts.sum() + ends)
        return writer.store(pairs=True, target_entropy=float(-(rates * np.log(rates)).sum()))


def write_translations(path: Path) -> Corpus:
    return Corpus(write_pairs(path / "train", 400, 0), write_pairs(path / "heldout", 60, 1))


def translation_config(**changes: Any) -> PretrainConfig:
    """8 steps of the Transformer of the paper, with dropout, accumulation and evaluation."""
    given = {
        "objective": {"name": "translation"},
        "model__positions": "sinusoidal",
        "model__scale_embeddings": True,
        "model__num_types": 0,
        "model__pooler": False,
        "model__head_transform": False,
        "data__pairing": "translation",
        "data__target_length": 24,
        "training__num_steps": 8,
        "training__phases": [{"length": 32, "batch_size": 16}],
    }
    return small_config(**{**given, **changes})

"""Text of stations 8 and 10: somebody counts in French words, and every row has two numbers.

A row is [CLS] number [SEP] number [SEP]. In half of the rows, the second number follows the first.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from number_words import words_of

from bert_jax.model.config import ModelConfig
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.tokenization.special_ids import SpecialIds

LIMIT = 10_000
UNSEEN, KNOWN = np.split(np.random.default_rng(0).permutation(LIMIT - 1), [LIMIT // 10])
"""Numbers that never begin a row of the training, and all others; the last one has no next."""
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
WORDS = sorted({word for number in range(LIMIT) for word in words_of(number)})
PARTS = ("milliers", "centaines", "dizaines", "unités")
"""Thousands, hundreds, tens and units: words that occur in questions only."""
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *PARTS]
ID = {token: id for id, token in enumerate(TOKENS)}
LENGTH = 2 * max(len(words_of(number)) for number in range(LIMIT)) + 3
ROWS = 64

MODEL = ModelConfig(
    vocab_size=len(TOKENS), num_positions=LENGTH, hidden_dim=64, num_layers=2, num_heads=4,
    mlp_dim=128, hidden_dropout_rate=0.0, attention_dropout_rate=0.0, init_std=0.1, dtype="float32",
    activation="gelu_tanh",
)  # fmt: skip
OBJECTIVE = MaskedLM(MODEL, MaskingConfig(), SPECIAL, pairs=True)
"""Masked words and next sentences (BERT)."""


def rows_of(texts: Sequence[Sequence[Sequence[str]]]) -> dict[str, Any]:
    """Make the arrays of rows; a row is one text or two texts, each a list of words."""
    tokens, types, segments = np.zeros((3, len(texts), LENGTH), np.int32)
    for row, parts in enumerate(texts):
        ids, kinds = [ID["[CLS]"]], [0]
        for kind, words in enumerate(parts):
            ids += [*(ID[word] for word in words), ID["[SEP]"]]
            kinds += [kind] * (len(words) + 1)
        tokens[row, : len(ids)], types[row, : len(ids)], segments[row, : len(ids)] = ids, kinds, 1
    return {"tokens": tokens, "type_ids": types, "segment_ids": segments}


def counted(random: np.random.Generator, numbers: np.ndarray, count: int, first: int) -> Any:
    """Draw rows whose first numbers are in `numbers`; `first` is the index of the first row."""
    one = random.choice(numbers, count)
    labels = random.integers(0, 2, count)
    two = np.where(labels == 0, one + 1, random.integers(0, LIMIT, count))
    texts = [[words_of(a), words_of(b)] for a, b in zip(one.tolist(), two.tolist(), strict=True)]
    index = first + np.arange(count, dtype=np.uint32)
    return {**rows_of(texts), "row_index": index, "pair_labels": labels.astype(np.int8)}


def training_rows(num_steps: int) -> Any:
    """Draw a batch for each step."""
    random = np.random.default_rng(0)
    for step in range(num_steps):
        yield counted(random, KNOWN, ROWS, step * ROWS)


def unseen_rows(count: int) -> Any:
    """Draw rows that begin with numbers that do not begin any row of the training."""
    return counted(np.random.default_rng(1), UNSEEN, count, 1 << 30)


def loss(params: Any, batch: Any) -> Any:
    """Mask a batch, and add both losses in nats."""
    rows = OBJECTIVE.prepare(batch, 0)
    sums = OBJECTIVE.forward(params, rows, None, None).sums
    return OBJECTIVE.loss(sums, OBJECTIVE.counts(rows))

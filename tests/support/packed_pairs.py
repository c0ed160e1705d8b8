"""Pairs of texts, packed into rows by hand."""

from collections.abc import Sequence

import numpy as np

from bert_jax.model.seq2seq.network import Side
from bert_jax.tokenization.special_ids import SpecialIds

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
Pair = tuple[Sequence[int], Sequence[int]]


def random_pairs(count: int, vocab_size: int, seed: int = 0, longest: int = 5) -> list[Pair]:
    """Texts of 1 to `longest` tokens, without special ones."""
    random = np.random.default_rng(seed)

    def text() -> list[int]:
        return random.integers(5, vocab_size, random.integers(1, longest + 1)).tolist()

    return [(text(), text()) for _ in range(count)]


def pack(
    rows: Sequence[Sequence[Pair]], source_length: int, target_length: int
) -> tuple[Side, Side]:
    """Pack the pairs of each row: sources [CLS] text [SEP], targets [CLS] text."""
    sources = [[[SPECIAL.cls, *a, SPECIAL.sep] for a, _ in pairs] for pairs in rows]
    targets = [[[SPECIAL.cls, *b] for _, b in pairs] for pairs in rows]
    return _side(sources, source_length), _side(targets, target_length)


def batch(rows: Sequence[Sequence[Pair]], source_length: int, target_length: int) -> dict:
    """A batch as the pairing `translation` delivers it."""
    source, target = pack(rows, source_length, target_length)
    return {
        "tokens": source.tokens,
        "type_ids": np.zeros(source.tokens.shape, np.uint8),
        "segment_ids": source.segment_ids,
        "target_tokens": target.tokens,
        "target_segment_ids": target.segment_ids,
        "row_index": np.arange(len(rows), dtype=np.uint32),
    }


def _side(rows: list[list[list[int]]], length: int) -> Side:
    tokens = np.zeros((len(rows), length), np.uint16)
    segments = np.zeros((len(rows), length), np.uint8)
    for row, texts in enumerate(rows):
        flat = [token for text in texts for token in text]
        ids = [number for number, text in enumerate(texts, 1) for _ in text]
        tokens[row, : len(flat)], segments[row, : len(ids)] = flat, ids
    return Side(tokens, segments)

"""The token store: a tokenized corpus as memory-mapped arrays."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the five special tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


@dataclass(frozen=True)
class TokenStore:
    """A tokenized corpus: sentences in documents, over one flat array of token ids.

    Sentence s is `tokens[sentence_offsets[s]:sentence_offsets[s + 1]]`, document d is the sentences
    `document_offsets[d]` to `document_offsets[d + 1]`. No special tokens are stored, no sentence and
    no document is empty.
    """

    tokens: np.ndarray
    """(num_tokens,) uint16, or uint32 where the vocabulary is above 65,536; a memory map."""
    sentence_offsets: np.ndarray
    """(num_sentences + 1,) int64 token positions."""
    document_offsets: np.ndarray
    """(num_documents + 1,) int64 sentence positions."""
    unigram_counts: np.ndarray
    """(vocab_size,) int64: how often each id occurs."""
    vocab_size: int
    special_ids: SpecialIds
    tokenizer_fingerprint: str
    fingerprint: str
    """sha256 of what determines the content; equal stores have equal fingerprints."""
    path: Path | None = None
    meta: dict = field(default_factory=dict)
    """The rest of `corpus.json`."""

"""Examples that two splits share: texts that differ at most in case and blanks."""

import hashlib
from collections.abc import Sequence

import numpy as np

Texts = Sequence[tuple[str, ...]]
"""Texts of each example, as `Split.texts` returns them."""


def example_key(texts: Sequence[str]) -> bytes:
    """Hash the texts of an example to 16 bytes, ignoring case and blanks."""
    whole = (*texts, "")[: max(2, len(texts))]  # a single text equals a pair with an empty second
    joined = "\0".join(" ".join(text.casefold().split()) for text in whole)
    return hashlib.blake2b(joined.encode(), digest_size=16).digest()


def example_keys(examples: Texts) -> np.ndarray:
    """Return the keys of all examples, (N,) uint64: the first 8 bytes of `example_key`."""
    joined = b"".join(example_key(texts)[:8] for texts in examples)
    return np.frombuffer(joined, "<u8")


def overlap_warning(name: str, examples: Texts, known: np.ndarray) -> str:
    """Warn of the number of examples that share their texts with training; empty for none.

    Args:
        name: name of the split, for the message.
        examples: examples of the split.
        known: keys of the training examples.
    """
    shared = np.flatnonzero(np.isin(example_keys(examples), known))
    if not len(shared):
        return ""
    first = " | ".join(examples[shared[0]])
    short = f"{first[:60]}..." if len(first) > 60 else first
    return (
        f"{name}: {len(shared):,} of {len(examples):,} examples have the texts of examples trained "
        f"on (the first: {short!r}); their scores say less about new texts"
    )

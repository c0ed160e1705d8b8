"""Whole batches from the flat token array, in a few passes over (B, L)."""

import numpy as np


def gather_spans(
    tokens: np.ndarray, sources: np.ndarray, spans: np.ndarray, rows: int, length: int
) -> np.ndarray:
    """Fill (rows, length) with stretches of `tokens`, laid end to end.

    Stretch i covers the next `spans[i]` places and reads upwards from `sources[i]`. One repeat, one
    add and one take for the batch: indices stay int64, because numpy would convert narrower ones.

    Args:
      tokens: (num_tokens,) the store's array, a memory map.
      sources: (k,) int64 index of each stretch's first token. Places for special tokens and
        padding read whatever lies there, the ends of the array included; the caller overwrites
        them.
      spans: (k,) int64, of sum rows * length.
      rows: B.
      length: L.

    Returns:
      (B, L) of the tokens' dtype.
    """
    first_place = np.cumsum(spans) - spans
    index = np.repeat(sources - first_place, spans)
    index += np.arange(index.size)
    out = np.empty((rows, length), tokens.dtype)
    # "clip" is what numpy does fastest, and it makes an overwritten place's index harmless.
    np.take(tokens, index, mode="clip", out=out.reshape(-1))
    return out

"""A bigram model of a text, which predicts each token from the token before."""

import numpy as np
from jaxtyping import Integer

from bert_jax.data.store import TokenStore

_DISCOUNT = 0.75


def bigram_gain(
    tokens: Integer[np.ndarray, " T"], heldout: Integer[np.ndarray, " S"], vocab_size: int
) -> float:
    """Return the nats per token by which bigrams predict `heldout` better than unigrams do.

    The bigram counts of `tokens` are reduced by absolute discounting. The freed probability goes to
    each token in proportion to the number of different tokens before it (Kneser & Ney 1995).
    """
    tokens, heldout = tokens.astype(np.int64), heldout.astype(np.int64)
    counts = np.bincount(tokens, minlength=vocab_size)
    pairs, times = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
    followers = np.bincount(pairs // vocab_size, minlength=vocab_size)
    preceded = np.bincount(pairs % vocab_size, minlength=vocab_size) + 0.1
    before, after = heldout[:-1], heldout[1:]
    asked = before * vocab_size + after
    place = np.minimum(np.searchsorted(pairs, asked), len(pairs) - 1)
    found = np.where(pairs[place] == asked, times[place], 0)
    seen = np.maximum(counts[before], 1)
    shared = np.where(counts[before] > 0, _DISCOUNT * followers[before] / seen, 1.0)
    kept = np.maximum(found - _DISCOUNT, 0) / seen
    bigrams = kept + shared * preceded[after] / preceded.sum()
    unigrams = (counts[after] + 0.5) / (counts + 0.5).sum()
    return float(np.mean(np.log(bigrams) - np.log(unigrams)))


def first_tokens(store: TokenStore, most: int) -> Integer[np.ndarray, " T"]:
    """Read the first tokens of a store, at most `most`."""
    parts, left = [], most
    for shard in store.shards:
        parts.append(np.asarray(shard.tokens[:left]))
        left -= len(parts[-1])
        if not left:
            break
    return np.concatenate(parts)

"""The law behind the choices of `bert-jax start`: what size, text and repetition bring, in nats.

The law was fitted to the runs of benchmarks/start_law.py; docs/experiments.md has the table and the
fit. Hoffmann et al. (2022, equation 2) give its form, and Muennighoff et al. (2023, equation 5)
count the tokens of repeated text. A bigram model of the text, which takes seconds, says how far the
text differs from the text of those runs.
"""

import math

import numpy as np
from jaxtyping import Integer

from bert_jax.data.store import TokenStore

REPEATS = 11.7
"""Number of epochs beyond the first after which repeated text has taught most of what it can."""
MANY_EPOCHS = 40
"""Number of epochs above which a further epoch hardly teaches anything."""
_LIMIT, _SIZE, _SIZE_POWER, _TEXT, _TEXT_POWER = 4.5, 25.7, 0.35, 444.0, 0.372
_BIGRAM, _BIGRAM_SIZE, _BIGRAM_POWER = 1.95, 64.4, 0.35
"""Constants of the gain of bigrams on the text of the runs, after each number of tokens."""
_READ_TOKENS = 10_000_000
_DISCOUNT = 0.75
SPREAD = 0.15
"""Standard deviation of what a run reaches around its prediction."""
INTERVAL = 1.2816
"""Number of standard deviations on each side of an 80% interval."""


def useful_tokens(tokens: int, unique: int) -> float:
    """Return the number of tokens of new text that would teach as much as `tokens` with repeats.

    `unique` is the number of tokens of the text; the first reading of each counts in full.
    """
    if tokens <= unique:
        return float(tokens)
    return unique * (1 + REPEATS * (1 - math.exp(-(tokens / unique - 1) / REPEATS)))


def nats_below_unigram(parameters: int, tokens: int, unique: int) -> float:
    """Predict the held-out masked-LM loss of a run, as nats below the unigram entropy.

    Args:
        parameters: number of parameters in the layers, without embeddings and head.
        tokens: number of tokens in all training batches.
        unique: number of tokens of the training text.
    """
    text = _TEXT / useful_tokens(tokens, unique) ** _TEXT_POWER
    return _LIMIT - _SIZE / parameters**_SIZE_POWER - text


def bigram_gain(
    tokens: Integer[np.ndarray, " T"], heldout: Integer[np.ndarray, " S"], vocab_size: int
) -> float:
    """Compute the nats a token by which bigrams predict `heldout` better than unigrams do.

    The bigrams of `tokens` have an absolute discount, and share it by how many different tokens a
    token follows (Kneser & Ney 1995).
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


def surplus(train: TokenStore, heldout: TokenStore) -> float:
    """Estimate the nats by which a text teaches more than the law says, from its bigrams."""
    tokens, others = _first_tokens(train), _first_tokens(heldout)
    expected = _BIGRAM - _BIGRAM_SIZE / len(tokens) ** _BIGRAM_POWER
    return bigram_gain(tokens, others, train.vocab_size) - expected


def _first_tokens(store: TokenStore) -> Integer[np.ndarray, " T"]:
    """Read the first tokens of a store, at most ten million."""
    parts, left = [], _READ_TOKENS
    for shard in store.shards:
        parts.append(np.asarray(shard.tokens[:left]))
        left -= len(parts[-1])
        if not left:
            break
    return np.concatenate(parts)

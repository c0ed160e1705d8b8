"""The law behind the choices of `bert-jax start`: gain in nats from size, text and repetition.

The law was fitted to the runs of benchmarks/start_law.py; docs/experiments.md has the table and the
fit. Hoffmann et al. (2022, equation 2) give its form, and Muennighoff et al. (2023, equation 5)
count the tokens of repeated text. A bigram model of a new text, which takes seconds, shows how far
the new text differs from the text of these runs.
"""

import math

from bert_jax.data.bigrams import bigram_gain, first_tokens
from bert_jax.data.store import TokenStore

REPEATS = 9.0
"""Number of epochs beyond the first after which repeated text has taught most of what it can."""
MANY_EPOCHS = 40
"""Number of epochs above which a further epoch hardly teaches anything."""
_LIMIT, _SIZE, _SIZE_POWER, _TEXT, _TEXT_POWER = 4.5, 28.3, 0.35, 289.6, 0.3517
_BIGRAM, _BIGRAM_SIZE, _BIGRAM_POWER = 1.95, 64.4, 0.35
"""Constants of a bigram model's expected gain, in nats, as a function of the training tokens."""
_READ_TOKENS = 10_000_000
SPREAD = 0.15
"""Standard deviation of the differences between runs' losses and their predictions, in nats."""
INTERVAL = 1.2816
"""Number of standard deviations on each side of an 80% interval."""


def useful_tokens(tokens: int, unique: int) -> float:
    """Return the number of tokens of new text that would teach as much as `tokens` with repeats.

    `unique` is the number of tokens in the text; the first pass over the text counts in full.
    """
    if tokens <= unique:
        return float(tokens)
    return unique * (1 + REPEATS * (1 - math.exp(-(tokens / unique - 1) / REPEATS)))


def nats_below_unigram(parameters: int, tokens: int, unique: int) -> float:
    """Predict the held-out masked-LM loss of a run, as nats below the unigram entropy.

    `parameters` is the number of parameters in the layers, without embeddings and head. `tokens` is
    the number of tokens in all training batches, and `unique` the number in the training text.
    """
    text = _TEXT / useful_tokens(tokens, unique) ** _TEXT_POWER
    return _LIMIT - _SIZE / parameters**_SIZE_POWER - text


def surplus(train: TokenStore, heldout: TokenStore) -> float:
    """Estimate, from bigrams, the gain of a text above the prediction of the law, in nats."""
    tokens, others = (first_tokens(store, _READ_TOKENS) for store in (train, heldout))
    expected = _BIGRAM - _BIGRAM_SIZE / len(tokens) ** _BIGRAM_POWER
    return bigram_gain(tokens, others, train.vocab_size) - expected

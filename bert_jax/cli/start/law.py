"""The law behind the choices of `bert-jax start`: what size, text and repetition bring, in nats.

The law was fitted to the runs of benchmarks/start_law.py; docs/experiments.md has the table and the
fit. Hoffmann et al. (2022, equation 2) give its form, and Muennighoff et al. (2023, equation 5)
count the tokens of repeated text.
"""

import math

REPEATS = 15.0
"""Number of epochs beyond the first after which repeated text has taught most of what it can."""
MANY_EPOCHS = 40
"""Number of epochs above which a further epoch hardly teaches anything."""
_LIMIT, _SIZE, _SIZE_POWER, _TEXT, _TEXT_POWER = 4.5, 18.5, 0.35, 294.0, 0.34
LEAST_TOKENS = 3_000_000
"""Number of tokens of the shortest pilot: one of a million says nothing of the end of a run."""
PILOT_WEIGHT = 0.5
"""Share of a pilot's deviation from the law that remains at the end of the run."""
SPREAD, UNCALIBRATED_SPREAD = 0.25, 0.3
"""Standard deviations of what a run reaches around its prediction, with and without a pilot."""
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

"""All logits of a pretraining model in one call."""

from typing import Any, NamedTuple

import jax

from bert_jax.model.heads import encode, pair_logits, vocabulary_projection


class PretrainingLogits(NamedTuple):
    """Scores of both objectives."""

    vocabulary: jax.Array
    pairs: jax.Array


def apply_pretraining(config: Any, params: Any, *inputs: Any, positions: Any = None) -> Any:
    """Compute them; the inputs are those of `encode`."""
    hidden = encode(config, params, *inputs)
    return PretrainingLogits(
        vocabulary_projection(config, params, hidden, positions).logits(),
        pair_logits(config, params, hidden),
    )

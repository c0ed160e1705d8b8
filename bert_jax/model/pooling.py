"""Poolings of the states of a row's tokens.

Sources: Reimers and Gurevych 2019 (Sentence-BERT), section 3; Lin et al. 2017, section 2 (learned
weights of tokens).
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from bert_jax.model.attention.xla import MASKED_SCORE
from bert_jax.model.config import ModelConfig
from bert_jax.model.layers import parameter

Pooling = Literal["mean", "max", "cls", "pooler", "last", "weighted"]
"""mean, max: over all tokens, special tokens included. cls: the first token's state. pooler: BERT's
map of that state. last: the last token's. weighted: a mean with learned weights."""
TokenPooling = Literal["mean", "cls", "last", "weighted"]
"""Poolings that models are trained for vectors with."""
Pooled = Literal["cls", "mean", "late"]
"""Input of a classification without a pooler: the first token's state, the mean of all tokens'
states, or, with `late`, each token's state, and the mean of the logits."""


class TokenWeights(nnx.Module):
    """One score a token, whose softmax weighs the tokens; equal weights at the beginning."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None = None):
        self.score = parameter(jnp.zeros((config.hidden_dim,), jnp.float32), "embed")


def pool_tokens(
    pooling: Pooling,
    hidden: Float[Array, "B L D"],
    counts: Bool[Array, "B L"],
    params: Any = None,
) -> Float[Array, "B D"]:
    """Pool the states of rows of one segment each, in float32; 0 for a row without tokens.

    `counts` marks the tokens that count; `params` has `pooling` for the pooling `weighted`.
    """
    if pooling == "max":
        greatest = jnp.where(counts[..., None], hidden, -jnp.inf).max(1)
        return jnp.where(counts.any(1, keepdims=True), greatest, 0.0)
    hidden, counted = hidden.astype(jnp.float32), counts.astype(jnp.float32)
    if pooling == "mean":
        weights = counted / jnp.maximum(counted.sum(1, keepdims=True), 1.0)
    elif pooling == "weighted":
        scores = hidden @ params["pooling"]["score"]
        weights = jax.nn.softmax(jnp.where(counts, scores, MASKED_SCORE), axis=-1) * counted
    else:
        last = jnp.maximum(counted.sum(1, keepdims=True) - 1, 0)
        at = last if pooling == "last" else jnp.zeros_like(last)
        weights = (jnp.arange(counted.shape[1]) == at) * counted
    return jnp.einsum("BLD,BL->BD", hidden, weights)

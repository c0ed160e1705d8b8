"""Embedding models: one vector for a text, from the states of its tokens.

    config = EmbeddingConfig("mean", dimensions=(256, 64))
    params = init_embedding_params(model, config, key, encoder=pretrained["encoder"])
    hidden = encode(model, params, tokens, type_ids, segment_ids)
    vectors = finish(config, pool_tokens(config.pooling, hidden, segment_ids > 0, params))

Parameters are a nested dict with the entry `encoder`, without pooler, and with `pooling` where the
pooling is learned. Texts are compared by the cosine of their vectors.

Source: Kusupati et al. 2022 (Matryoshka: the first numbers of a vector are a vector).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import Params, init_params
from bert_jax.model.pooling import TokenPooling, TokenWeights


@dataclass(frozen=True)
class EmbeddingConfig:
    """Pooling, length, prefixes and dimensions of the vectors of texts."""

    pooling: TokenPooling = "mean"
    """mean: the mean of all tokens' states, special tokens included. cls: the first token's state.
    last: the last token's. weighted: a mean with weights that are learned from the states."""
    normalize: bool = True
    """Whether vectors have length 1."""
    query_prefix: str = ""
    """Text put before each query."""
    document_prefix: str = ""
    """Text put before each document."""
    dimensions: tuple[int, ...] = ()
    """Numbers of leading entries that were trained as vectors of their own (Matryoshka),
    descending; empty: only the whole width."""

    def __post_init__(self) -> None:
        """Refuse dimensions that do not descend."""
        given = self.dimensions
        if any(size < 1 for size in given) or list(given) != sorted(set(given), reverse=True):
            raise UserError(
                f"embedding.dimensions is {given}; give numbers of at least 1 that descend, such "
                "as 256,128,64"
            )

    def check_width(self, width: int) -> None:
        """Refuse dimensions beyond the width of a model.

        Raises:
            UserError: Names both.
        """
        if self.dimensions and self.dimensions[0] > width:
            raise UserError(
                f"embedding.dimensions is {self.dimensions}, and the model's vectors have {width} "
                f"numbers; let all be at most {width}"
            )


PLAIN = EmbeddingConfig("mean", normalize=False)
"""Vectors of a model that was not trained for vectors."""


class EmbeddingModel(nnx.Module):
    """Encoder, and the weights of its tokens where these are learned."""

    def __init__(self, config: ModelConfig, embedding: EmbeddingConfig, rngs: nnx.Rngs):
        self.encoder = Encoder(config, rngs)
        if embedding.pooling == "weighted":
            self.pooling = TokenWeights(config)


def init_embedding_params(
    config: ModelConfig, embedding: EmbeddingConfig, key: Array, *, encoder: Params | None = None
) -> Params:
    """Make fresh parameters, except the entries of `encoder`, whose pooler is ignored."""
    params = init_params(config, key, EmbeddingModel, embedding)
    given = {name: entry for name, entry in (encoder or {}).items() if name != "pooler"}
    return {**params, "encoder": {**params["encoder"], **given}}


def finish(
    embedding: EmbeddingConfig, vectors: Float[Array, "... D"], dimensions: int = 0
) -> Float[Array, "... D2"]:
    """Cut vectors to their first numbers (0: all), and scale them to length 1 if configured."""
    vectors = vectors[..., :dimensions] if dimensions else vectors
    return unit(vectors) if embedding.normalize else vectors


def unit(vectors: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Scale vectors to length 1; a vector of zeros stays, with gradient 0."""
    squares = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))

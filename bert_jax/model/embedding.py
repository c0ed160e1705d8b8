"""Embedding models, which turn the states of a text's tokens into one vector.

    config = EmbeddingConfig("mean", dimensions=(256, 64))
    params = init_params(model, key, EmbeddingModel, config)
    hidden = encode(model, params, tokens, type_ids, segment_ids)
    pooled = pool_tokens(config.pooling, hidden, segment_ids > 0, params, model)
    vectors = finish(config, mapped(pooled, params))

Parameters are a nested dict with the entry `encoder`, without a pooler, and the entries that the
pooling reads: `pooling` for `weighted` and for linear maps, `mlm` for `splade`, and `queries` for
static queries. Vectors of texts are compared by cosine or, for `splade`, by their dot product.

Sources: Reimers and Gurevych 2019 (Sentence-BERT), section 3; Lin et al. 2017, section 2 (learned
weights of tokens); Kusupati et al. 2022 (Matryoshka: the start of a vector is a useful vector);
Formal et al. 2021 (SPLADE v2), section 3 (sparse vectors), and 3.3 for static queries.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

from bert_jax.errors import UserError
from bert_jax.model.attention.xla import MASKED_SCORE
from bert_jax.model.config import ModelConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import MaskedLMHead, vocabulary_projection
from bert_jax.model.layers import ACTIVATIONS, parameter

TokenPooling = Literal["mean", "mean_sqrt_len", "max", "cls", "last", "weighted", "splade"]
"""Poolings with which an embedding model can be trained; `POOLINGS` describes them."""
Pooling = Literal[TokenPooling, "pooler"]
"""Ways to pool the token states into one vector; `pooler` is BERT's pooler on the first state."""
POOLINGS: Mapping[str, str] = {
    "mean": "the mean of the tokens' states",
    "mean_sqrt_len": "the sum of the tokens' states over the square root of the number of tokens",
    "max": "the largest value of the tokens' states in each dimension",
    "cls": "the first token's state",
    "last": "the last token's state",
    "weighted": "the mean of the tokens' states, with learned weights",
    "splade": "sparse, a weight for each token of the vocabulary, log(1 + relu(largest logit))",
    "late": "the mean of the tokens' logits",
}
"""Descriptions of poolings, including the inputs of a classification head (`Pooled`)."""
Pooled = Literal["cls", "mean", "late"]
"""Input of a classification head without a pooler. `cls` is the first token's state and `mean` the
mean of all states. With `late` the head reads every state, and its logits are averaged."""


class TokenWeights(nnx.Module):
    """Learned vector; a softmax over its products with the token states gives the weights."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None = None):
        self.score = parameter(jnp.zeros((config.hidden_dim,), jnp.float32), "embed")


def static_vectors(
    params: Any, tokens: Integer[Array, "B L"], counts: Bool[Array, "B L"]
) -> Float[Array, "B V"]:
    """Return a vector per row: the weights of its tokens from `queries`, 0 for other tokens."""
    there = jnp.zeros((len(tokens), len(params["queries"])), bool)
    there = there.at[jnp.arange(len(tokens))[:, None], tokens].max(counts)
    return there * params["queries"]


def pool_tokens(
    pooling: Pooling, hidden: Float[Array, "B L D"], counts: Bool[Array, "B L"],
    params: Any = None, model: ModelConfig | None = None,
) -> Float[Array, "B W"]:  # fmt: skip
    """Pool the token states of each row into one vector; a row without tokens gives zeros.

    `counts` marks the tokens to pool, all of one text. `weighted` reads the entry `pooling` of
    `params`; `splade` needs `model` and reads `encoder` and `mlm`; W is then the size of the
    vocabulary. `pooler` gives the first token's state, before the pooler. The result is float32.
    """
    hidden, counted = hidden.astype(jnp.float32), counts.astype(jnp.float32)
    if pooling == "splade":
        assert model is not None
        logits = vocabulary_projection(model, params, hidden).logits()[..., : model.vocab_size]
        return jnp.log1p(jnp.max(jax.nn.relu(logits) * counted[..., None], axis=1))
    if pooling == "max":
        greatest = jnp.where(counts[..., None], hidden, -jnp.inf).max(1)
        return jnp.where(counts.any(1, keepdims=True), greatest, 0.0)
    if pooling in ("mean", "mean_sqrt_len"):
        number = jnp.maximum(counted.sum(1, keepdims=True), 1.0)
        weights = counted / (number if pooling == "mean" else jnp.sqrt(number))
    elif pooling == "weighted":
        scores = hidden @ params["pooling"]["score"]
        weights = jax.nn.softmax(jnp.where(counts, scores, MASKED_SCORE), axis=-1) * counted
    else:
        last = jnp.maximum(counted.sum(1, keepdims=True) - 1, 0)
        at = last if pooling == "last" else jnp.zeros_like(last)
        weights = (jnp.arange(counted.shape[1]) == at) * counted
    return jnp.einsum("BLD,BL->BD", hidden, weights)


@dataclass(frozen=True)
class EmbeddingConfig:
    """Settings of text vectors: pooling, normalisation, prefixes, dimensions and queries."""

    pooling: TokenPooling = "mean"
    normalize: bool = True
    """Whether vectors are scaled to length 1."""
    query_prefix: str = ""
    """Text to put before each query."""
    document_prefix: str = ""
    """Text to put before each document."""
    dimensions: tuple[int, ...] = ()
    """Descending widths to which vectors may be cut. Training adds a loss for each of these widths
    (Matryoshka); if empty, only vectors of full width have a loss."""
    static_queries: bool = False
    """Whether the weights of a query's tokens are fixed, not computed by the encoder (splade)."""

    def __post_init__(self) -> None:
        given = self.dimensions
        if any(size < 1 for size in given) or list(given) != sorted(set(given), reverse=True):
            raise UserError(
                f"embedding.dimensions is {given}; expected descending numbers of at least 1, "
                "such as 256,128,64"
            )

    @property
    def is_sparse(self) -> bool:
        """Whether vectors have a weight for each token of the vocabulary, most of them 0."""
        return self.pooling == "splade"

    def check_width(self, width: int) -> None:
        """Raise a UserError if a dimension is greater than a model's width."""
        if self.dimensions and self.dimensions[0] > width:
            raise UserError(
                f"embedding.dimensions is {self.dimensions}, but the model's vectors have {width} "
                f"numbers; expected dimensions of at most {width}"
            )


PLAIN = EmbeddingConfig("mean", normalize=False)
"""Settings for a model that was not trained as an embedding model."""


class EmbeddingModel(nnx.Module):
    """Encoder and the entries that the pooling reads."""

    def __init__(self, config: ModelConfig, embedding: EmbeddingConfig, rngs: nnx.Rngs):
        self.encoder = Encoder(config, rngs=rngs)
        if embedding.pooling == "weighted":
            self.pooling = TokenWeights(config)
        if embedding.is_sparse:
            self.mlm = MaskedLMHead(config, rngs)
        if embedding.static_queries:
            self.queries = parameter(jnp.ones((config.vocab_size,), jnp.float32), None)


def mapped(vectors: Float[Array, "B D"], params: Any) -> Float[Array, "B D2"]:
    """Apply the linear maps that follow a pooling, in float32, if `params` has maps.

    Names in `params["pooling"]["maps"]` are a number, "_" and an activation or nothing: `0_tanh`.
    """
    for name, map in sorted(params.get("pooling", {}).get("maps", {}).items()):
        vectors = jnp.matmul(vectors, map["kernel"], precision="highest") + map.get("bias", 0.0)
        activation = name.partition("_")[2]
        vectors = ACTIVATIONS[activation](vectors) if activation else vectors
    return vectors


def finish(
    embedding: EmbeddingConfig, vectors: Float[Array, "... D"], dimensions: int = 0
) -> Float[Array, "... D2"]:
    """Cut vectors to `dimensions` entries (0 keeps all), and normalise them if configured."""
    vectors = vectors[..., :dimensions] if dimensions else vectors
    return unit(vectors) if embedding.normalize else vectors


def unit(vectors: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Scale vectors to length 1; a vector of zeros stays zero."""
    squares = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))

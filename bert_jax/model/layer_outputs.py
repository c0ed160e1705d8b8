"""The inside of an encoder: the states after each layer and the weights of its attention."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.model.config import ModelConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import Params, with_params


class LayerOutputs(NamedTuple):
    """States and weights, in float32."""

    states: Float[Array, "M B L D"]
    """States after the embeddings, then after each layer: M = num_layers + 1."""
    weights: Float[Array, "N B H L L"] | None
    """Weights of each layer and head, from the row's token to the column's; None where they
    were not asked for."""


@partial(jax.jit, static_argnums=0, static_argnames="with_weights")
def layer_outputs(
    config: ModelConfig,
    params: Params,
    tokens: Integer[Array, "B L"],
    type_ids: Integer[Array, "B L"],
    segment_ids: Integer[Array, "B L"],
    *,
    with_weights: bool = False,
) -> LayerOutputs:
    """Compute states and, if wanted, attention weights of every layer, without dropout.

    The other arguments are those of `heads.encode`. A padding token attends to padding.
    """
    parts = {name: params["encoder"][name] for name in ("embeddings", "layers")}
    encoder = with_params(parts, Encoder, config)
    segment_ids = segment_ids.astype(jnp.int32)
    embedded = encoder.embeddings(tokens, type_ids, segment_ids, None)
    graphdef, stacked = nnx.split(encoder.layers)

    def apply_layer(x, layer_params):
        layer = nnx.merge(graphdef, layer_params)
        weights = layer.attention.weights(x, segment_ids) if with_weights else None
        x = layer(x, segment_ids, None, 0)
        return x, (x.astype(jnp.float32), weights)

    _, (states, weights) = jax.lax.scan(apply_layer, embedded, stacked)
    return LayerOutputs(jnp.concatenate([embedded.astype(jnp.float32)[None], states]), weights)

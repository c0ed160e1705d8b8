"""Pretraining heads, and the functions through which other packages run a model.

Outside, parameters are nested dicts of float32 arrays; NNX modules exist only while JAX traces.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.model import layers
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import Stream
from bert_jax.model.encoder import Encoder, Layer, Pooler
from bert_jax.model.layout import OnMesh
from bert_jax.model.rotation import make_context

PADDED_LOGIT = -1e30
"""Logit of columns that pad the vocabulary. It is finite, because probability 0 * -inf is NaN."""
MASKED_LM, NEXT_SENTENCE = "mlm", "nsp"
"""Keys of the pretraining heads in the parameters."""

Params = dict[str, Any]
"""Nested dict of float32 arrays."""


class Projection(NamedTuple):
    """Operands of the masked-LM head's last product: logits = states @ table.T + bias."""

    states: Float[Array, "B P E"]
    """Transformed states, in the compute type."""
    table: Float[Array, "V E"]
    """Vector of each token of the vocabulary, in the compute type."""
    bias: Float[Array, " V"]
    """Bias in float32, `PADDED_LOGIT` in the padding columns."""

    def logits(self) -> Float[Array, "B P V"]:
        """Compute the logits, in float32."""
        if self.states.dtype == jnp.float32:  # on a CPU, the gradient transposes only the states
            logits = layers.contract(self.states, self.table.T, 1, True)
        else:
            logits = layers.einsum_float32("BPE,VE->BPV", self.states, self.table)
        return layers.add_bias(logits, self.bias)


class MaskedLMHead(nnx.Module):
    """Masked-LM head: a transform, then the product with a token table (shared if `tied`)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        width, rows = config.embedding_width, config.padded_vocab_size
        if config.head_transform:
            embed: layers.AxisSizes = {"embed": config.hidden_dim}
            how: Any = {"bias": config.head_bias, "std": layers.output_std(config)}
            self.dense = layers.Affine(config, embed, {None: width}, rngs, **how)
            self.norm = layers.Norm(config, width)
        if config.decoder_bias:
            self.bias = layers.parameter(jnp.zeros((rows,), jnp.float32), "vocab")
        if not config.tied:
            kernel = layers.truncated_normal(rngs.params(), (rows, width), config.init_std)
            self.decoder = layers.parameter(kernel, "vocab", "embed")

    def __call__(self, hidden: Float[Array, "B P D"], table: Float[Array, "V E"]) -> Projection:
        """Transform states; `table`, the token embedding table, is used only if `tied`."""
        config, x = self.config, hidden
        if config.head_transform:
            activation = layers.ACTIVATIONS[config.head_activation or config.activation]
            x = self.norm(activation(self.dense(x)))
        table = table if config.tied else self.decoder[...]
        is_token = jnp.arange(config.padded_vocab_size) < config.vocab_size
        # Masking the bias (V,) instead of the logits (B, P, V) saves a pass over the logits.
        bias = self.bias[...] if config.decoder_bias else 0.0
        return Projection(x, table.astype(x.dtype), jnp.where(is_token, bias, PADDED_LOGIT))


class ReplacedHead(nnx.Module):
    """ELECTRA's head, which detects replaced tokens (Clark et al. 2020)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width = config.hidden_dim
        self.activation = config.activation
        self.dense = layers.Affine(config, {"embed": width}, {None: width}, rngs)
        self.score = layers.Affine(config, {"embed": width}, {None: 1}, rngs)

    def __call__(self, hidden: Float[Array, "B L D"]) -> Float[Array, "B L"]:
        """Compute, in float32, one logit per position; a high logit means a replaced token."""
        x = layers.ACTIVATIONS[self.activation](self.dense(hidden))
        return self.score(x)[..., 0].astype(jnp.float32)


class LinearHead(layers.Affine):
    """Affine map of states to float32 scores."""

    def __init__(self, config: ModelConfig, num_scores: int, rngs: nnx.Rngs):
        super().__init__(config, {"embed": config.hidden_dim}, {None: num_scores}, rngs)

    def __call__(self, x: Float[Array, "... D"], biased: bool = True) -> Float[Array, "... C"]:
        """Compute the scores of each position, without the bias if `biased` is false."""
        return super().__call__(x, biased).astype(jnp.float32)


class PretrainingModel(nnx.Module):
    """Encoder, masked-LM head and, if `config.pooler`, next-sentence head (Devlin et al. 2018)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.encoder = Encoder(config, pools=config.pooler, rngs=rngs)
        self.mlm = MaskedLMHead(config, rngs)
        if config.pooler:
            self.nsp = LinearHead(config, 2, rngs)


M = TypeVar("M", bound=nnx.Module)
Build = Callable[..., nnx.Module]
"""Class or function that builds a module: `build(config, *settings, rngs=...)`."""


@partial(jax.jit, static_argnums=(0, 2, 3))
def init_params(
    config: ModelConfig, key: Array, module: Build = PretrainingModel, *settings: Hashable
) -> Params:
    """Initialise the parameters of a module, by default of a `PretrainingModel`.

    Weights are drawn from a truncated normal distribution of scale `init_std`. Biases start as
    zeros and norm scales as ones. One compiled program makes all parameters. Inside a `jax.jit`
    with `out_shardings`, each device makes only its own shards.
    """
    built = module(config, *settings, rngs=nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(built, nnx.Param))


@lru_cache(maxsize=256)
def _abstract(module: Build, config: ModelConfig, *settings: Hashable) -> Any:
    """Build a module with shapes in place of arrays."""
    return nnx.eval_shape(lambda: module(config, *settings, rngs=nnx.Rngs(params=0)))


def param_shapes(
    config: ModelConfig, module: Build = PretrainingModel, *settings: Hashable
) -> Params:
    """Return the tree of `init_params` with a `ShapeDtypeStruct` in place of each array."""
    return nnx.to_pure_dict(nnx.state(_abstract(module, config, *settings), nnx.Param))


def logical_axes(
    config: ModelConfig, module: Build = PretrainingModel, *settings: Hashable
) -> Params:
    """Return the tree of `init_params` with a tuple of logical axis names in place of each array.

    Names are length, embed, heads, head_dim, mlp, vocab and layers, or None for no sharding.
    """
    axes = {}
    for path, variable in nnx.to_flat_state(nnx.state(_abstract(module, config, *settings))):
        stacked = ("layers",) if "layers" in path else ()
        axes[path] = (*stacked, *variable.get_metadata("axes"))
    return nnx.traversals.unflatten_mapping(axes)


def with_params(
    params: Params, module: Callable[..., M], config: ModelConfig, *settings: Hashable
) -> M:
    """Build a module from its parameters, for use while a function is traced."""
    return nnx.merge(nnx.graphdef(_abstract(module, config, *settings)), params)


def encode(
    config: ModelConfig,
    params: Params,
    tokens: Integer[Array, "B L"] | Float[Array, "B L E"],
    type_ids: Integer[Array, "B L"],
    segment_ids: Integer[Array, "B L"],
    stream: Stream = None,
    layout: OnMesh = None,
) -> Float[Array, "B L D"]:
    """Compute the last hidden states of all tokens, in the compute type (see `config.dtype`).

    `params` is any tree with an `encoder` entry. `tokens` are ids below `vocab_size` (not checked
    here), or vectors if there is no token table. `type_ids` are sentence types, below `num_types`.
    `segment_ids` has the segment of each token, counted from 1 in each row, and 0 for padding.
    Without a `stream`, there is no dropout. Raise a UserError if L exceeds `num_positions`.
    """
    inputs = tokens, type_ids, segment_ids, stream
    return encode_layers(config, params, *inputs, layout=layout, every=False)[-1]


def encode_layers(
    config: ModelConfig, params: Params, *inputs: Any, layout: OnMesh = None, every: bool = True
) -> tuple[Float[Array, "B L D"], ...]:
    """Compute the states before the first layer and after each layer, or only the last states.

    `inputs` are tokens, type_ids, segment_ids and, optionally, stream, as in `encode`. If `every`
    is false, the tuple has only the last states. Any final norm is applied to the last states.
    """
    layout = None if layout is None else layout.of("encoder")
    tokens, type_ids, segment_ids = inputs[:3]
    (stream,) = inputs[3:] or (None,)
    context = make_context(config, segment_ids, None, stream, layout)
    return _encoder(config, params)(tokens, type_ids, context, every)


def _encoder(config: ModelConfig, params: Params) -> Encoder:
    parts = {name: part for name, part in params["encoder"].items() if name != "pooler"}
    return with_params(parts, Encoder, config, "token" in parts.get("embeddings", {}))


def layer_projections(
    config: ModelConfig,
    params: Params,
    x: Float[Array, "B L D"],
    number: int,
    segment_ids: Integer[Array, "B L"],
    layout: OnMesh = None,
) -> tuple[Float[Array, "B L H K"], Float[Array, "B L G K"], Float[Array, "B L G K"]]:
    """Compute queries, keys and values of layer `number` (counted from 0) from its input `x`."""
    context, kind = make_context(config, segment_ids), config.layer_kind(number)
    return _layer(config, params, number, layout).projections(x, context, kind)


def _layer(config: ModelConfig, params: Params, number: int, layout: OnMesh = None) -> Layer:
    own = jax.tree.map(lambda leaf: leaf[number], params["encoder"]["layers"])
    gather = None if layout is None else layout.of("encoder").gather
    return with_params(own if gather is None else gather(own), Layer, config)


def end_norm(
    config: ModelConfig, params: Params, hidden: Float[Array, "... D"]
) -> Float[Array, "... D"]:
    """Apply the final norm to the last layer's states, if the model has one (pre-norm)."""
    if config.norm_order == "post":
        return hidden
    return with_params(params["encoder"]["final_norm"], layers.Norm, config)(hidden)


def pool(config: ModelConfig, params: Params, hidden: Float[Array, "B L D"]) -> Float[Array, "B D"]:
    """Apply the encoder's `pooler` to the first token's state, in the compute type."""
    return with_params(params["encoder"]["pooler"], Pooler, config)(hidden)


def vocabulary_projection(
    config: ModelConfig,
    params: Params,
    hidden: Float[Array, "B L D"],
    positions: Integer[Array, "B P"] | None = None,
) -> Projection:
    """Compute the operands of the masked-LM logits at `positions`, by default at all positions.

    `params` has the entries `encoder` and, if the head has parameters, `mlm`.
    """
    if positions is not None:
        hidden = jnp.take_along_axis(hidden, positions[..., None].astype(jnp.int32), axis=1)
    table = params["encoder"]["embeddings"]["token"]
    # A head without parameters (tied, no transform, no bias) may be missing from the tree.
    return with_params(params.get(MASKED_LM, {}), MaskedLMHead, config)(hidden, table)


def pair_logits(
    config: ModelConfig, params: Params, hidden: Float[Array, "B L D"]
) -> Float[Array, "B 2"]:
    """Compute next-sentence logits: entry 0 for "the second text follows", entry 1 for "not"."""
    return with_params(params[NEXT_SENTENCE], LinearHead, config, 2)(pool(config, params, hidden))


class LayerOutputs(NamedTuple):
    """States and attention weights of every layer, in float32."""

    states: Float[Array, "M B L D"]
    """States before layer 1 and after each of N layers (M = N + 1); `encode` returns the last."""
    weights: Float[Array, "N B H L L"] | None
    """Attention weights from each token (row) to each token (column); None if not requested."""


@partial(jax.jit, static_argnums=0, static_argnames="with_weights")
def layer_outputs(
    config: ModelConfig,
    params: Params,
    *inputs: Integer[Array, "B L"] | Float[Array, "B L E"],
    with_weights: bool = False,
) -> LayerOutputs:
    """Compute every layer's states and, if `with_weights`, attention weights, without dropout.

    `inputs` are tokens, types and segments as for `encode`. Padding attends only to padding.
    """
    states, weights = encode_layers(config, params, *inputs), None
    if with_weights:
        context = _encoder(config, params).embeddings.shared(make_context(config, inputs[2]))
        weights = jnp.stack([
            _layer(config, params, n).weights(states[n], context, config.layer_kind(n))
            for n in range(config.num_layers)
        ])  # fmt: skip
    return LayerOutputs(jnp.stack(states).astype(jnp.float32), weights)

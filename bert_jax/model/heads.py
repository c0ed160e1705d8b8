"""The pretraining heads, and the functions through which everything outside sees the model.

Outside this package parameters are a nested dict of float32 arrays; modules exist only while a
function below is being traced.
"""

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer, UInt32

from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream
from bert_jax.model.encoder import Encoder
from bert_jax.model.layers import ACTIVATIONS, Affine, LayerNorm, einsum_float32, parameter
from bert_jax.model.layout import Layout

PADDED_LOGIT = -1e30
"""Logit of the vocabulary's padding columns: probability exactly 0, and no 0 * inf anywhere."""

Params = dict[str, Any]
"""Nested dict of float32 arrays."""


class PretrainingLogits(NamedTuple):
    """Scores of both objectives."""

    mlm: Float[Array, "B P V"]
    """Over the padded vocabulary; the padding columns are `PADDED_LOGIT`."""
    nsp: Float[Array, "B 2"]
    """0: the second part follows the first; 1: it does not."""


class MlmHead(nnx.Module):
    """Transform, then the transposed embedding table with a bias of its own."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        width = config.embedding_width
        self.dense = Affine(config, {"embed": config.hidden_dim}, {None: width}, rngs)
        self.norm = LayerNorm(config, width)
        self.bias = parameter(jnp.zeros((config.padded_vocab_size,), jnp.float32), "vocab")

    def __call__(
        self, hidden: Float[Array, "B P D"], table: Float[Array, "V E"]
    ) -> Float[Array, "B P V"]:
        """`table` is passed, not stored: a shared variable becomes two leaves under `jax.jit`."""
        x = self.norm(ACTIVATIONS[self.config.activation](self.dense(hidden)))
        logits = einsum_float32("BPE,VE->BPV", x, table.astype(x.dtype))
        is_token = jnp.arange(self.config.padded_vocab_size) < self.config.vocab_size
        # Adding to the bias (V,) rather than selecting in the logits (B, P, V): one pass less.
        return _add_bias(logits, jnp.where(is_token, self.bias[...], PADDED_LOGIT))


@jax.custom_vjp
def _add_bias(x: Float[Array, "B P V"], bias: Float[Array, " V"]) -> Float[Array, "B P V"]:
    """`x + bias`, for wide V: its own gradient is a column sum that XLA on CPU does badly.

    320 rows of 30592 columns take 54 ms as a reduction (a tenth of a training step of mini) and
    3 ms as a product with a row of ones.
    """
    return x + bias


def _add_bias_backward(_, gradient):
    rows = gradient.reshape(-1, gradient.shape[-1])
    column_sums = jax.lax.platform_dependent(
        rows,
        cpu=lambda g: jnp.ones(g.shape[0], g.dtype) @ g,
        default=lambda g: g.sum(0),
    )
    return gradient, column_sums


_add_bias.defvjp(lambda x, bias: (_add_bias(x, bias), None), _add_bias_backward)


class ReplacedHead(nnx.Module):
    """Map, activation and one score a token: that the token was replaced (Clark et al. 2020)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width = config.hidden_dim
        self.activation = config.activation
        self.dense = Affine(config, {"embed": width}, {None: width}, rngs)
        self.score = Affine(config, {"embed": width}, {None: 1}, rngs)

    def __call__(self, hidden: Float[Array, "B L D"]) -> Float[Array, "B L"]:
        """Position by position, in float32."""
        x = ACTIVATIONS[self.activation](self.dense(hidden))
        return self.score(x)[..., 0].astype(jnp.float32)


class PretrainingModel(nnx.Module):
    """Encoder with the masked-LM and the next-sentence head (Devlin et al. 2018, section 3.1)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.encoder = Encoder(config, rngs)
        self.mlm = MlmHead(config, rngs)
        self.nsp = Affine(config, {"embed": config.hidden_dim}, {None: 2}, rngs)


@lru_cache(maxsize=32)
def _abstract(config: ModelConfig) -> PretrainingModel:
    """Build the pretraining model without its arrays."""
    model: PretrainingModel = nnx.eval_shape(lambda: PretrainingModel(config, nnx.Rngs(params=0)))
    return model


@lru_cache(maxsize=256)
def _graph(config: ModelConfig, path: tuple[str, ...]) -> Any:
    module: Any = _abstract(config)
    for name in path:
        module = getattr(module, name)
    return nnx.split(module)[0]


def part(config: ModelConfig, params: Params, *path: str) -> Any:
    """Make a module of the pretraining model from its parameters, while a function is traced.

    Args:
      config: the architecture.
      params: of that module, not of the model.
      path: names of attributes from the model to it; `encoder`, `layers` is one layer.
    """
    return nnx.merge(_graph(config, path), params)


def param_shapes(config: ModelConfig) -> Params:
    """Make the tree of `init_params` with a `ShapeDtypeStruct` in place of each array."""
    shapes: Params = nnx.to_pure_dict(nnx.state(_abstract(config), nnx.Param))
    return shapes


@partial(jax.jit, static_argnums=0)
def init_params(config: ModelConfig, key: Array) -> Params:
    """Fresh parameters: truncated normals of scale `init_std`, zero biases, unit norm scales.

    Compiled as one program; `jax.jit(init_params, static_argnums=0, out_shardings=...)` makes them
    sharded from the start.
    """
    return nnx.to_pure_dict(nnx.state(PretrainingModel(config, nnx.Rngs(params=key)), nnx.Param))


def logical_axes(config: ModelConfig) -> Params:
    """Return the tree of `init_params` with a tuple of logical axis names in place of each array.

    Names: batch length embed heads head_dim mlp vocab layers; None for an axis never sharded.
    """
    return axes_of(nnx.state(_abstract(config)))


def axes_of(state: Any) -> Params:
    """Logical axis names of the parameters of a model that has an `encoder`, as a nested dict.

    Args:
      state: of the model, abstract or not.
    """
    axes = {}
    for path, variable in nnx.to_flat_state(state):
        stacked = ("layers",) if path[:2] == ("encoder", "layers") else ()
        axes[path] = (*stacked, *variable.get_metadata("axes"))
    return nnx.traversals.unflatten_mapping(axes)


def apply_pretraining(
    config: ModelConfig,
    params: Params,
    tokens: Integer[Array, "B L"],
    type_ids: Integer[Array, "B L"],
    segment_ids: Integer[Array, "B L"],
    positions: Integer[Array, "B P"] | None = None,
    *,
    dropout_seed: UInt32[Array, ""] | None = None,
    row_index: UInt32[Array, " B"] | None = None,
    layout: Layout | None = None,
) -> PretrainingLogits:
    """Logits of both objectives, in float32.

    Args:
      config: the architecture.
      params: as from `init_params`.
      tokens: token ids, below `vocab_size` (not checked here).
      type_ids: sentence types, below `num_types`.
      segment_ids: 0 is padding, 1.. are the packed segments.
      positions: the P positions of each row whose vocabulary logits are wanted; None for all L.
      dropout_seed: different at every step; None switches dropout off.
      row_index: the rows' positions in the example stream; needed with `dropout_seed`.
      layout: of the batch on a mesh; None on one device.

    Raises:
      UserError: L is beyond `num_positions`.
    """
    hidden, pooled = encode(
        config, params, tokens, type_ids, segment_ids,
        dropout_seed=dropout_seed, row_index=row_index, layout=layout,
    )  # fmt: skip
    return PretrainingLogits(
        mlm=mlm_logits(config, params, hidden, positions),
        nsp=part(config, params["nsp"], "nsp")(pooled).astype(jnp.float32),
    )


def encode(
    config: ModelConfig,
    params: Params,
    tokens: Integer[Array, "B L"],
    type_ids: Integer[Array, "B L"],
    segment_ids: Integer[Array, "B L"],
    *,
    dropout_seed: UInt32[Array, ""] | None = None,
    row_index: UInt32[Array, " B"] | None = None,
    layout: Layout | None = None,
) -> tuple[Float[Array, "B L D"], Float[Array, "B D"]]:
    """Apply the encoder: states of all tokens and the pooled first token, in the compute type.

    `params` is any tree with an `encoder` entry, so that a fine-tuning head can lie beside it.
    The other arguments are those of `apply_pretraining`.
    """
    hidden = encode_states(
        config, params, tokens, type_ids, segment_ids,
        dropout_seed=dropout_seed, row_index=row_index, layout=layout,
    )  # fmt: skip
    return hidden, part(config, params["encoder"]["pooler"], "encoder", "pooler")(hidden)


def encode_states(
    config: ModelConfig,
    params: Params,
    tokens: Integer[Array, "B L"],
    type_ids: Integer[Array, "B L"],
    segment_ids: Integer[Array, "B L"],
    *,
    dropout_seed: UInt32[Array, ""] | None = None,
    row_index: UInt32[Array, " B"] | None = None,
    layout: Layout | None = None,
) -> Float[Array, "B L D"]:
    """Compute the states of all tokens, as `encode`; the encoder need not have a pooler."""
    parts = {name: params["encoder"][name] for name in ("embeddings", "layers")}
    encoder = nnx.merge(_without_pooler(config), parts)
    stream = _stream(dropout_seed, row_index)
    hidden: Array = encoder(tokens, type_ids, segment_ids, stream, layout)
    return hidden


@lru_cache(maxsize=32)
def _without_pooler(config: ModelConfig) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Encoder(config, nnx.Rngs(params=0), pooler=False)))[0]


def mlm_logits(
    config: ModelConfig,
    params: Params,
    hidden: Float[Array, "B L D"],
    positions: Integer[Array, "B P"] | None = None,
) -> Float[Array, "B P V"]:
    """Compute vocabulary logits at some positions, or all; `params` has `encoder` and `mlm`."""
    if positions is not None:
        hidden = jnp.take_along_axis(hidden, positions[..., None].astype(jnp.int32), axis=1)
    table = params["encoder"]["embeddings"]["token"]
    logits: Array = part(config, params["mlm"], "mlm")(hidden, table)
    return logits


@lru_cache(maxsize=32)
def _abstract_replaced(config: ModelConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: ReplacedHead(config, nnx.Rngs(params=0))))


@partial(jax.jit, static_argnums=0)
def init_replaced_head(config: ModelConfig, key: Array) -> Params:
    """Make fresh parameters of a `ReplacedHead`."""
    return nnx.to_pure_dict(nnx.state(ReplacedHead(config, nnx.Rngs(params=key)), nnx.Param))


def replaced_head_shapes(config: ModelConfig) -> Params:
    """Make the tree of `init_replaced_head` with a `ShapeDtypeStruct` in place of each array."""
    shapes: Params = nnx.to_pure_dict(_abstract_replaced(config)[1])
    return shapes


def replaced_head_axes(config: ModelConfig) -> Params:
    """Name the logical axes of each parameter of a `ReplacedHead`."""
    return axes_of(_abstract_replaced(config)[1])


def replaced_logits(
    config: ModelConfig, params: Params, hidden: Float[Array, "B L D"]
) -> Float[Array, "B L"]:
    """Compute the score of each token that it was replaced; `params` has an `rtd`."""
    logits: Array = nnx.merge(_abstract_replaced(config)[0], params["rtd"])(hidden)
    return logits


def _stream(seed, row_index) -> DropoutStream | None:
    if seed is None:
        return None
    if row_index is None:
        raise ValueError("dropout_seed without row_index: masks are keyed by the rows' positions")
    return DropoutStream(seed, row_index)

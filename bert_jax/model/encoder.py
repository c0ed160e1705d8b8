"""The encoder: embeddings, a stack of transformer layers, and the pooler.

Source: Devlin et al. 2018, section 3; Vaswani et al. 2017, section 3.1 (post-normalisation).
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.errors import UserError
from bert_jax.model.attention.attend import attend
from bert_jax.model.attention.xla import MASKED_SCORE, visible_keys
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream, dropout
from bert_jax.model.layers import (
    ACTIVATIONS,
    Affine,
    AxisSizes,
    LayerNorm,
    compute_dtype,
    einsum_float32,
    parameter,
    truncated_normal,
)
from bert_jax.model.layout import Layout, all_but_gathered

# Dropout sites: 0 is the embeddings; layer n has the three numbers from 1 + 3 n.
SITE_EMBEDDINGS = 0
SITES_PER_LAYER = 3
SITE_ATTENTION_WEIGHTS, SITE_ATTENTION_OUTPUT, SITE_MLP_OUTPUT = 1, 2, 3


def restarting_positions(segment_ids: Integer[Array, "B L"]) -> Integer[Array, "B L"]:
    """Position of each token inside its run of equal segment ids."""
    index = jax.lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


class Embeddings(nnx.Module):
    """Sum of token, position and type embeddings, normalised, with dropout.

    Tables of another width than the layers are followed by a map (Clark et al. 2020, ELECTRA).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        width = config.embedding_width

        def table(rows: int) -> Array:
            return truncated_normal(rngs.params(), (rows, width), config.init_std)

        padding = config.padded_vocab_size - config.vocab_size
        tokens = jnp.pad(table(config.vocab_size), ((0, padding), (0, 0)))
        self.token = parameter(tokens, "vocab", "embed")
        self.position = parameter(table(config.num_positions), "length", "embed")
        self.type = parameter(table(config.num_types), None, "embed")
        self.norm = LayerNorm(config, width)
        if config.projects_embeddings:
            self.project = Affine(config, {None: width}, {"embed": config.hidden_dim}, rngs)

    def __call__(
        self,
        tokens: Integer[Array, "B L"],
        type_ids: Integer[Array, "B L"],
        segment_ids: Integer[Array, "B L"],
        stream: DropoutStream | None,
    ) -> Float[Array, "B L D"]:
        """Ids are not range-checked here: JAX clamps a gather, the host checks."""
        length = tokens.shape[1]
        if length > self.config.num_positions:
            raise UserError(
                f"the sequence length {length} is beyond model.num_positions "
                f"{self.config.num_positions}: shorten the sequences or train more positions"
            )
        positions = restarting_positions(segment_ids)
        if self.config.num_types == 1:  # a lookup drops the gradient of an id out of range
            type_ids = jnp.zeros_like(type_ids)
        x = (
            self.token[...][tokens]
            + self.position[...][positions]
            + self.type[...][type_ids.astype(jnp.int32)]
        )
        x = self.norm(x).astype(compute_dtype(self.config))
        x = dropout(x, self.config.hidden_dropout_rate, stream, SITE_EMBEDDINGS)
        return self.project(x) if self.config.projects_embeddings else x


class SelfAttention(nnx.Module):
    """Multi-head self-attention with its output projection."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        embed: AxisSizes = {"embed": config.hidden_dim}
        heads: AxisSizes = {"heads": config.num_heads, "head_dim": config.head_dim}
        self.query = Affine(config, embed, heads, rngs)
        self.key = Affine(config, embed, heads, rngs)
        self.value = Affine(config, embed, heads, rngs)
        self.output = Affine(config, heads, embed, rngs)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        segment_ids: Integer[Array, "B L"],
        stream: DropoutStream | None,
        first_site: int | Integer[Array, ""],
        layout: Layout | None = None,
        places: Integer[Array, "B P"] | None = None,
    ) -> Float[Array, "B L D"] | Float[Array, "B P D"]:
        """Attend from all tokens, or from those at `places`; `first_site` numbers the dropouts."""
        config = self.config
        attended = attend(
            self.query(_taken(x, places)),
            self.key(x),
            self.value(x),
            _taken(segment_ids, places),
            segment_ids,
            dropout_rate=config.attention_dropout_rate,
            stream=stream,
            site=first_site + SITE_ATTENTION_WEIGHTS,
            impl=config.attention_impl if places is None else "xla",  # kernels want many queries
            layout=layout,
            layers=config.num_layers if config.remat == "none" else 1,
        )
        return self.output(attended)

    def weights(
        self, x: Float[Array, "B L D"], segment_ids: Integer[Array, "B L"]
    ) -> Float[Array, "B H L L"]:
        """Compute how much each token (row) attends to each (column), without dropout."""
        query, key = self.query(x), self.key(x)
        scores = einsum_float32("BLHK,BSHK->BHLS", query, key) / math.sqrt(query.shape[-1])
        visible = visible_keys(segment_ids, segment_ids)
        return jax.nn.softmax(jnp.where(visible, scores, MASKED_SCORE), axis=-1)


class Mlp(nnx.Module):
    """The position-wise feed-forward network."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.activation = config.activation
        embed: AxisSizes = {"embed": config.hidden_dim}
        mlp: AxisSizes = {"mlp": config.mlp_dim}
        self.up = Affine(config, embed, mlp, rngs)
        self.down = Affine(config, mlp, embed, rngs)

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Position by position."""
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


class Layer(nnx.Module):
    """One transformer layer: attention and feed-forward, each `norm(x + dropout(f(x)))`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.rate = config.hidden_dropout_rate
        self.attention = SelfAttention(config, rngs)
        self.attention_norm = LayerNorm(config)
        self.mlp = Mlp(config, rngs)
        self.mlp_norm = LayerNorm(config)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        segment_ids: Integer[Array, "B L"],
        stream: DropoutStream | None,
        index: int | Integer[Array, ""],
        layout: Layout | None = None,
        places: Integer[Array, "B P"] | None = None,
    ) -> Float[Array, "B L D"] | Float[Array, "B P D"]:
        """Apply the layer: compute the states at `places`, or at all, from those of all tokens.

        `index` is the layer's number in the stack; it numbers the dropout sites.
        """
        site = index * SITES_PER_LAYER
        y = self.attention(x, segment_ids, stream, site, layout, places)
        x = _taken(x, places)
        x = self.attention_norm(x + dropout(y, self.rate, stream, site + SITE_ATTENTION_OUTPUT))
        y = self.mlp(x)
        return self.mlp_norm(x + dropout(y, self.rate, stream, site + SITE_MLP_OUTPUT))


class Pooler(nnx.Module):
    """Affine map of the first token's state, and an activation (`pooler_activation`)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.activation = config.pooler_activation
        # Square: only one of the two axes can carry the name that a mesh axis is mapped to.
        self.dense = Affine(config, {"embed": config.hidden_dim}, {None: config.hidden_dim}, rngs)

    def __call__(self, hidden: Float[Array, "B L D"]) -> Float[Array, "B D"]:
        """From the first token of each row."""
        return ACTIVATIONS[self.activation](self.dense(hidden[:, 0]))


class Encoder(nnx.Module):
    """Embeddings and `num_layers` layers, which are stored stacked on axis 0."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = Embeddings(config, rngs)
        # Each layer is initialised from a key of its own.
        stack = nnx.split_rngs(splits=config.num_layers)(nnx.vmap(partial(Layer, config)))
        self.layers: Layer = stack(rngs)

    def __call__(
        self,
        tokens: Integer[Array, "B L"],
        type_ids: Integer[Array, "B L"],
        segment_ids: Integer[Array, "B L"],
        stream: DropoutStream | None = None,
        layout: Layout | None = None,
    ) -> Float[Array, "B L D"]:
        """Return the last layer's states, in the compute type."""
        segment_ids = segment_ids.astype(jnp.int32)
        gather = None if layout is None else layout.gather
        x = self.embeddings(tokens, type_ids, segment_ids, stream)
        graphdef, stacked = nnx.split(self.layers)

        def apply_layer(params, x, index):
            if layout is not None:
                # Rows stay where they are. Left to itself inside a scan, the compiler would lay
                # activations out as the layer's split parameters suggest, and move them twice.
                x = layout.constrain(x, "batch", "length", "embed")
            if gather is not None:
                params = gather(nnx.to_pure_dict(params))
            return nnx.merge(graphdef, params)(x, segment_ids, stream, index, layout)

        return _run_layers(self.config, apply_layer, stacked, x, gather is not None)


class PooledEncoder(Encoder):
    """Encoder with a pooler."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.pooler = Pooler(config, rngs)


def _run_layers(
    config: ModelConfig, apply_layer: Callable, stacked, x: Array, gathers: bool
) -> Array:
    """Run the stack: a scan, or straight code when `scan_unroll` covers all layers.

    `gathers`: layers gather their parameters; the backward pass then does it again rather than keep
    every layer's, whatever `remat` says of activations.
    """
    num_layers = config.num_layers
    straight = config.scan_unroll >= num_layers
    if config.remat != "none" or gathers:
        policy = {
            "none": all_but_gathered,
            "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            "full": jax.checkpoint_policies.nothing_saveable,
        }[config.remat]
        # A scan body cannot share expressions with its backward body, straight code can.
        apply_layer = jax.checkpoint(apply_layer, policy=policy, prevent_cse=straight)
    if straight:
        # `split`, not `stacked[n]`: its gradient is one concatenation, not a sum of padded arrays.
        leaves, tree = jax.tree.flatten(stacked)
        pieces = [jax.lax.split(leaf, (1,) * num_layers) for leaf in leaves]
        for n in range(num_layers):
            x = apply_layer(jax.tree.unflatten(tree, [p[n].squeeze(0) for p in pieces]), x, n)
        return x
    indices = jnp.arange(num_layers, dtype=jnp.uint32)
    x, _ = jax.lax.scan(
        lambda carry, layer: (apply_layer(layer[0], carry, layer[1]), None),
        x,
        (stacked, indices),
        unroll=config.scan_unroll,
    )
    return x


def _taken(x: Array, places: Integer[Array, "B P"] | None) -> Array:
    """Take the entries at `places` along axis 1; all of them for None."""
    if places is None:
        return x
    return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)

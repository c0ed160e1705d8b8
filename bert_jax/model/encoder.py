"""The encoder: embeddings, a stack of transformer layers, and the pooler.

Sources: Devlin et al. 2018, section 3; Vaswani et al. 2017, section 3.1 (post-normalisation);
Warner et al. 2024 (ModernBERT), section 2 (rotations, pre-normalisation, local layers).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.errors import UserError
from bert_jax.model.attention.attend import AttentionImpl, attend
from bert_jax.model.attention.relative import Relative, RelativeMaps, RelativePositions
from bert_jax.model.attention.xla import Asked, attention_weights, visible_keys
from bert_jax.model.config import LayerKind, ModelConfig
from bert_jax.model.dropout import Number, dropout
from bert_jax.model.layers import (
    ACTIVATIONS,
    Affine,
    AxisSizes,
    Norm,
    compute_dtype,
    gated,
    look_up,
    output_std,
    parameter,
    token_table,
    truncated_normal,
)
from bert_jax.model.layout import OnMesh, platform
from bert_jax.model.rotation import Context, restarting_positions, rotate, sinusoids
from bert_jax.model.stack import run_layers

# Dropout sites (see `dropout`): the embeddings have site 0, layer n has sites 1 + 3 n to 3 + 3 n.
SITE_EMBEDDINGS = 0
SITES_PER_LAYER = 3
SITE_ATTENTION_WEIGHTS, SITE_ATTENTION_OUTPUT, SITE_MLP_OUTPUT = 1, 2, 3


class Embeddings(nnx.Module):
    """Sum of the configured token, position and type embeddings, then norm and dropout.

    If tables and layers differ in width, a projection follows (Clark et al. 2020, ELECTRA).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, has_table: bool = True):
        """Make the tables, without a token table if inputs are vectors (`has_table` is false)."""
        self.config = config
        width = config.embedding_width

        def table(rows: int) -> Array:
            return truncated_normal(rngs.params(), (rows, width), config.init_std)

        if has_table:
            self.token = token_table(config, rngs)
        if config.positions == "learned":
            self.position = parameter(table(config.num_positions), "length", "embed")
        elif config.positions == "relative":
            self.relative = RelativePositions(config, rngs)
        if config.num_types:
            self.type = parameter(table(config.num_types), None, "embed")
        if config.embedding_norm:
            self.norm = Norm(config, width)
        if config.projects_embeddings:
            self.project = Affine(config, {None: width}, {"embed": config.hidden_dim}, rngs)

    def shared(self, context: Context) -> Context:
        """Add the embeddings of distances, which all layers share, to the context."""
        relative = self.relative() if self.config.positions == "relative" else None
        return context._replace(relative=relative)

    def __call__(
        self,
        tokens: Integer[Array, "B L"] | Float[Array, "B L E"],
        type_ids: Integer[Array, "B L"],
        context: Context,
        site: int = SITE_EMBEDDINGS,
    ) -> Float[Array, "B L D"]:
        """Embed tokens, or take vectors (B, L, E) as embeddings; ids are not checked.

        Raise a UserError if L exceeds `num_positions`.
        """
        config, length = self.config, tokens.shape[1]
        if length > config.num_positions:
            raise UserError(
                f"the sequence length {length} is beyond model.num_positions "
                f"{config.num_positions}: shorten the sequences or use a model with more positions"
            )
        x = tokens if tokens.ndim == 3 else look_up(config, self.token[...], tokens)
        if config.positions in ("learned", "sinusoidal"):
            at = context.positions
            at = restarting_positions(context.segment_ids) if at is None else at
            learned = config.positions == "learned"
            x = x + (self.position[...][at] if learned else sinusoids(at, x.shape[-1]))
        if config.num_types == 1:  # else the lookup of an id out of range would have no gradient
            type_ids = jnp.zeros_like(type_ids)
        if config.num_types:
            x = x + self.type[...][type_ids.astype(jnp.int32)]
        x = self.norm(x) if config.embedding_norm else x
        rate = config.rate_of("embedding")
        x = dropout(x.astype(compute_dtype(config)), rate, context.stream, site)
        return self.project(x) if config.projects_embeddings else x


class Attention(nnx.Module):
    """Projections of multi-head attention: query, key, value and output."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        embed: AxisSizes = {"embed": config.hidden_dim}
        heads: AxisSizes = {"heads": config.num_heads, "head_dim": config.head_dim}
        kv_heads = {**heads, "heads": config.num_kv_heads or config.num_heads}
        bias = config.attention_bias
        self.query = Affine(config, embed, heads, rngs, bias=bias)
        self.key = Affine(config, embed, kv_heads, rngs, bias=bias)
        self.value = Affine(config, embed, kv_heads, rngs, bias=bias)
        self.output = Affine(config, heads, embed, rngs, bias=bias, std=output_std(config))

    def attended(
        self, asked: Asked, context: Context, impl: AttentionImpl, biased: bool = True
    ) -> Float[Array, "B L D"]:
        """Attend with the configured dropout, and apply the output projection."""
        config = self.config
        asked = asked._replace(dropout_rate=config.attention_dropout_rate, stream=context.stream)
        layers = config.num_layers if config.remat == "none" else 1
        return self.output(attend(asked, impl, context.layout, layers), biased)


class SelfAttention(Attention):
    """Multi-head self-attention, global, local or causal, with its output projection."""

    causal = False
    """Whether a token sees only itself and the tokens before it."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        if config.positions == "relative":
            self.relative = RelativeMaps(config, rngs)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        context: Context,
        first_site: Number,
        letter: str,
        places: Integer[Array, "B P"] | None = None,
        biased: bool = True,
    ) -> Float[Array, "B L D"] | Float[Array, "B P D"]:
        """Attend from the tokens at the positions `places`, by default from all tokens.

        `letter` is the layer's kind, G or L. The layer's first dropout site is `first_site` + 1. If
        `biased` is false, the output projection's bias is not added.
        """
        segments = context.segment_ids
        angles = context.rotations.get(letter) if places is None else None
        if angles is None:
            query, key = self.queries_and_keys(x, context, letter, places)
        else:  # the implementation rotates queries and keys, maybe more cheaply
            query, key = self.query(x), self.key(x)
        asked = Asked(
            query, key, self.value(x), _taken(segments, places), segments,
            site=first_site + SITE_ATTENTION_WEIGHTS, window=self.config.window(letter),
            causal=self.causal, q_places=places, angles=angles,
            relative=self.relative_of(context, first_site),
        )  # fmt: skip
        # Kernels are slow for the few queries at `places`.
        impl: AttentionImpl = self.config.attention_impl if places is None else "xla"
        return self.attended(asked, context, impl, biased)

    def relative_of(self, context: Context, site: Number = 0) -> Relative | None:
        """Make this layer's distance keys and queries; return None without distance embeddings."""
        if context.relative is None:
            return None
        return self.relative(context.relative, self.key, self.query, context.stream, site)

    def queries_and_keys(
        self, x: Array, context: Context, letter: str, places: Array | None = None
    ) -> tuple[Float[Array, "B P H K"], Float[Array, "B L G K"]]:
        """Compute queries (at `places`, if given) and keys; rotate both if this layer uses RoPE."""
        query, key = self.query(_taken(x, places)), self.key(x)
        if letter in context.rotations:
            cos, sin = context.rotations[letter]
            query = rotate(query, _taken(cos, places), _taken(sin, places))
            key = rotate(key, cos, sin)
        return query, key

    def weights(
        self, x: Float[Array, "B L D"], context: Context, letter: str
    ) -> Float[Array, "B H L L"]:
        """Compute how much each token (row) attends to each token (column), without dropout."""
        segments, window = context.segment_ids, self.config.window(letter)
        visible = visible_keys(segments, segments, window, causal=self.causal)
        both, relative = self.queries_and_keys(x, context, letter), self.relative_of(context)
        return attention_weights(*both, visible, relative)


class Mlp(nnx.Module):
    """The position-wise feed-forward network, with a gate if `config.gated`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        embed: AxisSizes = {"embed": config.hidden_dim}
        mlp: AxisSizes = {"mlp": config.mlp_dim}
        bias = config.mlp_bias
        self.up = Affine(config, embed, mlp, rngs, bias=bias)
        self.down = Affine(config, mlp, embed, rngs, bias=bias, std=output_std(config))
        if config.gated:
            self.gate = Affine(config, embed, mlp, rngs, bias=bias)

    def __call__(self, x: Float[Array, "B L D"], biased: bool = True) -> Float[Array, "B L D"]:
        """Apply the network to each position, without the output's bias if `biased` is false."""
        activation = self.config.activation
        if self.config.gated:
            return self.down(gated(activation, self.gate(x), self.up(x)), biased)
        return self.down(ACTIVATIONS[activation](self.up(x)), biased)


class Layer(nnx.Module):
    """Transformer layer: attention and feed-forward, each with a residual and a norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.attention = SelfAttention(config, rngs)
        self.attention_norm = Norm(config)
        self.mlp = Mlp(config, rngs)
        self.mlp_norm = Norm(config)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        context: Context,
        index: Number,
        kind: LayerKind,
        places: Integer[Array, "B P"] | None = None,
    ) -> Float[Array, "B L D"] | Float[Array, "B P D"]:
        """Compute the states at the positions `places`, by default at all positions.

        `index` counts layers from 0, and determines the dropout sites.
        """
        config, site = self.config, index * SITES_PER_LAYER
        post, stream = config.norm_order == "post", context.stream
        fuses = post and self._fuses(x, context.layout)

        def ended(x: Array, y: Array, affine: Affine, norm: Norm, rate: float, at: Number) -> Array:
            """Add `y`, the output of `affine`, to `x` after dropout. If post-norm, apply `norm`."""
            if fuses:
                from bert_jax.model.fused_norm import normed_residual

                return normed_residual(x, y, affine, norm, rate, stream, at)
            x = x + dropout(y, rate, stream, at)
            return norm(x) if post else x

        normed = self._normed(x, kind)
        y = self.attention(normed, context, site, kind.letter, places, biased=not fuses)
        end = self.attention.output, self.attention_norm, config.hidden_dropout_rate
        x = ended(_taken(x, places), y, *end, site + SITE_ATTENTION_OUTPUT)
        y = self.mlp(x if post else self.mlp_norm(x), biased=not fuses)
        end = self.mlp.down, self.mlp_norm, config.rate_of("mlp")
        return ended(x, y, *end, site + SITE_MLP_OUTPUT)

    def _fuses(self, x: Float[Array, "B L D"], layout: OnMesh) -> bool:
        if platform(layout) != "gpu":
            return False
        from bert_jax.model import fused_norm  # importing Pallas is slow

        return fused_norm.supports(x, self.attention_norm, layout)

    def weights(
        self, x: Float[Array, "B L D"], context: Context, kind: LayerKind
    ) -> Float[Array, "B H L L"]:
        """Compute how much each token (row) attends to each token (column) in this layer."""
        return self.attention.weights(self._normed(x, kind), context, kind.letter)

    def projections(
        self, x: Float[Array, "B L D"], context: Context, kind: LayerKind
    ) -> tuple[Float[Array, "B L H K"], Float[Array, "B L G K"], Float[Array, "B L G K"]]:
        """Compute the queries, keys and values of this layer from its input `x`."""
        x = self._normed(x, kind)
        return *self.attention.queries_and_keys(x, context, kind.letter), self.attention.value(x)

    def _normed(self, x: Array, kind: LayerKind) -> Array:
        starts_with_norm = self.config.norm_order == "pre" and not kind.first
        return self.attention_norm(x) if starts_with_norm else x


class Pooler(nnx.Module):
    """Affine map of the first token's state, followed by an activation (`pooler_activation`)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.activation = config.pooler_activation
        # Both axes have width D, but only one is named: a mesh axis cannot split both.
        self.dense = Affine(config, {"embed": config.hidden_dim}, {None: config.hidden_dim}, rngs)

    def __call__(self, hidden: Float[Array, "B L D"]) -> Float[Array, "B D"]:
        """Apply the affine map and the activation to the state of each row's first token."""
        return ACTIVATIONS[self.activation](self.dense(hidden[:, 0]))


class Stack(nnx.Module):
    """Embeddings and `num_layers` layers, whose parameters are stacked along axis 0."""

    def __init__(
        self, config: ModelConfig, layer: Callable[..., Any], has_table: bool, rngs: nnx.Rngs
    ):
        """Make embeddings, and layers with `layer`; without `has_table`, the inputs are vectors."""
        self.config = config
        self.embeddings = Embeddings(config, rngs, has_table=has_table)
        # Each layer is initialised from a different key.
        stack = nnx.split_rngs(splits=config.num_layers)(nnx.vmap(partial(layer, config)))
        self.layers = stack(rngs)
        if config.norm_order == "pre":
            self.final_norm = Norm(config)

    def run(
        self, x: Array, context: Context, call: Callable[..., Array], *, every: bool = False
    ) -> tuple[Float[Array, "B L D"], ...]:
        """Run all layers and then `end`; return a tuple whose last entry is the output of `end`.

        `call(layer, states, index, kind)` applies one layer. With `every`, all layers are unrolled,
        and the tuple begins with the input of each layer. Otherwise, the tuple has only one entry.
        """
        config, layout = self.config, context.layout
        graphdef, stacked = nnx.split(self.layers)
        gather, frozen = (None, 0) if layout is None else (layout.gather, layout.frozen_layers)

        def apply_layer(kind, params, x, index):
            if layout is not None:
                # Keep each row on its device. Inside a scan, the compiler would otherwise place
                # activations like the layer's sharded parameters, and move them twice.
                x = layout.constrain(x, "batch", "length", "embed")
            if gather is not None:
                params = gather(nnx.to_pure_dict(params))
            return call(nnx.merge(graphdef, params), x, index, kind)

        def apply_and_keep(kind, params, states, index):
            return (*states, apply_layer(kind, params, states[-1], index))

        gathers, states = gather is not None, []
        if every:
            config = dataclasses.replace(config, scan_unroll=config.num_layers)
            *states, x = run_layers(config, apply_and_keep, stacked, (x,), gathers, frozen)
        else:
            x = run_layers(config, apply_layer, stacked, x, gathers, frozen)
        return (*states, self.end(x))

    def end(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Apply the final norm to the last layer's states, if the model has one (pre-norm)."""
        return self.final_norm(x) if self.config.norm_order == "pre" else x


class Encoder(Stack):
    """Encoder whose inputs are tokens or vectors (B, L, E); it has a pooler if `pools` is true."""

    def __init__(
        self, config: ModelConfig, has_table: bool = True, pools: bool = False, *, rngs: nnx.Rngs
    ):
        super().__init__(config, Layer, has_table, rngs)
        if pools:
            self.pooler = Pooler(config, rngs)

    def __call__(
        self, tokens: Array, type_ids: Integer[Array, "B L"], context: Context, every: bool = False
    ) -> tuple[Float[Array, "B L D"], ...]:
        """Embed tokens or vectors and run the layers; return the result of `run` (compute type)."""
        x, context = self.embeddings(tokens, type_ids, context), self.embeddings.shared(context)
        return self.run(x, context, lambda layer, x, *at: layer(x, context, *at), every=every)


def _taken(x: Array, places: Integer[Array, "B P"] | None) -> Array:
    """Take the entries of `x` at `places` along axis 1; None takes all entries."""
    if places is None:
        return x
    return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)

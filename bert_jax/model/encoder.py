"""The encoder: embeddings, a stack of transformer layers, and the pooler.

Sources: Devlin et al. 2018, section 3; Vaswani et al. 2017, section 3.1 (post-normalisation);
Warner et al. 2024 (ModernBERT), section 2 (rotations, pre-normalisation, local layers).
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

from bert_jax.errors import UserError
from bert_jax.model.attention.attend import attend
from bert_jax.model.attention.xla import MASKED_SCORE, visible_keys
from bert_jax.model.config import LayerKind, ModelConfig
from bert_jax.model.dropout import DropoutStream, dropout
from bert_jax.model.layers import (
    ACTIVATIONS,
    Affine,
    AxisSizes,
    Norm,
    compute_dtype,
    einsum_float32,
    gated,
    output_std,
    parameter,
    truncated_normal,
)
from bert_jax.model.layout import Layout
from bert_jax.model.rotation import (
    Context,
    make_context,
    restarting_positions,
    rotate,
    sinusoids,
)
from bert_jax.model.stack import run_layers

# Dropout sites: 0 is the embeddings; layer n has the three numbers from 1 + 3 n.
SITE_EMBEDDINGS = 0
SITES_PER_LAYER = 3
SITE_ATTENTION_WEIGHTS, SITE_ATTENTION_OUTPUT, SITE_MLP_OUTPUT = 1, 2, 3


class Embeddings(nnx.Module):
    """Sum of token, position and type embeddings, as far as there are any; norm and dropout.

    Tables of another width than the layers are followed by a map (Clark et al. 2020, ELECTRA).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, has_table: bool = True):
        """Make embeddings; without `has_table` they are given vectors in place of tokens."""
        self.config = config
        width = config.embedding_width

        def table(rows: int, std: float = config.init_std) -> Array:
            return truncated_normal(rngs.params(), (rows, width), std)

        if has_table:
            padding = config.padded_vocab_size - config.vocab_size
            tokens = table(config.vocab_size, config.embedding_std)
            self.token = parameter(jnp.pad(tokens, ((0, padding), (0, 0))), "vocab", "embed")
        if config.positions == "learned":
            self.position = parameter(table(config.num_positions), "length", "embed")
        if config.num_types:
            self.type = parameter(table(config.num_types), None, "embed")
        if config.embedding_norm:
            self.norm = Norm(config, width)
        if config.projects_embeddings:
            self.project = Affine(config, {None: width}, {"embed": config.hidden_dim}, rngs)

    def __call__(
        self,
        tokens: Integer[Array, "B L"] | Float[Array, "B L E"],
        type_ids: Integer[Array, "B L"],
        segment_ids: Integer[Array, "B L"],
        stream: DropoutStream | None,
        site: int = SITE_EMBEDDINGS,
        positions: Integer[Array, "B L"] | None = None,
    ) -> Float[Array, "B L D"]:
        """Embed tokens, or vectors that stand in their place.

        `positions` None: those inside the segments. Ids are not range-checked here: JAX clamps a
        gather, the host checks.
        """
        config, length = self.config, tokens.shape[1]
        if length > config.num_positions:
            raise UserError(
                f"the sequence length {length} is beyond model.num_positions "
                f"{config.num_positions}: shorten the sequences or train more positions"
            )
        x = tokens if tokens.ndim == 3 else look_up(config, self.token[...], tokens)
        if config.positions != "rope":
            at = restarting_positions(segment_ids) if positions is None else positions
            learned = config.positions == "learned"
            x = x + (self.position[...][at] if learned else sinusoids(at, x.shape[-1]))
        if config.num_types == 1:  # a lookup drops the gradient of an id out of range
            type_ids = jnp.zeros_like(type_ids)
        if config.num_types:
            x = x + self.type[...][type_ids.astype(jnp.int32)]
        x = self.norm(x) if config.embedding_norm else x
        rate = config.rate_of("embedding")
        x = dropout(x.astype(compute_dtype(config)), rate, stream, site)
        return self.project(x) if config.projects_embeddings else x


def look_up(
    config: ModelConfig, table: Float[Array, "V E"], tokens: Integer[Array, "B L"]
) -> Float[Array, "B L E"]:
    """Look tokens up in a table, and scale them as `config.scale_embeddings` says."""
    found = table[tokens]
    return found * math.sqrt(table.shape[1]) if config.scale_embeddings else found


class Attention(nnx.Module):
    """Maps of multi-head attention: queries, keys, values and the output."""

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


class SelfAttention(Attention):
    """Multi-head self-attention with its output projection, global, local or causal."""

    causal = False
    """Whether a token sees only itself and the tokens before it."""

    def __call__(
        self,
        x: Float[Array, "B L D"],
        context: Context,
        stream: DropoutStream | None,
        first_site: int | Integer[Array, ""],
        letter: str,
        layout: Layout | None = None,
        places: Integer[Array, "B P"] | None = None,
    ) -> Float[Array, "B L D"] | Float[Array, "B P D"]:
        """Attend from all tokens, or from those at `places`; `first_site` numbers the dropouts."""
        config = self.config
        angles = context.rotations.get(letter) if places is None else None
        if angles is None:
            query, key = self.queries_and_keys(x, context, letter, places)
        else:  # rotated by the implementation, which may have a cheaper way
            query, key = self.query(x), self.key(x)
        attended = attend(
            query,
            key,
            self.value(x),
            _taken(context.segment_ids, places),
            context.segment_ids,
            window=config.window(letter),
            causal=self.causal,
            q_places=places,
            angles=angles,
            dropout_rate=config.attention_dropout_rate,
            stream=stream,
            site=first_site + SITE_ATTENTION_WEIGHTS,
            impl=config.attention_impl if places is None else "xla",  # kernels want many queries
            layout=layout,
            layers=config.num_layers if config.remat == "none" else 1,
        )
        return self.output(attended)

    def queries_and_keys(
        self, x: Array, context: Context, letter: str, places: Array | None = None
    ) -> tuple[Float[Array, "B P H K"], Float[Array, "B L G K"]]:
        """Make queries, at `places` or at all, and keys, rotated where the letter's layers are."""
        query, key = self.query(_taken(x, places)), self.key(x)
        if letter in context.rotations:
            cos, sin = context.rotations[letter]
            query = rotate(query, _taken(cos, places), _taken(sin, places))
            key = rotate(key, cos, sin)
        return query, key

    def weights(
        self, x: Float[Array, "B L D"], context: Context, letter: str
    ) -> Float[Array, "B H L L"]:
        """Compute how much each token (row) attends to each (column), without dropout."""
        segments, window = context.segment_ids, self.config.window(letter)
        visible = visible_keys(segments, segments, window, causal=self.causal)
        return attention_weights(*self.queries_and_keys(x, context, letter), visible)


def attention_weights(
    query: Float[Array, "B L H K"], key: Float[Array, "B S G K"], visible: Bool[Array, "B 1 L S"]
) -> Float[Array, "B H L S"]:
    """Compute how much each query (row) attends to each key (column), in float32."""
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    scores = einsum_float32("BLHK,BSHK->BHLS", query, key) / math.sqrt(query.shape[-1])
    return jax.nn.softmax(jnp.where(visible, scores, MASKED_SCORE), axis=-1)


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

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Position by position."""
        activation = self.config.activation
        if self.config.gated:
            return self.down(gated(activation, self.gate(x), self.up(x)))
        return self.down(ACTIVATIONS[activation](self.up(x)))


class Layer(nnx.Module):
    """One transformer layer: attention and feed-forward, each with a norm and a residual.

    The norm follows the sum, norm(x + dropout(f(x))), or comes first, x + dropout(f(norm(x))), as
    `config.norm_order` says.
    """

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
        stream: DropoutStream | None,
        index: int | Integer[Array, ""],
        kind: LayerKind,
        layout: Layout | None = None,
        places: Integer[Array, "B P"] | None = None,
    ) -> Float[Array, "B L D"] | Float[Array, "B P D"]:
        """Apply the layer: compute the states at `places`, or at all, from all tokens' states.

        `index` is the layer's number in the stack; it numbers the dropout sites.
        """
        config, site = self.config, index * SITES_PER_LAYER
        post = config.norm_order == "post"
        y = self.attention(
            self._normed(x, kind), context, stream, site, kind.letter, layout, places
        )
        y = dropout(y, config.hidden_dropout_rate, stream, site + SITE_ATTENTION_OUTPUT)
        x = _taken(x, places) + y
        x = self.attention_norm(x) if post else x
        y = self.mlp(x if post else self.mlp_norm(x))
        x = x + dropout(y, config.rate_of("mlp"), stream, site + SITE_MLP_OUTPUT)
        return self.mlp_norm(x) if post else x

    def weights(
        self, x: Float[Array, "B L D"], context: Context, kind: LayerKind
    ) -> Float[Array, "B H L L"]:
        """Compute how much each token (row) attends to each (column) in this layer."""
        return self.attention.weights(self._normed(x, kind), context, kind.letter)

    def projections(
        self, x: Float[Array, "B L D"], context: Context, kind: LayerKind
    ) -> tuple[Float[Array, "B L H K"], Float[Array, "B L G K"], Float[Array, "B L G K"]]:
        """Make the queries, keys and values of this layer."""
        x = self._normed(x, kind)
        return (
            *self.attention.queries_and_keys(x, context, kind.letter), self.attention.value(x)
        )  # fmt: skip

    def _normed(self, x: Array, kind: LayerKind) -> Array:
        """Make the input of the attention."""
        starts_with_norm = self.config.norm_order == "pre" and not kind.first
        return self.attention_norm(x) if starts_with_norm else x


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

    has_table = True
    """Whether the encoder reads tokens, and not vectors."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = Embeddings(config, rngs, has_table=self.has_table)
        # Each layer is initialised from a key of its own.
        stack = nnx.split_rngs(splits=config.num_layers)(nnx.vmap(partial(Layer, config)))
        self.layers: Layer = stack(rngs)
        if config.norm_order == "pre":
            self.final_norm = Norm(config)

    def __call__(
        self,
        tokens: Integer[Array, "B L"] | Float[Array, "B L E"],
        type_ids: Integer[Array, "B L"],
        segment_ids: Integer[Array, "B L"],
        stream: DropoutStream | None = None,
        layout: Layout | None = None,
        *,
        every: bool = False,
    ) -> tuple[Float[Array, "B L D"], ...]:
        """Compute the last states, with `every` after those before each layer, in the compute type.

        The last states are normed. With `every` the layers are straight code, whatever
        `scan_unroll` says.
        """
        context = make_context(self.config, segment_ids)
        gather = None if layout is None else layout.gather
        x = self.embeddings(tokens, type_ids, context.segment_ids, stream)
        graphdef, stacked = nnx.split(self.layers)

        def apply_layer(kind, params, x, index):
            if layout is not None:
                # Rows stay where they are. Left to itself inside a scan, the compiler would lay
                # activations out as the layer's split parameters suggest, and move them twice.
                x = layout.constrain(x, "batch", "length", "embed")
            if gather is not None:
                params = gather(nnx.to_pure_dict(params))
            return nnx.merge(graphdef, params)(x, context, stream, index, kind, layout)

        def apply_and_keep(kind, params, states, index):
            return (*states, apply_layer(kind, params, states[-1], index))

        config, gathers = self.config, gather is not None
        frozen = 0 if layout is None else layout.frozen_layers
        if every:
            config = dataclasses.replace(config, scan_unroll=config.num_layers)
            *states, x = run_layers(config, apply_and_keep, stacked, (x,), gathers, frozen)
        else:
            states, x = [], run_layers(config, apply_layer, stacked, x, gathers, frozen)
        return (*states, self.final_norm(x) if config.norm_order == "pre" else x)


class VectorEncoder(Encoder):
    """Encoder of vectors (B, L, E) that stand in the place of embedded tokens."""

    has_table = False


class PooledEncoder(Encoder):
    """Encoder with a pooler."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.pooler = Pooler(config, rngs)


def _taken(x: Array, places: Integer[Array, "B P"] | None) -> Array:
    """Take the entries at `places` along axis 1; all of them for None."""
    if places is None:
        return x
    return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)

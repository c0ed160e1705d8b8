"""The decoder of a Transformer: causal self-attention, cross-attention and feed-forward.

Source: Vaswani et al. 2017, section 3.1; norms, gates, rotations and shared keys as in the encoder.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

from bert_jax.model import encoder
from bert_jax.model.attention.xla import MASKED_SCORE, Asked, attention_weights, visible_keys
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import Number, Stream, dropout
from bert_jax.model.layers import Norm, einsum_float32
from bert_jax.model.layout import OnMesh
from bert_jax.model.rotation import Context, make_context

SITE_DECODER = 1 << 17
"""Dropout site of the decoder's embeddings; layer n has five sites from SITE_DECODER + 1 + 5 n."""
SITES_PER_LAYER = 5
SITE_CROSS_WEIGHTS, SITE_CROSS_OUTPUT = 4, 5  # after the three sites of an encoder's layer

Attend = Callable[[Array], Array]
"""Function that applies one of a layer's two attentions to the layer's states."""
_GLOBAL = "G"  # letter of all layers of a decoder


class Source(NamedTuple):
    """Encoded source, which cross-attention reads."""

    states: Float[Array, "B S D"]
    segment_ids: Integer[Array, "B S"]
    """Segment of each token; 0 is padding. A target token sees the source of its own segment."""


class Memory(NamedTuple):
    """Cached keys and values of one layer, for G heads of width D.

    Cross-attention caches the S source tokens. Self-attention caches the target tokens of all K
    beams, where S is K times the number of steps: step t writes the slots from t * K on. Reordering
    the beams moves no slots; the mask `Visible.target` says which slots belong to a beam.
    """

    keys: Float[Array, "B G D S"]
    values: Float[Array, "B G S D"]


class Visible(NamedTuple):
    """Masks of the slots that each beam sees in the memories of target and source."""

    target: Bool[Array, "B K S"]
    """Slots with the tokens of each beam."""
    source: Bool[Array, "B 1 S"]
    """Slots with the tokens of the source, the same for all beams."""


def memory_of(keys: Float[Array, "B S G D"], values: Float[Array, "B S G D"]) -> Memory:
    """Transpose keys and values into the layout of a `Memory`."""
    return Memory(keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2))


def attend_slots(
    query: Float[Array, "B K H D"], memory: Memory, visible: Bool[Array, "B C S"]
) -> Float[Array, "B K H D"]:
    """Attend from one token of each of K beams to a memory; C is K, or 1 for a shared mask."""
    keys, values = memory
    rows, beams, heads, dim = query.shape
    groups = keys.shape[1]
    shape = rows, beams, groups, heads // groups, dim
    grouped = query.reshape(shape).swapaxes(1, 2).reshape(rows, groups, -1, dim)
    scores = einsum_float32("BGQD,BGDS->BGQS", grouped, keys) / math.sqrt(dim)
    seen = jnp.repeat(visible, grouped.shape[2] // visible.shape[1], axis=1)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, MASKED_SCORE), axis=-1)
    attended = jnp.einsum("BGQS,BGSD->BGQD", weights.astype(values.dtype), values)
    return attended.reshape(rows, groups, beams, -1, dim).swapaxes(1, 2).reshape(query.shape)


class CausalSelfAttention(encoder.SelfAttention):
    """Multi-head self-attention from a token to itself and to earlier tokens."""

    causal = True

    def step(
        self,
        x: Float[Array, "R 1 D"],
        context: Context,
        memory: Memory,
        visible: Bool[Array, "B K S"],
        at: Integer[Array, ""],
    ) -> tuple[Float[Array, "R 1 D"], Memory]:
        """Attend from the token of step `at` in R = B * K beams; also return the new memory."""
        beams = visible.shape[:2]

        def apart(vectors: Float[Array, "R 1 H D"]) -> Float[Array, "B K H D"]:
            return vectors.reshape(*beams, *vectors.shape[2:])

        def written(slots: Array, new: Array, axis: int) -> Array:
            new = new.astype(slots.dtype)
            return jax.lax.dynamic_update_slice_in_dim(slots, new, at * beams[1], axis)

        query, key = self.queries_and_keys(x, context, _GLOBAL)
        new = memory_of(apart(key), apart(self.value(x)))
        memory = Memory(written(memory.keys, new.keys, 3), written(memory.values, new.values, 2))
        attended = attend_slots(apart(query), memory, visible)
        return self.output(attended.reshape(query.shape)), memory


class CrossAttention(encoder.Attention):
    """Multi-head attention from target tokens to source tokens."""

    def step(
        self, x: Float[Array, "R 1 D"], memory: Memory, visible: Bool[Array, "B 1 S"]
    ) -> Float[Array, "R 1 D"]:
        """Attend from one token of each of R = B * K beams."""
        query = self.query(x)
        beams = query.reshape(len(visible), -1, *query.shape[2:])
        return self.output(attend_slots(beams, memory, visible).reshape(query.shape))

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, source: Source, site: Number = 0
    ) -> Float[Array, "B T D"]:
        """Attend from all target tokens to the source."""
        query, key, value = self.query(x), self.key(source.states), self.value(source.states)
        asked = Asked(query, key, value, context.segment_ids, source.segment_ids, site=site)
        return self.attended(asked, context, self.config.attention_impl)


class DecoderLayer(nnx.Module):
    """Self-attention, cross-attention and feed-forward, each with a norm and a residual."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.attention = CausalSelfAttention(config, rngs)
        self.attention_norm = Norm(config)
        self.cross = CrossAttention(config, rngs)
        self.cross_norm = Norm(config)
        self.mlp = encoder.Mlp(config, rngs)
        self.mlp_norm = Norm(config)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, source: Source, index: Number
    ) -> Float[Array, "B T D"]:
        """Apply the layer to all positions. `index`, counted from 0, sets the dropout sites."""
        site = SITE_DECODER + index * SITES_PER_LAYER
        cross_site = site + SITE_CROSS_WEIGHTS
        attend_target = partial(self.attention, context=context, first_site=site, letter=_GLOBAL)
        attend_source = partial(self.cross, context=context, source=source, site=cross_site)
        return self._joined(x, attend_target, attend_source, context.stream, site)

    def step(
        self,
        x: Float[Array, "R 1 D"],
        context: Context,
        target: Memory,
        source: Memory,
        visible: Visible,
        at: Integer[Array, ""],
    ) -> tuple[Float[Array, "R 1 D"], Memory]:
        """Apply the layer to one token of each of R = B * K beams; also return the new memory."""
        written = target

        def attend_target(y: Array) -> Array:
            nonlocal written
            y, written = self.attention.step(y, context, target, visible.target, at)
            return y

        attend_source = partial(self.cross.step, memory=source, visible=visible.source)
        return self._joined(x, attend_target, attend_source, None, 0), written

    def weights(
        self, x: Float[Array, "B T D"], context: Context, source: Source
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B H T T"], Float[Array, "B H T S"]]:
        """Apply the layer without dropout; also return the weights of both attentions."""
        found = []

        def attend_target(y: Array) -> Array:
            found.append(self.attention.weights(y, context, _GLOBAL))
            return self.attention(y, context, 0, _GLOBAL)

        def attend_source(y: Array) -> Array:
            visible = visible_keys(context.segment_ids, source.segment_ids)
            query, key = self.cross.query(y), self.cross.key(source.states)
            found.append(attention_weights(query, key, visible))
            return self.cross(y, context, source)

        x = self._joined(x, attend_target, attend_source, None, 0)
        return x, found[0], found[1]

    def _joined(
        self, x: Array, attend_target: Attend, attend_source: Attend, stream: Stream, site: Number
    ) -> Array:
        """Apply the attentions and the feed-forward, each with dropout, residual and norm."""
        hidden, mlp = self.config.hidden_dropout_rate, self.config.rate_of("mlp")
        post = self.config.norm_order == "post"
        for part, norm, rate, name in (
            (attend_target, self.attention_norm, hidden, encoder.SITE_ATTENTION_OUTPUT),
            (attend_source, self.cross_norm, hidden, SITE_CROSS_OUTPUT),
            (self.mlp, self.mlp_norm, mlp, encoder.SITE_MLP_OUTPUT),
        ):
            y = dropout(part(x if post else norm(x)), rate, stream, site + name)
            x = norm(x + y) if post else x + y
        return x


class Decoder(encoder.Stack):
    """Stack of decoder layers, which reads the embedding vectors of tokens."""

    def __init__(self, config: ModelConfig, has_table: bool, rngs: nnx.Rngs):
        """Make a decoder. Without `has_table`, the encoder's table embeds the target tokens."""
        super().__init__(config, DecoderLayer, has_table, rngs)

    def __call__(
        self,
        vectors: Float[Array, "B T E"],
        segment_ids: Integer[Array, "B T"],
        source: Source,
        stream: Stream = None,
        layout: OnMesh = None,
    ) -> Float[Array, "B T D"]:
        """Compute the last states, after any final norm, from the token embeddings `vectors`."""
        context = make_context(self.config, segment_ids, None, stream, layout)
        x = self._embedded(vectors, context)
        return self.run(x, context, lambda layer, x, at, _: layer(x, context, source, at))[-1]

    def weights(
        self, vectors: Float[Array, "B T E"], segment_ids: Integer[Array, "B T"], source: Source
    ) -> tuple[Float[Array, "M B H T T"], Float[Array, "M B H T S"]]:
        """Compute the weights of both attentions of every layer, without dropout."""
        context = make_context(self.config, segment_ids)
        x, found = self._embedded(vectors, context), []
        for layer in self.each_layer():
            x, *both = layer.weights(x, context, source)
            found.append(both)
        target, cross = (jnp.stack(weights) for weights in zip(*found, strict=True))
        return target, cross

    def step(
        self,
        vectors: Float[Array, "R 1 E"],
        target: list[Memory],
        source: list[Memory],
        visible: Visible,
        at: Integer[Array, ""],
    ) -> tuple[Float[Array, "R 1 D"], list[Memory]]:
        """Compute last states and new memories for one token of each of R = B * K beams."""
        places = jnp.broadcast_to(at, (len(vectors), 1))
        context = make_context(self.config, jnp.ones_like(places), places)
        x, written = self._embedded(vectors, context), []
        for layer, own, cross in zip(self.each_layer(), target, source, strict=True):
            x, memory = layer.step(x, context, own, cross, visible, at)
            written.append(memory)
        return self.end(x), written

    def each_layer(self) -> list[DecoderLayer]:
        """Return the layers of the stack as separate modules, from the bottom layer up."""
        graphdef, stacked = nnx.split(self.layers)
        return [
            nnx.merge(graphdef, jax.tree.map(lambda leaf, n=n: leaf[n], stacked))
            for n in range(self.config.num_layers)
        ]

    def _embedded(self, vectors: Array, context: Context) -> Array:
        return self.embeddings(vectors, jnp.zeros_like(context.segment_ids), context, SITE_DECODER)

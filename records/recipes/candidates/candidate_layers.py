"""Encoders for the candidates: the package's pre-norm layers without dropout, with changes."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.model.attention.attend import attend
from bert_jax.model.attention.xla import Asked
from bert_jax.model.config import LayerKind, ModelConfig
from bert_jax.model.encoder import Layer, Stack
from bert_jax.model.heads import MaskedLMHead
from bert_jax.model.layers import parameter
from bert_jax.model.rotation import Context

CHANGES = "qk_norm", "gates", "value_residual", "embedding_shortcut", "squared_relu"


def unit_rms(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """Divide vectors by the root mean square of their entries."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


class CandidateLayer(Layer):
    """Pre-norm layer with some of `CHANGES`.

    - `qk_norm`: queries and keys are divided by their root mean square, and scaled (Henry et al.
      2020; Dehghani et al. 2023).
    - `gates`: each head's output is multiplied by 2 sigmoid(g(x)), which begins at 1 (Qiu et al.
      2025, gate after attention, one per head).
    - `value_residual`: values are a learned mix of the layer's and the first layer's values, half
      of each at first (Zhou et al. 2024).
    - `embedding_shortcut`: a layer's input is a learned mix of its input and the embeddings.
    - `squared_relu`: the feed-forward network is down(relu(up(x))^2) (So et al. 2021).
    """

    def __init__(self, changes: tuple[str, ...], config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.changes, width = changes, config.head_dim
        if "qk_norm" in changes:
            self.query_scale = parameter(jnp.ones(width), "head_dim")
            self.key_scale = parameter(jnp.ones(width), "head_dim")
        if "gates" in changes:
            zeros = jnp.zeros((config.hidden_dim, config.num_heads))
            self.gate = parameter(zeros, "embed", "heads")
        if "value_residual" in changes:
            self.value_shares = parameter(jnp.array([0.5, 0.5]), None)
        if "embedding_shortcut" in changes:
            self.input_shares = parameter(jnp.array([1.0, 0.0]), None)

    def __call__(  # type: ignore[override]
        self,
        x: Float[Array, "B L D"],
        context: Context,
        index: int,
        kind: LayerKind,
        first: tuple[Float[Array, "B L D"], Float[Array, "B L H K"]],
        causal: bool,
    ) -> Float[Array, "B L D"]:
        """Compute the states; `first` has the embeddings and the first layer's values."""
        attention, changes = self.attention, self.changes
        if "embedding_shortcut" in changes:
            x = self.input_shares[0] * x + self.input_shares[1] * first[0]
        normed = self._normed(x, kind)
        query, key, value = attention.query(normed), attention.key(normed), attention.value(normed)
        if "qk_norm" in changes:
            query = unit_rms(query) * self.query_scale[...]
            key = unit_rms(key) * self.key_scale[...]
        if "value_residual" in changes:
            value = self.value_shares[0] * value + self.value_shares[1] * first[1]
        segments = context.segment_ids
        asked = Asked(
            query, key, value, segments, segments, causal=causal,
            angles=context.rotations.get(kind.letter),
        )  # fmt: skip
        heads = attend(asked, "auto", context.layout, self.config.num_layers)
        if "gates" in changes:
            heads *= 2 * jax.nn.sigmoid(normed @ self.gate[...])[..., None]
        x = x + attention.output(heads)
        normed = self.mlp_norm(x)
        if "squared_relu" in changes:
            return x + self.mlp.down(jnp.square(jax.nn.relu(self.mlp.up(normed))))
        return x + self.mlp(normed)


class CandidateEncoder(Stack):
    """Encoder of `CandidateLayer`s, all unrolled."""

    def __init__(self, config: ModelConfig, changes: tuple[str, ...], *, rngs: nnx.Rngs):
        super().__init__(config, partial(CandidateLayer, changes), has_table=True, rngs=rngs)

    def __call__(
        self, tokens: Integer[Array, "B L"], types: Array, context: Context, causal: bool
    ) -> Float[Array, "B L D"]:
        """Compute the last states; with `causal`, a token sees no later token."""
        x = self.embeddings(tokens, types, context)
        graphdef, stacked = nnx.split(self.layers)
        bottom = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], stacked))
        first = x, bottom.attention.value(bottom._normed(x, self.config.layer_kind(0)))
        *_, x = self.run(x, context, lambda layer, x, *at: layer(x, context, *at, first, causal))
        return x


class CandidateModel(nnx.Module):
    """Module: a `CandidateEncoder` with the package's masked-LM head."""

    def __init__(self, config: ModelConfig, changes: tuple[str, ...], *, rngs: nnx.Rngs):
        self.encoder = CandidateEncoder(config, changes, rngs=rngs)
        self.mlm = MaskedLMHead(config, rngs)

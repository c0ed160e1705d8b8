"""Attention of one state over the states of a source: the forms before the Transformer.

With a state s and source states h_i, scores are s^T h_i (dot), s^T W h_i (multiplicative; Luong et
al. 2015, section 3.1) or v^T tanh(W1 h_i + W2 s) (additive; Bahdanau et al. 2014, appendix A.1.2).
Values that depend only on the source are computed once per source.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.model.attention.xla import MASKED_SCORE
from bert_jax.model.config import ModelConfig
from bert_jax.model.layers import Affine, compute_dtype, einsum_float32, parameter, truncated_normal
from bert_jax.model.rotation import restarting_positions
from bert_jax.model.seq2seq.cells import looped

Score = Literal["none", "dot", "multiplicative", "additive"]


class Memory(NamedTuple):
    """Source as the states of a decoder see it."""

    states: Float[Array, "B S D"]
    """States of the encoder, float32."""
    keys: Float[Array, "B S A"]
    """Part of the scores that depends only on the source, float32."""
    segment_ids: Integer[Array, "B S"]
    places: Integer[Array, "B S"]
    """Place of each token in its segment."""
    last_places: Integer[Array, "B S"]
    """Place of the last token of each token's segment."""


class Places(NamedTuple):
    """Target places, as far as attention is concerned."""

    segment_ids: Integer[Array, "... B K"]
    at: Integer[Array, "... B K"]
    """Place of each token in its segment, from 0."""


Attend = Callable[[Array, Places], tuple[Array, Array]]
"""Map of states (B, K, D) and their places to contexts (B, K, D) and weights (B, K, S)."""


class Alignment(nnx.Module):
    """Weights of the scores; a window of D source places on both sides, if it is not 0."""

    def __init__(self, config: ModelConfig, score: Score, window: int, rngs: nnx.Rngs):
        width = config.hidden_dim
        self.score, self.window, self.dtype = score, window, compute_dtype(config)
        if score != "dot":
            self.key = Affine(config, {"embed": width}, {None: width}, rngs, bias=False)
        if score == "additive":
            self.query = Affine(config, {"embed": width}, {None: width}, rngs)
            scale = truncated_normal(rngs.params(), (width,), config.init_std)
            self.vector = parameter(scale, None)

    def remember(self, states: Float[Array, "B S D"], segment_ids: Integer[Array, "B S"]) -> Memory:
        """Make what all target places read of a source, once."""
        keys = states if self.score == "dot" else self.key(states)
        places = restarting_positions(segment_ids)
        to_end = restarting_positions(segment_ids[:, ::-1])[:, ::-1]
        states, keys = states.astype(jnp.float32), keys.astype(jnp.float32)
        return Memory(states, keys, segment_ids, places, places + to_end)

    def reader(self, memory: Memory) -> Attend:
        """Return the attention over a source, for use in a loop.

        The loop's backward pass computes the weights again: the tanh of (B, K, S, A) sums at every
        place would be the largest array of a step.
        """
        if self.score == "additive":
            project, vector = looped(self.query, self.dtype), self.vector[...]

        def scores(states: Array) -> Array:
            if self.score == "additive":
                sums = memory.keys[:, None] + project(states)[:, :, None]
                return jnp.tanh(sums) @ vector
            used = states.astype(self.dtype), memory.keys.astype(self.dtype)
            return einsum_float32("BKD,BSD->BKS", *used)

        def attend(states: Array, places: Places) -> tuple[Array, Array]:
            visible = places.segment_ids[..., None] == memory.segment_ids[:, None]
            if self.window:
                visible &= self._in_window(memory, places)
            weights = jax.nn.softmax(jnp.where(visible, scores(states), MASKED_SCORE), axis=-1)
            used = weights.astype(self.dtype), memory.states.astype(self.dtype)
            return einsum_float32("BKS,BSD->BKD", *used), weights

        again: Attend = jax.checkpoint(attend, prevent_cse=False)
        return again

    def _in_window(self, memory: Memory, places: Places) -> Array:
        """Say which source places lie around the target's: Luong et al. 2015, 3.2, local-m.

        Target place t, which predicts token t of its text, looks at token t of the source's text,
        which [CLS] precedes; beyond the end of the source at the last place.
        """
        centre = jnp.minimum(places.at[..., None] + 1, memory.last_places[:, None])
        return jnp.abs(memory.places[:, None] - centre) <= self.window

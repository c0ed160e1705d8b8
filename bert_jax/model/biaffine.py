"""The biaffine head: a score for each pair of a word and a possible head, and for each relation.

Source: Dozat and Manning 2017 (Deep Biaffine Attention for Neural Dependency Parsing), section 2.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from bert_jax.model.config import ModelConfig
from bert_jax.model.layers import Affine, einsum_float32

ARC_WIDTH, RELATION_WIDTH = 512, 128
"""Widths of the vectors that are compared; 500 and 100 in the paper."""
SLOPE = 0.1  # of the leaky rectifier below 0


class BiaffineHead(nnx.Module):
    """Scores of arcs and of their relations, between any two positions of a row."""

    def __init__(self, config: ModelConfig, num_relations: int, rngs: nnx.Rngs):
        def vectors(width: int) -> Affine:
            return Affine(config, {"embed": config.hidden_dim}, {None: width}, rngs)

        self.num_relations = num_relations
        self.arc_word, self.arc_head = vectors(ARC_WIDTH), vectors(ARC_WIDTH)
        self.relation_word, self.relation_head = vectors(RELATION_WIDTH), vectors(RELATION_WIDTH)
        # A bias of these maps is a score of only the head.
        self.arc = Affine(config, {None: ARC_WIDTH}, {None: ARC_WIDTH}, rngs)
        size = num_relations * RELATION_WIDTH
        self.relation = Affine(config, {None: RELATION_WIDTH}, {None: size}, rngs)
        self.relation_of_word = Affine(config, {None: RELATION_WIDTH}, {None: num_relations}, rngs)

    def __call__(self, hidden: Float[Array, "B L D"]) -> Float[Array, "B L L C"]:
        """Score position j as the head of position i, in float32.

        Entry 0 of the last axis is the score of the arc, entry 1 + r the score of its relation r.
        """
        word, head = _rectified(self.arc_word(hidden)), _rectified(self.arc_head(hidden))
        arcs = einsum_float32("bie,bje->bij", self.arc(word), head)
        word, head = _rectified(self.relation_word(hidden)), _rectified(self.relation_head(hidden))
        mapped = self.relation(word).reshape(*word.shape[:-1], self.num_relations, RELATION_WIDTH)
        relations = einsum_float32("bire,bje->bijr", mapped, head)
        relations += self.relation_of_word(word).astype(jnp.float32)[:, :, None]
        return jnp.concatenate([arcs[..., None], relations], axis=-1)


def biaffine_flops(config: ModelConfig, length: int, num_relations: int) -> int:
    """Count the operations of the head in the forward pass of one row."""
    vectors = 2 * length * config.hidden_dim * 2 * (ARC_WIDTH + RELATION_WIDTH)
    arcs = 2 * length * ARC_WIDTH * (ARC_WIDTH + length)
    relations = 2 * length * RELATION_WIDTH * num_relations * (RELATION_WIDTH + length + 1)
    return vectors + arcs + relations


def _rectified(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.leaky_relu(x, SLOPE)

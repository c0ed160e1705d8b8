"""Settings of recurrent encoders and decoders, and the dropout of their layers."""

from dataclasses import dataclass
from typing import Annotated, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from bert_jax.config.bounds import AtLeast, Bounded, Natural, Or
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream, keep_at
from bert_jax.model.seq2seq.alignment import Score
from bert_jax.model.seq2seq.cells import CellName
from bert_jax.model.seq2seq.network import Tying

# Dropout sites, after the Transformer's sites: single sites, then one per layer of each side.
SITE_SOURCE, SITE_TARGET, SITE_READOUT = range(1 << 18, (1 << 18) + 3)
SITE_SOURCE_LAYERS, SITE_TARGET_LAYERS = (1 << 18) + (1 << 8), (1 << 18) + (1 << 9)


@dataclass(frozen=True)
class RecurrentConfig(Bounded, section="objective"):
    """Shape of a recurrent encoder and decoder, beside the widths and layers of `model`."""

    cell: CellName = "gru"
    """Cell of all layers: tanh, gru or lstm."""
    attention: Score = "additive"
    """Scores of the attention; none: the decoder has one vector of the source."""
    wiring: Literal["before", "after"] = "before"
    """State that attends. before: the bottom layer's previous one; the context is an input of every
    layer (Bahdanau et al. 2014; GNMT). after: the top layer's current one; the readout is an input
    of the next place (Luong et al. 2015). Without attention, the use of the source's vector: an
    input of every layer (Cho et al. 2014), or only the first state (Sutskever et al. 2014)."""
    bidirectional: bool = True
    """Whether the encoder's first layer reads both ways, each with half of the width."""
    num_decoder_layers: Natural = 0
    """Layers of the decoder; 0: model.num_layers."""
    residual_from: Annotated[int, AtLeast(2), Or(0, "none")] = 0
    """First layer, counted from 1, whose input is added to its output; 0: none, GNMT: 3. The very
    first layer reads embeddings."""
    window: Natural = 0
    """Largest distance of a visible source place from the target's place; 0: all are visible."""
    tying: Tying = "all"
    """Users of one table: source, target and output (all), target and output (output), or none."""

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built."""
        super().__post_init__()
        if self.window and not self.attends:
            raise UserError(
                f"objective.window is {self.window}, but objective.attention is 'none'; expected "
                "window 0, or attention dot, multiplicative or additive"
            )

    @property
    def attends(self) -> bool:
        """Whether there is attention."""
        return self.attention != "none"

    @property
    def feeds(self) -> bool:
        """Whether the readout of a place is an input of the next."""
        return self.attends and self.wiring == "after"

    def is_residual(self, layer: int) -> bool:
        """Say whether a layer, counted from 0, adds its input to its output."""
        return bool(self.residual_from) and layer + 1 >= self.residual_from


Mask = Float[Array, "L B *beams D"] | None
"""Factors of a dropout, 0 or 1 / (1 - rate), with places on axis 0; None: nothing is dropped."""


def dropout_mask(config: ModelConfig, stream: DropoutStream | None, site: int, length: int) -> Mask:
    """Make the mask between two layers."""
    rate = config.hidden_dropout_rate
    if stream is None or not rate:
        return None
    places, units = (jnp.arange(n, dtype=jnp.uint32) for n in (length, config.hidden_dim))
    rows = stream.row_index[:, None]
    kept = keep_at(rate, stream.seed, site, rows, places[:, None, None], units)
    return jnp.where(kept, jnp.float32(1 / (1 - rate)), 0.0)


def drop(x: Float[Array, "... D"], mask: Mask) -> Float[Array, "... D"]:
    """Drop states by a mask that broadcasts against them."""
    return x if mask is None else (x.astype(jnp.float32) * mask).astype(x.dtype)

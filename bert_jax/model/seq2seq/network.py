"""The interface of a network that reads a source sequence and generates a target sequence.

Training calls `logits` for all target positions at once (teacher forcing). Beam search calls
`start`, and then `step` for each token. Both agree: `step` with token k returns what `logits`
returns at position k. Search, evaluation, the attention page and export use only this interface.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jaxtyping import Array, Float, Integer

from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import Stream
from bert_jax.model.heads import Build, init_params, logical_axes
from bert_jax.model.layout import OnMesh

Tree = Any
"""Nested dict of arrays."""
Tying = Literal["all", "output", "none"]
"""Sharing of token tables. `all`: source, target and output share one table. `output`: target and
output share one table, and the source has another. `none`: three separate tables."""


class Side(NamedTuple):
    """Packed rows of sources or of targets."""

    tokens: Integer[Array, "B L"] | Float[Array, "B L F"]
    """Tokens of sources ([CLS] text [SEP]) or of targets ([CLS] text, the decoder's input). Sources
    are vectors if the network reads vectors."""
    segment_ids: Integer[Array, "B L"]
    """Segment of each token; 0 is padding. In a row, source and target segment n form a pair."""


class Cache(NamedTuple):
    """State of a beam search after some tokens."""

    shared: Tree
    """Arrays (B, ...) that all beams of a source read; they are never tiled or reordered."""
    beams: Tree
    """Arrays (B, K, ...) of the K beams; they are reordered along axis 1."""


class Weights(NamedTuple):
    """Float32 attention weights, whose rows sum to 1. A kind that the network lacks is None."""

    encoder: Float[Array, "N B H S S"] | None
    """Weights from a source token to source tokens."""
    decoder: Float[Array, "M B H T T"] | None
    """Weights from a target token to itself and earlier target tokens."""
    cross: Float[Array, "M B H T S"] | None
    """Weights from a target token to source tokens."""


@dataclass(frozen=True)
class Network(ABC):
    """Encoder and decoder, as pure functions of nested dicts of float32 arrays."""

    model: ModelConfig
    """Vocabulary, widths, layers of the encoder, dropout rates and compute type."""
    forces_end: bool = field(default=False, kw_only=True)
    """Whether a search adds the end token, free of cost, to hypotheses of the maximum length."""

    @abstractmethod
    def parts(self) -> tuple[Build, Any]:
        """Return the class of the module that holds all parameters, and the module's settings."""

    def init(self, key: Array) -> Tree:
        """Make fresh parameters."""
        return init_params(self.model, key, *self.parts())

    def axes(self) -> Tree:
        """Return the names of each parameter's logical axes (see `heads.logical_axes`)."""
        return logical_axes(self.model, *self.parts())

    @abstractmethod
    def logits(
        self, params: Tree, source: Side, target: Side, stream: Stream = None, layout: OnMesh = None
    ) -> Float[Array, "B T V"]:
        """Compute the float32 logits of the token after each target position.

        V is `padded_vocab_size`; columns that stand for no token are `PADDED_LOGIT`. A target token
        sees itself, the earlier target tokens and all source tokens of its segment.
        """

    @abstractmethod
    def start(self, params: Tree, source: Side, num_beams: int, max_length: int) -> Cache:
        """Encode a source per row (segment 1, padding 0); allocate `max_length` steps of cache."""

    @abstractmethod
    def step(
        self, params: Tree, cache: Cache, tokens: Integer[Array, "B K"]
    ) -> tuple[Float[Array, "B K V"], Cache]:
        """Add a token to each beam ([CLS] first), and compute float32 logits of the next token."""

    @abstractmethod
    def weights(self, params: Tree, source: Side, target: Side) -> Weights:
        """Compute the attention weights of a teacher-forced pass, without dropout."""

    @abstractmethod
    def flops(self, source_length: int, target_length: int) -> int:
        """Count a training step's floating-point operations for one row of these lengths."""

"""The interface of a network that reads a source and writes a target.

Training calls `logits`, for all target places at once (teacher forcing). Search calls `start` and
`step`, one token at a time. Both compute the same: `step` after k tokens gives the logits that
`logits` gives at place k. Search, evaluation, the attention page and export know networks only
through this interface.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxtyping import Array, Float, Integer

from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import Stream
from bert_jax.model.heads import Build, init_params, logical_axes
from bert_jax.model.layout import OnMesh

Tree = Any
"""Nested dict of arrays."""
Tying = Literal["all", "output", "none"]
"""Shared token tables: `all` (source, target, output), `output` (target, output), `none`."""


class Side(NamedTuple):
    """Packed rows of one side, source or target."""

    tokens: Integer[Array, "B L"] | Float[Array, "B L F"]
    """Source: [CLS] text [SEP], or vectors if the network reads vectors; target: [CLS] text, the
    decoder's input."""
    segment_ids: Integer[Array, "B L"]
    """Segment of each token; 0: padding. A source and a target with the same number are a pair."""


class Cache(NamedTuple):
    """State of a search after some tokens."""

    shared: Tree
    """Arrays (B, ...) that all beams of a source read; they are never tiled or reordered."""
    beams: Tree
    """Arrays (B, K, ...) of the K beams; they are reordered along axis 1."""


class Weights(NamedTuple):
    """Attention weights, float32, whose rows sum to 1; None: the network has no such attention."""

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

    @abstractmethod
    def parts(self) -> tuple[Build, Any]:
        """Return the module class of all parameters, and the module's settings."""

    def init(self, key: Array) -> Tree:
        """Make fresh parameters."""
        return init_params(self.model, key, *self.parts())

    def axes(self) -> Tree:
        """Name the logical axes of each parameter (see `parallel.sharding.RULES`)."""
        return logical_axes(self.model, *self.parts())

    @abstractmethod
    def logits(
        self, params: Tree, source: Side, target: Side, stream: Stream = None, layout: OnMesh = None
    ) -> Float[Array, "B T V"]:
        """Compute the logits of the token after each target place, float32.

        V is `padded_vocab_size`; columns that stand for no token are `PADDED_LOGIT`. A target place
        sees itself, the earlier target places of its segment and the segment's source places.
        """

    @abstractmethod
    def start(self, params: Tree, source: Side, num_beams: int, max_length: int) -> Cache:
        """Encode one source per row (segment id 1, padding 0); make room for `max_length` steps."""

    @abstractmethod
    def step(
        self, params: Tree, cache: Cache, tokens: Integer[Array, "B K"]
    ) -> tuple[Float[Array, "B K V"], Cache]:
        """Add a token to each beam ([CLS] first); compute the next token's logits, float32."""

    @abstractmethod
    def weights(self, params: Tree, source: Side, target: Side) -> Weights:
        """Compute the attention weights of a teacher-forced pass, without dropout."""

    @abstractmethod
    def flops(self, source_length: int, target_length: int) -> int:
        """Count a training step's floating-point operations for one row of these lengths."""

"""The Transformer with an encoder and a decoder (Vaswani et al. 2017).

The encoder has the same parameters as a pretrained masked-LM encoder. A decoder layer is an encoder
layer with cross-attention between self-attention and feed-forward. The output is a masked-LM head.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import Stream
from bert_jax.model.encoder import Encoder
from bert_jax.model.flops import TRAIN_OVER_FORWARD, decoder_flops, encoder_flops, vocabulary_flops
from bert_jax.model.heads import Build, MaskedLMHead, encode, layer_outputs, with_params
from bert_jax.model.layers import Affine, compute_dtype, look_up
from bert_jax.model.layout import OnMesh
from bert_jax.model.seq2seq.decoder import Decoder, Source, Visible, memory_of
from bert_jax.model.seq2seq.network import Cache, Network, Side, Tying, Weights


class FeatureMap(Affine):
    """Affine map of vectors to the width of the embeddings."""

    def __init__(self, config: ModelConfig, feature_dim: int, rngs: nnx.Rngs):
        super().__init__(config, {None: feature_dim}, {"embed": config.embedding_width}, rngs)


class _Transformer(nnx.Module):
    """Parameters of encoder, decoder and output."""

    def __init__(self, config: ModelConfig, network: "TransformerNetwork", rngs: nnx.Rngs):
        features = network.feature_dim
        if features:
            self.features = FeatureMap(config, features, rngs)
        self.encoder = Encoder(config, not features, rngs=rngs)
        self.decoder = Decoder(network.decoder, network.tying != "all", rngs)
        self.output = MaskedLMHead(network.decoder, rngs)


@dataclass(frozen=True)
class TransformerNetwork(Network):
    """Encoder and decoder made of attention layers, and `output`, a masked-LM head."""

    num_decoder_layers: int = 0
    """Number of decoder layers; 0 means as many as the encoder has."""
    tying: Tying = "all"
    feature_dim: int = 0
    """Width of the vectors (B, S, F) that the encoder reads; 0 means that it reads tokens."""

    def __post_init__(self) -> None:
        if self.model.positions == "relative":
            raise UserError(
                "model.positions is 'relative', which a decoder does not have; expected 'learned', "
                "'rope' or 'sinusoidal'"
            )
        if self.feature_dim and self.tying == "all":
            raise UserError(
                f"TransformerNetwork.feature_dim is {self.feature_dim}, so the encoder reads "
                "vectors and has no token table to share; set tying to 'output' or 'none'"
            )
        if self.model.projects_embeddings and not self.model.head_transform:
            raise UserError(
                f"model.embedding_dim is {self.model.embedding_dim}, but model.hidden_dim is "
                f"{self.model.hidden_dim}, so the decoder's states must be mapped to the width of "
                "the token table: set model.head_transform to True"
            )

    @property
    def decoder(self) -> ModelConfig:
        """Architecture of the decoder: the encoder's, with global layers and no token types."""
        layers, tied = self.num_decoder_layers or self.model.num_layers, self.tying != "none"
        return dataclasses.replace(
            self.model, num_layers=layers, tied=tied,
            num_types=0, attention_pattern="G", first_norm=True,
        )  # fmt: skip

    def parts(self) -> tuple[Build, "TransformerNetwork"]:
        """Return the class of the module that holds all parameters, and the module's settings."""
        return _Transformer, self

    def logits(
        self, params: Any, source: Side, target: Side, stream: Stream = None, layout: OnMesh = None
    ) -> Float[Array, "B T V"]:
        """Compute the float32 logits of the token after each target position."""
        read = self._read(params, source, stream, layout)
        layout = None if layout is None else layout.of("decoder")
        vectors = self._looked_up(params, target.tokens)
        states = self._decoder(params)(vectors, target.segment_ids, read, stream, layout)
        return self._output(params, states)

    def start(self, params: Any, source: Side, num_beams: int, max_length: int) -> Cache:
        """Encode one source per row, and allocate `max_length` tokens per beam.

        Raise a UserError if `max_length` is beyond `num_positions`.
        """
        decoder = self.decoder
        if max_length > decoder.num_positions:
            raise UserError(
                f"the target length {max_length} is beyond model.num_positions "
                f"{decoder.num_positions}: shorten the targets or use a model with more positions"
            )
        states, segment_ids = self._read(params, source)
        attentions = [layer.cross for layer in self._decoder(params).each_layer()]
        memories = [memory_of(cross.key(states), cross.value(states)) for cross in attentions]
        heads = decoder.num_kv_heads or decoder.num_heads
        slots = len(states), max_length * num_beams, heads, decoder.head_dim
        empty = jnp.zeros(slots, compute_dtype(decoder))
        beams = len(states), num_beams
        target = [memory_of(empty, empty)] * decoder.num_layers
        return Cache(
            shared={"source": memories, "segment_ids": segment_ids, "target": target},
            beams={
                # (B, K, T): the beam that wrote each token of this beam; -1 if no token yet.
                "writers": jnp.full((*beams, max_length), -1, jnp.int32),
                # All beams have the same length.
                "length": jnp.zeros(beams, jnp.int32),
            },
        )

    def step(
        self, params: Any, cache: Cache, tokens: Integer[Array, "B K"]
    ) -> tuple[Float[Array, "B K V"], Cache]:
        """Add a token to each beam ([CLS] first), and compute float32 logits of the next token."""
        shared, length = cache.shared, cache.beams["length"]
        at, numbers = length[0, 0], jnp.arange(tokens.shape[1])
        writers = cache.beams["writers"].at[:, :, at].set(numbers)
        own = (writers[..., None] == numbers).reshape(*tokens.shape, -1)
        vectors = self._looked_up(params, tokens.reshape(-1, 1))
        visible = Visible(own, (shared["segment_ids"] == 1)[:, None])
        memories = shared["target"], shared["source"]
        states, target = self._decoder(params).step(vectors, *memories, visible, at)
        logits = self._output(params, states.reshape(*tokens.shape, -1))
        beams = {"writers": writers, "length": length + 1}
        return logits, Cache({**shared, "target": target}, beams)

    def weights(self, params: Any, source: Side, target: Side) -> Weights:
        """Compute the attention weights of a teacher-forced pass, without dropout."""
        inputs = self._inputs(params, source)
        outputs = layer_outputs(self.model, params, *inputs, with_weights=True)
        states = outputs.states[-1].astype(compute_dtype(self.model))
        vectors = self._looked_up(params, target.tokens)
        read = Source(states, inputs[2])
        weights = self._decoder(params).weights(vectors, target.segment_ids, read)
        return Weights(outputs.weights, *weights)

    def decoder_from(self, encoder: Any, head: Any) -> Any:
        """Make `decoder` (without cross-attention) and `output` from a masked LM's parameters."""
        embeddings = dict(encoder.get("embeddings", {}))
        if "type" in embeddings and "position" in embeddings:
            # A decoder has no token types: all its tokens count as the first type.
            embeddings["position"] = embeddings["position"] + embeddings["type"][0]
        layers = jax.tree.map(lambda leaf: leaf[: self.decoder.num_layers], encoder["layers"])
        return {
            "decoder": {**encoder, "embeddings": embeddings, "layers": layers},
            "output": {"decoder": embeddings["token"], **head},
        }

    def flops(self, source_length: int, target_length: int) -> int:
        """Count a training step's floating-point operations for one row of these lengths."""
        read = encoder_flops(self.model, source_length)
        read += 2 * source_length * self.feature_dim * self.model.embedding_width
        written = decoder_flops(self.decoder, source_length, target_length)
        return TRAIN_OVER_FORWARD * (read + written + vocabulary_flops(self.decoder, target_length))

    def _inputs(self, params: Any, source: Side) -> tuple[Array, Array, Array]:
        """Return the encoder's inputs for a source: tokens or vectors, types and segments."""
        segment_ids, tokens = jnp.asarray(source.segment_ids, jnp.int32), source.tokens
        if self.feature_dim:
            features = with_params(params["features"], FeatureMap, self.model, self.feature_dim)
            tokens = features(jnp.asarray(tokens, compute_dtype(self.model)))
        return tokens, jnp.zeros_like(segment_ids), segment_ids

    def _read(
        self, params: Any, source: Side, stream: Stream = None, layout: OnMesh = None
    ) -> Source:
        inputs = self._inputs(params, source)
        return Source(encode(self.model, params, *inputs, stream, layout), inputs[2])

    def _decoder(self, params: Any) -> Decoder:
        return with_params(params["decoder"], Decoder, self.decoder, self.tying != "all")

    def _table(self, params: Any) -> Array:
        return params["encoder" if self.tying == "all" else "decoder"]["embeddings"]["token"]

    def _looked_up(self, params: Any, tokens: Integer[Array, "B T"]) -> Float[Array, "B T E"]:
        return look_up(self.decoder, self._table(params), tokens)

    def _output(self, params: Any, states: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        head = with_params(params.get("output", {}), MaskedLMHead, self.decoder)
        return head(states, self._table(params)).logits()

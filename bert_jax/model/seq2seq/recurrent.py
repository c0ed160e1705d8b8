"""Recurrent networks for sequence to sequence, as used before the Transformer."""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer
from typing_extensions import override

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import Stream, dropout
from bert_jax.model.flops import TRAIN_OVER_FORWARD, vocabulary_flops
from bert_jax.model.heads import Build, MaskedLMHead, with_params
from bert_jax.model.layers import compute_dtype, look_up
from bert_jax.model.layout import OnMesh
from bert_jax.model.rotation import restarting_positions
from bert_jax.model.seq2seq.cells import CELLS, Restart
from bert_jax.model.seq2seq.network import Cache, Network, Side, Tree, Weights
from bert_jax.model.seq2seq.recurrent_layers import (
    SITE_READOUT,
    SITE_SOURCE,
    SITE_TARGET,
    Decoded,
    Memory,
    Places,
    RecurrentConfig,
    RecurrentDecoder,
    RecurrentEncoder,
    TokenTable,
    readout_inputs,
)


class Recurrent(nnx.Module):
    """Parameters of encoder, decoder and output, including their token tables."""

    def __init__(self, config: ModelConfig, settings: RecurrentConfig, rngs: nnx.Rngs):
        self.config, self.settings = config, settings
        self.encoder = RecurrentEncoder(config, settings, rngs)
        self.decoder = RecurrentDecoder(config, settings, rngs)
        # The readout is as wide as the token table, so the head needs no transform.
        head = replace(config, head_transform=False, decoder_bias=True)
        self.output = MaskedLMHead(replace(head, tied=settings.tying != "none"), rngs)

    def read(self, source: Side, stream: Stream = None) -> Float[Array, "B S D"]:
        """Compute the encoder's states, in the compute type."""
        x = self._embed(self.encoder.embeddings, source.tokens, stream, SITE_SOURCE)
        return self.encoder(x.swapaxes(0, 1), source.segment_ids.T, stream).swapaxes(0, 1)

    def embed_target(self, tokens: Array, stream: Stream = None) -> Float[Array, "B T E"]:
        """Embed the decoder's tokens, in the compute type."""
        return self._embed(self._target_table, tokens, stream, SITE_TARGET)

    def memory(
        self, states: Float[Array, "B S D"], source: Side, summary: Float[Array, "*places D"]
    ) -> Memory | Float[Array, "*places D"]:
        """Return the decoder's view of the source: a `Memory` with attention, else `summary`."""
        if not self.settings.attends:
            return summary
        return self.decoder.attention.remember(states, source.segment_ids)

    def write(self, readout: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Compute logits from the decoder's readout."""
        return self.output(readout, self._target_table.token[...]).logits()

    @property
    def _target_table(self) -> TokenTable:
        return (self.encoder if self.settings.tying == "all" else self.decoder).embeddings

    def _embed(self, table: TokenTable, tokens: Array, stream: Stream, site: int) -> Array:
        x = look_up(self.config, table.token[...], tokens).astype(compute_dtype(self.config))
        return dropout(x, self.config.rate_of("embedding"), stream, site)


@dataclass(frozen=True)
class RecurrentNetwork(Network):
    """Recurrent encoder and decoder, with or without attention."""

    settings: RecurrentConfig = field(default_factory=RecurrentConfig)
    """Kind of the cells and connections between them."""

    def __post_init__(self) -> None:
        if self.settings.bidirectional and self.model.hidden_dim % 2:
            raise UserError(
                f"model.hidden_dim is {self.model.hidden_dim}; with objective.bidirectional it "
                "must be even, because each direction has half the width"
            )

    @override
    def parts(self) -> tuple[Build, RecurrentConfig]:
        return Recurrent, self.settings

    @override
    def logits(
        self, params: Tree, source: Side, target: Side, stream: Stream = None, layout: OnMesh = None
    ) -> Float[Array, "B T V"]:
        module = self._module(params)
        readout = self._decoded(module, source, target, stream).readout[:, :, 0].swapaxes(0, 1)
        if layout is not None:
            readout = layout.constrain(readout, "batch", "length", "embed")
        readout = dropout(readout, self.model.hidden_dropout_rate, stream, SITE_READOUT)
        return module.write(readout)

    @override
    def start(self, params: Tree, source: Side, num_beams: int, max_length: int) -> Cache:
        module = self._module(params)
        states = module.read(source)
        one = jnp.ones((len(states), 1), source.segment_ids.dtype)
        summary = module.encoder.summary(states, source.segment_ids, one)
        beams = {"carry": module.decoder.begin(summary), "length": jnp.zeros(one.shape, jnp.int32)}
        repeated = jax.tree.map(partial(jnp.repeat, repeats=num_beams, axis=1), beams)
        return Cache(module.memory(states, source, summary), repeated)

    @override
    def step(
        self, params: Tree, cache: Cache, tokens: Integer[Array, "B K"]
    ) -> tuple[Float[Array, "B K V"], Cache]:
        module, source, length = self._module(params), cache.shared, cache.beams["length"]
        if not self.settings.attends:
            source = jnp.broadcast_to(source, (*tokens.shape, self.model.hidden_dim))[None]
        places = Places(jnp.ones_like(length)[None], length[None])
        x = module.embed_target(tokens)[None]
        decoded = module.decoder(x, source, places, cache.beams["carry"])
        beams = {"carry": decoded.carry, "length": length + 1}
        return module.write(decoded.readout[0]), Cache(cache.shared, beams)

    @override
    def weights(self, params: Tree, source: Side, target: Side) -> Weights:
        found = self._decoded(self._module(params), source, target).weights
        cross = None if found is None else found.transpose(1, 2, 0, 3)[None]
        return Weights(None, None, cross)

    @override
    def flops(self, source_length: int, target_length: int) -> int:
        config, settings, s, t = self.model, self.settings, source_length, target_length
        d, e, kind = config.hidden_dim, config.embedding_width, CELLS[settings.cell]
        layers = settings.num_decoder_layers or config.num_layers
        # Inputs and states of all layers, then the context or the readout that is fed back.
        first = e + d // 2 if settings.bidirectional else e + d
        read = kind.num_gates * d * (first + (config.num_layers - 1) * 2 * d)
        added = layers * d if settings.wiring == "before" else settings.feeds * e
        written = kind.num_gates * d * (e + (2 * layers - 1) * d + added)
        begun = layers * kind.num_parts * d * d
        out = e * readout_inputs(config, settings)
        keys = {"none": 0, "dot": 0, "multiplicative": s, "additive": s + t}[settings.attention]
        seen = settings.attends * 2 * s * t * d
        products = s * read + t * (written + begun + out) + keys * d * d + seen
        head = vocabulary_flops(replace(config, head_transform=False), t)
        return TRAIN_OVER_FORWARD * (2 * products + head)

    def _module(self, params: Tree) -> Recurrent:
        return with_params(params, Recurrent, self.model, self.settings)

    def _decoded(
        self, module: Recurrent, source: Side, target: Side, stream: Stream = None
    ) -> Decoded:
        """Run encoder and decoder over all positions of packed rows."""

        def by_place(x: Array) -> Array:
            return x.swapaxes(0, 1)[:, :, None]

        states, segment_ids = module.read(source, stream), target.segment_ids
        summary = by_place(module.encoder.summary(states, source.segment_ids, segment_ids))
        index = restarting_positions(segment_ids)
        places = Places(by_place(segment_ids), by_place(index))
        x = by_place(module.embed_target(target.tokens, stream))
        memory, fresh = module.memory(states, source, summary), module.decoder.begin(summary)
        carry, restart = jax.tree.map(lambda x: x[0], fresh), Restart(by_place(index == 0), fresh)
        return module.decoder(x, memory, places, carry, restart, stream)

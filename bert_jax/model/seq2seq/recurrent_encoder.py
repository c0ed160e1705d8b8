"""Recurrent encoder over packed rows, places on axis 0.

Sources: Schuster & Paliwal 1997 (both directions); Wu et al. 2016 (GNMT), section 3 (only the first
layer reads both ways, residuals between the upper ones).
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream
from bert_jax.model.layers import parameter, truncated_normal
from bert_jax.model.seq2seq.cells import Cell, Restart, run
from bert_jax.model.seq2seq.recurrent_config import (
    SITE_SOURCE_LAYERS,
    RecurrentConfig,
    drop,
    dropout_mask,
)


class TokenTable(nnx.Module):
    """Table of token embeddings; the rows that pad the vocabulary are zeros."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape = config.vocab_size, config.embedding_width
        rows = truncated_normal(rngs.params(), shape, config.embedding_std)
        padding = config.padded_vocab_size - config.vocab_size
        self.token = parameter(jnp.pad(rows, ((0, padding), (0, 0))), "vocab", "embed")


class RecurrentEncoder(nnx.Module):
    """Layers of cells; the first layer may read both ways."""

    def __init__(self, config: ModelConfig, settings: RecurrentConfig, rngs: nnx.Rngs):
        self.config, self.settings = config, settings
        width, table = config.hidden_dim, config.embedding_width
        self.embeddings = TokenTable(config, rngs)
        if settings.bidirectional:
            self.forward1 = Cell(config, settings.cell, table, width // 2, rngs)
            self.backward1 = Cell(config, settings.cell, table, width // 2, rngs)
        for n in range(settings.bidirectional, config.num_layers):
            inputs = width if n else table
            setattr(self, f"layer{n + 1}", Cell(config, settings.cell, inputs, width, rngs))

    def __call__(
        self,
        x: Float[Array, "S B E"],
        segment_ids: Integer[Array, "S B"],
        stream: DropoutStream | None = None,
    ) -> Float[Array, "S B D"]:
        """Return the states of the last layer at all places; each segment begins from zeros."""
        changes = segment_ids[1:] != segment_ids[:-1]
        begins = Restart(jnp.pad(changes, ((1, 0), (0, 0)), constant_values=True))
        ends = Restart(jnp.pad(changes, ((0, 1), (0, 0)), constant_values=True))

        def read(cell: Cell, x: Array, reverse: bool = False) -> Array:
            restart = ends if reverse else begins
            return run(cell, cell.input(x), cell.zeros(x.shape[1]), restart, reverse=reverse)[0]

        if self.settings.bidirectional:
            both = read(self.forward1, x), read(self.backward1, x, reverse=True)
            x = jnp.concatenate(both, axis=-1)
        for n in range(self.settings.bidirectional, self.config.num_layers):
            mask = dropout_mask(self.config, stream, SITE_SOURCE_LAYERS + n, len(x)) if n else None
            y = read(getattr(self, f"layer{n + 1}"), drop(x, mask))
            x = x + y if self.settings.is_residual(n) else y
        return x

    def summary(
        self,
        states: Float[Array, "B S D"],
        segment_ids: Integer[Array, "B S"],
        wanted: Integer[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Take the last states of wanted segments, of each direction where it ends."""
        index = jnp.arange(segment_ids.shape[1])
        is_own = wanted[..., None] == segment_ids[:, None]
        ends = jnp.max(jnp.where(is_own, index, 0), axis=-1)
        last = jnp.take_along_axis(states, ends[..., None], axis=1)
        if self.config.num_layers > 1 or not self.settings.bidirectional:
            return last
        begins = jnp.min(jnp.where(is_own, index, index[-1]), axis=-1)
        first = jnp.take_along_axis(states, begins[..., None], axis=1)
        half = self.config.hidden_dim // 2
        return jnp.concatenate((last[..., :half], first[..., half:]), axis=-1)

"""Recurrent decoder over packed rows, places on axis 0, beams on axis 2.

Sources: Sutskever et al. 2014 and Cho et al. 2014 (one vector of the source), Bahdanau et al. 2014
(attention by the previous state), Luong et al. 2015 (attention by the current state, its result
fed to the next place), Wu et al. 2016 (GNMT: the context in every layer).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream
from bert_jax.model.layers import Affine
from bert_jax.model.seq2seq.alignment import Alignment, Memory, Places
from bert_jax.model.seq2seq.cells import Cell, Restart, State, looped, run
from bert_jax.model.seq2seq.recurrent_config import (
    SITE_TARGET_LAYERS,
    RecurrentConfig,
    drop,
    dropout_mask,
)
from bert_jax.model.seq2seq.recurrent_encoder import TokenTable


class Carry(NamedTuple):
    """Everything a decoder hands from one place to the next, float32."""

    states: tuple[State, ...]
    """State of each layer, (..., B, K, D)."""
    fed: Float[Array, "... E"] | None
    """Readout of the place before, (..., B, K, E), where the wiring feeds it back."""


class Decoded(NamedTuple):
    """Results of a decoder's way along target places."""

    readout: Float[Array, "T B K E"]
    """Vectors that the output table maps to logits."""
    carry: Carry
    """Carry after the last place."""
    weights: Float[Array, "T B K S"] | None
    """Weights of the attention, float32; None without attention."""


def readout_inputs(config: ModelConfig, settings: RecurrentConfig) -> int:
    """Return the width of what the readout is made of: state, context and, `before`, embedding."""
    context = config.hidden_dim * (settings.feeds or settings.wiring == "before")
    embedding = config.embedding_width * (settings.wiring == "before")
    return config.hidden_dim + context + embedding


class RecurrentDecoder(nnx.Module):
    """Layers of cells that read a target and, if there is attention, look at a source."""

    def __init__(self, config: ModelConfig, settings: RecurrentConfig, rngs: nnx.Rngs):
        self.config, self.settings = config, settings
        width, table = config.hidden_dim, config.embedding_width
        if settings.tying != "all":
            self.embeddings = TokenTable(config, rngs)
        self.count = settings.num_decoder_layers or config.num_layers
        for n in range(self.count):
            fed = table if settings.feeds and n == 0 else 0
            context = width if settings.wiring == "before" else fed
            inputs = width if n else table
            cell = Cell(config, settings.cell, inputs, width, rngs, context)
            setattr(self, f"layer{n + 1}", cell)
        vectors = self.count * cell.kind.num_parts
        self.start = Affine(config, {"embed": width}, {None: vectors * width}, rngs)
        if settings.attends:
            self.attention = Alignment(config, settings.attention, settings.window, rngs)
        read = readout_inputs(config, settings)
        self.readout = Affine(config, {"embed": read}, {None: table}, rngs)

    @property
    def cells(self) -> list[Cell]:
        """Cells of the layers, from the bottom."""
        return [getattr(self, f"layer{n + 1}") for n in range(self.count)]

    def begin(self, summary: Float[Array, "... D"]) -> Carry:
        """Make what comes before the first place of a segment from the summary of its source."""
        made = jnp.tanh(self.start(summary).astype(jnp.float32))
        vectors = iter(jnp.split(made, made.shape[-1] // self.config.hidden_dim, axis=-1))
        states = tuple(
            tuple(next(vectors) for _ in range(cell.kind.num_parts)) for cell in self.cells
        )
        fed = jnp.zeros((*summary.shape[:-1], self.config.embedding_width), jnp.float32)
        return Carry(states, fed if self.settings.feeds else None)

    def __call__(
        self,
        x: Float[Array, "T B K E"],
        source: Memory | Float[Array, "T B K D"],
        places: Places,
        carry: Carry,
        restart: Restart | None = None,
        stream: DropoutStream | None = None,
    ) -> Decoded:
        """Take the decoder along target places.

        Args:
          x: embeddings of the tokens.
          source: what attention looks at; without attention the source's summary at each place.
          places: places of the tokens.
          carry: what comes before the first place.
          restart: places where segments begin, each with a `Carry`; None: none does.
          stream: names of the dropout masks; None: nothing is dropped.
        """
        masks = [
            None if mask is None else mask[:, :, None]
            for mask in (
                dropout_mask(self.config, stream, SITE_TARGET_LAYERS + n, len(x))
                for n in range(1, self.count)
            )
        ]
        if self.settings.feeds:
            return self._feeding(x, source, places, carry, restart, masks)
        return self._by_layer(x, source, places, carry, restart, masks)

    def _by_layer(self, x, source, places, carry, restart, masks) -> Decoded:
        """Run one layer after the other, each along all places."""
        weights, context, states, y = None, source, [], x
        for n, cell in enumerate(self.cells):
            begins = restart and restart._replace(fresh=restart.fresh.states[n])
            gates = cell.input(drop(y, masks[n - 1]) if n else y)
            if n == 0 and self.settings.attends:
                found, context, weights, last = self._attending(
                    cell, gates, source, places, carry.states[0], begins
                )
            else:
                if self.settings.wiring == "before":
                    gates = gates + cell.context(context)
                found, last = run(cell, gates, carry.states[n], begins)
            y = y + found if self.settings.is_residual(n) else found
            states.append(last)
        read = (y, context, x) if self.settings.wiring == "before" else (y,)
        readout = jnp.tanh(self.readout(jnp.concatenate(read, axis=-1)))
        return Decoded(readout, Carry(tuple(states), None), weights)

    def _attending(
        self, cell: Cell, gates: Array, memory: Memory, places: Places, state: State, restart
    ) -> tuple[Array, Array, Array, State]:
        """Run the bottom layer: its previous state attends, and the context goes in."""
        step, attend = cell.stepper(), self.attention.reader(memory)
        take_in = looped(cell.context, cell.dtype)

        def one(state: State, inputs: Any) -> tuple[State, Any]:
            x, at, begins = inputs
            state = state if begins is None else begins.of(state)
            context, weights = attend(state[0], at)
            state = step(x + take_in(context), state)
            return state, (state[0].astype(x.dtype), context.astype(x.dtype), weights)

        last, (found, contexts, weights) = jax.lax.scan(one, state, (gates, places, restart))
        return found, contexts, weights, last

    def _feeding(self, x, memory, places, carry, restart, masks) -> Decoded:
        """Run all layers place by place: the top state attends, the readout goes into the next."""
        cells, attend = self.cells, self.attention.reader(memory)
        steps = [cell.stepper() for cell in cells]
        rise = [looped(cell.input, cell.dtype) for cell in cells[1:]]
        take_in = looped(cells[0].context, cells[0].dtype)
        read = looped(self.readout, cells[0].dtype)

        def one(carry: Carry, inputs: Any) -> tuple[Carry, Any]:
            x, at, begins, masks = inputs
            states, fed = carry if begins is None else begins.of(carry)
            assert fed is not None
            after = [steps[0](x + take_in(fed), states[0])]
            y = after[0][0]
            for n in range(1, len(cells)):
                after.append(steps[n](rise[n - 1](drop(y, masks[n - 1])), states[n]))
                y = y + after[n][0] if self.settings.is_residual(n) else after[n][0]
            context, weights = attend(y, at)
            fed = jnp.tanh(read(jnp.concatenate((y, context), axis=-1)))
            return Carry(tuple(after), fed), (fed.astype(x.dtype), weights)

        inputs = cells[0].input(x), places, restart, masks
        last, (readout, weights) = jax.lax.scan(one, carry, inputs)
        return Decoded(readout, last, weights)

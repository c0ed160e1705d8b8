"""Recurrent encoder and decoder over packed rows, with positions on axis 0.

Sources: Schuster & Paliwal 1997 (bidirectional encoder); Sutskever et al. 2014 and Cho et al. 2014
(the source as one vector); Bahdanau et al. 2014 (the previous state attends); Luong et al. 2015
(the current state attends, and the result feeds the next position); Wu et al. 2016 (GNMT: only the
first layer reads in both directions, there are residuals, the context feeds every layer).

With a decoder state s and source states h_i, attention scores are s^T h_i (dot), s^T W h_i
(multiplicative; Luong et al. 2015, section 3.1) or v^T tanh(W1 h_i + W2 s) (additive; Bahdanau et
al. 2014, appendix A.1.2). Values that depend only on the source are computed once per source.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.config.bounds import AtLeast, Bounded, Natural, Or
from bert_jax.errors import UserError
from bert_jax.model import layers
from bert_jax.model.attention.xla import MASKED_SCORE
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import Stream, keep_at
from bert_jax.model.rotation import restarting_positions
from bert_jax.model.seq2seq.cells import Cell, CellName, Restart, State, looped, run
from bert_jax.model.seq2seq.network import Tying

Score = Literal["none", "dot", "multiplicative", "additive"]
# Dropout sites, above the Transformer's sites; each layer of encoder and decoder has one, too.
SITE_SOURCE, SITE_TARGET, SITE_READOUT = range(1 << 18, (1 << 18) + 3)
SITE_SOURCE_LAYERS, SITE_TARGET_LAYERS = (1 << 18) + (1 << 8), (1 << 18) + (1 << 9)


@dataclass(frozen=True)
class RecurrentConfig(Bounded, section="objective"):
    """Settings of a recurrent encoder and decoder beyond the widths and layers of `model`."""

    cell: CellName = "gru"
    """Cell of all layers: tanh, gru or lstm."""
    attention: Score = "additive"
    """Score function of attention; with `none`, the decoder reads one vector for the source."""
    wiring: Literal["before", "after"] = "before"
    """Decoder state that is the query of attention. `before` is the bottom layer's previous state;
    the context then feeds every layer (Bahdanau et al. 2014; GNMT). `after` is the top layer's
    current state; the readout then feeds the next position (Luong et al. 2015). Without attention,
    the source's vector feeds every layer (`before`, Cho et al. 2014) or only the initial state
    (`after`, Sutskever et al. 2014)."""
    bidirectional: bool = True
    """Whether the encoder's first layer reads in both directions, each with half of the width."""
    num_decoder_layers: Natural = 0
    """Number of decoder layers; 0 means model.num_layers."""
    residual_from: Annotated[int, AtLeast(2), Or(0, "none")] = 0
    """Layer, counted from 1, from which all layers have residual connections. It is at least 2,
    because layer 1 reads embeddings. 0 means no residual connections. GNMT has 3."""
    window: Natural = 0
    """Largest distance at which a target position sees a source position; 0 means no limit."""
    tying: Tying = "all"
    """Sharing of token tables. `all`: source, target and output share one table. `output`: target
    and output share one table, and the source has another. `none`: three separate tables."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window and not self.attends:
            raise UserError(
                f"objective.window is {self.window}, but objective.attention is 'none'; expected "
                "window 0, or attention dot, multiplicative or additive"
            )

    @property
    def attends(self) -> bool:
        """Whether the decoder attends to the source."""
        return self.attention != "none"

    @property
    def feeds(self) -> bool:
        """Whether the readout of a position feeds the next position."""
        return self.attends and self.wiring == "after"

    def is_residual(self, layer: int) -> bool:
        """Return true if a layer, counted from 0, adds its input to its output."""
        return bool(self.residual_from) and layer + 1 >= self.residual_from


Mask = Float[Array, "L B *beams D"] | None
"""Dropout factors, 0 or 1 / (1 - rate), with positions on axis 0; None means no dropout."""


def dropout_mask(config: ModelConfig, stream: Stream, site: int, length: int) -> Mask:
    """Make the dropout mask between two layers; `length` is the number of positions."""
    rate = config.hidden_dropout_rate
    if stream is None or not rate:
        return None
    places, units = (jnp.arange(n, dtype=jnp.uint32) for n in (length, config.hidden_dim))
    rows = stream.row_index[:, None]
    kept = keep_at(rate, stream.seed, site, rows, places[:, None, None], units)
    return jnp.where(kept, jnp.float32(1 / (1 - rate)), 0.0)


def drop(x: Float[Array, "... D"], mask: Mask) -> Float[Array, "... D"]:
    """Multiply states by a dropout mask that broadcasts against them."""
    return x if mask is None else (x.astype(jnp.float32) * mask).astype(x.dtype)


class TokenTable(nnx.Module):
    """Table of token embeddings."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.token = layers.token_table(config, rngs)


class RecurrentEncoder(nnx.Module):
    """Layers of cells; the first layer may read in both directions."""

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
        self, x: Float[Array, "S B E"], segment_ids: Integer[Array, "S B"], stream: Stream = None
    ) -> Float[Array, "S B D"]:
        """Return the last layer's states at all positions; each segment starts from zeros."""
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
        """Return the last state of each wanted segment.

        If the only layer is bidirectional, its backward half is taken at the segment's first token.
        """
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


class Memory(NamedTuple):
    """Encoded source in the form that a decoder's attention reads."""

    states: Float[Array, "B S D"]
    """States of the encoder, float32."""
    keys: Float[Array, "B S A"]
    """Part of the scores that depends only on the source, float32."""
    segment_ids: Integer[Array, "B S"]
    places: Integer[Array, "B S"]
    """Position of each token in its segment."""
    last_places: Integer[Array, "B S"]
    """Position of the last token in the segment of each token."""


class Places(NamedTuple):
    """Segments and positions of target tokens, which attention needs."""

    segment_ids: Integer[Array, "... B K"]
    at: Integer[Array, "... B K"]
    """Position of each token in its segment, from 0."""


Attend = Callable[[Array, Places], tuple[Array, Array]]
"""Function from states (B, K, D) and their `Places` to contexts (B, K, D), weights (B, K, S)."""


class Alignment(nnx.Module):
    """Attention of a recurrent decoder to source positions; window 0 means all positions."""

    def __init__(self, config: ModelConfig, score: Score, window: int, rngs: nnx.Rngs):
        width = config.hidden_dim
        self.score, self.window, self.dtype = score, window, layers.compute_dtype(config)
        if score != "dot":
            self.key = layers.Affine(config, {"embed": width}, {None: width}, rngs, bias=False)
        if score == "additive":
            self.query = layers.Affine(config, {"embed": width}, {None: width}, rngs)
            scale = layers.truncated_normal(rngs.params(), (width,), config.init_std)
            self.vector = layers.parameter(scale, None)

    def remember(self, states: Float[Array, "B S D"], segment_ids: Integer[Array, "B S"]) -> Memory:
        """Compute, once per source, the arrays that attention reads at all target positions."""
        keys = states if self.score == "dot" else self.key(states)
        places = restarting_positions(segment_ids)
        to_end = restarting_positions(segment_ids[:, ::-1])[:, ::-1]
        states, keys = states.astype(jnp.float32), keys.astype(jnp.float32)
        return Memory(states, keys, segment_ids, places, places + to_end)

    def reader(self, memory: Memory) -> Attend:
        """Return a function that attends to a source; the backward pass recomputes big arrays."""
        if self.score == "additive":
            project, vector = looped(self.query, self.dtype), self.vector[...]

        def scores(states: Array) -> Array:
            if self.score == "additive":
                sums = memory.keys[:, None] + project(states)[:, :, None]
                return jnp.tanh(sums) @ vector
            used = states.astype(self.dtype), memory.keys.astype(self.dtype)
            return layers.einsum_float32("BKD,BSD->BKS", *used)

        def attend(states: Array, places: Places) -> tuple[Array, Array]:
            visible = places.segment_ids[..., None] == memory.segment_ids[:, None]
            if self.window:
                # Target position t predicts token t of its text (Luong et al. 2015, 3.2, local-m).
                # Its window is centred on token t of the source, which is at position t + 1 after
                # [CLS], or on the last position of a shorter source.
                centre = jnp.minimum(places.at[..., None] + 1, memory.last_places[:, None])
                visible &= jnp.abs(memory.places[:, None] - centre) <= self.window
            weights = jax.nn.softmax(jnp.where(visible, scores(states), MASKED_SCORE), axis=-1)
            used = weights.astype(self.dtype), memory.states.astype(self.dtype)
            return layers.einsum_float32("BKS,BSD->BKD", *used), weights

        return jax.checkpoint(attend, prevent_cse=False)


class Carry(NamedTuple):
    """Everything that a decoder passes from one position to the next, in float32."""

    states: tuple[State, ...]
    """State of each layer, (..., B, K, D)."""
    fed: Float[Array, "... E"] | None
    """Readout of the previous position, (..., B, K, E); None if no readout is fed back."""


class Decoded(NamedTuple):
    """Results of running a decoder along target positions."""

    readout: Float[Array, "T B K E"]
    """Vectors that the output table maps to logits."""
    carry: Carry
    """Carry after the last position."""
    weights: Float[Array, "T B K S"] | None
    """Attention weights in float32; None without attention."""


def readout_inputs(config: ModelConfig, settings: RecurrentConfig) -> int:
    """Return the width of the readout's input: state, plus context and embedding if used."""
    context = config.hidden_dim * (settings.feeds or settings.wiring == "before")
    embedding = config.embedding_width * (settings.wiring == "before")
    return config.hidden_dim + context + embedding


class RecurrentDecoder(nnx.Module):
    """Layers of cells over target tokens, with attention to the source if configured."""

    def __init__(self, config: ModelConfig, settings: RecurrentConfig, rngs: nnx.Rngs):
        self.config, self.settings = config, settings
        width, table = config.hidden_dim, config.embedding_width
        if settings.tying != "all":
            self.embeddings = TokenTable(config, rngs)
        self.count = settings.num_decoder_layers or config.num_layers
        for n in range(self.count):
            fed = table if settings.feeds and n == 0 else 0
            context = width if settings.wiring == "before" else fed
            cell = Cell(config, settings.cell, width if n else table, width, rngs, context)
            setattr(self, f"layer{n + 1}", cell)
        vectors = self.count * cell.kind.num_parts
        self.start = layers.Affine(config, {"embed": width}, {None: vectors * width}, rngs)
        if settings.attends:
            self.attention = Alignment(config, settings.attention, settings.window, rngs)
        read = readout_inputs(config, settings)
        self.readout = layers.Affine(config, {"embed": read}, {None: table}, rngs)

    @property
    def cells(self) -> list[Cell]:
        """Cells of the layers, from the bottom."""
        return [getattr(self, f"layer{n + 1}") for n in range(self.count)]

    def begin(self, summary: Float[Array, "... D"]) -> Carry:
        """Make the initial carry of a segment from the summary of the segment's source."""
        made = jnp.tanh(self.start(summary).astype(jnp.float32))
        vectors = iter(jnp.split(made, made.shape[-1] // self.config.hidden_dim, axis=-1))
        counts = (cell.kind.num_parts for cell in self.cells)
        states = tuple(tuple(next(vectors) for _ in range(count)) for count in counts)
        fed = jnp.zeros((*summary.shape[:-1], self.config.embedding_width), jnp.float32)
        return Carry(states, fed if self.settings.feeds else None)

    def __call__(
        self,
        x: Float[Array, "T B K E"],
        source: Memory | Float[Array, "T B K D"],
        places: Places,
        carry: Carry,
        restart: Restart | None = None,
        stream: Stream = None,
    ) -> Decoded:
        """Run the decoder along target positions, from the carry before the first position.

        `source` is the memory to attend to or, without attention, the source's summary for each
        position. `restart` has the `Carry` with which segments begin; None if no segment begins.
        """
        sites = range(SITE_TARGET_LAYERS + 1, SITE_TARGET_LAYERS + self.count)
        masks = [dropout_mask(self.config, stream, site, len(x)) for site in sites]
        masks = [None if mask is None else mask[:, :, None] for mask in masks]
        take = self._feeding if self.settings.feeds else self._by_layer
        return take(x, source, places, carry, restart, masks)

    def _by_layer(self, x, source, places, carry, restart, masks) -> Decoded:
        """Run one layer after the other, each along all positions."""
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
        """Run the bottom layer: its previous state attends, and the context feeds the cell."""
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
        """Run all layers position by position, each position with the previous readout as input."""
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

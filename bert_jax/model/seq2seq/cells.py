"""Recurrent cells, and the loop that runs a cell along a sequence.

The inputs of a cell are projected for all positions at once; the state is projected step by step.

Sources: Elman 1990 (tanh); Cho et al. 2014 (GRU), but with the reset gate applied after the matrix
product as in cuDNN and torch; Hochreiter & Schmidhuber 1997 with the forget gate of Gers et al.
2000 (LSTM). Gates have torch's order: reset, update, new (GRU); input, forget, cell, output (LSTM).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from bert_jax.model.config import ModelConfig
from bert_jax.model.layers import Affine, AxisSizes, compute_dtype, einsum_float32, parameter

CellName = Literal["tanh", "gru", "lstm"]

State = tuple[Float[Array, "... D"], ...]
"""Float32 state of a cell; the first entry is the cell's output."""


class Restart(NamedTuple):
    """Positions where segments begin, and the states with which the segments begin."""

    at: Bool[Array, "..."]
    """Mask of positions where segments begin, shaped like the inputs without their last axis."""
    fresh: Any = None
    """Tree of states for all positions, used where `at` is true; None means zeros."""

    def of(self, state: Any) -> Any:
        """Return `state` (a tree of arrays) with fresh states where `at` is true."""
        at = self.at[..., None]
        if self.fresh is None:
            return jax.tree.map(lambda old: jnp.where(at, 0.0, old), state)
        return jax.tree.map(lambda new, old: jnp.where(at, new, old), self.fresh, state)


def _gru(x: Array, recurrent: Array, state: State) -> State:
    reset, update, new = jnp.split(x, 3, axis=-1)
    to_reset, to_update, to_new = jnp.split(recurrent, 3, axis=-1)
    update = jax.nn.sigmoid(update + to_update)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + to_reset) * to_new)
    return (new + update * (state[0] - new),)


def _lstm(x: Array, recurrent: Array, state: State) -> State:
    write, forget, new, out = jnp.split(x + recurrent, 4, axis=-1)
    cell = jax.nn.sigmoid(forget) * state[1] + jax.nn.sigmoid(write) * jnp.tanh(new)
    return jax.nn.sigmoid(out) * jnp.tanh(cell), cell


class CellKind(NamedTuple):
    """Equations of one kind of cell."""

    num_gates: int
    """Number of gates: inputs and states are projected to `num_gates` times the state's width."""
    num_parts: int
    """Number of vectors in a state."""
    advance: Callable[[Array, Array, State], State]
    """Function from (projected input, projected state, state) to the next state."""
    recurrent_bias: bool = False
    """Whether the state's projection needs a bias besides the bias of the input projection."""


CELLS: dict[CellName, CellKind] = {
    "tanh": CellKind(1, 1, lambda x, recurrent, _: (jnp.tanh(x + recurrent),)),
    "gru": CellKind(3, 1, _gru, recurrent_bias=True),
    "lstm": CellKind(4, 2, _lstm),
}
"""Kinds of cells by name."""


class Cell(nnx.Module):
    """Weights of a recurrent layer; `context` is the width of a second input, 0 for none."""

    def __init__(
        self,
        config: ModelConfig,
        name: CellName,
        inputs: int,
        width: int,
        rngs: nnx.Rngs,
        context: int = 0,
    ):
        """Make the weights. State matrices start orthogonal; an LSTM's forget bias starts at 1.

        Sources: Bahdanau et al. 2014, appendix B.1; Jozefowicz et al. 2015, section 3.2.
        """
        self.kind, self.width, self.dtype = CELLS[name], width, compute_dtype(config)
        gates: AxisSizes = {None: self.kind.num_gates * width}
        self.input = Affine(config, {"embed": inputs}, gates, rngs)
        if name == "lstm":
            forget = jnp.arange(4 * width) // width == 1
            self.input.bias = parameter(forget.astype(jnp.float32), None)
        if context:
            self.context = Affine(config, {"embed": context}, gates, rngs, bias=False)
        bias = self.kind.recurrent_bias
        self.recurrent = Affine(config, {"embed": width}, gates, rngs, bias=bias)
        square = jax.nn.initializers.orthogonal()
        keys = jax.random.split(rngs.params(), self.kind.num_gates)
        kernels = [square(key, (width, width), jnp.float32) for key in keys]
        self.recurrent.kernel = parameter(jnp.concatenate(kernels, axis=1), "embed", None)

    def zeros(self, *shape: int) -> State:
        """Make states of zeros."""
        return (jnp.zeros((*shape, self.width), jnp.float32),) * self.kind.num_parts

    def stepper(self) -> Callable[[Array, State], State]:
        """Return the function (projected input, state) -> next state, for use in a loop."""
        recurrent = looped(self.recurrent, self.dtype)

        def step(x: Array, state: State) -> State:
            return self.kind.advance(x.astype(jnp.float32), recurrent(state[0]), state)

        return step


def looped(affine: Affine, dtype: Any) -> Callable[[Array], Array]:
    """Return `affine` as a function for a loop: products in `dtype`, gradient sums in float32."""
    kernel = affine.kernel[...].astype(jnp.float32)
    bias = jnp.float32(0) if affine.bias is None else affine.bias[...]

    def apply(x: Array) -> Array:
        return einsum_float32("...D,DG->...G", x.astype(dtype), kernel.astype(dtype)) + bias

    return apply


def run(
    cell: Cell,
    projected: Float[Array, "T ... G"],
    state: State,
    restart: Restart | None = None,
    *,
    reverse: bool = False,
) -> tuple[Float[Array, "T ... D"], State]:
    """Run a cell along sequences, starting from `state`; return its outputs and the last state.

    `projected` are the cell's projected inputs, with positions on axis 0. With `reverse`, the cell
    runs from the last position to the first, and `restart` marks where segments end.
    """
    step = cell.stepper()

    def one(state: State, inputs: tuple[Array, Restart | None]) -> tuple[State, Array]:
        x, restart = inputs
        state = step(x, state if restart is None else restart.of(state))
        return state, state[0].astype(projected.dtype)

    last, outputs = jax.lax.scan(one, state, (projected, restart), reverse=reverse)
    return outputs, last

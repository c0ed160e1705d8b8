"""Station 1: a recurrent cell predicts what depends on inputs of earlier batches.

    python examples/chapter/cell.py

Each of 200 streams is an endless row of random bits x. Its second row y is 1 with probability 1/2,
plus 1/2 if x was 1 three steps ago, minus 1/4 if x was 1 eight steps ago. Cells with the functions
sigmoid and tanh learn to predict y, by plain gradient descent and by Adagrad, with a state that
goes on from batch to batch or begins anew.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from station import Asked, asked

from bert_jax.files.pictures import MARK, dress, new_figure, write_picture
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import with_params
from bert_jax.model.seq2seq.cells import CELLS, Cell, CellKind, run

FUNCTIONS = {
    "sigmoid": CellKind(1, 1, lambda x, recurrent, _: (jax.nn.sigmoid(x + recurrent),)),
    "tanh": CELLS["tanh"],
}
MODEL = ModelConfig(dtype="float32", init_std=0.3)
WIDTH, STREAMS, CUT = 16, 200, 10
OPTIMIZERS = {"plain descent": optax.sgd(1.0), "Adagrad": optax.adagrad(0.3)}
LAGS = 12


class Cuts(NamedTuple):
    """Streams, cut into batches of `CUT` steps."""

    x: np.ndarray
    y: np.ndarray


def main(asked: Asked) -> None:
    """Train all cells, print their losses, and draw them."""
    cuts = echo(asked.steps)
    curves = {
        (function, name, carries): losses(function, optimizer, carries, cuts)
        for function in FUNCTIONS
        for name, optimizer in OPTIMIZERS.items()
        for carries in (True, False)
    }
    last = {key: curve[-max(1, asked.steps // 10) :].mean() for key, curve in curves.items()}
    print("loss in nats per step         state carried   begun anew")
    for function in FUNCTIONS:
        for name in OPTIMIZERS:
            pair = (f"{last[function, name, carries]:12.3f}" for carries in (True, False))
            print(f"{function:10}{name:16}", *pair)
    print("\nlowest possible loss of a cell that remembers")
    for name, value in known().items():
        print(f"  {name:12}{value:.3f}")
    fades = {function: fading(function) for function in FUNCTIONS}
    print("\ninfluence of the state on the state k steps later, before training")
    for function, fade in fades.items():
        print(f"{function:10}", *(f"k={k} {fade[k - 1]:.1e}" for k in (1, 3, 8)), sep="  ")
    draw(curves, fades, asked)


def echo(num_steps: int) -> Cuts:
    """Draw the streams."""
    random = np.random.default_rng(0)
    x = random.integers(0, 2, (num_steps * CUT + 8, STREAMS))
    chance = 0.5 + 0.5 * x[5:-3] - 0.25 * x[:-8]
    y = (random.random(chance.shape) < chance).astype(np.int32)
    return Cuts(*(row.reshape(num_steps, CUT, STREAMS) for row in (x[8:], y)))


def known() -> dict[str, float]:
    """Compute the lowest losses, from the chances of y given what is remembered of x."""

    def entropy(*chances: float) -> float:
        p = np.array(chances)
        return float(-np.mean(p * np.log(p) + (1 - p) * np.log1p(-p + 1e-12)))

    sure = 1 - 1e-9
    return {
        "nothing": entropy(0.625),
        "three steps": entropy(0.375, 0.875),
        "eight steps": entropy(0.25, 0.5, 0.75, sure),
    }


def cell_of(function: str, params: Any = None) -> Cell:
    """Make a cell; without `params`, its parameters are fresh."""
    sizes = MODEL, "tanh", 2, WIDTH
    fresh = params is None
    cell = Cell(*sizes, nnx.Rngs(params=0)) if fresh else with_params(params, Cell, *sizes)
    cell.kind = FUNCTIONS[function]
    return cell


def losses(function: str, optimizer: Any, carries: bool, cuts: Cuts) -> np.ndarray:
    """Train a cell on the cuts in their order; return the loss of each cut, in nats per step."""
    fresh = nnx.to_pure_dict(nnx.state(cell_of(function), nnx.Param))
    params = {"cell": fresh, "output": jnp.zeros((WIDTH, 2))}

    def loss(params: Any, state: Any, cut: Cuts) -> tuple[Any, Any]:
        cell = cell_of(function, params["cell"])
        states, last = run(cell, cell.input(jax.nn.one_hot(cut.x, 2)), state)
        scores = states @ params["output"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, cut.y).mean(), last

    def step(carry: Any, cut: Cuts) -> tuple[Any, Any]:
        params, moments, state = carry
        (value, last), gradient = jax.value_and_grad(loss, has_aux=True)(params, state, cut)
        changes, moments = optimizer.update(gradient, moments)
        state = last if carries else jax.tree.map(jnp.zeros_like, last)
        return (optax.apply_updates(params, changes), moments, state), value

    begin = params, optimizer.init(params), cell_of(function).zeros(STREAMS)
    return np.asarray(jax.jit(partial(jax.lax.scan, step))(begin, cuts)[1])


def fading(function: str) -> np.ndarray:
    """Measure the norm of the derivative of a state by the state k steps before, for all lags."""
    cell = cell_of(function)
    inputs = jax.nn.one_hot(echo(2).x.reshape(-1, STREAMS)[:LAGS], 2)

    def states(state: Any) -> Any:
        return run(cell, cell.input(inputs[:, :1]), state)[0][:, 0]

    by_state = jax.jacrev(states)(cell.zeros(1))[0][:, :, 0]  # (LAGS, WIDTH, WIDTH)
    return np.linalg.norm(by_state, ord=2, axis=(1, 2))


def draw(curves: dict[Any, np.ndarray], fades: dict[str, np.ndarray], asked: Asked) -> None:
    """Draw the losses with a carried state and, beside them, how influence fades."""
    figure = new_figure((9, 3.6))
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    colours = {"sigmoid": "#dd6b20", "tanh": "#3182ce"}
    for (function, name, carries), curve in curves.items():
        if not carries and (function, name) != ("tanh", "Adagrad"):
            continue
        size = max(1, len(curve) // 100)
        means = curve[: len(curve) // size * size].reshape(-1, size).mean(1)
        label = f"{function}, {name}" + ("" if carries else ", state begun anew")
        style = ":" if not carries else "--" if name == "Adagrad" else "-"
        left.plot(np.arange(len(means)) * size, means, style, color=colours[function], label=label)
    for name, value in known().items():
        left.axhline(value, color=MARK, linewidth=0.8)
        left.annotate(f"remembers {name}", (len(curve), value - 0.008), fontsize=7, ha="right")
    left.set(xlabel="batches", ylabel="loss, nats per step", ylim=(0.44, 0.7))
    left.legend(fontsize=7, loc="center right", bbox_to_anchor=(1, 0.63), frameon=False)
    for function, fade in fades.items():
        right.semilogy(np.arange(1, LAGS + 1), fade, "o-", color=colours[function], label=function)
    right.set(xlabel="steps between two states", ylabel="influence of the earlier state")
    right.legend(fontsize=8, frameon=False)
    dress(left)
    dress(right)
    write_picture(figure, asked.pictures / "cell.png")


if __name__ == "__main__":
    main(asked(__doc__, steps=4000))

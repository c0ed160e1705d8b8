"""Station 2: gates keep a number untouched for as long as it is needed.

    python examples/chapter/gates.py

One vector for a sequence: cells of three kinds read random digits, and must say at the end which
digit came first. One label for each step: two layers of LSTM cells read digits, of which a few are
marked, and say at each step which digit was marked last. The numpy formula then reads the same
digits with the trained weights, and shows what the gates do.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from formulas.gates import lstm_step
from station import Asked, asked, learn

from bert_jax.files.pictures import dress, new_figure, write_picture
from bert_jax.model.config import ModelConfig
from bert_jax.model.layers import Affine
from bert_jax.model.seq2seq.cells import Cell, run

MODEL = ModelConfig(dtype="float32", init_std=0.1)
DIGITS, MARK = 10, 10
WIDTH, ROWS = 20, 64
KINDS = ("tanh", "gru", "lstm")
LENGTHS = (10, 30, 100)
STEPS = 40


class Batch(NamedTuple):
    """Sequences and their labels."""

    x: np.ndarray
    """Inputs (T, B, 11): the digit's own entry is 1, the last entry is 1 if the digit is marked."""
    labels: np.ndarray
    """Digits (T, B) for each step, or (B) for the sequence."""


Draw = Callable[[np.random.Generator, int, int], Batch]
"""Function that draws sequences, given their length and number."""


class Reader(nnx.Module):
    """Layers of cells, and scores of the ten digits."""

    def __init__(self, kind: str, num_layers: int, length: int):
        """Make fresh weights, with biases by which a fresh cell keeps 1 / e over `length` steps."""
        rngs = nnx.Rngs(params=0)
        sizes = [DIGITS + 1] + [WIDTH] * num_layers
        self.cells = nnx.List(Cell(MODEL, kind, n, WIDTH, rngs) for n in sizes[:-1])
        # Biases of reset, update, new; of input, forget, g, output (Tallec & Ollivier 2018).
        signs = {"tanh": [0], "gru": [0, 1, 0], "lstm": [-1, 1, 0, 0]}[kind]
        for cell in self.cells:
            cell.input.bias[...] = jnp.repeat(np.log(length) * jnp.array(signs), WIDTH)
        self.dense = Affine(MODEL, {None: WIDTH}, {None: DIGITS}, rngs)

    def states(self, x: Any) -> Any:
        """Return the last layer's states (T, B, width)."""
        for cell in self.cells:
            x, _ = run(cell, cell.input(x), cell.zeros(x.shape[1]))
        return x

    def scores(self, batch: Batch) -> Any:
        """Return scores for each step, or those of the last step for the sequence."""
        states = self.states(batch.x)
        return self.dense(states if batch.labels.ndim == 2 else states[-1])


def main(asked: Asked) -> None:
    """Train all readers, print how often they are right, and draw what the gates do."""
    print("the first digit, said at the end: share of 1,000 sequences that are right")
    print("digits   ", *(f"{length:7}" for length in LENGTHS))
    shares = {}
    for kind in KINDS:
        shares[kind] = [
            right(*trained(kind, 1, asked.steps, length, one_vector), length, one_vector)
            for length in LENGTHS
        ]
        print(f"{kind:9}", *(f"{share:7.1%}" for share in shares[kind]))
    reader, params = trained("lstm", 2, asked.steps, STEPS, each_step)
    print("\nthe digit that was marked last, said at each step: share of steps that are right")
    print(f"lstm      {right(reader, params, STEPS, each_step):.1%}")
    x = each_step(np.random.default_rng(82), STEPS, 1).x[:, 0]
    draw(shares, x, gates(params, x), asked)


def digits(random: np.random.Generator, length: int, rows: int, marked: float) -> Batch:
    """Draw sequences; the first digit is marked, and each other with the probability `marked`.

    The labels of the steps are the digits that were marked last, at this step or before.
    """
    x = np.eye(DIGITS + 1, dtype=np.float32)[random.integers(0, DIGITS, (length, rows))]
    x[..., MARK] = random.random((length, rows)) < marked
    x[0, :, MARK] = 1
    labels = x[..., :DIGITS].argmax(-1)
    for t in range(1, length):
        labels[t] = np.where(x[t, :, MARK] > 0, labels[t], labels[t - 1])
    return Batch(x, labels)


def one_vector(random: np.random.Generator, length: int, rows: int) -> Batch:
    """Draw sequences whose one label is the first digit, the only one that is marked."""
    x, labels = digits(random, length, rows, marked=0)
    return Batch(x, labels[-1])


def each_step(random: np.random.Generator, length: int, rows: int) -> Batch:
    """Draw sequences with a label for each step."""
    return digits(random, length, rows, marked=0.1)


def trained(kind: str, num_layers: int, num_steps: int, length: int, draw: Draw) -> Any:
    """Train a reader; return its structure and its parameters."""
    reader, params = nnx.split(Reader(kind, num_layers, length))

    def loss(params: Any, batch: Batch) -> Any:
        scores = nnx.merge(reader, params).scores(batch)
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch.labels).mean()

    def batches() -> Iterator[Batch]:
        random = np.random.default_rng(0)
        for _ in range(num_steps):
            yield draw(random, length, ROWS)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    return reader, learn(loss, params, batches(), optimizer)[0]


def right(reader: Any, params: Any, length: int, draw: Draw) -> float:
    """Return the share of labels of unseen sequences that have the highest score."""
    batch = draw(np.random.default_rng(1), length, 1000)
    scores = jax.jit(lambda batch: nnx.merge(reader, params).scores(batch))(batch)
    return float(jnp.mean(scores.argmax(-1) == batch.labels))


def gates(params: Any, x: np.ndarray) -> np.ndarray:
    """Compute the first layer's gates (T, 4, width) with the formula in numpy."""
    cell = nnx.to_pure_dict(params)["cells"][0]
    kernels = cell["input"]["kernel"], cell["recurrent"]["kernel"]
    W, U = (np.asarray(kernel).T.reshape(4, WIDTH, -1) for kernel in kernels)
    b = np.asarray(cell["input"]["bias"]).reshape(4, WIDTH)
    h, c, found = np.zeros(WIDTH), np.zeros(WIDTH), []
    for x_t in x:
        h, c, gates = lstm_step(x_t, h, c, W, U, b)
        found.append(gates)
    return np.stack(found)


def draw(shares: dict[str, list[float]], x: np.ndarray, gates: np.ndarray, asked: Asked) -> None:
    """Draw the shares of right answers and, beside them, two gates along a sequence."""
    figure = new_figure((9, 3.6))
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    for (kind, values), style in zip(shares.items(), ("o:", "s-", "o--"), strict=True):
        left.plot(LENGTHS, values, style, label=kind)
    left.set(xlabel="digits in a sequence", ylabel="first digit is right", ylim=(0, 1.05))
    left.legend(fontsize=8, frameon=False)
    for at in np.flatnonzero(x[:, MARK]):
        right.axvspan(at - 0.5, at + 0.5, color="#feebc8")
    for number, name in ((0, "input gate i"), (1, "forget gate f")):
        right.plot(gates[:, number].mean(-1), "o-", markersize=3, label=f"{name}, mean of 20")
    names = [str(digit) for digit in x[:, :DIGITS].argmax(-1)]
    right.set_xticks(range(len(x)), names)
    right.set(xlabel="digits read; marked ones shaded", ylabel="gate", ylim=(0, 1.05))
    right.legend(fontsize=8, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
    dress(left)
    dress(right)
    right.tick_params(axis="x", labelsize=7)
    write_picture(figure, asked.pictures / "gates.png")


if __name__ == "__main__":
    main(asked(__doc__, steps=600))

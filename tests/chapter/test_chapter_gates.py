"""Station 2: the formulas of LSTM and GRU are what the package computes."""

import numpy as np
from chapter import formulas, normal
from flax import nnx

from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.cells import Cell, run

INPUTS, WIDTH, LENGTH = 3, 4, 6
MODEL = ModelConfig(dtype="float32", init_std=0.5)
formula = formulas("gates")


def gated(name: str) -> tuple[Cell, list[np.ndarray]]:
    """A cell, and its matrices W, U and biases b, one entry a gate."""
    cell = Cell(MODEL, name, INPUTS, WIDTH, nnx.Rngs(params=0))
    gates = cell.kind.num_gates
    cell.input.bias[...] += normal(gates * WIDTH)
    kernels = cell.input.kernel, cell.recurrent.kernel
    W, U = (np.array(kernel[...]).T.reshape(gates, WIDTH, -1) for kernel in kernels)
    return cell, [W, U, np.array(cell.input.bias[...]).reshape(gates, WIDTH)]


def test_the_lstm_of_the_package_computes_the_formula():
    cell, weights = gated("lstm")
    x, h, c = normal(LENGTH, INPUTS), normal(WIDTH, seed=1), normal(WIDTH, seed=2)
    states, last = run(cell, cell.input(x[:, None]), (h[None], c[None]))
    for t in range(LENGTH):
        h, c, gates = formula.lstm_step(np.array(x[t]), h, c, *weights)
        np.testing.assert_allclose(states[t, 0], h, atol=1e-5)
        assert gates.shape == (4, WIDTH)
    np.testing.assert_allclose(last[1][0], c, atol=1e-5)


def test_the_gru_of_the_package_computes_the_formula():
    cell, weights = gated("gru")
    cell.recurrent.bias[...] = normal(3 * WIDTH, seed=3)
    x, h = normal(LENGTH, INPUTS), normal(WIDTH, seed=1)
    states, _ = run(cell, cell.input(x[:, None]), (h[None],))
    for t in range(LENGTH):
        h = formula.gru_step(np.array(x[t]), h, *weights, normal(3 * WIDTH, seed=3).reshape(3, -1))
        np.testing.assert_allclose(states[t, 0], h, atol=1e-5)

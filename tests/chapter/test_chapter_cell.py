"""Station 1: the formula of a recurrent cell is what the package computes."""

import jax
import numpy as np
import pytest
from chapter import formulas, normal
from flax import nnx

from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.cells import CELLS, Cell, CellKind, run

INPUTS, WIDTH, LENGTH = 3, 4, 6
formula = formulas("cell")


SIGMOID = CellKind(1, 1, lambda x, recurrent, _: (jax.nn.sigmoid(x + recurrent),))


@pytest.mark.parametrize(
    ("kind", "squash"),
    [(CELLS["tanh"], np.tanh), (SIGMOID, formula.sigmoid)],
    ids=["tanh", "sigmoid"],
)
def test_a_cell_of_the_package_computes_the_formula(kind, squash):
    config = ModelConfig(dtype="float32", init_std=0.5)
    cell = Cell(config, "tanh", INPUTS, WIDTH, nnx.Rngs(params=0))
    cell.kind = kind
    cell.input.bias[...] = normal(WIDTH)
    x, h = normal(LENGTH, INPUTS), normal(WIDTH, seed=1)
    states, last = run(cell, cell.input(x[:, None]), (h[None],))
    expected = formula.recurrent_cell(
        x, h, np.array(cell.input.kernel[...]).T, np.array(cell.recurrent.kernel[...]).T,
        normal(WIDTH), squash,
    )  # fmt: skip
    np.testing.assert_allclose(states[:, 0], expected, atol=1e-5)
    np.testing.assert_allclose(last[0][0], expected[-1], atol=1e-5)

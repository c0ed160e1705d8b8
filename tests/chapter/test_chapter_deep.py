"""Station 5: deep stacks with residuals and vectors of a picture are what the package computes."""

import jax.numpy as jnp
import numpy as np
import pytest
from chapter import formulas, normal
from flax import nnx

from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.recurrent_layers import RecurrentConfig, RecurrentEncoder
from bert_jax.model.seq2seq.transformer import FeatureMap

LENGTH, WIDTH, LAYERS = 5, 6, 4
formula, step = formulas("deep"), formulas("gates").lstm_step


def layer(cell):
    """The function from inputs to states of a `Cell` of kind LSTM, from zeros on."""
    kernels = cell.input.kernel, cell.recurrent.kernel
    W, U = (np.array(kernel[...]).T.reshape(4, cell.width, -1) for kernel in kernels)
    b = np.array(cell.input.bias[...]).reshape(4, cell.width)

    def run(x):
        h, c, states = np.zeros(cell.width), np.zeros(cell.width), []
        for x_t in x:
            h, c, _ = step(x_t, h, c, W, U, b)
            states.append(h)
        return np.stack(states)

    return run


@pytest.mark.parametrize("residual_from", [2, 3])
def test_a_stack_of_the_package_computes_the_formula(residual_from):
    config = ModelConfig(
        vocab_size=9, hidden_dim=WIDTH, num_heads=1, num_layers=LAYERS, hidden_dropout_rate=0.0,
        dtype="float32", init_std=0.5,
    )  # fmt: skip
    settings = RecurrentConfig(cell="lstm", residual_from=residual_from)
    encoder = RecurrentEncoder(config, settings, nnx.Rngs(params=0))
    x = normal(LENGTH, WIDTH)
    found = encoder(x[:, None], jnp.ones((LENGTH, 1), jnp.int32))[:, 0]
    ways = layer(encoder.forward1), layer(encoder.backward1)
    above = [layer(getattr(encoder, f"layer{n}")) for n in range(2, LAYERS + 1)]
    layers = [lambda x: formula.both_ways(x, *ways), *above]
    expected = formula.deep_stack(np.array(x), layers, residual_from)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_windows_of_a_picture_become_vectors_as_in_the_package():
    picture = np.array(normal(6, 9))
    cut = formula.windows(picture, size=4, stride=2)
    assert cut.shape == (2 * 3, 16)
    np.testing.assert_array_equal(cut[4].reshape(4, 4), picture[2:6, 2:6])
    features = FeatureMap(ModelConfig(hidden_dim=WIDTH, num_heads=1), 16, nnx.Rngs(params=0))
    features.bias[...] = normal(WIDTH)
    W, b = np.array(features.kernel[...]).T, np.array(features.bias[...])
    seen = formula.seen(cut, W, b, np.zeros(WIDTH))
    np.testing.assert_allclose(features(jnp.asarray(cut, jnp.float32)), seen, atol=1e-5)

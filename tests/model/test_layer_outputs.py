"""What `layer_outputs` says of an encoder is what happens in it."""

import math
from functools import partial

import jax
import numpy as np
import pytest

from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import encode, init_params, layer_outputs

CONFIG = ModelConfig(
    vocab_size=50, num_positions=16, hidden_dim=16, num_layers=3, num_heads=2, mlp_dim=32
)

outputs = jax.jit(partial(layer_outputs, CONFIG), static_argnames="with_weights")


@pytest.fixture(scope="module")
def rows():
    tokens = np.random.default_rng(0).integers(0, 50, (2, 9)).astype(np.int32)
    segment_ids = np.array([[1] * 9, [1] * 4 + [2] * 3 + [0] * 2], np.int32)
    return tokens, np.zeros_like(tokens), segment_ids


def test_the_last_states_are_those_of_the_encoder(rows):
    params = init_params(CONFIG, jax.random.key(1))
    hidden = jax.jit(partial(encode, CONFIG))(params, *rows)
    found = outputs(params, *rows)
    assert found.weights is None
    assert found.states.shape == (4, 2, 9, 16)
    np.testing.assert_allclose(np.asarray(found.states)[-1], hidden, atol=1e-5)
    with_weights = outputs(params, *rows, with_weights=True)
    np.testing.assert_allclose(with_weights.states, found.states, atol=1e-5)


def test_weights_are_distributions_over_the_tokens_of_the_segment(rows):
    params = init_params(CONFIG, jax.random.key(1))
    weights = np.asarray(outputs(params, *rows, with_weights=True).weights)
    assert weights.shape == (3, 2, 2, 9, 9)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    segment_ids = rows[2]
    apart = segment_ids[:, :, None] != segment_ids[:, None, :]
    assert not weights[np.broadcast_to(apart[None, :, None], weights.shape)].any()
    assert (weights[:, 0] > 0).all()


def test_weights_give_the_output_of_the_attention(rows):
    """Weighted values through the output projection, and the rest of a layer by hand."""
    params = init_params(CONFIG, jax.random.key(1))
    found = jax.device_get(outputs(params, *rows, with_weights=True))
    layer = jax.tree.map(lambda leaf: np.asarray(leaf)[0], params["encoder"]["layers"])
    attention, x = layer["attention"], found.states[0]
    value = np.einsum("BLD,DHK->BLHK", x, attention["value"]["kernel"]) + attention["value"]["bias"]
    mixed = np.einsum("BHLS,BSHK->BLHK", found.weights[0], value)
    out = np.einsum("BLHK,HKD->BLD", mixed, attention["output"]["kernel"])
    x = _norm(x + out + attention["output"]["bias"], layer["attention_norm"])
    mlp = layer["mlp"]
    hidden = x @ mlp["up"]["kernel"] + mlp["up"]["bias"]
    hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    x = _norm(x + hidden @ mlp["down"]["kernel"] + mlp["down"]["bias"], layer["mlp_norm"])
    np.testing.assert_allclose(found.states[1], x, atol=1e-4)


def _norm(x, params):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + CONFIG.norm_eps)
    return x * params["scale"] + params["bias"]

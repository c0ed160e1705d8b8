"""Station 6: heads, masks and positions are what the package computes."""

import jax.numpy as jnp
import numpy as np
import pytest
from chapter import formulas, heads_of, normal
from flax import nnx

from bert_jax.model.attention.xla import visible_keys
from bert_jax.model.config import ModelConfig
from bert_jax.model.encoder import SelfAttention
from bert_jax.model.rotation import make_context, sinusoids
from bert_jax.model.seq2seq.decoder import CausalSelfAttention

LENGTH, WIDTH, HEADS = 7, 12, 2
TEXTS = np.array([1, 1, 1, 1, 2, 2, 2])
"""Two texts in one row."""
formula = formulas("self_attention")


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize(("kind", "window"), [("G", None), ("L", 1), ("causal", None)])
def test_self_attention_of_the_package_computes_the_formula(positions, kind, window):
    causal, letter = kind == "causal", "L" if window else "G"
    config = ModelConfig(
        hidden_dim=WIDTH, num_heads=HEADS, num_layers=1, positions=positions, local_window=1,
        attention_pattern=letter, init_std=0.5, dtype="float32",
    )  # fmt: skip
    attention = (CausalSelfAttention if causal else SelfAttention)(config, nnx.Rngs(params=0))
    for number, name in enumerate(("query", "key", "value", "output")):
        bias = getattr(attention, name).bias
        bias[...] = normal(*bias.shape, seed=number)
    x = normal(LENGTH, WIDTH)
    context = make_context(config, jnp.asarray(TEXTS)[None])
    heads, W_o, b_o = heads_of(nnx.to_pure_dict(nnx.state(attention, nnx.Param)))
    turn = formula.rotate if positions == "rope" else lambda vectors: vectors
    seen = formula.visible(TEXTS, causal, window)
    expected = formula.self_attention(np.array(x), heads, W_o, b_o, seen, turn)
    np.testing.assert_allclose(attention(x[None], context, 0, letter)[0], expected, atol=1e-5)
    weights = [formula.head(np.array(x), *each, seen, turn)[0] for each in heads]
    np.testing.assert_allclose(attention.weights(x[None], context, letter)[0], weights, atol=1e-5)
    assert np.ptp(weights) > 0.1


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_are_those_of_the_package(window, causal):
    ids = jnp.asarray(TEXTS)[None]
    found = visible_keys(ids, ids, window, causal=causal)[0, 0]
    np.testing.assert_array_equal(found, formula.visible(TEXTS, causal, window))


def test_sinusoids_are_those_of_the_package():
    np.testing.assert_allclose(
        sinusoids(jnp.arange(40), WIDTH), formula.sinusoids(40, WIDTH), atol=1e-5
    )
    expected = [0.841471, 0.540302, 0.0099998, 0.99995]
    np.testing.assert_allclose(formula.sinusoids(2, 4)[1], expected, atol=1e-6)


def test_weights_of_known_scores():
    np.testing.assert_allclose(
        formula.softmax(np.array([112, 96]) / np.sqrt(64)), [0.8808, 0.1192], atol=1e-4
    )
    scores = np.array([[0.7, 9, 9, 9], [0.1, 0.6, 9, 9], [0.1, 0.3, 0.6, 9], [0.1, 0.3, 0.3, 0.3]])
    seen = formula.visible(np.ones(4), causal=True)
    np.testing.assert_allclose(
        formula.softmax(np.where(seen, scores, -1e9)),
        [
            [1, 0, 0, 0], [0.3775, 0.6225, 0, 0], [0.2584, 0.3156, 0.4260, 0],
            [0.2144, 0.2619, 0.2619, 0.2619],
        ],
        atol=1e-4,
    )  # fmt: skip


def test_a_rotated_product_depends_on_the_distance_alone():
    q, k = (np.tile(np.array(normal(1, 8, seed=seed)), (6, 1)) for seed in (0, 1))
    products = formula.rotate(q) @ formula.rotate(k).T
    for distance in range(-5, 6):
        assert np.ptp(np.diagonal(products, distance)) < 1e-9
    assert np.ptp(products) > 0.1

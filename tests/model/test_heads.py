"""The plain tree of parameters, its axis names, and the pretraining logits."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretraining import apply_pretraining

from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import encode, init_params, logical_axes, pool

CONFIG = ModelConfig(
    vocab_size=100, num_positions=16, hidden_dim=32, num_layers=3, num_heads=4, mlp_dim=64,
    dtype="float32",
)  # fmt: skip
LOGICAL = {"length", "embed", "heads", "head_dim", "mlp", "vocab", "layers", None}
TOKENS = jax.device_put(np.arange(32, dtype=np.int32).reshape(2, 16))
TYPES = jax.device_put(np.arange(32, dtype=np.int32).reshape(2, 16) % 2)
SEGMENTS = jax.device_put(np.ones((2, 16), np.int32))


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


def paths(tree):
    is_leaf = lambda node: not isinstance(node, dict)  # noqa: E731
    return dict(jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0])


def test_parameters_are_a_plain_tree(params):
    assert type(params) is dict
    for path, leaf in paths(params).items():
        assert isinstance(leaf, jax.Array), path
        assert leaf.dtype == jnp.float32, path
        assert all(type(key) is jax.tree_util.DictKey for key in path)


def test_logical_axes_fit_the_parameters(params):
    axes, arrays = paths(logical_axes(CONFIG)), paths(params)
    assert axes.keys() == arrays.keys()
    for path, names in axes.items():
        assert type(names) is tuple
        assert len(names) == arrays[path].ndim, path
        assert set(names) <= LOGICAL, path
        used = [name for name in names if name]
        assert len(used) == len(set(used)), path
        in_stack = "['layers']" in jax.tree_util.keystr(path)
        assert (names[0] == "layers") == in_stack, path
        for name, size in zip(names, arrays[path].shape, strict=True):
            sizes = {"layers": 3, "embed": 32, "heads": 4, "head_dim": 8, "mlp": 64, "vocab": 128}
            assert sizes.get(name, size) == size, path


def test_initial_values(params):
    params = jax.device_get(params)
    for path, leaf in paths(params).items():
        name = path[-1].key
        if name == "bias":
            assert not leaf.any(), path
        elif name == "scale":
            assert (leaf == 1).all(), path
        else:
            real = leaf[:100] if name == "token" else leaf
            assert 0.01 < float(real.std()) < 0.025, path
            assert float(np.abs(real).max()) <= 0.04, path
    assert not params["encoder"]["embeddings"]["token"][100:].any()
    up = params["encoder"]["layers"]["mlp"]["up"]["kernel"]
    assert not np.isclose(up[0], up[1]).any(axis=(0, 1)).all()
    assert float(np.abs(np.corrcoef(up.reshape(3, -1)) - np.eye(3)).max()) < 0.1


def test_the_vocabulary_of_a_head_of_its_own_is_split_as_the_table_is():
    axes = logical_axes(dataclasses.replace(CONFIG, tied=False))
    assert axes["mlm"]["decoder"] == axes["encoder"]["embeddings"]["token"] == ("vocab", "embed")


def test_initialisation_depends_on_the_key_alone(params):
    again = init_params(CONFIG, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    other = init_params(CONFIG, jax.random.key(1))
    assert not np.allclose(params["nsp"]["kernel"], other["nsp"]["kernel"])


def test_logits_at_positions_are_those_of_everywhere(params):
    positions = np.array([[0, 3, 15], [2, 2, 9]], np.int32)
    run = jax.jit(partial(apply_pretraining, CONFIG))
    everywhere = run(params, TOKENS, TYPES, SEGMENTS)
    some = run(params, TOKENS, TYPES, SEGMENTS, positions=positions)
    assert everywhere.vocabulary.shape == (2, 16, 128)
    assert some.vocabulary.shape == (2, 3, 128)
    expected = np.take_along_axis(np.asarray(everywhere.vocabulary), positions[..., None], 1)
    np.testing.assert_allclose(some.vocabulary, expected, atol=1e-5)
    np.testing.assert_allclose(some.pairs, everywhere.pairs, atol=1e-5)


def test_padding_of_the_vocabulary_has_no_probability_and_no_gradient(params):
    # Even when its rows are not zero.
    params = jax.tree.map(lambda leaf: np.asarray(leaf) + np.float32(0.5), params)

    def entropy(params):
        logits = apply_pretraining(CONFIG, params, TOKENS, TYPES, SEGMENTS).vocabulary
        log_p = jax.nn.log_softmax(logits)
        return -(jnp.exp(log_p) * log_p).mean(), jnp.exp(log_p)

    run = jax.jit(jax.value_and_grad(entropy, has_aux=True))
    (value, p), gradients = jax.device_get(run(params))
    assert np.isfinite(value)
    assert (p[..., 100:] == 0).all()
    assert p[..., :100].min() > 0
    assert not gradients["encoder"]["embeddings"]["token"][100:].any()
    assert not gradients["mlm"]["bias"][100:].any()
    assert np.abs(gradients["mlm"]["bias"][:100]).max() > 0


def test_wide_bias_gradient_is_the_column_sum(params):
    weights = np.float32(np.random.default_rng(2).normal(size=(2, 16, 128)))

    def weighted(bias):
        changed = {**params, "mlm": {**params["mlm"], "bias": bias}}
        logits = apply_pretraining(CONFIG, changed, TOKENS, TYPES, SEGMENTS).vocabulary
        return (jnp.where(logits > -1e29, logits, 0) * weights).sum()

    gradient = np.asarray(jax.jit(jax.grad(weighted))(params["mlm"]["bias"]))
    np.testing.assert_allclose(gradient[:100], weights.sum((0, 1))[:100], rtol=1e-4, atol=1e-5)


def test_encode_takes_any_tree_with_an_encoder(params):
    tree = {"encoder": params["encoder"], "classifier": {}}

    @jax.jit
    def run(tree):
        hidden = encode(CONFIG, tree, TOKENS, TYPES, SEGMENTS)
        return hidden, pool(CONFIG, tree, hidden)

    hidden, pooled = jax.device_get(run(tree))
    assert hidden.shape == (2, 16, 32)
    dense = params["encoder"]["pooler"]["dense"]
    expected = np.tanh(hidden[:, 0] @ dense["kernel"] + dense["bias"])
    np.testing.assert_allclose(pooled, expected, atol=1e-6)

"""Activations, layer normalisation and the initialiser, where other codebases differ from BERT."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params
from bert_jax.model.layers import (
    ACTIVATIONS,
    Affine,
    Norm,
    add_bias,
    compute_dtype,
    einsum_float32,
    gated,
    gelu,
    parameter,
    sum_rows,
    truncated_normal,
)

CONFIG = ModelConfig(vocab_size=50, hidden_dim=64, num_layers=1, num_heads=4, mlp_dim=128)


@pytest.mark.parametrize(
    ("name", "at_minus_3", "at_plus_3"),
    [  # 3 * Phi(+-3) by math.erf, and the tanh form in float64
        ("gelu", -0.00404969, 2.99595031),
        ("gelu_tanh", -0.00363739, 2.99636261),
        ("relu", 0.0, 3.0),
        ("tanh", -0.99505475, 0.99505475),
    ],
)
def test_activation_values(name, at_minus_3, at_plus_3):
    values = jax.jit(ACTIVATIONS[name])(np.float32([-3.0, 0.0, 3.0]))
    np.testing.assert_allclose(values, [at_minus_3, 0.0, at_plus_3], atol=5e-7)


def test_default_activation_is_the_error_function():
    assert ModelConfig().activation == "gelu"


def normed(x, config=CONFIG):
    return jax.jit(Norm(config))(x)


def float64_norm(x, eps=1e-12):
    x = np.asarray(x, np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)


def test_norm_of_a_constant_with_small_noise():
    # E[x^2] - E[x]^2 loses all digits here: the squares differ by 1e-8 of their size.
    noise = np.random.default_rng(0).normal(size=(16, 64))
    x = np.float32(100 + 0.01 * noise)
    np.testing.assert_allclose(normed(x), float64_norm(x), atol=2e-3)


def test_norm_eps_is_1e_12():
    # Variance 1e-10: eps 1e-12 changes the result by 0.5%, eps 1e-6 by a factor of 100.
    x = np.float32(1e-5 * np.random.default_rng(0).normal(size=(16, 64)))
    np.testing.assert_allclose(normed(x), float64_norm(x), atol=1e-4)
    assert np.abs(float64_norm(x) - float64_norm(x, eps=1e-13)).max() > 1e-3


def test_norm_eps_is_that_of_the_configuration():
    x = np.float32(np.random.default_rng(0).normal(size=(16, 64)))
    norm = Norm(dataclasses.replace(CONFIG, norm_eps=0.5))
    np.testing.assert_allclose(jax.jit(norm)(x), float64_norm(x, eps=0.5), atol=1e-5)
    gradient = jax.jit(jax.grad(lambda x: (norm(x) ** 3).sum()))(x)
    by_jax = jax.jit(
        jax.grad(
            lambda x: (
                ((x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 0.5)) ** 3
            ).sum()
        )
    )(x)
    np.testing.assert_allclose(gradient, by_jax, atol=1e-4)


def test_norm_statistics_are_float32_in_bfloat16():
    x = (8 + np.random.default_rng(0).normal(size=(16, 64))).astype(jnp.bfloat16)
    y = normed(x)
    assert y.dtype == jnp.bfloat16
    # Only the output is rounded: half a unit in the last place of values below 4.
    np.testing.assert_allclose(np.asarray(y, np.float32), float64_norm(x), atol=2**-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norm_gradients_are_those_of_the_plain_formula(dtype):
    graphdef, _ = nnx.split(Norm(CONFIG))
    d = CONFIG.hidden_dim
    normal = np.random.default_rng(0).normal
    x, cotangent = (3 + 2 * normal(size=(4, 5, d))).astype(dtype), normal(size=(4, 5, d))
    scale, bias = np.float32(1 + 0.3 * normal(size=d)), np.float32(normal(size=d))

    def ours(x, scale, bias):
        return nnx.merge(graphdef, {"scale": scale, "bias": bias})(x)

    def plain(x, scale, bias):
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True)
        y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + CONFIG.norm_eps)
        return (y * scale + bias).astype(dtype)

    wanted, got = (
        jax.jit(lambda *xs, f=f: jax.vjp(f, *xs[1:])[1](xs[0]))(
            cotangent.astype(dtype), x, scale, bias
        )
        for f in (plain, ours)
    )
    for a, b in zip(wanted, got, strict=True):
        assert a.dtype == b.dtype
        limit = 1e-5 if a.dtype == jnp.float32 else 1e-2
        np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (b, a)), atol=limit)


def test_gradient_of_an_affine_bias_is_summed_in_float32():
    # 4112 times 1/256 is 16 1/16, which takes a bit more than bfloat16 has.
    affine = Affine(CONFIG, {"embed": 2}, {"mlp": 3}, nnx.Rngs(params=0))
    graphdef, state = nnx.split(affine)
    params = nnx.to_pure_dict(state)

    @jax.jit
    @jax.grad
    def gradient(params):
        y = nnx.merge(graphdef, params)(jnp.ones((4112, 2), jnp.bfloat16))
        assert y.dtype == jnp.bfloat16
        return (y / 256).astype(jnp.float32).sum()

    np.testing.assert_allclose(gradient(params)["bias"], 16.0625, rtol=1e-6)


def test_gradients_of_a_float32_product_are_those_of_a_plain_one():
    a, b = np.float32(np.random.default_rng(0).normal(size=(2, 5, 5)))

    def gradients(product):
        loss = lambda *pair: jnp.sin(product("ij,jk->ik", *pair)).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(a, b)

    for ours, plain in zip(*map(gradients, (einsum_float32, jnp.einsum)), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_truncated_normal_is_not_rescaled():
    sample = np.asarray(truncated_normal(jax.random.key(0), (1000, 1000), std=0.02))
    assert float(sample.std()) == pytest.approx(0.02 * 0.87962566, rel=2e-3)
    assert 0.0399 < float(np.abs(sample).max()) <= 0.04


def test_maps_that_end_a_layer_start_smaller_where_the_init_is_scaled():
    """By the root of two sums a layer: the other maps start alike, whatever the depth."""
    config, stds = dataclasses.replace(CONFIG, num_layers=8), {}
    make = jax.jit(init_params, static_argnums=0)
    for init in ("bert", "scaled"):
        made = make(dataclasses.replace(config, init=init), jax.random.key(0))
        layers = made["encoder"]["layers"]
        maps = (layers["attention"]["output"], layers["mlp"]["down"], layers["mlp"]["up"])
        stds[init] = np.array([np.std(each["kernel"]) for each in maps])
    np.testing.assert_allclose(stds["scaled"] / stds["bert"], [1 / 4, 1 / 4, 1], rtol=1e-5)


def test_affine_over_several_axes():
    affine = Affine(CONFIG, {"heads": 4, "head_dim": 16}, {"embed": 64}, nnx.Rngs(params=0))
    x = np.float32(np.random.default_rng(1).normal(size=(2, 3, 4, 16)))
    expected = np.einsum("blhk,hkd->bld", x, affine.kernel[...]) + affine.bias[...]
    np.testing.assert_allclose(jax.jit(affine)(x), expected, atol=1e-5)
    assert jax.eval_shape(affine, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_parameter_wants_a_name_per_axis():
    with pytest.raises(ValueError, match="1 axis names"):
        parameter(jnp.zeros((2, 3)), "embed")


@pytest.mark.parametrize(("name", "dtype"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_compute_dtype_on_cpu(name, dtype):
    assert compute_dtype(dataclasses.replace(CONFIG, dtype=name)) == jnp.dtype(dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_has_the_gradients_of_its_formula_and_keeps_its_arguments(activation):
    gate, up, slope = jax.random.normal(jax.random.key(0), (3, 4, 5))
    out, pull_back = jax.vjp(lambda gate, up: gated(activation, gate, up), gate, up)
    expected, formula = jax.vjp(lambda gate, up: ACTIVATIONS[activation](gate) * up, gate, up)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    for ours, theirs in zip(pull_back(slope), formula(slope), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert sum(leaf.size for leaf in jax.tree.leaves(pull_back)) == gate.size + up.size


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gelu_of_half_precision_is_rounded_once(dtype):
    """Value and derivative are those of float64, rounded to the type of the input."""
    x = np.asarray(np.linspace(-6, 6, 2001), jnp.dtype(dtype))
    wide = x.astype(np.float64)
    phi = 0.5 * (1 + scipy.special.erf(wide / np.sqrt(2)))
    slope = phi + wide * np.exp(-(wide**2) / 2) / np.sqrt(2 * np.pi)
    value, pull_back = jax.vjp(gelu, jnp.asarray(x))
    (gradient,) = pull_back(jnp.ones_like(value))
    unit = 2.0 ** (-8 if dtype == jnp.bfloat16 else -11)  # half the distance of neighbours
    for found, right in ((value, wide * phi), (gradient, slope)):
        np.testing.assert_allclose(
            np.asarray(found, np.float64), right, rtol=1.02 * unit, atol=2e-6
        )


@pytest.mark.parametrize(("rows", "copies"), [(1, 1), (2, 1), (2, 8)])
def test_the_sum_of_rows_by_a_product_has_the_digits_of_float32(rows, copies):
    # 4,096 terms near 1: a sum in bfloat16 would stop growing at 256.
    x = jnp.asarray(1 + np.random.default_rng(0).normal(0, 0.1, (64, 64, 8)), jnp.bfloat16)
    wanted = np.asarray(x, np.float64).sum(tuple(range(rows)))
    found = sum_rows(x, rows, copies)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "products"), [("bfloat16", 1), ("float32", 0)])
def test_a_tpu_does_not_round_the_gradient_of_a_float32_bias(dtype, products):
    gradient = jax.grad(lambda bias: add_bias(jnp.ones((4, 8), dtype), bias).sum())
    program = jax.jit(gradient).trace(jnp.zeros(8)).lower(lowering_platforms=("tpu",)).as_text()
    assert program.count("dot_general") == products

"""Kernels that end post-norm sublayers; without a GPU Pallas interprets them."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import H100
from flax import nnx

from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh, partition_spec
from bert_jax.model import encoder, fused_norm
from bert_jax.model.attention import library
from bert_jax.model.attention.library import Gpu
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream, dropout
from bert_jax.model.fused_norm import BACKWARD, normed_residual, supports
from bert_jax.model.heads import encode, init_params
from bert_jax.model.layers import Affine, Norm, add_bias, layer_norm
from bert_jax.model.layout import Layout

CONFIG = ModelConfig(
    vocab_size=32, num_positions=64, hidden_dim=32, num_layers=2, num_heads=2, mlp_dim=64,
    scan_unroll=1, dtype="bfloat16", attention_impl="xla",
)  # fmt: skip
KERNELS = r"custom_call @__gpu\$xla.gpu.triton"


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Programs of the backward pass that each take several blocks, and small blocks."""
    monkeypatch.setattr(fused_norm, "BACKWARD", BACKWARD._replace(entries=256, programs=3))


@pytest.fixture
def on_gpu(monkeypatch):
    """Makes arrays seem to lie on a GPU."""
    monkeypatch.setattr(library, "local_gpu", lambda: H100)
    monkeypatch.setattr(encoder, "platform", lambda layout: "gpu")


def inputs(shape, dtype, *, bias=True):
    """(x, y, bias, scale, shift) and the gradient of the result."""
    random = np.random.default_rng(0)
    x, y, gradient = (random.normal(size=shape).astype(dtype) for _ in range(3))
    vectors = [random.normal(size=shape[-1]).astype(np.float32) for _ in range(3)]
    return (x, y, vectors[0] if bias else None, *vectors[1:]), gradient


def stream_of(rows, seed=5):
    return DropoutStream(jnp.uint32(seed), jnp.arange(7, 7 + rows, dtype=jnp.uint32))


def norm_of(width, **change):
    return Norm(dataclasses.replace(CONFIG, **change), width)


def ours(rate, x, y, bias, scale, shift, stream=None):
    width, has_bias = len(scale), bias is not None
    affine = Affine(CONFIG, {None: 1}, {"embed": width}, nnx.Rngs(0), bias=has_bias)
    norm = norm_of(width)
    affine.bias = nnx.Param(bias) if has_bias else None
    norm.scale, norm.bias = nnx.Param(scale), nnx.Param(shift)
    return normed_residual(x, y, affine, norm, rate, stream or stream_of(len(x)), 3)


def plain(rate, x, y, bias, scale, shift):
    y = y if bias is None else add_bias(y, bias)
    return layer_norm(x + dropout(y, rate, stream_of(len(x)), 3), scale, shift, 1e-12)


def value_and_gradients(f, arrays, gradient):
    def run(arrays, gradient):
        out, pull_back = jax.vjp(f, *arrays)
        return out, pull_back(gradient)

    return jax.tree.leaves(jax.jit(run)(arrays, gradient))


@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize(("rate", "bias"), [(0.0, True), (0.1, True), (0.1, False)])
def test_values_and_gradients_are_those_of_the_separate_operations(width, rate, bias):
    arrays, gradient = inputs((3, 7, width), np.float32, bias=bias)
    found, right = (
        value_and_gradients(partial(f, rate), arrays, gradient) for f in (ours, plain)
    )  # fmt: skip
    assert len(found) == 5 + bias
    for one, other in zip(found, right, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_mask_is_the_mask_of_dropout():
    # Where the residual is zero and `y` is not, an entry of the gradient is zero if it is dropped.
    arrays, gradient = inputs((3, 7, 96), np.float32)
    _, _, dy, *_ = value_and_gradients(partial(ours, 0.3), arrays, gradient)
    kept = dropout(jnp.ones((3, 7, 96)), 0.3, stream_of(3), 3) != 0
    np.testing.assert_array_equal(dy != 0, kept)


def test_bfloat16_is_about_as_close_to_float32_as_the_separate_operations():
    arrays, gradient = inputs((2, 64, 96), jnp.bfloat16)
    exact = value_and_gradients(
        partial(plain, 0.1), *jax.tree.map(lambda x: x.astype(np.float32), (arrays, gradient))
    )
    found, other = (
        value_and_gradients(partial(f, 0.1), arrays, gradient) for f in (ours, plain)
    )  # fmt: skip
    for mine, theirs, right in zip(found, other, exact, strict=True):
        assert mine.dtype == theirs.dtype
        errors = [np.abs(np.asarray(x, np.float32) - right).mean() for x in (mine, theirs)]
        assert errors[0] < 1.5 * errors[1] + 1e-6


@pytest.mark.parametrize("width", [768, 1024])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_kernels_for_cuda_are_made_without_a_gpu(monkeypatch, width, rate):
    monkeypatch.setattr(fused_norm, "BACKWARD", BACKWARD)
    arrays, gradient = inputs((8, 128, width), jnp.bfloat16)

    def run(arrays, gradient):
        out, pull_back = jax.vjp(partial(ours, rate), *arrays)
        return out, pull_back(gradient)

    lowered = jax.jit(run).trace(arrays, gradient).lower(lowering_platforms=("cuda",))
    assert len(re.findall(KERNELS, lowered.as_text())) == 2


def test_the_runs_of_a_sweep_share_programs():
    arrays, gradient = inputs((2, 9, 64), jnp.bfloat16)

    def run(arrays, seed):
        f = partial(ours, 0.3, stream=stream_of(2, seed))
        out, pull_back = jax.vjp(f, *arrays)
        return out, pull_back(jnp.asarray(gradient))

    both = jax.jit(jax.vmap(run))
    stacked, seeds = jax.tree.map(lambda x: np.stack([x, -x]), arrays), np.uint32([5, 6])
    together = both(stacked, seeds)
    for n in range(2):
        alone = jax.jit(run)(jax.tree.map(lambda x, n=n: x[n], stacked), seeds[n])
        for one, other in zip(*map(jax.tree.leaves, (together, alone)), strict=True):
            np.testing.assert_array_equal(one[n], other)
    made = both.trace(stacked, seeds).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(KERNELS, made)) == 2


def test_only_a_sum_and_two_numbers_a_token_are_kept():
    arrays, _ = inputs((2, 16, 64), jnp.bfloat16)
    _, pull_back = jax.vjp(partial(ours, 0.1), *arrays)
    sizes = [x.nbytes for x in jax.tree.leaves(pull_back) if x.ndim >= 2]
    assert sorted(sizes) == [2 * 16 * 4, 2 * 16 * 4, 2 * 16 * 64 * 2]


def test_what_the_kernels_need(on_gpu, monkeypatch):
    norm, half = norm_of(64), partial(jnp.zeros, (2, 8, 64))
    assert supports(half(jnp.bfloat16), norm, None)
    assert not supports(half(jnp.float32), norm, None)
    assert not supports(half(jnp.bfloat16), norm_of(64, norm="rms"), None)
    split = Layout(make_mesh(MeshConfig(data=4, tensor=2)), partition_spec)
    assert not supports(half(jnp.bfloat16), norm, split)
    monkeypatch.setattr(library, "local_gpu", lambda: Gpu((7, 5), None))
    assert not supports(half(jnp.bfloat16), norm, None)
    monkeypatch.setattr(library, "local_gpu", lambda: H100)
    monkeypatch.setattr(fused_norm, "plgpu", None)
    assert not supports(half(jnp.bfloat16), norm, None)


def gradients_of(config, platform=None):
    """The gradients of a model's parameters, or, with a platform, the text of their program."""
    params = init_params(config, jax.random.key(0))
    ids = jnp.asarray(np.random.default_rng(0).integers(1, 32, (2, 64)), jnp.int32)

    def loss(params):
        states = encode(config, params, ids, ids * 0, ids * 0 + 1, stream_of(2))
        return (states.astype(jnp.float32) ** 3).sum()

    compute = jax.jit(jax.grad(loss))
    if platform:
        return compute.trace(params).lower(lowering_platforms=(platform,)).as_text()
    return compute(params)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_post_norm_model_has_the_same_gradients_with_kernels(on_gpu, monkeypatch, remat):
    config = dataclasses.replace(CONFIG, remat=remat)
    found = gradients_of(config)
    assert len(re.findall(KERNELS, gradients_of(config, "cuda"))) == (6 if remat == "full" else 4)
    monkeypatch.undo()
    right = gradients_of(config)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        bound = 0.03 * np.abs(other).max() + 1e-4
        np.testing.assert_allclose(one, other, atol=bound)


@pytest.mark.parametrize(
    "change", [{"norm_order": "pre"}, {"dtype": "float32"}, {"norm": "rms"}], ids=str
)
def test_other_models_have_no_kernels(on_gpu, change):
    assert not re.findall(KERNELS, gradients_of(dataclasses.replace(CONFIG, **change), "cuda"))


def test_a_call_without_gradient_has_no_kernels():
    arrays, _ = inputs((2, 16, 64), jnp.bfloat16)
    made = jax.jit(partial(ours, 0.1)).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert not re.findall(KERNELS, made.as_text())

"""Attention on GPUs: the kernel in Triton, cuDNN, and which of them is taken.

Without a GPU Pallas interprets the kernel, and cuDNN's call runs by XLA.
"""

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import (
    H100,
    B,
    H,
    asked_of,
    assert_all_close,
    attend,
    dropout_of,
    inputs,
    jitted,
    value_and_gradients,
)  # fmt: skip

from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh, partition_spec
from bert_jax.model.attention import attend as attention
from bert_jax.model.attention import library, triton
from bert_jax.model.attention.attend import choose
from bert_jax.model.attention.library import Gpu
from bert_jax.model.attention.xla import Asked, is_banded
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream
from bert_jax.model.heads import encode, init_params
from bert_jax.model.layout import Layout

HAS_GPU = any(d.platform == "gpu" for d in jax.devices())


@pytest.fixture
def on_gpu(gpu, monkeypatch):
    """Makes arrays seem to lie on the GPU."""
    monkeypatch.setattr(attention, "platform", lambda layout: "gpu")


@pytest.mark.parametrize("length", [64, 192])
@pytest.mark.parametrize(("rate", "window"), [(0.0, None), (0.3, None), (0.3, 20)])
def test_triton_values_and_gradients_equal_xla(on_gpu, length, rate, window):
    arrays, segments = inputs(length, length, dtype=jnp.bfloat16)
    options = {**segments, **dropout_of(rate), "window": window}
    ours = value_and_gradients(arrays, **options, impl="triton")
    exact = [x.astype(np.float32) for x in arrays]
    right = [x.astype(jnp.bfloat16) for x in value_and_gradients(exact, **options, impl="xla")]
    assert_all_close(ours, right, 2e-2)


def test_triton_attends_to_other_rows_than_the_queries(on_gpu):
    arrays, segments = inputs(64, 128, dtype=jnp.bfloat16)
    options = {**segments, **dropout_of(0.3)}
    ours = value_and_gradients(arrays, **options, impl="triton")
    assert_all_close(ours, value_and_gradients(arrays, **options, impl="xla"), 2e-2)


def test_triton_drops_exactly_the_elements_that_xla_drops(on_gpu):
    # Equal weights and the identity as values: the output is the mask.
    ids = np.ones((B, 128), np.int32)
    q = np.zeros((B, 128, H, 128), jnp.bfloat16)
    v = np.broadcast_to(np.eye(128, dtype=jnp.bfloat16)[:, None, :], q.shape)
    options = {"q_segment_ids": ids, "kv_segment_ids": ids, **dropout_of(0.3)}
    ours, right = (
        np.asarray(jitted(q, q, v, **options, impl=impl), np.float32) != 0
        for impl in ("triton", "xla")
    )
    np.testing.assert_array_equal(ours, right)
    assert 0.68 < ours.mean() < 0.72


def test_triton_gives_queries_without_keys_the_mean_and_no_gradient(on_gpu):
    arrays, segments = inputs(64, 64, dtype=jnp.bfloat16)
    segments["q_segment_ids"][:] = 9
    out, *gradients = value_and_gradients(arrays, **segments, impl="triton")
    mean = np.broadcast_to(arrays[2].astype(np.float32).mean(1, keepdims=True), out.shape)
    np.testing.assert_allclose(np.asarray(out, np.float32), mean, atol=1e-2)
    for gradient in gradients:
        np.testing.assert_array_equal(np.asarray(gradient, np.float32), 0)


def test_triton_on_a_mesh_with_split_heads(on_gpu):
    arrays, segments = inputs(64, 64, heads=4, rows=4, dtype=jnp.bfloat16)
    options = {**segments, **dropout_of(0.3, rows=4), "impl": "triton"}
    alone = value_and_gradients(arrays, **options)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    split = value_and_gradients(arrays, **options, layout=Layout(mesh, partition_spec))
    assert_all_close(split, alone, 0)


def test_the_runs_of_a_sweep_share_a_program_of_triton(on_gpu):
    """Triton has three axes of programs; a kernel for CUDA is made without a GPU."""
    arrays, segments = inputs(64, 64, dtype=jnp.bfloat16)
    segments = jax.device_put(segments)
    rows = jax.device_put(dropout_of(0.3)["stream"].row_index)

    def run(arrays, seed):
        *qkv, gradient = arrays
        options = {**segments, "dropout_rate": 0.3, "stream": DropoutStream(seed, rows)}
        out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, **options, impl="triton"), *qkv)
        return out, *pull_back(gradient)

    both = jax.jit(jax.vmap(run))
    stacked, seeds = [np.stack([x, -x]) for x in arrays], np.arange(5, 7, dtype=np.uint32)
    together = both(stacked, seeds)
    for n in range(2):
        alone = jax.jit(run)([x[n] for x in stacked], seeds[n])
        assert_all_close([x[n] for x in together], alone, 0)
    made = both.trace(stacked, seeds).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @__gpu\$xla.gpu.triton", made)) == 3


@pytest.mark.parametrize(
    ("sizes", "found", "reason"),
    [
        ((128, 128, 40, jnp.bfloat16), H100, "a head_dim of 16, 32, 64, 128, not 40"),
        ((128, 96, 64, jnp.bfloat16), H100, "multiples of 64, not 128 and 96"),
        ((128, 128, 64, jnp.float32), H100, "model.dtype 'bfloat16', not float32"),
        ((128, 128, 64, jnp.bfloat16), Gpu((7, 5), None), "8.0 (Ampere) or later, not 7.5"),
        ((128, 128, 64, jnp.bfloat16), Gpu(None, None), "8.0 (Ampere) or later"),
    ],
)
def test_what_triton_needs(gpu, sizes, found, reason):
    gpu(found)
    *lengths, dtype = sizes
    assert reason in triton.unsupported(*lengths, jnp.dtype(dtype))


def test_a_jax_without_triton_has_the_other_implementations(gpu, monkeypatch):
    monkeypatch.setattr(triton, "plgpu", None)
    asked = asked_of(128, 128, 64, jnp.bfloat16, 0.1)
    assert choose("gpu", asked) == "xla"
    assert "Triton backend, which JAX" in triton.unsupported(128, 128, 64, jnp.dtype("bfloat16"))


def test_cudnn_call_by_xla():
    (q, k, v, _), segments = inputs()
    for window in (None, 20):
        asked = partial(Asked, window=window)
        run = jax.jit(lambda *arrays, asked=asked: library.cudnn_attention(asked(*arrays), "xla"))
        out = run(q, k, v, *segments.values())
        expected = jitted(q, k, v, **segments, impl="xla", window=window)
        np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.skipif(not HAS_GPU, reason="cuDNN needs a GPU")
def test_cudnn_values_and_gradients_equal_xla():
    arrays, segments = inputs(dtype=jnp.bfloat16)
    ours = value_and_gradients(arrays, **segments, impl="cudnn")
    assert_all_close(ours, value_and_gradients(arrays, **segments, impl="xla"), 2e-2)


@pytest.mark.parametrize(
    ("platform", "shape", "rate", "dtype", "expected"),
    [
        ("cpu", (8, 512, 12, 64), 0.1, jnp.bfloat16, "xla"),
        ("tpu", (8, 512, 12, 64), 0.1, jnp.bfloat16, "fused"),
        ("tpu", (8, 512, 12, 64), 0.0, jnp.bfloat16, "fused"),
        ("tpu", (8, 128, 12, 64), 0.1, jnp.bfloat16, "fused"),
        ("tpu", (8, 64, 12, 64), 0.1, jnp.bfloat16, "xla"),
        ("tpu", (8, 500, 12, 64), 0.1, jnp.bfloat16, "xla"),
        ("tpu", (8, 512, 12, 40), 0.1, jnp.bfloat16, "xla"),
        ("tpu", (8, 2048, 12, 64), 0.1, jnp.bfloat16, "fused"),
        ("tpu", (8, 8192, 12, 64), 0.0, jnp.bfloat16, "fused"),
        ("tpu", (8, 16384, 12, 64), 0.0, jnp.bfloat16, "splash"),
        ("tpu", (8, 16384, 12, 64), 0.1, jnp.bfloat16, "xla"),
        ("gpu", (8, 512, 12, 64), 0.0, jnp.bfloat16, "triton"),
        ("gpu", (8, 64, 12, 64), 0.0, jnp.float16, "triton"),
        ("gpu", (8, 96, 12, 64), 0.0, jnp.float16, "cudnn"),
        ("gpu", (8, 1024, 12, 64), 0.0, jnp.bfloat16, "triton"),
        ("gpu", (8, 1088, 12, 64), 0.0, jnp.bfloat16, "cudnn"),
        ("gpu", (8, 1088, 12, 64), 0.1, jnp.bfloat16, "triton"),
        ("gpu", (8, 127, 12, 64), 0.0, jnp.bfloat16, "xla"),
        ("gpu", (8, 512, 12, 64), 0.1, jnp.bfloat16, "triton"),
        ("gpu", (8, 96, 12, 64), 0.1, jnp.bfloat16, "xla"),
        ("gpu", (8, 512, 12, 60), 0.0, jnp.bfloat16, "xla"),
        ("gpu", (8, 512, 12, 136), 0.0, jnp.bfloat16, "xla"),
        ("gpu", (8, 512, 12, 64), 0.0, jnp.float32, "xla"),
    ],
)
def test_auto(gpu, platform, shape, rate, dtype, expected):
    _, length, _, head_dim = shape
    asked = asked_of(length, length, head_dim, dtype, rate)
    assert choose(platform, asked) == expected


@pytest.mark.parametrize(
    ("length", "rate", "dtype", "banded", "expected"),
    [
        (8192, 0.0, jnp.bfloat16, True, "xla"),
        (256, 0.0, jnp.float32, True, "xla"),
        (192, 0.0, jnp.bfloat16, False, "triton"),  # a band as wide as the row: a mask serves
        (192, 0.0, jnp.float32, False, "xla"),
        (512, 0.1, jnp.bfloat16, False, "triton"),
    ],
)
def test_windows_on_a_gpu(gpu, length, rate, dtype, banded, expected):
    asked = asked_of(length, length, 64, dtype, rate, window=64)
    assert (is_banded(asked), choose("gpu", asked)) == (banded, expected)


@pytest.mark.parametrize(("impl", "notes"), [("cudnn", 1), ("auto", 0)])
def test_local_layers_take_the_band_in_place_of_cudnn_and_say_so(
    gpu, monkeypatch, caplog, impl, notes
):
    monkeypatch.setattr(attention, "platform", lambda layout: "gpu")
    attention._warn_once.cache_clear()
    arrays, segments = inputs(dtype=jnp.bfloat16)
    ours = value_and_gradients(arrays, **segments, window=20, impl=impl)
    monkeypatch.undo()
    theirs = value_and_gradients(arrays, **segments, window=20, impl="xla")
    assert_all_close(ours, theirs, 2e-2)
    assert ["block by block" in each.getMessage() for each in caplog.records] == [True] * notes


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_probabilities_kept_in_bfloat16_have_the_gradients_of_float32_scores(
    gpu, monkeypatch, rate
):
    arrays, segments = inputs(dtype=jnp.bfloat16)
    options = {**segments, **dropout_of(rate)}
    exact = value_and_gradients([x.astype(np.float32) for x in arrays], **options, impl="xla")
    whole = value_and_gradients(arrays, **options, impl="xla")
    monkeypatch.setattr(attention, "platform", lambda layout: "gpu")
    half = value_and_gradients(arrays, **options, impl="xla")
    np.testing.assert_array_equal(*(np.asarray(x[0], np.float32) for x in (half, whole)))
    assert not all(np.array_equal(x, y) for x, y in zip(half, whole, strict=True))
    for ours, theirs, right in zip(half, whole, exact, strict=True):
        errors = [np.abs(np.asarray(x, np.float32) - right).max() for x in (ours, theirs)]
        assert errors[0] < max(2e-2, 1.5 * errors[1])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Gpu((8, 0), 90800), "cudnn"),  # A100
        (Gpu((12, 0), 91100), "cudnn"),
        (Gpu((7, 5), 91100), "xla"),  # T4: before Ampere
        (Gpu(None, 91100), "xla"),  # not CUDA's
        (Gpu((9, 0), None), "triton"),  # no cuDNN
        (Gpu((10, 3), 91000), "triton"),  # B300 wants cuDNN 9.11
        (Gpu((10, 3), 91100), "cudnn"),
    ],
)
def test_auto_takes_cudnn_for_long_rows_where_the_card_has_it(gpu, found, expected):
    gpu(found)
    assert choose("gpu", asked_of(2048, 2048, 64, jnp.bfloat16)) == expected


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [("8.6", 90800, Gpu((8, 6), 90800)), ("gfx942", None, Gpu(None, None))],
)
def test_the_local_gpu_is_the_one_that_jax_has(monkeypatch, capability, version, expected):
    card = SimpleNamespace(compute_capability=capability)
    asked = []
    monkeypatch.setattr(jax, "local_devices", lambda backend: asked.append(backend) or [card])
    versions = SimpleNamespace(cudnn_get_version=lambda: version) if version else None
    monkeypatch.setattr("jax._src.lib.cuda_versions", versions)
    assert library.local_gpu() == expected
    assert asked == ["gpu"]


def traced_layer(shape, rate, **options):
    """Make a function of attention's sum, and a query without values, for tracing."""
    ids = jax.device_put(np.ones(shape[:2], np.int32))
    options |= dropout_of(rate, rows=shape[0]) | {"q_segment_ids": ids, "kv_segment_ids": ids}
    options["stream"] = jax.device_put(options["stream"])
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return lambda q: attend(q, q, q, **options).sum(), q


SHORT = (2, 128, 2, 16)
ODD = (2, 160, 2, 16)
"""Rows that no kernel with dropout takes."""


@pytest.mark.parametrize(
    ("platform", "shape", "rate", "found", "parts"),
    [
        (
            "tpu",
            (1, 16384, 12, 64),
            0.1,
            H100,
            ["16384 tokens", " attention_dropout_rate to 0"],
        ),
        ("tpu", (1, 200, 2, 16), 0.0, H100, ["'fused' needs", "multiples of 128, not 200"]),
        ("gpu", ODD, 0.1, H100, ["'cudnn' has no dropout", " attention_dropout_rate to 0"]),
        ("gpu", SHORT, 0.0, Gpu((7, 5), 91100), ["'cudnn' needs", "8.0 (Ampere)", "not 7.5"]),
        (
            "gpu",
            ODD,
            0.1,
            Gpu((9, 0), None),
            [
                "'cudnn' needs cuDNN, which JAX does not find",
                "'triton' needs",
                "multiples of 64, not 160",
            ],
        ),
        ("gpu", (2, 129, 2, 16), 0.0, H100, ["'cudnn' needs even lengths, not 129 and 129"]),
    ],
)
def test_scores_that_xla_keeps_are_said_once(
    gpu, monkeypatch, caplog, platform, shape, rate, found, parts
):
    gpu(found)
    monkeypatch.setattr(attention, "platform", lambda layout: platform)
    attention._warn_once.cache_clear()
    layer, q = traced_layer(shape, rate, layers=24)
    jax.eval_shape(layer, q)
    assert caplog.records == [], "nothing is kept where nothing is differentiated"
    for _ in range(2):
        jax.eval_shape(jax.grad(layer), q)
    (record,) = caplog.records
    _, length, heads, _ = shape
    size = f"{24 * heads * length**2 * (2 if platform == 'gpu' else 4) / 2**30:.2g} GiB"
    for part in (*parts, size, "(remat=full"):
        assert part in record.getMessage()


@pytest.mark.parametrize(
    ("platform", "shape", "rate"),
    [
        ("cpu", (1, 2048, 12, 64), 0.1),
        ("tpu", (1, 1024, 2, 64), 0.1),
        ("tpu", (2, 64, 2, 16), 0.1),
        ("gpu", (2, 64, 2, 16), 0.1),
    ],
)
def test_where_nothing_is_lost_nothing_is_said(gpu, monkeypatch, caplog, platform, shape, rate):
    monkeypatch.setattr(attention, "platform", lambda layout: platform)
    attention._warn_once.cache_clear()
    layer, q = traced_layer(shape, rate)
    jax.eval_shape(jax.grad(layer), q)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("remat", "layers", "dtype"),
    [("none", 3, "float32"), ("full", 1, "float32"), ("none", 3, "bfloat16")],
)
def test_the_model_says_how_many_layers_keep_scores(gpu, monkeypatch, caplog, remat, layers, dtype):
    monkeypatch.setattr(attention, "platform", lambda layout: "gpu")
    attention._warn_once.cache_clear()
    config = ModelConfig(vocab_size=32, num_positions=160, hidden_dim=32, num_layers=3,
                         num_heads=2, mlp_dim=32, remat=remat, dtype=dtype)  # fmt: skip
    params = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    ids = jax.device_put(np.ones((B, 160), np.int32))
    rows = jax.device_put(np.arange(B, dtype=np.uint32))

    def loss(params):
        return encode(config, params, ids, ids, ids, DropoutStream(jnp.uint32(1), rows)).sum()

    jax.eval_shape(jax.grad(loss), params)
    (record,) = caplog.records
    size = 2 if config.dtype == "bfloat16" else 4  # bytes
    assert f"{layers * 2 * 160**2 * size / 2**30:.2g} GiB" in record.getMessage()
    assert ("(remat=full" in record.getMessage()) == (remat == "none")

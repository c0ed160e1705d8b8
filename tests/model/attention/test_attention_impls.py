"""Every implementation of attention against `xla`: values, gradients, segments, dropout, meshes.

The TPU kernels run in Pallas's interpreter here; that they compile for TPUs is tested in
test_attention_tpu.py. cuDNN runs where there is a GPU; elsewhere its call runs by XLA.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import asked_of, attend
from jax.sharding import PartitionSpec

from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh, partition_spec
from bert_jax.errors import UserError
from bert_jax.model.attention import attend as attention
from bert_jax.model.attention import fused, fused_plan, library
from bert_jax.model.attention.attend import choose
from bert_jax.model.attention.library import Gpu
from bert_jax.model.attention.xla import Asked, is_banded
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream
from bert_jax.model.heads import encode, init_params
from bert_jax.model.layout import Layout
from bert_jax.model.rotation import rotation

B, H, K = 2, 2, 16
HAS_GPU = any(d.platform == "gpu" for d in jax.devices())


def inputs(length=128, keys=128, heads=H, rows=B, dtype=jnp.float32):
    """(q, k, v, gradient of the output) and segments: a packed row and a padded one."""
    random = np.random.default_rng(0)
    arrays = [
        random.normal(size=(rows, n, heads, K)).astype(dtype) for n in (length, keys, keys, length)
    ]

    def ids(n):
        packed = np.repeat([1, 2, 3, 0], [n // 4 + 3, n // 4 - 1, n // 4 + 5, n // 4 - 7])
        padded = np.repeat([1, 0], [n // 2 - 5, n // 2 + 5])
        return np.stack([packed, padded] * (rows // 2)).astype(np.int32)

    return arrays, {"q_segment_ids": ids(length), "kv_segment_ids": ids(keys)}


def dropout_of(rate, rows=B):
    return {
        "dropout_rate": rate,
        "stream": DropoutStream(np.uint32(5), np.arange(7, 7 + rows, dtype=np.uint32)),
        "site": 3,
    }


STATIC = ("dropout_rate", "site", "impl", "window")
jitted = jax.jit(attend, static_argnames=STATIC)


@partial(jax.jit, static_argnames=(*STATIC, "chunk"))
def compute(arrays, *, chunk, **options):
    del chunk  # a constant of the module that is compiled in
    *qkv, gradient = arrays
    out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, **options), *qkv)
    return out, *pull_back(gradient)


def value_and_gradients(arrays, layout=None, **options):
    fixed = {name: options.pop(name) for name in STATIC if name in options}

    @jax.jit
    def run(arrays, options):
        *qkv, gradient = arrays
        out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, **options, **fixed, layout=layout), *qkv)
        return out, *pull_back(gradient)

    return run(arrays, options)


def assert_all_close(ours, reference, tolerance):
    for x, y in zip(ours, reference, strict=True):
        assert x.dtype == y.dtype
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("impl", "rate"),
    [("fused", 0.0), ("fused", 0.3), ("splash", 0.0), ("long", 0.0), ("long", 0.3)],
)
def test_values_and_gradients_equal_xla(impl, rate, dtype, monkeypatch):
    monkeypatch.setattr(fused_plan, "SCORES_PER_CHUNK", 128 * 128)  # two chunks
    keys = 128
    if impl == "long":  # two chunks of queries, two blocks of keys
        monkeypatch.setattr(fused_plan, "SHORT_LENGTH", 0)
        impl, keys = "fused", 256
    arrays, segments = inputs(length=256, keys=keys, dtype=dtype)
    options = {**segments, **dropout_of(rate)}
    ours = value_and_gradients(arrays, **options, impl=impl)
    reference = value_and_gradients(arrays, **options, impl="xla")
    # bfloat16: three roundings of 2^-9 on values of about 1, and another order of them.
    assert_all_close(ours, reference, 2e-6 if dtype == jnp.float32 else 2e-2)


def test_fused_drops_exactly_the_elements_that_xla_drops():
    # Equal weights and the identity as values: the output is the mask.
    ids = np.ones((B, 128), np.int32)
    q = np.zeros((B, 128, H, 128), np.float32)
    v = np.broadcast_to(np.eye(128, dtype=np.float32)[:, None, :], q.shape)
    options = {"q_segment_ids": ids, "kv_segment_ids": ids, **dropout_of(0.3)}
    ours, reference = (
        np.asarray(jitted(q, q, v, **options, impl=impl)) != 0 for impl in ("fused", "xla")
    )
    np.testing.assert_array_equal(ours, reference)
    assert 0.68 < ours.mean() < 0.72


@pytest.mark.parametrize("impl", ["fused", "splash"])
def test_unseen_keys_change_no_bit(impl):
    (q, k, v, _), segments = inputs()
    hidden = (segments["kv_segment_ids"] != 1)[..., None, None]
    out = np.asarray(jitted(q, k, v, **segments, impl=impl))
    k_other, v_other = (np.where(hidden, np.float32(n), x) for n, x in ((9, k), (-9, v)))
    other = np.asarray(jitted(q, k_other, v_other, **segments, impl=impl))
    seen = segments["q_segment_ids"] == 1
    np.testing.assert_array_equal(other[seen], out[seen])
    assert not np.array_equal(other[~seen], out[~seen])


@pytest.mark.parametrize("impl", ["fused", "splash"])
def test_rows_of_padding_are_finite(impl):
    arrays, segments = inputs()
    padding = jax.tree.map(np.zeros_like, segments)
    ours = value_and_gradients(arrays, **padding, impl=impl)
    assert_all_close(ours, value_and_gradients(arrays, **padding, impl="xla"), 2e-6)
    lonely = {**segments, "q_segment_ids": np.full_like(segments["q_segment_ids"], 9)}
    for array in value_and_gradients(arrays, **lonely, impl=impl):
        assert np.isfinite(np.asarray(array)).all()


@pytest.mark.parametrize("impl", ["xla", "fused", "splash"])
def test_without_a_stream_nothing_is_dropped_or_refused(impl):
    (q, k, v, _), segments = inputs()
    plain, with_rate = (
        jitted(q, k, v, **segments, impl=impl, dropout_rate=rate) for rate in (0.0, 0.3)
    )
    np.testing.assert_array_equal(with_rate, plain)


@pytest.mark.parametrize("is_long", [False, True])
def test_fused_gives_queries_without_keys_the_mean_as_xla_does(is_long, monkeypatch):
    if is_long:
        monkeypatch.setattr(fused_plan, "SHORT_LENGTH", 0)
    arrays, segments = inputs()
    segments["q_segment_ids"][:, :60] = 9
    options = {**segments, **dropout_of(0.3)}
    ours = value_and_gradients(arrays, **options, impl="fused")
    assert_all_close(ours, value_and_gradients(arrays, **options, impl="xla"), 2e-6)


@pytest.mark.parametrize(("impl", "rate"), [("fused", 0.3), ("splash", 0.0)])
def test_on_a_mesh_with_split_heads_and_inside_a_shard_map(impl, rate):
    arrays, segments = inputs(heads=4, rows=4)
    options = {**segments, **dropout_of(rate, rows=4), "impl": impl}
    alone = value_and_gradients(arrays, **options)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    split = value_and_gradients(arrays, **options, layout=Layout(mesh, partition_spec))
    assert_all_close(split, alone, 2e-6)

    rows = PartitionSpec(("data", "fsdp"))
    seed, row_index = jax.device_put(options["stream"])

    @partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    def local(q, k, v, q_ids, kv_ids, row_index):
        mine = {**options, "q_segment_ids": q_ids, "kv_segment_ids": kv_ids}
        return attend(q, k, v, **{**mine, "stream": DropoutStream(seed, row_index)})

    out = jax.jit(local)(*arrays[:3], *segments.values(), row_index)
    np.testing.assert_allclose(out, alone[0], atol=2e-6)


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


H100 = Gpu((9, 0), 91100)


@pytest.fixture
def gpu(monkeypatch):
    """Sets the GPU that this process has; an H100 with cuDNN to begin with."""

    def become(found: Gpu):
        monkeypatch.setattr(library, "local_gpu", lambda: found)

    become(H100)
    return become


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
        ("gpu", (8, 512, 12, 64), 0.0, jnp.bfloat16, "cudnn"),
        ("gpu", (8, 64, 12, 64), 0.0, jnp.float16, "cudnn"),
        ("gpu", (8, 127, 12, 64), 0.0, jnp.bfloat16, "xla"),
        ("gpu", (8, 512, 12, 64), 0.1, jnp.bfloat16, "xla"),
        ("gpu", (8, 512, 12, 60), 0.0, jnp.bfloat16, "xla"),
        ("gpu", (8, 512, 12, 136), 0.0, jnp.bfloat16, "xla"),
        ("gpu", (8, 512, 12, 64), 0.0, jnp.float32, "xla"),
    ],
)
def test_auto(gpu, platform, shape, rate, dtype, expected):
    _, length, _, head_dim = shape
    asked = asked_of(length, length, head_dim, dtype, rate)
    assert choose(platform, asked) == expected


@pytest.mark.parametrize("on_mesh", [True, False])
@pytest.mark.parametrize(
    ("kind", "inside"), [("TPU v3", False), ("TPU v4", False), ("TPU v5 lite", True)]
)
def test_a_chip_with_little_room_gets_rows_that_are_rotated(monkeypatch, kind, inside, on_mesh):
    """Without a mesh the chip is the one that JAX takes by itself."""
    found = []

    def kernel(asked, heads):
        found.append(len(asked.angles or ()))
        return asked.q

    (q, k, v, _), segments = inputs()
    angles = rotation(jnp.arange(128)[None].repeat(B, 0), 10_000.0, K)
    monkeypatch.setattr(attention, "device_kind", lambda layout: kind.lower() if on_mesh else None)
    if not on_mesh:
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    monkeypatch.setattr(attention, "platform", lambda layout: "tpu")
    monkeypatch.setattr(fused, "fused_attention", kernel)
    jax.eval_shape(partial(attend, impl="fused"), q, k, v, **segments, angles=angles)
    assert found == [len(angles) * inside]


@pytest.mark.parametrize(
    ("length", "rate", "dtype", "banded", "expected"),
    [
        (8192, 0.0, jnp.bfloat16, True, "xla"),
        (256, 0.0, jnp.float32, True, "xla"),
        (192, 0.0, jnp.bfloat16, False, "cudnn"),  # a band as wide as the row: a mask serves
        (192, 0.0, jnp.float32, False, "xla"),
        (512, 0.1, jnp.bfloat16, False, "xla"),
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
        (Gpu((9, 0), None), "xla"),  # no cuDNN
        (Gpu((10, 3), 91000), "xla"),  # B300 wants cuDNN 9.11
        (Gpu((10, 3), 91100), "cudnn"),
    ],
)
def test_auto_takes_cudnn_where_the_card_has_it(gpu, found, expected):
    gpu(found)
    assert choose("gpu", asked_of(512, 512, 64, jnp.bfloat16)) == expected


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


SHORT = (2, 128, 2, 16)


@pytest.mark.parametrize(
    ("platform", "shape", "rate", "found", "parts"),
    [
        ("tpu", (1, 16384, 12, 64), 0.1, H100, ["16384 tokens", "attention_dropout_rate to 0"]),
        ("tpu", (1, 200, 2, 16), 0.0, H100, ["'fused' needs", "multiples of 128, not 200"]),
        ("gpu", SHORT, 0.1, H100, ["'cudnn' has no dropout", "attention_dropout_rate to 0"]),
        ("gpu", SHORT, 0.0, Gpu((7, 5), 91100), ["'cudnn' needs", "8.0 (Ampere)", "not 7.5"]),
        ("gpu", SHORT, 0.1, Gpu((9, 0), None), ["'cudnn' needs cuDNN, which JAX does not find"]),
        ("gpu", (2, 129, 2, 16), 0.0, H100, ["'cudnn' needs even lengths, not 129 and 129"]),
    ],
)
def test_scores_that_xla_keeps_are_said_once(
    gpu, monkeypatch, caplog, platform, shape, rate, found, parts
):
    gpu(found)
    monkeypatch.setattr(attention, "platform", lambda layout: platform)
    attention._warn_once.cache_clear()
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    ids = jax.device_put(np.ones(shape[:2], np.int32))
    options = dropout_of(rate, rows=shape[0])
    options["stream"] = jax.device_put(options["stream"])

    def layer(q):
        return attend(q, q, q, q_segment_ids=ids, kv_segment_ids=ids, **options, layers=24).sum()

    jax.eval_shape(layer, q)
    assert caplog.records == [], "nothing is kept where nothing is differentiated"
    for _ in range(2):
        jax.eval_shape(jax.grad(layer), q)
    (record,) = caplog.records
    _, length, heads, _ = shape
    size = f"{24 * heads * length**2 * (2 if platform == 'gpu' else 4) / 2**30:.2g} GiB"
    for part in (*parts, size, "model.remat=full"):
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
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    ids = jax.device_put(np.ones(shape[:2], np.int32))
    options = dropout_of(rate, rows=shape[0])
    options["stream"] = jax.device_put(options["stream"])

    def layer(q):
        return attend(q, q, q, q_segment_ids=ids, kv_segment_ids=ids, **options).sum()

    jax.eval_shape(jax.grad(layer), q)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("remat", "layers", "dtype"),
    [("none", 3, "float32"), ("full", 1, "float32"), ("none", 3, "bfloat16")],
)
def test_the_model_says_how_many_layers_keep_scores(gpu, monkeypatch, caplog, remat, layers, dtype):
    monkeypatch.setattr(attention, "platform", lambda layout: "gpu")
    attention._warn_once.cache_clear()
    config = ModelConfig(vocab_size=32, num_positions=128, hidden_dim=32, num_layers=3,
                         num_heads=2, mlp_dim=32, remat=remat, dtype=dtype)  # fmt: skip
    params = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    ids = jax.device_put(np.ones((B, 128), np.int32))
    rows = jax.device_put(np.arange(B, dtype=np.uint32))

    def loss(params):
        return encode(config, params, ids, ids, ids, DropoutStream(jnp.uint32(1), rows)).sum()

    jax.eval_shape(jax.grad(loss), params)
    (record,) = caplog.records
    size = 2 if config.dtype == "bfloat16" else 4  # bytes
    assert f"{layers * 2 * 128**2 * size / 2**30:.2g} GiB" in record.getMessage()
    assert ("model.remat=full" in record.getMessage()) == (remat == "none")


def test_platform_is_that_of_the_mesh(monkeypatch):
    mesh = make_mesh(MeshConfig())
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert attention.platform(None) == "tpu"
    assert attention.platform(Layout(mesh, partition_spec)) == "cpu"

    def inside(x):
        assert attention.platform(None) == "cpu"
        assert attention.platform(Layout(jax.sharding.get_abstract_mesh(), None)) == "cpu"
        return x

    spec = PartitionSpec("data")
    jax.eval_shape(jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec), np.ones(8))


@pytest.mark.parametrize(
    ("impl", "options", "message"),
    [
        ("splash", dropout_of(0.1), "attention_dropout_rate is 0.1.*'fused' or 'xla'"),
        ("cudnn", {}, "'cudnn', which runs on GPUs; this is a CPU"),
        ("fused", {"length": 130}, "multiples of 128, not 130 and 128"),
        ("fused", {"length": 16384}, "at most 8192 positions, not 16384"),
        ("splash", {"length": 130}, "multiples of 128, not 130 and 128"),
    ],
)
def test_what_an_implementation_cannot_do_is_refused(impl, options, message):
    options = dict(options)
    lengths = (options.pop("length", 128), 128, 128)
    arrays = [np.zeros((B, n, H, K), np.float32) for n in lengths]
    ids = {
        "q_segment_ids": np.zeros(arrays[0].shape[:2], np.int32),
        "kv_segment_ids": np.zeros((B, 128), np.int32),
    }
    with pytest.raises(UserError, match=message):
        jitted(*arrays, **ids, **options, impl=impl)


def test_tpu_kernels_are_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    arrays, segments = inputs()
    for impl in ("fused", "splash"):
        with pytest.raises(UserError, match="runs on TPUs; this is a GPU"):
            value_and_gradients(arrays, **segments, impl=impl)

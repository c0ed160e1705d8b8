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
from attending import (
    STATIC,
    B,
    H,
    K,
    assert_all_close,
    attend,
    dropout_of,
    inputs,
    jitted,
    value_and_gradients,
)
from jax.sharding import PartitionSpec

from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh, partition_spec
from bert_jax.errors import UserError
from bert_jax.model.attention import attend as attention
from bert_jax.model.attention import fused, fused_plan
from bert_jax.model.dropout import DropoutStream
from bert_jax.model.layout import Layout
from bert_jax.model.rotation import rotation


@partial(jax.jit, static_argnames=(*STATIC, "chunk"))
def compute(arrays, *, chunk, **options):
    del chunk  # a constant of the module that is compiled in
    *qkv, gradient = arrays
    out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, **options), *qkv)
    return out, *pull_back(gradient)


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
        (
            "splash",
            dropout_of(0.1),
            "^attention_impl is 'splash', which .* but attention_dropout_rate is 0.1: set it .*to 0"
            ", or attention_impl to 'auto', 'fused' or 'xla'",
        ),
        ("cudnn", {}, "'cudnn', which runs on GPUs; this is a CPU: set attention_impl to 'auto'"),
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

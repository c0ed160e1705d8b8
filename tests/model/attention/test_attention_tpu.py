"""The TPU kernels compile ahead of time, forward and backward, for every TPU generation."""

import importlib.util
import os
import re

import jax
import jax.numpy as jnp
import pytest
from attending import attend
from jax.experimental import topologies
from jax.sharding import NamedSharding

from bert_jax.chips import CHIPS
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh, partition_spec
from bert_jax.model.dropout import DropoutStream
from bert_jax.model.layout import Layout
from bert_jax.planning.hlo_cost.cost import op_seconds
from bert_jax.planning.hlo_cost.hlo import parse_program

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPUs needs libtpu"
)

TOPOLOGIES = {
    "v4": ("v4:2x2x1", {"chip_config_name": "megacore"}),
    "v5e": ("v5e:2x2", {}),
    "v5p": ("v5p:2x2x1", {}),
    "v6e": ("v6e:2x2", {}),
    "tpu7x": ("tpu7x:2x2x1", {}),
}


@pytest.fixture
def tpu_mesh(monkeypatch):
    """A function from a generation's name to a data x tensor mesh of its devices."""
    # libtpu asks a metadata server which TPU it is on, and aborts if another process holds its
    # lock; neither matters to compiling. It reads these when it is loaded first.
    monkeypatch.setitem(os.environ, "TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setitem(os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setitem(os.environ, "TPU_WORKER_HOSTNAMES", "localhost")

    def make(generation, tensor=1):
        name, options = TOPOLOGIES[generation]
        devices = topologies.get_topology_desc(name, "tpu", **options).devices
        return make_mesh(MeshConfig(tensor=tensor), devices)

    return make


def compiled(mesh, impl, length, heads, rate, head_dim=64, rows=2, window=None):
    """Optimised HLO of projections, attention and the gradient of their input over `mesh`.

    Without the weights' gradients, and so without collectives over data: jax 0.10.2 compiles an
    asynchronous all-reduce of several arrays for tpu7x, but cannot read the program back as text.
    """
    rows *= mesh.shape["data"]
    width = heads * head_dim

    def loss(x, weights, segment_ids, seed, row_index):
        q, k, v = (jnp.einsum("BLD,DHK->BLHK", x, w) for w in weights)
        out = attend(
            q, k, v, segment_ids, segment_ids, dropout_rate=rate,
            stream=DropoutStream(seed, row_index), site=1, impl=impl, window=window,
            layout=Layout(mesh, partition_spec),
        )  # fmt: skip
        return jnp.einsum("BLHK,DHK->BLD", out, weights[0]).astype(jnp.float32).sum()

    def array(shape, dtype, *axes):
        sharding = NamedSharding(mesh, partition_spec(axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    weights = [array((width, heads, head_dim), jnp.bfloat16, None, "heads", None)] * 3
    arguments = (
        array((rows, length, width), jnp.bfloat16, "batch", None, None),
        weights,
        array((rows, length), jnp.int32, "batch", None),
        array((), jnp.uint32),
        array((rows,), jnp.uint32, "batch"),
    )
    return jax.jit(jax.grad(loss)).lower(*arguments).compile().as_text()


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_fused_compiles(generation, tpu_mesh):
    text = compiled(tpu_mesh(generation), "fused", 128, 4, 0.1)
    calls = re.findall(r"= (.*) custom-call\(.*custom_call_target=\"tpu_custom_call\"", text)
    assert len(calls) == 2  # one forward, one backward
    costs = re.findall(r'"cost_estimate":\{"flops":"(\d+)","transcendentals":"(\d+)"', text)
    scores = 2 * 4 * 128 * 128  # of one device: rows, heads, L, S
    assert sorted(costs) == sorted(
        (str(2 * products * scores * 64), str(scores)) for products in (2, 5)
    )
    assert "[2,4,128,128]" not in text  # nothing of the size of all scores


@pytest.mark.parametrize("generation", ["v4", "v5p", "v6e", "tpu7x"])
def test_rows_of_8192_compile(generation, tpu_mesh):
    text = compiled(tpu_mesh(generation), "auto", 8192, 1, 0.1, rows=1)
    assert "attention_backward" in text


def test_local_attention_of_8192_costs_a_fifth_of_global(tpu_mesh):
    mesh = tpu_mesh("v5e")

    def seconds(window):
        text = compiled(mesh, "auto", 8192, 1, 0.0, rows=1, window=window)
        program = parse_program(text, dict(mesh.shape))
        kernels = [op for op in program.ops if op.kind == "pallas"]
        assert len(kernels) == 2  # forward and backward
        return sum(op_seconds(op, CHIPS["v5e"]) for op in kernels)

    assert seconds(64) < seconds(None) / 5


def test_auto_is_fused_for_long_rows(tpu_mesh):
    text = compiled(tpu_mesh("v5e", tensor=2), "auto", 512, 4, 0.1, rows=1)
    assert "attention_backward" in text


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_splash_compiles(generation, tpu_mesh):
    text = compiled(tpu_mesh(generation), "splash", 128, 2, 0.0)
    assert "splash_mha" in text

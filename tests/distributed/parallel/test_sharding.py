"""Where arrays lie on a mesh of fake devices."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bert_jax.distributed.parallel import sharding as module
from bert_jax.distributed.parallel.sharding import (
    MeshConfig,
    batch_sharding,
    check_batch_size,
    data_shard,
    make_mesh,
    opt_state_shardings,
    param_shardings,
    partition_spec,
    place_batch,
)
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params, logical_axes
from bert_jax.training.steps.optim import OptimizerConfig, make_optimizer

MODEL = ModelConfig(
    vocab_size=250, num_positions=16, hidden_dim=16, num_layers=2, num_heads=8, mlp_dim=32
)


def shapes_of(model):
    return jax.eval_shape(lambda: init_params(model, jax.random.key(0)))


def test_mesh_fills_the_devices():
    assert dict(make_mesh(MeshConfig()).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(MeshConfig(fsdp=2, tensor=2)).shape) == {
        "data": 2, "fsdp": 2, "tensor": 2,
    }  # fmt: skip
    assert dict(make_mesh(MeshConfig(1, -1, 2)).shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    one = make_mesh(MeshConfig(), jax.devices()[:1])
    assert one.size == 1


@pytest.mark.parametrize("config", [MeshConfig(3), MeshConfig(-1, 3), MeshConfig(8, 2)])
def test_mesh_that_does_not_fit_the_devices_is_refused(config):
    with pytest.raises(UserError, match=r"8 devices.*1, 2, 4, 8"):
        make_mesh(config)


def test_slices_are_the_outermost_part_of_data():
    mesh = make_mesh(MeshConfig(4, 2, 1, num_slices=2))
    first, second = np.split(np.vectorize(lambda device: device.id)(mesh.devices), 2)
    assert set(first.flat) == {0, 1, 2, 3}
    assert set(second.flat) == {4, 5, 6, 7}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(1, 8, 1, num_slices=2), r"mesh\.data.*multiple of 2.*one of 1, 2, 4"),
        (MeshConfig(1, 4, 2, num_slices=2), r"mesh\.fsdp x mesh\.tensor = 8.*one of 1, 2, 4"),
        (MeshConfig(num_slices=3), r"mesh\.num_slices is 3.*1, 2, 4, 8 would work"),
    ],
)
def test_axes_that_would_span_slices_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        make_mesh(config)


def test_mesh_config_refuses_nonsense():
    with pytest.raises(UserError, match=r"mesh\.fsdp is 0"):
        MeshConfig(fsdp=0)
    with pytest.raises(UserError, match="only one of"):
        MeshConfig(data=-1, tensor=-1)


def test_specs():
    assert partition_spec(("batch", "length")) == P(("data", "fsdp"), None)
    kernel = ("layers", "embed", "heads", "head_dim")
    assert partition_spec(kernel, parameter=True) == P(None, "fsdp", "tensor", None)
    assert partition_spec(("vocab", "embed"), parameter=True) == P("tensor", "fsdp")
    # A mesh axis splits one dimension only.
    assert partition_spec(("embed", "embed"), parameter=True) == P("fsdp", None)
    # Neither vectors nor the table of positions are split over fsdp.
    assert partition_spec(("length", "embed"), parameter=True) == P(None, None)
    assert partition_spec(("layers", "embed"), parameter=True) == P(None, None)
    assert partition_spec(("layers", "mlp"), parameter=True) == P(None, "tensor")


def test_every_spec_has_the_rank_of_its_array_and_shards_as_the_rules_say():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    shapes = shapes_of(MODEL)
    shardings = param_shardings(logical_axes(MODEL), shapes, mesh)
    for shape, sharding in zip(*map(jax.tree.leaves, (shapes, shardings)), strict=True):
        assert len(sharding.spec) == len(shape.shape)
    layers = shardings["encoder"]["layers"]
    assert layers["mlp"]["up"]["kernel"].spec == P(None, "fsdp", "tensor")
    assert layers["mlp"]["down"]["kernel"].spec == P(None, "tensor", "fsdp")
    assert layers["attention"]["output"]["kernel"].spec == P(None, "tensor", None, "fsdp")


def test_a_spec_of_another_rank_is_caught():
    with pytest.raises(AssertionError, match="a: shape"):
        param_shardings({"a": ("layers", "embed")}, {"a": jnp.zeros(4)}, make_mesh(MeshConfig()))


def test_optimizer_state_lies_where_its_parameters_lie():
    mesh, shapes = make_mesh(MeshConfig(2, 2, 2)), shapes_of(MODEL)
    shardings = param_shardings(logical_axes(MODEL), shapes, mesh)
    optimizer = make_optimizer(OptimizerConfig(), 10, logical_axes(MODEL))
    state = opt_state_shardings(optimizer, shapes, shardings, mesh)
    assert state.mu == shardings
    assert state.nu == shardings
    assert state.num_updates.spec == P()


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        (MeshConfig(1, 8), {"hidden_dim": 24 * 3, "num_heads": 8}, None),
        (
            MeshConfig(1, 8),
            {"hidden_dim": 20, "num_heads": 2},
            r"the hidden width is 20, .*mesh\.fsdp = 8.*16 or 24 would work.*1, 2, 4, 5, 10, 20",
        ),
        (
            MeshConfig(1, 1, 8),
            {"num_heads": 4},
            r"the number of \(key\) heads is 4, .*mesh\.tensor = 8.*8 would work.*one of 1, 2, 4",
        ),
        (MeshConfig(1, 1, 8), {"mlp_dim": 36}, r"the MLP's width is 36, .*32 or 40 would work"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(mesh, changes, message):
    model = ModelConfig(**{**MODEL.__dict__, **changes})
    axes, shapes = logical_axes(model), shapes_of(model)
    if message is None:
        param_shardings(axes, shapes, make_mesh(mesh))
    else:
        with pytest.raises(UserError, match=message):
            param_shardings(axes, shapes, make_mesh(mesh))


def test_a_padded_vocabulary_that_does_not_divide_is_refused():
    mesh = make_mesh(MeshConfig(1, 1, 3), jax.devices()[:3])
    model = ModelConfig(**{**MODEL.__dict__, "hidden_dim": 48, "num_heads": 6, "mlp_dim": 48})
    with pytest.raises(UserError, match=r"padded vocabulary is 256, .*255 or 258"):
        param_shardings(logical_axes(model), shapes_of(model), mesh)


def test_batch_sizes():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    check_batch_size(16, mesh, accumulation=4)
    with pytest.raises(UserError, match=r"batch_size is 24; it must be a multiple of 16.*16 or 32"):
        check_batch_size(24, mesh, accumulation=4)
    with pytest.raises(UserError, match=r"phases\[1\].batch_size is 2; .*4 would work"):
        check_batch_size(2, mesh, where="phases[1].batch_size")
    for size in (0, -4):
        with pytest.raises(UserError, match=f"batch_size is {size}; .*: 4 would work"):
            check_batch_size(size, mesh)


def test_batches_are_split_over_data_and_fsdp():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    rows = np.arange(8 * 3, dtype=np.uint16).reshape(8, 3)
    placed = place_batch({"tokens": rows}, mesh)["tokens"]
    assert placed.dtype == np.uint16
    np.testing.assert_array_equal(placed, rows)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3)}
    assert data_shard(mesh) == (0, 1)


@pytest.mark.parametrize(
    ("sizes", "per_process", "expected"),
    [
        ((8, 1, 1), 2, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ((2, 1, 4), 2, [(0, 2), (0, 2), (1, 2), (1, 2)]),  # two processes hold the same rows
        ((1, 2, 4), 8, [(0, 1)]),
    ],
)
def test_each_process_brings_the_rows_of_its_devices(sizes, per_process, expected, monkeypatch):
    mesh = make_mesh(MeshConfig(*sizes))
    monkeypatch.setattr(module, "batch_sharding", lambda mesh: _OfProcesses(mesh, per_process))
    for process, shard in enumerate(expected):
        monkeypatch.setattr("jax.process_index", lambda process=process: process)
        assert data_shard(mesh) == shard


def test_processes_with_overlapping_rows_are_refused(monkeypatch):
    monkeypatch.setattr(module, "batch_sharding", lambda mesh: _OfProcesses(mesh, 3))
    with pytest.raises(UserError, match="processes overlapping parts of a batch"):
        data_shard(make_mesh(MeshConfig(2, 1, 4)))


class _OfProcesses:
    """The sharding of a batch, with the devices of this process dealt out to several."""

    def __init__(self, mesh, per_process):
        self._mesh, self._per_process = mesh, per_process

    def devices_indices_map(self, shape):
        found = batch_sharding(self._mesh).devices_indices_map(shape)
        return {_Device(d.id, d.id // self._per_process): rows for d, rows in found.items()}


class _Device(NamedTuple):
    id: int
    process_index: int

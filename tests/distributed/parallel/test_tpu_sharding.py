"""What a step compiled for a TPU slice says over the network; nothing here runs on one."""

import math
import os
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from steps import masked_lm_step, with_model

from bert_jax.distributed.parallel.sharding import MeshConfig, batch_sharding, make_mesh
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.planning.hlo_cost.hlo import parse_program
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import abstract_state, jitted_init
from bert_jax.training.steps.step import make_train_step

MODEL = ModelConfig(
    vocab_size=1000,
    num_positions=32,
    hidden_dim=256,
    num_layers=2,
    num_heads=4,
    mlp_dim=512,
    dtype="bfloat16",
    attention_impl="xla",
    scan_unroll=1,
)
CONFIG = masked_lm_step(
    model=MODEL,
    masking=MaskingConfig(max_predictions=8),
    optimizer=OptimizerConfig(),
    num_steps=10,
    special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
)
ROWS_PER_DEVICE, LENGTH = 2, 32
SHAPES = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
NUM_PARAMS = sum(leaf.size for leaf in jax.tree.leaves(SHAPES))
SMALL = 100_000
"""Bytes: of all vectors and narrow tables together, which every device has."""


@pytest.fixture(autouse=True)
def optimised():
    """The suite switches optimisations off; here they are what is looked at."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def tpu(name, **more):
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    return topologies.get_topology_desc(name, "tpu", **more).devices


def compile_step(config, mesh):
    rows = batch_sharding(mesh)
    count = ROWS_PER_DEVICE * mesh.size
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
        for name, shape, dtype in (
            ("tokens", (count, LENGTH), np.uint16),
            ("type_ids", (count, LENGTH), np.uint8),
            ("segment_ids", (count, LENGTH), np.uint8),
            ("pair_labels", (count,), np.int32),
            ("row_index", (count,), np.uint32),
        )
    }
    return make_train_step(config, mesh).lower(abstract_state(config, mesh), batch).compile()


def collectives(config, mesh):
    """The exchanges of a step that move more than SMALL bytes."""
    program = parse_program(compile_step(config, mesh).as_text(), mesh.shape)
    return [one for one in program.collectives if one.bytes > SMALL]


def moved(found, kind):
    """Bytes of the arrays that this kind of exchange handles in a step."""
    return sum(one.bytes * one.runs for one in found if one.kind == kind)


def test_fsdp_on_tpu():
    """Matrices gathered in bfloat16 where used, twice a layer; gradients reduced to parts."""
    mesh = make_mesh(MeshConfig(fsdp=4), tpu("v5e:2x4"))
    # Heads of 128: of the output kernel's gradient with heads of 64 XLA reduces the whole.
    found = collectives(with_model(CONFIG, replace(MODEL, num_heads=2)), mesh)
    assert {(one.kind, one.axes) for one in found} == {
        ("all-gather", ("fsdp",)), ("reduce-scatter", ("fsdp",)), ("all-reduce", ("data",)),
    }  # fmt: skip
    layers = sum(
        leaf.size for leaf in jax.tree.leaves(SHAPES["encoder"]["layers"]) if leaf.size > SMALL
    )
    rest = SHAPES["encoder"]["embeddings"]["token"].size + 2 * MODEL.hidden_dim**2
    assert moved(found, "all-gather") == 2 * (2 * layers + rest)
    assert {one.runs for one in found if one.kind == "all-gather"} == {1, MODEL.num_layers}
    assert moved(found, "reduce-scatter") == 4 * (layers + rest)
    # Over `data` the parts are summed, after the loop.
    assert moved(found, "all-reduce") == pytest.approx((layers + rest), rel=0.05)


def test_tensor_parallelism_on_tpu_is_megatrons():
    """Two sums of activations per layer in each direction; logits stay split by vocabulary."""
    mesh = make_mesh(MeshConfig(data=2, tensor=4), tpu("v5e:2x4"))
    found = collectives(CONFIG, mesh)
    assert {(one.kind, one.axes) for one in found} == {
        ("all-reduce", ("data",)), ("all-reduce", ("tensor",)),
    }  # fmt: skip
    activations = 4 * ROWS_PER_DEVICE * LENGTH * MODEL.hidden_dim
    sums = [one for one in found if one.axes == ("tensor",)]
    # The lookup (float32); per layer two forward, two backward (XLA may take query, key and value
    # apart, which makes four). Not the logits.
    looked_up = 4 * activations
    per_layer = (moved(sums, "all-reduce") - looked_up) / (2 * activations) / 2
    assert 4 <= per_layer <= 6


def test_slices_are_outermost_and_gradients_cross_between_them_in_parts():
    devices = tpu("v5e:2x2", num_slices=2)
    mesh = make_mesh(MeshConfig(), devices)
    assert [d.slice_index for d in mesh.devices.flat] == [0] * 4 + [1] * 4
    with pytest.raises(UserError, match=r"mesh\.data is 1 on 2 slices of 4 devices; .*1, 2, 4"):
        make_mesh(MeshConfig(fsdp=8), devices)
    found = collectives(CONFIG, mesh)
    # XLA reduces inside the slice, sends a quarter per chip to the other, gathers inside the slice.
    sent = sum(one.bytes * one.runs for one in found if one.network == "dcn")
    assert 4 * NUM_PARAMS / 4 <= sent < 4 * NUM_PARAMS / 3


def test_a_model_is_never_whole_on_a_device_when_it_is_made():
    mesh = make_mesh(MeshConfig(fsdp=8), tpu("v5e:2x4"))
    config = with_model(CONFIG, replace(MODEL, vocab_size=16000, num_layers=8))
    key = jax.eval_shape(lambda: jax.random.key(0))
    memory = jitted_init(config, mesh).lower(key).compile().memory_analysis()
    state = jax.tree.leaves(abstract_state(config, mesh))
    whole = sum(4 * math.prod(leaf.shape) for leaf in state)
    assert whole / 8 <= memory.output_size_in_bytes < whole / 5  # memory comes in tiles
    # A third of `whole` are the parameters, the others the moments: not even those fit.
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < whole / 3

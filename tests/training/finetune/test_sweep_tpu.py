"""The step of a sweep compiles for a TPU slice, with the attention kernel under `vmap`."""

import dataclasses
import importlib.util
import os
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.config.mapping import build
from bert_jax.distributed.parallel.sharding import MeshConfig, batch_sharding, make_trial_mesh
from bert_jax.model.config import SIZES, ModelConfig
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.objectives.task import TaskObjective
from bert_jax.planning.compile import compile_step
from bert_jax.planning.topology import devices, parse_topology
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import StepConfig, abstract_state
from bert_jax.training.steps.step import Settings, make_train_step
from bert_jax.training.steps.trials import bytes_on_device

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPUs needs libtpu"
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        monkeypatch.setitem(os.environ, name, "1")
    monkeypatch.setitem(os.environ, "TPU_WORKER_HOSTNAMES", "localhost")


def compiled_span_step(model, mesh, trials, rows, length):
    """The step of a span head, compiled for a mesh of trials."""
    config = StepConfig(
        TaskObjective(model, TaskHeadConfig("span", dropout_rate=0.0), "span"),
        OptimizerConfig(learning_rate=1.0),
        num_steps=10,
    )
    placed = NamedSharding(mesh, PartitionSpec("trial"))

    def array(dtype, *sizes):
        sharding = batch_sharding(mesh) if len(sizes) > 1 else placed
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    batch = {
        name: array(np.int32, trials, rows, length)
        for name in ("tokens", "type_ids", "segment_ids")
    }
    batch["labels"] = array(np.int32, trials, rows, 2)
    batch["weights"] = array(np.float32, trials, rows)
    batch["row_index"] = array(np.uint32, trials, rows)
    settings = Settings(array(np.float32, trials), array(np.uint32, trials))
    state = abstract_state(config, mesh, trials)
    return state, make_train_step(config, mesh).lower(state, batch, settings).compile()


@pytest.mark.parametrize(("members", "shape"), [(8, (4, 1, 1, 1)), (2, (2, 2, 1, 1))])
def test_compiles_for_v5e(members, shape):
    model = ModelConfig(
        num_layers=1, hidden_dim=128, num_heads=2, mlp_dim=256, vocab_size=256, num_positions=128
    )
    mesh = make_trial_mesh(MeshConfig(), members, devices(parse_topology("v5e:2x2")))
    assert tuple(mesh.shape.values()) == shape
    _, compiled = compiled_span_step(model, mesh, members, 8, 128)
    text = compiled.as_text()
    assert 'custom_call_target="tpu_custom_call"' in text  # the fused attention
    reduced = re.findall(r"= (.*) all-reduce(?:-start)?\(", text)
    # The metrics of all members go to every device; gradients only to those of their member.
    assert any(re.search(r"f32\[\d+,", shapes) for shapes in reduced) == (shape[1] > 1)


@pytest.mark.slow
def test_bert_large_with_split_parameters_needs_what_a_plan_says():
    """A plan of pretraining, with rows of the same size: the steps differ in their heads alone."""
    topology = parse_topology("v5e:2x2")
    model = dataclasses.replace(SIZES["large"], dtype="bfloat16", scan_unroll=1, remat="full")
    mesh = make_trial_mesh(MeshConfig(fsdp=4), 1, devices(topology))
    state, compiled = compiled_span_step(model, mesh, 1, rows=16, length=384)
    config = build(
        PretrainConfig,
        {
            "model": {
                name: getattr(model, name)
                for name in (
                    "vocab_size", "hidden_dim", "num_layers", "num_heads", "mlp_dim", "scan_unroll",
                    "remat", "dtype",
                )
            },
            "mesh": {"fsdp": 4},
            "masking": {"max_predictions": 1},
            "training": {"num_steps": 10, "phases": [{"length": 384, "batch_size": 16}]},
        },
    )  # fmt: skip
    planned = compile_step(config, 0, topology, cache=None).memory
    found = compiled.memory_analysis()
    arrays = planned.parameters + planned.optimizer
    assert bytes_on_device(state) == pytest.approx(arrays, rel=0.02)
    assert found.argument_size_in_bytes == pytest.approx(arrays, rel=0.02)
    # Logits over the vocabulary and the table's gradient are in the plan alone.
    table = 4 * model.vocab_size * model.hidden_dim
    assert 0 <= planned.temporaries - found.temp_size_in_bytes < 1.5 * table

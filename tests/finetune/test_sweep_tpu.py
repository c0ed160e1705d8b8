"""The step of a sweep compiles for a TPU slice, with the attention kernel under `vmap`."""

import importlib.util
import os
import re

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.finetune.step import (
    FinetuneStepConfig,
    Members,
    abstract_sweep,
    make_sweep_step,
    sweep_mesh,
)
from bert_jax.model.config import ModelConfig
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.training.optim import OptimizerConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPUs needs libtpu"
)

ROWS = PartitionSpec("member", "data")


@pytest.mark.parametrize(("members", "shape"), [(8, (4, 1)), (2, (2, 2))])
def test_compiles_for_v5e(monkeypatch, members, shape):
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        monkeypatch.setitem(os.environ, name, "1")
    monkeypatch.setitem(os.environ, "TPU_WORKER_HOSTNAMES", "localhost")
    model = ModelConfig(
        num_layers=1, hidden_dim=128, num_heads=2, mlp_dim=256, vocab_size=256, num_positions=128
    )
    config = FinetuneStepConfig(
        model, TaskHeadConfig("span"), "span", OptimizerConfig(learning_rate=1.0), num_steps=10
    )
    mesh = sweep_mesh(members, topologies.get_topology_desc("v5e:2x2", "tpu").devices)
    assert tuple(mesh.shape.values()) == shape

    def array(dtype, *sizes):
        spec = ROWS if len(sizes) > 1 else PartitionSpec("member")
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    batch = {
        name: array(np.int32, members, 8, 128) for name in ("tokens", "type_ids", "segment_ids")
    }
    batch["labels"] = array(np.int32, members, 8, 2)
    batch["weights"] = array(np.float32, members, 8)
    batch["row_index"] = array(np.uint32, members, 8)
    settings = Members(array(np.float32, members), array(np.uint32, members))
    state = abstract_sweep(config, mesh, members)
    text = make_sweep_step(config, mesh).lower(state, settings, batch).compile().as_text()
    assert 'custom_call_target="tpu_custom_call"' in text  # the fused attention
    reduced = re.findall(r"= (.*) all-reduce(?:-start)?\(", text)
    # The metrics of all members go to every device; gradients only to those of their member.
    assert any(re.search(r"f32\[\d+,", shapes) for shapes in reduced) == (shape[1] > 1)

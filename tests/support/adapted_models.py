"""Saved models with low-rank updates of random numbers."""

import dataclasses

import jax
import numpy as np

from bert_jax.artefacts.saved.model import SavedModel, merged_params
from bert_jax.model.heads import logical_axes
from bert_jax.model.lora import LoraConfig, with_lora
from bert_jax.model.task_heads import TaskModel


def adapted(saved: SavedModel, *targets: str, rank: int = 2) -> SavedModel:
    """The model as a run would leave it that has trained updates of these maps, and its head."""
    config = LoraConfig(rank=rank, alpha=5.0, targets=targets)
    axes = logical_axes(saved.config, TaskModel, saved.outputs.head)
    lora = with_lora(config, jax.random.key(1), saved.params, axes)["lora"]
    random = np.random.default_rng(2)
    lora = jax.tree.map(lambda leaf: random.normal(0, 0.2, leaf.shape).astype(np.float32), lora)
    params, adapter = merged_params({**saved.params, "lora": lora}, config)
    return dataclasses.replace(saved, params=params, adapter=adapter)

"""Tiny models in memory, as `read_model` would give them."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.artefacts.formats.huggingface_files import TaskOutputs
from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import ReplacedHead, init_params
from bert_jax.model.task_heads import TaskHeadConfig, init_task_params
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

WORDS = ("the", "cat", "dog", "sat", "ran", "on", "under", "a", "mat", "hill", ".", "##s")
MODEL = ModelConfig(
    vocab_size=17, num_positions=24, hidden_dim=16, num_layers=2, num_heads=2, mlp_dim=32
)
ROWS = [[2, 5, 6, 8, 10, 12, 3], [2, 5, 7, 3, 9, 3], [2, 3], [2, 12, 13, 14, 15, 16, 4, 4, 11, 3]]
"""Of ids, one of them a pair."""
_ROPE: dict[str, Any] = {
    "positions": "rope", "gated": True, "attention_bias": False, "mlp_bias": False,
    "norm_eps": 1e-5,
}  # fmt: skip
_PRE = {**_ROPE, "norm_order": "pre", "num_types": 0, "pooler": False}
_RMS = {
    **_PRE, "norm": "rms", "norm_bias": False, "embedding_norm": False, "head_transform": False,
    "tied": False, "activation": "silu", "head_activation": "gelu", "num_layers": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "modernbert": {
        **_PRE, "norm_bias": False, "first_norm": False, "head_bias": False, "num_layers": 3,
        "attention_pattern": "GLL", "local_window": 3, "rope_theta": 160_000.0,
        "head_activation": "gelu",
    },
    "eurobert": {**_RMS, "num_kv_heads": 1, "decoder_bias": False},
    "neobert": {**_RMS, "head_activation": ""},
    "nomic_bert": {
        **_ROPE, "rope_theta": 1000.0, "activation": "silu", "norm_eps": 1e-12, "num_layers": 1,
    },
    "deberta-v2": {
        "positions": "relative", "relative_buckets": 8, "num_types": 0, "norm_eps": 1e-7,
        "pooler_activation": "gelu",
    },
}  # fmt: skip
"""Fields of modern families, by `model_type`."""
OUTPUTS = {
    "classification": TaskOutputs(
        TaskHeadConfig("classification", 3), "single_label", ("a", "b", "c")
    ),
    "tagging": TaskOutputs(TaskHeadConfig("tagging", 2), "tags", ("O", "B-X")),
    "span": TaskOutputs(TaskHeadConfig("span", 2, 0.0), "span"),
}


def small_saved(kind: str = "pretraining", **changes) -> SavedModel:
    """Of random numbers.

    Args:
        kind: pretraining, mlm (without the other head), rtd, or a task's head.
        **changes: Fields of `MODEL`, and `pooling` of a classification.
    """
    outputs, pooling = OUTPUTS.get(kind), changes.pop("pooling", None)
    if outputs is not None and pooling is not None:
        outputs = dataclasses.replace(
            outputs, head=dataclasses.replace(outputs.head, pooling=pooling)
        )
    config = dataclasses.replace(MODEL, **changes)
    key = jax.random.key(0)
    shapes = jax.eval_shape(
        lambda: init_task_params(config, outputs.head, key) if outputs else init_params(config, key)
    )
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: random.normal(size=leaf.shape, scale=0.4).astype(np.float32), shapes
    )
    params["encoder"]["embeddings"]["token"][config.vocab_size :] = 0
    if kind == "mlm":
        params.pop("nsp", None)
    if kind == "rtd":
        head = init_params(config, key, ReplacedHead)
        params = {"encoder": params["encoder"], "rtd": jax.tree.map(np.asarray, head)}
    return SavedModel(
        config=config,
        params=params,
        outputs=outputs,
        tokenizer=WordPieceTokenizer([*SPECIAL_TOKENS, *WORDS]),
        tokenizer_files=Path("nowhere"),
        max_length=config.num_positions,
        name=f"a small model, {kind}",
        origin=Origin("pretrain"),
    )

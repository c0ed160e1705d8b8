"""Tiny models with every head, in Hugging Face's format, for what is asked of them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.artefacts.formats.huggingface_files import TaskOutputs
from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params
from bert_jax.model.task_heads import TaskHeadConfig, init_task_params
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

WORDS = [
    "the", "cat", "dog", "sat", "ran", "on", "under", "a", "mat", "hill", ".", ",", "##s", "who",
    "?", "met", "kim", "lee", "in", "rome", "猫", "山",
]  # fmt: skip
TOKENIZER = WordPieceTokenizer([*SPECIAL_TOKENS, *WORDS])
MODEL = ModelConfig(
    vocab_size=TOKENIZER.vocab_size, num_positions=48, hidden_dim=16, num_layers=2, num_heads=2,
    mlp_dim=32, init_std=0.3, dtype="float32",
)  # fmt: skip

HEADS: Mapping[str, TaskOutputs | None] = {
    "pretrained": None,
    "class": TaskOutputs(
        TaskHeadConfig("classification", 3), "single_label", ("bad", "fair", "good")
    ),
    "classes": TaskOutputs(TaskHeadConfig("classification", 3), "multi_label", ("x", "y", "z")),
    "score": TaskOutputs(TaskHeadConfig("classification", 1), "regression"),
    "tags": TaskOutputs(
        TaskHeadConfig("tagging", 5), "tags", ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    ),
    "span": TaskOutputs(TaskHeadConfig("span", 2, 0.0), "span"),
}


def random_model(kind: str, seed: int = 0, **changes: Any) -> SavedModel:
    """A model of random weights with one of `HEADS`.

    Args:
        kind: Of the head.
        seed: Of the weights.
        **changes: Fields of `MODEL`.
    """
    outputs = HEADS[kind]
    config = dataclasses.replace(MODEL, **changes)

    def make() -> Any:
        key = jax.random.key(seed)
        return (
            init_params(config, key)
            if outputs is None
            else init_task_params(config, outputs.head, key)
        )

    random = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda leaf: random.normal(0, 0.3, leaf.shape).astype(np.float32), jax.eval_shape(make)
    )
    return SavedModel(
        config=config, params=params, outputs=outputs, tokenizer=TOKENIZER,
        tokenizer_files=Path(), max_length=config.num_positions, name=f"random {kind}",
        origin=Origin("huggingface"),
    )  # fmt: skip


def write_lines(path: Path, rows: list[Any]) -> str:
    """JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)

"""A tiny BERT as Hugging Face's files, written without their libraries."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bert_names import to_huggingface

from bert_jax.artefacts.formats.model_config import config_to_huggingface
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

WORDS = ("the", "cat", "dog", "sat", "ran", "on", "under", "a", "mat", "hill", ".", "##s")
TOKENIZER = WordPieceTokenizer([*SPECIAL_TOKENS, *WORDS])
MODEL = ModelConfig(
    vocab_size=20, num_positions=128, hidden_dim=16, num_layers=2, num_heads=2, mlp_dim=32,
    dtype="float32",
)  # fmt: skip


def random_tree(function: Any, seed: int = 0) -> Any:
    """Random numbers in the shapes that `function` would return; nothing is compiled."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: random.normal(size=leaf.shape).astype(np.float32), jax.eval_shape(function)
    )


def pretraining_params(seed: int = 0) -> Any:
    """Of `MODEL`; the padding rows of the vocabulary are 0."""
    params = random_tree(lambda: init_params(MODEL, jax.random.key(0)), seed)
    params["encoder"]["embeddings"]["token"][MODEL.vocab_size :] = 0
    params["mlm"]["bias"][MODEL.vocab_size :] = 0
    return params


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """float32 and int64 arrays."""
    header, data = {}, b""
    for name, array in arrays.items():
        kind = {"float32": "F32", "int64": "I64"}[str(array.dtype)]
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def write_huggingface(directory: Path, **changes: Any) -> dict[str, np.ndarray]:
    """`MODEL` as `BertForPreTraining` with `TOKENIZER`; returns what is in its file of weights.

    Args:
        directory: A new one.
        **changes: Fields of config.json.
    """
    TOKENIZER.save(directory)
    config = config_to_huggingface("bert", MODEL) | {"architectures": ["BertForPreTraining"]}
    (directory / "config.json").write_text(json.dumps(config | changes))
    weights = to_huggingface(pretraining_params(), MODEL)
    write_safetensors(directory / "model.safetensors", weights)
    return weights

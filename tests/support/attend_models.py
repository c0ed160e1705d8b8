"""A small model with tokens of many scripts, its weights by numpy, and those that a page holds."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

WORDS = (
    "the", "cat", "dog", "sat", "ran", "on", "under", "a", "mat", "hill", ".", "##s",
    "<", ">", "/", "script", "alert", "(", ")", "1", "!", "-", "&", "title", "style",
    "قال", "الرجل", "##ون", "动", "物", "שלום",
)  # fmt: skip
TOKENIZER = WordPieceTokenizer([*SPECIAL_TOKENS, *WORDS])
MODEL = ModelConfig(
    vocab_size=TOKENIZER.vocab_size, num_positions=256, hidden_dim=24, num_layers=2, num_heads=3,
    mlp_dim=16, dtype="float32", norm_eps=1e-6,
)  # fmt: skip


def scripts_model() -> SavedModel:
    """`MODEL` with random parameters, large enough that its weights are far from even."""
    random = np.random.default_rng(5)
    shapes = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))["encoder"]
    encoder = jax.tree.map(lambda a: 0.5 * random.normal(size=a.shape).astype(np.float32), shapes)
    return SavedModel(
        config=MODEL,
        params={"encoder": encoder},
        outputs=None,
        tokenizer=TOKENIZER,
        tokenizer_files=Path(),
        max_length=256,
        name="many scripts",
        origin=Origin("pretrain"),
    )


def weights_in(page: str) -> tuple[dict[str, Any], np.ndarray]:
    """What a page's script reads, and its weights, (N, H, L, L)."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    data = json.loads(found[1])
    count = len(data["tokens"])
    values = np.frombuffer(base64.b64decode(data["weights"]), np.uint8)
    return data, (values.reshape(data["layers"], data["heads"], count, count) / 255.0) ** 2


def attention_weights(saved: SavedModel, tokens: list[str], second_start: int) -> np.ndarray:
    """The encoder by hand: weights of every layer and head, (N, H, L, L), in float64."""
    encoder = jax.tree.map(lambda a: np.asarray(a, np.float64), saved.params["encoder"])
    ids = [saved.tokenizer.token_to_id(token) for token in tokens]
    types = (np.arange(len(ids)) >= second_start).astype(int)
    table = encoder["embeddings"]
    x = table["token"][ids] + table["position"][: len(ids)] + table["type"][types]
    x = _norm(x, table["norm"])
    weights = []
    for number in range(MODEL.num_layers):
        layer = jax.tree.map(lambda a, n=number: a[n], encoder["layers"])
        query, key, value = (
            np.einsum("LD,DHK->HLK", x, layer["attention"][name]["kernel"])
            + layer["attention"][name]["bias"][:, None]
            for name in ("query", "key", "value")
        )
        scores = np.exp(query @ key.transpose(0, 2, 1) / np.sqrt(MODEL.head_dim))
        weights.append(scores / scores.sum(-1, keepdims=True))
        out = layer["attention"]["output"]
        mixed = np.einsum("HLS,HSK,HKD->LD", weights[-1], value, out["kernel"]) + out["bias"]
        x = _norm(x + mixed, layer["attention_norm"])
        mlp = layer["mlp"]
        inner = _gelu(x @ mlp["up"]["kernel"] + mlp["up"]["bias"])
        x = _norm(x + inner @ mlp["down"]["kernel"] + mlp["down"]["bias"], layer["mlp_norm"])
    return np.stack(weights)


def _norm(x: np.ndarray, params: dict[str, np.ndarray]) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + MODEL.norm_eps)
    return scaled * params["scale"] + params["bias"]


def _gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.gelu(x, approximate=False))

"""Weights of PyTorch's classes as Transformers' Flax classes had them, in Flax's own files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax.serialization import to_bytes
from safetensors.numpy import load_file


def to_flax(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The tree of `flax_model.msgpack`."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, module, last = ["", *name.split(".")]
        if last == "weight" and module.endswith("_embeddings"):
            last = "embedding"
        elif last == "weight" and "norm" in module.lower():
            last = "scale"
        elif last == "weight":
            last, array = "kernel", array.transpose()
        place = tree
        for key in (*path, module):
            place = place.setdefault(key, {}) if key else place
        place[last] = np.ascontiguousarray(array)
    return tree


def into_flax(directory: Path) -> dict[str, Any]:
    """Replace a directory's safetensors by Flax's file; returns the tree in it."""
    arrays = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    tree = to_flax(arrays)
    (directory / "flax_model.msgpack").write_bytes(to_bytes(tree))
    return tree


def masked_lm(tree: Any, tokens: np.ndarray, types: np.ndarray, heads: int) -> Any:
    """Logits of a `FlaxBertForPreTraining` for unpadded rows, by the modules of flax.linen."""

    def dense(part: Any, x: Any) -> Any:
        return nn.Dense(part["bias"].size).apply({"params": part}, x)

    def norm(part: Any, x: Any) -> Any:
        return nn.LayerNorm(epsilon=1e-12).apply({"params": part}, x)

    def embed(part: Any, ids: Any) -> Any:
        return nn.Embed(*part["embedding"].shape).apply({"params": part}, ids)

    def gelu(x: Any) -> Any:
        return nn.gelu(x, approximate=False)

    tables = tree["bert"]["embeddings"]
    x = embed(tables["word_embeddings"], tokens) + embed(tables["token_type_embeddings"], types)
    x = norm(
        tables["LayerNorm"], x + embed(tables["position_embeddings"], jnp.arange(tokens.shape[1]))
    )
    layers = tree["bert"]["encoder"]["layer"]
    for layer in map(str, range(len(layers))):
        attention, up, down = (layers[layer][n] for n in ("attention", "intermediate", "output"))
        query, key, value = (
            dense(attention["self"][name], x).reshape(*tokens.shape, heads, -1)
            for name in ("query", "key", "value")
        )
        found = nn.dot_product_attention(query, key, value).reshape(x.shape)
        x = norm(attention["output"]["LayerNorm"], x + dense(attention["output"]["dense"], found))
        x = norm(down["LayerNorm"], x + dense(down["dense"], gelu(dense(up["dense"], x))))
    head = tree["cls"]["predictions"]
    x = norm(head["transform"]["LayerNorm"], gelu(dense(head["transform"]["dense"], x)))
    return x @ tables["word_embeddings"]["embedding"].T + head["bias"]

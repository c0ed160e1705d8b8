"""Tiny models for vectors, as `read_model` would give them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from export_models import model_of

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.model.embedding import EmbeddingConfig


def vector_model(
    pooling: Any = "mean", tokenizer: str = "uncased", maps: Sequence[str] = (), **fields: Any
) -> SavedModel:
    """A model of random numbers, without pooler.

    Args:
        pooling: Of `EmbeddingConfig`.
        tokenizer: Of `export_models.TOKENIZERS`.
        maps: Activations of linear maps; each takes a fourth from the width, and has a bias if it
            has an activation.
        **fields: Other fields of `EmbeddingConfig`.
    """
    saved = model_of("mlm" if pooling == "splade" else "bare", tokenizer)
    params, random, width = dict(saved.params), np.random.default_rng(2), saved.config.hidden_dim
    for n, activation in enumerate(maps):
        kernel = random.normal(size=(width, width * 3 // 4)).astype(np.float32)
        bias = {"bias": random.normal(size=kernel.shape[1]).astype(np.float32)}
        dense = {"kernel": kernel, **(bias if activation else {})}
        params.setdefault("pooling", {"maps": {}})["maps"][f"{n}_{activation}"] = dense
        width = kernel.shape[1]
    if fields.get("static_queries"):
        weight = np.random.default_rng(2).random(saved.config.vocab_size).astype(np.float32)
        params["queries"] = weight
    if pooling == "weighted":
        score = np.random.default_rng(1).normal(size=saved.config.hidden_dim).astype(np.float32)
        params["pooling"] = {"score": score}
    fields = {"normalize": pooling != "splade"} | fields
    return dataclasses.replace(
        saved, params=params, max_length=32, embedding=EmbeddingConfig(pooling, **fields)
    )

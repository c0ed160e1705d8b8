"""Tiny models that translate, of random numbers, in the form of each class of Transformers."""

import dataclasses
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from export_models import tokenizer_of

from bert_jax.artefacts.formats.entries import VOCABULARY_PATHS, lookup
from bert_jax.artefacts.formats.translators import shapes_of
from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.transformer import TransformerNetwork

_SIZES: dict[str, Any] = {
    "hidden_dim": 16, "num_heads": 2, "mlp_dim": 24, "num_layers": 2, "num_positions": 40,
    "dtype": "float32",
}  # fmt: skip
_MARIAN: dict[str, Any] = {
    **_SIZES, "positions": "sinusoidal", "scale_embeddings": True, "norm_eps": 1e-5,
    "embedding_norm": False, "num_types": 0, "head_transform": False, "activation": "relu",
}  # fmt: skip
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "marian": ("MarianMTModel", _MARIAN, {"num_decoder_layers": 1}),
    "marian, two tables": (
        "MarianMTModel", {**_MARIAN, "activation": "gelu"},
        {"tying": "output"},
    ),
    "marian, three tables": ("MarianMTModel", _MARIAN, {"tying": "none"}),
    "pegasus": ("PegasusForConditionalGeneration",
        {**_MARIAN, "norm_order": "pre", "scale_embeddings": False}, {},
    ),
    "pair": ("EncoderDecoderModel", _SIZES, {"num_decoder_layers": 1}),
    "pair, no types": ("EncoderDecoderModel", {**_SIZES, "num_types": 0}, {"tying": "output"}),
    "pair, three tables": ("EncoderDecoderModel", {**_SIZES, "num_types": 1}, {"tying": "none"}),
}  # fmt: skip
"""Class, fields of the model and fields of the network by name."""


@lru_cache
def translator_of(form: str = "marian", tokenizer: str = "unigram", **changes: Any) -> SavedModel:
    """A model of one of `FORMS`, which ends some of its translations.

    Args:
        form: Of `FORMS`.
        tokenizer: Of `export_models.TOKENIZERS`.
        **changes: Fields of the model.
    """
    _, fields, others = FORMS[form]
    made = tokenizer_of(tokenizer)
    model = ModelConfig(vocab_size=made.vocab_size, **{**fields, **changes})
    network = TransformerNetwork(model, **others)
    return translator(network, made)


def translator(network: Any, tokenizer: Any) -> SavedModel:
    """A model of a network with random numbers, whose translations depend on their sources.

    Norms are far from 0 and of either sign, so that a token is not followed by itself; the end
    token's row is longer than others, so that some translations end.
    """
    model, random = network.model, np.random.default_rng(0)

    def make(path: Any, leaf: Any) -> np.ndarray:
        found = random.normal(size=leaf.shape, scale=0.3)
        if path[-1].key == "scale":
            found = (found + 1) * random.choice([-1, 1], leaf.shape)
        if "cross" in (key.key for key in path) and path[-1].key == "kernel":
            found *= 2
        return found.astype(np.float32)

    params = jax.tree_util.tree_map_with_path(make, shapes_of(network))
    for path in VOCABULARY_PATHS:
        if (rows := lookup(params, path)) is not None:
            rows[tokenizer.special_ids.sep] *= 1.5 if rows.ndim == 2 else 1
            rows[model.vocab_size :] = 0
    return SavedModel(
        config=dataclasses.replace(model, attention_impl="auto"), params=params, outputs=None,
        tokenizer=tokenizer, tokenizer_files=Path("nowhere"), max_length=model.num_positions,
        name="a small translator", origin=Origin("pretrain", 7), network=network,
    )  # fmt: skip

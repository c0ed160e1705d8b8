"""Where each parameter of Hugging Face's BERT classes lies in our tree, and in which form.

The decoder is the embedding table in both, so that their duplicates of it,
`cls.predictions.decoder.*`, appear neither in the tables nor in what `to_huggingface` returns.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from bert_jax.artefacts.formats.entries import (
    Entry,
    affine,
    norm,
    read_tensors,
    tensor_shapes,
    to_tensors,
)
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import LinearHead, Params, ReplacedHead, param_shapes
from bert_jax.model.task_heads import TaskHeadConfig

_EMBEDDINGS, _LAYERS = ("encoder", "embeddings"), ("encoder", "layers")
_LAYER_NAME = "bert.encoder.layer.{n}"

_ENCODER: tuple[Entry, ...] = (
    Entry("bert.embeddings.word_embeddings.weight", (*_EMBEDDINGS, "token"), "vocab"),
    Entry("bert.embeddings.position_embeddings.weight", (*_EMBEDDINGS, "position")),
    Entry("bert.embeddings.token_type_embeddings.weight", (*_EMBEDDINGS, "type")),
    *norm("bert.embeddings.LayerNorm", *_EMBEDDINGS, "norm"),
    *affine("bert.embeddings_project", *_EMBEDDINGS, "project"),
    *affine(f"{_LAYER_NAME}.attention.self.query", *_LAYERS, "attention", "query"),
    *affine(f"{_LAYER_NAME}.attention.self.key", *_LAYERS, "attention", "key"),
    *affine(f"{_LAYER_NAME}.attention.self.value", *_LAYERS, "attention", "value"),
    *affine(f"{_LAYER_NAME}.attention.output.dense", *_LAYERS, "attention", "output", num_inputs=2),
    *norm(f"{_LAYER_NAME}.attention.output.LayerNorm", *_LAYERS, "attention_norm"),
    *affine(f"{_LAYER_NAME}.intermediate.dense", *_LAYERS, "mlp", "up"),
    *affine(f"{_LAYER_NAME}.output.dense", *_LAYERS, "mlp", "down"),
    *norm(f"{_LAYER_NAME}.output.LayerNorm", *_LAYERS, "mlp_norm"),
)
_POOLER = tuple(affine("bert.pooler.dense", "encoder", "pooler", "dense"))

PRETRAINING_HEADS: Mapping[str, tuple[Entry, ...]] = {
    "mlm": (
        *affine("cls.predictions.transform.dense", "mlm", "dense"),
        *norm("cls.predictions.transform.LayerNorm", "mlm", "norm"),
        Entry("cls.predictions.bias", ("mlm", "bias"), "vocab"),
    ),
    "nsp": tuple(affine("cls.seq_relationship", "nsp")),
    # Of `ElectraForPreTraining`, under its own names: BERT has no such head.
    "rtd": (
        *affine("discriminator_predictions.dense", "rtd", "dense"),
        *affine("discriminator_predictions.dense_prediction", "rtd", "score"),
    ),
}
"""Heads by our names of them."""
POOLED_HEADS = frozenset({"nsp"})
"""Pretraining heads that read the pooled first token."""
PRETRAINING_TASKS = (
    ({"rtd"}, "ForPreTraining"),
    ({"mlm", "nsp"}, "ForPreTraining"),
    ({"mlm"}, "ForMaskedLM"),
    ({"nsp"}, "ForNextSentencePrediction"),
    (set[str](), "Model"),
)
"""Heads and the class, without the name of its family, that has them; the first that fits."""
LOGITS = {"prediction_logits": "mlm", "seq_relationship_logits": "nsp"}
"""Outputs of `BertForPreTraining`, to heads; of a class with one head, `logits`."""

_TASK_HEADS: Mapping[str, list[Entry]] = {
    "classification": affine("classifier", "head"),
    "tagging": affine("classifier", "head"),
    "span": affine("qa_outputs", "head"),
}
TABLE = (*_ENCODER, *_POOLER, *PRETRAINING_HEADS["mlm"], *PRETRAINING_HEADS["nsp"])
"""Table of `BertForPreTraining`."""


def table_of(
    parts: Collection[str], head: TaskHeadConfig | None = None, *, pooler: bool = True
) -> list[Entry]:
    """Return the entries of the encoder, of the pretraining heads among `parts`, and of a head."""
    table = [*_ENCODER, *(_POOLER if pooler else ())]
    for part, entries in PRETRAINING_HEADS.items():
        table += entries if part in parts else ()
    return table if head is None else table + _TASK_HEADS[head.kind]


_DECODER, _DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
_COPIES = {
    _DECODER: "bert.embeddings.word_embeddings.weight",
    _DECODER_BIAS: "cls.predictions.bias",
    "bert.embeddings.position_ids": "",
}
DUPLICATES = frozenset(_COPIES)
"""Names in their files that hold nothing of their own."""

_HEADS = ("cls.", "classifier.", "qa_outputs.", "discriminator_predictions.")


def from_huggingface(
    state_dict: Mapping[str, Any],
    config: ModelConfig,
    head: TaskHeadConfig | None = None,
    *,
    pretraining: bool = True,
) -> Params:
    """Read the parts of a model (numpy, float32): `encoder`, and the heads that are there.

    The encoder has no `pooler` where theirs has none.

    Args:
      state_dict: anything numpy can read, of any of their BERT classes; see `canonical_names` for
        what else its names may be. Heads of no table are passed over.
      config: the architecture.
      head: of `classifier` or `qa_outputs`, which are passed over where it is None.
      pretraining: whether pretraining heads are read; else they are passed over too.

    Raises:
      UserError: names missing or unexpected, shapes that do not fit, values that are not finite
        numbers, a decoder that is not the embedding table; all of them at once.
    """
    found = canonical_names(state_dict)
    parts = [
        part
        for part, entries in PRETRAINING_HEADS.items()
        if pretraining and not found.keys().isdisjoint(entry.name for entry in entries)
    ]
    shapes = param_shapes(config)
    if "rtd" in parts:
        shapes["rtd"] = param_shapes(config, ReplacedHead)
    if head is not None:
        shapes["head"] = param_shapes(config, LinearHead, head.num_labels)
    pooler = any(entry.name in found for entry in _POOLER)
    table = table_of(parts, head, pooler=pooler)
    known = {entry.name for entry in table} | (DUPLICATES if "mlm" in parts else set())
    found = {n: a for n, a in found.items() if n in known or not n.startswith(_HEADS)}
    return read_tensors(table, shapes, found, config, _COPIES)


def to_huggingface(
    params: Params, config: ModelConfig, table: Iterable[Entry] = TABLE
) -> dict[str, np.ndarray]:
    """Return the parameters (or gradients) that `table` names, under Transformers' names."""
    return to_tensors(params, config, table)


def their_shapes(parts: Collection[str], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a model with some parts, `pooler` among them."""
    table = table_of(parts, pooler="pooler" in parts)
    return tensor_shapes(table, param_shapes(config), config)


def of_today(name: str) -> str:
    """Return the name of a parameter that a file from before 2019 calls gamma or beta."""
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)


def canonical_names(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same arrays under the names of the tables.

    A bare `BertModel` has no prefix `bert.`, files from before 2019 call a norm's parameters gamma
    and beta, and some have the decoder's bias under its second name only.

    Raises:
      UserError: two names of one parameter.
    """
    found: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, array in state_dict.items():
        new = of_today(name)
        if new.startswith(("embeddings.", "encoder.", "pooler.")):
            new = f"bert.{new}"
        if new in found:
            raise UserError(f"these weights have one parameter twice, as {origins[new]} and {name}")
        found[new], origins[new] = array, name
    if _DECODER_BIAS in found:
        found.setdefault("cls.predictions.bias", found[_DECODER_BIAS])
    return found

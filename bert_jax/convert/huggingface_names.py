"""Where each parameter of Hugging Face's `BertForPreTraining` lies in our tree, and in which form.

Theirs are per layer, with kernels stored (out, in); ours are stacked over layers on axis 0, with
kernels (inputs..., outputs...) whose heads are axes of their own, and a vocabulary padded to a
multiple of 128. The decoder is the embedding table in both, so that their duplicates of it,
`cls.predictions.decoder.*`, appear neither in the table nor in what `to_huggingface` returns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import Params, init_params


@dataclass(frozen=True)
class Entry:
    """One parameter (or, with `{n}` in its name, one per layer)."""

    name: str
    """Theirs."""
    path: tuple[str, ...]
    """Ours."""
    kind: Literal["same", "kernel", "vocab"] = "same"
    """`same`: equal up to reshaping; `kernel`: transposed; `vocab`: ours has padding rows."""
    num_inputs: int = 1
    """Leading axes of our kernel that are their `in` axis."""


def _affine(name: str, *path: str, num_inputs: int = 1) -> list[Entry]:
    return [
        Entry(f"{name}.weight", (*path, "kernel"), "kernel", num_inputs),
        Entry(f"{name}.bias", (*path, "bias")),
    ]


def _norm(name: str, *path: str) -> list[Entry]:
    return [Entry(f"{name}.weight", (*path, "scale")), Entry(f"{name}.bias", (*path, "bias"))]


_EMBEDDINGS, _LAYERS = ("encoder", "embeddings"), ("encoder", "layers")
_LAYER_NAME = "bert.encoder.layer.{n}"

TABLE: tuple[Entry, ...] = (
    Entry("bert.embeddings.word_embeddings.weight", (*_EMBEDDINGS, "token"), "vocab"),
    Entry("bert.embeddings.position_embeddings.weight", (*_EMBEDDINGS, "position")),
    Entry("bert.embeddings.token_type_embeddings.weight", (*_EMBEDDINGS, "type")),
    *_norm("bert.embeddings.LayerNorm", *_EMBEDDINGS, "norm"),
    *_affine(f"{_LAYER_NAME}.attention.self.query", *_LAYERS, "attention", "query"),
    *_affine(f"{_LAYER_NAME}.attention.self.key", *_LAYERS, "attention", "key"),
    *_affine(f"{_LAYER_NAME}.attention.self.value", *_LAYERS, "attention", "value"),
    *_affine(
        f"{_LAYER_NAME}.attention.output.dense", *_LAYERS, "attention", "output", num_inputs=2
    ),
    *_norm(f"{_LAYER_NAME}.attention.output.LayerNorm", *_LAYERS, "attention_norm"),
    *_affine(f"{_LAYER_NAME}.intermediate.dense", *_LAYERS, "mlp", "up"),
    *_affine(f"{_LAYER_NAME}.output.dense", *_LAYERS, "mlp", "down"),
    *_norm(f"{_LAYER_NAME}.output.LayerNorm", *_LAYERS, "mlp_norm"),
    *_affine("bert.pooler.dense", "encoder", "pooler", "dense"),
    *_affine("cls.predictions.transform.dense", "mlm", "dense"),
    *_norm("cls.predictions.transform.LayerNorm", "mlm", "norm"),
    Entry("cls.predictions.bias", ("mlm", "bias"), "vocab"),
    *_affine("cls.seq_relationship", "nsp"),
)

DUPLICATES = frozenset(
    {
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
        "bert.embeddings.position_ids",
    }
)
"""Names in their files that hold nothing of their own."""


def from_huggingface(state_dict: Mapping[str, Any], config: ModelConfig) -> Params:
    """Our parameters (numpy, float32) from their state dict (anything numpy can read).

    Raises:
      UserError: names missing or unexpected, or shapes that do not fit; all of them at once.
    """
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params: Params = {}
    wrong, used = [], set(DUPLICATES)
    for entry in TABLE:
        per_layer = "{n}" in entry.name
        ours = _lookup(shapes, entry.path).shape[1 if per_layer else 0 :]
        arrays = []
        for n in range(config.num_layers if per_layer else 1):
            name = entry.name.format(n=n)
            used.add(name)
            if name not in state_dict:
                wrong.append(f"{name} is missing")
                continue
            theirs = np.asarray(state_dict[name]).astype(np.float32)
            expected = _their_shape(entry, ours, config)
            if theirs.shape != expected:
                wrong.append(f"{name} is {theirs.shape}, the configuration wants {expected}")
                continue
            arrays.append(_import(entry, theirs, ours))
        if arrays:
            _insert(params, entry.path, np.stack(arrays) if per_layer else arrays[0])
    wrong += [f"{name} is unexpected" for name in sorted(set(state_dict) - used)]
    if wrong:
        raise UserError("these weights are not of this configuration: " + "; ".join(wrong))
    return params


def to_huggingface(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """Their state dict, without the tied duplicates, from our parameters (or our gradients)."""
    state_dict = {}
    for entry in TABLE:
        array = np.asarray(_lookup(params, entry.path))
        if "{n}" in entry.name:
            for n in range(config.num_layers):
                state_dict[entry.name.format(n=n)] = _export(entry, array[n], config)
        else:
            state_dict[entry.name] = _export(entry, array, config)
    return state_dict


def _their_shape(entry: Entry, ours: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    if entry.kind == "vocab":
        return (config.vocab_size, *ours[1:])
    if entry.kind == "kernel":
        inputs, outputs = ours[: entry.num_inputs], ours[entry.num_inputs :]
        return (int(np.prod(outputs)), int(np.prod(inputs)))
    return (int(np.prod(ours)),) if entry.path[-1] == "bias" else ours


def _import(entry: Entry, theirs: np.ndarray, ours: tuple[int, ...]) -> np.ndarray:
    if entry.kind == "vocab":
        padding = [(0, ours[0] - theirs.shape[0])] + [(0, 0)] * (theirs.ndim - 1)
        return np.pad(theirs, padding)
    if entry.kind == "kernel":
        theirs = theirs.T
    return np.ascontiguousarray(theirs.reshape(ours))


def _export(entry: Entry, ours: np.ndarray, config: ModelConfig) -> np.ndarray:
    shape = _their_shape(entry, ours.shape, config)
    if entry.kind == "vocab":
        return np.ascontiguousarray(ours[: config.vocab_size])
    if entry.kind == "kernel":
        return np.ascontiguousarray(ours.reshape(shape[::-1]).T)
    return np.ascontiguousarray(ours.reshape(shape))


def _lookup(tree: Params, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _insert(tree: Params, path: tuple[str, ...], value: np.ndarray) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value

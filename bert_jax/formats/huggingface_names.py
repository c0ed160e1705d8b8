"""Where each parameter of Hugging Face's BERT classes lies in our tree, and in which form.

Theirs are per layer, with kernels stored (out, in); ours are stacked over layers on axis 0, with
kernels (inputs..., outputs...) whose heads are axes of their own, and a vocabulary padded to a
multiple of 128. The decoder is the embedding table in both, so that their duplicates of it,
`cls.predictions.decoder.*`, appear neither in the table nor in what `to_huggingface` returns.

One table serves `BertForPreTraining` and the three classes with a fine-tuning head. Their classes
for tagging and span QA have no pooler, our encoder always has one, which those heads do not read.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.encoder import Pooler
from bert_jax.model.heads import LinearHead, Params, ReplacedHead, param_shapes
from bert_jax.model.task_heads import TaskHeadConfig


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

_ENCODER: tuple[Entry, ...] = (
    Entry("bert.embeddings.word_embeddings.weight", (*_EMBEDDINGS, "token"), "vocab"),
    Entry("bert.embeddings.position_embeddings.weight", (*_EMBEDDINGS, "position")),
    Entry("bert.embeddings.token_type_embeddings.weight", (*_EMBEDDINGS, "type")),
    *_norm("bert.embeddings.LayerNorm", *_EMBEDDINGS, "norm"),
    *_affine("bert.embeddings_project", *_EMBEDDINGS, "project"),
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
)
_POOLER = tuple(_affine("bert.pooler.dense", "encoder", "pooler", "dense"))

TABLE: tuple[Entry, ...] = (
    *_ENCODER,
    *_POOLER,
    *_affine("cls.predictions.transform.dense", "mlm", "dense"),
    *_norm("cls.predictions.transform.LayerNorm", "mlm", "norm"),
    Entry("cls.predictions.bias", ("mlm", "bias"), "vocab"),
    *_affine("cls.seq_relationship", "nsp"),
)

DETECTION: tuple[Entry, ...] = (
    *_affine("discriminator_predictions.dense", "rtd", "dense"),
    *_affine("discriminator_predictions.dense_prediction", "rtd", "score"),
)
"""Head of `ElectraForPreTraining`, under its own names: BERT has none like it."""

_HEAD_ENTRIES: Mapping[str, list[Entry]] = {
    "classification": _affine("classifier", "head"),
    "tagging": _affine("classifier", "head"),
    "span": _affine("qa_outputs", "head"),
}
TASK_TABLES: Mapping[str, tuple[Entry, ...]] = {
    kind: (*_ENCODER, *(_POOLER if kind == "classification" else ()), *entries)
    for kind, entries in _HEAD_ENTRIES.items()
}
"""Tables of `BertForSequenceClassification`, `BertForTokenClassification` and
`BertForQuestionAnswering`."""

_DECODER, _DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
DUPLICATES = frozenset({_DECODER, _DECODER_BIAS, "bert.embeddings.position_ids"})
"""Names in their files that hold nothing of their own."""

_HEADS = ("cls.", "classifier.", "qa_outputs.", "discriminator_predictions.")
_MAX_SHOWN = 40
_LAYER_NUMBER = re.compile(r"(?<=\.layer\.)\d+(?=\.)")


def from_huggingface(
    state_dict: Mapping[str, Any], config: ModelConfig, head: TaskHeadConfig | None = None
) -> Params:
    """Our parameters (numpy, float32) from their state dict (anything numpy can read).

    Args:
      state_dict: of their class that has such a head; see `canonical_names` for what else its names
        may be. A pooler that a model for tagging or span QA lacks is fresh.
      config: the architecture.
      head: None for `BertForPreTraining`.

    Raises:
      UserError: names missing or unexpected, shapes that do not fit, values that are not finite
        numbers, a decoder that is not the embedding table; all of them at once.
    """
    found = canonical_names(state_dict)
    shapes = param_shapes(config)
    if head is None:
        return _read(TABLE, shapes, found, config)
    shapes["head"] = param_shapes(config, LinearHead, head.num_labels)
    table = TASK_TABLES[head.kind]
    if _has_pooler(found):  # their older classes gave every model one
        table += tuple(entry for entry in _POOLER if entry not in table)
    params = _read(table, shapes, found, config)
    params["encoder"].setdefault("pooler", _fresh_pooler(config))
    return params


def parts_from_huggingface(
    state_dict: Mapping[str, Any],
    config: ModelConfig,
    head: TaskHeadConfig | None = None,
    *,
    pretraining: bool = True,
) -> Params:
    """Return the parts of a BERT: `encoder`, and those of `mlm`, `nsp`, `rtd` and `head` it has.

    As `from_huggingface`, but the encoder may lack `pooler`, and heads of no table are passed over.

    Args:
      state_dict: of any of their BERT classes.
      config: the architecture.
      head: of `classifier` or `qa_outputs`, which are passed over where it is None.
      pretraining: whether `mlm`, `nsp` and `rtd` are read; else they are passed over too.
    """
    found = canonical_names(state_dict)
    pooler = _POOLER if _has_pooler(found) else ()
    table, known = [*_ENCODER, *pooler], set[str]()
    if pretraining and any(n.startswith("cls.predictions.") for n in found.keys() - DUPLICATES):
        table += [entry for entry in TABLE if entry.path[0] == "mlm"]
        known |= DUPLICATES
    if pretraining and any(name.startswith("cls.seq_relationship.") for name in found):
        table += [entry for entry in TABLE if entry.path[0] == "nsp"]
    shapes = param_shapes(config)
    if pretraining and any(name.startswith("discriminator_predictions.") for name in found):
        table += DETECTION
        shapes["rtd"] = param_shapes(config, ReplacedHead)
    if head is not None:
        table += _HEAD_ENTRIES[head.kind]
        shapes["head"] = param_shapes(config, LinearHead, head.num_labels)
    known |= {entry.name for entry in table}
    found = {n: a for n, a in found.items() if n in known or not n.startswith(_HEADS)}
    return _read(tuple(table), shapes, found, config)


def to_huggingface(
    params: Params, config: ModelConfig, head: TaskHeadConfig | None = None
) -> dict[str, np.ndarray]:
    """Make a state dict, without tied duplicates, from our parameters (or our gradients).

    Args:
      params: of a pretraining model, or of one with such a head.
      config: the architecture.
      head: None for `BertForPreTraining`.
    """
    return export_entries(TABLE if head is None else TASK_TABLES[head.kind], params, config)


def export_entries(
    table: Iterable[Entry], params: Params, config: ModelConfig
) -> dict[str, np.ndarray]:
    """Return tensors under Transformers' names, of the parameters that `table` names."""
    state_dict = {}
    for entry in in_model(table, config):
        array = np.asarray(_lookup(params, entry.path))
        if "{n}" in entry.name:
            for n in range(config.num_layers):
                state_dict[entry.name.format(n=n)] = _export(entry, array[n], config)
        else:
            state_dict[entry.name] = _export(entry, array, config)
    return state_dict


def in_model(table: Iterable[Entry], config: ModelConfig) -> list[Entry]:
    """Leave out the map of embeddings that a model of one width does not have."""
    return [e for e in table if config.projects_embeddings or e.path[-2] != "project"]


def _fresh_pooler(config: ModelConfig) -> Params:
    state = nnx.state(Pooler(config, nnx.Rngs(params=0)), nnx.Param)
    return jax.tree.map(np.asarray, nnx.to_pure_dict(state))


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
        new = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        new = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", new)
        if new.startswith(("embeddings.", "encoder.", "pooler.")):
            new = f"bert.{new}"
        if new in found:
            raise UserError(f"these weights have one parameter twice, as {origins[new]} and {name}")
        found[new], origins[new] = array, name
    if _DECODER_BIAS in found:
        found.setdefault("cls.predictions.bias", found[_DECODER_BIAS])
    return found


def _has_pooler(found: Mapping[str, Any]) -> bool:
    return any(entry.name in found for entry in _POOLER)


def _read(
    table: tuple[Entry, ...], shapes: Params, found: Mapping[str, Any], config: ModelConfig
) -> Params:
    """Return the entries of `table` as a tree; `found` has these names, and maybe duplicates."""
    params: Params = {}
    wrong: dict[str, list[str]] = {}
    used = set(DUPLICATES)
    for entry in in_model(table, config):
        per_layer = "{n}" in entry.name
        ours = _lookup(shapes, entry.path).shape[1 if per_layer else 0 :]
        numbers = range(config.num_layers if per_layer else 1)
        arrays = []
        for n in numbers:
            name = entry.name.format(n=n)
            used.add(name)
            if name not in found:
                wrong.setdefault("is missing", []).append(name)
                continue
            array, problem = _as_float32(found[name], _their_shape(entry, ours, config))
            if problem:
                wrong.setdefault(problem, []).append(name)
                continue
            arrays.append(array)
        if len(arrays) == len(numbers):
            filled = _empty((len(arrays), *ours))
            for array, place in zip(arrays, filled, strict=True):
                _import(entry, array, place)
            _insert(params, entry.path, filled if per_layer else filled[0])
    for name in sorted(set(found) - used):
        wrong.setdefault("is unexpected", []).append(name)
    for name, original in (
        (_DECODER, "bert.embeddings.word_embeddings.weight"),
        (_DECODER_BIAS, "cls.predictions.bias"),
    ):
        if {name, original} <= found.keys() and not np.array_equal(found[name], found[original]):
            wrong.setdefault(f"is not equal to {original}, ours is the same", []).append(name)
    if wrong:
        said = [f"{name} {problem}" for problem, names in wrong.items() for name in _folded(names)]
        more = f"; and {len(said) - _MAX_SHOWN} more" if len(said) > _MAX_SHOWN else ""
        raise UserError(
            "these weights are not of this configuration: " + "; ".join(said[:_MAX_SHOWN]) + more
        )
    return params


def _as_float32(found: Any, expected: tuple[int, ...]) -> tuple[np.ndarray, str]:
    """Return an array of the expected shape, and what is wrong with it or ""."""
    theirs = np.asarray(found)
    if theirs.shape != expected:
        return theirs, f"is {theirs.shape}, the configuration wants {expected}"
    if not jnp.issubdtype(theirs.dtype, np.floating):
        return theirs, f"has numbers of type {theirs.dtype}, floating point is needed"
    with np.errstate(over="ignore"):
        theirs = theirs.astype(np.float32, copy=False)
    if not np.isfinite(theirs).all():
        return theirs, "has values that are not finite float32 numbers"
    return theirs, ""


def _folded(names: Iterable[str]) -> list[str]:
    """Names that differ in the number of the layer alone become one."""
    layers: dict[str, list[str]] = {}
    for name in names:
        number = _LAYER_NUMBER.search(name)
        layers.setdefault(_LAYER_NUMBER.sub("{}", name, count=1), []).append(
            number[0] if number else ""
        )
    return [pattern.replace("{}", ",".join(numbers)) for pattern, numbers in layers.items()]


def _their_shape(entry: Entry, ours: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    if entry.kind == "vocab":
        return (config.vocab_size, *ours[1:])
    if entry.kind == "kernel":
        inputs, outputs = ours[: entry.num_inputs], ours[entry.num_inputs :]
        return (int(np.prod(outputs)), int(np.prod(inputs)))
    return (int(np.prod(ours)),) if entry.path[-1] == "bias" else ours


def _empty(shape: tuple[int, ...]) -> np.ndarray:
    """Allocate float32 numbers where XLA on CPU can use them without a copy: at 64 bytes."""
    size = int(np.prod(shape))
    room = np.empty(size + 16, np.float32)
    start = -room.ctypes.data % 64 // 4
    return room[start : start + size].reshape(shape)


def _import(entry: Entry, theirs: np.ndarray, ours: np.ndarray) -> None:
    """Write an array of theirs into ours."""
    if entry.kind == "vocab":
        ours[: len(theirs)], ours[len(theirs) :] = theirs, 0
    elif entry.kind == "kernel":
        ours.reshape(theirs.shape[::-1])[...] = theirs.T
    else:
        ours[...] = theirs.reshape(ours.shape)


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

"""Where each parameter of Hugging Face's BERT classes lies in our tree, and in which form.

Theirs are per layer, with kernels stored (out, in); ours are stacked over layers on axis 0, with
kernels (inputs..., outputs...) whose heads are axes of their own, and a vocabulary padded to a
multiple of 128. The decoder is the embedding table in both, so that their duplicates of it,
`cls.predictions.decoder.*`, appear neither in the tables nor in what `to_huggingface` returns.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
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

PRETRAINING_HEADS: Mapping[str, tuple[Entry, ...]] = {
    "mlm": (
        *_affine("cls.predictions.transform.dense", "mlm", "dense"),
        *_norm("cls.predictions.transform.LayerNorm", "mlm", "norm"),
        Entry("cls.predictions.bias", ("mlm", "bias"), "vocab"),
    ),
    "nsp": tuple(_affine("cls.seq_relationship", "nsp")),
    # Of `ElectraForPreTraining`, under its own names: BERT has no such head.
    "rtd": (
        *_affine("discriminator_predictions.dense", "rtd", "dense"),
        *_affine("discriminator_predictions.dense_prediction", "rtd", "score"),
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
    "classification": _affine("classifier", "head"),
    "tagging": _affine("classifier", "head"),
    "span": _affine("qa_outputs", "head"),
}
TABLE = (*_ENCODER, *_POOLER, *PRETRAINING_HEADS["mlm"], *PRETRAINING_HEADS["nsp"])
"""Table of `BertForPreTraining`."""
VOCABULARY_PATHS = tuple(entry.path for entry in TABLE if entry.kind == "vocab")
"""Our parameters with a row for each token."""


def table_of(
    parts: Collection[str], head: TaskHeadConfig | None = None, *, pooler: bool = True
) -> list[Entry]:
    """Return the entries of the encoder, of the pretraining heads among `parts`, and of a head."""
    table = [*_ENCODER, *(_POOLER if pooler else ())]
    for part, entries in PRETRAINING_HEADS.items():
        table += entries if part in parts else ()
    return table if head is None else table + _TASK_HEADS[head.kind]


_DECODER, _DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
DUPLICATES = frozenset({_DECODER, _DECODER_BIAS, "bert.embeddings.position_ids"})
"""Names in their files that hold nothing of their own."""

_HEADS = ("cls.", "classifier.", "qa_outputs.", "discriminator_predictions.")
_MAX_SHOWN = 40
_LAYER_NUMBER = re.compile(r"(?<=\.layer\.)\d+(?=\.)")


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
    return _read(table, shapes, found, config)


def to_huggingface(
    params: Params, config: ModelConfig, table: Iterable[Entry] = TABLE
) -> dict[str, np.ndarray]:
    """Return the parameters (or gradients) that `table` names, under Transformers' names."""
    state_dict = {}
    for entry in in_model(table, config):
        array = np.asarray(lookup(params, entry.path))
        if "{n}" in entry.name:
            for n in range(config.num_layers):
                state_dict[entry.name.format(n=n)] = _export(entry, array[n], config)
        else:
            state_dict[entry.name] = _export(entry, array, config)
    return state_dict


def their_shapes(parts: Collection[str], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a model with some parts, `pooler` among them."""
    shapes = param_shapes(config)
    found: dict[str, tuple[int, ...]] = {}
    for entry in in_model(table_of(parts, pooler="pooler" in parts), config):
        layers = range(config.num_layers if "{n}" in entry.name else 1)
        ours = lookup(shapes, entry.path).shape["{n}" in entry.name :]
        found |= {entry.name.format(n=n): _their_shape(entry, ours, config) for n in layers}
    return found


def in_model(table: Iterable[Entry], config: ModelConfig) -> list[Entry]:
    """Leave out the map of embeddings that a model of one width does not have."""
    return [e for e in table if config.projects_embeddings or e.path[-2] != "project"]


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


def _read(
    table: Iterable[Entry], shapes: Params, found: Mapping[str, Any], config: ModelConfig
) -> Params:
    """Return the entries of `table` as a tree; `found` has these names, and maybe duplicates."""
    params: Params = {}
    wrong: dict[str, list[str]] = {}
    used = set(DUPLICATES)
    for entry in in_model(table, config):
        per_layer = "{n}" in entry.name
        ours = lookup(shapes, entry.path).shape[1 if per_layer else 0 :]
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
            insert(params, entry.path, filled if per_layer else filled[0])
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
    theirs = ours[: config.vocab_size] if entry.kind == "vocab" else ours
    theirs = theirs.reshape(shape[::-1]).T if entry.kind == "kernel" else theirs.reshape(shape)
    return np.ascontiguousarray(theirs)


def lookup(tree: Params, path: tuple[str, ...]) -> Any:
    """Return the entry of a nested dict at a path."""
    for key in path:
        tree = tree[key]
    return tree


def insert(tree: Params, path: tuple[str, ...], value: Any) -> None:
    """Set the entry of a nested dict at a path."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value

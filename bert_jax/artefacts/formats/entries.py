"""Tables that map the tensors of other libraries ("foreign") to paths in our parameter tree.

Foreign files have one tensor per layer, and their kernels have the shape (out, in). Our parameters
are stacked over layers on axis 0. Our kernels have the shape (inputs..., outputs...), with a
separate axis for heads. Our vocabulary is padded to a multiple of 128.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.errors import UserError, first_few
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import MASKED_LM, Params


@dataclass(frozen=True)
class Entry:
    """A parameter or, if its name contains `{n}`, one parameter per layer.

    Entries that share a name are blocks of rows of one foreign tensor, in the order of the table.
    """

    name: str
    """Name of the foreign tensor."""
    path: tuple[str, ...]
    """Path in our parameter tree."""
    kind: Literal["same", "kernel", "vocab"] = "same"
    """Conversion: `same` reshapes, `kernel` transposes, `vocab` drops our padding rows."""
    num_inputs: int = 1
    """Number of leading axes of our kernel that make up the foreign `in` axis."""
    by_head: bool = False
    """Whether entries that share a name alternate head by head instead of being concatenated."""
    pairs: bool = False
    """Whether foreign rotary pairs are adjacent, (2 i, 2 i + 1); our pairs are (i, i + K/2)."""


def affine(name: str, *path: str, num_inputs: int = 1) -> list[Entry]:
    """Return the entries of a linear map with a bias."""
    return [
        Entry(f"{name}.weight", (*path, "kernel"), "kernel", num_inputs),
        Entry(f"{name}.bias", (*path, "bias")),
    ]


def norm(name: str, *path: str) -> list[Entry]:
    """Return the entries of a norm with a bias."""
    return [Entry(f"{name}.weight", (*path, "scale")), Entry(f"{name}.bias", (*path, "bias"))]


class Tensor(NamedTuple):
    """A foreign tensor that exists once, or once for each of a range of layers."""

    name: str
    """Name, with `{n}` if there is one tensor per layer."""
    layers: range
    """Indices of the layers that have the tensor; only 0 for a tensor outside the layers."""
    entries: list[Entry]
    """Entries that are parts of the tensor."""

    @property
    def per_layer(self) -> bool:
        """Whether there is one tensor per layer."""
        return "{n}" in self.name


def tensors(table: Iterable[Entry], tree: Params, config: ModelConfig) -> Iterator[Tensor]:
    """Yield the tensors of a table that `tree` has, in the order of their first entries.

    If the first layer has no attention norm, files lack this tensor; our tree has ones instead.
    """
    entries: dict[str, list[Entry]] = {}
    for entry in in_model(table, tree):
        entries.setdefault(entry.name, []).append(entry)
    for name, parts in entries.items():
        first = int(parts[0].path[-2] == "attention_norm" and not config.first_norm)
        layers = range(first, lookup(tree, parts[0].path).shape[0]) if "{n}" in name else range(1)
        yield Tensor(name, layers, parts)


def in_model(table: Iterable[Entry], tree: Params) -> list[Entry]:
    """Return the entries of a table that a tree of parameters (or of shapes) has."""
    return [entry for entry in table if lookup(tree, entry.path) is not None]


def to_tensors(
    params: Params, config: ModelConfig, table: Iterable[Entry]
) -> dict[str, np.ndarray]:
    """Convert the parameters (or gradients) in `table` to foreign tensors, by foreign name."""
    found = {}
    for tensor in tensors(table, params, config):
        arrays = [np.asarray(lookup(params, entry.path)) for entry in tensor.entries]
        for n in tensor.layers:
            pieces = [
                _export(entry, array[n] if tensor.per_layer else array, config)
                for entry, array in zip(tensor.entries, arrays, strict=True)
            ]
            found[tensor.name.format(n=n)] = _joined(tensor.entries, pieces, arrays)
    return found


def tensor_shapes(
    table: Iterable[Entry], shapes: Params, config: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the foreign tensors; `shapes` has the shapes of our parameters."""
    found: dict[str, tuple[int, ...]] = {}
    for tensor in tensors(table, shapes, config):
        shape = _shape_of(tensor, shapes, config)
        found |= {tensor.name.format(n=n): shape for n in tensor.layers}
    return found


VOCABULARY_PATHS = (
    ("encoder", "embeddings", "token"), (MASKED_LM, "bias"), (MASKED_LM, "decoder"),
    ("decoder", "embeddings", "token"), ("output", "bias"), ("output", "decoder"),
)  # fmt: skip
"""Paths of our parameters that have one row per token of the vocabulary."""
MAX_SHOWN = 40
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def read_tensors(
    table: Iterable[Entry],
    shapes: Params,
    found: Mapping[str, Any],
    config: ModelConfig,
    copies: Mapping[str, str],
) -> Params:
    """Convert foreign tensors to our parameter tree, in float32.

    `shapes` has the shapes of our parameters, and `found` the foreign arrays by name. `copies` has
    the names of further tensors that `found` may have. Each name maps to the name of the tensor
    that must have equal values, or to "" if the values are not checked. Raise a UserError that
    lists all tensors that are missing, unexpected or do not fit.
    """
    params: Params = {}
    wrong: dict[str, list[str]] = {}
    used = set(copies)
    for tensor in tensors(table, shapes, config):
        expected, arrays = _shape_of(tensor, shapes, config), []
        for n in tensor.layers:
            name = tensor.name.format(n=n)
            used.add(name)
            array, problem = np.empty(0), "is missing"
            if name in found:
                array, problem = as_float32(found[name], expected)
            if problem:
                wrong.setdefault(problem, []).append(name)
            else:
                arrays.append(array)
        if len(arrays) == len(tensor.layers):
            _fill(tensor, arrays, params, shapes)
    for name in sorted(set(found) - used):
        wrong.setdefault("is unexpected", []).append(name)
    for name, original in copies.items():
        if {name, original} <= found.keys() and not np.array_equal(found[name], found[original]):
            wrong.setdefault(f"differs from {original}; they must be equal", []).append(name)
    if wrong:
        said = [f"{name} {problem}" for problem, names in wrong.items() for name in _folded(names)]
        raise UserError(f"the weights do not fit the configuration: {first_few(said, MAX_SHOWN)}")
    return params


def _fill(tensor: Tensor, arrays: Sequence[np.ndarray], params: Params, shapes: Params) -> None:
    filled = []
    for entry in tensor.entries:
        shape = lookup(shapes, entry.path).shape
        ours = _empty(shape if tensor.per_layer else (1, *shape))
        ours[: tensor.layers.start] = entry.path[-1] == "scale"  # ones for layers without a norm
        filled.append(ours)
        insert(params, entry.path, ours if tensor.per_layer else ours[0])
    for n, array in zip(tensor.layers, arrays, strict=True):
        pieces = taken_apart(tensor.entries, array, [ours[n].shape for ours in filled])
        for entry, piece, ours in zip(tensor.entries, pieces, filled, strict=True):
            _import(entry, piece, ours[n])


def _shape_of(tensor: Tensor, shapes: Params, config: ModelConfig) -> tuple[int, ...]:
    pieces = [
        _their_shape(e, lookup(shapes, e.path).shape[int(tensor.per_layer) :], config)
        for e in tensor.entries
    ]
    return (sum(shape[0] for shape in pieces), *pieces[0][1:])


def taken_apart(entries: Sequence[Entry], whole: Any, ours: Sequence[tuple[int, ...]]) -> list[Any]:
    """Split a foreign tensor into one part per entry, with the rows in our order.

    `ours` has the shapes of our parameters. The tensor may be a traced JAX array.
    """
    if len(entries) == 1:
        pieces = [whole]
    elif entries[0].by_head:
        heads, width = ours[0][-2:]
        turns = whole.reshape(heads, len(entries), width, *whole.shape[1:])
        pieces = [turns[:, i].reshape(-1, *whole.shape[1:]) for i in range(len(entries))]
    else:
        pieces, start = [], 0
        for entry, shape in zip(entries, ours, strict=True):
            outputs = shape[entry.num_inputs :] if entry.kind == "kernel" else shape
            stop = start + int(np.prod(outputs))
            pieces.append(whole[start:stop])
            start = stop
    return [
        _rows_of_pairs(piece, shape[-2:], back=False) if entry.pairs else piece
        for entry, piece, shape in zip(entries, pieces, ours, strict=True)
    ]


def _joined(
    entries: Sequence[Entry], pieces: Sequence[np.ndarray], arrays: Sequence[np.ndarray]
) -> np.ndarray:
    """Join parts into one foreign tensor: the inverse of `taken_apart`."""
    pieces = [
        _rows_of_pairs(piece, array.shape[-2:], back=True) if entry.pairs else piece
        for entry, piece, array in zip(entries, pieces, arrays, strict=True)
    ]
    if len(pieces) == 1:
        return np.ascontiguousarray(pieces[0])
    if entries[0].by_head:
        heads, width = arrays[0].shape[-2:]
        turns = [piece.reshape(heads, width, -1) for piece in pieces]
        return np.stack(turns, axis=1).reshape(-1, *pieces[0].shape[1:])
    return np.concatenate(pieces)


def _rows_of_pairs(rows: Any, head: tuple[int, ...], *, back: bool) -> Any:
    """Reorder the rows of each head from (pair, member) to (member, pair); `back` reverses this."""
    heads, width = head
    split = (heads, 2, width // 2, -1) if back else (heads, width // 2, 2, -1)
    return rows.reshape(split).swapaxes(1, 2).reshape(rows.shape)


def as_float32(found: Any, expected: tuple[int, ...]) -> tuple[np.ndarray, str]:
    """Convert an array to float32; return it with a description of a fault, or with ""."""
    theirs = np.asarray(found)
    if theirs.shape != expected:
        return theirs, f"is {theirs.shape}, but the configuration needs {expected}"
    if not jnp.issubdtype(theirs.dtype, np.floating):
        return theirs, f"has numbers of type {theirs.dtype}; floating point is needed"
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = theirs.astype(np.float32, copy=False)
        # A sum needs no memory. If it is finite, all values are; if not, it may have overflowed.
        finite = np.isfinite(theirs.sum()) or np.isfinite(theirs).all()
    if not finite:
        return theirs, "has values that are not finite float32 numbers"
    return theirs, ""


def _folded(names: Iterable[str]) -> list[str]:
    """Merge names that differ only in the layer index."""
    layers: dict[str, list[str]] = {}
    for name in names:
        number = _LAYER_NUMBER.search(name)
        pattern = _LAYER_NUMBER.sub("{}", name, count=1)
        layers.setdefault(pattern, []).append(number[0] if number else "")
    return [pattern.replace("{}", ",".join(numbers)) for pattern, numbers in layers.items()]


def _their_shape(entry: Entry, ours: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    if entry.kind == "vocab":
        return (config.vocab_size, *ours[1:])
    if entry.kind == "kernel":
        inputs, outputs = ours[: entry.num_inputs], ours[entry.num_inputs :]
        return (int(np.prod(outputs)), int(np.prod(inputs)))
    return (int(np.prod(ours)),) if entry.path[-1] == "bias" else ours


def _empty(shape: tuple[int, ...]) -> np.ndarray:
    """Allocate float32 aligned to 64 bytes, so that XLA on CPU can use it without a copy."""
    size = int(np.prod(shape))
    room = np.empty(size + 16, np.float32)
    start = -room.ctypes.data % 64 // 4
    return room[start : start + size].reshape(shape)


_STRIP = 32
"""Number of foreign rows to transpose at once: two cache lines of each row of our kernel."""


def _import(entry: Entry, theirs: np.ndarray, ours: np.ndarray) -> None:
    if entry.kind == "vocab":
        ours[: len(theirs)], ours[len(theirs) :] = theirs, 0
    elif entry.kind == "kernel":
        kernel = ours.reshape(theirs.shape[::-1])
        for start in range(0, len(theirs), _STRIP):
            rows = slice(start, start + _STRIP)
            kernel[:, rows] = theirs[rows].T
    else:
        ours[...] = theirs.reshape(ours.shape)


def _export(entry: Entry, ours: np.ndarray, config: ModelConfig) -> np.ndarray:
    shape = _their_shape(entry, ours.shape, config)
    theirs = ours[: config.vocab_size] if entry.kind == "vocab" else ours
    theirs = theirs.reshape(shape[::-1]).T if entry.kind == "kernel" else theirs.reshape(shape)
    return np.ascontiguousarray(theirs)


def named(tree: Params, vocab_size: int | None = None) -> dict[str, np.ndarray]:
    """Flatten a tree into a dict of arrays, whose keys are paths joined by slashes.

    If `vocab_size` is given, the rows that pad the vocabulary are left out.
    """
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        rows = vocab_size if tuple(key.key for key in path) in VOCABULARY_PATHS else None
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name] = np.asarray(leaf)[:rows] if rows else np.asarray(leaf)
    return found


def lookup(tree: Params, path: tuple[str, ...]) -> Any:
    """Return the entry of a nested dict at a path, or None if the path is missing."""
    found: Any = tree
    for key in path:
        if key not in found:
            return None
        found = found[key]
    return found


def insert(tree: Params, path: tuple[str, ...], value: Any) -> None:
    """Set the entry of a nested dict at a path."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value

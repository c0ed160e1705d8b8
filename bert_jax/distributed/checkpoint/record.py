"""The record of a checkpoint (JSON protected by a CRC), and the names of its arrays.

The name of an array is its path in the state, joined by "/", such as `params/encoder/...`.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from bert_jax.distributed.checkpoint import storage
from bert_jax.distributed.checkpoint.storage import PARAMS, REST, AnyPath
from bert_jax.errors import UserError
from bert_jax.files.checks import json_crc

FORMAT = 2
_PREFIX = PARAMS + "/"


@dataclass(frozen=True)
class Record:
    """Metadata of a checkpoint, which is saved with the arrays."""

    step: int
    """Next step to train, which is also the index of the next batch."""
    config: dict[str, Any]
    extra: dict[str, Any]
    """Other values that the training loop saved with the state."""
    metrics: dict[str, float]
    """Metrics of an evaluation of this state. If empty, the state was not evaluated."""
    arrays: dict[str, list[Any]]
    """Shape, dtype and digest of each array, by name."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that all arrays take in memory."""
        return sum(
            math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype, _ in self.arrays.values()
        )

    @property
    def digest(self) -> str:
        """Digest of all arrays in 16 hexadecimal digits, by which checkpoints can be compared."""
        return hashlib.sha256(json.dumps(self.arrays, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values, with its format and CRC."""
        content = {"format": FORMAT, **self.__dict__}
        return {**content, "crc32": json_crc(content)}


class RecordFaultError(ValueError):
    """Error if the record of a checkpoint is damaged or cannot be read."""


def read_record(checkpoint: AnyPath) -> Record:
    """Read a record. Raise a RecordFaultError if it is damaged, a UserError for another format."""
    try:
        content = storage.read_object(storage.as_path(checkpoint) / storage.RECORD / "data.json")
        crc = content.pop("crc32", None)
    except Exception as error:
        reason = storage.damage(error, checkpoint)
        raise RecordFaultError(f"its record cannot be read: {reason}") from error
    if crc != json_crc(content):
        raise RecordFaultError("its record does not match its CRC")
    version = content.pop("format", None)
    if version != FORMAT:
        raise UserError(
            f"{checkpoint} has checkpoint format {version}; this version reads format {FORMAT}. "
            "Continue the run with the version of bert_jax that began the run"
        )
    try:
        return Record(**content)
    except TypeError as error:
        raise RecordFaultError(f"its record has missing or unknown fields: {error}") from error


def named_leaves(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    """Return the leaves of a tree, in order, by name (such as `params/encoder/...`)."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    }


def grouped(leaves: dict[str, Any]) -> dict[str, Any]:
    """Group leaves as they are stored: parameters in a nested dict, other leaves by name."""
    rest = {name: leaf for name, leaf in leaves.items() if not is_param(name)}
    return {PARAMS: nested_params(leaves), **({REST: rest} if rest else {})}


def ungrouped(groups: dict[str, Any]) -> dict[str, Any]:
    """Return leaves by name, from the groups that `grouped` made."""
    params = {_PREFIX + name: leaf for name, leaf in named_leaves(groups[PARAMS]).items()}
    return {**params, **groups.get(REST, {})}


def group_of(name: str) -> tuple[str, str]:
    """Return the group of an array, and the name of the array within the group."""
    return (PARAMS, name.removeprefix(_PREFIX)) if is_param(name) else (REST, name)


def is_param(name: str) -> bool:
    """Tell whether `name` is the name of a model parameter."""
    return name.startswith(_PREFIX)


def nested_params(leaves: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters among the named `leaves`, as a nested dict."""
    params = {name.removeprefix(_PREFIX): leaf for name, leaf in leaves.items() if is_param(name)}
    return unflatten_dict(params, sep="/")

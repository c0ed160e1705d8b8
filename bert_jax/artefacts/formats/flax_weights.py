"""Weights in the msgpack files of Flax that versions of Transformers before 5 wrote and read.

Such a file has nested dicts of arrays, and no code. The paths are the names of PyTorch's tensors,
except for the last part; a kernel is the transpose of a weight.
"""

from pathlib import Path
from typing import Any

import numpy as np
from flax.serialization import msgpack_restore
from flax.traverse_util import flatten_dict

from bert_jax.errors import UserError
from bert_jax.files.untrusted.safetensors_file import check_name
from bert_jax.files.untrusted.whole_file import map_bytes

FLAX_WEIGHTS = "flax_model.msgpack"


def read_flax(path: Path) -> dict[str, np.ndarray]:
    """Read all tensors into memory, with the names and orientation of the PyTorch model.

    Raise a UserError if the file is missing or damaged, or is no tree of arrays with sound names.
    """
    raw: Any = map_bytes(path, f"{FLAX_WEIGHTS} was expected")
    try:
        tree = msgpack_restore(raw)
        leaves = flatten_dict(tree["params"] if tree.keys() == {"params"} else tree)
    except Exception as error:  # of any type: from msgpack, numpy, or an unexpected kind of value
        why = f"{path} is not a sound msgpack file of Flax, or is cut off; copy it again"
        raise UserError(f"{why} ({type(error).__name__}: {str(error)[:200]})") from error
    found: dict[str, np.ndarray] = {}
    for keys, leaf in leaves.items():
        *parts, last = map(str, keys)
        renamed = "weight" if last in ("kernel", "scale", "embedding") else last
        check_name(path, name := ".".join([*parts, renamed]))
        if not isinstance(leaf, np.ndarray) or name in found:
            what = "twice" if name in found else f"as {type(leaf).__name__}, not as an array"
            raise UserError(f"{path} has {name!r} {what}; expected one array for each name")
        found[name] = leaf.T if last == "kernel" else leaf
    return found

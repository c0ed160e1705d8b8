"""A model as a plain Orbax checkpoint: three lines read it, without this package.

    from orbax.checkpoint import v1 as ocp
    params = ocp.load(Path("DIR/params").absolute())
    params["encoder"]["layers"]["attention"]["query"]["kernel"]  # (N, D, H, K)

Beside it lie `config.json` and the tokenizer's files, as Hugging Face has them.
"""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.checkpoint.storage import read_tree, write_tree
from bert_jax.exchange.huggingface_files import write_description
from bert_jax.exchange.proof import ProofFailedError
from bert_jax.saved.model import SavedModel

PARAMS = "params"


def write(saved: SavedModel, out: Path) -> None:
    """Write `params/`, `config.json` and the tokenizer's files.

    Args:
        saved: Model to write: its parameters as they are, float32, layers stacked on axis 0, the
            vocabulary padded to a multiple of 128.
        out: Exists; holds none of these.

    Raises:
        UserError: The tokenizer cannot be said in Hugging Face's format.
        OSError: The files cannot be written.
    """
    write_description(saved, out)
    write_tree(out / PARAMS, jax.tree.map(np.asarray, saved.params))


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Read the checkpoint back and compare it bit for bit.

    Args:
        saved: The source.
        out: Directory that `write` wrote.
        rows: Rows of token ids; not used, as equal parameters compute the same.

    Returns:
        `differences`, empty, `arrays`, how many are equal, and `versions`.

    Raises:
        ProofFailedError: Arrays are missing, unexpected or not equal; names them.
    """
    found, source = (_by_name(tree) for tree in (read_tree(out / PARAMS), saved.params))
    wrong = [
        name
        for name in sorted(found.keys() | source.keys())
        if name not in found or name not in source or not _same(found[name], source[name])
    ]
    if wrong:
        shown = ", ".join(wrong[:8]) + (", ..." if len(wrong) > 8 else "")
        raise ProofFailedError(f"{len(wrong)} of {len(source)} arrays did not come back: {shown}")
    versions = {"orbax-checkpoint": version("orbax-checkpoint"), "jax": jax.__version__}
    return {"differences": {}, "arrays": len(source), "versions": versions}


def _by_name(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(a) for path, a in leaves
    }


def _same(first: np.ndarray, second: np.ndarray) -> bool:
    """Down to the sign of zero and the bits of what is not a number."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return bool(np.array_equal(_bits(first), _bits(second)))


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

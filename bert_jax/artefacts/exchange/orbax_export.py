"""Export as a plain Orbax checkpoint, which three lines of code read without this package.

    from orbax.checkpoint import v1 as ocp
    params = ocp.load(Path("DIR/params").absolute())
    params["encoder"]["layers"]["attention"]["query"]["kernel"]  # (N, D, H, K)

The directory also has the files of the tokenizer and the configuration (see `write_description`).
"""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.artefacts.exchange.exported_files import write_description
from bert_jax.artefacts.exchange.proof import ProofFailedError, unequal
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.distributed.checkpoint.storage import read_tree, save_fault, write_tree
from bert_jax.errors import UserError, first_few

PARAMS = "params"


def write(saved: SavedModel, out: Path) -> None:
    """Write the parameters in our layout, and the files of `write_description`.

    Parameters are float32. Layers are stacked on axis 0; vocabulary rows are a multiple of 128.
    """
    write_description(saved, out)
    try:
        write_tree(out / PARAMS, jax.tree.map(np.asarray, saved.params))
    except Exception as error:  # Orbax has many error types for a full disk
        raise UserError(f"cannot write {PARAMS}: {save_fault(error)}. Nothing was left") from error


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Read the checkpoint back and compare parameters bit for bit; `rows` are not used.

    Return `differences` (empty), `arrays` (the number of equal arrays) and `versions`. Raise a
    ProofFailedError that lists the arrays that are missing, unexpected or not equal.
    """
    number = len(jax.tree.leaves(saved.params))
    if wrong := unequal(read_tree(out / PARAMS), saved.params):
        raise ProofFailedError(
            f"{len(wrong)} of {number} arrays differ when they are read back: {first_few(wrong, 8)}"
        )
    versions = {"orbax-checkpoint": version("orbax-checkpoint"), "jax": jax.__version__}
    return {"differences": {}, "arrays": number, "versions": versions}

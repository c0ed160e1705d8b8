"""A model in Hugging Face's format: what `AutoModelFor...`, `AutoTokenizer` and `read_model` load.

with staged(out) as directory:
    write_huggingface(read_model("work/base"), directory)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.exchange.huggingface_files import write_huggingface
from bert_jax.saved.model import SavedModel


def write(saved: SavedModel, out: Path) -> None:
    """`write_huggingface`, under the name that every format has."""
    write_huggingface(saved, out)


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Read back what was written and compare it; see `huggingface_proof`."""
    from bert_jax.exchange import huggingface_proof

    return huggingface_proof.prove(saved, out, rows)

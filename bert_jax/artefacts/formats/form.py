"""A model as its files have it, before it becomes one of ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Form:
    """Configuration and tensors of a model, under the names of one table of parameters."""

    family: str
    """Name of the family, for people."""
    config: dict[str, Any]
    """Content of `config.json`."""
    arrays: dict[str, np.ndarray]
    """Arrays under the names of the table."""
    dropped: tuple[str, ...] = ()
    """Names of the arrays that have no place."""
    notes: tuple[str, ...] = ()
    """Remarks for people, a sentence each."""
    files: Path | None = None
    """File or directory of the tokenizer, where the reader knows it."""

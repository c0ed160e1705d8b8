"""The stations of docs/chapter: their names, in order, and their formulas in numpy."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[2]
PAGES, EXAMPLES = ROOT / "docs" / "chapter", ROOT / "examples" / "chapter"
PICTURES = ROOT / "docs" / "pictures" / "chapter"
STATIONS = re.findall(r"^\| \[.+?\]\((\w+)\.md\)", (PAGES / "index.md").read_text(), re.MULTILINE)
"""Names of the stations that the table of docs/chapter/index.md links to."""


def formulas(station: str) -> ModuleType:
    """examples/chapter/formulas/STATION.py."""
    path = EXAMPLES / "formulas" / f"{station}.py"
    spec = importlib.util.spec_from_file_location(f"formulas_{station}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Random float32 numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)

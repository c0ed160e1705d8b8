"""The stations of docs/chapter: their names, in order, and their formulas in numpy."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

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


def affine(params: Any) -> Callable[[np.ndarray], np.ndarray]:
    """The function x -> W x + b of an `Affine`."""
    W, b = np.array(params["kernel"]).T, np.array(params.get("bias", 0.0))
    return lambda x: W @ x + b


def gru(params: Any) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The formula of station 2 with the weights of a `Cell`; a second input follows the first."""
    kernels = [params[name]["kernel"] for name in ("input", "context") if name in params]
    W = np.concatenate([np.array(kernel).T for kernel in kernels], axis=1)
    U, step = np.array(params["recurrent"]["kernel"]).T, formulas("gates").gru_step
    biases = [np.array(params[name]["bias"]).reshape(3, -1) for name in ("input", "recurrent")]
    matrices = [each.reshape(3, U.shape[1], -1) for each in (W, U)]
    return lambda x, h: step(x, h, *matrices, *biases)


def heads_of(params: Any) -> tuple[list[tuple[np.ndarray, ...]], np.ndarray, np.ndarray]:
    """The heads (W_q, b_q, W_k, b_k, W_v, b_v), W_o and b_o of the parameters of an `Attention`."""
    arrays = {name: {k: np.array(v) for k, v in part.items()} for name, part in params.items()}
    maps = [arrays[name] for name in ("query", "key", "value")]
    count = maps[0]["kernel"].shape[1]
    heads = [
        tuple(each for map in maps for each in (map["kernel"][:, n].T, map["bias"][n]))
        for n in range(count)
    ]
    output = arrays["output"]["kernel"]
    return heads, output.reshape(-1, output.shape[-1]).T, arrays["output"]["bias"]

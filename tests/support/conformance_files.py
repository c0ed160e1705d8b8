"""Written models with their cases, and what their check.py says."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from bert_jax.artefacts.exchange import huggingface, sentence_transformers, stablehlo
from bert_jax.artefacts.exchange.conformance import cases
from bert_jax.artefacts.exchange.onnx import runtime
from bert_jax.artefacts.saved.model import SavedModel

MODULES: dict[str, Any] = {
    "huggingface": huggingface,
    "sentence-transformers": sentence_transformers,
    "cross-encoder": sentence_transformers,
    "onnx": runtime,
    "stablehlo": stablehlo,
}


def written(saved: SavedModel, format: str, out: Path, *outputs: str) -> ModuleType:
    """Write a model and its cases; `outputs` are those that the proof of a program compares."""
    out.mkdir(exist_ok=True)
    MODULES[format].write(saved, out)
    cases.write(saved, out, format, {"differences": dict.fromkeys(outputs, 0.0)})
    return check_of(out)


def check_of(out: Path) -> ModuleType:
    """The check.py of an export, as a module of its own."""
    spec = importlib.util.spec_from_file_location("check", out / "conformance" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wrong(said: str) -> list[str]:
    """Batch, number and output of the printed lines that say WRONG."""
    assert "token ids" in said or "largest difference" in said
    return [line.split(":")[0] for line in said.splitlines() if "WRONG" in line]


def change(path: Path, **fields: Any) -> None:
    """Replace fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def keep_case(out: Path) -> None:
    """Take lower-casing out of a directory's tokenizer."""
    path = out / "tokenizer.json"
    normalizer = json.loads(path.read_text())["normalizer"]
    change(path, normalizer=normalizer | {"lowercase": False})
    change(out / "tokenizer_config.json", do_lower_case=False)

"""Export as an ONNX graph with free batch and length, of standard operators only (opset 20).

An encoder is one fixed graph, so this package builds it node by node from our parameters, with the
input and output names that Hugging Face's tools expect:

    session = onnxruntime.InferenceSession("DIR/model.onnx")
    session.run(["logits"], {"input_ids": ..., "token_type_ids": ..., "attention_mask": ...})

A model without token types has no input `token_type_ids`.

The export needs `onnx`, the proof `onnxruntime` (pip install 'bert_jax[onnx]').
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.exchange.huggingface_files import card_fields, write_description
from bert_jax.artefacts.exchange.onnx.graph import INPUTS, OPSET, VECTORS, Graph, logit_names
from bert_jax.artefacts.exchange.proof import Batch, ProofFailedError, compare_shapes
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError

GRAPH, DATA = "model.onnx", "model.onnx.data"
_MAX_INLINE_BYTES = 1_800_000_000
"""Limit for weights inside the graph: an ONNX file is under 2 GiB, so more go to a second file."""


def write(saved: SavedModel, out: Path) -> None:
    """Write `model.onnx` and the files of `write_description`.

    Rows must be padded on the right: a token's position is its index in the row. Weights beyond
    1.8 GB go to `model.onnx.data` beside the graph.

    Raises:
        UserError: `onnx` or `onnxruntime` is not installed, Hugging Face's format cannot express
            the tokenizer, or no class of Transformers computes the model.
    """
    onnx = _package("onnx")
    _package("onnxruntime")  # needed for the proof
    write_description(saved, out)
    graph = Graph(onnx, saved)
    model = graph.model(graph.outputs())
    if graph.num_bytes > _MAX_INLINE_BYTES:
        onnx.save_model(model, out / GRAPH, save_as_external_data=True, location=DATA)
    else:
        (out / GRAPH).write_bytes(model.SerializeToString())
    onnx.checker.check_model(out / GRAPH, full_check=True)


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Run the graph in onnxruntime on the CPU and compare outputs.

    Returns:
        The entries of `compare_shapes`, and `versions`.

    Raises:
        UserError: `onnxruntime` is not installed.
        ProofFailedError: The graph does not load or lacks an output.
    """
    onnx, runtime = _package("onnx"), _package("onnxruntime")
    versions = {"onnx": onnx.__version__, "onnxruntime": runtime.__version__, "opset": OPSET}
    return {**compare_shapes(saved, rows, program(saved, out)), "versions": versions}


def program(saved: SavedModel, out: Path) -> Callable[[Batch], dict[str, np.ndarray]]:
    """Load the graph in a directory as a function from a batch to the outputs of `logits_of`.

    Raises:
        ProofFailedError: The graph does not load, or, when called, does not run.
    """
    runtime = _package("onnxruntime")
    try:
        session = runtime.InferenceSession(out / GRAPH, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a dozen error types
        raise ProofFailedError(f"onnxruntime does not load {GRAPH}: {error}") from error
    names = [output.name for output in session.get_outputs()]
    inputs = {each.name for each in session.get_inputs()}

    def run(batch):
        given = zip(INPUTS, batch, strict=True)
        feeds = {name: ids.astype(np.int64) for name, ids in given if name in inputs}
        try:
            found = session.run(names, feeds)
        except Exception as error:
            raise ProofFailedError(f"onnxruntime cannot run {GRAPH}: {error}") from error
        return _under_our_names(saved, dict(zip(names, found, strict=True)))

    return run


_LOADING = """\
With onnxruntime, numpy and tokenizers, `DIR` being this directory:

```python
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("DIR/tokenizer.json")
tokenizer.enable_truncation({max_length})
tokenizer.enable_padding(pad_id={pad}, pad_token={pad_token!r})
session = onnxruntime.InferenceSession("DIR/model.onnx")
rows = tokenizer.encode_batch(["{prefix}A text.", "{prefix}Another text."])
ids = {{
    "input_ids": [row.ids for row in rows],
    "token_type_ids": [row.type_ids for row in rows],
    "attention_mask": [row.attention_mask for row in rows],
}}
feeds = {{each.name: np.array(ids[each.name], np.int64) for each in session.get_inputs()}}
names = [each.name for each in session.get_outputs()]
for name, array in zip(names, session.run(names, feeds)):
    print(name, array.shape)
```"""


def loading(saved: SavedModel) -> str:
    """Describe how to run the graph, for the model card."""
    return _LOADING.format(**card_fields(saved))


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"--to onnx needs the package {name}, which is not installed ({error}): "
            "pip install 'bert_jax[onnx]', or pip install onnx onnxruntime"
        ) from error


def _under_our_names(saved: SavedModel, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {"hidden": "last_hidden_state", "pooled": "pooler_output", **logit_names(saved)}
    names["embedding"] = VECTORS
    if saved.outputs is not None:
        names["head"] = "logits"
    if "start_logits" in found:
        found["logits"] = np.stack([found["start_logits"], found["end_logits"]], axis=-1)
    return {ours: found[theirs] for ours, theirs in names.items() if theirs in found}

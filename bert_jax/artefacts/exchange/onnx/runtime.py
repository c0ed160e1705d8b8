"""A model as an ONNX graph with free batch and length, of standard operators only (opset 20).

An encoder is one fixed graph, so it is built here node by node, from our parameters, with names of
inputs and outputs as Hugging Face's tools expect them:

    session = onnxruntime.InferenceSession("DIR/model.onnx")
    session.run(["logits"], {"input_ids": ..., "token_type_ids": ..., "attention_mask": ...})

A model without sentence types has no input `token_type_ids`.

Building needs the package `onnx`, the proof `onnxruntime` (pip install 'bert_jax[onnx]').
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
"""A file of ONNX has less than 2 GiB; larger weights lie in a second one."""


def write(saved: SavedModel, out: Path) -> None:
    """Write `model.onnx`, and what `write_description` writes.

    Rows are padded on the right: a token's position is its place in the row. Beyond 1.8 GB the
    weights are in `model.onnx.data` beside it.

    Raises:
        UserError: `onnx` or `onnxruntime` is not installed, or the tokenizer cannot be said in
            Hugging Face's format, or no class of Transformers computes the model.
    """
    onnx = _package("onnx")
    _package("onnxruntime")  # without which the proof could not be made
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
        What `compare_shapes` returns, and `versions`.

    Raises:
        UserError: `onnxruntime` is not installed.
        ProofFailedError: The graph does not load or lacks an output.
    """
    onnx, runtime = _package("onnx"), _package("onnxruntime")
    versions = {"onnx": onnx.__version__, "onnxruntime": runtime.__version__, "opset": OPSET}
    return {**compare_shapes(saved, rows, program(saved, out)), "versions": versions}


def program(saved: SavedModel, out: Path) -> Callable[[Batch], dict[str, np.ndarray]]:
    """Return the graph in a directory as a function of batches to the outputs of `logits_of`.

    Raises:
        ProofFailedError: The graph does not load, or, when called, does not run.
    """
    runtime = _package("onnxruntime")
    try:
        session = runtime.InferenceSession(out / GRAPH, providers=["CPUExecutionProvider"])
    except Exception as error:  # of a dozen types of its own
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
    """Write how the graph is run, for the model card."""
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

"""Export as an ONNX graph of standard operators (opset 20), for any batch size and length.

This package builds an encoder's graph node by node from our parameters. Inputs and outputs have the
names that Hugging Face's tools expect; a model with fewer than two types lacks `token_type_ids`.

The export needs `onnx`, and the proof needs `onnxruntime` (pip install 'bert_jax[onnx]').
`quantize` replaces a proven graph with a graph of 8-bit weights, and measures the loss of accuracy.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.exchange import proof
from bert_jax.artefacts.exchange.exported_files import code_of_rows, write_description
from bert_jax.artefacts.exchange.onnx.graph import INPUTS, OPSET, Graph, output_names
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError, needs_package
from bert_jax.tasks.retrieval.metrics import unit
from bert_jax.terminal import markdown_table

GRAPH, DATA = "model.onnx", "model.onnx.data"
_MAX_INLINE_BYTES = 1_800_000_000
"""Size above which weights go to a second file, because the graph's file must be below 2 GiB."""


def check(saved: SavedModel) -> None:
    """Raise UserError for relative positions, which the graph lacks."""
    if saved.config.positions == "relative":
        raise UserError(f"{saved.name}: the ONNX graph has no relative positions (DeBERTa)")


def write(saved: SavedModel, out: Path) -> None:
    """Write `model.onnx` and the files of `write_description`.

    The graph needs input rows that are padded on the right, because a token's position is its index
    in the row. If the weights exceed 1.8 GB, they go to `model.onnx.data` beside the graph. Raise a
    UserError if a package is missing, or Hugging Face's format cannot express the tokenizer.
    """
    onnx, _ = _packages()  # fail now if the proof's package is missing
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

    Return the entries of `compare_shapes`, and `versions`: the package versions and the opset.
    """
    onnx, runtime = _packages()
    versions = {"onnx": onnx.__version__, "onnxruntime": runtime.__version__, "opset": OPSET}
    return {**proof.compare_shapes(saved, rows, program(saved, out)), "versions": versions}


def program(saved: SavedModel, out: Path) -> Callable[[proof.Batch], dict[str, np.ndarray]]:
    """Load the graph in a directory as a function from a batch to the outputs of `logits_of`.

    Raise a ProofFailedError if the graph cannot be loaded or, in the returned function, be run.
    """
    _, runtime = _packages()
    try:
        session = runtime.InferenceSession(out / GRAPH, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises a dozen types
        raise proof.ProofFailedError(f"onnxruntime cannot load {GRAPH}: {error}") from error
    names, names_of = [output.name for output in session.get_outputs()], output_names(saved)
    inputs = {each.name for each in session.get_inputs()}

    def run(batch):
        given = zip(INPUTS, batch, strict=True)
        feeds = {name: ids.astype(np.int64) for name, ids in given if name in inputs}
        try:
            found = session.run(names, feeds)
        except Exception as error:
            raise proof.ProofFailedError(f"onnxruntime cannot run {GRAPH}: {error}") from error
        arrays = dict(zip(names, found, strict=True))
        if "start_logits" in arrays:
            arrays["logits"] = np.stack([arrays["start_logits"], arrays["end_logits"]], axis=-1)
        return {ours: arrays[theirs] for ours, theirs in names_of.items() if theirs in arrays}

    return run


_LOADING = """\
With onnxruntime, numpy and tokenizers, where `DIR` is this directory:

```python
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

{rows}
session = onnxruntime.InferenceSession("DIR/model.onnx")
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
    return _LOADING.format(rows=code_of_rows(saved))


def _packages() -> tuple[Any, Any]:
    with needs_package("--to onnx needs onnx and onnxruntime: pip install 'bert_jax[onnx]'"):
        import onnx
        import onnxruntime
    return onnx, onnxruntime


def quantize(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Quantize the float32 matrices of a written graph to int8; compare outputs with the source.

    ONNX Runtime's quantizer gives each matrix one scale; activations are quantized when the graph
    runs (dynamic quantization). The new graph replaces the proven graph in `out`.

    Return `kind`, the graph's `bytes` before and after, and the entries of `cost`. Raise a
    UserError if weights are in a second file, and a ProofFailedError if an output is not finite.
    """
    from onnxruntime import quantization

    graph, small = out / GRAPH, out / f"int8-{GRAPH}"
    if (out / DATA).exists():
        raise UserError(
            f"{saved.name}: the weights exceed 1.8 GB and are in {DATA}, but --quantize needs them "
            "in the graph's file. Export without --quantize"
        )
    before, level = graph.stat().st_size, logging.root.manager.disable
    logging.disable(logging.WARNING)  # hides the quantizer's advice to optimise image models first
    try:
        quantization.quantize_dynamic(graph, small, weight_type=quantization.QuantType.QInt8)
    finally:
        logging.disable(level)
    small.replace(graph)
    sizes = {"before": before, "after": graph.stat().st_size}
    return {"kind": "int8", "bytes": sizes, **cost(saved, rows, program(saved, out))}


def cost(
    saved: SavedModel, rows: Sequence[Sequence[int]],
    run: Callable[[proof.Batch], Mapping[str, np.ndarray]],
) -> dict[str, Any]:  # fmt: skip
    """Measure how far the outputs of a program differ from the outputs of its source.

    Return `differences`, the largest absolute difference of each output; `equal_predictions`, the
    fraction of equal predictions (for text vectors: nearest neighbours), left out for numbers,
    choices and arcs; and `cosine`, the smallest cosine between states or vectors.
    """
    outputs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for some, length in proof.row_batches(rows, 16):
        batch = proof.batch_of(saved, some, length)
        source, found = proof.logits_of(saved, batch), run(batch)
        for name, array in source.items():
            other = np.asarray(found[name], np.float32)
            for first, second, tokens in zip(array, other, batch.segment_ids > 0, strict=True):
                read = tokens if array.ndim > 2 else ...
                if not np.isfinite(second[read]).all():
                    raise proof.ProofFailedError(f"{name} of the quantized graph is not finite")
                outputs[name].append((first[read], second[read]))
    objective = "" if saved.outputs is None else saved.outputs.objective
    several, span = objective == "multi_label", objective == "span"
    gaps, equal, cosines = {}, {}, {}
    for name, pairs in sorted(outputs.items()):
        gaps[name] = max(float(np.abs(a - b).max()) for a, b in pairs)
        if name in ("hidden", "embedding", "pooled"):
            cosines[name] = min(float((unit(a) * unit(b)).sum(-1).min()) for a, b in pairs)
            if name == "embedding":
                ours, theirs = (_nearest(np.stack(side)) for side in zip(*pairs, strict=True))
                equal[name] = float((ours == theirs).mean())
        elif name == "rtd" or (name == "head" and several):
            equal[name] = _share((first > 0, second > 0) for first, second in pairs)
        elif name != "head" or objective not in ("regression", "choice", "arcs"):
            axis = 0 if name == "head" and span else -1
            equal[name] = _share((a.argmax(axis), b.argmax(axis)) for a, b in pairs)
    return {"differences": gaps, "equal_predictions": equal, "cosine": cosines}


def table(found: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return a row per output: its name, largest difference, equal predictions, smallest cosine."""
    equal, cosines = found["equal_predictions"], found["cosine"]
    rows = []
    for name, gap in found["differences"].items():
        share = f"{equal[name]:.1%}" if name in equal else ""
        cosine = f"{cosines[name]:.5f}" if name in cosines else ""
        rows.append((name, f"{gap:.2g}", share, cosine))
    return rows


def said_of(found: Mapping[str, Any]) -> str:
    """Describe, for the model card, how much accuracy quantization costs."""
    head = ("output", "largest difference", "equal predictions", "smallest cosine")
    lines, sizes = markdown_table([head, *table(found)]), found["bytes"]
    return (
        f"Then the matrices were quantized to {found['kind']}. The file shrank from "
        f"{sizes['before']:,} to {sizes['after']:,} bytes. On the same texts, the quantized model "
        f"compares with the source as follows:\n\n{lines}\n\n"
    )


def _share(pairs: Any) -> float:
    return float(np.concatenate([np.ravel(first == second) for first, second in pairs]).mean())


def _nearest(vectors: np.ndarray) -> np.ndarray:
    """Return, for each of the vectors (N, D), the index of the most similar other vector."""
    vectors = unit(vectors)
    similar = vectors @ vectors.T
    np.fill_diagonal(similar, -np.inf)
    return similar.argmax(1)

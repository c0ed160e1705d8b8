"""A model as an ONNX graph with free batch and length, of standard operators only (opset 20).

An encoder is one fixed graph, so it is built here node by node, from our parameters, with names of
inputs and outputs as Hugging Face's tools expect them:

    session = onnxruntime.InferenceSession("DIR/model.onnx")
    session.run(["logits"], {"input_ids": ..., "token_type_ids": ..., "attention_mask": ...})

Building needs the package `onnx`, the proof `onnxruntime` (pip install 'bert_jax[onnx]').
"""

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.errors import UserError
from bert_jax.exchange.huggingface_files import write_description
from bert_jax.exchange.proof import ProofFailedError
from bert_jax.exchange.shapes import compare
from bert_jax.files.staging import write_synced
from bert_jax.model.attention.xla import MASKED_SCORE
from bert_jax.model.config import ModelConfig
from bert_jax.saved.model import SavedModel

GRAPH, DATA = "model.onnx", "model.onnx.data"
OPSET, IR_VERSION = 20, 9
"""The first opset with Gelu, and the file version of its time."""
INPUTS = ("input_ids", "token_type_ids", "attention_mask")
_MAX_INLINE_BYTES = 1_800_000_000
"""A file of ONNX has less than 2 GiB; larger weights lie in a second one."""
_STATES = {"hidden": "last_hidden_state", "pooled": "pooler_output"}


def write(saved: SavedModel, out: Path) -> None:
    """Write `model.onnx`, `config.json` and the tokenizer's files.

    Beyond 1.8 GB the weights are in `model.onnx.data` beside it.

    Args:
        saved: Model to write, float32. Rows are padded on the right: a token's position is its
            place in the row.
        out: Exists; holds none of these.

    Raises:
        UserError: `onnx` or `onnxruntime` is not installed, or the tokenizer cannot be said in
            Hugging Face's format.
        OSError: The files cannot be written.
    """
    onnx = _package("onnx")
    _package("onnxruntime")  # without which the proof could not be made
    write_description(saved, out)
    graph = _Graph(onnx)
    model = graph.model(*_encoder(graph, saved))
    if graph.num_bytes > _MAX_INLINE_BYTES:
        onnx.save_model(model, out / GRAPH, save_as_external_data=True, location=DATA)
    else:
        write_synced(out / GRAPH, model.SerializeToString())
    onnx.checker.check_model(out / GRAPH, full_check=True)


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Run the graph in onnxruntime on the CPU and compare outputs.

    Args:
        saved: The source.
        out: Directory that `write` wrote.
        rows: Rows of token ids, special tokens included.

    Returns:
        `differences` by our names of outputs, `shapes` (B, L) that were run, and `versions`.

    Raises:
        UserError: `onnxruntime` is not installed.
        ProofFailedError: The graph does not load or lacks an output.
    """
    onnx, runtime = _package("onnx"), _package("onnxruntime")
    try:
        session = runtime.InferenceSession(out / GRAPH, providers=["CPUExecutionProvider"])
    except Exception as error:  # of a dozen types of its own
        raise ProofFailedError(f"onnxruntime does not load {GRAPH}: {error}") from error
    names = [output.name for output in session.get_outputs()]

    def run(batch):
        feeds = {name: ids.astype(np.int64) for name, ids in zip(INPUTS, batch, strict=True)}
        try:
            found = session.run(names, feeds)
        except Exception as error:
            raise ProofFailedError(f"onnxruntime cannot run {GRAPH}: {error}") from error
        return _under_our_names(saved, dict(zip(names, found, strict=True)))

    versions = {"onnx": onnx.__version__, "onnxruntime": runtime.__version__, "opset": OPSET}
    return {**compare(saved, rows, run), "versions": versions}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"--to onnx needs the package {name}, which is not installed ({error}): "
            "pip install 'bert_jax[onnx]', or pip install onnx onnxruntime"
        ) from error


class _Graph:
    """Nodes and weights under construction. A value is the name of what a node gives."""

    def __init__(self, onnx: Any) -> None:
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.num_bytes = 0

    def op(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Add a node, whose only output is called `name`."""
        name = name or f"{kind}_{len(self.nodes)}"
        node = self.onnx.helper.make_node(kind, inputs, [name], name=name, **attributes)
        self.nodes.append(node)
        return name

    def weight(self, name: str, value: Any) -> str:
        """Add an array under its name; numbers become float32 or int64."""
        if name not in self.weights:
            kinds: dict[type, Any] = {float: np.float32, int: np.int64, list: np.int64}
            array = np.asarray(value, kinds.get(type(value)), order="C")
            self.weights[name] = self.onnx.numpy_helper.from_array(array, name)
            self.num_bytes += array.nbytes
        return name

    def shape(self, x: str, *sizes: int) -> str:
        """`x` with another shape: 0 keeps a size, -1 is what remains."""
        name = "shape_" + "_".join(map(str, sizes)).replace("-", "m")
        return self.op("Reshape", x, self.weight(name, list(sizes)))

    def affine(self, x: str, path: str, params: Mapping[str, Any], name: str | None = None) -> str:
        """`x @ kernel + bias`, the kernel as one matrix whatever axes the parameter has."""
        bias = np.asarray(params["bias"]).reshape(-1)
        kernel = np.asarray(params["kernel"]).reshape(-1, bias.size)
        product = self.op("MatMul", x, self.weight(f"{path}.kernel", kernel))
        return self.op("Add", product, self.weight(f"{path}.bias", bias), name=name)

    def norm(
        self, x: str, path: str, params: Mapping[str, Any], eps: float, name: str | None = None
    ) -> str:
        """Layer normalisation over the last axis."""
        parts = [self.weight(f"{path}.{part}", params[part]) for part in ("scale", "bias")]
        return self.op("LayerNormalization", x, *parts, axis=-1, epsilon=eps, name=name)

    def activation(self, x: str, kind: str, name: str | None = None) -> str:
        """One of `ModelConfig.activation` or `pooler_activation`."""
        if kind in ("relu", "tanh"):
            return self.op(kind.capitalize(), x, name=name)
        return self.op("Gelu", x, name=name, approximate="tanh" if kind == "gelu_tanh" else "none")

    def model(self, outputs: Mapping[str, Sequence[str | int]], producer: str) -> Any:
        """Return the whole, with the axes of each output."""
        make, kinds = self.onnx.helper, self.onnx.TensorProto
        ids = [make.make_tensor_value_info(n, kinds.INT64, ["batch", "length"]) for n in INPUTS]
        results = [
            make.make_tensor_value_info(name, kinds.FLOAT, shape) for name, shape in outputs.items()
        ]
        weights = list(self.weights.values())
        graph = make.make_graph(self.nodes, "bert", ids, results, initializer=weights)
        return make.make_model(
            graph,
            opset_imports=[make.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="bert_jax",
            doc_string=producer,
        )


def _encoder(graph: _Graph, saved: SavedModel) -> tuple[dict[str, list[str | int]], str]:
    """Add all nodes, and return the outputs with their axes and the kind of model."""
    config, params = saved.config, jax.tree.map(np.asarray, saved.params)
    g, encoder = graph, params["encoder"]
    rows: list[str | int] = ["batch", "length"]
    x, table = _embeddings(g, encoder["embeddings"], config)
    mask = g.op("Cast", "attention_mask", to=graph.onnx.TensorProto.BOOL)
    mask = g.op("Unsqueeze", mask, g.weight("mask_axes", [1, 2]))  # (B, 1, 1, L)
    for n in range(config.num_layers):
        layer = jax.tree.map(lambda array, n=n: array[n], encoder["layers"])
        path = f"encoder.layers.{n}"
        attended = _attention(g, x, mask, path, layer["attention"], config)
        x = g.op("Add", x, attended)
        x = g.norm(x, f"{path}.attention_norm", layer["attention_norm"], config.norm_eps)
        up = g.activation(g.affine(x, f"{path}.mlp.up", layer["mlp"]["up"]), config.activation)
        x = g.op("Add", x, g.affine(up, f"{path}.mlp.down", layer["mlp"]["down"]))
        name = _STATES["hidden"] if n == config.num_layers - 1 else None
        x = g.norm(x, f"{path}.mlp_norm", layer["mlp_norm"], config.norm_eps, name)
    outputs: dict[str, list[str | int]] = {x: [*rows, config.hidden_dim]}
    pooled = ""
    if saved.has_pooler:
        first = g.op("Gather", x, g.weight("first", 0), axis=1)
        dense = g.affine(first, "encoder.pooler.dense", encoder["pooler"]["dense"])
        pooled = g.activation(dense, config.pooler_activation, _STATES["pooled"])
        outputs[pooled] = ["batch", config.hidden_dim]
    names = _names(saved)
    if "mlm" in params:
        mlm = params["mlm"]
        y = g.activation(g.affine(x, "mlm.dense", mlm["dense"]), config.activation)
        y = g.norm(y, "mlm.norm", mlm["norm"], config.norm_eps)
        y = g.op("MatMul", y, g.op("Transpose", table, perm=[1, 0]))
        bias = g.weight("mlm.bias", mlm["bias"][: config.vocab_size])
        outputs[g.op("Add", y, bias, name=names["mlm"])] = [*rows, config.vocab_size]
    if "nsp" in params:
        outputs[g.affine(pooled, "nsp", params["nsp"], names["nsp"])] = ["batch", 2]
    if "rtd" in params:
        y = g.activation(g.affine(x, "rtd.dense", params["rtd"]["dense"]), config.activation)
        outputs[g.affine(y, "rtd.score", params["rtd"]["score"], names["rtd"])] = [*rows, 1]
    if saved.outputs is not None:
        outputs |= _head(g, saved, x, pooled, params["head"])
    return outputs, saved.name


def _embeddings(g: _Graph, params: Mapping[str, Any], config: ModelConfig) -> tuple[str, str]:
    """Return the first states, and the table of token embeddings."""
    table = g.weight("embeddings.token", params["token"][: config.vocab_size])
    length = g.op("Shape", "input_ids", start=1, end=2)
    positions = g.weight("embeddings.position", params["position"])
    positions = g.op("Slice", positions, g.weight("slice_start", [0]), length)
    x = g.op("Add", g.op("Gather", table, "input_ids"), positions)
    types = g.op("Gather", g.weight("embeddings.type", params["type"]), "token_type_ids")
    x = g.op("Add", x, types)
    x = g.norm(x, "embeddings.norm", params["norm"], config.norm_eps)
    if config.projects_embeddings:
        x = g.affine(x, "embeddings.project", params["project"])
    return x, table


def _attention(
    g: _Graph, x: str, mask: str, path: str, params: Mapping[str, Any], config: ModelConfig
) -> str:
    def heads(part: str, *order: int) -> str:
        y = g.affine(x, f"{path}.attention.{part}", params[part])
        y = g.shape(y, 0, 0, config.num_heads, config.head_dim)
        return g.op("Transpose", y, perm=order)

    scale = g.weight("attention_scale", 1 / math.sqrt(config.head_dim))
    scores = g.op("MatMul", heads("query", 0, 2, 1, 3), heads("key", 0, 2, 3, 1))
    scores = g.op("Mul", scores, scale)
    scores = g.op("Where", mask, scores, g.weight("masked_score", MASKED_SCORE))
    weights = g.op("Softmax", scores, axis=-1)
    y = g.op("MatMul", weights, heads("value", 0, 2, 1, 3))
    y = g.shape(g.op("Transpose", y, perm=[0, 2, 1, 3]), 0, 0, config.hidden_dim)
    return g.affine(y, f"{path}.attention.output", params["output"])


def _head(
    g: _Graph, saved: SavedModel, x: str, pooled: str, params: Mapping[str, Any]
) -> dict[str, list[str | int]]:
    assert saved.outputs is not None
    head = saved.outputs.head
    if head.kind == "classification":
        return {g.affine(pooled, "head", params, "logits"): ["batch", head.num_labels]}
    if head.kind == "tagging":
        return {g.affine(x, "head", params, "logits"): ["batch", "length", head.num_labels]}
    both = g.affine(x, "head", params)
    return {
        g.op("Gather", both, g.weight(f"place_{n}", n), axis=2, name=name): [
            "batch",
            "length",
        ]
        for n, name in enumerate(("start_logits", "end_logits"))
    }


def _names(saved: SavedModel) -> dict[str, str]:
    """Map our names of the pretraining heads' outputs to those of Transformers."""
    if {"mlm", "nsp"} <= saved.params.keys():
        return {"mlm": "prediction_logits", "nsp": "seq_relationship_logits"}
    return {"mlm": "logits", "nsp": "logits", "rtd": "logits"}


def _under_our_names(saved: SavedModel, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = dict(_STATES)
    names |= {part: name for part, name in _names(saved).items() if part in saved.params}
    if "start_logits" in found:
        found["span"] = np.stack([found["start_logits"], found["end_logits"]], axis=-1)
    if saved.outputs is not None:
        names["head"] = "span" if saved.outputs.head.kind == "span" else "logits"
    return {ours: found[theirs] for ours, theirs in names.items() if theirs in found}

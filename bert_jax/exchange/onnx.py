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
from bert_jax.exchange.huggingface_files import family_of, write_description
from bert_jax.exchange.proof import ProofFailedError, compare_shapes
from bert_jax.formats.huggingface_names import LOGITS
from bert_jax.formats.modern_tables import MODERN
from bert_jax.model.attention.xla import MASKED_SCORE
from bert_jax.saved.model import SavedModel

GRAPH, DATA = "model.onnx", "model.onnx.data"
OPSET, IR_VERSION = 20, 9
"""The first opset with Gelu, and the file version of its time."""
INPUTS = ("input_ids", "token_type_ids", "attention_mask")
_MAX_INLINE_BYTES = 1_800_000_000
"""A file of ONNX has less than 2 GiB; larger weights lie in a second one."""
_ROWS: list[str | int] = ["batch", "length"]
Outputs = dict[str, list[str | int]]
"""Outputs of a graph with their axes."""


def write(saved: SavedModel, out: Path) -> None:
    """Write `model.onnx`, and what `write_description` writes.

    Rows are padded on the right: a token's position is its place in the row. Beyond 1.8 GB the
    weights are in `model.onnx.data` beside it.

    Raises:
        UserError: `onnx` or `onnxruntime` is not installed, or the tokenizer cannot be said in
            Hugging Face's format, or the model is of a modern family.
    """
    if family_of(saved) in MODERN:
        raise UserError(
            f"{saved.name} is a {MODERN[family_of(saved)].name}; graphs of ONNX are made of BERT's "
            "layers alone. Export with --to stablehlo, or with --to huggingface and convert that "
            "with Optimum"
        )
    onnx = _package("onnx")
    _package("onnxruntime")  # without which the proof could not be made
    write_description(saved, out)
    graph = _Graph(onnx, saved)
    model = graph.model(graph.encoder())
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
    return {**compare_shapes(saved, rows, run), "versions": versions}


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

    def __init__(self, onnx: Any, saved: SavedModel) -> None:
        self.onnx, self.saved, self.config = onnx, saved, saved.config
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

    def norm(self, x: str, path: str, params: Mapping[str, Any], name: str | None = None) -> str:
        """Layer normalisation over the last axis."""
        parts = [self.weight(f"{path}.{part}", params[part]) for part in ("scale", "bias")]
        eps = self.config.norm_eps
        return self.op("LayerNormalization", x, *parts, axis=-1, epsilon=eps, name=name)

    def activation(self, x: str, kind: str, name: str | None = None) -> str:
        """One of `ModelConfig.activation` or `pooler_activation`."""
        if kind in ("relu", "tanh"):
            return self.op(kind.capitalize(), x, name=name)
        if kind == "silu":
            return self.op("Mul", x, self.op("Sigmoid", x), name=name)
        return self.op("Gelu", x, name=name, approximate="tanh" if kind == "gelu_tanh" else "none")

    def model(self, outputs: Outputs) -> Any:
        """Return the whole."""
        make, kinds = self.onnx.helper, self.onnx.TensorProto
        ids = [make.make_tensor_value_info(name, kinds.INT64, _ROWS) for name in INPUTS]
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
            doc_string=self.saved.name,
        )

    def encoder(self) -> Outputs:
        """Add all nodes, and return the outputs."""
        config, params = self.config, jax.tree.map(np.asarray, self.saved.params)
        encoder = params["encoder"]
        x, table = self.embeddings(encoder["embeddings"])
        mask = self.op("Cast", "attention_mask", to=self.onnx.TensorProto.BOOL)
        mask = self.op("Unsqueeze", mask, self.weight("mask_axes", [1, 2]))  # (B, 1, 1, L)
        for n in range(config.num_layers):
            layer = jax.tree.map(lambda array, n=n: array[n], encoder["layers"])
            path, mlp = f"encoder.layers.{n}", layer["mlp"]
            x = self.op("Add", x, self.attention(x, mask, path, layer["attention"]))
            x = self.norm(x, f"{path}.attention_norm", layer["attention_norm"])
            up = self.activation(self.affine(x, f"{path}.mlp.up", mlp["up"]), config.activation)
            x = self.op("Add", x, self.affine(up, f"{path}.mlp.down", mlp["down"]))
            name = "last_hidden_state" if n == config.num_layers - 1 else None
            x = self.norm(x, f"{path}.mlp_norm", layer["mlp_norm"], name)
        outputs: Outputs = {x: [*_ROWS, config.hidden_dim]}
        pooled = ""
        if self.saved.has_pooler:
            first = self.op("Gather", x, self.weight("first", 0), axis=1)
            dense = self.affine(first, "encoder.pooler.dense", encoder["pooler"]["dense"])
            pooled = self.activation(dense, config.pooler_activation, "pooler_output")
            outputs[pooled] = ["batch", config.hidden_dim]
        names = _logits(self.saved)
        if head := params.get("mlm"):
            y = self.activation(self.affine(x, "mlm.dense", head["dense"]), config.activation)
            y = self.norm(y, "mlm.norm", head["norm"])
            y = self.op("MatMul", y, self.op("Transpose", table, perm=[1, 0]))
            bias = self.weight("mlm.bias", head["bias"][: config.vocab_size])
            outputs[self.op("Add", y, bias, name=names["mlm"])] = [*_ROWS, config.vocab_size]
        if head := params.get("nsp"):
            outputs[self.affine(pooled, "nsp", head, names["nsp"])] = ["batch", 2]
        if head := params.get("rtd"):
            y = self.activation(self.affine(x, "rtd.dense", head["dense"]), config.activation)
            outputs[self.affine(y, "rtd.score", head["score"], names["rtd"])] = [*_ROWS, 1]
        if self.saved.outputs is not None:
            outputs |= self.head(x, pooled, params["head"])
        return outputs

    def embeddings(self, params: Mapping[str, Any]) -> tuple[str, str]:
        """Return the first states, and the table of token embeddings."""
        table = self.weight("embeddings.token", params["token"][: self.config.vocab_size])
        length = self.op("Shape", "input_ids", start=1, end=2)
        positions = self.weight("embeddings.position", params["position"])
        positions = self.op("Slice", positions, self.weight("slice_start", [0]), length)
        x = self.op("Add", self.op("Gather", table, "input_ids"), positions)
        types = self.op("Gather", self.weight("embeddings.type", params["type"]), "token_type_ids")
        x = self.op("Add", x, types)
        x = self.norm(x, "embeddings.norm", params["norm"])
        if self.config.projects_embeddings:
            x = self.affine(x, "embeddings.project", params["project"])
        return x, table

    def attention(self, x: str, mask: str, path: str, params: Mapping[str, Any]) -> str:
        """Return what a layer's attention adds to its states."""

        def heads(part: str, *order: int) -> str:
            y = self.affine(x, f"{path}.attention.{part}", params[part])
            y = self.shape(y, 0, 0, self.config.num_heads, self.config.head_dim)
            return self.op("Transpose", y, perm=order)

        scale = self.weight("attention_scale", 1 / math.sqrt(self.config.head_dim))
        scores = self.op("MatMul", heads("query", 0, 2, 1, 3), heads("key", 0, 2, 3, 1))
        scores = self.op("Mul", scores, scale)
        scores = self.op("Where", mask, scores, self.weight("masked_score", MASKED_SCORE))
        weights = self.op("Softmax", scores, axis=-1)
        y = self.op("MatMul", weights, heads("value", 0, 2, 1, 3))
        y = self.shape(self.op("Transpose", y, perm=[0, 2, 1, 3]), 0, 0, self.config.hidden_dim)
        return self.affine(y, f"{path}.attention.output", params["output"])

    def head(self, x: str, pooled: str, params: Mapping[str, Any]) -> Outputs:
        """Add a fine-tuning head, and return its outputs."""
        assert self.saved.outputs is not None
        head = self.saved.outputs.head
        if head.kind == "classification":
            return {self.affine(pooled, "head", params, "logits"): ["batch", head.num_labels]}
        if head.kind == "tagging":
            return {self.affine(x, "head", params, "logits"): [*_ROWS, head.num_labels]}
        both = self.affine(x, "head", params)
        for n, name in enumerate(("start_logits", "end_logits")):
            self.op("Gather", both, self.weight(f"place_{n}", n), axis=2, name=name)
        return {"start_logits": _ROWS, "end_logits": _ROWS}


def _logits(saved: SavedModel) -> dict[str, str]:
    """Map pretraining heads to the names of their outputs."""
    names = {head: name for name, head in LOGITS.items()}
    parts = [part for part in ("mlm", "nsp", "rtd") if part in saved.params]
    return names if names.keys() <= set(parts) else dict.fromkeys(parts, "logits")


def _under_our_names(saved: SavedModel, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {"hidden": "last_hidden_state", "pooled": "pooler_output", **_logits(saved)}
    if saved.outputs is not None:
        names["head"] = "logits"
    if "start_logits" in found:
        found["logits"] = np.stack([found["start_logits"], found["end_logits"]], axis=-1)
    return {ours: found[theirs] for ours, theirs in names.items() if theirs in found}

"""Nodes and weights of the ONNX graph of an encoder and its heads."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.artefacts.formats.huggingface_files import LOGITS
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.model.attention.xla import MASKED_SCORE
from bert_jax.model.rotation import frequencies, sinusoids, thetas
from bert_jax.model.task_heads import RELATION_WIDTH, SLOPE, has_transform

OPSET, IR_VERSION = 20, 9
"""Opset and file format. Opset 20 is the first with Gelu, and ONNX published it with format 9."""
INPUTS = ("input_ids", "token_type_ids", "attention_mask")
_ROWS: list[str | int] = ["batch", "length"]
VECTORS = "sentence_embedding"
"""Name of the output with the text vectors of an embedding model."""
Outputs = dict[str, list[str | int]]
"""Shape of each output, by the output's name; an axis of variable size is a string ("batch")."""


class Graph:
    """Builder of an ONNX graph. Its methods take and return the names of node outputs."""

    def __init__(self, onnx: Any, saved: SavedModel) -> None:
        self.onnx, self.saved, self.config = onnx, saved, saved.config
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.num_bytes = 0

    def op(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Add a node with one output; return its name, by default `kind` and the node's index."""
        name = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def weight(self, name: str, value: Any) -> str:
        """Add a weight if its name is new; Python floats become float32, and integers int64."""
        if name not in self.weights:
            kinds: dict[type, Any] = {float: np.float32, int: np.int64, list: np.int64}
            array = np.asarray(value, kinds.get(type(value)), order="C")
            self.weights[name] = self.onnx.numpy_helper.from_array(array, name)
            self.num_bytes += array.nbytes
        return name

    def shape(self, x: str, *sizes: int) -> str:
        """Reshape `x`. Size 0 keeps the size of an axis, and -1 is inferred."""
        name = "shape_" + "_".join(map(str, sizes)).replace("-", "m")
        return self.op("Reshape", x, self.weight(name, list(sizes)))

    def affine(
        self, x: str, path: str, params: Mapping[str, Any], name: str | None = None, *,
        num_inputs: int = 1,
    ) -> str:  # fmt: skip
        """Compute `x @ kernel` plus any bias; `num_inputs` counts the kernel's input axes."""
        kernel = np.asarray(params["kernel"])
        matrix = kernel.reshape(math.prod(kernel.shape[:num_inputs]), -1)
        inputs = x, self.weight(f"{path}.kernel", matrix)
        if "bias" not in params:
            return self.op("MatMul", *inputs, name=name)
        bias = self.weight(f"{path}.bias", np.asarray(params["bias"]).reshape(-1))
        return self.op("Add", self.op("MatMul", *inputs), bias, name=name)

    def norm(self, x: str, path: str, params: Mapping[str, Any], name: str | None = None) -> str:
        """Apply layer or RMS normalisation over the last axis."""
        names = [part for part in ("scale", "bias") if part in params]
        parts = [self.weight(f"{path}.{part}", params[part]) for part in names]
        eps = self.config.norm_eps
        if self.config.norm == "layer":
            return self.op("LayerNormalization", x, *parts, axis=-1, epsilon=eps, name=name)
        mean = self.op("ReduceMean", self.op("Mul", x, x), self.weight("last_axis", [-1]))
        root = self.op("Sqrt", self.op("Add", mean, self.weight("norm_eps", eps)))
        return self.op("Mul", self.op("Div", x, root), *parts, name=name)

    def activation(self, x: str, kind: str, name: str | None = None) -> str:
        """Apply an activation; `kind` is its name in `ModelConfig`."""
        if kind in ("", "relu", "tanh"):
            return self.op(kind.capitalize() or "Identity", x, name=name)
        if kind == "silu":
            return self.op("Mul", x, self.op("Sigmoid", x), name=name)
        return self.op("Gelu", x, name=name, approximate="tanh" if kind == "gelu_tanh" else "none")

    def model(self, outputs: Outputs) -> Any:
        """Build the ONNX model from all nodes and weights."""
        make, kinds = self.onnx.helper, self.onnx.TensorProto
        names = [name for name in INPUTS if name != "token_type_ids" or self.config.num_types > 1]
        info = make.make_tensor_value_info
        ids = [info(name, kinds.INT64, _ROWS) for name in names]
        results = [info(name, kinds.FLOAT, shape) for name, shape in outputs.items()]
        weights = list(self.weights.values())
        graph = make.make_graph(self.nodes, "bert", ids, results, initializer=weights)
        formats = {"opset_imports": [make.make_opsetid("", OPSET)], "ir_version": IR_VERSION}
        return make.make_model(graph, producer_name="bert_jax", **formats)

    def outputs(self) -> Outputs:
        """Add all nodes of the encoder and its heads; return the outputs."""
        config, params = self.config, jax.tree.map(np.asarray, self.saved.params)
        encoder = params["encoder"]
        x, table = self.embeddings(encoder["embeddings"])
        masks, rotations = self.masks(), self.rotations()
        last, states = config.num_layers - 1, "last_hidden_state"
        for n in range(config.num_layers):
            layer = jax.tree.map(lambda array, n=n: array[n], encoder["layers"])
            path, mlp, kind = f"encoder.layers.{n}", layer["mlp"], config.layer_kind(n)
            attends, feeds = (f"{path}.{part}_norm" for part in ("attention", "mlp"))
            rotation = rotations.get(kind.letter)
            if config.norm_order == "post":
                y = self.attention(x, masks[kind.letter], rotation, path, layer["attention"])
                x = self.norm(self.op("Add", x, y), attends, layer["attention_norm"])
                y = self.op("Add", x, self.mlp(x, f"{path}.mlp", mlp))
                x = self.norm(y, feeds, layer["mlp_norm"], states if n == last else None)
            else:
                y = x if kind.first else self.norm(x, attends, layer["attention_norm"])
                y = self.attention(y, masks[kind.letter], rotation, path, layer["attention"])
                x = self.op("Add", x, y)
                y = self.mlp(self.norm(x, feeds, layer["mlp_norm"]), f"{path}.mlp", mlp)
                x = self.op("Add", x, y)
        if config.norm_order == "pre":
            x = self.norm(x, "encoder.final_norm", encoder["final_norm"], states)
        outputs: Outputs = {x: [*_ROWS, config.hidden_dim]}
        pooled = ""
        if self.saved.has_pooler:
            first = self.op("Gather", x, self.weight("first", 0), axis=1)
            dense = self.affine(first, "encoder.pooler.dense", encoder["pooler"]["dense"])
            pooled = self.activation(dense, config.pooler_activation, "pooler_output")
            outputs[pooled] = ["batch", config.hidden_dim]
        names = output_names(self.saved)
        if "mlm" in params:
            outputs |= self.masked_lm(x, table, params["mlm"], names["mlm"])
        if head := params.get("nsp"):
            outputs[self.affine(pooled, "nsp", head, names["nsp"])] = ["batch", 2]
        if head := params.get("rtd"):
            y = self.activation(self.affine(x, "rtd.dense", head["dense"]), config.activation)
            outputs[self.affine(y, "rtd.score", head["score"], names["rtd"])] = [*_ROWS, 1]
        if self.saved.outputs is not None:
            outputs |= self.head(x, pooled, params)
        if self.saved.embedding is not None:
            outputs[self.embedding(x, params)] = ["batch", self.saved.vector_width()]
        return outputs

    def embeddings(self, params: Mapping[str, Any]) -> tuple[str, str]:
        """Return the embedded tokens (B, L, D) and the table of token embeddings."""
        table = self.weight("embeddings.token", params["token"][: self.config.vocab_size])
        x, config = self.op("Gather", table, "input_ids"), self.config
        if config.scale_embeddings:
            x = self.op("Mul", x, self.weight("scale", math.sqrt(config.embedding_width)))
        if config.positions != "rope":
            length = self.op("Shape", "input_ids", start=1, end=2)
            found = params.get("position")
            if found is None:
                found = sinusoids(jnp.arange(config.num_positions), config.embedding_width)
            positions = self.weight("embeddings.position", np.asarray(found))
            positions = self.op("Slice", positions, self.weight("slice_start", [0]), length)
            x = self.op("Add", x, positions)
        if "type" in params:
            types = self.weight("embeddings.type", params["type"])
            types = self.op("Gather", types, "token_type_ids") if config.num_types > 1 else types
            x = self.op("Add", x, types)
        if "norm" in params:
            x = self.norm(x, "embeddings.norm", params["norm"])
        if config.projects_embeddings:
            x = self.affine(x, "embeddings.project", params["project"])
        return x, table

    def places(self) -> str:
        """Return the token positions 0 to L - 1, as float32 (L,)."""
        if "places" not in {node.name for node in self.nodes}:
            length = self.op("Shape", "input_ids", start=1, end=2)
            length = self.op("Squeeze", length, self.weight("axis_0", [0]))
            ids = self.op("Range", self.weight("zero", 0), length, self.weight("one", 1))
            self.op("Cast", ids, to=self.onnx.TensorProto.FLOAT, name="places")
        return "places"

    def masks(self) -> dict[str, str]:
        """Return masks for global layers, "G" (B, 1, 1, L), and local layers, "L" (B, 1, L, L)."""
        mask = self.op("Cast", "attention_mask", to=self.onnx.TensorProto.BOOL)
        masks = {"G": self.op("Unsqueeze", mask, self.weight("mask_axes", [1, 2]))}
        if "L" in self.config.attention_pattern:
            queries = self.op("Unsqueeze", self.places(), self.weight("axis_1", [1]))
            distance = self.op("Abs", self.op("Sub", queries, self.places()))
            window = self.weight("window", float(self.config.local_window))
            masks["L"] = self.op("And", masks["G"], self.op("LessOrEqual", distance, window))
        return masks

    def rotations(self) -> dict[str, tuple[str, str]]:
        """Return rotary cosines and sines (length, 1, K) of global ("G") and local ("L") layers.

        The angles of the first K/2 dimensions are negated, so that `rotate` needs only additions.
        """
        if self.config.positions != "rope":
            return {}
        places = self.op("Unsqueeze", self.places(), self.weight("rotation_axes", [1, 2]))
        found = {}
        for letter, theta in thetas(self.config).items():
            turns = frequencies(theta, self.config.head_dim)
            both = self.weight(f"frequencies.{letter}", np.concatenate((-turns, turns)))
            angles = self.op("Mul", places, both)
            found[letter] = (self.op("Cos", angles), self.op("Sin", angles))
        return found

    def rotate(self, x: str, cos: str, sin: str) -> str:
        """Rotate the pairs of dimensions (i, i + K/2) in every head of `x` (B, L, H, K)."""
        halves = np.arange(self.config.head_dim).reshape(2, -1)[::-1].reshape(-1)
        others = self.op("Gather", x, self.weight("halves_swapped", halves), axis=3)
        return self.op("Add", self.op("Mul", x, cos), self.op("Mul", others, sin))

    def attention(
        self, x: str, mask: str, rotation: tuple[str, str] | None, path: str,
        params: Mapping[str, Any],
    ) -> str:  # fmt: skip
        """Return the output of a layer's attention, before the residual sum."""
        config = self.config
        kv_heads = config.num_kv_heads or config.num_heads

        def heads(part: str, *order: int) -> str:
            number = config.num_heads if part == "query" else kv_heads
            y = self.affine(x, f"{path}.attention.{part}", params[part])
            y = self.shape(y, 0, 0, number, config.head_dim)
            if rotation is not None and part != "value":
                y = self.rotate(y, *rotation)
            if number < config.num_heads:  # each key and value head serves several query heads
                served = np.repeat(np.arange(number), config.num_heads // number)
                y = self.op("Gather", y, self.weight("served", served), axis=2)
            return self.op("Transpose", y, perm=order)

        scale = self.weight("attention_scale", 1 / math.sqrt(config.head_dim))
        scores = self.op("MatMul", heads("query", 0, 2, 1, 3), heads("key", 0, 2, 3, 1))
        scores = self.op("Mul", scores, scale)
        scores = self.op("Where", mask, scores, self.weight("masked_score", MASKED_SCORE))
        y = self.op("MatMul", self.op("Softmax", scores, axis=-1), heads("value", 0, 2, 1, 3))
        y = self.shape(self.op("Transpose", y, perm=[0, 2, 1, 3]), 0, 0, config.hidden_dim)
        return self.affine(y, f"{path}.attention.output", params["output"], num_inputs=2)

    def mlp(self, x: str, path: str, params: Mapping[str, Any]) -> str:
        """Return the output of a layer's feed-forward network, before the residual sum."""
        kind = self.config.activation
        up = self.affine(x, f"{path}.up", params["up"])
        if "gate" in params:
            gate = self.activation(self.affine(x, f"{path}.gate", params["gate"]), kind)
            return self.affine(self.op("Mul", gate, up), f"{path}.down", params["down"])
        return self.affine(self.activation(up, kind), f"{path}.down", params["down"])

    def transform(self, x: str, path: str, params: Mapping[str, Any]) -> str:
        """Apply the layer before a head: a linear map, an activation and, if present, a norm."""
        kind = self.config.head_activation or self.config.activation
        x = self.activation(self.affine(x, f"{path}.dense", params["dense"]), kind)
        return self.norm(x, f"{path}.norm", params["norm"]) if "norm" in params else x

    def masked_lm(self, x: str, table: str, params: Mapping[str, Any], name: str) -> Outputs:
        """Add the masked-LM head; return its output."""
        size = self.config.vocab_size
        if "dense" in params:
            x = self.transform(x, "mlm", params)
        if "decoder" in params:
            table = self.weight("mlm.decoder", params["decoder"][:size])
        inputs = x, self.op("Transpose", table, perm=[1, 0])
        if "bias" not in params:
            return {self.op("MatMul", *inputs, name=name): [*_ROWS, size]}
        bias = self.weight("mlm.bias", params["bias"][:size])
        return {self.op("Add", self.op("MatMul", *inputs), bias, name=name): [*_ROWS, size]}

    def mean(self, x: str, name: str | None = None, *, root: bool = False) -> str:
        """Return the mean (B, D) of n tokens' states (B, L, D); if `root`, their sum / sqrt(n)."""
        counted = self.op("Cast", "attention_mask", to=self.onnx.TensorProto.FLOAT)
        number = self.op("ReduceSum", counted, self.weight("axis_1", [1]))
        number = self.op("Max", number, self.weight("at_least_one", 1.0))
        number = self.op("Sqrt", number) if root else number
        return self.op("Div", self.weighted(x, counted), number, name=name)

    def embedding(self, x: str, params: Mapping[str, Any]) -> str:
        """Add the output `sentence_embedding`: text vectors (B, D), pooled from the states `x`."""
        embedding = self.saved.embedding
        assert embedding is not None
        if embedding.pooling in ("mean", "mean_sqrt_len"):
            vectors = self.mean(x, root=embedding.pooling != "mean")
        elif embedding.pooling in ("max", "splade"):
            x = output_names(self.saved)["mlm"] if embedding.is_sparse else x
            mask = self.op("Cast", "attention_mask", to=self.onnx.TensorProto.BOOL)
            mask = self.op("Unsqueeze", mask, self.weight("axis_2", [2]))
            states = self.op("Where", mask, x, self.weight("masked_score", MASKED_SCORE))
            vectors = self.op("ReduceMax", states, self.weight("axis_1", [1]), keepdims=0)
            if embedding.is_sparse:
                more = self.op("Add", self.op("Relu", vectors), self.weight("one_float", 1.0))
                vectors = self.op("Log", more)
        elif embedding.pooling == "cls":
            vectors = self.op("Gather", x, self.weight("first", 0), axis=1)
        else:
            vectors = self.weighted(x, self.token_weights(x, params))
        for name, map in sorted(params.get("pooling", {}).get("maps", {}).items()):
            vectors = self.affine(vectors, f"pooling.{name}", map)
            vectors = self.activation(vectors, name.partition("_")[2])
        if not embedding.normalize:
            return self.op("Identity", vectors, name=VECTORS)
        last = self.weight("last_axis", [-1])
        squares = self.op("ReduceSum", self.op("Mul", vectors, vectors), last)
        squares = self.op("Max", squares, self.weight("least_square", 1e-24))
        return self.op("Div", vectors, self.op("Sqrt", squares), name=VECTORS)

    def token_weights(self, x: str, params: Mapping[str, Any]) -> str:
        """Return pooling weights (B, L): learned, or 1 for the last token and 0 for all others."""
        assert self.saved.embedding is not None
        axis = self.weight("axis_1", [1])
        if self.saved.embedding.pooling == "last":
            number = self.op("ReduceSum", "attention_mask", axis)
            last = self.op("Sub", number, self.weight("one", 1))
            last = self.op("Cast", last, to=self.onnx.TensorProto.FLOAT)
            found = self.op("Equal", self.places(), last)
            return self.op("Cast", found, to=self.onnx.TensorProto.FLOAT)
        score = self.weight("pooling.score", params["pooling"]["score"].reshape(-1, 1))
        scores = self.op("Squeeze", self.op("MatMul", x, score), self.weight("axis_2", [2]))
        mask = self.op("Cast", "attention_mask", to=self.onnx.TensorProto.BOOL)
        scores = self.op("Where", mask, scores, self.weight("masked_score", MASKED_SCORE))
        return self.op("Softmax", scores, axis=-1)

    def weighted(self, x: str, weights: str) -> str:
        """Return the weighted sums (B, D) of states (B, L, D) over tokens; `weights` is (B, L)."""
        weights = self.op("Unsqueeze", weights, self.weight("axis_2", [2]))
        products = self.op("Mul", x, weights)
        return self.op("ReduceSum", products, self.weight("axis_1", [1]), keepdims=0)

    def head(self, x: str, pooled: str, params: Mapping[str, Any]) -> Outputs:
        """Add a fine-tuning head; return its outputs."""
        assert self.saved.outputs is not None
        head, late = self.saved.outputs.head, False
        if head.kind == "classification":
            late = not self.config.pooler and head.pooling == "late"
            if self.config.pooler:
                x = pooled
            elif head.pooling == "mean":
                x = self.mean(x)
            elif not late:
                x = self.op("Gather", x, self.weight("first", 0), axis=1)
        if has_transform(self.config, head):
            x = self.transform(x, "transform", params["transform"])
        if head.kind == "parsing":
            return {self.biaffine(x, params["head"]): [*_ROWS, "length", 1 + head.num_labels]}
        split = late or head.kind == "span"
        logits = self.affine(x, "head", params["head"], None if split else "logits")
        if late:
            logits = self.mean(logits, "logits")
        if head.kind == "span":
            for n, name in enumerate(("start_logits", "end_logits")):
                self.op("Gather", logits, self.weight(f"place_{n}", n), axis=2, name=name)
            return {"start_logits": _ROWS, "end_logits": _ROWS}
        rows = ["batch"] if head.kind == "classification" else _ROWS
        return {logits: [*rows, head.num_labels]}

    def biaffine(self, x: str, params: Mapping[str, Any]) -> str:
        """Add the scores (B, L, L, C) of `BiaffineHead` for states (B, L, D)."""

        def vectors(part: str) -> str:
            return self.op("LeakyRelu", self.affine(x, part, params[part]), alpha=SLOPE)

        def compared(words: str, part: str) -> str:
            return self.op("MatMul", words, self.op("Transpose", vectors(part), perm=[0, 2, 1]))

        arcs = self.affine(vectors("arc_word"), "arc", params["arc"])
        arcs = self.op("Unsqueeze", compared(arcs, "arc_head"), self.weight("last_axis", [-1]))
        word = vectors("relation_word")
        own = self.affine(word, "relation_of_word", params["relation_of_word"])
        number = params["relation_of_word"]["kernel"].shape[-1]
        mapped = self.affine(word, "relation", params["relation"])
        length = self.op("Shape", "input_ids", start=1, end=2)
        sizes = [self.weight(f"size_{n}", [n]) for n in (0, -1, RELATION_WIDTH, number)]
        mapped = self.op("Reshape", mapped, self.op("Concat", sizes[0], *sizes[1:3], axis=0))
        found = compared(mapped, "relation_head")
        shape = self.op("Concat", sizes[0], length, sizes[3], length, axis=0)
        found = self.op("Transpose", self.op("Reshape", found, shape), perm=[0, 1, 3, 2])
        found = self.op("Add", found, self.op("Unsqueeze", own, self.weight("axis_2", [2])))
        return self.op("Concat", arcs, found, axis=-1, name="logits")


def output_names(saved: SavedModel) -> dict[str, str]:
    """Return the graph's names of the outputs that `logits_of` can compute."""
    heads = {head: name for name, head in LOGITS.items()}
    parts = [part for part in ("mlm", "nsp", "rtd", "head") if part in saved.params]
    names = {"hidden": "last_hidden_state", "pooled": "pooler_output", "embedding": VECTORS}
    return names | (heads if heads.keys() <= {*parts} else dict.fromkeys(parts, "logits"))

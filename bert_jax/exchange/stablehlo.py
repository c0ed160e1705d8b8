"""A model as one StableHLO program for CPU, CUDA and TPU, beside its weights.

A program that runs it needs jax, flatbuffers and safetensors, and not this package
(examples/run_stablehlo.py):

    model = jax.export.deserialize(bytearray(Path("DIR/model.stablehlo").read_bytes()))
    weights = safetensors.numpy.load_file("DIR/model.safetensors")
    outputs = jax.jit(model.call)(weights, tokens, type_ids, segment_ids)

The directory is what `--to huggingface` writes, and the program takes the tensors of its file of
weights by their names there. As constants inside the program they would be folded again by every
compilation: docs/artefacts.md has the figures.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax import export

from bert_jax.exchange.huggingface_files import family_of, task_of, write_huggingface
from bert_jax.exchange.proof import Batch, outputs_of
from bert_jax.exchange.shapes import compare
from bert_jax.files.staging import write_synced
from bert_jax.formats.families import bert_names
from bert_jax.formats.huggingface_files import WEIGHTS
from bert_jax.formats.huggingface_names import (
    DETECTION,
    TABLE,
    TASK_TABLES,
    Entry,
    canonical_names,
    in_model,
)
from bert_jax.model.heads import LinearHead, Params, ReplacedHead, param_shapes
from bert_jax.saved.model import SavedModel

PROGRAM = "model.stablehlo"
PLATFORMS = ("cpu", "cuda", "tpu")


def write(saved: SavedModel, out: Path) -> None:
    """Write `model.stablehlo`, and what `write_huggingface` writes.

    Args:
        saved: Model to write. The program computes in float32 at full precision on any platform.
        out: Exists; holds none of these.

    Raises:
        UserError: The tokenizer cannot be said in Hugging Face's format.
        OSError: The files cannot be written.
    """
    write_huggingface(saved, out)
    weights = safetensors.numpy.load_file(out / WEIGHTS)
    write_synced(out / PROGRAM, bytes(exported(saved, weights).serialize()))


def exported(saved: SavedModel, weights: Mapping[str, Any]) -> export.Exported:
    """Return the program: weights, tokens, type_ids and segment_ids to a dict of outputs.

    Args:
        saved: The model.
        weights: With the names, shapes and types of the file of weights; values are not read.
    """
    # Layers one after another: a loop over them would copy their weights together at every call.
    config = dataclasses.replace(
        saved.config,
        dtype="float32",
        attention_impl="xla",
        scan_unroll=saved.config.num_layers,
        remat="none",
    )
    head = None if saved.outputs is None else saved.outputs.head
    parts = tuple(part for part in ("mlm", "nsp", "rtd") if part in saved.params)
    shapes = param_shapes(config)
    if head is not None:
        shapes["head"] = param_shapes(config, LinearHead, head.num_labels)
    entries = {entry.name: entry for entry in TABLE}
    if "rtd" in parts:
        shapes["rtd"] = param_shapes(config, ReplacedHead)
        entries |= {entry.name: entry for entry in DETECTION}
    if head is not None:
        entries |= {entry.name: entry for entry in TASK_TABLES[head.kind]}

    kind = family_of(saved)
    names = canonical_names({name: name for name in weights})
    if kind != "bert":
        names = bert_names(kind, task_of(saved), weights)
    # Their classes for tags and spans have no pooler, whatever the source has.
    pooler = saved.has_pooler and any("pooler" in name for name in names)

    def run(weights, tokens, type_ids, segment_ids):
        found = {name: weights[theirs] for name, theirs in names.items()}
        params = _params(found, in_model(entries.values(), config), shapes)
        batch = Batch(tokens, type_ids, segment_ids)
        # On TPU and on newer GPUs a product of float32 is of fewer bits unless this is asked for.
        with jax.default_matmul_precision("highest"):
            return outputs_of(config, head, parts, pooler, params, batch)

    batch, length = export.symbolic_shape(
        "batch, length",
        constraints=["batch >= 1", "length >= 1", f"length <= {config.num_positions}"],
    )
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    abstract = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in weights.items()}
    return export.export(jax.jit(run), platforms=PLATFORMS)(abstract, ids, ids, ids)


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Run the program from its file, with the weights from theirs, and compare outputs.

    Args:
        saved: The source.
        out: Directory that `write` wrote.
        rows: Rows of token ids, special tokens included.

    Returns:
        `differences` by output, `shapes` (B, L) that were run, `platforms` the program is for, and
        `versions`.

    Raises:
        ProofFailedError: An output is missing or of another shape.
    """
    program = export.deserialize(bytearray((out / PROGRAM).read_bytes()))
    weights = safetensors.numpy.load_file(out / WEIGHTS)
    call = jax.jit(program.call)

    def run(batch):
        return {name: np.asarray(array) for name, array in call(weights, *batch).items()}

    return {
        **compare(saved, rows, run, optional=frozenset({"pooled"})),
        "platforms": list(program.platforms),
        "versions": {
            "jax": jax.__version__,
            "calling_convention": program.calling_convention_version,
        },
    }


def _params(found: Mapping[str, Any], entries: Sequence[Entry], shapes: Params) -> Params:
    """Our tree from their tensors while both are traced; what they lack is 0, and reaches nothing.

    Layers are stacked here and taken apart by the encoder, which the compiler resolves: no copy.
    """
    params: Params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    for entry in entries:
        *parents, last = entry.path
        node = params
        for key in parents:
            node = node[key]
        ours = node[last].shape
        if "{n}" in entry.name:
            layers = [found[entry.name.format(n=n)] for n in range(ours[0])]
            node[last] = jnp.stack([_ours(entry, layer, ours[1:]) for layer in layers])
        elif entry.name in found:
            node[last] = _ours(entry, found[entry.name], ours)
    return params


def _ours(entry: Entry, theirs: Any, shape: tuple[int, ...]) -> jax.Array:
    if entry.kind == "vocab":
        return jnp.pad(theirs, [(0, shape[0] - theirs.shape[0])] + [(0, 0)] * (theirs.ndim - 1))
    return jnp.reshape(theirs.T if entry.kind == "kernel" else theirs, shape)

"""Export as one StableHLO program for CPU, CUDA and TPU, with the weights in their own file.

Running the program needs jax, flatbuffers and safetensors, but not this package
(examples/run_stablehlo.py):

    model = jax.export.deserialize(bytearray(Path("DIR/model.stablehlo").read_bytes()))
    weights = safetensors.numpy.load_file("DIR/model.safetensors")
    outputs = jax.jit(model.call)(weights, tokens, type_ids, segment_ids)

The directory also has the files of `--to huggingface`. The program takes the tensors in the weights
file by name; a model that no class of Transformers computes has our names. The weights are not
constants in the program, because every compilation would fold them again: docs/artefacts.md has the
figures.
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

from bert_jax.artefacts.exchange.huggingface_files import (
    card_fields,
    entries_of,
    has_class,
    prefix_left_out,
    write_weights,
)
from bert_jax.artefacts.exchange.proof import Batch, compare_shapes, outputs_of
from bert_jax.artefacts.formats.entries import Entry, insert, lookup, taken_apart, tensors, unnamed
from bert_jax.artefacts.formats.huggingface_files import WEIGHTS
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import Params

PROGRAM = "model.stablehlo"
PLATFORMS = ("cpu", "cuda", "tpu")


def write(saved: SavedModel, out: Path) -> None:
    """Write `model.stablehlo` and the files of `write_weights`.

    The program computes in float32 at full precision on any platform.
    """
    weights = write_weights(saved, out)
    (out / PROGRAM).write_bytes(exported(saved, weights).serialize())


def exported(saved: SavedModel, weights: Mapping[str, Any]) -> export.Exported:
    """Return the program, from weights, tokens, type_ids and segment_ids to a dict of outputs.

    Only the names, shapes and types of `weights` are read.
    """
    # Unrolled layers: a loop would stack (copy) their weights at every call.
    config = dataclasses.replace(
        saved.config,
        dtype="float32",
        attention_impl="xla",
        scan_unroll=saved.config.num_layers,
        remat="none",
    )
    head = None if saved.outputs is None else saved.outputs.head
    classed = has_class(saved)
    entries = entries_of(saved) if classed else []
    entries = [e for e in entries if saved.has_pooler or "pooler" not in e.path]
    prefix = prefix_left_out(saved) if classed else ""
    names = {f"{prefix}{name}": name for name in weights}

    def run(weights, tokens, type_ids, segment_ids):
        found = {name: weights[theirs] for name, theirs in names.items()}
        params = _params(found, entries, saved.params, config) if classed else unnamed(weights)
        params |= {part: {} for part, tree in saved.params.items() if not tree}
        if "pooling" in saved.params:  # constants: only one number per dimension of the states
            params["pooling"] = saved.params["pooling"]
        batch = Batch(tokens, type_ids, segment_ids)
        # Without this, TPUs and newer GPUs multiply float32 at lower precision.
        with jax.default_matmul_precision("highest"):
            return outputs_of(config, head, params, batch, saved.embedding)

    batch, length = export.symbolic_shape(
        "batch, length",
        constraints=["batch >= 1", "length >= 1", f"length <= {config.num_positions}"],
    )
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    abstract = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in weights.items()}
    return export.export(jax.jit(run), platforms=PLATFORMS)(abstract, ids, ids, ids)


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Run the written program on the written weights, and compare outputs.

    Returns:
        The entries of `compare_shapes`, the `platforms` of the program, and `versions`.
    """
    program = export.deserialize(bytearray((out / PROGRAM).read_bytes()))
    weights = safetensors.numpy.load_file(out / WEIGHTS)
    call = jax.jit(program.call)

    def run(batch):
        return {name: np.asarray(array) for name, array in call(weights, *batch).items()}

    versions = {
        "jax": jax.__version__,
        "calling_convention": program.calling_convention_version,
    }
    compared = compare_shapes(saved, rows, run, optional={"pooled"})
    return {**compared, "platforms": list(program.platforms), "versions": versions}


_LOADING = """\
With jax, flatbuffers, safetensors and tokenizers, `DIR` being this directory:

```python
import jax.export
import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("DIR/tokenizer.json")
tokenizer.enable_truncation({max_length})
tokenizer.enable_padding(pad_id={pad}, pad_token={pad_token!r})
rows = tokenizer.encode_batch(["{prefix}A text.", "{prefix}Another text."])
parts = [(row.ids, row.type_ids, row.attention_mask) for row in rows]
tokens, type_ids, segment_ids = np.array(parts, np.int32).swapaxes(0, 1)
with open("DIR/model.stablehlo", "rb") as file:
    model = jax.export.deserialize(bytearray(file.read()))
weights = safetensors.numpy.load_file("DIR/model.safetensors")
outputs = jax.jit(model.call)(weights, tokens, type_ids, segment_ids)
for name, array in outputs.items():
    print(name, array.shape)
```"""


def loading(saved: SavedModel) -> str:
    """Describe how to run the program, for the model card."""
    return _LOADING.format(**card_fields(saved))


def _params(
    found: Mapping[str, Any], entries: Sequence[Entry], ours: Params, config: ModelConfig
) -> Params:
    """Build our traced tree from their traced tensors; only the shapes of `ours` are read.

    Layers are stacked here and unstacked by the encoder; the compiler removes both, so nothing is
    copied. Token types that a class lacks are 0.
    """
    params: Params = {}
    for tensor in tensors(entries, ours, config):
        shapes = [np.shape(lookup(ours, entry.path)) for entry in tensor.entries]
        single = [shape[int(tensor.per_layer) :] for shape in shapes]
        layers: list[list[jax.Array]] = []
        for n in tensor.layers:
            name = tensor.name.format(n=n)
            if name not in found:
                layers.append([jnp.zeros(shape, jnp.float32) for shape in single])
                continue
            pieces = taken_apart(tensor.entries, found[name], single)
            layers.append(list(map(_as_ours, tensor.entries, pieces, single)))
        for entry, shape, *arrays in zip(tensor.entries, single, *layers, strict=True):
            # If the first layer has no norm, nothing reads its row.
            unread = [jnp.ones(shape, jnp.float32)] * tensor.layers.start
            stacked = jnp.stack([*unread, *arrays]) if tensor.per_layer else arrays[0]
            insert(params, entry.path, stacked)
    return params


def _as_ours(entry: Entry, theirs: Any, shape: tuple[int, ...]) -> jax.Array:
    if entry.kind == "vocab":
        return jnp.pad(theirs, [(0, shape[0] - theirs.shape[0])] + [(0, 0)] * (theirs.ndim - 1))
    return jnp.reshape(theirs.T if entry.kind == "kernel" else theirs, shape)

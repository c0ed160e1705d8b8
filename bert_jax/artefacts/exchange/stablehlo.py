"""Export as a StableHLO program for CPU, CUDA and TPU, with the weights in a separate file.

The program needs jax, flatbuffers and safetensors, not this package (examples/run_stablehlo.py).
A translation model has a program for each search (greedy.stablehlo and beam.stablehlo):

    search = jax.export.deserialize(bytearray(Path("DIR/beam.stablehlo").read_bytes()))
    tokens, lengths, scores = jax.jit(search.call)(weights, ids, mask, limits)

A search has a fixed number of rows and fixed lengths, which `programs.json` lists. `ids` and `mask`
have the shape (rows, source length); `mask` is 1 at tokens and 0 at padding. `limits` (rows,) has
the largest number of tokens in each translation.

The directory also has the tokenizer's files and `config.json`, or the files that replace it (see
`write_description`). The weights are named as in Transformers. In translation models and
in encoders that no class computes, the names are our own, joined by slashes. The weights are inputs
of the program because constants would make every compilation slow; docs/artefacts.md has figures.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax.traverse_util import unflatten_dict
from jax import export

from bert_jax.artefacts.exchange import exported_files as files
from bert_jax.artefacts.exchange import proof
from bert_jax.artefacts.exchange.searches import SEARCHES, compare_searches
from bert_jax.artefacts.formats import entries as tables
from bert_jax.artefacts.formats.huggingface_files import WEIGHTS
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import Params
from bert_jax.model.seq2seq.network import Side
from bert_jax.model.seq2seq.search import SearchConfig, search

PROGRAM = "model.stablehlo"
PROGRAMS = "programs.json"
PLATFORMS = ("cpu", "cuda", "tpu")
MAX_LENGTH = 128
"""Largest number of tokens in a source and in a translation, even if the model allows more."""


def write(saved: SavedModel, out: Path, rows: int = 8) -> None:
    """Write the files of `write_weights`, then `model.stablehlo` or a program for each search.

    Programs compute in float32 at full precision on any platform. A search takes `rows` rows.
    """
    weights = files.write_weights(saved, out)
    if saved.network is None:
        (out / PROGRAM).write_bytes(exported(saved, weights).serialize())
        return
    length = min(saved.max_length, MAX_LENGTH)
    sizes, programs = {"rows": rows, "source_length": length, "target_length": length}, {}
    for name, settings in SEARCHES.items():
        file, beams = f"{name}.stablehlo", settings.num_beams
        (out / file).write_bytes(exported_search(saved, settings, rows, length).serialize())
        programs[file] = {**sizes, "num_beams": beams, "length_alpha": settings.length_alpha}
    files.write_json(out / PROGRAMS, programs)


def exported(saved: SavedModel, weights: Mapping[str, Any]) -> export.Exported:
    """Return a program that maps weights, tokens, type_ids and segment_ids to a dict of outputs.

    Only the names, shapes and types of `weights` are read.
    """
    config = proof.exact_config(saved.config)
    classed = files.has_class(saved)
    entries = files.entries_of(saved) if classed else []
    entries = [e for e in entries if saved.has_pooler or "pooler" not in e.path]
    prefix = files.prefix_left_out(saved) if classed else ""
    names = {f"{prefix}{name}": name for name in weights}

    def run(weights, tokens, type_ids, segment_ids):
        found = {name: weights[theirs] for name, theirs in names.items()}
        params = unflatten_dict(weights, sep="/")
        if classed:
            params = _params(found, entries, saved.params, config)
        params |= {part: {} for part, tree in saved.params.items() if not tree}
        if "pooling" in saved.params:  # small enough for constants
            params["pooling"] = saved.params["pooling"]
        batch = proof.Batch(tokens, type_ids, segment_ids)
        # Without this, TPUs and newer GPUs multiply float32 at lower precision.
        with jax.default_matmul_precision("highest"):
            return proof.outputs_of(config, saved.head, params, batch, saved.embedding)

    batch, length = export.symbolic_shape(
        "batch, length",
        constraints=["batch >= 1", "length >= 1", f"length <= {config.num_positions}"],
    )
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return _exported(run, weights, ids, ids, ids)


def _exported(
    run: Any, weights: Mapping[str, Any], *inputs: jax.ShapeDtypeStruct
) -> export.Exported:
    abstract = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in weights.items()}
    return export.export(jax.jit(run), platforms=PLATFORMS)(abstract, *inputs)


def exported_search(
    saved: SavedModel, settings: SearchConfig, rows: int, length: int
) -> export.Exported:
    """Return a program that maps weights, ids, mask and limits to tokens, lengths and scores."""
    network, special = proof.exact(saved.network), saved.tokenizer.special_ids

    def run(weights, ids, mask, limits):
        params = unflatten_dict(weights, sep="/")
        with jax.default_matmul_precision("highest"):  # as in `exported`
            found = search(
                network, params, Side(ids, mask), limits, settings=settings,
                max_length=length, begin=special.cls, end=special.sep,
            )  # fmt: skip
        return found.tokens[:, 0], found.lengths[:, 0], found.scores[:, 0]

    source = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    limits = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return _exported(run, tables.named(saved.params), source, source, limits)


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Run the written programs on the written weights, and compare outputs or translations.

    Return `platforms` and `versions` of the programs, and the entries of `compare_shapes`. For
    translation, `differences` is empty; `translations` has the result of `compare_searches`. Raise
    a ProofFailedError if an output's shape or a translation differs, or a score is not finite.
    """
    weights = safetensors.numpy.load_file(out / WEIGHTS)
    if saved.network is None:
        program = export.deserialize(bytearray((out / PROGRAM).read_bytes()))
        call = jax.jit(program.call)

        def run(batch):
            return {name: np.asarray(array) for name, array in call(weights, *batch).items()}

        compared = proof.compare_shapes(saved, rows, run, optional={"pooled"})
    else:
        compared = {"differences": {}, "translations": {}}
        for name, settings in SEARCHES.items():
            program = export.deserialize(bytearray((out / f"{name}.stablehlo").read_bytes()))
            size, length = program.in_avals[-2].shape
            translate = partial(_translate, jax.jit(program.call), weights, length)
            some = [row for row in rows if len(row) <= length]
            found = compare_searches(saved, some, translate, {name: settings}, size)
            compared["translations"] |= found
    versions = {"jax": jax.__version__, "calling_convention": program.calling_convention_version}
    return {**compared, "platforms": list(program.platforms), "versions": versions}


def _translate(
    call: Any, weights: Any, length: int, source: proof.Batch, settings: SearchConfig, steps: int
) -> list[list[int]]:
    del settings  # the program has fixed settings
    ids, mask = (
        np.pad(array, ((0, 0), (0, length - array.shape[1])))
        for array in (source.tokens, source.segment_ids)
    )
    limits = np.full(len(ids), steps, np.int32)
    tokens, lengths, scores = map(np.asarray, call(weights, ids, mask, limits))
    if not np.isfinite(scores).all():
        raise proof.ProofFailedError(f"a search gives scores that are not finite: {scores}")
    return [row[:count].tolist() for row, count in zip(tokens, lengths, strict=True)]


_LOADING = """\
With jax, flatbuffers, safetensors and tokenizers, where `DIR` is this directory:

```python
import jax.export
import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer

{rows}
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
    """Describe how to run the program, for the model card; "" for a translation model."""
    return _LOADING.format(rows=files.code_of_rows(saved)) if saved.network is None else ""


def _params(
    found: Mapping[str, Any], entries: Sequence[tables.Entry], ours: Params, config: ModelConfig
) -> Params:
    """Build parameters in our layout from `found`, the traced tensors of a class.

    Only shapes are read from `ours`. Layers are stacked here and unstacked by the encoder; the
    compiler removes both steps. If the class has no token types, their embeddings are zeros.
    """
    params: Params = {}
    for tensor in tables.tensors(entries, ours, config):
        shapes = [np.shape(tables.lookup(ours, entry.path)) for entry in tensor.entries]
        single = [shape[int(tensor.per_layer) :] for shape in shapes]
        layers: list[list[jax.Array]] = []
        for n in tensor.layers:
            name = tensor.name.format(n=n)
            if name not in found:
                layers.append([jnp.zeros(shape, jnp.float32) for shape in single])
                continue
            pieces = tables.taken_apart(tensor.entries, found[name], single)
            layers.append(list(map(_as_ours, tensor.entries, pieces, single)))
        for entry, shape, *arrays in zip(tensor.entries, single, *layers, strict=True):
            # If only the first layer lacks this tensor, its row is filled with ones and never read.
            unread = [jnp.ones(shape, jnp.float32)] * tensor.layers.start
            stacked = jnp.stack([*unread, *arrays]) if tensor.per_layer else arrays[0]
            tables.insert(params, entry.path, stacked)
    return params


def _as_ours(entry: tables.Entry, theirs: Any, shape: tuple[int, ...]) -> jax.Array:
    if entry.kind == "vocab":
        return jnp.pad(theirs, [(0, shape[0] - theirs.shape[0])] + [(0, 0)] * (theirs.ndim - 1))
    return jnp.reshape(theirs.T if entry.kind == "kernel" else theirs, shape)

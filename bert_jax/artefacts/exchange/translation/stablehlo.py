"""Export of a translation model's whole search as StableHLO programs, with separate weights.

From token ids to token ids; running a program needs jax, flatbuffers and safetensors:

    search = jax.export.deserialize(bytearray(Path("DIR/beam.stablehlo").read_bytes()))
    weights = safetensors.numpy.load_file("DIR/model.safetensors")
    tokens, lengths, scores = jax.jit(search.call)(weights, ids, mask, limits)

A program has a fixed number of rows and fixed lengths. `mask` (rows, source length) is 0 at
padding; `limits` (rows,) has the largest number of tokens in each translation. The weights have our
names, joined by slashes.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax import export

from bert_jax.artefacts.exchange.huggingface_files import write_json
from bert_jax.artefacts.exchange.proof import Batch, ProofFailedError
from bert_jax.artefacts.exchange.searches import SEARCHES, compare_searches, exact
from bert_jax.artefacts.exchange.stablehlo import PLATFORMS
from bert_jax.artefacts.exchange.translation.files import network_of, write_description
from bert_jax.artefacts.formats.entries import named, unnamed
from bert_jax.artefacts.formats.huggingface_files import WEIGHTS
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.model.seq2seq.network import Side
from bert_jax.model.seq2seq.search import SearchConfig, search

PROGRAMS = "programs.json"
MAX_LENGTH = 128
"""Largest length of a source and of a translation, even if the model allows more."""


class Shape(NamedTuple):
    """Fixed sizes of a program."""

    rows: int
    source_length: int
    target_length: int


def write(saved: SavedModel, out: Path, rows: int = 8) -> None:
    """Write one program for each of `SEARCHES`, `programs.json`, weights and the description.

    Programs compute in float32 at full precision on any platform.
    """
    write_description(saved, out)
    weights = named(saved.params)
    (out / WEIGHTS).write_bytes(safetensors.numpy.save(weights))
    length = min(saved.max_length, MAX_LENGTH)
    shape = Shape(rows, length, length)
    for name, settings in SEARCHES.items():
        (out / f"{name}.stablehlo").write_bytes(exported(saved, settings, shape).serialize())
    programs = {
        f"{name}.stablehlo": {**shape._asdict(), "num_beams": settings.num_beams,
                              "length_alpha": settings.length_alpha}
        for name, settings in SEARCHES.items()
    }  # fmt: skip
    write_json(out / PROGRAMS, programs)


def exported(saved: SavedModel, settings: SearchConfig, shape: Shape) -> export.Exported:
    """Return a search program, from weights, ids, mask and limits to tokens, lengths and scores."""
    network, special = exact(network_of(saved)), saved.tokenizer.special_ids

    def run(weights, ids, mask, limits):
        params = unnamed(weights)
        # Without this, TPUs and newer GPUs multiply float32 at lower precision.
        with jax.default_matmul_precision("highest"):
            found = search(
                network, params, Side(ids, mask), limits, settings=settings,
                max_length=shape.target_length, begin=special.cls, end=special.sep,
            )  # fmt: skip
        return found.tokens[:, 0], found.lengths[:, 0], found.scores[:, 0]

    source = jax.ShapeDtypeStruct((shape.rows, shape.source_length), jnp.int32)
    limits = jax.ShapeDtypeStruct((shape.rows,), jnp.int32)
    abstract = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in named(saved.params).items()}
    return export.export(jax.jit(run), platforms=PLATFORMS)(abstract, source, source, limits)


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Run each written program on the written weights, and compare translations.

    Returns:
        `differences` (empty); `translations`, the numbers of equal ones by program; the `platforms`
        of the programs; and `versions`.

    Raises:
        ProofFailedError: A translation differs from the source's.
    """
    weights = safetensors.numpy.load_file(out / WEIGHTS)
    found: dict[str, Any] = {}
    for name, settings in SEARCHES.items():
        program = export.deserialize(bytearray((out / f"{name}.stablehlo").read_bytes()))
        size, length = program.in_avals[-2].shape
        translate = partial(_translate, jax.jit(program.call), weights, length)
        some = [row for row in rows if len(row) <= length]
        found[name] = compare_searches(saved, some, translate, {name: settings}, size=size)[name]
    versions = {
        "jax": jax.__version__,
        "calling_convention": program.calling_convention_version,
    }
    return {
        "differences": {}, "translations": found, "platforms": list(program.platforms),
        "versions": versions,
    }  # fmt: skip


def _translate(
    call: Any, weights: Any, length: int, source: Batch, settings: SearchConfig, steps: int
) -> list[list[int]]:
    del settings  # the program has fixed settings
    ids, mask = (
        np.pad(array, ((0, 0), (0, length - array.shape[1])))
        for array in (source.tokens, source.segment_ids)
    )
    limits = np.full(len(ids), steps, np.int32)
    tokens, lengths, scores = map(np.asarray, call(weights, ids, mask, limits))
    if not np.isfinite(scores).all():
        raise ProofFailedError(f"a program gives the scores {scores}")
    return [row[:count].tolist() for row, count in zip(tokens, lengths, strict=True)]

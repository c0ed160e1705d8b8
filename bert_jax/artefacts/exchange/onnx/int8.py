"""8-bit weights for an ONNX graph, by ONNX Runtime's own quantizer, and the cost in accuracy."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.exchange.onnx.runtime import DATA, GRAPH, program
from bert_jax.artefacts.exchange.proof import (
    Batch,
    ProofFailedError,
    batch_of,
    logits_of,
    row_batches,
)
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError


def quantize(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Replace float32 matrices with int8 matrices, and compare outputs with the source.

    Each matrix has one scale; activations are quantized at run time (dynamic quantization).

    Args:
        saved: The source.
        out: Directory with a proven graph, which this function replaces.
        rows: Rows of token ids, special tokens included.

    Returns:
        `kind`, `bytes` before and after, and the entries of `cost`.

    Raises:
        UserError: The weights of the graph are in a second file.
        ProofFailedError: An output is not finite.
    """
    from onnxruntime import quantization

    graph, small = out / GRAPH, out / f"int8-{GRAPH}"
    if (out / DATA).exists():
        raise UserError(
            f"{saved.name}: the weights are beyond 1.8 GB and lie in {DATA}; --quantize takes "
            "models whose weights are in one file with their graph"
        )
    before = graph.stat().st_size
    before_level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # hides its advice to optimise image models first
    try:
        quantization.quantize_dynamic(graph, small, weight_type=quantization.QuantType.QInt8)
    finally:
        logging.disable(before_level)
    small.replace(graph)
    sizes = {"before": before, "after": graph.stat().st_size}
    return {"kind": "int8", "bytes": sizes, **cost(saved, rows, program(saved, out))}


def cost(
    saved: SavedModel,
    rows: Sequence[Sequence[int]],
    run: Callable[[Batch], Mapping[str, np.ndarray]],
) -> dict[str, Any]:
    """Measure how far a program differs from its source, without a tolerance.

    Returns:
        `differences`: the largest per output. `equal_predictions`: the share of equal classes,
        tags, tokens or positions, and of vectors with the same nearest neighbour. `cosine`: the
        smallest cosine between vectors and between states.

    Raises:
        ProofFailedError: An output is not finite.
    """
    ours: dict[str, list[np.ndarray]] = {}
    theirs: dict[str, list[np.ndarray]] = {}
    for some, length in row_batches(rows, 16):
        batch = batch_of(saved, some, length)
        source, found = logits_of(saved, batch), run(batch)
        real = batch.segment_ids > 0
        for name, array in source.items():
            other = np.asarray(found[name], np.float32)
            if not np.isfinite(other[real] if array.ndim > 2 else other).all():
                raise ProofFailedError(f"{name} of the quantized graph is not finite")
            for side, values in ((ours, array), (theirs, other)):
                side.setdefault(name, []).extend(
                    row[mask] if array.ndim > 2 else row
                    for row, mask in zip(values, real, strict=True)
                )
    several = saved.outputs is not None and saved.outputs.objective == "multi_label"
    scores = saved.outputs is not None and saved.outputs.objective == "regression"
    span = saved.outputs is not None and saved.outputs.head.kind == "span"
    equal, cosines = {}, {}
    for name in sorted(ours):
        pairs = list(zip(ours[name], theirs[name], strict=True))
        if name in ("hidden", "embedding", "pooled"):
            cosines[name] = min(_cosine(first, second) for first, second in pairs)
            if name == "embedding":
                nearest = [_nearest(np.stack(side[name])) for side in (ours, theirs)]
                equal[name] = float((nearest[0] == nearest[1]).mean())
        elif name == "rtd" or (name == "head" and several):
            equal[name] = _share((first > 0, second > 0) for first, second in pairs)
        elif not (name == "head" and scores):
            axis = 0 if name == "head" and span else -1
            equal[name] = _share((a.argmax(axis), b.argmax(axis)) for a, b in pairs)
    gaps = {
        name: max(float(np.abs(a - b).max()) for a, b in zip(ours[name], theirs[name], strict=True))
        for name in sorted(ours)
    }
    return {"differences": gaps, "equal_predictions": equal, "cosine": cosines}


def table(found: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return one row per output: name, largest difference, equal predictions, lowest cosine."""
    equal, cosines = found["equal_predictions"], found["cosine"]
    return [
        (
            name,
            f"{gap:.2g}",
            f"{equal[name]:.1%}" if name in equal else "",
            f"{cosines[name]:.5f}" if name in cosines else "",
        )
        for name, gap in found["differences"].items()
    ]


def said_of(found: Mapping[str, Any]) -> str:
    """Describe the cost of 8 bits, for the model card."""
    head = ("output", "largest difference", "equal predictions", "least cosine")
    lines = "\n".join(f"| {' | '.join(row)} |" for row in [head, ("---",) * 4, *table(found)])
    sizes = found["bytes"]
    return (
        f"Then the matrices were quantized to {found['kind']}: {sizes['before']:,} bytes became "
        f"{sizes['after']:,}. On the same texts, against the source:\n\n{lines}\n\n"
    )


def _share(pairs: Any) -> float:
    equal = [np.ravel(first == second) for first, second in pairs]
    return float(np.concatenate(equal).mean())


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    norms = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    return float(((first * second).sum(-1) / np.maximum(norms, 1e-12)).min())


def _nearest(vectors: np.ndarray) -> np.ndarray:
    """Return the index of the most similar other vector for each vector."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    similar = unit @ unit.T
    np.fill_diagonal(similar, -np.inf)
    return similar.argmax(1)

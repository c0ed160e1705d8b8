"""Vectors of many texts for comparison by cosine, and the digest of the model that makes them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
from jaxtyping import Float

from bert_jax.artefacts.saved.model import SavedModel, digest_of
from bert_jax.infer.embed import Embedder, Kind
from bert_jax.infer.predictor import Cuts, Given

_PART = 1024
"""Texts between two signs of progress."""


def text_vectors(
    model: SavedModel, texts: Sequence[str], kind: Kind, *, dimensions: int | None = None,
    normalize: bool = True, cuts: Cuts | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> Float[np.ndarray, "N D"]:  # fmt: skip
    """Compute the vectors of texts in float32, of length 1.

    Args:
        model: A model on a device.
        texts: Texts without prefixes.
        kind: Prefix of the model that is put before each text.
        dimensions: Numbers of each vector that are kept; None: all.
        normalize: False leaves the vectors as they are, to be cut later.
        cuts: Counts the texts that are cut.
        advance: Takes the number of texts after each part of them.

    Raises:
        UserError: The model makes no vectors, or they are not finite.
    """
    embedder = Embedder(model, kind=kind, dimensions=dimensions, normalize=normalize)
    found = [np.zeros((0, embedder.width), np.float32)]
    for begin in range(0, len(texts), _PART):
        part = texts[begin : begin + _PART]
        examples = [
            embedder.example({"text": text}, Given("text", number))
            for number, text in enumerate(part, begin + 1)
        ]
        prepared = embedder.prepare(examples)
        if cuts is not None:
            cuts.add(prepared)
        found.append(np.stack(embedder.predict(prepared)))
        advance(len(part))
    return np.concatenate(found)


def model_digest(model: SavedModel) -> str:
    """Compute the SHA-256 of what determines vectors: weights, tokenizer, pooling, prefixes."""
    own = None if model.embedding is None else asdict(model.embedding)
    told = f"{model.tokenizer.fingerprint} {own} {model.max_length}"
    parts = {name: model.params[name] for name in ("encoder", "pooling") if name in model.params}
    return digest_of(parts, told)

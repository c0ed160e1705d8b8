"""Vectors of texts, pooled as in the training of the model or as options say."""

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jaxtyping import Float
from typing_extensions import override

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError
from bert_jax.infer import forward
from bert_jax.infer.classify import RowPredictor
from bert_jax.infer.predictor import Cuts, Prepared
from bert_jax.model.embedding import PLAIN, Pooling, static_vectors
from bert_jax.model.heads import MASKED_LM
from bert_jax.tasks.examples import Origin, TextExample
from bert_jax.tasks.retrieval.metrics import unit
from bert_jax.tasks.rows import Batch

Kind = Literal["query", "document"]


def parse_layers(text: str) -> tuple[int, ...] | slice:
    """Read layers from `-1`, `1,6,12`, or a range such as `-4:-1`, which includes both ends.

    Raise a UserError if the text has another form.
    """
    if ends := re.fullmatch(r"\s*(-?\d+)?:(-?\d+)?\s*", text):
        return slice(*(None if end is None else int(end) for end in ends.groups()))
    if re.fullmatch(r"\s*-?\d+(\s*,\s*-?\d+)*\s*", text):
        return tuple(int(part) for part in text.split(","))
    raise UserError(
        f"the layers are {text!r:.60}; give one layer (-1), several (1,6,12), or the first and the "
        "last of a range (-4:-1)"
    )


@dataclass(eq=False)
class Embedder(RowPredictor):
    """Predictor of text vectors. The options are described in `LoadedModel.embed`."""

    kind: Kind | None = None
    dimensions: int | None = None
    pooling: Pooling | None = None
    layers: int | Sequence[int] | slice = -1
    special_tokens: bool = True
    normalize: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.require("embed", "encoder of texts")
        own = self.model.embedding or PLAIN
        prefixes = {"query": own.query_prefix, "document": own.document_prefix}
        self._prefix = "" if self.kind is None else prefixes[self.kind]
        if self.normalize is None:
            self.normalize = own.normalize
        self.pooling = self.pooling or own.pooling
        entries = {*self.model.params, *self.model.params.get("pooling", ())}
        for pooling, entry, what in (
            ("weighted", "score", "learned token weights"),
            ("splade", MASKED_LM, "masked-LM head"),
        ):
            if self.pooling == pooling and entry not in entries:
                raise UserError(f"{self.model.name} has no {what}; pool by mean")
        self._sparse = self.pooling == "splade"
        self._static = self._sparse and own.static_queries and self.kind == "query"
        width = self.model.vector_width(self.pooling)
        if self.dimensions is not None and (self._sparse or not 1 <= self.dimensions <= width):
            right = "not be given for sparse vectors" if self._sparse else f"be from 1 to {width}"
            raise UserError(f"dimensions is {self.dimensions}; it must {right}")
        self._layers = _numbered(self.layers, self.model)
        if self.pooling == "pooler":
            if not self.model.has_pooler:
                raise UserError(f"{self.model.name}: this model has no pooler; pool by mean or cls")
            if self._layers != (self.model.config.num_layers,):
                raise UserError("the pooler reads only the last layer; leave layers at -1")

    @property
    @override
    def width(self) -> int:
        return self.dimensions or self.model.vector_width(self.pooling)

    @override
    def example(self, fields: Mapping[str, Any], origin: Origin) -> TextExample:
        found = super().example(fields, origin)
        return dataclasses.replace(found, text=self._prefix + found.text)

    @override
    def forward(self, batch: Batch) -> Array:
        assert self.pooling is not None  # `__post_init__` checks it
        if self._static:
            there = batch["segment_ids"] > 0
            return jax.jit(static_vectors)(self.model.params, batch["tokens"], there)
        return forward.pooled(self.model, batch, self.pooling, self._layers, self.special_tokens)

    @override
    def answers(self, prepared: Prepared[TextExample], outputs: Sequence[Any]) -> list[np.ndarray]:
        vectors = np.stack(outputs)[:, : self.dimensions]
        return list(unit(vectors) if self.normalize else vectors)

    @override
    def fields(self, answer: np.ndarray) -> dict[str, Any]:
        if not self._sparse:
            return super().fields(answer)
        tokenizer = self.model.tokenizer
        answer = answer[: tokenizer.vocab_size]  # the embedding table may have more rows
        ids = np.argsort(-answer, kind="stable")[: np.count_nonzero(answer)].tolist()
        return {"embedding": {tokenizer.id_to_token(id): float(str(answer[id])) for id in ids}}

    @override
    def lines(self, example: TextExample, answer: np.ndarray) -> list[str]:
        if self._sparse:
            weights = self.fields(answer)["embedding"]
            first = ", ".join(f"{token} {weight:.2f}" for token, weight in [*weights.items()][:8])
            return [f"{first} ({len(weights)} tokens)"]
        first = " ".join(f"{value:.4f}" for value in answer[:6])
        more = f" ... ({len(answer)} numbers)" if len(answer) > 6 else ""
        return [f"{first}{more}"]


def text_vectors(
    model: SavedModel, texts: Sequence[str], kind: Kind, *, dimensions: int | None = None,
    normalize: bool = True, cuts: Cuts | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> Float[np.ndarray, "N D"]:  # fmt: skip
    """Compute float32 vectors of texts; options as in `LoadedModel.embed` and `Predictor.parts`.

    Sparse vectors are never normalised.
    """
    normalize = normalize and not (model.embedding or PLAIN).is_sparse
    embedder = Embedder(model, kind=kind, dimensions=dimensions, normalize=normalize)
    parts = embedder.parts({"text": texts}, cuts=cuts, advance=advance)
    found = [np.stack(embedder.predict(part)) for part in parts]
    return np.concatenate([np.zeros((0, embedder.width), np.float32), *found])


def _numbered(layers: int | Sequence[int] | slice, model: SavedModel) -> tuple[int, ...]:
    """Return the indices of the chosen layers, counted from 0, ascending, without repeats."""
    last = model.config.num_layers

    def number(given: Any) -> int:
        try:
            layer = operator.index(given)
        except TypeError:
            raise UserError(
                f"layers is {layers!r:.60}; give a layer (-1), several ((1, 6, 12)), or the first "
                "and the last of a range (slice(-4, -1))"
            ) from None
        if not -last - 1 <= layer <= last:
            raise UserError(
                f"there is no layer {layer}: this model has layers 0 (the embeddings) to {last}, "
                f"or -1 (the last) to {-last - 1}"
            )
        return layer if layer >= 0 else last + 1 + layer

    if isinstance(layers, slice):
        first = 0 if layers.start is None else number(layers.start)
        end = last if layers.stop is None else number(layers.stop)
        if layers.step is not None:
            raise UserError(f"layers is {layers}; a slice of layers cannot have a step")
        if first > end:
            raise UserError(f"layers {layers.start}:{layers.stop} end before they begin; swap them")
        return tuple(range(first, end + 1))
    several = layers if isinstance(layers, Iterable) else [layers]
    if not (chosen := {number(layer) for layer in several}):
        raise UserError("layers is empty; name a layer, such as -1 for the last")
    return tuple(sorted(chosen))

"""Training of embedding models, so that texts that belong together get similar vectors.

An example is a group of rows: a query with its document and hard negatives, a pair with a score, a
text with a class, or the same text twice with different dropout (SimCSE). The loss compares each
example with all other examples of the batch, on all devices.

Sources: van den Oord et al. 2018 (InfoNCE); Henderson et al. 2017, section 4.4 (in-batch
negatives); Gao, Yao and Chen 2021 (SimCSE); Su 2022 (CoSENT, kexue.fm/archives/8847); Khosla et al.
2020, equation 2 (classes); Kusupati et al. 2022, equation 1 (Matryoshka); Formal et al. 2021
(SPLADE v2), section 3; Paria et al. 2020, section 3 (FLOPS).
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer
from typing_extensions import override

from bert_jax.config.bounds import Bounded, NonNegative, Positive, Rate
from bert_jax.errors import UserError
from bert_jax.model.embedding import (
    EmbeddingConfig,
    EmbeddingModel,
    TokenPooling,
    pool_tokens,
    static_vectors,
    unit,
)
from bert_jax.model.flops import TRAIN_OVER_FORWARD, encoder_flops, vocabulary_flops
from bert_jax.model.heads import Build, encode
from bert_jax.model.layout import OnMesh
from bert_jax.objectives.losses import list_losses, ratio
from bert_jax.objectives.objective import Adapted, Batch, CoupledObjective, Metric, Scalars
from bert_jax.tasks.retrieval.metrics import ListLoss

Comparison = Literal["ranking", "scores", "classes", ListLoss]
"""Kind of loss: find documents, order pairs, group texts by class, or score like a teacher."""

_HIDDEN = -1e30
"""Logit of a text that is not a candidate. The logit makes the text's probability 0."""


@dataclass(frozen=True)
class ContrastConfig(Bounded, section="embedding"):
    """Settings of text vectors and of the loss that trains them."""

    pooling: TokenPooling = "mean"
    """Vector of a text. `mean` is the mean of the token states, `mean_sqrt_len` their sum over the
    square root of their number, `max` their maxima, `cls` the first token's state, `last` the last
    token's state, and `weighted` a mean with learned weights. `splade` makes sparse vectors: a
    weight for each token of the vocabulary, from the masked-LM head of init."""
    normalize: bool = True
    """Whether the model returns vectors of length 1. The loss compares dense vectors by cosine.
    Sparse vectors are never normalised, and are compared by their dot product."""
    temperature: Positive | None = None
    """Temperature by which the loss divides cosines or products. None: 0.05 for cosines, else 1.
    If a teacher's scores are cosines (task.scores), set 1."""
    symmetric: bool = False
    """Whether half of the loss is for finding a document's query (task.rows: pairs or texts)."""
    dimensions: tuple[int, ...] = ()
    """Descending widths, such as 128,64, at which training also computes the loss (Matryoshka)."""
    dimension_weights: tuple[Positive, ...] = ()
    """Weight of the loss of each width in `dimensions`; empty means 1, as for the full width."""
    queries: Literal["encoder", "ones", "idf"] = "encoder"
    """Vector of a query (splade). `encoder` computes it like a document's vector. Without running
    the encoder, `ones` gives each of the query's tokens the weight 1, and `idf` gives each token
    its inverse document frequency in the training documents."""
    query_flops: NonNegative = 5e-5
    """Weight of the FLOPS loss of queries (splade). A higher weight leaves fewer tokens."""
    document_flops: NonNegative = 3e-5
    """Weight of the FLOPS loss of documents (splade)."""
    flops_warmup: Rate = 0.33
    """Share of the steps in which both FLOPS weights rise from 0, as a parabola (splade)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = self.dimension_weights
        if weights and len(weights) != len(self.dimensions):
            raise UserError(
                f"embedding.dimension_weights is {weights} for the dimensions {self.dimensions}; "
                "expected one weight for each dimension, or none"
            )
        sparse = self.of_model().is_sparse  # refuses dimensions that do not descend
        if self.dimensions if sparse else self.queries != "encoder":
            raise UserError(
                f"embedding.pooling is {self.pooling!r}, embedding.queries {self.queries!r} and "
                f"embedding.dimensions {self.dimensions}; splade has no dimensions, and the others "
                "have no queries without an encoder. Leave one out"
            )

    def of_model(self, query_prefix: str = "", document_prefix: str = "") -> EmbeddingConfig:
        """Return the settings that are saved with the trained model."""
        return EmbeddingConfig(
            self.pooling, self.normalize and self.pooling != "splade", query_prefix,
            document_prefix, self.dimensions, self.queries != "encoder",
        )  # fmt: skip


class Compared(NamedTuple):
    """Inputs of the loss, with one group of texts per example."""

    vectors: Float[Array, "B G D"]
    """Vectors of the texts of each group: query, document and hard negatives, or one text. Dense
    vectors have length 1."""
    row_index: Integer[Array, " B"]
    """Index of each group in the stream of examples. The index identifies the group."""
    weights: Float[Array, " B"]
    """Weights of the groups. Groups that only fill the batch have the weight 0."""
    text_ids: Integer[Array, "B G"]
    """Identifiers of the texts. Equal texts have equal identifiers."""
    present: Bool[Array, "B G"]
    """Mask that is true for each text and false for unused positions of a group."""
    labels: Array | None = None
    """Scores or classes (B,), a teacher's scores (B, G - 1) of the documents, or None."""

    def leading(self, size: int) -> "Compared":
        """Cut vectors to the first `size` values and scale them to length 1; 0 changes nothing."""
        return self._replace(vectors=unit(self.vectors[..., :size])) if size else self


def ranking_losses(
    own: Compared, every: Compared, temperature: float, symmetric: bool = False
) -> Float[Array, " b"]:
    """Compute, for each query in `own`, the cross entropy of its document among all candidates.

    This is InfoNCE. Candidates are the documents and hard negatives of all groups, except other
    texts that equal the query or its document, and other documents of equal queries. With
    `symmetric`, this loss is averaged with the loss of finding the document's query among all
    queries, except other queries that equal the query or its document or have the same document.
    """
    same_group = own.row_index[:, None] == every.row_index  # (b, B)
    real = every.weights > 0
    target = same_group & real
    ids = own.text_ids[:, :, None]  # (b, G, 1)
    query, document = every.text_ids[:, 0], every.text_ids[:, 1]
    same_query, same_document = query == ids[:, 0], document == ids[:, 1]

    candidates = every.text_ids[None, :, 1:]
    repeated = (candidates == ids[:, :1]) | (candidates == ids[:, 1:2])  # (b, B, G - 1)
    repeated = repeated.at[..., 0].set(repeated[..., 0] | same_query)
    counts = every.present[:, 1:] & real[:, None] & ~repeated
    counts = counts.at[..., 0].set(counts[..., 0] | target)
    cosines = jnp.einsum("iD,jcD->ijc", own.vectors[:, 0], every.vectors[:, 1:])
    logits = jnp.where(counts, cosines / temperature, _HIDDEN)
    right = jnp.sum(jnp.where(target, logits[..., 0], 0.0), axis=1)
    losses = jax.nn.logsumexp(logits, axis=(1, 2)) - right
    if not symmetric:
        return losses
    repeated = same_query | (query == ids[:, 1]) | same_document
    cosines = jnp.einsum("iD,jD->ij", own.vectors[:, 1], every.vectors[:, 0])
    logits = jnp.where((real & ~repeated) | target, cosines / temperature, _HIDDEN)
    right = jnp.sum(jnp.where(target, logits, 0.0), axis=1)
    return (losses + jax.nn.logsumexp(logits, axis=1) - right) / 2


def score_losses(own: Compared, every: Compared, temperature: float) -> Float[Array, " b"]:
    """Compute CoSENT: log(1 + sum of e^(cosine of a pair - cosine of a higher-scored pair)).

    Cosines are divided by `temperature`. Every group gets the loss of the whole batch.
    """
    assert every.labels is not None
    cosines = jnp.sum(every.vectors[:, 0] * every.vectors[:, 1], axis=-1) / temperature
    real = every.weights > 0
    wrong = (every.labels[:, None] < every.labels) & real[:, None] & real
    differences = jnp.where(wrong, cosines[:, None] - cosines, _HIDDEN)
    whole = jax.nn.logsumexp(jnp.append(differences.ravel(), 0.0))
    return jnp.broadcast_to(whole, own.weights.shape)


def class_losses(own: Compared, every: Compared, temperature: float) -> Float[Array, " b"]:
    """Compute, for each text, the mean cross entropy of its class's texts among all other texts.

    A text that is the only text of its class in the batch has the loss 0 and is not counted.
    """
    assert own.labels is not None
    assert every.labels is not None
    others = _others(own, every)
    alike = others & (own.labels[:, None] == every.labels)
    cosines = jnp.einsum("iD,jD->ij", own.vectors[:, 0], every.vectors[:, 0])
    logits = jnp.where(others, cosines / temperature, _HIDDEN)
    whole = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    total = jnp.sum(jnp.where(alike, whole - logits, 0.0), axis=1)
    return total / jnp.maximum(jnp.sum(alike, axis=1), 1)


def _others(own: Compared, every: Compared) -> Bool[Array, "b B"]:
    """Return a mask of the texts to compare with each text: unequal texts of other groups."""
    differs = own.text_ids[:, :1] != every.text_ids[:, 0]
    return differs & (own.row_index[:, None] != every.row_index) & (every.weights > 0)


@dataclass(frozen=True)
class EmbeddingObjective(Adapted, CoupledObjective):
    """Training of text vectors. Batches are `tasks.rows.Batch`; outputs are float32 (B, G, D).

    Dense outputs have length 1, so their products are the cosines that the loss compares.
    """

    config: EmbeddingConfig
    """Settings of the model's vectors, such as the pooling."""
    comparison: Comparison = "ranking"
    group: int = 2
    """Number of rows in an example."""
    contrast: ContrastConfig = field(default_factory=ContrastConfig)
    """Temperature, symmetry and weights of the loss."""
    query_length: int = 0
    """Number of tokens to which the first row of each group, the query, is cut. It must be at least
    the length of the longest query, so that only padding is cut. 0 means that nothing is cut."""

    kind: ClassVar[Literal["embedding"]] = "embedding"

    @property
    @override
    def metrics(self) -> tuple[Metric, ...]:
        unit = "nats per batch" if self.comparison == "scores" else "nats per row"
        return (Metric("loss", "loss", "loss", "count", unit, short="loss"),)

    @override
    def parts(self) -> tuple[Build, Any]:
        return EmbeddingModel, self.config

    @override
    def counts(self, rows: Batch) -> Scalars:
        compared = _compared(None, rows)
        return {"count": jnp.sum(self._counted(compared, compared))}

    @override
    def pace(self, done: Float[Array, ""]) -> Scalars:
        rise = jnp.minimum(done / max(self.contrast.flops_warmup, 1e-9), 1.0)
        return {"flops_share": jnp.square(rise)}

    @override
    def loss(self, sums: Scalars, counts: Scalars) -> Float[Array, ""]:
        """Return the mean loss over the labels, or 0 without labels, plus the FLOPS losses."""
        flops = ratio(sums.get("flops", jnp.float32(0)), counts["count"])
        return super().loss(sums, counts) + counts.get("flops_share", 1.0) * flops

    @override
    def represent(
        self, params: Any, rows: Batch, seed: Array | None, layout: OnMesh
    ) -> Float[Array, "B G D"]:
        params = self.computing(params)
        length, size = self.query_length, rows["tokens"].shape[-1]
        parts, static = [(0, self.group, size)], self.config.static_queries
        if self.group > 1 and (0 < length < size or static):
            parts = [(0, 1, length or size), (1, self.group, size)]
        *whole, stream = self.inputs(rows, seed)
        found = []
        for start, end, length in parts:
            part = partial(_part, self.group, start, end)
            tokens, types, segments = (part(x)[:, :length] for x in whole)
            if static and self.group > 1 and not start:
                vectors = static_vectors(params, tokens, segments > 0)
            else:
                own = stream and stream._replace(row_index=part(stream.row_index))
                hidden = encode(self.model, params, tokens, types, segments, own, layout)
                vectors = pool_tokens(self.config.pooling, hidden, segments > 0, params, self.model)
            found.append(vectors.reshape(-1, end - start, vectors.shape[-1]))
        vectors = jnp.concatenate(found, axis=1)
        return vectors if self.config.is_sparse else unit(vectors)

    @override
    def compare(self, outputs: Float[Array, "B G D"], rows: Batch, layout: OnMesh) -> Scalars:
        # Number of axes of the loss's labels. Dev rows may have labels for another kind of loss.
        axes = {"ranking": 0, "scores": 1, "classes": 1}.get(self.comparison, 2)
        if axes != (rows["labels"].ndim if "labels" in rows else 0):
            return {"loss": jnp.float32(0), "count": jnp.float32(0)}
        own = _compared(outputs, rows)
        every = own if layout is None else layout.all_rows(own)
        counted = self._counted(own, every)
        width = 0 if self.config.is_sparse else outputs.shape[-1]
        sizes, weights = self.config.dimensions, self.contrast.dimension_weights
        weighted = dict(zip(sizes, weights or (1.0,) * len(sizes), strict=True))
        losses = sum(
            weight * self._losses(own.leading(size), every.leading(size))
            for size, weight in {width: 1.0, **weighted}.items()
        )
        sums = {"loss": jnp.sum(losses * counted), "count": jnp.sum(counted)}
        return sums if width else {**sums, "flops": self._flops_loss(every) * sums["count"]}

    def _flops_loss(self, every: Compared) -> Float[Array, ""]:
        """Sum the squared mean weights of all tokens, in queries and in documents (Paria et al.).

        A group of one text counts as a document.
        """
        total = jnp.float32(0)
        query = jnp.arange(self.group) < (self.group > 1)
        for weight, side in (
            (self.contrast.query_flops, query), (self.contrast.document_flops, ~query)
        ):  # fmt: skip
            shares = every.present * every.weights[:, None] * side
            means = jnp.einsum("ikV,ik->V", every.vectors, shares)
            total += weight * jnp.sum(jnp.square(means / jnp.maximum(jnp.sum(shares), 1.0)))
        return total

    def _losses(self, own: Compared, every: Compared) -> Float[Array, " b"]:
        temperature = self.contrast.temperature or (1.0 if self.config.is_sparse else 0.05)
        if self.comparison == "ranking":
            return ranking_losses(own, every, temperature, self.contrast.symmetric)
        if self.comparison == "scores" or self.comparison == "classes":
            losses = score_losses if self.comparison == "scores" else class_losses
            return losses(own, every, temperature)
        assert own.labels is not None
        scores = jnp.einsum("iD,icD->ic", own.vectors[:, 0], own.vectors[:, 1:]) / temperature
        return list_losses(self.comparison, scores, own.labels, own.present[:, 1:])

    def _counted(self, own: Compared, every: Compared) -> Float[Array, " b"]:
        """Return the weight of each group's loss: 0 for the only text of a class in the batch."""
        if self.comparison != "classes" or own.labels is None:
            return own.weights
        alike = _others(own, every) & (own.labels[:, None] == every.labels)
        return own.weights * jnp.any(alike, axis=1)

    @override
    def flops(self, rows: Batch) -> int:
        """Count the operations per row in a training step, as the mean over a group's rows."""
        length = rows["tokens"].shape[-1]
        lengths = [min(self.query_length or length, length), *(self.group - 1) * [length]]
        lengths = lengths[self.config.static_queries and self.group > 1 :]
        total = sum(encoder_flops(self.model, each) for each in lengths)
        total += self.config.is_sparse * vocabulary_flops(self.model, sum(lengths))
        return (TRAIN_OVER_FORWARD * total - sum(map(self.spared_flops, lengths))) // self.group


def _part(group: int, start: int, end: int, x: Array) -> Array:
    """Take rows `start` to `end` of each group. `x` has the rows of all groups, group by group."""
    return x.reshape(-1, group, *x.shape[1:])[:, start:end].reshape(-1, *x.shape[1:])


def _compared(vectors: Float[Array, "B G D"] | None, rows: Batch) -> Compared:
    """Return the inputs of the loss. If `vectors` is None, use zeros, enough for counting."""
    size = len(rows["row_index"])
    segments = rows["segment_ids"]
    present = jnp.any(segments.reshape(size, -1, segments.shape[-1]) > 0, axis=-1)
    if vectors is None:
        vectors = jnp.zeros((*present.shape, 1), jnp.float32)
    return Compared(
        vectors, rows["row_index"], rows["weights"], rows["text_ids"], present, rows.get("labels")
    )

"""Masked language modelling, with or without sentence pairs (Devlin et al. 2018)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax.errors import UserError
from bert_jax.model import heads
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import Stream
from bert_jax.model.flops import train_flops
from bert_jax.model.layout import OnMesh, platform
from bert_jax.model.rotation import restarting_positions
from bert_jax.objectives import losses
from bert_jax.objectives.masking import MaskingConfig, mask_tokens
from bert_jax.objectives.objective import (
    Batch,
    Forward,
    Metric,
    Scalars,
    Shown,
    Teachable,
    judged_sums,
)
from bert_jax.tokenization.special_ids import SpecialIds

_MASKED = (
    Metric(
        "mlm_loss", "masked-LM loss", "mlm_loss", "mlm_count", "nats per token", short="mlm loss",
        baseline="unigram entropy",
    ),
    Metric("mlm_accuracy", "masked-LM accuracy", "mlm_correct", "mlm_count", better="higher"),
)  # fmt: skip
_PAIRS = (
    Metric("nsp_loss", "sentence-pair loss", "nsp_loss", "nsp_count", "nats per pair"),
    Metric(
        "nsp_accuracy", "sentence-pair accuracy", "nsp_correct", "nsp_count", better="higher",
        short="nsp accuracy", floor="nsp_majority",
    ),
)  # fmt: skip


def check_decoder(model: ModelConfig) -> None:
    """Raise a UserError if states and token table differ in width and the head has no transform."""
    if model.projects_embeddings and not model.head_transform:
        raise UserError(
            f"model.head_transform is False, but the token table is {model.embedding_dim} wide and "
            f"the layers are {model.hidden_dim} wide, so the layers' states must be mapped to the "
            "width of the token table; set model.head_transform to True"
        )


@dataclass(frozen=True)
class MaskedLM(Teachable):
    """Prediction of masked tokens and sentence pairs. `baseline` is the unigram entropy in nats."""

    masking: MaskingConfig
    special_ids: SpecialIds
    continues_word: np.ndarray | None = field(default=None, compare=False)
    """Mask (vocab_size,) of the ids that continue the preceding word, for whole-word masking."""
    pairs: bool = True
    """Whether rows are pairs of sentences with a label."""

    def __post_init__(self) -> None:
        check_decoder(self.model)

    @staticmethod
    def metrics_of(pairs: bool) -> tuple[Metric, ...]:
        """List the metrics of a run with or without pairs of sentences."""
        return _MASKED + (_PAIRS if pairs else ())

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of the objective."""
        return self.metrics_of(self.pairs)

    def prepare(self, batch: Batch, seed: int | Array) -> Batch:
        """Mask the tokens, and add positions, labels and weights (B, P).

        If the batch has `masking_rates` (B,), they replace the masking rate of each row.
        """
        masked = mask_tokens(
            batch["tokens"], batch["segment_ids"], batch["row_index"], seed=seed,
            config=self.masking, vocab_size=self.model.vocab_size, special_ids=self.special_ids,
            continues_word=self.continues_word, rates=batch.get("masking_rates"),
        )  # fmt: skip
        return {**batch, **masked._asdict()}

    def counts(self, rows: Batch) -> Scalars:
        """Count masked positions and, if the model has a pooler, labelled pairs."""
        masked = {"mlm_count": jnp.sum(rows["weights"])}
        if not self.model.pooler:
            return masked
        return masked | {"nsp_count": jnp.sum(rows["pair_labels"] >= 0)}

    def forward(self, params: Any, rows: Batch, seed: Array | None, layout: OnMesh) -> Forward:
        """Sum losses (nats), right answers and counts over the rows."""
        states, loss, correct = self.at_places(params, rows, seed, layout)
        return self._summed(params, states, (loss, correct), rows)

    def at_places(
        self, params: Any, rows: Batch, seed: Array | None, layout: OnMesh
    ) -> tuple[Array, Array, Array]:
        """Return the last states and, at masked positions (B, P), loss (nats) and correct (0/1)."""
        states = heads.encode(self.model, params, *self.inputs(rows, seed), layout)
        projection = heads.vocabulary_projection(self.model, params, states, rows["positions"])
        return states, *projected_cross_entropy(projection, rows["labels"], layout)

    def _summed(
        self, params: Any, states: Array, answers: tuple[Array, Array], rows: Batch
    ) -> Forward:
        masked = judged_sums("mlm", *answers, rows["weights"])
        if not self.model.pooler:
            return Forward(masked)
        pairs = heads.pair_logits(self.model, params, states)
        return Forward(masked | pair_sums(pairs, rows["pair_labels"]))

    def finish(
        self, params: Any, states: Array, rows: Batch, stream: Stream
    ) -> tuple[Float[Array, "B P V"], Forward]:
        """Compute the logits at the masked positions, and the result of `forward`."""
        del stream  # the head has no dropout
        logits = heads.vocabulary_projection(self.model, params, states, rows["positions"]).logits()
        answers = losses.cross_entropy(logits, rows["labels"])
        return logits, self._summed(params, states, answers, rows)

    def soft_losses(
        self, logits: Array, wanted: Array, rows: Batch, temperature: float
    ) -> Float[Array, "B P"]:
        """Compute the divergence from the teacher's predictions at each masked position."""
        count = self.model.vocab_size
        if wanted.shape != logits.shape:  # the same vocabulary, padded differently
            logits, wanted = logits[..., :count], wanted[..., :count]
        # A teacher's table may have rows without a token. Mask them: a slice needs communication.
        wanted = jnp.where(jnp.arange(wanted.shape[-1]) < count, wanted, heads.PADDED_LOGIT)
        return losses.divergences(logits, wanted, temperature)

    def soft_weights(self, rows: Batch) -> Float[Array, "B P"]:
        """Return 1 for each masked position, and 0 for unused entries."""
        return jnp.asarray(rows["weights"])

    def loss(self, sums: Scalars, counts: Scalars) -> Float[Array, ""]:
        """Add the masked-LM loss and the sentence-pair loss (Devlin et al. 2018, appendix A.2)."""
        masked = losses.ratio(sums["mlm_loss"], counts["mlm_count"])
        if not self.model.pooler:
            return masked
        return masked + losses.ratio(sums["nsp_loss"], counts["nsp_count"])

    def aside(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return counts, the `gain`, and the accuracy of always predicting the majority label."""
        values = {"num_masked": sums["mlm_count"]}
        if self.pairs:
            pairs, ones = sums["nsp_count"], sums["nsp_ones"]
            values["nsp_majority"] = max(ones, pairs - ones) / max(pairs, 1.0)
        return values | self.gain(sums)

    def flops(self, rows: Batch) -> int:
        """Count the operations of one row in a training step (see `model.flops`)."""
        length = rows["tokens"].shape[-1]
        return train_flops(self.model, length, self.masking.num_predictions(length))

    @staticmethod
    def shown(rows: Batch) -> Shown:
        """Return the masked input and the predicted positions for display."""
        tokens = jnp.asarray(rows["tokens"])
        used = jnp.asarray(rows["weights"]) > 0
        places = jnp.arange(tokens.shape[1])
        predicted = (jnp.asarray(rows["positions"])[..., None] == places) & used[..., None]
        return Shown(tokens, predicted.any(axis=1))


@dataclass(frozen=True)
class MaskedLMByPosition(MaskedLM):
    """Evaluation of masked LM, with results by the position of the masked token in its segment.

    Batches have float32 `masking_rates` (B,) up to `masking.rate`, so one program serves all rates.
    """

    edges: tuple[int, ...] = (0,)
    """Ascending borders of K buckets. Bucket k has the positions `edges[k]` to `edges[k + 1]` - 1.
    The position of a token is the number of tokens before it in its segment, including [CLS]."""

    def forward(self, params: Any, rows: Batch, seed: Array | None, layout: OnMesh) -> Forward:
        """Return losses (nats), right answers and counts by row and bucket, each (B, K).

        Sums over rows are left to the host, in float64 and in an order independent of the mesh.
        """
        _, loss, correct = self.at_places(params, rows, seed, layout)
        position = jnp.take_along_axis(
            restarting_positions(rows["segment_ids"]), rows["positions"], axis=1
        )[..., None]
        edges = np.array(self.edges)
        inside = (position >= edges[:-1]) & (position < edges[1:])
        weights = jnp.where(inside, rows["weights"][..., None], 0.0)
        values = {"loss": loss, "correct": correct, "count": jnp.ones_like(loss)}
        return Forward({}, {n: jnp.sum(v[..., None] * weights, 1) for n, v in values.items()})


def position_buckets(length: int) -> tuple[int, ...]:
    """Return the bucket borders 0, 128, 256, 512, ... and `length` for rows of this length."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(2 * edges[-1] or 128, length))
    return tuple(edges)


_ON_CHIP = 128 * 2**20
"""Largest size of float32 logits, in bytes, that a TPU stores; larger logits are recomputed."""


def projected_cross_entropy(
    projection: heads.Projection, labels: Int[Array, "B P"], layout: OnMesh
) -> tuple[Float[Array, "B P"], Float[Array, "B P"]]:
    """Return the `cross_entropy` of a projection's logits, with a method that suits the device."""
    kind = platform(layout) if layout is None or layout.is_local else ""
    if kind == "cpu":  # where passes over all logits cost as much as computing them
        count = losses.num_blocks(len(projection.table))
        return losses.cross_entropy_in_blocks(*projection, labels, count)
    size = 4 * labels.size * len(projection.table)
    if kind == "tpu" and projection.states.dtype == jnp.bfloat16 and size > _ON_CHIP:
        return losses.recomputed_cross_entropy(*projection, labels)
    return losses.cross_entropy(projection.logits(), labels)


def pair_sums(logits: Float[Array, "B 2"], labels: Array) -> Scalars:
    """Sum losses (nats), right answers and labels over the rows with a pair (label >= 0)."""
    has_pair = (labels >= 0).astype(jnp.float32)
    sums = judged_sums("nsp", *losses.cross_entropy(logits, jnp.maximum(labels, 0)), has_pair)
    return sums | {"nsp_ones": jnp.sum((labels == 1).astype(jnp.float32))}

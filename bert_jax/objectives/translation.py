"""Translation: predict each target token from the source and the earlier target tokens (Cho 2014).

Batches come from the pairing `translation` (see `data.pipeline`). Targets begin with [CLS]. This
module makes the labels: the targets shifted left by one position, with [SEP] at the end.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from bert_jax.model.dropout import DropoutStream
from bert_jax.model.layout import OnMesh
from bert_jax.model.seq2seq.network import Network, Side
from bert_jax.objectives.losses import ratio, smoothed_cross_entropy
from bert_jax.objectives.objective import Batch, Forward, Metric, Objective, Scalars, judged_sums
from bert_jax.tokenization.special_ids import SpecialIds

METRICS = (
    Metric(
        "translation_loss", "translation loss", "translation_loss", "target_count",
        "nats per token", short="translation loss", baseline="unigram entropy of the targets",
    ),
    Metric(
        "translation_accuracy", "translation accuracy", "translation_correct", "target_count",
        better="higher", short="accuracy",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Translation(Objective):
    """Prediction of each target token and of the end of the target.

    `model` configures the network. `baseline` is the unigram entropy of the training targets and
    their end tokens, in nats per token. Metrics exclude label smoothing, even in training.
    """

    network: Network
    special_ids: SpecialIds
    label_smoothing: float = 0.1
    """Share of a label's probability that the loss spreads over the vocabulary."""

    metrics = METRICS

    def parts(self) -> tuple[Any, ...]:
        """Return the module class of the network, and the module's settings."""
        return self.network.parts()

    def prepare(self, batch: Batch, seed: int | Array) -> Batch:
        """Add labels (B, T) and weights (B, T)."""
        del seed
        segments = jnp.asarray(batch["target_segment_ids"])
        labels = next_tokens(jnp.asarray(batch["target_tokens"]), segments, self.special_ids.sep)
        return {**batch, "labels": labels, "weights": (segments > 0).astype(jnp.float32)}

    def counts(self, rows: Batch) -> Scalars:
        """Count the target tokens."""
        return {"target_count": jnp.sum(rows["weights"])}

    def forward(self, params: Any, rows: Batch, seed: Array | None, layout: OnMesh) -> Forward:
        """Return sums over target tokens: smoothed loss, plain loss, correct predictions, count."""
        stream = None if seed is None else DropoutStream(seed, rows["row_index"])
        logits = self.network.logits(params, *sides(rows), stream, layout)
        weights = rows["weights"]
        smoothed, loss, correct = smoothed_cross_entropy(
            logits, rows["labels"], self.label_smoothing, self.model.vocab_size
        )
        sums = {"smoothed_loss": jnp.sum(smoothed * weights)}
        return Forward(sums | judged_sums("translation", loss, correct, weights, "target_count"))

    def loss(self, sums: Scalars, counts: Scalars) -> Float[Array, ""]:
        """Return the mean loss per target token in nats, with label smoothing."""
        return ratio(sums["smoothed_loss"], counts["target_count"])

    def aside(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the perplexity, the number of target tokens, and the gain over the baseline."""
        perplexity = math.exp(min(self.metrics[0].of(sums), 100.0))
        return {"perplexity": perplexity, "num_targets": sums["target_count"]} | self.gain(sums)

    @staticmethod
    def num_tokens(batch: Batch) -> Int[Array, "*trials"]:
        """Count the tokens of sources and targets."""
        return Objective.num_tokens(batch) + jnp.sum(
            batch["target_segment_ids"] > 0, dtype=jnp.int32
        )

    def flops(self, rows: Batch) -> int:
        """Count the operations of one row in a training step (see `model.flops`)."""
        return self.network.flops(rows["tokens"].shape[-1], rows["target_tokens"].shape[-1])


def sides(rows: Batch) -> tuple[Side, Side]:
    """Split the arrays of rows into source and target."""
    source = Side(rows["tokens"], rows["segment_ids"])
    return source, Side(rows["target_tokens"], rows["target_segment_ids"])


def next_tokens(
    tokens: Integer[Array, "B T"], segment_ids: Integer[Array, "B T"], end: int
) -> Int[Array, "B T"]:
    """Return the next token for each position of packed targets, or `end` if the target ends."""
    continues = segment_ids[:, 1:] == segment_ids[:, :-1]
    labels = jnp.where(continues, tokens[:, 1:].astype(jnp.int32), end)
    return jnp.pad(labels, ((0, 0), (0, 1)), constant_values=end)

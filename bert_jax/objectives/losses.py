"""The pretraining loss, as sums and counts that add up over rows, micro-batches and hosts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num


class LossSums(NamedTuple):
    """Sums over rows; two of them added elementwise are the sums over both sets of rows.

    All are float32 scalars; counts are exact below 2**24.
    """

    mlm_loss: Float[Array, ""]
    """Sum of -log p(label) over masked positions, in nats."""
    mlm_correct: Float[Array, ""]
    """Masked positions whose label has the highest logit."""
    mlm_count: Float[Array, ""]
    """Masked positions."""
    nsp_loss: Float[Array, ""]
    """Sum of -log p(label) over rows that carry a sentence-pair label, in nats."""
    nsp_correct: Float[Array, ""]
    """Labelled rows predicted right."""
    nsp_count: Float[Array, ""]
    """Rows that carry a sentence-pair label."""
    nsp_ones: Float[Array, ""]
    """Labelled rows whose label is 1."""


def cross_entropy(
    logits: Float[Array, "*rows V"], labels: Int[Array, "*rows"]
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """-log softmax(logits)[label] in nats, and 1.0 where the label has the highest logit.

    Padded vocabulary columns hold -inf or a large negative number and get no probability and no
    gradient; at least one logit per row must be finite. Labels must lie in [0, V). A label that
    ties with another token for the highest logit counts as right. Reductions run in float32.

    The backward pass is written out: it keeps the logits and one log-normaliser per row, where the
    derivative of a library log-softmax keeps a second array of V columns.
    """
    return _cross_entropy(logits.astype(jnp.float32), labels)


@jax.custom_vjp
def _cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    return _forward(logits, labels)[0]


def _forward(
    logits: Array, labels: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
    highest = jnp.max(logits, axis=-1)
    log_z = highest + jnp.log(jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1))
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    # `picked == highest` costs nothing here; an argmax would be one more pass over V columns.
    correct = (picked == highest).astype(jnp.float32)
    return (log_z - picked, correct), (logits, labels, log_z)


def _backward(
    residuals: tuple[Array, Array, Array], cotangents: tuple[Array, Array]
) -> tuple[Array, None]:
    logits, labels, log_z = residuals
    columns = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    is_label = labels[..., None] == columns
    gradient = cotangents[0][..., None] * (jnp.exp(logits - log_z[..., None]) - is_label)
    return gradient, None


_cross_entropy.defvjp(_forward, _backward)


def pretraining_sums(
    mlm_logits: Float[Array, "B P V"],
    labels: Int[Array, "B P"],
    weights: Float[Array, "B P"],
    nsp_logits: Float[Array, "B 2"],
    nsp_labels: Int[Array, " B"],
) -> LossSums:
    """Masked-LM and sentence-pair losses, right answers and counts, summed over the batch.

    `weights` is 1 at masked positions and 0 at unused ones. Rows whose `nsp_labels` is -1 carry no
    sentence pair and are ignored.
    """
    mlm_loss, mlm_correct = cross_entropy(mlm_logits, labels)
    has_pair = (nsp_labels >= 0).astype(jnp.float32)
    nsp_loss, nsp_correct = cross_entropy(nsp_logits, jnp.maximum(nsp_labels, 0))
    return LossSums(
        mlm_loss=jnp.sum(mlm_loss * weights),
        mlm_correct=jnp.sum(mlm_correct * weights),
        mlm_count=jnp.sum(weights),
        nsp_loss=jnp.sum(nsp_loss * has_pair),
        nsp_correct=jnp.sum(nsp_correct * has_pair),
        nsp_count=jnp.sum(has_pair),
        nsp_ones=jnp.sum((nsp_labels == 1).astype(jnp.float32)),
    )


def ratio(total: Num[Array, ""], count: Num[Array, ""]) -> Float[Array, ""]:
    """The mean total / count, and 0 (never NaN) where nothing was counted."""
    return total.astype(jnp.float32) / jnp.maximum(count.astype(jnp.float32), 1.0)


def pretraining_loss(
    sums: LossSums, mlm_count: Num[Array, ""], nsp_count: Num[Array, ""]
) -> Float[Array, ""]:
    """Masked-LM loss plus sentence-pair loss (Devlin et al. 2018, appendix A.2).

    Each is a sum over its own count. The counts are those of the global batch: over parts of a
    batch the losses add up to the loss of the whole, however unequal the parts are.
    """
    return ratio(sums.mlm_loss, mlm_count) + ratio(sums.nsp_loss, nsp_count)

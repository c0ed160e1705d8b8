"""Cross entropy with a backward pass that keeps one array of logits, and means."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num


def ratio(total: Num[Array, ""], count: Num[Array, ""]) -> Float[Array, ""]:
    """Return the mean total / count, and 0 (never NaN) where nothing was counted."""
    return total.astype(jnp.float32) / jnp.maximum(count.astype(jnp.float32), 1.0)


def cross_entropy(
    logits: Float[Array, "*rows V"], labels: Int[Array, "*rows"]
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Return -log softmax(logits)[label] in nats, and 1.0 where the label has the highest logit.

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


def _forward(logits, labels):
    highest = jnp.max(logits, axis=-1)
    log_z = highest + jnp.log(jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1))
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    # `picked == highest` costs nothing here; an argmax would be one more pass over V columns.
    correct = (picked == highest).astype(jnp.float32)
    return (log_z - picked, correct), (logits, labels, log_z)


def _backward(residuals, cotangents):
    logits, labels, log_z = residuals
    columns = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    is_label = labels[..., None] == columns
    gradient = cotangents[0][..., None] * (jnp.exp(logits - log_z[..., None]) - is_label)
    return gradient, None


_cross_entropy.defvjp(_forward, _backward)

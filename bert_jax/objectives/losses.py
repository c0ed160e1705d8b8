"""Cross entropy with a backward pass that keeps one array of logits, and means."""

from functools import partial

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
    _, loss, correct = _cross_entropy(logits.astype(jnp.float32), labels, 0.0, logits.shape[-1])
    return loss, correct


def smoothed_cross_entropy(
    logits: Float[Array, "*rows V"], labels: Int[Array, "*rows"], smoothing: float, num_classes: int
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Return the cross entropy with smoothed labels, and what `cross_entropy` returns.

    A smoothed label is (1 - smoothing) of the label and smoothing / num_classes of each of the
    first `num_classes` columns (Szegedy et al. 2016, section 7); the others stand for no class.
    """
    return _cross_entropy(logits.astype(jnp.float32), labels, smoothing, num_classes)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _cross_entropy(
    logits: Array, labels: Array, smoothing: float, num_classes: int
) -> tuple[Array, Array, Array]:
    return _forward(logits, labels, smoothing, num_classes)[0]


def _forward(logits, labels, smoothing, num_classes):
    highest = jnp.max(logits, axis=-1)
    log_z = highest + jnp.log(jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1))
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    # `picked == highest` costs nothing here; an argmax would be one more pass over V columns.
    correct = (picked == highest).astype(jnp.float32)
    loss = smoothed = log_z - picked
    if smoothing:
        is_class = jnp.arange(logits.shape[-1]) < num_classes
        mean = jnp.sum(jnp.where(is_class, logits, 0), axis=-1) / num_classes
        smoothed = log_z - (1 - smoothing) * picked - smoothing * mean
    return (smoothed, loss, correct), (logits, labels, log_z)


def _backward(smoothing, num_classes, residuals, cotangents):
    logits, labels, log_z = residuals
    columns = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    is_label = labels[..., None] == columns
    probability = jnp.exp(logits - log_z[..., None])
    smoothed, plain = (cotangent[..., None] for cotangent in cotangents[:2])
    if not smoothing:
        return (smoothed + plain) * (probability - is_label), None
    gradient = (smoothed + plain) * probability
    gradient -= jnp.where(is_label, (1 - smoothing) * smoothed + plain, 0)
    spread = smoothed * (smoothing / num_classes)
    return gradient - jnp.where(columns < num_classes, spread, 0), None


_cross_entropy.defvjp(_forward, _backward)

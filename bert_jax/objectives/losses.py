"""Means, divergences, losses of lists, and a cross entropy with a backward pass of its own."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from bert_jax.model.layers import differentiable, einsum_float32
from bert_jax.tasks.retrieval.metrics import ListLoss


def ratio(total: Num[Array, ""], count: Num[Array, ""]) -> Float[Array, ""]:
    """Return the mean total / count, or 0 if `count` is 0."""
    count = count.astype(jnp.float32)  # a sum of weights may be between 0 and 1
    return total.astype(jnp.float32) / jnp.where(count > 0, count, 1.0)


def cross_entropy(
    logits: Float[Array, "*rows V"], labels: Int[Array, "*rows"]
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Return -log softmax(logits)[label] in nats, and 1.0 where the label has the highest logit.

    Columns that pad the vocabulary must be -inf or a large negative number, so that they get no
    probability and no gradient. At least one logit per row must be finite. Labels are in [0, V). A
    label that ties with another token for the highest logit counts as right. Sums use float32.

    The backward pass keeps logits and one log-normaliser per row, not a second array of V columns.
    """
    _, loss, correct = smoothed_cross_entropy(logits, labels, 0.0, logits.shape[-1])
    return loss, correct


def smoothed_cross_entropy(
    logits: Float[Array, "*rows V"], labels: Int[Array, "*rows"], smoothing: float, num_classes: int
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Return the cross entropy with smoothed labels, then the two results of `cross_entropy`.

    A smoothed label gives (1 - smoothing) to the label and smoothing / num_classes to each of the
    first `num_classes` columns (Szegedy et al. 2016, section 7). Other columns are padding.
    """
    return _cross_entropy(logits.astype(jnp.float32), labels, smoothing, num_classes)


def _forward(logits, labels, smoothing, num_classes):
    highest = jnp.max(logits, axis=-1)
    log_z = highest + jnp.log(jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1))
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    # `picked == highest` costs almost nothing. An argmax would be one more pass over V columns.
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


_cross_entropy = differentiable(_forward, _backward, static=(2, 3))


def divergences(
    student: Float[Array, "*rows C"], teacher: Float[Array, "*rows C"], temperature: float = 1.0
) -> Float[Array, "*rows"]:
    """Return T² KL(teacher || student) of softmax(logits / T), in nats.

    The teacher gets no gradient, and T² keeps the gradient's scale (Hinton et al. 2015, section 2).
    """
    mine, theirs = (
        jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
        for logits in (student, jax.lax.stop_gradient(teacher))
    )
    return temperature**2 * jnp.sum(jnp.exp(theirs) * (theirs - mine), axis=-1)


def binary_divergences(
    student: Float[Array, "*rows"], teacher: Float[Array, "*rows"], temperature: float = 1.0
) -> Float[Array, "*rows"]:
    """Return the `divergences` of binary predictions with the probability sigmoid(logits / T)."""
    mine, theirs = (jnp.stack([jnp.zeros_like(x), x], axis=-1) for x in (student, teacher))
    return divergences(mine, theirs, temperature)


def list_losses(
    kind: ListLoss, scores: Float[Array, "B K"], wanted: Float[Array, "B K"],
    present: Bool[Array, "B K"],
) -> Float[Array, " B"]:  # fmt: skip
    """Compare each query's scores of its K documents with wanted scores, such as a teacher's.

    contrast: cross entropy of the first document among all K (Gao et al. 2021, Rethink Training of
    BERT Rerankers), without `wanted`. margin_mse: squared error of the first score minus each other
    score, averaged (Hofstätter et al. 2020). kl: `divergences`. list_net: cross entropy of
    softmax(wanted) (Cao et al. 2007). Documents that are not `present` do not count.
    """
    if kind == "margin_mse":
        first, second = (each[:, :1] - each[:, 1:] for each in (scores, wanted))
        errors = jnp.square(first - second) * present[:, 1:]
        return jnp.sum(errors, axis=1) / jnp.maximum(jnp.sum(present[:, 1:], axis=1), 1)
    scores, wanted = (jnp.where(present, each, -1e30) for each in (scores, wanted))
    if kind == "contrast":
        return -jax.nn.log_softmax(scores)[:, 0]
    if kind == "kl":
        return divergences(scores, wanted)
    return -jnp.sum(jax.nn.softmax(wanted) * jax.nn.log_softmax(scores), axis=1)


def recomputed_cross_entropy(
    states: Float[Array, "*rows E"],
    table: Float[Array, "V E"],
    bias: Float[Array, " V"],
    labels: Int[Array, "*rows"],
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Compute `cross_entropy` of states @ table.T + bias without storing float32 logits.

    On a TPU, computing the logits again is faster than storing them (docs/experiments.md).
    """
    return _flat(_recomputed, states, table, bias, labels)


def _flat(entropy, states, table, bias, labels, *static):
    """Call `entropy` with states (N, E) and labels (N,); give its results the shape of labels."""
    rows = states.reshape(-1, states.shape[-1])
    loss, correct = entropy(rows, table, bias, labels.reshape(-1), *static)
    return loss.reshape(labels.shape), correct.reshape(labels.shape)


def _recomputed_forward(states, table, bias, labels):
    from bert_jax.objectives.vocabulary_kernel import normalisers  # importing Pallas is slow

    log_z, picked, highest = normalisers(states, table, bias, labels)
    correct = (picked == highest).astype(jnp.float32)
    return (log_z - picked, correct), (states, table, bias, labels, log_z)


def _recomputed_backward(residuals, cotangents):
    states, table, bias, labels, log_z = residuals
    logits = einsum_float32("NE,VE->NV", states, table) + bias
    is_label = labels[:, None] == jnp.arange(len(table))
    slope = cotangents[0][:, None] * (jnp.exp(logits - log_z[:, None]) - is_label)
    turned = slope.astype(states.dtype)
    return turned @ table, jnp.einsum("NV,NE->VE", turned, states), slope.sum(0), None


_recomputed = differentiable(_recomputed_forward, _recomputed_backward)

_LEAST_BLOCK, _LEAST_DIVIDED = 3000, 20_000
"""Smallest number of columns of a block, and of a table that is divided into blocks.

A block of 600 rows then takes 8 MB, which stays in the cache. For 616 rows, 50,432 columns and a
width of 256, both passes take 597 ms of one core without blocks, 387 ms in blocks of 1,576 columns,
375 ms in blocks of 3,152 and 407 ms in blocks of 12,608 (docs/experiments.md)."""


def num_blocks(columns: int) -> int:
    """Return the number of blocks for `cross_entropy_in_blocks`, 1 if more do not help."""
    most = columns // _LEAST_BLOCK if columns >= _LEAST_DIVIDED else 1
    return max(n for n in range(1, most + 1) if columns % n == 0)


def cross_entropy_in_blocks(
    states: Float[Array, "*rows E"],
    table: Float[Array, "V E"],
    bias: Float[Array, " V"],
    labels: Int[Array, "*rows"],
    count: int,
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Compute `cross_entropy` of the logits states @ table.T + bias, in blocks that suit a CPU.

    The logits are computed in `count` equal blocks of columns, with a running sum of exponentials
    (Milakov & Gimelshein 2018). An array of V columns is kept only if there is a backward pass.
    """
    return _flat(_in_blocks, states, table, bias, labels, count)


def _in_blocks_forward(states, table, bias, labels, count):
    tables, biases, firsts = _blocks(table, bias, count)

    def add_block(carry, block):
        highest, total, picked = carry
        table, bias, first = block
        logits = einsum_float32("NE,VE->NV", states, table) + bias
        top = jnp.maximum(highest, logits.max(-1))
        total = total * jnp.exp(highest - top) + jnp.exp(logits - top[:, None]).sum(-1)
        column = jnp.clip(labels - first, 0, len(table) - 1)[:, None]
        here = jnp.take_along_axis(logits, column, axis=-1)[:, 0]
        picked = jnp.where(labels - first == column[:, 0], here, picked)
        return (top, total, picked), logits

    start = jnp.zeros(labels.shape, jnp.float32)
    (highest, total, picked), logits = jax.lax.scan(
        add_block, (start - jnp.inf, start, start), (tables, biases, firsts)
    )
    log_z = highest + jnp.log(total)
    correct = (picked == highest).astype(jnp.float32)
    return (log_z - picked, correct), (states, table, bias, labels, logits, log_z)


def _in_blocks_backward(count, residuals, cotangents):
    states, table, bias, labels, logits, log_z = residuals
    tables, _, firsts = _blocks(table, bias, count)

    def add_block(gradient, block):
        table, logits, first = block
        is_label = (labels - first)[:, None] == jnp.arange(len(table))
        slope = cotangents[0][:, None] * (jnp.exp(logits - log_z[:, None]) - is_label)
        bias_gradient = jnp.ones(len(slope), slope.dtype) @ slope  # faster than `sum(0)`
        slope = slope.astype(states.dtype)
        gradient += jnp.einsum("NV,VE->NE", slope, table, preferred_element_type=jnp.float32)
        # For "NV,NE->VE", XLA would read `slope` along columns. If their number is a power of two,
        # the cache misses: 640 rows of 4,096 columns would take three times as long.
        columns = jax.lax.optimization_barrier(turned @ slope).T
        return gradient, (columns, bias_gradient)

    turned = jax.lax.optimization_barrier(states.T)
    start = jnp.zeros(states.shape, jnp.float32)
    gradient, (tables, biases) = jax.lax.scan(add_block, start, (tables, logits, firsts))
    parts = gradient.astype(states.dtype), tables.reshape(table.shape), biases.reshape(bias.shape)
    return *parts, None


_in_blocks = differentiable(_in_blocks_forward, _in_blocks_backward, static=(4,))


def _blocks(table: Array, bias: Array, count: int) -> tuple[Array, Array, Array]:
    """Return the blocks of the table and of the bias, and the first column of each block."""
    columns = len(table) // count
    blocks = table.reshape(count, columns, -1), bias.reshape(count, columns)
    return *blocks, jnp.arange(count, dtype=jnp.int32) * columns

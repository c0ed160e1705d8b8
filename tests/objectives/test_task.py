"""The loss of each kind of head, written out in float64: sums, counts, and what does not count."""

import jax
import numpy as np
import pytest

from bert_jax.objectives.task import HEADS
from bert_jax.tasks.rows import NO_LABEL

RNG = np.random.default_rng(0)
WEIGHTS = np.array([1, 1, 0], np.float32)  # the third row fills the batch
SEGMENT_IDS = np.array([[1] * 5, [1] * 3 + [0] * 2, [1] * 5], np.int32)
TAGS = np.array([[NO_LABEL, 0, 3, 0, NO_LABEL], [NO_LABEL, 2, *[NO_LABEL] * 3], [1] * 5], np.int32)
ROWS = {
    "single_label": (RNG.normal(size=(3, 4)), np.array([2, 0, 1], np.int32)),
    "multi_label": (RNG.normal(size=(3, 4)), RNG.integers(0, 2, (3, 4)).astype(np.float32)),
    "regression": (RNG.normal(size=(3, 1)), np.array([2.5, -1.0, 7.0], np.float32)),
    "tags": (RNG.normal(size=(3, 5, 4)), TAGS),
    "span": (RNG.normal(size=(3, 5, 2)), np.array([[1, 4], [2, 2], [0, 0]], np.int32)),
}


def nats(logits, label):
    return float(np.log(np.exp(logits).sum()) - logits[label])


def written_out(objective, logits, labels):
    """Losses that count, one by one; the means over classes and over both ends are taken."""
    for row in range(2):
        x, y = logits[row], labels[row]
        if objective == "single_label":
            yield nats(x, y)
        elif objective == "multi_label":
            p = 1 / (1 + np.exp(-x))
            yield float(-np.log(np.where(y, p, 1 - p)).mean())
        elif objective == "regression":
            yield float((x[0] - y) ** 2)
        elif objective == "tags":
            yield from (nats(x[i], y[i]) for i in range(5) if y[i] != NO_LABEL)
        else:
            real = SEGMENT_IDS[row].sum()
            yield (nats(x[:real, 0], y[0]) + nats(x[:real, 1], y[1])) / 2


@pytest.mark.parametrize("objective", ROWS)
def test_sum_and_count_of_each_objective(objective):
    logits, labels = ROWS[objective]
    expected = list(written_out(objective, logits, labels))
    assert len(expected) == (4 if objective == "tags" else 2)
    head = HEADS[objective]
    counted = np.asarray(jax.jit(head.counted)(labels, WEIGHTS))
    losses = np.asarray(jax.jit(head.losses)(np.float32(logits), labels, SEGMENT_IDS))
    np.testing.assert_allclose(np.sum(losses * counted), sum(expected), rtol=1e-5)
    assert np.sum(counted) == len(expected)

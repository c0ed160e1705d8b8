"""The loss of arcs, written out in float64."""

import jax
import numpy as np

from bert_jax.objectives.task import HEADS
from bert_jax.tasks.rows import NO_LABEL


def nats(logits, label):
    return float(np.log(np.exp(logits).sum()) - logits[label])


def test_the_loss_is_that_of_the_head_and_of_its_relation():
    """Padding is no head, whatever its score; rows that fill the batch do not count."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(3, 5, 5, 4))
    labels = np.full((3, 5), NO_LABEL, np.int32)
    arcs = {(0, 1): (3, 2), (0, 3): (0, 0), (0, 4): (3, 1), (1, 1): (2, 1), (2, 2): (1, 1)}
    for place, (head, relation) in arcs.items():
        labels[place] = head * 3 + relation
    real = [5, 3, 5]
    segment_ids = (np.arange(5) < np.array(real)[:, None]).astype(np.int32)
    logits[1, :, 3:] = 50.0
    head = HEADS["arcs"]
    counted = np.asarray(jax.jit(head.counted)(labels, np.array([1, 1, 0], np.float32)))
    losses = np.asarray(jax.jit(head.losses)(np.float32(logits), labels, segment_ids))
    expected = {
        (b, i): nats(logits[b, i, : real[b], 0], at) + nats(logits[b, i, at, 1:], relation)
        for (b, i), (at, relation) in arcs.items()
    }
    for place, value in expected.items():
        np.testing.assert_allclose(losses[place], value, rtol=1e-5)
    assert counted.sum() == 4
    del expected[2, 2]
    np.testing.assert_allclose((losses * counted).sum(), sum(expected.values()), rtol=1e-5)
    outputs = np.asarray(jax.jit(head.outputs)(np.float32(logits)))
    np.testing.assert_array_equal(outputs[..., 0], np.float32(logits[..., 0]))
    np.testing.assert_array_equal(outputs[..., 1], logits[..., 1:].argmax(-1))

"""The loss of each kind of head, written out in float64: sums, counts, and what does not count."""

import importlib.util

import jax
import numpy as np
import pytest

from bert_jax.model.config import ModelConfig
from bert_jax.model.flops import encoder_flops
from bert_jax.model.lora import LoraConfig
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.objectives.task import HEADS, ClassLoss, TaskObjective
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


@pytest.mark.parametrize("kind", ROWS)
def test_rows_without_labels_do_not_count(kind):
    rows = {"tokens": SEGMENT_IDS, "segment_ids": SEGMENT_IDS, "weights": WEIGHTS}
    objective = TaskObjective(ModelConfig(), TaskHeadConfig("classification"), kind)
    assert objective.counts(rows)["count"] == 0


CLASSES = ["single_label", "multi_label", "tags"]
RARE = (0.1, 0.05, 0.2, 0.15)  # the sum over a small batch is below 1


def mean_loss(kind, options, logits=None, weights=WEIGHTS):
    """The mean and its gradient, of the logits of `ROWS` by default."""
    given, labels = ROWS[kind]
    head = HEADS[kind]

    def mean(logits, labels, weights, segment_ids):
        counted = head.counted(labels, weights)
        losses = head.losses(logits, labels, segment_ids, options)
        return (losses * counted).sum() / head.count(labels, counted, options)

    logits = np.float32(given if logits is None else logits)
    found = jax.jit(jax.value_and_grad(mean))(logits, labels, weights, SEGMENT_IDS)
    return [np.asarray(each) for each in found]


@pytest.mark.parametrize("gamma", [0.5, 2.0])
@pytest.mark.parametrize("kind", CLASSES)
def test_focal_loss_is_that_of_the_paper(kind, gamma):
    """torchvision's formula: cross entropy times (1 - p_t) ** gamma, here times the weight."""
    logits, labels = (each[:2] for each in ROWS[kind])
    weights = np.array(RARE)
    if kind == "multi_label":
        p = 1 / (1 + np.exp(-logits))
        right = np.where(labels, p, 1 - p)
        expected = np.mean((1 - right) ** gamma * -np.log(right) * np.where(labels, weights, 1))
    else:
        each = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        right = np.take_along_axis(each, np.maximum(labels, 0)[..., None], -1)[..., 0]
        mine = weights[labels] * (labels >= 0)
        expected = np.sum((1 - right) ** gamma * -np.log(right) * mine) / np.sum(mine)
    loss, _ = mean_loss(kind, ClassLoss(RARE, focal_gamma=gamma))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_smoothed_label_is_spread_over_all_classes(kind):
    """Each class with its weight; of several labels, a yes is spread to a no and back."""
    logits, labels = (each[:2] for each in ROWS[kind])
    weights, share = np.array(RARE), 0.2
    if kind == "multi_label":
        p, yes = 1 / (1 + np.exp(-logits)), labels * (1 - share) + share / 2
        expected = -np.mean(yes * weights * np.log(p) + (1 - yes) * np.log(1 - p))
    else:
        each = -np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)) * weights
        own = np.take_along_axis(each, np.maximum(labels, 0)[..., None], -1)[..., 0]
        losses = ((1 - share) * own + share * each.mean(-1)) * (labels >= 0)
        expected = np.sum(losses) / np.sum(weights[labels] * (labels >= 0))
    loss, _ = mean_loss(kind, ClassLoss(RARE, label_smoothing=share))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", CLASSES)
def test_confident_rows_have_a_focal_gradient(kind):
    """1 - p is 0 in float32, and a power below 1 has no slope there."""
    sure = np.where(np.arange(4) == 2, 200.0, -200.0) + 0 * ROWS[kind][0]
    for loss, gradient in [mean_loss(kind, ClassLoss(focal_gamma=0.5), sure)]:
        assert np.isfinite(loss)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("options", [ClassLoss(RARE), ClassLoss(RARE, 0.0, 0.1)])
def test_a_loss_over_parts_is_that_over_the_whole(kind, options):
    """Denominators of parts add up, however unequal their labels."""
    _, labels = ROWS[kind]
    head = HEADS[kind]

    @jax.jit
    def count(labels, weights):
        return head.count(labels, head.counted(labels, weights), options)

    parts = sum(float(count(labels[n : n + 1], WEIGHTS[n : n + 1])) for n in range(3))
    np.testing.assert_allclose(parts, float(count(labels, WEIGHTS)), rtol=1e-6)


@pytest.mark.parity
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [(), RARE])
@pytest.mark.parametrize("kind", CLASSES)
def test_losses_and_gradients_are_torchs(kind, weights, smoothing):
    import torch

    logits, labels = (torch.tensor(np.asarray(each[:2])) for each in ROWS[kind])
    logits.requires_grad_()
    weight = torch.tensor(weights, dtype=torch.float64) if weights else None
    if kind == "multi_label":
        loss = torch.nn.BCEWithLogitsLoss(pos_weight=weight)(
            logits, labels.double() * (1 - smoothing) + smoothing / 2
        )
    else:
        loss = torch.nn.CrossEntropyLoss(weight, label_smoothing=smoothing, ignore_index=NO_LABEL)(
            logits.reshape(-1, 4), labels.long().reshape(-1)
        )
    loss.backward()
    found, gradient = mean_loss(kind, ClassLoss(weights, label_smoothing=smoothing))
    np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient[:2], logits.grad.numpy(), atol=1e-6)


def test_an_evaluation_has_the_plain_loss():
    """Runs with different weights, focal losses and smoothing compare by `eval/loss`."""
    options = ClassLoss((1.0, 3.0), focal_gamma=2.0, label_smoothing=0.1, lists="margin_mse")
    model = ModelConfig(vocab_size=30, num_positions=8, hidden_dim=8, num_layers=1, num_heads=2)
    objective = TaskObjective(model, TaskHeadConfig("classification"), "single_label", options)
    plain = TaskObjective(model, objective.config, "single_label", ClassLoss(lists="margin_mse"))
    assert objective.for_evaluation() == plain


def test_frozen_layers_have_no_backward_pass():
    model = ModelConfig(vocab_size=30, num_positions=8, hidden_dim=8, num_layers=2, num_heads=2)
    rows = {"tokens": np.zeros((1, 8), np.int32)}

    def flops(**more):
        return TaskObjective(model, TaskHeadConfig("classification"), "single_label", **more).flops(
            rows
        )

    encoder, embeddings = encoder_flops(model, 8), frozenset({"encoder/embeddings"})
    assert flops(frozen=embeddings) == flops()
    assert flops(frozen=embeddings, frozen_layers=1) == flops() - encoder
    assert flops(frozen=embeddings | {"encoder/layers"}) == flops() - 2 * encoder
    assert flops(frozen=frozenset({"encoder/layers"}), lora=LoraConfig(rank=2)) == flops()

"""Losses against a teacher, and their gradients, as torch computes them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_distillation import MODEL, OBJECTIVE, TEACHER_MODEL

from bert_jax.objectives.distillation import PROJECTION, DistillationConfig, relation_losses
from bert_jax.objectives.losses import binary_divergences, divergences

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

ROWS, LENGTH = 2, 5


def both(ours, theirs, *arrays):
    """Compare a sum of losses and its gradients by each array."""
    arrays = [np.asarray(x, np.float32) for x in arrays]
    value, slopes = jax.value_and_grad(lambda xs: ours(*xs).sum())([jnp.asarray(x) for x in arrays])
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    expected = theirs(*tensors).sum()
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    for slope, tensor in zip(slopes, tensors, strict=True):
        np.testing.assert_allclose(slope, tensor.grad.numpy(), atol=1e-5)


def kl(mine, theirs, temperature=1.0):
    soft = torch.softmax(theirs / temperature, -1)
    logs = torch.log_softmax(mine / temperature, -1)
    return temperature**2 * torch.nn.functional.kl_div(logs, soft, reduction="none").sum(-1)


def test_predictions():
    mine, theirs = np.random.default_rng(0).normal(size=(2, ROWS, 7)).astype(np.float32) * 2
    both(
        lambda x: divergences(x, jnp.asarray(theirs), 2.0),
        lambda x: kl(x, torch.tensor(theirs), 2.0),
        mine,
    )

    def binary(x):
        pairs = (torch.stack([torch.zeros_like(y), y], -1) for y in (x, torch.tensor(theirs)))
        return kl(*pairs, 2.0)

    both(lambda x: binary_divergences(x, jnp.asarray(theirs), 2.0), binary, mine)


def test_relations():
    rng = np.random.default_rng(1)
    student = rng.normal(size=(3, ROWS, LENGTH, 4, 4))
    teacher = rng.normal(size=(3, ROWS, LENGTH, 2, 16)).astype(np.float32)
    segments = np.array([[1, 1, 1, 2, 0], [1, 1, 1, 1, 1]])
    hidden = torch.tensor(segments[:, :, None] != segments[:, None])[:, None]

    def relations(x):
        x = x.reshape(ROWS, LENGTH, 4, -1).transpose(1, 2)
        scores = x @ x.transpose(-1, -2) / x.shape[-1] ** 0.5
        return scores.masked_fill(hidden, -1e30)

    both(
        lambda *xs: relation_losses(
            xs, tuple(jnp.asarray(t) for t in teacher), jnp.asarray(segments), 4
        ),
        lambda *xs: sum(
            kl(relations(x), relations(torch.tensor(t))).mean(1)
            for x, t in zip(xs, teacher, strict=True)
        ),
        *student,
    )


def test_hidden_states():
    rng = np.random.default_rng(2)
    objective = replace(OBJECTIVE, config=DistillationConfig("teacher", hidden_weight=1.0))
    assert (MODEL.num_layers, TEACHER_MODEL.num_layers) == (2, 4)
    student = rng.normal(size=(3, ROWS, LENGTH, 16))
    teacher = rng.normal(size=(5, ROWS, LENGTH, 32)).astype(np.float32)
    real = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    rows = {"segment_ids": jnp.asarray(real)}

    def ours(kernel, bias, *states):
        params = {PROJECTION: {"kernel": kernel, "bias": bias}}
        others = [jnp.asarray(t) for t in teacher]
        return objective.compare_layers(params, states, others, rows, None)["hidden_loss"]

    def theirs(kernel, bias, *states):
        pairs = zip(states, (teacher[n] for n in (0, 2, 4)), strict=True)
        each = [((x @ kernel + bias - torch.tensor(t)) ** 2).mean(-1) for x, t in pairs]
        return sum(each) / 3 * torch.tensor(real)

    both(ours, theirs, rng.normal(size=(16, 32)), rng.normal(size=32), *student)

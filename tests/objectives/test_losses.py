"""The pretraining loss: values, gradients, and that sums over parts add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.store import SpecialIds
from bert_jax.model.config import ModelConfig
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.masked_lm import MaskedLM, masked_sums, pair_sums
from bert_jax.objectives.masking import MaskingConfig

OBJECTIVE = MaskedLM(ModelConfig(), MaskingConfig(), SpecialIds(0, 1, 2, 3, 4))


def pretraining_sums(mlm_logits, labels, weights, nsp_logits, pair_labels):
    return masked_sums(mlm_logits, labels, weights) | pair_sums(nsp_logits, pair_labels)


def pretraining_loss(sums, mlm_count, nsp_count):
    return OBJECTIVE.loss(sums, {"mlm_count": mlm_count, "nsp_count": nsp_count})


def make_inputs(rows=6, positions=5, vocab=37, seed=0):
    rng = np.random.default_rng(seed)
    weights = np.arange(positions) < rng.integers(0, positions + 1, rows)[:, None]
    logits = rng.normal(size=(rows, positions, vocab))
    labels = rng.integers(0, vocab, (rows, positions))
    labels[:, ::2] = logits[:, ::2].argmax(-1)  # right answers, at unused positions too
    return {
        "mlm_logits": jnp.asarray(logits, jnp.float32),
        "labels": jnp.asarray(labels, jnp.int32),
        "weights": jnp.asarray(weights, jnp.float32),
        "nsp_logits": jnp.asarray(rng.normal(size=(rows, 2)), jnp.float32),
        "pair_labels": jnp.asarray(rng.integers(-1, 2, rows), jnp.int32),
    }


def test_values_against_float64():
    inputs = make_inputs()
    sums = jax.jit(pretraining_sums)(**inputs)
    mlm = np.asarray(inputs["mlm_logits"], np.float64)
    log_p = mlm - np.log(np.exp(mlm).sum(-1, keepdims=True))
    chosen = np.asarray(inputs["weights"]) > 0
    picked = np.take_along_axis(log_p, np.asarray(inputs["labels"])[..., None], -1)[..., 0]
    np.testing.assert_allclose(sums["mlm_loss"], -picked[chosen].sum(), rtol=1e-6)
    right = log_p.argmax(-1) == np.asarray(inputs["labels"])
    assert 0 < right[chosen].sum() < min(right.sum(), chosen.sum())
    assert sums["mlm_correct"] == right[chosen].sum()
    assert sums["mlm_count"] == chosen.sum()

    nsp = np.asarray(inputs["nsp_logits"], np.float64)
    labels = np.asarray(inputs["pair_labels"])
    has_pair = labels >= 0
    assert 0 < has_pair.sum() < len(labels)
    log_p = nsp - np.log(np.exp(nsp).sum(-1, keepdims=True))
    expected = -log_p[np.arange(len(labels)), labels][has_pair].sum()
    np.testing.assert_allclose(sums["nsp_loss"], expected, rtol=1e-6)
    assert sums["nsp_correct"] == (nsp.argmax(-1) == labels)[has_pair].sum()
    assert sums["nsp_count"] == has_pair.sum()
    assert sums["nsp_ones"] == (labels == 1).sum() != (labels == 0).sum()


def test_accuracy_of_known_answers():
    logits = jnp.array([[0.0, 3.0, 1.0], [5.0, 0.0, 1.0]])
    _, correct = cross_entropy(logits, jnp.array([1, 2]))
    np.testing.assert_array_equal(correct, [1.0, 0.0])


@pytest.mark.parametrize("padded", [-jnp.inf, -1e30])
def test_padded_columns_get_no_probability_and_no_gradient(padded):
    inputs = make_inputs()
    wide = jnp.pad(inputs["mlm_logits"], ((0, 0), (0, 0), (0, 11)), constant_values=float(padded))
    np.testing.assert_allclose(
        cross_entropy(wide, inputs["labels"])[0],
        cross_entropy(inputs["mlm_logits"], inputs["labels"])[0],
        rtol=1e-6,
    )
    gradient = jax.grad(lambda x: cross_entropy(x, inputs["labels"])[0].sum())(wide)
    assert np.all(np.asarray(gradient[..., -11:]) == 0)
    assert np.all(np.isfinite(gradient))


def test_gradient_equals_automatic_differentiation():
    inputs = make_inputs()
    weights = inputs["weights"]

    def ours(logits):
        return (cross_entropy(logits, inputs["labels"])[0] * weights).sum()

    def reference(logits):
        log_p = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_p, inputs["labels"][..., None], -1)[..., 0]
        return -(picked * weights).sum()

    logits = inputs["mlm_logits"] * 5
    np.testing.assert_allclose(jax.grad(ours)(logits), jax.grad(reference)(logits), atol=1e-6)


def test_large_logits_stay_finite():
    logits = jnp.array([[1e4, -1e4, 0.0]])
    loss, _ = cross_entropy(logits, jnp.array([1]))
    np.testing.assert_allclose(loss, [2e4])


def test_bfloat16_logits_are_reduced_in_float32():
    # 4096 equal logits: a bfloat16 sum stops growing at 256.
    loss, _ = cross_entropy(jnp.zeros((1, 4096), jnp.bfloat16), jnp.array([0]))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, np.log(4096), rtol=1e-6)


def test_sums_over_unequal_parts_add_up():
    inputs = make_inputs(rows=7)
    sums_of = jax.jit(pretraining_sums)
    whole = sums_of(**inputs)
    parts = [
        sums_of(**{name: value[rows] for name, value in inputs.items()})
        for rows in (slice(0, 1), slice(1, 5), slice(5, 7))
    ]
    added = jax.tree.map(lambda *values: sum(values), *parts)
    for name, value in whole.items():
        np.testing.assert_allclose(added[name], value, rtol=1e-6)
    counts = whole["mlm_count"], whole["nsp_count"]
    assert counts[0] != counts[1]
    np.testing.assert_allclose(
        pretraining_loss(whole, *counts),
        whole["mlm_loss"] / counts[0] + whole["nsp_loss"] / counts[1],
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        sum(pretraining_loss(part, *counts) for part in parts),
        pretraining_loss(whole, *counts),
        rtol=1e-6,
    )
    mean_of_means = sum(pretraining_loss(p, p["mlm_count"], p["nsp_count"]) for p in parts) / 3
    assert abs(mean_of_means - pretraining_loss(whole, *counts)) > 0.01


def test_nothing_labelled_gives_zero_and_no_nan():
    inputs = make_inputs()
    inputs["weights"] *= 0
    inputs["pair_labels"] = jnp.full_like(inputs["pair_labels"], -1)

    def loss(mlm_logits, nsp_logits):
        sums = pretraining_sums(**{**inputs, "mlm_logits": mlm_logits, "nsp_logits": nsp_logits})
        return pretraining_loss(sums, sums["mlm_count"], sums["nsp_count"]), sums

    (value, sums), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        inputs["mlm_logits"], inputs["nsp_logits"]
    )
    assert value == 0
    assert len(sums) == 7
    assert set(map(float, sums.values())) == {0.0}
    assert all(np.all(np.asarray(g) == 0) for g in gradients)

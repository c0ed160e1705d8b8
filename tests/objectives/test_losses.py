"""The pretraining loss: values, gradients, and that sums over parts add up."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import Projection
from bert_jax.objectives import masked_lm
from bert_jax.objectives.losses import (
    cross_entropy,
    cross_entropy_in_blocks,
    num_blocks,
    recomputed_cross_entropy,
)
from bert_jax.objectives.masked_lm import MaskedLM, pair_sums
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.objectives.objective import judged_sums
from bert_jax.tokenization.special_ids import SpecialIds

entropy = jax.jit(cross_entropy)
OBJECTIVE = MaskedLM(ModelConfig(), MaskingConfig(), SpecialIds(0, 1, 2, 3, 4))


@jax.jit
def pretraining_sums(mlm_logits, labels, weights, nsp_logits, pair_labels):
    return judged_sums("mlm", *cross_entropy(mlm_logits, labels), weights) | pair_sums(
        nsp_logits, pair_labels
    )


@jax.jit
def pretraining_loss(sums, mlm_count, nsp_count):
    return OBJECTIVE.loss(sums, {"mlm_count": mlm_count, "nsp_count": nsp_count})


def make_inputs(rows=6, positions=5, vocab=37, seed=0):
    rng = np.random.default_rng(seed)
    weights = np.arange(positions) < rng.integers(0, positions + 1, rows)[:, None]
    logits = rng.normal(size=(rows, positions, vocab))
    labels = rng.integers(0, vocab, (rows, positions))
    labels[:, ::2] = logits[:, ::2].argmax(-1)  # right answers, at unused positions too
    return {
        "mlm_logits": logits.astype(np.float32),
        "labels": labels.astype(np.int32),
        "weights": weights.astype(np.float32),
        "nsp_logits": rng.normal(size=(rows, 2)).astype(np.float32),
        "pair_labels": rng.integers(-1, 2, rows).astype(np.int32),
    }


def test_values_against_float64():
    inputs = make_inputs()
    sums = jax.device_get(pretraining_sums(**inputs))
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
    logits = np.float32([[0.0, 3.0, 1.0], [5.0, 0.0, 1.0]])
    _, correct = entropy(logits, np.array([1, 2]))
    np.testing.assert_array_equal(correct, [1.0, 0.0])


@pytest.mark.parametrize("padded", [-np.inf, -1e30])
def test_padded_columns_get_no_probability_and_no_gradient(padded):
    inputs = make_inputs()
    wide = np.pad(inputs["mlm_logits"], ((0, 0), (0, 0), (0, 11)), constant_values=padded)
    np.testing.assert_allclose(
        entropy(wide, inputs["labels"])[0],
        entropy(inputs["mlm_logits"], inputs["labels"])[0],
        rtol=1e-6,
    )
    slope = jax.jit(jax.grad(lambda x, labels: cross_entropy(x, labels)[0].sum()))
    gradient = np.asarray(slope(wide, inputs["labels"]))
    assert np.all(gradient[..., -11:] == 0)
    assert np.all(np.isfinite(gradient))


def test_gradient_equals_automatic_differentiation():
    inputs = make_inputs()
    weights = inputs["weights"]

    def ours(logits):
        return (cross_entropy(logits, jnp.asarray(inputs["labels"]))[0] * weights).sum()

    def reference(logits):
        log_p = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_p, inputs["labels"][..., None], -1)[..., 0]
        return -(picked * weights).sum()

    logits = inputs["mlm_logits"] * 5
    found, wanted = (jax.jit(jax.grad(f))(logits) for f in (ours, reference))
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_large_logits_stay_finite():
    logits = np.float32([[1e4, -1e4, 0.0]])
    loss, _ = entropy(logits, np.array([1]))
    np.testing.assert_allclose(loss, [2e4])


def test_bfloat16_logits_are_reduced_in_float32():
    # 4096 equal logits: a bfloat16 sum stops growing at 256.
    loss, _ = entropy(np.zeros((1, 4096), jnp.bfloat16), np.array([0]))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, np.log(4096), rtol=1e-6)


def test_sums_over_unequal_parts_add_up():
    inputs = make_inputs(rows=7)
    whole = jax.device_get(pretraining_sums(**inputs))
    parts = [
        jax.device_get(pretraining_sums(**{name: value[rows] for name, value in inputs.items()}))
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
    inputs["pair_labels"] = np.full_like(inputs["pair_labels"], -1)

    def loss(mlm_logits, nsp_logits):
        sums = pretraining_sums(**{**inputs, "mlm_logits": mlm_logits, "nsp_logits": nsp_logits})
        return pretraining_loss(sums, sums["mlm_count"], sums["nsp_count"]), sums

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, sums), gradients = run(inputs["mlm_logits"], inputs["nsp_logits"])
    assert value == 0
    assert len(sums) == 7
    assert set(map(float, sums.values())) == {0.0}
    assert all(np.all(np.asarray(g) == 0) for g in gradients)


@pytest.mark.parametrize(
    "without_logits", [lambda *a: cross_entropy_in_blocks(*a, 4), recomputed_cross_entropy]
)
def test_losses_without_stored_logits_have_their_values_and_gradients(without_logits):
    rng = np.random.default_rng(3)
    states, table = (rng.normal(size=s).astype(np.float32) for s in ((2, 5, 8), (48, 8)))
    bias = np.where(np.arange(48) < 45, rng.normal(size=48), -1e30).astype(np.float32)
    labels = rng.integers(0, 45, (2, 5)).astype(np.int32)
    logits = states @ table.T + bias
    labels[0] = logits[0].argmax(-1)  # right answers
    weights = rng.normal(size=(2, 5)).astype(np.float32)

    def value_and_gradients(entropy):
        def loss(*arrays):
            loss, correct = entropy(*arrays)
            return (loss * weights).sum(), (loss, correct)

        pair = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
        return jax.device_get(pair(states, table, bias, labels))

    found = value_and_gradients(without_logits)
    whole = value_and_gradients(lambda s, t, b, labels: cross_entropy(s @ t.T + b, labels))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, whole)
    np.testing.assert_array_equal(found[0][1][1][0], 1.0)
    assert np.all(found[1][2][45:] == 0)  # padding columns


def test_wide_vocabularies_are_cut_into_equal_blocks():
    assert [num_blocks(n) for n in (128, 4096, 8192, 30592, 50432)] == [1, 1, 1, 8, 16]


@pytest.mark.parametrize(
    ("device", "dtype", "rows", "wanted"),
    [("cpu", "float32", 2, "scan["), ("tpu", "bfloat16", 6000, "vocabulary_normalisers"),
     ("tpu", "bfloat16", 2, ""), ("tpu", "float32", 6000, ""), ("gpu", "bfloat16", 6000, "")],
)  # fmt: skip
def test_each_device_computes_the_loss_as_suits_it(monkeypatch, device, dtype, rows, wanted):
    shapes = {(1, rows, 4): dtype, (6144, 4): dtype, (6144,): "float32"}
    projection = Projection(*(jax.ShapeDtypeStruct(*each) for each in shapes.items()))
    labels = jax.ShapeDtypeStruct((1, rows), jnp.int32)
    monkeypatch.setattr(masked_lm, "platform", lambda layout: device)
    run = partial(masked_lm.projected_cross_entropy, layout=None)
    program = str(jax.make_jaxpr(run)(projection, labels))
    special = {name for name in ("scan[", "vocabulary_normalisers") if name in program}
    assert special == ({wanted} if wanted else set())


def test_a_cpu_transposes_states_and_not_the_slopes_of_logits():
    """The slopes have 8,000 columns in translation, the states 256."""
    shapes = (2, 24, 16), (80, 16), (80,)
    gradient = jax.grad(lambda *parts: jnp.sum(jnp.sin(Projection(*parts).logits())), (0, 1, 2))
    shaped = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    program = jax.jit(gradient).lower(*shaped).compile().as_text()
    assert "f32[2,24,80]" in program  # slopes by rows
    assert not re.search(r"f32\[80,(48|2,24)\]", program)

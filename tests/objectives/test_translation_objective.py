"""Translation: labels, smoothing, sums of parts and on meshes, packed rows, and what it learns."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_pairs import SPECIAL, batch, random_pairs
from steps import batch_gradients

from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh, place_batch
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.objectives.config import TranslationConfig
from bert_jax.objectives.losses import cross_entropy, smoothed_cross_entropy
from bert_jax.objectives.objective import evaluated
from bert_jax.objectives.translation import Translation, next_tokens
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import StepConfig, jitted_init, param_placement
from bert_jax.training.steps.step import make_train_step

V, S, T = 40, 24, 20
MODEL = ModelConfig(
    vocab_size=V, num_positions=24, num_types=0, hidden_dim=16, num_layers=2, num_heads=4,
    mlp_dim=24, init_std=0.2, dtype="float32", positions="sinusoidal", scale_embeddings=True,
    embedding_norm=False, head_transform=False, activation="relu",
)  # fmt: skip


def translation(model=MODEL, **options):
    network = TranslationConfig(**options).network(model)
    return Translation(model, network, SPECIAL, 0.1)


def step_config(objective, **options):
    return StepConfig(objective, OptimizerConfig(learning_rate=1e-3), num_steps=10, **options)


PAIRS = random_pairs(19, V, seed=3)
# Unequal: three pairs in some rows, two in others, and a row of padding alone.
ROWS = [PAIRS[3 * n : 3 * n + 3] for n in range(5)] + [PAIRS[15:17], PAIRS[17:19], []]
BATCH = batch(ROWS, S, T)
PREPARED = translation().prepare(BATCH, 0)


def test_labels_are_the_next_tokens_of_the_segment_and_then_the_end():
    tokens = jnp.array([[2, 7, 8, 2, 9, 0, 0]], jnp.uint16)
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0]], jnp.uint8)
    labels = np.asarray(next_tokens(tokens, segments, 3))
    assert labels[0, :5].tolist() == [7, 8, 3, 9, 3]
    np.testing.assert_array_equal(
        np.asarray(PREPARED["weights"]).sum(1), [sum(len(b) + 1 for _, b in row) for row in ROWS]
    )


smoothed = jax.jit(smoothed_cross_entropy, static_argnums=(2, 3))


def test_smoothing_spreads_over_the_real_columns_only():
    random = np.random.default_rng(0)
    real = random.normal(size=(5, 7)).astype(np.float32)
    logits = np.pad(real, ((0, 0), (0, 3)), constant_values=-1e30)
    labels = np.array([0, 1, 6, 3, 3], np.int32)
    loss, plain, correct = smoothed(logits, labels, 0.1, 7)
    log_p = real - np.log(np.exp(real.astype(np.float64)).sum(-1, keepdims=True))
    picked = log_p[np.arange(5), labels]
    np.testing.assert_allclose(plain, -picked, rtol=1e-5)
    np.testing.assert_allclose(loss, -(0.9 * picked + 0.1 * log_p.mean(-1)), rtol=1e-5)
    np.testing.assert_array_equal(correct, log_p.argmax(-1) == labels)
    uniform, _, _ = smoothed(np.zeros((2, 7), np.float32), labels[:2], 0.1, 7)
    np.testing.assert_allclose(uniform, np.log(7), rtol=1e-6)


def test_gradients_of_the_smoothed_loss():
    random = np.random.default_rng(1)
    logits = random.normal(size=(4, 9)).astype(np.float32)
    logits[:, 6:] = -1e30
    labels, weights = jnp.array([0, 5, 2, 2]), random.normal(size=(2, 4))

    def ours(logits):
        loss, plain, _ = smoothed_cross_entropy(logits, labels, 0.2, 6)
        return jnp.sum(loss * weights[0] + plain * weights[1])

    def formula(logits):
        log_p = jax.nn.log_softmax(logits)
        picked, mean = log_p[jnp.arange(4), labels], log_p[:, :6].mean(-1)
        return -jnp.sum((0.8 * picked + 0.2 * mean) * weights[0] + picked * weights[1])

    found, expected = jax.jit(lambda x: (jax.grad(ours)(x), jax.grad(formula)(x)))(logits)
    np.testing.assert_allclose(found[:, :6], expected[:, :6], atol=1e-5)
    assert not np.asarray(found[:, 6:]).any()


def test_no_smoothing_is_the_cross_entropy_to_the_bit():
    logits = np.random.default_rng(2).normal(size=(3, 11)).astype(np.float32)
    labels = jnp.array([4, 0, 10])
    gradient = jax.jit(jax.grad(lambda x: cross_entropy(x, labels)[0].sum()))(logits)
    loss, plain, _ = smoothed(logits, labels, 0.0, 11)
    np.testing.assert_array_equal(loss, plain)
    other = jax.jit(jax.grad(lambda x: smoothed_cross_entropy(x, labels, 0.0, 11)[0].sum()))(logits)
    np.testing.assert_array_equal(gradient, other)


def test_metrics_are_without_smoothing():
    objective = replace(translation(), baseline=3.0)
    sums = {
        "translation_loss": 20.0, "translation_correct": 4.0, "target_count": 10.0,
        "smoothed_loss": 99.0,
    }  # fmt: skip
    values = evaluated(objective, sums)
    assert values["eval/translation_loss"] == 2
    assert values["eval/perplexity"] == pytest.approx(np.exp(2))
    assert values["eval/nats_below_unigram"] == 1
    counts = {"target_count": jnp.float32(5)}
    assert objective.loss({"smoothed_loss": jnp.float32(10)}, counts) == 2


@pytest.fixture(scope="module")
def reference():
    """Gradients and sums of the batch on one device, and the parameters."""
    config = step_config(translation())
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    params = jitted_init(config, mesh)(jax.random.key(0)).params
    grads, sums = jax.jit(lambda p, rows: batch_gradients(config, mesh, p, rows, None))(
        params, PREPARED
    )
    return jax.device_get((params, grads, sums))


def check(config, mesh_sizes, reference):
    params, grads, sums = reference
    mesh = make_mesh(MeshConfig(*mesh_sizes))
    placed = jax.device_put(params, param_placement(config, mesh))
    rows = place_batch({name: np.asarray(x) for name, x in PREPARED.items()}, mesh)
    found = jax.jit(lambda p, rows: batch_gradients(config, mesh, p, rows, None))(placed, rows)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves((grads, sums)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def test_rows_over_eight_devices_have_the_sums_of_one(reference):
    check(step_config(translation()), (8, 1, 1), reference)


def test_a_mesh_of_three_axes_and_micro_batches_have_the_sums_of_one(reference):
    check(step_config(translation(), accumulation=2), (2, 2, 2), reference)


def test_a_scan_over_layers_has_the_sums_of_straight_code(reference):
    model = replace(MODEL, scan_unroll=1, remat="full")
    check(step_config(translation(model)), (2, 4, 1), reference)


def test_packed_rows_have_the_loss_and_gradients_of_single_pairs(reference):
    params, grads, sums = reference
    config = step_config(translation())
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    apart = config.objective.prepare(batch([[pair] for pair in PAIRS], 8, 8), 0)
    found, theirs = jax.jit(lambda p, rows: batch_gradients(config, mesh, p, rows, None))(
        params, apart
    )
    for name, value in sums.items():
        np.testing.assert_allclose(theirs[name], value, rtol=1e-6)
    scale = max(np.abs(x).max() for x in jax.tree.leaves(grads))
    for ours, packed in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(ours, packed, atol=1e-5 * scale)


def test_a_step_learns_pairs_by_heart_and_counts_both_sides():
    """Dropout, guard and optimizer, as in a run."""
    model = replace(MODEL, hidden_dropout_rate=0.05, attention_dropout_rate=0.05)
    config = replace(
        step_config(translation(model)),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5, schedule="inverse_sqrt"),
        num_steps=60,
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state = jitted_init(config, mesh)(jax.random.key(0))
    step = make_train_step(config, mesh)
    losses = []
    for number in range(60):
        rows = {**BATCH, "row_index": BATCH["row_index"] + np.uint32(8 * number)}
        state, metrics = step(state, place_batch(rows, mesh))
        losses.append(float(metrics["translation_loss"]))
    real = (BATCH["segment_ids"] > 0).sum() + (BATCH["target_segment_ids"] > 0).sum()
    assert int(metrics["num_tokens"]) == real
    assert losses[0] > 2.5
    assert losses[-1] < 2.0  # 1.4; the unigram entropy of so few targets is 3.3


def test_options_that_cannot_be_are_refused():
    with pytest.raises(UserError, match=r"objective\.label_smoothing is 1\.0.*\[0, 1\)"):
        TranslationConfig(label_smoothing=1.0)
    with pytest.raises(UserError, match=r"objective\.num_decoder_layers is -1"):
        TranslationConfig(num_decoder_layers=-1)

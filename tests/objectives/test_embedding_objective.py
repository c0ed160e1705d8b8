"""Losses of embedding models written out, and the same gradients on any mesh and in parts."""

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax
from steps import batch_gradients

from bert_jax.distributed.parallel.sharding import (
    MeshConfig,
    batch_sharding,
    make_mesh,
    make_trial_mesh,
    place_batch,
)
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.embedding import EmbeddingConfig, finish, pool_tokens
from bert_jax.model.flops import TRAIN_OVER_FORWARD, encoder_flops
from bert_jax.objectives.embedding import (
    Compared,
    ContrastConfig,
    EmbeddingObjective,
    class_losses,
    ranking_losses,
    score_losses,
)
from bert_jax.objectives.objective import trained
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import StepConfig, jitted_init, state_shardings
from bert_jax.training.steps.step import dropout_seed, make_train_step
from bert_jax.training.steps.trials import init_trials, place_rows, place_settings

RNG = np.random.default_rng(0)
B, G, D, TEMPERATURE = 6, 4, 5, 0.2
TEXTS = np.arange(B * G, dtype=np.int32).reshape(B, G)
TEXTS[1, 0] = TEXTS[0, 0]  # the query of 0 again, with a document of its own
TEXTS[2, 1] = TEXTS[0, 1]  # another query of the document of 0
TEXTS[3, 2] = TEXTS[0, 1]  # a hard negative of 3 is the document of 0
TEXTS[4, 3] = TEXTS[4, 0]  # a query among its own negatives
TEXTS[4, 2] = TEXTS[3, 0]  # the query of 3 as a document
PRESENT = np.ones((B, G), bool)
PRESENT[2, 3] = False
WEIGHTS = np.array([1, 1, 1, 1, 1, 0], np.float32)  # the last group fills the batch


def groups(size=G, labels=None):
    vectors = RNG.normal(size=(B, size, D))
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    return Compared(
        vectors.astype(np.float32), np.arange(B, dtype=np.uint32), WEIGHTS, TEXTS[:, :size],
        PRESENT[:, :size], labels,
    )  # fmt: skip


def part(compared, rows):
    return jax.tree.map(lambda x: x[rows], compared)


def nats(right, others):
    """Cross entropy of one cosine among others."""
    logits = np.array([right, *others], np.float64) / TEMPERATURE
    return np.log(np.exp(logits).sum()) - logits[0]


def ranked(v, i):
    own = {TEXTS[i, 0], TEXTS[i, 1]}
    others = []
    for j in range(5):
        for c in range(1, G):
            is_own = TEXTS[j, c] in own or (c == 1 and TEXTS[j, 0] == TEXTS[i, 0])
            if (j, c) != (i, 1) and PRESENT[j, c] and not is_own:
                others.append(v[i, 0] @ v[j, c])
    queries = [
        v[i, 1] @ v[j, 0]
        for j in range(5)
        if j != i and TEXTS[j, 0] not in own and TEXTS[j, 1] != TEXTS[i, 1]
    ]
    right = v[i, 0] @ v[i, 1]
    return nats(right, others), nats(right, queries)


def test_ranking_written_out():
    """No copy of a pair's own text is its negative, nor what only fills, nor what is not there."""
    every = groups()
    expected = np.array([ranked(every.vectors, i) for i in range(5)])
    run = jax.jit(ranking_losses, static_argnums=(2, 3))
    for symmetric, wanted in ((False, expected[:, 0]), (True, expected.mean(axis=1))):
        losses = run(every, every, TEMPERATURE, symmetric)
        np.testing.assert_allclose(losses[:5], wanted, rtol=1e-5)
        assert np.isfinite(losses[5])
        some = run(part(every, slice(2, 4)), every, TEMPERATURE, symmetric)
        np.testing.assert_allclose(some, wanted[2:4], rtol=1e-5)


def test_scores_written_out():
    scores = np.array([1.0, 3.0, 2.0, 2.0, 0.5, 9.0], np.float32)
    every = groups(2, scores)
    cosines = (every.vectors[:, 0] * every.vectors[:, 1]).sum(-1)
    total = 1.0 + sum(
        np.exp((cosines[i] - cosines[j]) / TEMPERATURE)
        for i in range(5)
        for j in range(5)
        if scores[i] < scores[j]
    )
    losses = jax.jit(score_losses, static_argnums=2)(part(every, slice(3)), every, TEMPERATURE)
    np.testing.assert_allclose(losses, [np.log(total)] * 3, rtol=1e-5)


def test_classes_written_out():
    """A text alone in its class has no loss; a copy of a text is neither like it nor unlike it."""
    classes = np.array([0, 0, 1, 0, 2, 2], np.int32)
    every = groups(1, classes)  # the text of 1 is that of 0
    v = every.vectors[:, 0]

    def expected(i):
        others = [j for j in range(5) if TEXTS[j, 0] != TEXTS[i, 0]]
        alike = [j for j in others if classes[j] == classes[i]]
        losses = [nats(v[i] @ v[j], [v[i] @ v[k] for k in others if k != j]) for j in alike]
        return np.mean(losses) if losses else 0.0

    losses = jax.jit(class_losses, static_argnums=2)(every, every, TEMPERATURE)
    np.testing.assert_allclose(losses[:5], [expected(i) for i in range(5)], rtol=1e-5)
    assert losses[2] == losses[4] == 0.0
    objective = EmbeddingObjective(MODEL, ContrastConfig().of_model(), "classes", 1)
    rows = make_rows(1, classes, size=B)
    rows |= {"weights": WEIGHTS, "text_ids": TEXTS[:, :1]}
    assert jax.jit(objective.counts)(rows)["count"] == 3


@pytest.mark.parametrize("symmetric", [False, True])
def test_leading_numbers_are_vectors_of_length_1_with_weights_of_their_own(symmetric):
    every = groups()
    weights = {D: 1.0, 3: 0.5, 2: 2.0}
    expected = np.zeros(5)
    for size, weight in weights.items():
        part = every.vectors[..., :size]
        part = part / np.linalg.norm(part, axis=-1, keepdims=True)
        losses = np.array([ranked(part, i) for i in range(5)])
        expected += weight * (losses.mean(1) if symmetric else losses[:, 0])
    contrast = ContrastConfig(
        temperature=TEMPERATURE, symmetric=symmetric, dimensions=(3, 2),
        dimension_weights=(0.5, 2.0),
    )  # fmt: skip
    objective = EmbeddingObjective(MODEL, contrast.of_model(), "ranking", G, contrast)
    rows = {
        "segment_ids": PRESENT[..., None].astype(np.int32),
        "row_index": every.row_index, "weights": WEIGHTS, "text_ids": TEXTS,
    }  # fmt: skip
    sums = jax.jit(objective.compare, static_argnums=2)(every.vectors, rows, None)
    assert sums["count"] == 5
    np.testing.assert_allclose(sums["loss"], expected.sum(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["ranking", "scores", "kl"])
def test_labels_of_another_kind_have_no_loss(kind):
    """Those of dev rows, which need not be of the kind of the training rows."""
    every = groups()
    objective = EmbeddingObjective(MODEL, ContrastConfig().of_model(), kind, G)
    rows = {
        "segment_ids": PRESENT[..., None].astype(np.int32),
        "row_index": every.row_index, "weights": WEIGHTS, "text_ids": TEXTS,
        **({} if kind == "scores" else {"labels": np.arange(B, dtype=np.float32)}),
    }  # fmt: skip
    sums = jax.jit(objective.compare, static_argnums=2)(every.vectors, rows, None)
    assert (sums["loss"], sums["count"]) == (0, 0)


def test_vectors_are_pooled_over_the_tokens_that_are_there():
    random = np.random.default_rng(0)
    hidden, score = random.normal(size=(2, 4, 16)), random.normal(size=16)
    some = hidden[0, :3]
    wanted = {
        "mean": some.mean(0), "cls": some[0], "last": some[2],
        "weighted": softmax(some @ score) @ some, "max": some.max(0),
        "mean_sqrt_len": some.sum(0) / np.sqrt(3),
    }  # fmt: skip
    params = {"pooling": {"score": jnp.float32(score)}}
    segments = jnp.array([[1, 1, 1, 0], [0] * 4])
    for pooling, vector in wanted.items():
        found = pool_tokens(pooling, jnp.float32(hidden), segments > 0, params)
        np.testing.assert_allclose(found, [vector, np.zeros(16)], atol=1e-6)


def test_vectors_are_cut_before_they_are_normed():
    vectors = jnp.float32([[3, 4, 12]])
    for config, size, wanted in (
        (EmbeddingConfig(), 2, [0.6, 0.8]), (EmbeddingConfig(), 0, [3 / 13, 4 / 13, 12 / 13]),
        (EmbeddingConfig(normalize=False), 2, [3, 4]),
    ):  # fmt: skip
        np.testing.assert_allclose(finish(config, vectors, size), [wanted], rtol=1e-6)


MODEL = ModelConfig(
    vocab_size=60, num_positions=16, hidden_dim=16, num_layers=1, num_heads=4, mlp_dim=32,
    scan_unroll=1,
)  # fmt: skip
ROWS = 16


def make_rows(group, labels=None, size=ROWS):
    """Groups whose first row is short, some without their last row; copies of texts."""
    random = np.random.default_rng(1)
    lengths = random.integers(3, 13, (size, group))
    lengths[:, 0] = random.integers(3, 7, size)
    texts = random.integers(0, 3 * size, (size, group)).astype(np.int32)
    if group > 2:
        lengths[::5, -1] = 0
    segments = (np.arange(12) < lengths[..., None]).astype(np.int32)
    tokens = random.integers(5, 60, segments.shape).astype(np.int32) * segments
    rows = {"tokens": tokens, "type_ids": 0 * segments, "segment_ids": segments}
    rows = {name: array if group > 1 else array[:, 0] for name, array in rows.items()}
    return rows | {
        "weights": (np.arange(size) < size - 1).astype(np.float32),
        "row_index": np.arange(size, dtype=np.uint32),
        "text_ids": texts,
        **({} if labels is None else {"labels": labels}),
    }


CASES = {
    "ranking": (
        ContrastConfig("weighted", symmetric=True, dimensions=(8, 4), dimension_weights=(0.5, 2.0)),
        make_rows(3),
    ),
    "scores": (ContrastConfig("last"), make_rows(2, RNG.integers(0, 5, ROWS).astype(np.float32))),
    "classes": (ContrastConfig("mean"), make_rows(1, RNG.integers(0, 4, ROWS).astype(np.int32))),
    "ranking, sparse": (
        ContrastConfig("splade", symmetric=True, query_flops=0.3, document_flops=0.2), make_rows(3),
    ),
    "kl, static queries": (
        ContrastConfig("splade", queries="idf", query_flops=0.3, document_flops=0.2),
        make_rows(3, RNG.normal(size=(ROWS, 2)).astype(np.float32)),
    ),
}  # fmt: skip


def one_device():
    return make_mesh(MeshConfig(1), jax.devices()[:1])


def step_of(kind, **settings):
    contrast, rows = CASES[kind]
    group = rows["text_ids"].shape[1]
    static = {"frozen": frozenset({"queries"})} if contrast.queries != "encoder" else {}
    kept, compared = contrast.of_model(), kind.split(",")[0]
    objective = EmbeddingObjective(MODEL, kept, compared, group, contrast, 6, **static)
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=1)
    return StepConfig(objective, optimizer, num_steps=10, seed=7, **settings), rows


@lru_cache
def params_of(kind):
    params = jax.device_get(jitted_init(step_of(kind)[0], one_device())(jax.random.key(0)).params)
    if "pooling" in params:  # else all tokens weigh the same
        params["pooling"]["score"] = RNG.normal(size=16).astype(np.float32)
    if "queries" in params:
        params["queries"] = RNG.random(60).astype(np.float32)
    return params


def gradients_on(kind, mesh, accumulation=1, **changes):
    config, rows = step_of(kind, accumulation=accumulation)
    config = replace(config, objective=replace(config.objective, **changes))
    shardings = state_shardings(config, mesh).params

    def run(params, rows):
        return batch_gradients(config, mesh, params, rows, dropout_seed(config, 7, jnp.int32(3)))

    jitted = jax.jit(
        run, in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(trained(config.objective, shardings), None),
    )  # fmt: skip
    params = jax.device_put(params_of(kind), shardings)
    return jax.device_get(jitted(params, place_batch(rows, mesh)))


@lru_cache
def expected(kind):
    return gradients_on(kind, one_device())


def assert_the_same(found, wanted, tolerance=1e-5):
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=tolerance, err_msg=name)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted[0]))
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=tolerance * largest),
        found[0], wanted[0],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sizes", "accumulation"),
    [
        ("ranking", (8, 1, 1), 1),
        ("ranking", (2, 2, 2), 4),
        ("scores", (2, 4, 1), 1),
        ("scores", (1, 4, 2), 2),
        ("classes", (4, 2, 1), 2),
        ("ranking, sparse", (2, 2, 2), 4),
        ("kl, static queries", (2, 4, 1), 1),
    ],
)
def test_every_mesh_gives_the_loss_and_gradients_of_one_device(kind, sizes, accumulation):
    """Negatives are those of all devices, and of all micro-batches."""
    assert expected(kind)[1]["loss"] > 0.1
    assert_the_same(gradients_on(kind, make_mesh(MeshConfig(*sizes)), accumulation), expected(kind))


@pytest.mark.parametrize("kind", ["ranking", "ranking, sparse", "kl, static queries"])
def test_micro_batches_give_the_gradients_of_one_batch(kind):
    assert_the_same(gradients_on(kind, one_device(), 8), expected(kind), 1e-6)


def test_micro_batches_repeat_dropout():
    """Both passes over the rows have the same."""
    other = gradients_on("ranking", one_device(), 8, model=replace(MODEL, hidden_dropout_rate=0.3))
    assert not np.allclose(other[1]["loss"], expected("ranking")[1]["loss"], rtol=1e-3)


def test_short_queries_lose_padding_alone():
    assert_the_same(gradients_on("ranking", one_device(), query_length=0), expected("ranking"))


def test_short_queries_cost_less():
    config, rows = step_of("ranking")
    row = 2 * encoder_flops(MODEL, 12) + encoder_flops(MODEL, 6)
    assert config.objective.flops(rows) == TRAIN_OVER_FORWARD * row // 3


def test_what_is_refused():
    with pytest.raises(UserError, match=r"embedding\.temperature is 0"):
        ContrastConfig(temperature=0.0)
    with pytest.raises(UserError, match=r"embedding.dimensions is \(4, 8\).*descend"):
        ContrastConfig(dimensions=(4, 8))
    with pytest.raises(UserError, match="expected one weight for each"):
        ContrastConfig(dimensions=(8, 4), dimension_weights=(1.0,))
    with pytest.raises(UserError, match=r"have 16\s+numbers"):
        ContrastConfig(dimensions=(32,)).of_model().check_width(16)


def test_trials_side_by_side():
    """Each trial is compared with the rows of its own batch, on all of its devices."""
    config, rows = step_of("classes", accumulation=2)
    batches = {
        name: np.stack([array, np.roll(array, 3, axis=0)] * 2) for name, array in rows.items()
    }
    batches["row_index"] = np.stack([rows["row_index"]] * 4)
    found = []
    for devices, data in ((1, 1), (4, 2)):
        mesh = make_trial_mesh(MeshConfig(data=data), 4, jax.devices()[:devices])
        seeds = np.array([0, 0, 1, 2], np.uint32)
        state = init_trials(config, mesh, seeds, [{}], np.zeros(4, np.int32)).train
        settings = place_settings([1.0] * 4, seeds.tolist(), mesh)
        _, metrics = make_train_step(config, mesh)(state, place_rows(batches, mesh, 2), settings)
        found.append(np.stack([metrics["loss"], metrics["grad_norm"]]))
    assert len(set(found[0][0].tolist())) == 4
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)

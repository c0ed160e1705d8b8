"""Replaced-token detection: what is drawn, what is learned from it, and the same on every mesh."""

from dataclasses import replace
from functools import cache, lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import softmax
from steps import batch_gradients

from bert_jax.config.mapping import build
from bert_jax.distributed.parallel.sharding import (
    MeshConfig,
    batch_sharding,
    make_mesh,
    place_batch,
)
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.flops import (
    TRAIN_OVER_FORWARD,
    encoder_flops,
    replaced_flops,
    vocabulary_flops,
)
from bert_jax.objectives import replaced_tokens
from bert_jax.objectives.config import ReplacedTokensConfig
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.objectives.objective import evaluated, num_params
from bert_jax.objectives.replaced_tokens import (
    ReplacedTokens,
    detection_sums,
    discriminator_params,
    draw,
    generator_of,
    replace_tokens,
)
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import StepConfig, jitted_init, state_shardings
from bert_jax.training.steps.step import dropout_seed, make_train_step

MODEL = ModelConfig(
    vocab_size=250, num_positions=16, embedding_dim=16, hidden_dim=32, num_layers=2, num_heads=8,
    mlp_dim=64, dtype="float32", scan_unroll=1,
)  # fmt: skip
OBJECTIVE = ReplacedTokens(
    MODEL, MaskingConfig(max_predictions=4), SpecialIds(0, 1, 2, 3, 4), generator_size=0.25
)
DISENTANGLED = replace(
    OBJECTIVE, model=replace(MODEL, num_types=0, positions="relative", relative_buckets=6),
    disentangled=True,
)  # fmt: skip
"""A small DeBERTaV3."""
CONFIG = StepConfig(
    objective=OBJECTIVE,
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2),
    num_steps=10,
    seed=7,
)
ROWS, LENGTH = 32, 16


jitted_draw = jax.jit(draw)


@partial(jax.jit, static_argnums=0)
def forward_sums(objective, params, batch, seed):
    rows = objective.prepare(batch, seed)
    return objective.forward(params, rows, None, None).sums


def one_device():
    return make_mesh(MeshConfig(1), jax.devices()[:1])


@lru_cache
def make_params():
    return jax.device_get(jitted_init(CONFIG, one_device())(jax.random.key(0)).params)


def make_batch(rows=ROWS, first=1000):
    rng = np.random.default_rng(0)
    segment_ids = (np.arange(LENGTH) < rng.integers(6, LENGTH + 1, rows)[:, None]).astype(np.uint8)
    tokens = rng.integers(5, MODEL.vocab_size, (rows, LENGTH)).astype(np.uint16)
    return {
        "tokens": tokens * segment_ids,
        "type_ids": rng.integers(0, 2, (rows, LENGTH)).astype(np.uint8),
        "segment_ids": segment_ids,
        "pair_labels": np.full(rows, -1, np.int32),
        "row_index": np.arange(first, first + rows, dtype=np.uint32),
    }


@pytest.mark.parametrize(
    ("sizes", "share", "expected"),
    [  # Clark et al. 2020, table 6
        ((128, 256, 4, 1024), 1 / 4, (128, 64, 1, 256)),
        ((0, 768, 12, 3072), 1 / 3, (768, 256, 4, 1024)),
        ((0, 1024, 16, 4096), 1 / 4, (1024, 256, 4, 1024)),
        ((0, 768, 12, 3072), 1 / 1, (768, 768, 12, 3072)),
    ],
)
def test_the_generator_is_as_deep_and_narrower(sizes, share, expected):
    embedding, width, heads, mlp = sizes
    model = ModelConfig(
        embedding_dim=embedding, hidden_dim=width, num_heads=heads, mlp_dim=mlp, num_layers=12
    )
    small = generator_of(model, share)
    assert (small.embedding_width, small.hidden_dim, small.num_heads, small.mlp_dim) == expected
    assert small.num_layers == 12


@pytest.mark.parametrize(
    ("fields", "share", "expected"),
    [
        ({"num_kv_heads": 4}, 0.25, (192, 3, 1)),
        ({"num_kv_heads": 4}, 1 / 3, (256, 4, 4)),
        ({"num_kv_heads": 12}, 0.25, (192, 3, 3)),
        ({"positions": "rope", "num_heads": 4}, 0.3, (230, 1, 0)),
        ({"positions": "rope", "hidden_dim": 256, "num_heads": 4}, 0.3, (76, 1, 0)),
    ],
)
def test_the_generator_of_grouped_queries_or_rotations_is_valid(fields, share, expected):
    small = generator_of(ModelConfig(**fields), share)
    assert (small.hidden_dim, small.num_heads, small.num_kv_heads) == expected


@pytest.mark.parametrize("fields", [{}, {"decoder_bias": False, "head_transform": False}])
def test_encoders_with_norms_before_and_no_table_of_positions(fields):
    """Each model ends with a norm of its own; a tied decoder without bias adds no parameters."""
    size = 1.0 if fields else 0.25
    model = replace(
        MODEL, embedding_dim=0, positions="rope", norm_order="pre", num_types=0, **fields
    )
    objective = replace(OBJECTIVE, model=model, generator_size=size)
    params = objective.init(jax.random.key(0))
    norm = params["generator"]["encoder"]["final_norm"]
    assert norm["scale"].shape == (objective.generator.hidden_dim,)
    assert ("mlm" in params["generator"]) != bool(fields)
    assert "nsp" not in params["generator"]
    assert jax.tree.structure(objective.axes(), is_leaf=lambda axes: isinstance(axes, tuple)) == (
        jax.tree.structure(params)
    )
    sums = forward_sums(objective, params, make_batch(), 3)
    assert all(np.isfinite(value) for value in sums.values())
    models = ReplacedTokensConfig(generator_size=size).models(model, params)
    assert models["generator"][1].keys() == {"encoder", "mlm"}


def test_a_narrow_generator_needs_a_map_before_its_decoder():
    with pytest.raises(UserError, match=r"head_transform is False, but the token table is 32 wide"):
        generator_of(replace(MODEL, embedding_dim=0, head_transform=False), 0.25)


def test_tables_are_there_once():
    small, params = OBJECTIVE.generator, make_params()
    assert set(params["encoder"]["embeddings"]) == {"token", "position", "type", "norm", "project"}
    assert set(params["generator"]["encoder"]["embeddings"]) == {"project"}
    assert params["generator"]["encoder"]["embeddings"]["project"]["kernel"].shape == (16, 8)
    tables = (250 + 16 + 2) * 16 + 2 * 16
    assert num_params(OBJECTIVE) == tables + sum(
        (16 * width + width)  # the map to the layers
        + 2 * (4 * (width * width + width) + 2 * width * mlp + mlp + width + 4 * width)
        for width, mlp in ((32, 64), (small.hidden_dim, small.mlp_dim))
    ) + (32 * 32 + 32 + 32 + 1) + (8 * 16 + 16 + 2 * 16 + 250)


def test_the_generator_may_be_as_wide_as_the_tables():
    objective = replace(OBJECTIVE, generator_size=0.5)
    assert not objective.generator.projects_embeddings
    params = jax.jit(objective.init)(jax.random.key(0))
    assert "embeddings" not in params["generator"]["encoder"]
    assert np.isfinite(forward_sums(objective, params, make_batch(4), 0)["rtd_loss"])


def test_tokens_are_drawn_as_often_as_the_softmax_says():
    """A fixed seed: the statistic lies where a right sampler's would in 98 of 100 seeds."""
    logits = np.float32([3.0, 2.0, 1.0, 0.0, -1.0, -4.0, -1e30])
    rows, places = 400, 500
    drawn = jitted_draw(
        np.broadcast_to(logits, (rows, places, len(logits))),
        np.arange(rows, dtype=np.uint32),
        np.broadcast_to(np.arange(places, dtype=np.int32), (rows, places)),
    )
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=len(logits))
    expected = softmax(logits[:-1].astype(np.float64)) * rows * places
    assert counts[-1] == 0
    statistic = np.sum((counts[:-1] - expected) ** 2 / expected)
    assert stats.chi2.ppf(0.01, 5) < statistic < stats.chi2.ppf(0.99, 5)


def test_neighbours_are_drawn_independently():
    seeds = np.arange(2000, dtype=np.uint32)
    places = np.broadcast_to(np.arange(3, dtype=np.int32), (2000, 3))
    drawn = np.asarray(jitted_draw(np.zeros((2000, 3, 4), np.float32), seeds, places))
    for first, second in ((drawn[:, 0], drawn[:, 1]), (drawn[:-1, 0], drawn[1:, 0])):
        table = np.histogram2d(first, second, bins=4)[0]
        assert stats.chi2_contingency(table).pvalue > 0.01


def test_a_draw_depends_on_row_and_position_alone():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 3, 50)).astype(np.float32)
    seeds = np.arange(6, dtype=np.uint32) * np.uint32(77)
    positions = rng.integers(0, 16, (6, 3)).astype(np.int32)
    whole = np.asarray(jitted_draw(logits, seeds, positions))
    order = np.array([4, 1, 5])
    part = jitted_draw(logits[order], seeds[order], positions[order])
    np.testing.assert_array_equal(part, whole[order])
    assert np.any(whole != jitted_draw(logits, seeds + np.uint32(1), positions))
    assert np.any(whole != jitted_draw(logits, seeds, positions + np.int32(1)))


def test_a_cold_generator_proposes_its_likeliest_token():
    cold = replace(OBJECTIVE, temperature=1e-6)
    run = jax.jit(lambda params, rows: cold.forward(params, rows, None, None).sums)
    rows = cold.prepare(make_batch(8), 0)
    sums = run(make_params(), rows)
    other = run(make_params(), {**rows, "proposals": rows["proposals"] + np.uint32(1)})
    assert jax.device_get(sums) == jax.device_get(other)
    assert sums["rtd_replaced"] == sums["mlm_count"] - sums["mlm_correct"]


def test_a_proposal_that_equals_the_original_is_original():
    rows = {
        "tokens": np.array([[2, 4, 6, 4, 3]]),
        "positions": np.array([[1, 3, 0]]),  # the last one is not used
        "labels": np.array([[5, 7, 0]]),
        "weights": np.float32([[1, 1, 0]]),
    }
    tokens, is_replaced = jax.jit(replace_tokens)(rows, np.array([[5, 9, 8]]))
    assert tokens.tolist() == [[2, 5, 6, 9, 3]]
    assert is_replaced.tolist() == [[False, False, False, True, False]]


def test_detection_is_counted_over_real_tokens():
    sums = jax.jit(detection_sums)(
        np.float32([[2.0, -1.0, 0.5, 7.0]]),
        np.array([[True, False, False, True]]),
        np.array([[True, True, True, False]]),
    )
    losses = [np.log1p(np.exp(-2.0)), np.log1p(np.exp(-1.0)), np.log1p(np.exp(0.5))]
    np.testing.assert_allclose(sums.pop("rtd_loss"), sum(losses), rtol=1e-6)
    assert {name: float(value) for name, value in sums.items()} == {
        "rtd_correct": 2, "rtd_count": 3, "rtd_replaced": 1, "rtd_found": 1
    }  # fmt: skip
    values = evaluated(
        OBJECTIVE, {"rtd_loss": 1.0, "mlm_loss": 3.0, "mlm_count": 2.0, "mlm_correct": 1.0,
                    **{name: float(value) for name, value in sums.items()}}
    )  # fmt: skip
    assert values["eval/rtd_accuracy"] == values["eval/rtd_majority"] == 2 / 3
    assert values["eval/rtd_recall"] == 1


def test_the_two_models_are_not_dropped_alike(monkeypatch):
    """Their sites have the same numbers; a seed is what tells their masks apart."""
    seeds = []

    def states(model, params, tokens, types, segments, stream, layout):
        seeds.append(stream.seed)
        return jnp.zeros((*tokens.shape, model.hidden_dim))

    monkeypatch.setattr(replaced_tokens, "encode", states)

    @jax.jit
    def run(params, batch, seed):
        OBJECTIVE.forward(params, OBJECTIVE.prepare(batch, 0), seed, None)
        return jnp.stack(seeds)

    generator, discriminator = run(make_params(), make_batch(2), jnp.uint32(7)).tolist()
    assert generator != discriminator


def test_losses_are_weighted_and_operations_counted_by_model():
    objective = replace(OBJECTIVE, discriminator_weight=7.0)
    sums = {"mlm_loss": jnp.float32(6), "rtd_loss": jnp.float32(5)}
    counts = {"mlm_count": jnp.float32(2), "rtd_count": jnp.float32(10)}
    assert objective.loss(sums, counts) == 3 + 7 * 0.5
    small, length = objective.generator, LENGTH
    encoders = encoder_flops(small, length) + encoder_flops(MODEL, length)
    heads = vocabulary_flops(small, objective.masking.num_predictions(length))
    heads += replaced_flops(MODEL, length)
    assert objective.flops(make_batch(1)) == TRAIN_OVER_FORWARD * (encoders + heads)


def test_no_gradient_passes_the_draw():
    @jax.jit
    @jax.grad
    def slope(params):
        return forward_sums(OBJECTIVE, params, make_batch(), 3)["rtd_loss"]

    grads = jax.device_get(slope(make_params()))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads["generator"]))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads["rtd"]))
    assert np.any(grads["encoder"]["embeddings"]["token"])


def test_the_generators_table_gets_no_gradient_from_the_discriminator():
    """Gradient-disentangled sharing: the discriminator reads the sum of two tables."""

    @partial(jax.jit, static_argnums=1)
    @partial(jax.grad, has_aux=True)
    def slope(params, name):
        sums = forward_sums(DISENTANGLED, params, make_batch(), 3)
        return sums[name], sums["rtd_loss"]

    params = jax.device_get(jax.jit(DISENTANGLED.init)(jax.random.key(0)))
    embeddings, own = params["encoder"]["embeddings"], params["generator"]["encoder"]["embeddings"]
    assert own.keys() == embeddings.keys() == {"token", "norm", "project", "relative"}
    assert not embeddings["token"].any()
    before = float(slope(params, "mlm_loss")[1])
    embeddings["token"] = np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)
    (detection, after), (masked, _) = (
        jax.device_get(slope(params, name)) for name in ("rtd_loss", "mlm_loss")
    )
    assert abs(before - after) > 1e-4
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(detection["generator"]))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(masked["encoder"]))
    assert np.any(detection["encoder"]["embeddings"]["token"])
    assert np.any(masked["generator"]["encoder"]["embeddings"]["token"])
    models = ReplacedTokensConfig(disentangled=True).models(DISENTANGLED.model, params)
    tables = (models[name][1]["encoder"]["embeddings"]["token"] for name in models)
    jax.tree.map(
        np.testing.assert_array_equal, [*tables], [own["token"] + embeddings["token"], own["token"]]
    )


def test_a_run_from_a_model_starts_as_this_model():
    params = {"encoder": make_params()["encoder"]}
    laid = ReplacedTokensConfig(disentangled=True).laid_out(MODEL, params)
    table = params["encoder"]["embeddings"]["token"]
    whole = discriminator_params({**laid, "rtd": {}})["encoder"]["embeddings"]["token"]
    np.testing.assert_array_equal(whole, table)
    assert not laid["encoder"]["embeddings"]["token"].any()
    assert ReplacedTokensConfig().laid_out(MODEL, params) is params


def gradients_on(mesh, accumulation=1, objective=OBJECTIVE):
    config = replace(CONFIG, accumulation=accumulation, objective=objective)
    shardings = state_shardings(config, mesh).params
    params = jax.device_get(jitted_init(config, one_device())(jax.random.key(0)).params)
    params = jax.device_put(params, shardings)

    def run(params, batch):
        rows = objective.prepare(batch, config.seed)
        seed = dropout_seed(config, config.seed, jnp.int32(3))
        return batch_gradients(config, mesh, params, rows, seed)

    jitted = jax.jit(
        run, in_shardings=(shardings, batch_sharding(mesh)), out_shardings=(shardings, None)
    )
    return jax.device_get(jitted(params, place_batch(make_batch(), mesh)))


@pytest.fixture(scope="module")
def expected():
    return cache(lambda objective: gradients_on(one_device(), objective=objective))


@pytest.mark.parametrize(
    ("sizes", "accumulation", "objective"),
    [
        ((2, 2, 2), 4, OBJECTIVE), ((1, 8, 1), 1, OBJECTIVE), ((1, 1, 1), 4, OBJECTIVE),
        ((2, 2, 2), 4, DISENTANGLED),
    ],
)  # fmt: skip
def test_every_mesh_gives_the_sums_and_gradients_of_one_device(
    expected, sizes, accumulation, objective
):
    mesh = one_device() if sizes == (1, 1, 1) else make_mesh(MeshConfig(*sizes))
    wanted = expected(objective)
    grads, sums = gradients_on(mesh, accumulation, objective)
    for name, value in wanted[1].items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)
    assert sums["rtd_replaced"] > 40
    paths, _ = jax.tree_util.tree_flatten_with_path(wanted[0])
    for (path, theirs), ours in zip(paths, jax.tree.leaves(grads), strict=True):
        scale = max(float(np.abs(theirs).max()), 1e-3)
        assert float(np.abs(ours - theirs).max()) < 2e-5 * scale, jax.tree_util.keystr(path)


def test_steps_make_both_models_better():
    """Rows of one batch again and again, until the proposals in them are known."""
    optimizer = OptimizerConfig(learning_rate=5e-3, warmup_steps=5)
    step = make_train_step(replace(CONFIG, optimizer=optimizer, num_steps=100), one_device())
    state = jitted_init(CONFIG, one_device())(jax.random.key(0))
    batch = place_batch(make_batch(8), one_device())
    found = []
    for _ in range(100):
        state, metrics = step(state, batch)
        found.append({name: float(value) for name, value in metrics.items()})
    assert found[-1]["mlm_loss"] < found[0]["mlm_loss"] - 0.5
    assert found[-1]["rtd_loss"] < 0.1
    assert found[-1]["rtd_recall"] > 0.9
    weighted = found[0]["mlm_loss"] + 50 * found[0]["rtd_loss"]
    assert found[0]["loss"] == pytest.approx(weighted, rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"generator_size": 0.0},
            r"objective.generator_size is 0.0; it must be in \(0, 1\]",
        ),
        ({"temperature": 0.0}, "objective.temperature is 0.0; it must be above 0"),
        ({"discriminator_weight": float("inf")}, "objective.discriminator_weight is inf"),
    ],
)
def test_what_is_refused(fields, said):
    with pytest.raises(UserError, match=said):
        build(PretrainConfig, {"objective": {"name": "replaced_tokens", **fields}})

"""Distillation: losses against a reference, a teacher that is the student, the same on any mesh."""

from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from steps import batch_gradients

from bert_jax.distributed.parallel.sharding import (
    MeshConfig,
    batch_sharding,
    make_mesh,
    place_batch,
)
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.flops import TRAIN_OVER_FORWARD, encoder_flops, vocabulary_flops
from bert_jax.model.heads import PADDED_LOGIT, encode, init_params, layer_projections
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.objectives import losses, task
from bert_jax.objectives.distillation import (
    PROJECTION,
    TEACHER,
    DistillationConfig,
    Distilled,
    relation_losses,
)
from bert_jax.objectives.losses import divergences
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.objectives.objective import num_frozen, num_params
from bert_jax.objectives.task import TaskObjective
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import StepConfig, jitted_init, state_shardings
from bert_jax.training.steps.step import dropout_seed, make_train_step

MODEL = ModelConfig(
    vocab_size=250, num_positions=16, hidden_dim=16, num_layers=2, num_heads=4, mlp_dim=32,
    dtype="float32", scan_unroll=1,
)  # fmt: skip
TEACHER_MODEL = replace(MODEL, hidden_dim=32, num_layers=4, num_heads=2, mlp_dim=64)
PART = partial(DistillationConfig, "teacher")
ALL = PART(hidden_weight=0.5, attention_weight=0.3)


def masked(model):
    return MaskedLM(model, MaskingConfig(max_predictions=4), SpecialIds(0, 1, 2, 3, 4))


OBJECTIVE = Distilled(masked(MODEL), masked(replace(TEACHER_MODEL, pooler=False)), ALL)
CONFIG = StepConfig(
    objective=OBJECTIVE,
    optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=2),
    num_steps=10,
    seed=7,
)
ROWS, LENGTH = 32, 16
HEADS = {
    "single_label": ("classification", 3), "multi_label": ("classification", 3),
    "regression": ("classification", 1), "tags": ("tagging", 5), "span": ("span", 2),
}  # fmt: skip


def one_device():
    return make_mesh(MeshConfig(1), jax.devices()[:1])


@lru_cache
def make_params():
    return jax.device_get(jitted_init(CONFIG, one_device())(jax.random.key(0)).params)


def make_batch(rows=ROWS):
    rng = np.random.default_rng(0)
    segment_ids = (np.arange(LENGTH) < rng.integers(6, LENGTH + 1, rows)[:, None]).astype(np.uint8)
    tokens = rng.integers(5, MODEL.vocab_size, (rows, LENGTH)).astype(np.uint16)
    return {
        "tokens": tokens * segment_ids,
        "type_ids": rng.integers(0, 2, (rows, LENGTH)).astype(np.uint8),
        "segment_ids": segment_ids,
        "pair_labels": rng.integers(-1, 2, rows).astype(np.int32),
        "row_index": np.arange(rows, dtype=np.uint32),
    }


def task_batch(kind):
    batch, rng = make_batch(4), np.random.default_rng(1)
    width = HEADS[kind][1]
    labels = {
        "single_label": rng.integers(0, width, 4),
        "multi_label": rng.integers(0, 2, (4, width)).astype(np.float32),
        "regression": rng.normal(size=4).astype(np.float32),
        "tags": np.where(batch["segment_ids"] > 0, rng.integers(-1, width, (4, LENGTH)), -1),
        "span": rng.integers(0, 6, (4, 2)),
    }[kind]
    weights = np.array([1, 1, 1, 0], np.float32)  # the last row fills the batch
    return {**batch, "labels": labels, "weights": weights}


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergences_are_those_of_the_definition(temperature):
    mine, theirs = np.random.default_rng(0).normal(size=(2, 6, 7)) * 3
    t, s = softmax(theirs / temperature, -1), log_softmax(mine / temperature, -1)
    expected = temperature**2 * (t * (np.log(t) - s)).sum(-1)
    mine, theirs = (jnp.asarray(x, jnp.float32) for x in (mine, theirs))
    values, pull = jax.vjp(lambda x: divergences(x, theirs, temperature), mine)
    np.testing.assert_allclose(values, expected, atol=1e-5)
    (gradient,) = pull(jnp.ones_like(values))
    np.testing.assert_allclose(gradient, temperature * (np.exp(s) - t), atol=1e-5)


def test_padding_of_the_vocabulary_has_no_part():
    mine, theirs = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    padded = [np.pad(x, ((0, 0), (0, 4)), constant_values=-1e30) for x in (mine, theirs)]
    mine, theirs, *padded = (jnp.asarray(x) for x in (mine, theirs, *padded))
    np.testing.assert_allclose(divergences(*padded, 0.5), divergences(mine, theirs, 0.5), rtol=1e-5)
    slope = jax.grad(lambda x: divergences(x, padded[1]).sum())(padded[0])
    assert not np.asarray(slope)[:, 8:].any()
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("more", [4, 128])
def test_rows_of_no_token_in_the_table_of_the_teacher_have_no_part(more):
    """A teacher's 254 rows are padded to as many as the student's 250 tokens: the loss was 3e28."""
    theirs = replace(MODEL, vocab_size=MODEL.vocab_size + more)
    random = np.random.default_rng(0)
    student = random.normal(size=(1, 3, MODEL.padded_vocab_size))
    teacher = random.normal(size=(1, 3, theirs.padded_vocab_size))
    student[..., MODEL.vocab_size :] = teacher[..., theirs.vocab_size :] = PADDED_LOGIT
    student, teacher = (jnp.asarray(x, jnp.float32) for x in (student, teacher))
    expected = divergences(*(x[..., : MODEL.vocab_size] for x in (student, teacher)), 2.0)
    found = masked(MODEL).soft_losses(student, teacher, {}, 2.0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_soft_losses_of_each_head(kind):
    """Each against its definition, written out."""
    rng, temperature = np.random.default_rng(2), 2.0
    shape = {"tagging": (4, LENGTH), "span": (4, LENGTH), "classification": (4,)}[HEADS[kind][0]]
    mine, theirs = rng.normal(size=(2, *shape, HEADS[kind][1]))
    real = make_batch(4)["segment_ids"] > 0

    def kl(a, b, axis=-1):
        p, q = (softmax(x / temperature, axis) for x in (b, a))
        with np.errstate(divide="ignore", invalid="ignore"):
            return temperature**2 * np.where(p > 0, p * np.log(p / q), 0).sum(axis)

    if kind == "regression":
        expected = (mine - theirs)[:, 0] ** 2
    elif kind == "multi_label":
        p, q = (1 / (1 + np.exp(-x / temperature)) for x in (theirs, mine))
        both = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
        expected = temperature**2 * both.mean(-1)
    elif kind == "span":
        hide = np.where(real[..., None], 0, -np.inf)
        expected = kl(mine + hide, theirs + hide, 1).mean(-1)
    else:
        expected = kl(mine, theirs)
    mine, theirs = (jnp.asarray(x, jnp.float32) for x in (mine, theirs))
    objective = TaskObjective(MODEL, TaskHeadConfig(*HEADS[kind]), kind)
    rows = {"segment_ids": jnp.asarray(real, jnp.int32)}
    found = objective.soft_losses(mine, theirs, rows, temperature)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_relations_are_those_of_the_definition():
    """Models of other widths and heads, cut into the same number of heads."""
    rng = np.random.default_rng(3)
    segments = np.array([[1, 1, 2, 2, 2, 0]])
    student = [rng.normal(size=(1, 6, heads, 4)) for heads in (4, 2, 2)]  # keys are shared
    teacher = [rng.normal(size=(1, 6, heads, 8)) for heads in (2, 2, 2)]
    expected = np.zeros((1, 6))
    for mine, theirs in zip(student, teacher, strict=True):
        relations = []
        for x in (mine, theirs):
            x = x.reshape(6, 2, -1)
            scores = np.einsum("lrk,srk->rls", x, x) / np.sqrt(x.shape[-1])
            visible = segments[0][:, None] == segments[0][None]
            relations.append(softmax(np.where(visible, scores, -np.inf), -1))
        q, p = relations
        with np.errstate(divide="ignore", invalid="ignore"):
            expected[0] += np.where(p > 0, p * np.log(p / q), 0).sum(-1).mean(0)
    found = relation_losses(
        *(tuple(jnp.asarray(x, jnp.float32) for x in each) for each in (student, teacher)),
        jnp.asarray(segments), 2,
    )  # fmt: skip
    np.testing.assert_allclose(found, expected, atol=1e-5)


def sums_of(objective, params, rows):
    return jax.jit(lambda p, r: objective.forward(p, r, None, None).sums)(params, rows)


def test_a_teacher_that_is_the_student_teaches_nothing():
    objective = replace(OBJECTIVE, teacher=masked(replace(MODEL, pooler=False)))
    params = jax.device_get(jax.jit(objective.init)(jax.random.key(0)))
    assert PROJECTION not in params
    params[TEACHER] = {
        "encoder": {n: part for n, part in params["encoder"].items() if n != "pooler"},
        "mlm": params["mlm"],
    }
    sums = sums_of(objective, params, objective.prepare(make_batch(8), 0))
    assert sums["mlm_loss"] > 1
    for name in ("soft_loss", "hidden_loss", "attention_loss"):
        assert abs(float(sums[name])) < 1e-4, name


def test_layers_are_compared_with_those_that_are_given():
    """What is above the last of them teaches nothing."""
    random, rows, params = np.random.default_rng(0), make_batch(2), make_params()
    student, teacher = (
        [random.normal(size=(2, LENGTH, width)).astype(np.float32) for _ in range(count)]
        for width, count in ((16, 3), (32, 5))
    )

    @partial(jax.jit, static_argnums=0)
    def compare(objective, params, student, teacher, rows):
        return objective.compare_layers(params, student, teacher, rows, None)

    whole = replace(OBJECTIVE, config=replace(ALL, layers=(1, 3), relation_heads=8))
    ended = replace(whole, teacher=masked(replace(TEACHER_MODEL, num_layers=3)))
    sums = compare(whole, params, student, teacher, rows)
    real = rows["segment_ids"] > 0
    dense = params[PROJECTION]["dense"] if "dense" in params[PROJECTION] else params[PROJECTION]
    gaps = [x @ dense["kernel"] + dense["bias"] - teacher[n]
            for x, n in zip(student, (0, 1, 3), strict=True)]  # fmt: skip
    assert sums["hidden_loss"] == pytest.approx(np.mean(np.square(gaps), (0, 3))[real].sum(), 1e-5)

    @jax.jit
    def relations(params, student, teacher, segments):
        mine = layer_projections(MODEL, params, student, 1, segments)
        theirs = layer_projections(TEACHER_MODEL, params[TEACHER], teacher, 2, segments)
        return relation_losses(mine, theirs, segments, 8)

    found = np.asarray(relations(params, student[1], teacher[2], rows["segment_ids"]))
    assert sums["attention_loss"] == pytest.approx(found[real].sum(), 1e-5)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-6),
        compare(ended, params, student, teacher[:4], rows), sums,
    )  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
def test_tasks_learn_from_a_teacher(kind):
    """Nothing from one that is the student, and from another, without rows that fill a batch."""
    network, width = HEADS[kind]
    head, model = TaskHeadConfig(network, width, dropout_rate=0.0), replace(MODEL, num_layers=1)
    plain = TaskObjective(model, head, kind)
    objective = Distilled(plain, plain, ALL if kind == "tags" else PART())
    params = jax.device_get(jax.jit(objective.init)(jax.random.key(0)))
    run = jax.jit(lambda p, r: objective.forward(p, r, None, None).sums)
    rows = task_batch(kind)
    same = run({**params, TEACHER: {n: params[n] for n in params if n != TEACHER}}, rows)
    other = run(params, rows)
    for name in other.keys() & {"soft_loss", "hidden_loss", "attention_loss"}:
        assert abs(float(same[name])) < 1e-5, name
        assert other[name] > 1e-6
    assert same["loss"] == other["loss"]
    rows["tokens"] = np.where(rows["weights"][:, None], rows["tokens"], np.uint16(9))
    changed = run(params, rows)
    for name in other:
        np.testing.assert_array_equal(other[name], changed[name], err_msg=name)
    counts = objective.counts(jax.tree.map(jnp.asarray, rows))
    assert counts["soft_count"] == other["soft_count"]
    assert counts["token_count"] == other["token_count"]
    assert objective.for_evaluation() == plain


def test_predictions_are_compared_at_the_temperature_that_is_set(monkeypatch):
    used = set()
    for module in (losses, task):
        monkeypatch.setattr(module, "divergences", lambda *x: used.add(x[-1]) or divergences(*x))
    labelled = TaskObjective(MODEL, TaskHeadConfig("classification", 3), "single_label")
    for plain in (OBJECTIVE.student, labelled):
        objective = Distilled(plain, plain, PART(temperature=3.0))
        batch = make_batch(2) if plain is OBJECTIVE.student else task_batch("single_label")
        params = jax.eval_shape(objective.init, jax.random.key(0))
        jax.eval_shape(objective.forward, params, objective.prepare(batch, 0), None, None)
    assert used == {3.0}


def gradients_on(mesh, accumulation=1, gather="layer"):
    config = replace(CONFIG, accumulation=accumulation, gather=gather)
    if gather == "step":  # layers are straight code, of which the teacher has more
        student = masked(replace(MODEL, scan_unroll=4))
        config = replace(config, objective=replace(OBJECTIVE, student=student))
    shardings = state_shardings(config, mesh).params
    params = jax.device_put(make_params(), shardings)

    def run(params, batch):
        rows = OBJECTIVE.prepare(batch, config.seed)
        seed = dropout_seed(config, config.seed, jnp.int32(3))
        return batch_gradients(config, mesh, params, rows, seed)

    trained = {name: each for name, each in shardings.items() if name != TEACHER}
    jitted = jax.jit(
        run, in_shardings=(shardings, batch_sharding(mesh)), out_shardings=(trained, None)
    )
    return jax.device_get(jitted(params, place_batch(make_batch(), mesh)))


@pytest.fixture(scope="module")
def expected():
    return gradients_on(one_device())


@pytest.mark.parametrize(
    ("sizes", "accumulation", "gather"), [((2, 2, 2), 4, "layer"), ((1, 8, 1), 2, "step")]
)
def test_every_mesh_gives_the_sums_and_gradients_of_one_device(
    expected, sizes, accumulation, gather
):
    grads, sums = gradients_on(make_mesh(MeshConfig(*sizes)), accumulation, gather)
    assert {"soft_loss", "hidden_loss", "attention_loss"} <= sums.keys()
    for name, value in expected[1].items():
        # A divergence is a difference of larger sums, whose last digits depend on their order.
        np.testing.assert_allclose(sums[name], value, rtol=3e-5, err_msg=name)
    paths, _ = jax.tree_util.tree_flatten_with_path(expected[0])
    for (path, theirs), ours in zip(paths, jax.tree.leaves(grads), strict=True):
        scale = max(float(np.abs(theirs).max()), 1e-3)
        assert float(np.abs(ours - theirs).max()) < 3e-5 * scale, jax.tree_util.keystr(path)


def test_steps_come_closer_to_the_teacher_and_leave_it_as_it_is():
    step = make_train_step(CONFIG, one_device())
    state = jitted_init(CONFIG, one_device())(jax.random.key(0))
    before = jax.device_get(state.params[TEACHER])
    assert not any(TEACHER in jax.tree_util.keystr(path) for path, _ in
                   jax.tree_util.tree_leaves_with_path(state.opt_state))  # fmt: skip
    batch, found = place_batch(make_batch(), one_device()), []
    for _ in range(10):
        state, metrics = step(state, batch)
        found.append({name: float(value) for name, value in metrics.items()})
    for name in ("hidden_loss", "attention_loss", "mlm_loss"):
        assert found[-1][name] < found[0][name], name
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params[TEACHER]))
    first = found[0]
    hard = first["mlm_loss"] + first["nsp_loss"]
    weighted = 0.5 * hard + 0.5 * first["soft_loss"]
    weighted += 0.5 * first["hidden_loss"] + 0.3 * first["attention_loss"]
    assert first["loss"] == pytest.approx(weighted, rel=1e-5)


def test_the_teacher_counts_where_it_costs():
    plain, alone = OBJECTIVE.student, replace(OBJECTIVE, config=PART())
    assert num_params(OBJECTIVE) == num_params(plain)
    assert num_frozen(OBJECTIVE) > 4 * (4 * 32**2 + 2 * 32 * 64)  # the maps of four layers
    rows = make_batch(1)
    assert alone.flops(rows) > plain.flops(rows)
    assert OBJECTIVE.flops(rows) > alone.flops(rows)
    student = jax.device_get(jax.jit(plain.init)(jax.random.key(0)))
    for name, entry in student.items():  # the student's first weights do not depend on a teacher
        jax.tree.map(np.testing.assert_array_equal, entry, make_params()[name])


def test_each_part_of_the_loss_has_its_own_weight():
    parts = PART(hard_weight=0.25, hidden_weight=2.0, attention_weight=3.0)
    sums = {"mlm_loss": 8.0, "nsp_loss": 6.0, "soft_loss": 20.0, "hidden_loss": 14.0,
            "attention_loss": 22.0}  # fmt: skip
    counts = {"mlm_count": 4.0, "nsp_count": 2.0, "soft_count": 5.0, "token_count": 2.0}
    arrays = [jax.tree.map(jnp.float32, each) for each in (sums, counts)]
    loss = replace(OBJECTIVE, config=parts).loss(*arrays)
    assert loss == 0.25 * (2 + 3) + 0.75 * 4 + 2 * 7 + 3 * 11


def test_a_comparison_costs_the_teacher_and_what_is_compared():
    """Products of the student are made three times, with the gradients; of the teacher once."""
    rows = make_batch(1)
    teacher = encoder_flops(TEACHER_MODEL, LENGTH) + vocabulary_flops(TEACHER_MODEL, 4)
    states = TRAIN_OVER_FORWARD * 3 * 2 * LENGTH * 16 * 32  # a map of three states, 16 to 32 wide
    relations = 3 * 2 * LENGTH**2 * (TRAIN_OVER_FORWARD * 16 + 32)
    for fields, cost in (
        ({}, 0), ({"hidden_weight": 1.0}, states), ({"attention_weight": 1.0}, relations),
    ):  # fmt: skip
        objective = replace(OBJECTIVE, config=PART(**fields))
        assert objective.flops(rows) == objective.student.flops(rows) + teacher + cost


def test_the_last_states_that_are_compared_are_normed():
    model = replace(MODEL, norm_order="pre", num_layers=1)
    params = jax.jit(init_params, static_argnums=0)(model, jax.random.key(0))
    rows = make_batch(2)
    inputs = [jnp.asarray(rows[name], jnp.int32) for name in ("tokens", "type_ids", "segment_ids")]
    run = jax.jit(lambda params, inputs: OBJECTIVE.run(model, params, (*inputs, None), None))
    states = run(params, inputs)
    assert len(states) == 2
    last = jax.jit(encode, static_argnums=0)(model, params, *inputs)
    np.testing.assert_array_equal(states[-1], last)
    np.testing.assert_allclose(np.var(last, axis=-1), 1, rtol=1e-3)


def test_layers_are_evenly_spaced_or_given():
    def of(count, most, layers=()):
        student, teacher = (replace(MODEL, num_layers=n) for n in (count, most))
        return PART(layers=layers).layer_map(student, teacher)

    assert of(2, 4) == (2, 4)
    assert of(4, 12) == (3, 6, 9, 12)
    assert of(5, 12) == (3, 5, 8, 10, 12)
    assert of(3, 3) == (1, 2, 3)
    assert of(2, 4, (1, 3)) == (1, 3)
    for layers in ((1,), (0, 2), (1, 5)):
        with pytest.raises(UserError, match=r"distil.layers is .* 1 to 4 for each .* 2 layers"):
            of(2, 4, layers)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": 0.0}, "distil.temperature is 0.0; it must be above 0"),
        ({"hard_weight": 1.5}, r"distil.hard_weight is 1.5; it must be in \[0, 1\]"),
        ({"hidden_weight": -1.0}, "distil.hidden_weight is -1.0"),
        (
            {"attention_weight": 1.0, "relation_heads": 3},
            "distil.relation_heads is 3; it must divide .* 16, 32",
        ),
    ],
)
def test_what_is_refused(fields, said):
    with pytest.raises(UserError, match=said):
        replace(OBJECTIVE, config=PART(**fields))


@pytest.mark.parametrize("fields", [{"teacher": ""}, {"hidden_weight": 0.1}, {"layers": (1,)}])
def test_a_section_without_a_teacher_is_refused(fields):
    with pytest.raises(UserError, match=r"the section distil is set, but distil.teacher is empty"):
        DistillationConfig(**fields).check_section()

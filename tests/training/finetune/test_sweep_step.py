"""A sweep's step: members are runs of their own, on any devices."""

import os
from functools import partial

import jax
import numpy as np
import pytest
from applied_task import apply_task

from bert_jax.distributed.parallel.sharding import MeshConfig, make_trial_mesh
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.task_heads import TaskHeadConfig, init_task_params
from bert_jax.objectives.task import TaskObjective
from bert_jax.tasks.rows import Rows, TrainBatches, choose_buckets, eval_batches
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import StepConfig
from bert_jax.training.steps.step import make_eval_step, make_train_step
from bert_jax.training.steps.trials import (
    SweepState,
    abstract_trials,
    check_memory,
    init_trials,
    make_keep_best,
    place_rows,
    place_settings,
    place_trials,
)

MODEL = ModelConfig(
    num_layers=1, hidden_dim=16, num_heads=2, mlp_dim=32, vocab_size=50, num_positions=16
)
HEAD = TaskHeadConfig("classification", 3)
CONFIG = StepConfig(
    TaskObjective(MODEL, HEAD, "single_label"),
    OptimizerConfig(learning_rate=1.0, warmup_steps=2),
    num_steps=6,
)
SEEDS, RATES = [3, 4, 3, 5], [1e-2, 1e-2, 3e-3, 1e-3]


@pytest.fixture(scope="module")
def rows():
    random = np.random.default_rng(0)
    tokens = [random.integers(5, 50, random.integers(4, 16)).astype(np.int32) for _ in range(22)]
    labels = np.array([ids[1] % 3 for ids in tokens], np.int32)
    return Rows(tokens, np.array([len(ids) // 2 for ids in tokens], np.int32), labels)


def sweep_mesh(members, devices):
    return make_trial_mesh(MeshConfig(), members, devices)


def train(rows, members, devices, num_steps=6):
    """(T, M) losses and the state after."""
    seeds, rates = [SEEDS[m] for m in members], [RATES[m] for m in members]
    mesh = sweep_mesh(len(members), jax.devices()[:devices])
    batches = TrainBatches(rows, choose_buckets(rows.lengths, 1), 8, 0)  # 8, 8 and 6 rows
    sweep = init_trials(CONFIG, mesh, np.array(seeds), [{}], np.zeros(len(members)))
    state = sweep.train
    step = make_train_step(CONFIG, mesh)
    settings = place_settings(rates, seeds, mesh)
    losses = []
    for number in range(num_steps):
        epoch, at = divmod(number, batches.num_batches)
        batch = next(batches.epoch(epoch, seeds, at))
        state, metrics = step(state, place_rows(batch, mesh), settings)
        losses.append(np.asarray(metrics["loss"]))
    return np.stack(losses), SweepState(*state, sweep.best), mesh


@pytest.fixture(scope="module")
def together(rows):
    return train(rows, range(4), 1)


def test_each_member_equals_the_run_alone(rows, together):
    losses, state, _ = together
    assert len(set(losses[-1].tolist())) == 4  # seeds and rates make four different runs
    for member in (1, 2):
        alone, its_state, _ = train(rows, [member], 1)
        np.testing.assert_allclose(alone[:, 0], losses[:, member], atol=2e-6)
        for ours, theirs in zip(
            jax.tree.leaves(its_state.params), jax.tree.leaves(state.params), strict=True
        ):
            np.testing.assert_allclose(np.asarray(ours)[0], np.asarray(theirs)[member], atol=2e-5)


@pytest.mark.parametrize(
    ("members", "devices", "shape"), [((0, 1, 2, 3), 4, (4, 1, 1, 1)), ((0, 1), 8, (2, 4, 1, 1))]
)
def test_the_same_on_any_devices(rows, together, members, devices, shape):
    """Dropout and the ragged batch included: 6 rows over 4 devices."""
    losses, _, mesh = train(rows, members, devices)
    assert tuple(mesh.shape.values()) == shape
    np.testing.assert_allclose(losses, together[0][:, list(members)], atol=2e-6)


def test_state_is_what_a_restore_is_told(together):
    _, state, mesh = together
    abstract = abstract_trials(CONFIG, mesh, 4)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )


def test_members_that_differ_in_the_seed_alone(rows):
    """The seed of a member decides its dropout: parameters, rates and rows are the same."""
    mesh = sweep_mesh(4, jax.devices()[:1])
    state = init_trials(CONFIG, mesh, np.full(4, 3), [{}], np.zeros(4)).train
    batches = TrainBatches(rows, choose_buckets(rows.lengths, 1), 8, 0)
    batch = place_rows(next(batches.epoch(0, [3] * 4)), mesh)
    settings = place_settings([1e-2] * 4, [3, 4, 3, 5], mesh)
    _, metrics = make_train_step(CONFIG, mesh)(state, batch, settings)
    first, second, again, third = np.asarray(metrics["loss"]).tolist()
    assert first == again
    assert len({first, second, third}) == 3


def test_more_members_than_the_memory_holds(monkeypatch):
    mesh = sweep_mesh(1, jax.devices()[:1])
    one = 4 * sum(leaf.size for leaf in jax.tree.leaves(abstract_trials(CONFIG, mesh, 1)))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": one, "SC_PHYS_PAGES": 4}.get)
    check_memory(CONFIG, mesh, 3)
    with pytest.raises(UserError, match=r"5 runs at once need .* Set sweep.at_once to 4, or mesh"):
        check_memory(CONFIG, mesh, 5)
    side_by_side = sweep_mesh(2, jax.devices()[:2])  # of the 4 pages, each device has 2
    check_memory(CONFIG, side_by_side, 4)
    with pytest.raises(UserError, match=r"6 runs at once .* Set sweep.at_once to 4, or mesh"):
        check_memory(CONFIG, side_by_side, 6)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": one - 1, "SC_PHYS_PAGES": 1}.get)
    with pytest.raises(UserError, match=r"Set mesh.fsdp above 1, or training.freeze or lora.rank"):
        check_memory(CONFIG, mesh, 1)


def test_logits_of_members(rows, together):
    _, state, mesh = together
    index, batch = next(eval_batches(rows, (16,), 8, 0))
    forward = make_eval_step(CONFIG, mesh, seed=0)(state.params, place_rows(batch, mesh))
    logits = np.asarray(forward.outputs)
    run = jax.jit(partial(apply_task, MODEL, HEAD))
    for member in range(4):
        params = jax.tree.map(lambda leaf, m=member: np.asarray(leaf)[m], state.params)
        expected = run(params, *(batch[name] for name in ("tokens", "type_ids", "segment_ids")))
        np.testing.assert_allclose(logits[member], expected, atol=1e-5)
    assert len(index) == 8


def test_best_is_kept_of_whom_it_is_said(rows):
    _, state, mesh = train(rows, range(4), 1, num_steps=1)
    first, best = jax.device_get(state.params), jax.device_get(state.best)
    better = place_trials(np.array([True, False, False, True]), mesh)
    after = jax.device_get(make_keep_best(CONFIG, mesh)(state.best, state.params, better))
    for new, old, kept in zip(*map(jax.tree.leaves, (first, best, after)), strict=True):
        np.testing.assert_array_equal(kept[[0, 3]], new[[0, 3]])
        np.testing.assert_array_equal(kept[[1, 2]], old[[1, 2]])


def test_initialisations_are_chosen_by_member():
    given = init_task_params(MODEL, HEAD, jax.random.key(99))["encoder"]
    without_pooler = {name: value for name, value in given.items() if name != "pooler"}
    mesh = sweep_mesh(3, jax.devices()[:1])
    which = np.array([0, 1, 0])
    state = init_trials(CONFIG, mesh, np.array([7, 7, 8]), [{"encoder": without_pooler}, {}], which)
    fresh = init_task_params(MODEL, HEAD, jax.random.key(7))
    expected = {**fresh, "encoder": {**fresh["encoder"], **without_pooler}}
    found = jax.device_get(state.params)
    for number, tree in ((0, expected), (1, fresh)):
        of_one = jax.tree.map(lambda leaf, n=number: leaf[n], found)
        jax.tree.map(np.testing.assert_array_equal, of_one, tree)
    assert np.any(found["head"]["kernel"][0] != found["head"]["kernel"][2])


def test_rows_that_fill_do_not_count(rows):
    """The gradient of a batch of 6 is that of the same 6 rows among 8."""
    mesh = sweep_mesh(1, jax.devices()[:1])
    step = make_train_step(CONFIG, mesh)
    settings = place_settings([1.0], [0], mesh)
    _, batch = next(eval_batches(rows, (16,), 6, 0))
    losses = []
    for fill in (0, 2):
        padded = {
            name: np.concatenate([array, array[:fill] if name != "weights" else np.zeros(fill)])[
                None
            ].astype(array.dtype)
            for name, array in batch.items()
        }
        state = init_trials(CONFIG, mesh, np.zeros(1), [{}], np.zeros(1)).train
        _, metrics = step(state, place_rows(padded, mesh), settings)
        losses.append([float(metrics["loss"][0]), float(metrics["grad_norm"][0])])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)

"""Trained parts of the parameters: frozen layers, low-rank updates, rates by layer."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from applied_task import apply_task

from bert_jax.distributed.checkpoint.record import named_leaves as named
from bert_jax.distributed.parallel.sharding import MeshConfig, make_trial_mesh
from bert_jax.model.config import ModelConfig
from bert_jax.model.lora import LoraConfig, merged
from bert_jax.model.stack import run_layers
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.objectives.objective import trained, with_trained
from bert_jax.objectives.task import TaskObjective
from bert_jax.tasks.rows import Rows, TrainBatches, choose_buckets
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.optim_parts import is_head, layer_rates
from bert_jax.training.steps.state import StepConfig
from bert_jax.training.steps.step import make_train_step
from bert_jax.training.steps.trials import (
    abstract_trials,
    from_saved,
    init_trials,
    make_keep_best,
    place_rows,
    place_settings,
    place_trials,
    stop_trials,
    to_save,
)

MODEL = ModelConfig(
    num_layers=3, hidden_dim=16, num_heads=2, mlp_dim=32, vocab_size=50, num_positions=16
)
HEAD = TaskHeadConfig("classification", 3)
EMBEDDINGS = frozenset({"encoder/embeddings"})
ENCODER = EMBEDDINGS | {"encoder/layers"}
LORA = LoraConfig(rank=2, alpha=6.0, targets=("query", "output", "up", "down"))
OPTIMIZER = OptimizerConfig(learning_rate=1.0, warmup_steps=2, clip_norm=None)


def config_of(layer_decay=1.0, **fields):
    objective = TaskObjective(MODEL, HEAD, "single_label", **fields)
    return StepConfig(objective, OPTIMIZER, num_steps=6, layer_decay=layer_decay)


PLAIN = config_of()
CASES = {
    "two layers": config_of(frozen=EMBEDDINGS, frozen_layers=2),
    "lora": config_of(frozen=ENCODER, lora=LORA),
}


@pytest.fixture(scope="module")
def batches():
    random = np.random.default_rng(0)
    tokens = [random.integers(5, 50, random.integers(4, 16)).astype(np.int32) for _ in range(16)]
    labels = np.array([ids[1] % 3 for ids in tokens], np.int32)
    rows = Rows(tokens, np.array([len(ids) // 2 for ids in tokens], np.int32), labels)
    return TrainBatches(rows, choose_buckets(rows.lengths, 1), 8, 0)


def train(config, batches, mesh, *, seeds=(3, 4), rates=(1e-2, 2e-2), head_rate=None, steps=3):
    """Losses (T, M), and the state before and after."""
    first = init_trials(config, mesh, np.array(seeds), [{}], np.zeros(len(seeds)))
    before, state = jax.device_get(first.params), first.train
    step, settings = make_train_step(config, mesh), place_settings(rates, seeds, mesh, head_rate)
    losses = []
    for number in range(steps):
        epoch, at = divmod(number, batches.num_batches)
        batch = place_rows(next(batches.epoch(epoch, seeds, at)), mesh)
        state, metrics = step(state, batch, settings)
        losses.append(np.asarray(metrics["loss"]))
    return np.stack(losses), before, state


@pytest.fixture(scope="module")
def mesh():
    return make_trial_mesh(MeshConfig(), 2, jax.devices()[:1])


@pytest.fixture(scope="module")
def runs(batches, mesh):
    """Three steps of two trials of each case."""
    return {name: train(config, batches, mesh) for name, config in CASES.items()}


def changed(before, after):
    """Paths of the parameters that differ, of stacked layers with the layers."""
    found = {}
    after = named(jax.device_get(after))
    for name, old in named(before).items():
        differs = np.any(
            old != after[name], axis=tuple(range(2 if "layers" in name else 1, old.ndim))
        )
        found[name] = differs.all(axis=0).tolist() if "layers" in name else bool(differs.all())
    return found


@pytest.fixture(scope="module")
def plain(batches, mesh):
    """One step of the same trials with nothing frozen."""
    return train(PLAIN, batches, mesh, steps=1)


@pytest.mark.parametrize(
    ("name", "layers"), [("two layers", [False, False, True]), ("lora", [False] * 3)]
)
def test_what_is_frozen_stays_and_the_rest_learns(runs, name, layers):
    _, before, state = runs[name]
    for path, differs in changed(before, state.params).items():
        if path.startswith("encoder/embeddings"):
            assert not differs, path
        elif path.startswith("encoder/layers"):
            # The gradient of the keys' biases is 0.
            assert differs == layers or path.endswith("key/bias"), path
        else:
            assert np.all(differs), path


def test_moments_are_those_of_what_is_trained(runs):
    shapes = {
        name: {path: leaf.shape[1:] for path, leaf in named(state.opt_state.mu).items()}
        for name, (_, _, state) in runs.items()
    }
    query = "encoder/layers/attention/query/kernel"
    assert shapes["two layers"][query] == (1, 16, 2, 8)
    above = {f"{part}/{leaf}" for part in ("encoder/pooler/dense", "head")
             for leaf in ("kernel", "bias")}  # fmt: skip
    assert shapes["lora"].keys() == above | {
        f"lora/layers/{part}/{name}/{leaf}"
        for part, name in (("attention", "query"), ("attention", "output"), ("mlp", "up"),
                           ("mlp", "down"))
        for leaf in "ab"
    }  # fmt: skip


def test_updates_of_the_upper_layers_do_not_know_that_others_are_frozen(batches, mesh, plain):
    losses, _, part = train(CASES["two layers"], batches, mesh, steps=1)
    np.testing.assert_array_equal(losses, plain[0])
    upper = jax.jit(jax.vmap(partial(trained, CASES["two layers"].objective)))
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=1e-6),
        *(jax.device_get(upper(state.params)) for state in (plain[2], part)),
    )


@pytest.mark.parametrize("unroll", [1, 3])
def test_no_gradient_is_computed_below_frozen_layers(unroll):
    """Rates 2, 3, 5 of three layers: the derivative of the product is that of the last two."""
    config = dataclasses.replace(MODEL, scan_unroll=unroll)

    def product(rates, x):
        return run_layers(config, lambda kind, rate, x, index: rate * x, rates, x, False, 1)

    rates = jnp.array([2.0, 3.0, 5.0])
    of_rates, of_x = jax.grad(product, argnums=(0, 1))(rates, jnp.float32(1.0))
    assert of_rates.tolist() == [0.0, 10.0, 6.0]
    assert of_x == 0.0


def test_layers_learn_at_their_rates():
    rates = layer_rates(PLAIN.objective.axes(), 3, 0.5)
    found = {path: np.ravel(value).tolist() for path, value in named(rates).items()}
    assert found["encoder/layers/mlp/up/kernel"] == [0.125, 0.25, 0.5]
    assert found["encoder/embeddings/norm/scale"] == [0.0625]
    assert found["encoder/pooler/dense/kernel"] == found["head/bias"] == [1.0]


def test_updates_are_multiplied_by_the_rates(batches, mesh, plain):
    """The rates of the two trials are 1e-2 and 2e-2, that of their heads 5e-2."""
    _, before, first = plain
    _, _, other = train(config_of(layer_decay=0.5), batches, mesh, head_rate=5e-2, steps=1)
    rates, first, other = (
        named(tree)
        for tree in (layer_rates(PLAIN.objective.axes(), 3, 0.5),
                     *jax.device_get((first.params, other.params)))
    )  # fmt: skip
    for path, old in jax.tree_util.tree_leaves_with_path(before):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        times = np.array([5.0, 2.5]) if is_head(path) else np.ones(2)
        times = rates[name] * times.reshape(-1, *(1,) * (old.ndim - 1))
        np.testing.assert_allclose(
            other[name] - old, (first[name] - old) * times, atol=1e-6, err_msg=name
        )


def test_low_rank_updates_are_added_to_the_kernels(runs):
    """The product is summed by hand, for maps with inputs and outputs of several axes."""
    _, before, state = runs["lora"]
    params = jax.tree.map(lambda leaf: leaf[1], state.params)
    whole = merged(LORA, params)
    assert "lora" not in whole
    for path, spec in {
        "attention/query": "ndr,nrhk->ndhk",
        "attention/output": "nhkr,nrd->nhkd",
        "mlp/down": "nmr,nrd->nmd",
    }.items():
        part, name = path.split("/")
        pair = params["lora"]["layers"][part][name]
        added = 3.0 * np.einsum(spec, pair["a"], pair["b"])
        assert np.abs(added).max() > 1e-3
        kernels = (tree["encoder"]["layers"][part][name]["kernel"] for tree in (whole, params))
        new, old = map(np.asarray, kernels)
        np.testing.assert_allclose(new, old + added, atol=1e-6)
    assert not changed(before, state.params)["encoder/layers/mlp/up/kernel"][0]
    tokens, ones = jnp.arange(5, 13)[None], jnp.ones((1, 8), jnp.int32)
    logits = apply_task(MODEL, HEAD, whole, tokens, 0 * ones, ones)
    rows = {"tokens": tokens, "type_ids": 0 * ones, "segment_ids": ones}
    objective = CASES["lora"].objective
    found = objective.forward(params, {**rows, "row_index": jnp.zeros(1)}, None, None)
    np.testing.assert_allclose(found.outputs, logits, atol=1e-6)


def test_a_run_begins_at_the_model_that_it_adapts():
    """B is zero, and the other parameters are those of a run without LoRA."""
    params = CASES["lora"].objective.init(jax.random.key(1))
    plain = PLAIN.objective.init(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, merged(LORA, params), plain)
    a = np.asarray(params["lora"]["layers"]["mlp"]["down"]["a"])
    assert np.std(a) == pytest.approx(1 / np.sqrt(3 * 32), rel=0.2)


@pytest.mark.parametrize("name", ["two layers", "lora"])
def test_the_same_on_any_mesh(runs, batches, name):
    config = dataclasses.replace(CASES[name], accumulation=2)
    mesh = make_trial_mesh(MeshConfig(fsdp=2, tensor=2), 2, jax.devices()[:4])
    losses, _, state = train(config, batches, mesh)
    np.testing.assert_allclose(losses, runs[name][0], atol=5e-6)
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=1e-4),
        *(jax.device_get(each.params) for each in (state, runs[name][2])),
    )


def test_a_member_equals_the_run_alone(runs, batches):
    alone = make_trial_mesh(MeshConfig(), 1, jax.devices()[:1])
    losses, _, _ = train(CASES["lora"], batches, alone, seeds=(4,), rates=(2e-2,))
    np.testing.assert_allclose(losses[:, 0], runs["lora"][0][:, 1], atol=2e-6)


@pytest.mark.parametrize("name", ["two layers", "lora"])
def test_a_save_has_what_is_trained_and_is_completed(runs, mesh, name):
    config, (_, _, state) = CASES[name], runs[name]
    seeds = np.array([3, 4])
    begin = partial(init_trials, config, mesh, seeds, [{}], np.zeros(2))
    first = begin()
    saved = to_save(config, mesh, first._replace(params=state.params))
    abstract = abstract_trials(config, mesh, 2)
    shape = partial(jax.tree.map, lambda leaf: (leaf.shape, leaf.dtype))
    assert shape(saved.params) == shape(abstract.best) == shape(first.best)
    assert shape(first.params) == shape(abstract.params)
    whole = from_saved(config, mesh, saved, begin)
    jax.tree.map(np.testing.assert_array_equal, whole.params, state.params)
    best = make_keep_best(config, mesh)(
        first.best, state.params, place_trials(np.array([True, False]), mesh)
    )
    one = jax.tree.map(lambda leaf: np.asarray(leaf)[0], jax.device_get((state.params, best)))
    jax.tree.map(np.testing.assert_array_equal, with_trained(config.objective, *one), one[0])


def test_a_trial_that_stopped_keeps_its_state(batches, mesh):
    config = CASES["two layers"]
    _, _, state = train(config, batches, mesh, steps=1)
    state = stop_trials(state, np.array([False, True]), mesh)
    before = jax.device_get(state)
    batch = place_rows(next(batches.epoch(0, (3, 4), 1)), mesh)
    settings = place_settings((1e-2, 2e-2), (3, 4), mesh)
    after = jax.device_get(make_train_step(config, mesh)(state, batch, settings)[0])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), before, after)
    assert after.step.tolist() == [2, 1]
    assert np.all(after.params["head"]["kernel"][0] != before.params["head"]["kernel"][0])

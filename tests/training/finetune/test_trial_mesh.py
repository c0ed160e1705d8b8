"""Trials on a mesh: parameters split, micro-batches, and the guard of each trial alone."""

import jax
import numpy as np
import pytest

from bert_jax.distributed.parallel.sharding import MeshConfig, make_trial_mesh
from bert_jax.model.config import ModelConfig
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.objectives.task import ClassLoss, TaskObjective
from bert_jax.tasks.rows import NO_LABEL, Rows, TrainBatches, choose_buckets, eval_batches
from bert_jax.training.finetune.evaluate import score_rows
from bert_jax.training.steps.guard import GuardConfig
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.recheck import GRADIENT_DIGESTS, Recheck, SilentCorruptionError
from bert_jax.training.steps.state import StepConfig
from bert_jax.training.steps.step import make_eval_step, make_train_step
from bert_jax.training.steps.trials import init_trials, place_rows, place_settings

MODEL = ModelConfig(
    num_layers=2, hidden_dim=16, num_heads=2, mlp_dim=32, vocab_size=50, num_positions=16,
    scan_unroll=1,
)  # fmt: skip
KINDS = {
    "single_label": TaskHeadConfig("classification", 3),
    "tags": TaskHeadConfig("tagging", 3),
    "span": TaskHeadConfig("span"),
}
SEEDS, RATES = [3, 4], [1e-2, 3e-3]


def step_config(kind, **settings):
    optimizer = OptimizerConfig(learning_rate=1.0, warmup_steps=2)
    # Micro-batches have unequal sums of weights, and those of some are below 1.
    classes = ClassLoss((0.3, 0.05, 2.0)) if kind == "tags" else ClassLoss()
    objective = TaskObjective(MODEL, KINDS[kind], kind, classes)
    return StepConfig(objective, optimizer, num_steps=8, **settings)


def rows_of(kind):
    random = np.random.default_rng(0)
    tokens = [random.integers(5, 50, random.integers(4, 16)).astype(np.int32) for _ in range(22)]
    labels = {
        "single_label": np.array([ids[1] % 3 for ids in tokens], np.int32),
        "tags": [np.where(ids % 2, ids % 3, NO_LABEL).astype(np.int32) for ids in tokens],
        "span": np.array([[1, len(ids) - 1] for ids in tokens], np.int32),
    }[kind]
    return Rows(tokens, np.array([len(ids) // 2 for ids in tokens], np.int32), labels)


def train(config, sizes, devices, *, trials=2, num_steps=4, spoil=lambda step, batch: None):
    """(T, M) metrics by name, the state, and the mesh."""
    rows = rows_of(config.objective.kind)
    mesh = make_trial_mesh(MeshConfig(*sizes), trials, jax.devices()[:devices])
    batches = TrainBatches(rows, choose_buckets(rows.lengths, 1), 8, 0)  # 8, 8 and 6 rows
    seeds = SEEDS[:trials]
    state = init_trials(config, mesh, np.array(seeds), [{}], np.zeros(trials)).train
    step = make_train_step(config, mesh)
    settings = place_settings(RATES[:trials], seeds, mesh)
    found = []
    for number in range(num_steps):
        epoch, at = divmod(number, batches.num_batches)
        batch = next(batches.epoch(epoch, seeds, at))
        spoil(number, batch)
        state, metrics = step(state, place_rows(batch, mesh, config.accumulation), settings)
        found.append(jax.device_get(metrics))
    return {name: np.stack([each[name] for each in found]) for name in found[0]}, state, mesh


@pytest.fixture(scope="module")
def on_one_device():
    return {kind: train(step_config(kind), (-1, 1, 1), 1)[0]["loss"] for kind in KINDS}


@pytest.mark.parametrize(
    ("kind", "sizes", "devices", "accumulation"),
    [
        ("single_label", (-1, 2, 1), 4, 1),
        ("single_label", (-1, 1, 2), 4, 1),
        ("single_label", (2, 2, 2), 8, 2),
        ("tags", (-1, 2, 2), 8, 4),
        ("span", (-1, 2, 1), 8, 2),
    ],
)
def test_every_mesh_gives_the_losses_of_one_device(
    on_one_device, kind, sizes, devices, accumulation
):
    """Dropout included, and batches whose parts have unequally many labels."""
    trials = 1 if sizes == (2, 2, 2) else 2
    config = step_config(kind, accumulation=accumulation)
    found, state, mesh = train(config, sizes, devices, trials=trials)
    assert mesh.shape["fsdp"] * mesh.shape["tensor"] > 1
    query = state.params["encoder"]["layers"]["attention"]["query"]["kernel"]
    parts = trials * mesh.shape["fsdp"] * mesh.shape["tensor"]
    assert query.addressable_shards[0].data.size == query.size // parts
    np.testing.assert_allclose(found["loss"], on_one_device[kind][:, :trials], atol=1e-5)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MeshConfig(1, -1), (2, 1, 4, 1)),
        (MeshConfig(1, 1, -1), (2, 1, 1, 4)),
        (MeshConfig(1, -1, 2), (2, 1, 2, 2)),
        (MeshConfig(fsdp=4, num_slices=2), (2, 1, 4, 1)),  # a slice each
    ],
)
def test_a_trial_takes_all_its_devices(config, shape):
    mesh = make_trial_mesh(config, 2)
    assert tuple(mesh.shape.values()) == shape
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(2, 4)
    assert np.sort(ids).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def spoil_first_trial(step, batch):
    """One row of the first trial has an infinite weight in the second step."""
    if step == 1:
        batch["weights"] = batch["weights"].copy()
        batch["weights"][0, 0] = np.inf


def test_a_trial_that_halts_stays_as_it_is_and_the_others_go_on():
    config = step_config("single_label")
    good, other, _ = train(config, (-1, 1, 1), 1)
    found, state, _ = train(config, (-1, 1, 1), 1, spoil=spoil_first_trial)
    assert found["halted"].tolist() == [[0, 0], [1, 0], [1, 0], [1, 0]]
    assert np.asarray(state.step).tolist() == [1, 4]
    np.testing.assert_array_equal(found["loss"][:, 1], good["loss"][:, 1])
    first = train(config, (-1, 1, 1), 1, num_steps=1)[1]
    leaves = map(jax.tree.leaves, (state.params, first.params, other.params))
    for halted, before, undisturbed in zip(*leaves, strict=True):
        np.testing.assert_array_equal(halted[0], before[0])
        np.testing.assert_array_equal(halted[1], undisturbed[1])


def test_a_trial_that_skips_a_batch_goes_on():
    config = step_config("single_label", guard=GuardConfig(on_bad_step="skip"))
    found, state, _ = train(config, (-1, 1, 1), 1, spoil=spoil_first_trial)
    assert found["bad"].tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]
    assert np.asarray(state.opt_state.num_updates).tolist() == [3, 4]
    assert np.isfinite(found["loss"][2:]).all()


@pytest.mark.parametrize(
    ("gather", "sizes", "devices", "trials", "wrong", "named"),
    [
        ("layer", (-1, 1, 1), 1, 2, 1, "0"),
        ("layer", (-1, 2, 2), 8, 6, 9, "4, 5, 6, 7"),
        ("step", (-1, 2, 2), 8, 6, 9, "6, 7"),
        ("layer", (-1, 1, 1), 2, 6, 2, "0"),
    ],
)
def test_a_device_is_named_where_it_trains_several_trials(
    gather, sizes, devices, trials, wrong, named
):
    """Digest `wrong` of all trials and parts of a batch differs when a step is computed again."""
    mesh = make_trial_mesh(MeshConfig(*sizes), trials, jax.devices()[:devices])
    config = step_config("single_label", gather=gather, guard=GuardConfig(recheck_every=1))
    state = init_trials(config, mesh, np.arange(trials), [{}], np.zeros(trials)).train
    digests = np.zeros((trials, mesh.shape["data"] * mesh.shape["fsdp"]), np.uint32)
    other = digests.copy()
    other.flat[wrong] = 1
    results = iter([(state, {GRADIENT_DIGESTS: each}) for each in (digests, other)])
    said = rf"gave different gradients: .* device ids {named} of process 0"
    with pytest.raises(SilentCorruptionError, match=said):
        Recheck(config, mesh, lambda: "").step(1, lambda _: next(results), state)


@pytest.mark.parametrize(("sizes", "devices"), [((-1, 1, 1), 1), ((-1, 2, 2), 8)])
def test_logits_and_loss_by_one_pass(sizes, devices):
    """The loss of all rows is that of a batch of all rows; logits come in the rows' order."""
    config = step_config("tags")
    rows = rows_of("tags")
    mesh = make_trial_mesh(MeshConfig(*sizes), 2, jax.devices()[:devices])
    state = init_trials(config, mesh, np.array(SEEDS), [{}], np.zeros(2))
    scored = score_rows(
        make_eval_step(config, mesh, seed=0), mesh, state.params, rows,
        buckets=(8, 16), batch_size=5, pad_id=0,
    )  # fmt: skip
    ((index, whole),) = eval_batches(rows, (16,), len(rows), 0)
    forward = jax.jit(lambda params, rows: config.objective.forward(params, rows, None, None))
    for trial, answers in enumerate(scored):
        params = jax.tree.map(lambda leaf, n=trial: np.asarray(leaf)[n], state.params)
        sums, logits = jax.device_get(forward(params, whole))
        assert answers.loss == pytest.approx(float(sums["loss"] / sums["count"]), abs=1e-5)
        for place, row in enumerate(index):
            length = rows.lengths[row]
            np.testing.assert_allclose(
                answers.outputs[row][:length], logits[place, :length], atol=1e-5
            )

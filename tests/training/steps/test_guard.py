"""The guard: what it calls bad, and that a bad step leaves no trace but the guard's own."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from bad_batches import poison
from steps import masked_lm_step

from bert_jax.config.mapping import build
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh, place_batch
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.steps.guard import GUARD_METRICS, GuardConfig, cleared, fresh_guard, judge
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import jitted_init, state_shardings
from bert_jax.training.steps.step import make_train_step

SKIP = GuardConfig(on_bad_step="skip", window=8)
STOP = GuardConfig(window=8)


run = jax.jit(judge, static_argnums=0)


def judged(config, losses, norms=None):
    """The guard after these losses, and what it said of each."""
    guard, said = fresh_guard(), []
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
        judgement = run(config, guard, np.float32(loss), np.float32(norm))
        guard = judgement.guard
        said.append(jax.device_get(judgement))
    return jax.device_get(guard), said


def bad_ones(said):
    return [number for number, judgement in enumerate(said) if judgement.metrics["bad"]]


def test_statistics_are_those_of_all_losses_then_of_the_recent_ones():
    losses = np.random.default_rng(0).normal(5, 0.2, 40).astype(np.float32)
    for count in (1, 3, 8):
        guard, said = judged(STOP, losses[:count])
        np.testing.assert_allclose(guard.mean, losses[:count].mean(), rtol=1e-6)
        np.testing.assert_allclose(guard.variance, losses[:count].var(), rtol=1e-4, atol=1e-9)
        assert guard.num_good == count
        assert set(said[-1].metrics) == set(GUARD_METRICS)
    mean = losses[:8].mean()
    for loss in losses[8:]:
        mean += (loss - mean) / 8
    guard, said = judged(STOP, losses)
    np.testing.assert_allclose(guard.mean, mean, rtol=1e-5)
    # A judgement is by the steps before it, and says so.
    before, _ = judged(STOP, losses[:-1])
    last = said[-1].metrics
    assert last["guard_mean"] == before.mean
    np.testing.assert_allclose(last["guard_std"], np.sqrt(before.variance), rtol=1e-6)
    np.testing.assert_allclose(
        last["guard_limit"], before.mean + max(10 * np.sqrt(before.variance), 1), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(np.nan, 1), (np.inf, 1), (-np.inf, 1), (5, np.nan), (5, np.inf), (np.nan, np.nan)],
)
@pytest.mark.parametrize("place", [0, 3, 20])
def test_what_is_not_finite_is_bad_from_the_first_step_and_leaves_no_trace(loss, norm, place):
    config = replace(SKIP, spike_sigmas=0.0)
    losses, norms = [5.0 + 0.01 * n for n in range(25)], [1.0] * 25
    clean, _ = judged(config, losses)
    losses.insert(place, loss)
    norms.insert(place, norm)
    guard, said = judged(config, losses, norms)
    assert bad_ones(said) == [place]
    assert not said[place].taken
    assert said[place].advance == 1
    assert said[place].metrics["guard_skipped"] == 1
    assert guard == clean  # finite, and to the last bit


def test_a_spike_is_bad_and_does_not_enter_the_statistics():
    def verdict(config, spread, loss):
        """Of one loss after 30 that alternate around 3."""
        steady = [3.0 + spread * (-1) ** n for n in range(30)]
        guard, said = judged(config, [*steady, loss])
        assert bad_ones(said) in ([], [30])
        bad = bool(bad_ones(said))
        clean, _ = judged(config, steady)
        assert bad == (guard == clean._replace(skipped=np.int32(1)))
        return bad

    assert not verdict(SKIP, 0.05, 3.9)  # 18 deviations, but less than 1 nat
    assert verdict(SKIP, 0.05, 4.1)
    assert not verdict(SKIP, 0.5, 7.5)  # 9 deviations
    assert verdict(SKIP, 0.5, 8.5)
    assert not verdict(SKIP, 0.5, 0.0)  # a low loss is none
    assert verdict(replace(SKIP, spike_sigmas=2.5), 0.5, 4.5)
    assert not verdict(replace(SKIP, spike_sigmas=0.0), 0.5, 1e30)


def test_early_steps_are_not_judged():
    for wild in ([9.0, 2.0, 40.0, 9.0], [1e30, 1.0, 1e-9, 1e12]):
        _, said = judged(STOP, wild)
        assert bad_ones(said) == []
        assert all(np.isinf(judgement.metrics["guard_limit"]) for judgement in said)
        guard, said = judged(STOP, [*wild, 2.0])
        assert np.isfinite(said[-1].metrics["guard_limit"])
        assert np.isfinite(guard.variance)


def test_a_loss_as_in_pretraining_is_never_a_spike():
    """Falls fast, rests on a plateau, falls again, moves at a change of length; with noise."""
    step = np.arange(4000)
    curve = 10.4 * np.exp(-step / 40) + 6.2 / (1 + np.exp((step - 1500) / 100)) + 1.8
    curve[3000:] += 0.6  # rows of 512 after rows of 128
    for seed in range(3):
        noise = np.random.default_rng(seed).normal(0, 0.12, step.size)
        _, said = judged(GuardConfig(), (curve + noise).astype(np.float32)[::4].tolist())
        assert bad_ones(said) == []


def test_stop_halts_at_once_and_for_good():
    guard, said = judged(STOP, [3.0] * 6 + [np.nan] + [3.0] * 3)
    at = said[6]
    assert (at.metrics["halted"], at.advance, bool(at.taken)) == (1, 0, False)
    for later in said[7:]:
        assert later.guard == at.guard == guard
        assert (later.metrics["halted"], later.advance, bool(later.taken)) == (1, 0, False)
    clean, _ = judged(STOP, [3.0] * 6)
    assert guard == clean._replace(halted=np.int32(1))
    on_mesh = jax.device_put(guard, make_mesh_sharding())
    assert jax.device_get(cleared(on_mesh)) == clean
    assert cleared(on_mesh).halted.sharding == on_mesh.halted.sharding


def make_mesh_sharding():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def test_skips_in_a_row_are_counted_and_one_more_stops():
    config = replace(SKIP, max_skips=2)
    nan = np.nan
    guard, said = judged(config, [3.0, nan, nan, 3.0, nan, nan, nan, 3.0])
    assert [int(j.metrics["guard_skipped"]) for j in said] == [0, 1, 2, 0, 1, 2, 2, 2]
    assert [int(j.metrics["halted"]) for j in said] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert [int(j.advance) for j in said] == [1, 1, 1, 1, 1, 1, 0, 0]
    assert guard.num_good == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_bad_step": "skp"}, r"guard\.on_bad_step is 'skp'.*nearest: 'skip'"),
        ({"max_skips": 0}, r"guard\.max_skips is 0; it must be at least 1"),
        ({"spike_sigmas": -1.0}, r"guard\.spike_sigmas is -1\.0; it must be at least 0"),
        ({"window": 1}, r"guard\.window is 1; it must be at least 2"),
    ],
)
def test_a_guard_that_cannot_judge_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        build(PretrainConfig, {"guard": changes})


CONFIG = masked_lm_step(
    model=ModelConfig(
        vocab_size=250, num_positions=16, hidden_dim=16, num_layers=1, num_heads=8, mlp_dim=32,
        hidden_dropout_rate=0.0, attention_dropout_rate=0.0,
    ),
    masking=MaskingConfig(max_predictions=4),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=6),
    num_steps=10,
    special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
    guard=GuardConfig(on_bad_step="skip", window=2),
    phase_starts=(8,),
)  # fmt: skip
ROWS, LENGTH = 32, 16
BAD = {1: "gradient", 3: "spike", 4: "nan", 6: "inf"}
"""By batch; each on a row of its own, and hence on a device of its own."""
RUNS = {"1": ((1, 1, 1), 1), "8": ((8, 1, 1), 2), "2x2x2": ((2, 2, 2), 4)}
"""Mesh sizes and micro-batches."""


def make_batch(number):
    """Number `number` of a stream: rows from number * ROWS on."""
    rng = np.random.default_rng(number)
    return {
        "tokens": rng.integers(5, 250, (ROWS, LENGTH)).astype(np.uint16),
        "type_ids": rng.integers(0, 2, (ROWS, LENGTH)).astype(np.uint8),
        "segment_ids": np.ones((ROWS, LENGTH), np.uint8),
        "pair_labels": rng.integers(0, 2, ROWS).astype(np.int32),
        "row_index": np.arange(number * ROWS, (number + 1) * ROWS, dtype=np.uint32),
    }


class Stepper:
    """A step that is bad for the batches of `BAD`, on one mesh."""

    def __init__(self, config, sizes, accumulation):
        self.config = replace(config, accumulation=accumulation)
        self.mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])
        self.step = make_train_step(self.config, self.mesh)
        self.first = jax.device_get(jitted_init(self.config, self.mesh)(jax.random.key(0)))

    def run(self, numbers):
        """States before the first and after each of these batches, and metrics, on the host."""
        state = jax.device_put(self.first, state_shardings(self.config, self.mesh))
        states, metrics = [self.first], []
        for number in numbers:
            state, values = self.step(state, place_batch(make_batch(number), self.mesh))
            states.append(jax.device_get(state))
            metrics.append(jax.device_get(values))
        return states, metrics


@pytest.fixture(scope="module", autouse=True)
def _bad_batches():
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, {number * ROWS + 5 * number: what for number, what in BAD.items()})
        yield


@pytest.fixture(scope="module")
def skipping():
    """Stepper, states and metrics of batches 0 to 7 where bad ones are skipped, by mesh."""
    steppers = {name: Stepper(CONFIG, *how) for name, how in RUNS.items()}
    return {name: (stepper, *stepper.run(range(8))) for name, stepper in steppers.items()}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("mesh", RUNS)
@pytest.mark.parametrize("number", BAD)
def test_a_skipped_step_changes_no_bit_of_parameters_and_optimizer(skipping, mesh, number):
    _, states, metrics = skipping[mesh]
    before, after = states[number], states[number + 1]
    assert [n for n, values in enumerate(metrics) if values["bad"]] == list(BAD)
    assert bits((after.params, after.opt_state)) == bits((before.params, before.opt_state))
    assert after.step == number + 1
    assert after.guard == before.guard._replace(skipped=before.guard.skipped + np.int32(1))
    values = metrics[number]
    if BAD[number] == "gradient":
        assert np.isfinite(values["loss"])
        assert np.isnan(values["grad_norm"])
    if BAD[number] == "spike":
        assert values["loss"] > values["guard_limit"] > values["guard_mean"] > 1


@pytest.mark.parametrize("mesh", RUNS)
def test_training_goes_on_after_a_skip(skipping, mesh):
    _, states, metrics = skipping[mesh]
    assert [int(values["guard_skipped"]) for values in metrics] == [0, 1, 0, 1, 2, 0, 1, 0]
    # The schedule waits for the skipped: the rise of the warm-up has no gap.
    rates = [values["learning_rate"] for values in metrics if not values["bad"]]
    np.testing.assert_allclose(np.diff(rates), 1e-3 / 6, rtol=1e-4)
    last = states[-1]
    assert (last.step, last.opt_state.num_updates, last.guard.num_good) == (8, 4, 4)
    assert bits(last.params) != bits(states[-2].params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(last))


def test_after_a_skip_all_is_as_if_the_batch_had_not_been(skipping):
    """But for the batch's number; dropout, which depends on it, is off here."""
    stepper, states, _ = skipping["1"]
    without, _ = stepper.run([0, 2, 5, 7])
    assert bits(states[-1]._replace(step=0)) == bits(without[-1]._replace(step=0))


def test_every_mesh_decides_alike(skipping):
    (_, states, metrics), *others = skipping.values()
    for _, other_states, other_metrics in others:
        for a, b in zip(metrics, other_metrics, strict=True):
            for name in GUARD_METRICS:
                np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-4, err_msg=name)
        for a, b in zip(states, other_states, strict=True):
            assert a.step == b.step
            np.testing.assert_allclose(a.guard, b.guard, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mesh", RUNS)
def test_a_phase_starts_with_new_statistics(skipping, mesh):
    """The batch that was a spike in the middle of a phase is the first of the next phase."""
    stepper, _, _ = skipping[mesh]
    states, metrics = stepper.run([0, 2, 5, 7, 0, 2, 5, 3, 3, 4, 5])
    assert [int(values["bad"]) for values in metrics] == [0] * 7 + [1, 0, 1, 0]
    assert [int(state.guard.num_good) for state in states[1:]] == [*range(1, 8), 7, 1, 1, 2]
    first = metrics[8]
    assert first["guard_limit"] == np.inf
    assert first["guard_mean"] == first["guard_std"] == 0
    assert states[9].guard.mean == first["loss"] > 100
    assert metrics[10]["guard_mean"] == first["loss"]


def test_a_phase_whose_first_batch_is_skipped_starts_with_new_statistics(skipping):
    stepper, _, _ = skipping["1"]
    states, metrics = stepper.run([0, 2, 5, 7, 0, 2, 5, 7, 4, 3])
    assert [int(values["bad"]) for values in metrics[8:]] == [1, 0]
    assert [int(state.guard.num_good) for state in states[9:]] == [0, 1]


def test_a_halted_state_is_the_input_of_the_bad_step():
    stepper = Stepper(replace(CONFIG, guard=GuardConfig(window=2)), (2, 2, 2), 2)
    states, metrics = stepper.run([0, 2, 3, 5])
    before = states[2]
    assert [int(values["halted"]) for values in metrics] == [0, 0, 1, 1]
    for after in states[3:]:
        assert bits(after._replace(guard=0)) == bits(before._replace(guard=0))
        assert after.guard == before.guard._replace(halted=np.int32(1))

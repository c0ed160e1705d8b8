"""Learning-rate schedules at their corners, and what their fields refuse."""

import itertools
from copy import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.config.mapping import build
from bert_jax.data.phases import scaling
from bert_jax.errors import UserError
from bert_jax.training.steps.optim import (
    OPTIMIZERS,
    SCHEDULES,
    OptimizerConfig,
    PhaseRate,
    learning_rate_schedule,
    make_optimizer,
)
from bert_jax.training.steps.optim_parts import counted


def rates(config, num_steps):
    schedule = jax.jit(learning_rate_schedule(config, num_steps))
    return np.asarray(schedule(jnp.arange(num_steps + 1))).tolist()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedule(schedule):
    config = OptimizerConfig(learning_rate=2.0, schedule=schedule, warmup_steps=4)
    values = rates(config, 12)
    np.testing.assert_allclose(values[:5], [0.5, 1.0, 1.5, 2.0, 2.0], rtol=1e-6)
    assert all(a > b for a, b in itertools.pairwise(values[4:]))
    assert values[11] > 0
    np.testing.assert_allclose(values[12], 0, atol=1e-6)
    np.testing.assert_allclose(values[8], 1.0, rtol=1e-6)  # half-way, in both shapes
    quarter = {"linear": 1.5, "cosine": 1 + np.cos(np.pi / 4)}
    np.testing.assert_allclose(values[6], quarter[schedule], rtol=1e-6)


LATE = OptimizerConfig(learning_rate=2.0, warmup_steps=4, decay_share=0.25)
"""20 steps: a rise of 4, and a decay over the last 4 of the 16 others."""


def test_a_constant_rate_never_falls():
    values = rates(replace(LATE, schedule="constant"), 20)
    np.testing.assert_allclose(values, [0.5, 1.0, 1.5, *[2.0] * 18], rtol=1e-6)


def test_wsd_stays_and_then_falls_linearly():
    values = rates(replace(LATE, schedule="wsd"), 20)
    expected = [0.5, 1.0, 1.5, *[2.0] * 14, 1.5, 1.0, 0.5, 0.0]
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)


def test_one_minus_sqrt_begins_at_the_peak_and_falls_fastest_at_first():
    values = rates(replace(LATE, schedule="one_minus_sqrt"), 20)
    fall = [2 * (1 - np.sqrt(part)) for part in (0.25, 0.5, 0.75, 1.0)]
    np.testing.assert_allclose(values, [0.5, 1.0, 1.5, *[2.0] * 14, *fall], rtol=1e-5, atol=1e-6)
    whole = replace(LATE, schedule="one_minus_sqrt", warmup_steps=0, decay_share=1.0)
    np.testing.assert_allclose(rates(whole, 4), [2.0, *fall], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"constant", "inverse_sqrt"}))
def test_a_decay_ends_at_its_share_of_the_peak(schedule):
    config = replace(LATE, schedule=schedule, end_share=0.1)
    values = rates(config, 20)
    np.testing.assert_allclose(values[:5], [0.5, 1.0, 1.5, 2.0, 2.0], rtol=1e-6)
    assert values[19] > 0.2
    np.testing.assert_allclose(values[20], 0.2, rtol=1e-5)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_run_that_is_all_warmup_reaches_the_peak(schedule):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=5)
    np.testing.assert_allclose(rates(config, 5)[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)


@pytest.mark.parametrize(("width", "peak"), [(512, 6.988e-4), (128, 1.3975e-3)])
def test_inverse_sqrt_is_the_schedule_of_the_paper(width, peak):
    # Vaswani et al. 2017, equation 3: d^-0.5 min(s^-0.5, s w^-1.5), s counted from 1.
    rate = width**-0.5 * 4000**-0.5
    np.testing.assert_allclose(rate, peak, rtol=1e-4)
    config = OptimizerConfig(learning_rate=rate, schedule="inverse_sqrt", warmup_steps=4000)
    steps = np.array([1, 2, 3999, 4000, 4001, 16_000, 100_000])
    expected = width**-0.5 * np.minimum(steps**-0.5, steps * 4000**-1.5)
    schedule = learning_rate_schedule(config, 100_000)
    np.testing.assert_allclose(schedule(jnp.asarray(steps - 1)), expected, rtol=1e-5)


def test_warmup_rate_is_a_share_of_all_steps():
    assert OptimizerConfig(warmup_rate=0.29).num_warmup_steps(100) == 29  # 28.999999999999996
    rate = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, warmup_rate=0.1), 200)
    np.testing.assert_allclose(rate(0), 1 / 20, rtol=1e-6)
    np.testing.assert_allclose(rate(19), 1.0, rtol=1e-6)


def test_a_warm_up_longer_than_training_is_a_tenth_of_it_and_said():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=100)
    assert [config.num_warmup_steps(steps) for steps in (1, 50, 99, 100, 101)] == [
        1, 5, 10, 100, 100,
    ]  # fmt: skip
    np.testing.assert_allclose(learning_rate_schedule(config, 50)(4), 1.0, rtol=1e-6)
    (line,) = scaling("optimizer.warmup_steps", 100, 50)
    assert line.endswith("optimizer.warmup_steps is 100, longer than the 50 steps: scaled to 5")
    assert scaling("optimizer.warmup_steps", 100, 100) == []


def test_a_schedule_is_what_its_entry_says(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "linear", lambda at: at.left**2)
    config = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=0)
    np.testing.assert_allclose(rates(config, 2), [1.0, 0.25, 0.0], atol=1e-6)


def test_a_recipe_may_register_an_optimizer(monkeypatch):
    with pytest.raises(
        UserError, match=r"optimizer\.name is 'sign'.* that the module of a recipe reg"
    ):
        OptimizerConfig(name="sign")
    made = counted(optax.stateless(lambda grads, _: jax.tree.map(jnp.sign, grads)))
    monkeypatch.setitem(OPTIMIZERS, "sign", lambda config, axes: made)
    config = OptimizerConfig(name="sign", learning_rate=0.5, warmup_steps=0, schedule="constant")
    optimizer, params = make_optimizer(config, 2, {"w": ("embed",)}), {"w": jnp.ones(2)}
    steps, state = optimizer.update({"w": jnp.array([0.2, -0.3])}, optimizer.init(params), params)
    np.testing.assert_allclose(steps["w"], [-0.5, 0.5])
    assert int(state.num_updates) == 1


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("name", "sgd", "one of adamw, lamb, muon, stable_adamw"),
        ("schedule", "step", "one of linear, cosine, constant, wsd, one_minus_sqrt, inverse_sqrt"),
        ("learning_rate", 0.0, "above 0"),
        ("decay_share", 0.0, r"in \(0, 1\]"),
        ("end_share", 1.0, r"in \[0, 1\)"),
        ("warmup_steps", -1, "at least 0"),
        ("warmup_rate", 1.0, r"in \[0, 1\)"),
        ("weight_decay", -0.1, "at least 0"),
        ("b1", 1.0, r"in \[0, 1\)"),
        ("b2", -0.5, r"in \[0, 1\)"),
        ("momentum", 1.0, r"in \[0, 1\)"),
        ("eps", 0.0, "above 0"),
        ("clip_norm", 0.0, "above 0, or None"),
    ],
)
def test_bad_values_name_their_field_and_what_is_right(field, value, wanted):
    config = copy(OptimizerConfig())
    object.__setattr__(config, field, value)  # the types of names are checked in tests
    with pytest.raises(UserError, match=rf"optimizer\.{field} is {value!r}; it must be {wanted}"):
        config.__post_init__()


@pytest.mark.parametrize(
    ("field", "value", "near"), [("name", "muom", "muon"), ("schedule", "wsb", "wsd")]
)
def test_a_configuration_with_an_unknown_name_hears_of_all_and_the_nearest(field, value, near):
    with pytest.raises(UserError, match=rf"{field} is '{value}'.*one of .*nearest: '{near}'"):
        build(OptimizerConfig, {field: value})


def test_a_phase_has_its_own_peak_and_decay():
    config = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=4, end_share=0.5)

    def rates(phase: PhaseRate | None) -> np.ndarray:
        return np.asarray(learning_rate_schedule(config, 100, phase)(jnp.arange(100)))

    whole = rates(None)
    # A peak alone: the run's schedule, warm-up included, at another height.
    np.testing.assert_allclose(rates(PhaseRate(3.0)), 3 * whole, rtol=1e-6)
    # A decay of its own between steps 40 and 60, as written out.
    sqrt = rates(PhaseRate(0.3, "one_minus_sqrt", 0.03, start=40, num_steps=20))
    progress = np.arange(20) / 19
    assert sqrt[40] == pytest.approx(0.3)
    assert sqrt[59] == pytest.approx(0.03)  # from the first to the last step
    np.testing.assert_allclose(sqrt[40:60], 0.03 + 0.27 * (1 - np.sqrt(progress)), rtol=1e-6)
    np.testing.assert_allclose(sqrt[60:], 0.03, rtol=1e-6)
    flat = rates(PhaseRate(0.3, "constant", 0.0, start=40, num_steps=20))
    np.testing.assert_allclose(flat[4:], 0.3, rtol=1e-6)
    # In the phase of the warm-up the decay begins after the rise.
    first = rates(PhaseRate(2.0, "linear", 0.0, start=0, num_steps=24))
    np.testing.assert_allclose(first[:5], [0.5, 1, 1.5, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(first[4:24], 2 * (1 - np.arange(20) / 19), atol=1e-6)
    # The decay of a recipe that the page on pretraining shows, in 22 steps.
    shown = rates(PhaseRate(3e-4, "one_minus_sqrt", 3e-7, start=78, num_steps=22))
    assert shown[99] == pytest.approx(3e-7, rel=1e-3)

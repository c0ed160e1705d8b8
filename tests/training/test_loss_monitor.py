import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_run import small_config

from bert_jax.data.shard import Shard
from bert_jax.data.store import TokenStore
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.training.loss_monitor import MARGIN, LossMonitor
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.settings import loss_monitor, objective_of, step_config
from bert_jax.training.run.telemetry import compare

METRIC = MaskedLM.metrics_of(pairs=True)[0]


def monitor(config, baseline: float) -> LossMonitor:
    return loss_monitor(config, replace(objective_of(config), baseline=baseline))


def detector(num_steps=1000) -> LossMonitor:
    """Phases change after 60% of the steps."""
    config = small_config(
        training__num_steps=num_steps, optimizer={"learning_rate": 3e-3, "warmup_steps": 20}
    )
    return replace(monitor(config, 6.0), unknown_rate=0.0123)


def found(watched: LossMonitor, losses) -> list[tuple[int, str, str]]:
    """Step, kind and message of all findings."""
    return [
        (step, *finding)
        for step, loss in enumerate(losses, start=1)
        for finding in watched.observe(step, float(loss))
    ]


def warnings_of(watched: LossMonitor, losses) -> dict[int, str]:
    return {step: text for step, kind, text in found(watched, losses) if kind == "plateau"}


def test_baseline_is_the_unigram_entropy_without_special_tokens():
    counts = np.array([50, 10, 50, 50, 50, 4, 2, 2], np.int64)
    shard = Shard(
        tokens=np.zeros(218, np.uint16),
        sentence_offsets=np.zeros(1, np.int64),
        document_offsets=np.zeros(1, np.int64),
        vocab_size=8,
        special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
    )
    store = TokenStore.of([shard], counts)
    config = small_config()
    objective = step_config(config, Corpus(store, None)).objective
    watched = loss_monitor(config, objective, store)
    assert watched.baseline == pytest.approx(1.5 * np.log(2))
    assert watched.unknown_rate == pytest.approx(10 / 218)


def test_warns_once_at_the_plateau_with_numbers_and_causes():
    watched = detector()
    said = warnings_of(watched, [6.02] * 1000)
    assert list(said) == [watched.judged_at] == [20 + 250]
    (text,) = said.values()
    for part in (
        "6.020 nats at step 270", "entropy of the corpus is 6.000", "0.003, is too high (try 1e-3)",
        "20 of 1,000 steps", "16 rows of 32, 512 tokens a step", "1,000 steps are too few",
        "1.2% of the tokens are unknown",
    ):  # fmt: skip
        assert part in text.replace("1.0e-3", "1e-3"), part
    assert "\n" not in text


def test_silent_when_the_loss_falls_even_if_it_started_at_the_baseline():
    falling = [max(6.0, 9 - 0.1 * step) - max(0, step - 150) * 0.005 for step in range(1000)]
    assert warnings_of(detector(), falling) == {}


def test_margin_below_the_baseline_counts_as_plateau():
    assert warnings_of(detector(), [6.0 - 0.5 * MARGIN] * 1000)
    assert not warnings_of(detector(), [6.0 - 2 * MARGIN] * 1000)


def test_a_long_warm_up_is_not_named_as_a_cause():
    watched = monitor(small_config(training__num_steps=1000, optimizer__warmup_steps=100), 6.0)
    (text,) = warnings_of(watched, [6.02] * 1000).values()
    assert "warm-up is too short" not in text


def test_state_survives_a_restart():
    """At any step: before the statistics fill, at the change of phase, between two alarms."""
    losses = diverging(600, 0.05, 7.0)[550:]  # a rise to 7.0; the change of phase is at step 60
    whole = detector(100)
    said, ends = [], []
    for step, loss in enumerate(losses, start=1):
        said += [(step, *finding) for finding in whole.observe(step, loss)]
        ends.append(json.loads(json.dumps(whole.state())))
    assert [kind for _, kind, _ in said].count("diverged") == 2
    for cut, state in list(enumerate(ends, start=1))[::9]:
        again = detector(100)
        again.restore(state, cut)
        rest = [
            (step, *finding)
            for step, loss in enumerate(losses[cut:], start=cut + 1)
            for finding in again.observe(step, loss)
        ]
        assert rest == [finding for finding in said if finding[0] > cut]
        assert again.state() == ends[-1]


def test_a_checkpoint_of_an_older_version_continues():
    """The monitor had three values then; its mean keeps its meaning, and a rise is still seen."""
    losses = diverging(800, 0.05, 3.0)
    whole, again = detector(), detector()
    for step, loss in enumerate(losses[:700], start=1):
        whole.observe(step, loss)
    old = {name: whole.state()[name] for name in ("mean", "weight", "done")}
    again.restore(old, 700)
    later = []
    for step, loss in enumerate(losses[700:], start=701):
        later.append(again.observe(step, loss))
        whole.observe(step, loss)
        assert again.smoothed == whole.smoothed
    assert [finding.kind for findings in later for finding in findings] == ["diverged"]


def test_judgement_falls_within_the_run():
    config = small_config(training__num_steps=6, optimizer__warmup_steps=5)
    watched = monitor(config, 6.0)
    assert watched.judged_at == 6
    assert list(warnings_of(watched, [7.0] * 6)) == [6]


@pytest.mark.parametrize("slope", [0.001, 0.002, 0.01])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_no_plateau_while_the_smoothed_loss_falls(slope, noise):
    """Above the line at a quarter of the run, on the way down."""
    random = np.random.default_rng(0)
    losses = 6.0 + slope * (330 - np.arange(1000)) + random.normal(0, noise, 1000)
    assert warnings_of(detector(), losses) == {}


@pytest.mark.parametrize("level", [6.02, 6.05, 6.5])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("begin", [60, 200, 400])
def test_a_plateau_is_found_after_a_fall_at_any_time(begin, noise, level):
    random = np.random.default_rng(begin)
    losses = level + np.maximum(0, begin - np.arange(1000)) * 0.02 + random.normal(0, noise, 1000)
    watched = detector()
    (step,) = warnings_of(watched, losses)
    assert watched.judged_at <= step <= max(watched.judged_at, begin) + 16 * watched.window


def test_a_loss_that_comes_to_a_stand_above_the_line_is_found_after_a_restart():
    losses = 6.02 + np.maximum(0, 400 - np.arange(1000)) * 0.02
    whole, again = detector(), detector()
    steps = list(warnings_of(whole, losses))
    first = detector()
    assert warnings_of(first, losses[:300]) == {}
    again.restore(json.loads(json.dumps(first.state())), 300)
    found_at = [s for s in range(301, 1001) if again.observe(s, float(losses[s - 1]))]
    assert found_at == steps


def test_compare_names_the_side():
    assert compare(METRIC, 6.5, 7.0) == "6.500 nats, 0.500 below unigram entropy"
    assert compare(METRIC, 7.25, 7.0) == "7.250 nats, 0.250 above unigram entropy"


def test_a_loss_far_above_the_line_is_not_called_a_plateau():
    (text,) = warnings_of(detector(), [7.4] * 1000).values()
    assert "has not yet learnt even how frequent" in text
    assert "too low for so short a run (try 9e-3)" in text.replace("9.0e-3", "9e-3")


GOLDEN = Path(__file__).parents[1] / "golden" / "losses.npz"
"""Masked-LM loss of each step of real runs."""
RUNS = [("mini", 2000, (0.9, 0.1), 6.530), ("tiny", 3000, (0.9, 0.1), 5.782)]
SLOPES = (0.02, 0.05, 0.1, 0.2)
"""Nats a step."""


def diverging(healthy, slope, top, fall=0.002, length=400):
    """Losses that fall to 2.0 in `healthy` steps and then rise to `top`."""
    rising = np.minimum(2.0 + slope * np.arange(1, length + 1), top)
    return np.concatenate([2.0 + fall * np.arange(healthy)[::-1], rising])


@pytest.mark.parametrize("top", [3.0, 7.5])
@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5])
def test_a_rise_of_a_nat_is_reported_within_100_steps(slope, top, noise):
    """Whether or not the loss rises further, and while it had still been falling fast."""
    for seed, fall in enumerate((0.0, 0.005)):
        losses = diverging(250, slope, top, fall, length=300)
        losses += np.random.default_rng(seed).normal(0, noise, losses.size)
        reached = 250 + 1 / slope
        reports = [step for step, kind, _ in found(detector(10_000), losses) if kind == "diverged"]
        assert 250 < reports[0] <= reached + 100
        # A second report says that the loss is back at the unigram line, if it is.
        assert len(reports) == (2 if top == 7.5 else 1)


def test_a_report_says_how_far_and_from_where():
    watched = detector(10_000)
    (_, _, first), (step, _, second) = [
        finding for finding in found(watched, diverging(800, 0.1, 7.5)) if finding[1] == "diverged"
    ]
    assert "lowest value was 2.0" in first
    assert "at step 80" in first
    assert "The newest checkpoint of step 80" in first
    assert "learning rate, 0.003, is too high" in first
    assert "unigram" not in first
    assert f"nats at step {step} " in second
    assert "climbed back above the unigram entropy of the corpus, 6.000" in second


def test_a_loss_that_comes_down_again_is_said_and_watched_anew():
    wave = np.concatenate([np.full(200, 2.0), np.full(150, 3.0)])
    kinds = [kind for _, kind, _ in found(detector(10_000), np.tile(wave, 3))]
    assert kinds == ["diverged", "recovered"] * 2 + ["diverged"]


def test_a_small_gain_that_is_lost_to_the_line_is_reported():
    """A model half a nat below the line cannot climb by much more than that."""
    losses = np.concatenate([np.linspace(7, 5.5, 400), np.linspace(5.5, 6.2, 300)])
    watched = detector(10_000)
    reports = [text for _, kind, text in found(watched, losses) if kind == "diverged"]
    assert len(reports) == 1
    assert "climbed back above the unigram entropy" in reports[0]
    assert watched.smoothed - watched.lowest > 0.3


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_a_healthy_run_is_never_reported(noise):
    """Fall from chance, plateau, bump at the end of the warm-up, longer rows, small batches.

    50 masked positions a step make a deviation of about 0.4.
    """
    step = np.arange(10_000)
    curve = 4.0 * np.exp(-step / 60) + 4.2 / (1 + np.exp((step - 2500) / 300)) + 2.2
    curve += 0.3 * np.exp(-(((step - 1500) / 80) ** 2))
    curve[6000:] += 0.3 + 1.2 * np.exp(-np.arange(4000) / 100)  # positions that are new
    losses = curve + np.random.default_rng(0).normal(0, noise, step.size)
    assert found(detector(10_000), losses) == []


def test_a_phase_starts_a_new_reference_unless_it_loses_what_was_learnt():
    def kinds(second):
        losses = np.concatenate([np.linspace(7, 4, 600), second])
        watched = detector()
        return [kind for _, kind, _ in found(watched, losses)], watched

    silent, watched = kinds(np.full(400, 5.5))
    assert silent == []
    assert watched.lowest == pytest.approx(5.5)
    assert watched.lowest_at > 600
    silent, watched = kinds(4.5 + 4 * np.exp(-np.arange(400) / 20))
    assert silent == []
    assert watched.lowest_at > 900
    said, watched = kinds(np.full(400, 6.5))
    assert said == ["diverged"]
    assert watched.lowest_at == 600
    # The first batch of a phase may have been skipped, and the state saved just then.
    watched, again = detector(), detector()
    for step in range(1, 601):
        watched.observe(step, 4.0)
    again.restore(watched.state(), 601)
    for step in range(602, 700):
        assert watched.observe(step, 5.5) == again.observe(step, 5.5) == []
    assert again.state() == watched.state()
    assert watched.lowest == pytest.approx(5.5)


def replayed(name, num_steps, phases, baseline, rise=None):
    """Findings over the losses of a real run (docs/experiments.md), as (step, kind).

    Args:
        name: Name of the run.
        num_steps: Number of its steps.
        phases: Shares of its phases.
        baseline: Unigram entropy of its corpus.
        rise: Nats a step, added from the middle of the first phase on, up to 5.
    """
    losses = np.load(GOLDEN)[name].astype(float)
    assert losses.size == num_steps
    begun = int(num_steps * phases[0] / 2)
    if rise:
        losses[begun:] += np.minimum(rise * np.arange(num_steps - begun), 5)
    config = small_config(
        training__num_steps=num_steps,
        training__phases=[{"length": 32, "share": share} for share in phases],
        optimizer={"warmup_steps": num_steps * 2 // 5},  # the plateau is judged after the rise
    )
    said = found(monitor(config, baseline), losses)
    return [(step, kind) for step, kind, _ in said], begun


@pytest.mark.parametrize(("name", "baseline"), [("mini", 6.530), ("tiny", 5.782)])
def test_real_losses_that_end_below_the_line_give_no_plateau_alarm(name, baseline):
    """The first steps of a real run as runs of 200 to 2,000 steps, many above the line at first."""
    losses, looks = np.load(GOLDEN)[name].astype(float), []
    for num_steps in range(200, 2001, 100):
        config = small_config(
            training__num_steps=num_steps, training__phases=[{"length": 32}],
            optimizer={"warmup_steps": num_steps // 20},
        )  # fmt: skip
        watched = monitor(config, baseline)
        said = warnings_of(watched, losses[:num_steps])
        assert set(said) <= ({num_steps} if watched.smoothed >= baseline - MARGIN else set())
        looked = monitor(config, baseline)
        found(looked, losses[: looked.judged_at])
        looks.append(looked.smoothed >= baseline - MARGIN)
    assert sum(looks) == {"mini": 12, "tiny": 2}[name]  # above the line at the first look


@pytest.mark.parametrize("run", RUNS)
def test_a_real_run_is_healthy_and_a_rise_in_it_is_reported(run):
    assert replayed(*run)[0] == []
    for slope in SLOPES:
        said, begun = replayed(*run, slope)
        first = next(step for step, kind in said if kind == "diverged")
        assert begun < first <= begun + 1 / slope + 100


def test_a_real_divergence_is_reported_once_as_a_rise_and_once_at_the_line():
    """A trained model at a rate that grows until the model has forgotten everything."""
    said, _ = replayed("diverging", 1000, (0.9, 0.1), 5.782)
    losses = np.load(GOLDEN)["diverging"].astype(float)
    means = np.convolve(losses, np.ones(20) / 20, "valid")
    risen = 20 + int(np.argmax(means > means.min() + 1))
    (first, kind), (second, again) = said
    assert (kind, again) == ("diverged", "diverged")
    assert first <= risen + 100
    assert losses[second:].mean() > 5.782 > losses[first:second].mean()


@pytest.mark.parametrize("other", [{"corpus": "other"}, {}])
def test_a_first_phase_with_a_text_of_its_own_has_no_known_baseline(other):
    """It was judged by the entropy of a text that it does not read."""
    phase = {"length": 32, "batch_size": 16, "share": 0.5}
    config = small_config(training__num_steps=1000, training__phases=[{**phase, **other}, phase])
    losses = [*np.linspace(7.0, 5.6, 250), *[5.6] * 50, *np.linspace(5.6, 6.03, 100), *[6.03] * 100]
    kinds = [kind for _, kind, _ in found(monitor(config, 6.0), losses)]
    assert kinds == ([] if other else ["diverged"])


@pytest.mark.parametrize("other", [{"corpus": "other"}, {"mixture": ({"corpus": "other"},)}, {}])
def test_another_text_has_another_baseline(other):
    """Its loss may begin above the baseline of the text before."""
    phase = {"length": 32, "batch_size": 16, "share": 0.5}
    config = small_config(training__num_steps=1000, training__phases=[phase, {**phase, **other}])
    losses = [*np.linspace(7, 2.0, 500), *np.linspace(7.5, 4.0, 500)]
    kinds = [kind for _, kind, _ in found(monitor(config, 6.0), losses)]
    assert kinds == ([] if other else ["diverged"])

"""Statistics of runs: equal to numpy's and scipy's, and honest about runs that failed."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.tasks.text.metrics import class_metrics
from bert_jax.training.finetune.voice import goal_score, unlearned
from bert_jax.training.progress import Progress, failure_reason
from bert_jax.training.sweep.statistics import Outcome, Trial, student_interval, summarise

SCORES = st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=2, max_size=5)


def run(init, rate, seed, best, failed="", **scores):
    row = {"step": 10, "epoch": 1.0, "accuracy": best, **scores}
    return Outcome(Trial(init, rate, seed), [row], best, 10, failed, 2.0, 1.0, best)


def runs(init, rate, scores):
    return [run(init, rate, seed, score) for seed, score in enumerate(scores)]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(max_examples=40)
def test_a_group_is_what_numpy_says(scores):
    (group,) = summarise(runs("a", 1e-5, scores), "accuracy").groups
    assert (group.runs, group.failed, group.lost) == (len(scores), 0, 0)
    assert (group.low_quartile, group.median, group.high_quartile) == tuple(
        np.percentile(scores, [25, 50, 75])
    )
    assert group.best == max(scores)
    assert group.mean == pytest.approx(np.mean(scores))
    assert group.std == (pytest.approx(np.std(scores, ddof=1)) if len(scores) > 1 else None)
    assert group.seconds == 2 * len(scores)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=20))
@settings(max_examples=40)
def test_intervals_are_what_scipy_says(values):
    mean, std = np.mean(values), np.std(values, ddof=1)
    low, high = student_interval(np.array(values))
    if std < 1e-9:  # scipy has no interval of width 0
        assert (low, high) == pytest.approx((mean, mean), abs=1e-8)
    else:
        scale = std / len(values) ** 0.5
        expected = scipy.stats.t.interval(0.95, len(values) - 1, loc=mean, scale=scale)
        assert (low, high) == pytest.approx(expected, abs=1e-12)


@given(SCORES, st.data())
@settings(max_examples=40)
def test_a_pair_is_a_seed(ours, data):
    theirs = data.draw(st.lists(st.floats(-1, 1), min_size=len(ours), max_size=len(ours)))
    shuffled = data.draw(st.permutations(runs("b", 1e-5, theirs)))
    (comparison,) = summarise([*runs("a", 1e-5, ours), *shuffled], "accuracy").comparisons
    difference = np.array(ours) - theirs
    assert comparison.mean == pytest.approx(difference.mean(), abs=1e-12)
    assert comparison.wins == (difference > 0).sum()
    assert comparison.ties == (difference == 0).sum()
    assert (comparison.pairs, comparison.seeds, comparison.unpaired) == (len(ours), len(ours), 0)
    test = scipy.stats.ttest_rel(ours, theirs) if difference.std() > 1e-9 else None
    if test is not None:
        expected = test.confidence_interval(0.95)
        assert comparison.student == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_several_learning_rates():
    scores = {  # best medians: a at 3e-5, b at 1e-5
        ("a", 1e-5): [0.70, 0.72, 0.74],
        ("a", 3e-5): [0.80, 0.81, 0.85],
        ("b", 1e-5): [0.60, 0.66, 0.63],
        ("b", 3e-5): [0.50, 0.51, 0.70],
    }
    outcomes = [o for (init, rate), values in scores.items() for o in runs(init, rate, values)]
    summary = summarise(outcomes, "accuracy", 0.5)
    assert [(g.init, g.learning_rate, g.runs) for g in summary.groups] == [
        ("a", 1e-5, 3), ("a", 3e-5, 3), ("a", None, 6),
        ("b", 1e-5, 3), ("b", 3e-5, 3), ("b", None, 6),
    ]  # fmt: skip
    assert summary.groups[2].median == pytest.approx(0.77)
    assert summary.best_learning_rates == {"a": 3e-5, "b": 1e-5}
    low, high, every, chosen = summary.comparisons
    assert (low.learning_rates, low.chosen) == ((1e-5, 1e-5), False)
    assert (high.learning_rates, every.learning_rates) == ((3e-5, 3e-5), None)
    assert (chosen.learning_rates, chosen.chosen) == ((3e-5, 1e-5), True)
    assert chosen.mean == pytest.approx(np.mean([0.20, 0.15, 0.22]))
    assert chosen.student == pytest.approx(student_interval(np.array([0.20, 0.15, 0.22])))
    # Six pairs but three seeds: runs of a seed are no independent samples.
    assert (every.pairs, every.seeds, every.wins) == (6, 3, 6)
    of_seeds = np.array([(0.10 + 0.30) / 2, (0.06 + 0.30) / 2, (0.11 + 0.15) / 2])
    assert every.mean == pytest.approx(of_seeds.mean())
    assert every.student == pytest.approx(student_interval(of_seeds))


def test_of_equal_learning_rates_the_lowest():
    outcomes = [run("a", rate, 0, 0.8) for rate in (5e-5, 1e-5, 3e-5)]
    assert summarise(outcomes, "accuracy").best_learning_rates == {"a": 1e-5}


def test_a_lost_run_is_the_worst():
    outcomes = [
        run("a", 1e-5, 0, 0.9), run("a", 1e-5, 1, 0.5, "bad"), run("a", 1e-5, 2, None, "lost"),
        run("b", 1e-5, 0, 0.75), run("b", 1e-5, 1, 0.75), run("b", 1e-5, 2, 0.75),
        run("b", 1e-5, 3, math.nan, "lost"), run("a", 1e-5, 3, 0.7),
    ]  # fmt: skip
    summary = summarise(outcomes, "accuracy", 0.4)
    a, b = summary.groups
    assert (a.runs, a.failed, a.lost, a.best) == (4, 2, 1, 0.9)
    assert (a.low_quartile, a.median, a.high_quartile) == (None, 0.6, 0.75)
    assert a.medians == {"accuracy": 0.6}
    assert (b.runs, b.failed, b.lost, b.median, b.last) == (4, 1, 1, 0.75, 0.75)
    assert a.mean is a.std is b.mean is None
    (comparison,) = summary.comparisons
    assert (comparison.pairs, comparison.unpaired, comparison.wins) == (4, 0, 2)
    assert comparison.mean == pytest.approx(np.mean([0.15, -0.25, 0.4 - 0.75, 0.7 - 0.4]))


def test_a_learning_rate_that_loses_most_runs_is_not_the_best():
    """One run at 90 beside four that diverged."""
    lost = [run("a", 1e-3, seed, None, "lost") for seed in range(4)]
    steady = runs("a", 1e-5, [0.8, 0.79, 0.81, 0.8, 0.8])
    summary = summarise([*lost, run("a", 1e-3, 4, 0.9), *steady], "accuracy", 0.5)
    by_rate = {group.learning_rate: group for group in summary.groups}
    wild = by_rate[1e-3]
    assert (wild.median, wild.high_quartile, wild.best, wild.lost) == (None, None, 0.9, 4)
    assert by_rate[None].median == pytest.approx(0.795)  # 4 of 10 are lost
    assert summary.best_learning_rates == {"a": 1e-5}
    alone = summarise([*lost, run("a", 1e-3, 4, 0.9)], "accuracy", 0.5)
    assert alone.best_learning_rates == {}


def test_of_equal_medians_that_with_fewer_lost():
    outcomes = [*runs("a", 1e-5, [0.8, 0.8, 0.8]), *runs("a", 1e-6, [0.8, 0.8, None])]
    assert summarise(outcomes, "accuracy").best_learning_rates == {"a": 1e-5}


def test_dev_data_choose_among_evaluations_or_runs():
    one, other = run("a", 1e-5, 0, 0.9), run("a", 1e-5, 1, 0.8)
    twice = dataclasses.replace(one, scores=[*one.scores, *one.scores])
    nothing, chose = "dev, not used for selection", "dev, the set that chose the epoch"
    assert summarise([one], "accuracy").dev == nothing
    assert summarise([one, other], "accuracy").dev == summarise([twice], "accuracy").dev == chose


def test_one_run_has_no_interval():
    summary = summarise([run("a", 1e-5, 0, 0.9), run("b", 1e-5, 0, 0.8)], "accuracy")
    assert summary.groups[0].std is None
    (comparison,) = summary.comparisons
    assert comparison.mean == pytest.approx(0.1)
    assert comparison.student is None


def test_nothing_finite():
    summary = summarise([run("a", 1e-5, s, None, "lost") for s in range(3)], "accuracy", 0.5)
    (group,) = summary.groups
    assert (group.runs, group.failed, group.lost) == (3, 3, 3)
    assert group.median is group.best is group.mean is None
    assert summary.best_learning_rates == {}
    both = [run(init, 1e-5, s, None, "lost") for init in "ab" for s in range(3)]
    (comparison,) = summarise(both, "accuracy", 0.5).comparisons
    assert (comparison.pairs, comparison.ties, comparison.mean) == (3, 3, None)


def test_other_scores_are_those_of_the_best_evaluation():
    rows = [
        {"step": 10, "epoch": 1.0, "accuracy": 0.6, "f1": 0.9, "loss": None},
        {"step": 20, "epoch": 2.0, "accuracy": 0.8, "f1": 0.7, "loss": 0.3},
    ]
    outcome = Outcome(Trial("a", 1e-5, 0), rows, 0.8, 20, "", 1.0)
    assert outcome.best_scores == {"accuracy": 0.8, "f1": 0.7, "loss": 0.3}
    others = [run("a", 1e-5, seed, 0.8, f1=f1, loss=None) for seed, f1 in ((1, 0.1), (2, 0.75))]
    (group,) = summarise([outcome, *others], "accuracy").groups
    assert group.medians == {"accuracy": 0.8, "f1": 0.7}  # most have no loss


def test_what_makes_a_run_failed():
    assert failure_reason(0.9, 0.7, 0.5, True) == ""
    assert failure_reason(None, None, 0.5, False) == "no evaluation gave a finite score"
    assert failure_reason(0.7, 0.7, 0.5, False) == "a loss or a score was not finite"
    assert "the run stopped at a loss" in failure_reason(0.7, 0.7, 0.5, True, halted=True)
    assert "0.5000 is not above 0.5000" in failure_reason(0.9, 0.5, 0.5, True)
    both = failure_reason(0.9, None, 0.5, False)
    assert "not finite" in both
    assert "the last evaluation gave no finite score" in both


def test_runs_that_learned_nothing():
    """The best scores count, as far as they are numbers, and any above the constant is enough."""
    assert unlearned([0.5, None, 0.4], "accuracy", 0.5).startswith("no run learned anything")
    assert unlearned([0.51, 0.4], "accuracy", 0.5) == ""
    assert unlearned([0.5], "accuracy", float("nan")) == ""
    assert unlearned([None], "accuracy", 0.5) == ""


def test_the_end_of_training_is_judged():
    progress = Progress(Trial("a", 1e-5, 0))
    for step, score in ((10, 0.5), (20, 0.9), (30, 0.52)):
        progress.take(step, step / 10, {"accuracy": score}, "accuracy")
    outcome = progress.outcome(goal=0.6)
    assert (outcome.best, outcome.best_step, outcome.best_epoch) == (0.9, 20, 2.0)
    assert outcome.last == 0.52
    assert "last evaluation's score 0.5200 is not above 0.6000" in outcome.failed
    progress.take(40, 4.0, {"accuracy": math.nan}, "accuracy")
    assert "the last evaluation gave no finite score" in progress.outcome(goal=0.6).failed


@given(st.integers(1, 3000), st.floats(0.01, 0.99))
@settings(max_examples=40)
def test_the_goal_of_accuracy_is_the_bound_of_the_binomial(rows, constant):
    goal = goal_score("accuracy", constant, rows)
    assert goal * rows == pytest.approx(scipy.stats.binom.ppf(0.95, rows, constant))


def test_the_goal_of_a_correlation_is_where_it_is_significant():
    random = np.random.default_rng(0)
    goal = goal_score("pearson", 0.0, 50)
    for r in (goal - 0.01, goal + 0.01):
        x = random.normal(size=50)
        x = (x - x.mean()) / x.std()
        e = random.normal(size=50)
        e -= e.mean() + x * (e @ x) / 50
        y = r * x + math.sqrt(1 - r * r) * e / e.std()
        assert (scipy.stats.pearsonr(x, y, alternative="greater").pvalue < 0.05) == (r > goal)


def test_goals_without_a_margin():
    assert goal_score("f1", 0.0, 100) == 0.0
    assert goal_score("accuracy", 1.0, 100) == 1.0
    assert goal_score("accuracy", math.nan, 100) == -math.inf


@pytest.mark.parametrize(
    ("metric", "rates"),
    [("macro_f1", (0.6, 0.4)), ("macro_f1", (0.8, 0.15, 0.05)), ("f1", (0.32, 0.68)),
     ("matthews", (0.7, 0.3))],
)  # fmt: skip
def test_guesses_are_seldom_above_the_goal(metric, rates):
    """Labels drawn as often as they occur: the best guess for macro F1."""
    random, rows = np.random.default_rng(0), 300

    def score(labels, guesses):
        return class_metrics(labels, guesses)[metric]

    labels = random.choice(len(rates), rows, p=rates)
    constant = max(score(labels, np.full(rows, n)) for n in range(len(rates)))
    goal = goal_score(metric, constant, rows, len(rates))
    guesses = random.choice(len(rates), (400, rows), p=rates)
    assert np.mean([score(labels, guess) > goal for guess in guesses]) < 0.08


def test_coins_fail_and_what_learned_does_not():
    """RTE's 277 dev rows, 146 of the larger class, 20 evaluations each."""
    random, goal = np.random.default_rng(0), goal_score("accuracy", 146 / 277, 277)

    def failed(accuracy: float) -> float:
        scores = random.binomial(277, accuracy, (1000, 20)) / 277
        return np.mean([bool(failure_reason(max(s), s[-1], goal, True)) for s in scores])

    assert failed(0.5) > 0.98
    assert failed(146 / 277) > 0.93  # predicts independently of the text, at the rate of the labels
    assert failed(0.65) < 0.02
    assert goal < 0.58  # any run at 58% or more

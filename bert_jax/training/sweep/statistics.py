"""Statistics of a set of runs: medians, quartiles, failed runs, paired differences with intervals.

A single run on a small task says little: the score depends on the seed (Dodge et al. 2020), and
some runs end no better than a constant prediction (Mosbach et al. 2021). So statistics cover many
runs, and two initialisations are compared at equal seeds, both at equal learning rates and at the
best rate of each. A run without a finite score is called lost, and counts as the worst run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, TypeGuard

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

LEVEL = 0.95
"""Confidence level of the intervals, and of the bound that a run must exceed (`goal_score`)."""


def student_interval(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Return the confidence interval of the mean by Student's t, at level `LEVEL`; n >= 2."""
    n = len(values)
    half = stdtrit(n - 1, 0.5 + LEVEL / 2) * values.std(ddof=1) / math.sqrt(n)
    return float(values.mean() - half), float(values.mean() + half)


@dataclass(frozen=True)
class Trial:
    """Settings in which the trials of a sweep differ."""

    init: str
    learning_rate: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    """Outcome of a trial."""

    member: Trial
    """Trial that had this outcome. Saved statistics use the name `member`."""
    scores: Sequence[Mapping[str, Any]]
    """Scores of each evaluation by name, with `step` and `epoch`."""
    best: float | None
    """Best score of all evaluations in the selecting metric; None if no score was finite."""
    best_step: int
    failed: str
    """Reason why the trial counts as failed; empty if it has not failed."""
    seconds: float
    """Wall time of the trial's wave, divided by the number of its trials."""
    best_epoch: float | None = None
    last: float | None = None
    """Score of the last evaluation, at the end of training; None if it is not finite."""
    test: Mapping[str, Any] = field(default_factory=dict)
    """Test scores of the best evaluation's parameters; empty without test data or finite score."""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Outcome":
        """Build an outcome from the values of `dataclasses.asdict`."""
        return cls(**{**record, "member": Trial(**record["member"])})

    @property
    def best_scores(self) -> dict[str, float]:
        """All finite scores of the best evaluation."""
        row = next((row for row in self.scores if row.get("step") == self.best_step), {})
        return {
            name: float(value)
            for name, value in row.items()
            if name not in ("step", "epoch") and _is_finite(value)
        }


@dataclass(frozen=True)
class Group:
    """Statistics of the runs of one initialisation, at one learning rate or over all rates."""

    init: str
    learning_rate: float | None
    """Learning rate of the runs; None means all learning rates."""
    runs: int
    failed: int
    """Number of failed runs. The statistics include them."""
    lost: int
    """Number of runs without a finite score. They count as the runs with the lowest scores."""
    median: float | None
    """Median of the runs' best scores, interpolated; None if half of the runs or more are lost."""
    low_quartile: float | None
    high_quartile: float | None
    best: float | None
    mean: float | None
    """Mean of the runs' best scores; None if a run is lost."""
    std: float | None
    """Standard deviation (n - 1) of two or more runs; None if a run is lost."""
    last: float | None
    """Median score of the last evaluations, at the end of training."""
    best_epoch: float | None
    """Median epoch of the best evaluations."""
    medians: dict[str, float]
    """Median of every score at the runs' best evaluations, by name."""
    seconds: float
    """Total wall time of all runs."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of two initialisations: differences of best scores, `first` minus `second`.

    A pair has the same seed and, except if `chosen`, the same learning rate. A lost run counts with
    the lowest score of the sweep, or with the score of a constant prediction if that is lower. Runs
    with the same seed have the same order of examples and initial head. So seeds are the
    independent samples: differences are averaged within each seed, then over seeds.
    """

    first: str
    second: str
    learning_rates: tuple[float, float] | None
    """Learning rates of `first` and of `second`; None means all rates that they share."""
    chosen: bool
    """Whether each learning rate is the best of its initialisation, chosen by these same scores."""
    pairs: int
    seeds: int
    mean: float | None
    """Mean difference; None if there are no pairs or all runs are lost."""
    student: tuple[float, float] | None
    """Confidence interval by Student's t; None for fewer than two seeds or without a mean."""
    wins: int
    """Number of pairs in which `first` is better."""
    ties: int
    """Number of pairs with equal scores."""
    unpaired: int
    """Number of runs left out because the other initialisation has no run to pair them with."""


@dataclass(frozen=True)
class TestSummary:
    """Statistics of all runs of a sweep on test data; the best learning rates come from dev."""

    __test__ = False  # not a test for pytest to collect

    constant_score: float | None
    groups: tuple[Group, ...]
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True)
class Summary:
    """Statistics of all runs of a sweep; each run counts with its best evaluation on dev."""

    metric: str
    """Name of the score that selects the best evaluation."""
    constant_score: float | None
    """Score of the best constant prediction; None if it is unknown."""
    goal: float | None
    """Score that the last evaluation of a run must exceed; otherwise the run has failed."""
    evaluations: int
    """Largest number of evaluations in a run."""
    outcomes: tuple[Outcome, ...]
    groups: tuple[Group, ...]
    """Groups of runs of each initialisation: one per learning rate and, if several, one of all."""
    best_learning_rates: dict[str, float]
    """Best learning rate of each initialisation. The highest median decides, then the fewest lost
    runs, then the lowest rate. An initialisation without any median is left out."""
    comparisons: tuple[Comparison, ...]
    """Comparisons of two initialisations: at each rate, over all rates, and at their best rates."""
    test: TestSummary | None = None
    """Statistics on test data; None if the run names no test data."""
    baseline: str = "a constant prediction"
    """Name of what has `constant_score`; for rankings, a random ranking or the first stage."""

    @property
    def inits(self) -> tuple[str, ...]:
        """Names of the initialisations, in the order in which they appear."""
        return tuple(dict.fromkeys(outcome.member.init for outcome in self.outcomes))

    @property
    def dev(self) -> str:
        """Description of the dev data: whether their scores selected the epoch or the run."""
        chose = self.evaluations > 1 or len(self.outcomes) > 1
        return f"dev, {'the set that chose the epoch' if chose else 'not used for selection'}"

    @property
    def evaluations_named(self) -> str:
        """Number of evaluations per run: "4", or "2 to 4" if runs stopped early or diverged."""
        fewest = min((len(each.scores) for each in self.outcomes), default=self.evaluations)
        most = self.evaluations
        return f"{most}" if fewest >= most else f"{fewest} to {most}"

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """All learning rates, ascending."""
        return tuple(sorted({outcome.member.learning_rate for outcome in self.outcomes}))


def summarise(
    outcomes: Sequence[Outcome],
    metric: str,
    constant_score: float | None = None,
    goal: float | None = None,
    test_constant: float | None = None,
) -> Summary:
    """Compute the `Summary` of a sweep's runs; `test_constant` is `constant_score` on test data."""
    trials = [outcome.member for outcome in outcomes]
    groups = _groups(outcomes)
    best_rates: dict[str, float] = {}
    for init in dict.fromkeys(trial.init for trial in trials):
        scored = [
            (group.median, -group.lost, -group.learning_rate)
            for group in groups
            if group.init == init and group.learning_rate is not None and group.median is not None
        ]
        if scored:
            best_rates[init] = -max(scored)[2]
    test = None
    if any(outcome.test for outcome in outcomes):
        tested = [_on_test(outcome, metric) for outcome in outcomes]
        compared = _comparisons(tested, best_rates, test_constant)
        test = TestSummary(test_constant, _groups(tested), compared)
    return Summary(
        metric, constant_score, goal, max((len(o.scores) for o in outcomes), default=0),
        tuple(outcomes), groups, best_rates,
        _comparisons(outcomes, best_rates, constant_score), test,
    )  # fmt: skip


def _on_test(outcome: Outcome, metric: str) -> Outcome:
    """Return a run as if its only evaluation were on the test data."""
    row = {"step": outcome.best_step, **outcome.test}
    return replace(outcome, scores=[row], best=outcome.test.get(metric), last=None, best_epoch=None)


def _groups(outcomes: Sequence[Outcome]) -> tuple[Group, ...]:
    """Return the groups of each initialisation (see `Summary.groups`)."""
    groups: list[Group] = []
    for init in dict.fromkeys(outcome.member.init for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.member.init == init]
        rates = sorted({outcome.member.learning_rate for outcome in own})
        groups += [
            _group(init, rate, [o for o in own if o.member.learning_rate == rate]) for rate in rates
        ]
        groups += [] if len(rates) == 1 else [_group(init, None, own)]
    return tuple(groups)


def _group(init: str, learning_rate: float | None, outcomes: Sequence[Outcome]) -> Group:
    scores = [o.best for o in outcomes]
    values = np.array([score for score in scores if _is_finite(score)], np.float64)
    lost = len(scores) - len(values)
    rows = [o.best_scores for o in outcomes]
    names = dict.fromkeys(name for row in rows for name in row)
    medians = {name: quantile([row.get(name) for row in rows], 0.5) for name in names}
    return Group(
        init=init, learning_rate=learning_rate, runs=len(outcomes),
        failed=sum(bool(o.failed) for o in outcomes), lost=lost, median=quantile(scores, 0.5),
        low_quartile=quantile(scores, 0.25), high_quartile=quantile(scores, 0.75),
        best=float(values.max()) if len(values) else None,
        mean=float(values.mean()) if len(values) and not lost else None,
        std=float(values.std(ddof=1)) if len(values) > 1 and not lost else None,
        last=quantile([o.last for o in outcomes], 0.5),
        best_epoch=quantile([o.best_epoch for o in outcomes if o.best_epoch is not None], 0.5),
        medians={name: value for name, value in medians.items() if value is not None},
        seconds=sum(o.seconds for o in outcomes),
    )  # fmt: skip


def quantile(scores: Sequence[float | None], share: float) -> float | None:
    """Return the interpolated quantile at `share`; scores that are not finite count as the lowest.

    Return None if there are no scores, or if the score at this quantile is not finite.
    """
    known = [score for score in scores if _is_finite(score)]
    lost = len(scores) - len(known)
    if not known or share * (len(scores) - 1) < lost:
        return None
    return float(np.quantile([min(known)] * lost + known, share))


_Scores = Mapping[tuple[float, int], float | None]
"""Best scores by learning rate and seed; None for a lost run."""


def _comparisons(
    outcomes: Sequence[Outcome], best_rates: Mapping[str, float], constant_score: float | None
) -> tuple[Comparison, ...]:
    """Compare all pairs of initialisations; see `Comparison` for the score of a lost run."""
    known = [score for score in (*(o.best for o in outcomes), constant_score) if _is_finite(score)]
    scores: dict[str, dict[tuple[float, int], float | None]] = {}
    for o in outcomes:
        best = o.best if _is_finite(o.best) else None
        scores.setdefault(o.member.init, {})[o.member.learning_rate, o.member.seed] = best
    found = []
    for pair in combinations(scores, 2):
        compare = partial(_compare, pair, scores, min(known, default=0.0))
        ours, theirs = ({rate for rate, _ in scores[init]} for init in pair)
        shared, several = sorted(ours & theirs), len(ours | theirs) > 1
        found += [compare((rate, rate)) for rate in shared]
        if several and shared:
            found.append(compare(None))
        if several and all(init in best_rates for init in pair):
            found.append(compare((best_rates[pair[0]], best_rates[pair[1]]), chosen=True))
    return tuple(found)


def _compare(
    pair: tuple[str, str],
    by_init: Mapping[str, _Scores],
    lost_score: float,
    rates: tuple[float, float] | None,
    *,
    chosen: bool = False,
) -> Comparison:
    ours, theirs = (by_init[init] for init in pair)
    if rates is not None:
        ours, theirs = (
            {(0.0, seed): score for (rate, seed), score in scores.items() if rate == wanted}
            for scores, wanted in zip((ours, theirs), rates, strict=True)
        )
    pairs = {key: (ours[key], theirs[key]) for key in ours if key in theirs}
    by_seed: dict[int, list[float]] = {}
    for (_, seed), scores in pairs.items():
        one, other = (lost_score if score is None else score for score in scores)
        by_seed.setdefault(seed, []).append(one - other)
    differences = np.array([value for values in by_seed.values() for value in values], np.float64)
    means = np.array([np.mean(by_seed[seed]) for seed in sorted(by_seed)], np.float64)
    if all(score is None for scores in pairs.values() for score in scores):
        means = means[:0]  # all runs are lost, so the differences mean nothing
    return Comparison(
        *pair,
        learning_rates=rates,
        chosen=chosen,
        pairs=len(differences),
        seeds=len(by_seed),
        mean=float(means.mean()) if len(means) else None,
        student=student_interval(means) if len(means) > 1 else None,
        wins=int((differences > 0).sum()),
        ties=int((differences == 0).sum()),
        unpaired=len(ours) + len(theirs) - 2 * len(differences),
    )


def rate_name(learning_rate: float | None) -> str:
    """Format a learning rate, such as 2e-5; None, which stands for all rates, becomes `all`."""
    if learning_rate is None:
        return "all"
    return np.format_float_scientific(learning_rate, trim="-", exp_digits=1)


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)

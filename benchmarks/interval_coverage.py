"""Share of the 95% intervals that hold the true score, for every kind of interval that is printed.

Each row draws many data sets from a known distribution, asks `tasks.reports.intervals` (or
Student's t of `sweep.intervals`) for the interval, and counts how often the true score lies inside.
"none" is the share of data sets for which no interval is given.

    python benchmarks/interval_coverage.py [--sets 1000]
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bert_jax.tasks.reports.classes import class_statistic
from bert_jax.tasks.reports.intervals import Grounds, intervals, means
from bert_jax.tasks.text.report import text_grounds
from bert_jax.training.sweep.intervals import student_interval

RANDOM = np.random.default_rng(0)
_LARGE = 2_000_000  # examples from which the true score of a statistic is computed


def accuracy(rows: int, rate: float) -> Grounds:
    right = (RANDOM.random(rows) < rate).astype(float)
    return Grounds(means(["accuracy"], right[:, None]), np.arange(rows), right)


def grouped(groups: int, rows: int, first: float, second: float) -> Grounds:
    rates = np.repeat(RANDOM.beta(first, second, groups), rows)
    right = (RANDOM.random(len(rates)) < rates).astype(float)
    return Grounds(means(["accuracy"], right[:, None]), np.repeat(np.arange(groups), rows), right)


def uneven(groups: int) -> Grounds:
    """Draw groups of 1 to about 25 rows, whose accuracies are of Beta(3, 1)."""
    sizes = 1 + RANDOM.poisson(10, groups)
    rates = np.repeat(RANDOM.beta(3, 1, groups), sizes)
    right = (RANDOM.random(len(rates)) < rates).astype(float)
    return Grounds(means(["accuracy"], right[:, None]), np.repeat(np.arange(groups), sizes), right)


def labels(rows: int, positive: float, rate: float) -> tuple[np.ndarray, np.ndarray]:
    truth = (RANDOM.random(rows) < positive).astype(int)
    return truth, np.where(RANDOM.random(rows) < rate, truth, 1 - truth)


def classes(rows: int, positive: float, rate: float) -> Grounds:
    return text_grounds("single_label", *labels(rows, positive, rate), np.arange(rows))


def pairs(rows: int, gap: float, *, lognormal: bool = False) -> Grounds:
    truth = RANDOM.normal(size=rows)
    guess = truth + gap * RANDOM.normal(size=rows)
    guess = np.exp(guess / 2) if lognormal else guess
    return text_grounds("regression", truth, guess, np.arange(rows))


def graded(rows: int) -> Grounds:
    """Draw F1 of answers: 0, 1, or in between."""
    kind, between = RANDOM.random(rows), RANDOM.random(rows)
    each = np.where(kind < 0.6, 1.0, np.where(kind < 0.75, 0.0, between))
    return Grounds(means(["f1"], each[:, None]), np.arange(rows), each)


def paired(rows: int, better: float, worse: float) -> tuple[Grounds, Grounds]:
    kind, both = RANDOM.random(rows), RANDOM.random(rows) < 0.8
    ours = np.where(kind < better, 1.0, np.where(kind < better + worse, 0.0, both))
    theirs = np.where(kind < better, 0.0, np.where(kind < better + worse, 1.0, both))
    units = np.arange(rows)
    one, other = (Grounds(means(["accuracy"], x[:, None]), units, x) for x in (ours, theirs))
    return one, other


def score_of(grounds: Grounds, name: str) -> float:
    return float(grounds.score(np.ones((1, len(grounds.units))))[name][0])


def correlations(gap: float, *, lognormal: bool = False) -> dict[str, float]:
    found = pairs(_LARGE, gap, lognormal=lognormal)
    return {name: score_of(found, name) for name in ("pearson", "spearman")}


def cases() -> Iterator[tuple[str, str, float, Callable[[], Any]]]:
    """Yield a title, the score, its true value and what draws a data set."""
    for rows, rate in ((1000, 0.9), (200, 0.8), (100, 0.95), (40, 0.8), (200, 0.99)):
        yield f"accuracy, {rows} rows, {rate}", "accuracy", rate, partial(accuracy, rows, rate)
    for groups, first in ((12, 2), (20, 3), (29, 3), (40, 3), (100, 3)):
        title = f"accuracy, {groups} groups of 25 rows, Beta({first}, 1)"
        yield title, "accuracy", first / (first + 1), partial(grouped, groups, 25, first, 1)
    for groups in (15, 40):
        yield f"accuracy, {groups} uneven groups", "accuracy", 0.75, partial(uneven, groups)
    for rows, positive in ((1000, 0.5), (200, 0.5), (400, 0.1), (1000, 0.05)):
        truth = class_statistic(*labels(_LARGE, positive, 0.9))(np.ones((1, _LARGE)))
        for name in ("f1", "macro_f1", "matthews"):
            title = f"{name}, {rows} rows, {positive:.0%} positive, 90% right"
            yield title, name, float(truth[name][0]), partial(classes, rows, positive, 0.9)
    for rows, lognormal in ((500, False), (100, True), (40, False), (20, False)):
        for name, value in correlations(0.7, lognormal=lognormal).items():
            title = f"{name}, {rows} rows, {'skewed' if lognormal else 'normal'}"
            yield title, name, value, partial(pairs, rows, 0.7, lognormal=lognormal)
    for rows in (500, 60, 40):
        yield f"mean F1 of answers, {rows} questions", "f1", 0.725, partial(graded, rows)
    for rows, better, worse in ((1000, 0.06, 0.04), (1000, 0.012, 0.008), (300, 0.05, 0.015)):
        title = f"difference, {rows} rows, {better:.1%} better, {worse:.1%} worse"
        yield title, "accuracy", better - worse, partial(paired, rows, better, worse)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=1000)
    sets = parser.parse_args().sets
    print("| interval of | holds the true score | none |\n|---|---:|---:|")
    for title, name, value, draw in cases():
        inside = []
        for _ in range(sets):
            given = draw()
            found = intervals(*given) if isinstance(given[0], Grounds) else intervals(given)
            if name in found.found:
                low, high = found.found[name]
                inside.append(low - 1e-12 <= value <= high + 1e-12)
        said = f"{np.mean(inside):.1%}" if len(inside) > sets // 20 else "-"
        print(f"| {title} | {said} | {1 - len(inside) / sets:.0%} |", flush=True)
    for seeds in (3, 5, 10):
        ends = [student_interval(RANDOM.normal(size=seeds)) for _ in range(20 * sets)]
        share = np.mean([low <= 0 <= high for low, high in ends])
        print(f"| mean over {seeds} seeds, Student's t | {share:.1%} | 0% |")


if __name__ == "__main__":
    main()

"""Share of the 95% intervals that hold the true score, for every kind of interval that is printed.

Each row draws many data sets from a known distribution, asks `tasks.reports.intervals` (or
Student's t of `sweep.statistics`) for the interval, and counts how often the true score lies
inside. "none" is the share of data sets for which no interval is given. Where the true score has no
formula, it is that of a large sample; translations are drawn from a population of 4,000.

    python benchmarks/interval_coverage.py [--sets 1000] [--only TITLE]
"""

import argparse
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bert_jax.tasks.reports.classes import class_statistic
from bert_jax.tasks.reports.intervals import Grounds, intervals, means
from bert_jax.tasks.tagging.metrics import entity_grounds
from bert_jax.tasks.text.metrics import text_grounds
from bert_jax.tasks.translation import quality
from bert_jax.training.sweep.statistics import student_interval

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


def paired_groups(groups: int, better: float) -> tuple[Grounds, Grounds]:
    """Draw groups of 10 rows that two models find hard alike."""
    units, easy = np.repeat(np.arange(groups), 10), np.repeat(RANDOM.beta(3, 1, groups), 10)
    both = RANDOM.random(len(units)) < easy
    ours, theirs = both.astype(float), (both & (RANDOM.random(len(units)) >= better)).astype(float)
    one, other = (Grounds(means(["accuracy"], x[:, None]), units, x) for x in (ours, theirs))
    return one, other


def paired_scores(rows: int) -> tuple[Grounds, Grounds]:
    truth = RANDOM.normal(size=rows)
    shared = truth + 0.5 * RANDOM.normal(size=rows)
    guesses = (shared + gap * RANDOM.normal(size=rows) for gap in (0.4, 0.6))
    one, other = (text_grounds("regression", truth, x, np.arange(rows)) for x in guesses)
    return one, other


def label_sets(rows: int) -> Grounds:
    truth = RANDOM.random((rows, 4)) < (0.5, 0.3, 0.2, 0.2)
    guess = truth ^ (RANDOM.random((rows, 4)) < 0.1)
    return text_grounds("multi_label", truth, guess, np.arange(rows))


def answers(paragraphs: int) -> Grounds:
    """Draw 1 to about 10 questions on each paragraph, whose exact answers are of Beta(4, 2)."""
    sizes = 1 + RANDOM.poisson(4, paragraphs)
    rates = np.repeat(RANDOM.beta(4, 2, paragraphs), sizes)
    exact = RANDOM.random(len(rates)) < rates
    f1 = np.where(
        exact, 1.0, np.where(RANDOM.random(len(rates)) < 0.5, RANDOM.random(len(rates)), 0)
    )
    each = 100 * np.stack([exact, f1], axis=1)
    return Grounds(
        means(["exact", "f1"], each), np.repeat(np.arange(paragraphs), sizes), f1, most=100
    )


def tags(documents: int) -> Grounds:
    """Draw documents of 1 to about 10 sentences of 12 words, each with its rate of right tags."""
    sizes = 1 + RANDOM.poisson(4, documents)
    rates = np.repeat(RANDOM.beta(9, 1, documents), sizes)[:, None]
    gold = np.where(RANDOM.random((len(rates), 12)) < 0.2, "B-X", "O")
    wrong = RANDOM.random(gold.shape) >= np.where(gold == "O", 1 - (1 - rates) / 4, rates)
    guess = np.where(wrong, np.where(gold == "O", "B-X", "O"), gold).tolist()
    units = np.repeat(np.arange(documents), sizes)
    return entity_grounds(gold.tolist(), guess, units)


def trees(sentences: int) -> Grounds:
    """Draw shares of right arcs in sentences of 5 to 30 words."""
    words = RANDOM.integers(5, 31, sentences)
    right = RANDOM.binomial(words, RANDOM.beta(9, 1, sentences))
    return Grounds(
        lambda w: {"las": (w @ right) / (w @ words)}, np.arange(sentences), right / words
    )


def searches(queries: int) -> Grounds:
    """Draw reciprocal ranks and recalls within 10 of queries with one relevant document."""
    rank = RANDOM.geometric(0.3, queries)
    each = np.stack([np.where(rank <= 10, 1 / rank, 0), rank <= 3], axis=1).astype(float)
    return Grounds(means(["mrr", "recall@3"], each), np.arange(queries), each.mean(axis=1))


class Translations:
    """A population of translations, and the scores of samples from it."""

    def __init__(self) -> None:
        words = np.array([f"{a}{b}" for a in "abcdefghij" for b in ("an", "el", "is", "or", "u")])
        self.references, self.hypotheses = [], []
        for _ in range(4000):
            said = words[RANDOM.zipf(1.4, RANDOM.integers(5, 25)) % len(words)]
            kept = RANDOM.random(len(said)) < RANDOM.beta(6, 2)
            self.references.append(" ".join(said))
            self.hypotheses.append(" ".join(np.where(kept, said, RANDOM.choice(words, len(said)))))

    def score(self, name: str) -> float:
        """Return a score of all: bleu or chrf."""
        return quality(self.hypotheses, self.references).values[name]

    def sample(self, pairs: int) -> Grounds:
        """Return the data for the intervals of a sample's scores."""
        rows = RANDOM.integers(0, len(self.references), pairs).tolist()
        some = ([texts[n] for n in rows] for texts in (self.hypotheses, self.references))
        return quality(*some).grounds


def score_of(grounds: Grounds, name: str) -> float:
    return float(grounds.score(np.ones((1, len(grounds.units))))[name][0])


def correlations(gap: float, *, lognormal: bool = False) -> dict[str, float]:
    found = pairs(_LARGE, gap, lognormal=lognormal)
    return {name: score_of(found, name) for name in ("pearson", "spearman")}


def truths(draw: Callable[[int], Grounds], name: str) -> float:
    return score_of(draw(100_000), name)


def cases() -> Iterator[tuple[str, str, float, Callable[[], Any]]]:
    """Yield a title, the score, its true value and what draws a data set."""
    for rows, rate in ((1000, 0.9), (200, 0.8), (100, 0.95), (40, 0.8), (200, 0.99)):
        yield f"accuracy, {rows} rows, {rate}", "accuracy", rate, partial(accuracy, rows, rate)
    for groups, first in ((12, 2), (20, 3), (29, 3), (40, 3), (100, 3)):
        title = f"accuracy, {groups} groups of 25 rows, Beta({first}, 1)"
        yield title, "accuracy", first / (first + 1), partial(grouped, groups, 25, first, 1)
    for groups in (15, 40):
        yield f"accuracy, {groups} uneven groups", "accuracy", 0.75, partial(uneven, groups)
    for rows, positive in ((1000, 0.5), (200, 0.5), (400, 0.1), (1000, 0.05), (200, 0.1)):
        truth = class_statistic(*labels(_LARGE, positive, 0.9))(np.ones((1, _LARGE)))
        for name in ("f1", "macro_f1", "matthews"):
            title = f"{name}, {rows} rows, {positive:.0%} positive, 90% right"
            yield title, name, float(truth[name][0]), partial(classes, rows, positive, 0.9)
    for name in ("f1", "macro_f1"):
        for rows in (100, 500):
            title = f"{name} of label sets, {rows} rows"
            yield title, name, truths(label_sets, name), partial(label_sets, rows)
    for rows, lognormal in ((500, False), (100, True), (40, False), (12, False)):
        for name, value in correlations(0.7, lognormal=lognormal).items():
            title = f"{name}, {rows} rows, {'skewed' if lognormal else 'normal'}"
            yield title, name, value, partial(pairs, rows, 0.7, lognormal=lognormal)
    for rows in (500, 60, 40):
        yield f"mean F1 of answers, {rows} questions", "f1", 0.725, partial(graded, rows)
    for count in (15, 40, 200):
        for name in ("exact", "f1"):
            title = f"{name} of answers, {count} paragraphs of 1 to 10 questions"
            yield title, name, truths(answers, name), partial(answers, count)
        yield f"f1 of tags, {count} documents", "f1", truths(tags, "f1"), partial(tags, count)
        yield f"las, {count} sentences", "las", truths(trees, "las"), partial(trees, count)
        for name in ("mrr", "recall@3"):
            yield f"{name}, {count} queries", name, truths(searches, name), partial(searches, count)
    population = Translations()
    for name in ("bleu", "chrf"):
        for count in (20, 100, 500):
            title, value = f"{name}, {count} sentences", population.score(name)
            yield title, name, value, partial(population.sample, count)
    for rows, better, worse in ((1000, 0.06, 0.04), (1000, 0.012, 0.008), (300, 0.05, 0.015)):
        title = f"difference, {rows} rows, {better:.1%} better, {worse:.1%} worse"
        yield title, "accuracy", better - worse, partial(paired, rows, better, worse)
    for groups in (20, 60):
        title = f"difference, {groups} groups of 10 rows, 7.5% better"
        yield title, "accuracy", 0.075, partial(paired_groups, groups, 0.1)
    for rows in (40, 200):
        one, other = (score_of(each, "pearson") for each in paired_scores(_LARGE))
        yield (
            f"difference of pearson, {rows} rows",
            "pearson",
            one - other,
            partial(paired_scores, rows),
        )


def holds(given: Any, name: str, value: float) -> bool | None:
    """Return whether the interval of a data set holds the true score; None where there is none."""
    if isinstance(given, Grounds):
        given = intervals(given).found.get(name)
    elif given is not None and isinstance(given[0], Grounds):
        given = intervals(*given).found.get(name)
    return given and bool(given[0] - 1e-12 <= value <= given[1] + 1e-12)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--only", default="", help="expression in the titles of the rows to print")
    arguments = parser.parse_args()
    print("| interval of | holds the true score | none |\n|---|---:|---:|")
    for title, name, value, draw in cases():
        if not re.search(arguments.only, title):
            continue
        RANDOM.bit_generator.state = np.random.PCG64(zlib.crc32(title.encode())).state
        found = [holds(draw(), name, value) for _ in range(arguments.sets)]
        inside = [each for each in found if each is not None]
        said = f"{np.mean(inside):.1%}" if 20 * len(inside) > arguments.sets else "-"
        print(f"| {title} | {said} | {1 - len(inside) / arguments.sets:.0%} |", flush=True)
    for seeds in (3, 5, 10):
        ends = [student_interval(RANDOM.normal(size=seeds)) for _ in range(20 * arguments.sets)]
        share = np.mean([low <= 0 <= high for low, high in ends])
        print(f"| mean over {seeds} seeds, Student's t | {share:.1%} | 0% |")


if __name__ == "__main__":
    main()

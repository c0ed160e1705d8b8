"""The best size for a time, of which few speeds are measured; with pretended speeds."""

import math
from itertools import pairwise

import pytest
from started import speed_of

from bert_jax.cli.start.choose import Choice, Speed, choices
from bert_jax.cli.start.recipe import SIZES, Size

UNIQUE = 20_000_000
HOURS = [0.01, 0.1, 1.0, 10.0, 1000.0, 1e6]


def chosen(hours, speed=speed_of, known=None, unique=UNIQUE):
    """Return the choices, and the sizes whose speeds were measured."""
    measured: list[Size] = []

    def measure(size: Size) -> Speed:
        measured.append(size)
        return speed(size)

    found = choices(measure, 3600 * hours, unique, {} if known is None else known)
    return found, measured


@pytest.mark.parametrize("hours", HOURS)
def test_the_best_is_measured_before_it_is_chosen(hours):
    def slower(size: Size) -> Speed:
        """Larger sizes take longer than their operations say."""
        return Speed(speed_of(size).seconds * size.width, speed_of(size).tokens)

    for speed in (speed_of, slower):
        found, measured = chosen(hours, speed)
        assert found[0].size in measured
        assert found[0].speed == speed(found[0].size)
        assert len(set(measured)) == len(measured) <= len(SIZES) // 2
        assert sorted(choice.size for choice in found) == sorted(SIZES)
        nats = [c.nats for c in found if c.speed.seconds <= 3600 * hours]
        assert nats
        assert nats == sorted(nats, reverse=True)


@pytest.mark.parametrize("hours", HOURS)
def test_all_sizes_have_the_same_time(hours):
    for choice in chosen(hours)[0]:
        spent = choice.num_steps * choice.speed.seconds
        assert choice.num_steps == 1 or spent <= 3600 * hours
        assert spent > 3600 * hours - choice.speed.seconds
        assert choice.tokens == choice.num_steps * choice.speed.tokens


def test_more_time_never_chooses_less():
    best = [chosen(hours)[0][0] for hours in HOURS]
    assert all(a.nats <= b.nats for a, b in pairwise(best))
    assert best[0].size.parameters < best[-1].size.parameters


def test_twice_the_time_is_never_worse_and_measures_little_more():
    for hours in HOURS:
        known: dict[Size, Speed] = {}
        once, _ = chosen(hours, known=known)
        twice, measured = chosen(2 * hours, known=known)
        assert twice[0].nats >= once[0].nats
        assert not {choice.size for choice in once[:1]} & set(measured)
        assert set(measured) <= set(known)


def test_a_size_that_does_not_fit_is_never_chosen():
    """Predicted for a slice, where it takes forever; smaller sizes are compared as they were."""

    def speed(size: Size) -> Speed:
        fits = size.width <= 384
        return speed_of(size) if fits else Speed(math.inf, speed_of(size).tokens)

    small = [size for size in SIZES if size.width <= 384]
    for hours in HOURS:
        found, measured = chosen(hours, speed)
        expected = choices(speed_of, 3600 * hours, UNIQUE, {}, small)[0]
        assert found[0] == expected
        assert len(set(measured)) == len(measured)


def test_a_size_that_cannot_make_a_step_in_the_time_is_never_chosen():
    """However much the law expects of a large model's first step."""
    slow = speed_of(SIZES[0]).seconds / 3600
    assert chosen(1.01 * slow)[0][0].size == SIZES[0]
    found, _ = chosen(0.5 * slow)
    assert found[0].size == SIZES[0]
    assert found[0].num_steps == 1


def test_speeds_that_are_not_measured_follow_from_the_operations():
    """Of the measured size nearest in parameters, with as many tokens in a step."""
    found, measured = chosen(0.01)
    assert Size(4, 128) not in measured
    by_size = {choice.size: choice for choice in found}
    small, large = by_size[measured[-1]], by_size[Size(24, 1024)]
    ratio = large.size.cost(small.speed.tokens) / small.size.cost(small.speed.tokens)
    assert large.speed.seconds == pytest.approx(small.speed.seconds * ratio, rel=0.01)


def test_a_choice_counts_tokens_and_predicts_by_the_law():
    choice = Choice(Size(2, 128), 10, Speed(0.5, 2048), UNIQUE)
    assert choice.tokens == 20_480
    assert choice._replace(num_steps=20).nats > choice.nats
    assert choice._replace(size=Size(4, 256)).nats > choice.nats

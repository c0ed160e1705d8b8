"""The law holds for any constants: more of anything never costs, and repeats wear out."""

import math
import random
from itertools import pairwise

import pytest

from bert_jax.cli.start import law

UNIQUE = 1_000_000


def test_the_first_reading_of_each_token_counts_in_full():
    for tokens in (1000, UNIQUE // 2, UNIQUE):
        assert law.useful_tokens(tokens, UNIQUE) == tokens
    assert law.useful_tokens(UNIQUE + 1000, UNIQUE) == pytest.approx(UNIQUE + 1000, rel=1e-5)


def test_repeats_teach_less_and_less_up_to_a_bound():
    found = [law.useful_tokens(epochs * UNIQUE, UNIQUE) for epochs in range(1, 400)]
    gains = [after - before for before, after in pairwise(found)]
    assert all(gain >= 0 for gain in gains)
    assert all(after <= before for before, after in pairwise(gains))
    assert gains[0] < UNIQUE
    limit = law.useful_tokens(10**9 * UNIQUE, UNIQUE)
    assert limit == pytest.approx((1 + law.REPEATS) * UNIQUE)
    assert all(tokens <= limit for tokens in found)


def test_a_further_epoch_above_many_hardly_teaches():
    first = law.useful_tokens(2 * UNIQUE, UNIQUE) - law.useful_tokens(UNIQUE, UNIQUE)
    many = law.MANY_EPOCHS * UNIQUE
    assert law.useful_tokens(many + UNIQUE, UNIQUE) - law.useful_tokens(many, UNIQUE) < first / 4


def test_larger_models_more_tokens_and_more_text_predict_more():
    draw = random.Random(0)
    for _ in range(200):
        parameters = int(10 ** draw.uniform(4, 9))
        tokens, unique = int(10 ** draw.uniform(5, 11)), int(10 ** draw.uniform(5, 9))
        nats = law.nats_below_unigram(parameters, tokens, unique)
        assert math.isfinite(nats)
        assert law.nats_below_unigram(2 * parameters, tokens, unique) > nats
        assert law.nats_below_unigram(parameters, 2 * tokens, unique) >= nats
        assert law.nats_below_unigram(parameters, tokens, 2 * unique) >= nats
        if tokens < unique:
            assert law.nats_below_unigram(parameters, 2 * tokens, 2 * unique) > nats
            assert law.nats_below_unigram(parameters, tokens, 2 * unique) == nats


def test_a_pilot_narrows_the_interval():
    assert 0 < law.SPREAD < law.UNCALIBRATED_SPREAD
    assert 0 < law.PILOT_WEIGHT <= 1

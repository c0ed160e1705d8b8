"""The law holds for any constants: more of anything never costs, and repeats wear out."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from synthetic_store import random_store

from bert_jax.cli.start import law
from bert_jax.data.bigrams import bigram_gain

UNIQUE = 1_000_000


def test_the_first_reading_of_each_token_counts_in_full():
    for tokens in (1000, UNIQUE // 2, UNIQUE):
        assert law.useful_tokens(tokens, UNIQUE) == tokens
    assert law.useful_tokens(UNIQUE + 1000, UNIQUE) == pytest.approx(UNIQUE + 1000, rel=1e-5)


def test_repeats_teach_less_and_less_up_to_a_bound():
    found = [law.useful_tokens(epochs * UNIQUE, UNIQUE) for epochs in range(1, 400)]
    gains = [after - before for before, after in pairwise(found)]
    assert all(gain >= -1e-6 for gain in gains)
    assert all(after <= before + 1e-6 for before, after in pairwise(gains))
    assert gains[0] < UNIQUE
    limit = law.useful_tokens(10**9 * UNIQUE, UNIQUE)
    assert limit == pytest.approx((1 + law.REPEATS) * UNIQUE)
    assert max(found) <= limit + 1e-6


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


def drawn(text, count, seed):
    """Tokens of a text in which each is followed by one of two, or by any."""
    draw, tokens = random.Random(seed), [0]
    while len(tokens) < count:
        follows = text[tokens[-1]]
        tokens.append(draw.choice(follows) if draw.random() < 0.8 else draw.randrange(len(text)))
    return np.array(tokens)


def test_bigrams_gain_what_neighbours_say_of_each_other():
    words = 64
    draw = random.Random(0)
    text = [(draw.randrange(words), draw.randrange(words)) for _ in range(words)]
    known, other = drawn(text, 60_000, 1), drawn(text, 20_000, 2)
    # Each of two with 0.4, or any: the entropy of the source, and of its words alone.
    followers = np.full((words, words), 0.2 / words)
    for word, both in enumerate(text):
        for each in both:
            followers[word, each] += 0.4
    share = np.bincount(known, minlength=words) / len(known)
    bound = -(share * np.log(share)).sum() + (share[:, None] * followers * np.log(followers)).sum()
    assert bigram_gain(known, other, words) == pytest.approx(bound, abs=0.03)
    shuffled = np.random.default_rng(0).permutation
    assert abs(bigram_gain(shuffled(known), shuffled(other), words)) < 0.1


def test_words_that_were_never_seen_have_a_finite_gain():
    tokens = np.array([1, 2, 1, 2, 1, 2], np.uint16)
    assert math.isfinite(bigram_gain(tokens, np.array([3, 4, 1, 4, 2, 1], np.uint16), 5))


def test_a_text_is_compared_with_as_much_of_the_text_of_the_law(monkeypatch):
    train, heldout = random_store(200, 1), random_store(20, 2)
    words, tokens = train.vocab_size, train.shards[0].tokens
    for read in (len(tokens), len(tokens) // 3):
        monkeypatch.setattr(law, "_READ_TOKENS", read)
        gain = bigram_gain(tokens[:read], heldout.shards[0].tokens, words)
        assert law.surplus(train, heldout) == pytest.approx(gain - 1.95 + 64.4 / read**0.35)

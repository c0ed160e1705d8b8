import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.hashing import below, hash_key, hash_u64, permute


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 1000, 1023, 1024, 1025, 40000])
def test_permutation_hits_every_place_once(n):
    for key in range(4):
        image = permute(np.arange(n), n, hash_key(key))
        assert image.dtype == np.int64
        np.testing.assert_array_equal(np.sort(image), np.arange(n))


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_huge_ranges_stay_in_range_and_distinct(n, key, data):
    places = np.array(
        data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    )
    image = permute(places, n, key)
    assert image.min() >= 0
    assert image.max() < n
    assert np.unique(image).size == places.size


def test_one_place_at_a_time_gives_the_same():
    n, key = 100, hash_key(1, 2)
    whole = permute(np.arange(n), n, key)
    np.testing.assert_array_equal([permute(np.array([i]), n, key)[0] for i in range(n)], whole)


def test_epochs_and_seeds_differ():
    n = 5000
    orders = [
        permute(np.arange(n), n, hash_key(seed, epoch)) for seed in range(3) for epoch in range(3)
    ]
    for i, first in enumerate(orders):
        for second in orders[i + 1 :]:
            assert (first == second).mean() < 10 / n  # one fixed point is expected
    assert np.unique([permute(np.arange(3), 3, key) for key in range(60)], axis=0).shape[0] == 6


@pytest.mark.parametrize("n", [4096, 5000])
def test_neighbours_are_spread(n):
    image = permute(np.arange(n), n, hash_key(7))
    steps = np.abs(np.diff(image))
    assert (steps <= 1).sum() <= 10  # 2 are expected
    assert abs(steps.mean() / n - 1 / 3) < 0.02
    # Any stretch of the order covers the range evenly: a batch is a sample of the corpus.
    buckets = np.bincount(image[: n // 4] * 16 // n, minlength=16)
    expected = n // 4 / 16
    assert ((buckets - expected) ** 2 / expected).sum() < 38  # chi-square, 15 d.f., p = 0.001


def test_positions_are_uniform_over_keys():
    n, keys = 10, 400
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[np.arange(n), permute(np.arange(n), n, key)] += 1
    assert ((counts - keys / n) ** 2 / (keys / n)).sum() < 145  # 81 d.f., p = 1e-5


def test_keys_give_unrelated_bits():
    counters = np.arange(1 << 16)
    first, second = hash_u64(hash_key(0), counters), hash_u64(hash_key(1), counters)
    assert not np.isin(first, second).any()
    changed = np.bitwise_count(first ^ second)
    assert abs(changed.mean() - 32) < 0.1
    assert hash_key(1, 2) != hash_key(2, 1)
    assert hash_key(-1) == hash_key(2**64 - 1)


def test_below_is_uniform():
    counts = np.bincount(below(hash_u64(3, np.arange(70_000)), 7), minlength=7)
    assert counts.size == 7
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 22.5  # 6 d.f., p = 0.001


@pytest.mark.parametrize("n", [0, 2**62 + 1])
def test_refuses_sizes_out_of_range(n):
    with pytest.raises(ValueError, match="permutation needs"):
        permute(np.arange(1), n, 0)

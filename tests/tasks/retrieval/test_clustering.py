"""Clusters, and their agreement with classes."""

import math

import numpy as np
import pytest

from bert_jax.tasks.retrieval.metrics import k_means, v_measure


def test_separate_groups_are_found():
    random = np.random.default_rng(0)
    classes = np.repeat(np.arange(4), 20)
    vectors = np.eye(4)[classes] + random.normal(0, 0.05, (80, 4))
    assert v_measure(classes, k_means(vectors, 4, seed=1)) == pytest.approx(1)
    again = k_means(vectors, 4, seed=1)
    np.testing.assert_array_equal(again, k_means(vectors, 4, seed=1))
    for seed in range(20):  # each centre is begun far from all others
        assert v_measure(classes, k_means(100 * np.eye(4)[classes], 4, seed)) == pytest.approx(1)
    assert len(np.unique(k_means(np.ones((5, 2)), 3, seed=0))) == 1


def test_clusters_do_not_depend_on_where_the_origin_is():
    """Numbers and a seed with which a cluster becomes empty on the way."""
    numbers = [-110, -56, -7, -4, -3, -1, 1, 3, 4, 8, 9, 14, 57, 63, 106]
    vectors = np.array(numbers, np.float32)[:, None]
    found = k_means(vectors, 6, seed=29)
    assert len(np.unique(found)) == 5
    np.testing.assert_array_equal(k_means(vectors + 500, 6, seed=29), found)


def test_v_measure_by_hand():
    classes, clusters = np.array([0, 0, 1, 1]), np.array([5, 5, 5, 7])
    given = (3 * math.log(3) - 2 * math.log(2)) / 4  # entropy of the classes within clusters
    within = math.log(2) / 2  # of the clusters within classes
    of_clusters = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    homogeneity, completeness = 1 - given / math.log(2), 1 - within / of_clusters
    wanted = 2 * homogeneity * completeness / (homogeneity + completeness)
    assert v_measure(classes, clusters) == pytest.approx(wanted)
    assert v_measure(classes, np.zeros(4, int)) == 0
    assert v_measure(np.zeros(4, int), np.zeros(4, int)) == 1


@pytest.mark.parity
def test_v_measure_is_that_of_scikit_learn():
    from sklearn.metrics import v_measure_score

    random = np.random.default_rng(0)
    for size in (2, 5, 20):
        classes, clusters = random.integers(0, 6, (2, 200)) % np.array([[6], [size]])
        wanted = v_measure_score(classes, clusters)
        assert v_measure(classes, clusters) == pytest.approx(wanted, abs=1e-12)

"""The comparison that every proof rests on."""

import numpy as np
import pytest

from bert_jax.exchange.proof import ProofFailedError, differences, keep_worst, row_batches

SEGMENT_IDS = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)


def outputs():
    return {"hidden": np.zeros((2, 4, 3), np.float32), "nsp": np.zeros((2, 2), np.float32)}


def test_the_largest_difference_counts_wherever_it_is():
    for place in [(0, 0, 0), (0, 2, 1), (1, 1, 2)]:
        theirs = outputs()
        theirs["hidden"][place] = -0.5
        theirs["hidden"][1, 2] = 9.0  # padding
        theirs["nsp"][1, 0] = 0.25
        theirs["head"] = np.ones(3, np.float32)  # ours has none
        assert differences(outputs(), theirs, SEGMENT_IDS) == {"hidden": 0.5, "nsp": 0.25}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_an_infinite_difference(value):
    broken = outputs()
    broken["hidden"][1, 1, 2] = value
    for pair in ((outputs(), broken), (broken, outputs()), (broken, broken)):
        assert differences(*pair, SEGMENT_IDS) == {"hidden": np.inf, "nsp": 0.0}


def test_another_shape_is_no_difference_but_a_failure():
    theirs = outputs() | {"nsp": np.zeros((2, 3), np.float32)}
    with pytest.raises(ProofFailedError, match=r"nsp is \(2, 3\), of the source \(2, 2\)"):
        differences(outputs(), theirs, SEGMENT_IDS)


def test_the_largest_of_all_batches_is_kept():
    worst = {}
    for gap in (0.1, 0.5, 0.2):
        keep_worst(worst, {"hidden": gap})
    assert worst == {"hidden": 0.5}


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 21])
def test_every_row_is_in_a_batch_and_all_batches_are_of_one_size(count):
    batches = row_batches([[number] for number in range(count)])
    assert {len(batch) for batch in batches} == {min(count, 8)}
    assert {number for batch in batches for (number,) in batch} == set(range(count))

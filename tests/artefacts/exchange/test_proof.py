"""The comparison that every proof rests on."""

import numpy as np
import pytest
from small_saved import ROWS, small_saved

from bert_jax.artefacts.exchange.proof import (
    ProofFailedError,
    check_differences,
    compare,
    differences,
    logits_of,
    row_batches,
)

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


def test_what_is_no_number_is_above_every_tolerance():
    check_differences({"hidden": 1e-3}, 1e-3)
    for gap in (2e-3, np.inf, np.nan):
        with pytest.raises(ProofFailedError, match="largest differences are nsp"):
            check_differences({"hidden": 0.0, "nsp": gap}, 1e-3)


def test_another_shape_is_no_difference_but_a_failure():
    theirs = outputs() | {"nsp": np.zeros((2, 3), np.float32)}
    with pytest.raises(ProofFailedError, match=r"nsp has the shape \(2, 3\), not \(2, 2\)"):
        differences(outputs(), theirs, SEGMENT_IDS)


def test_the_largest_of_all_batches_is_kept():
    saved, gaps = small_saved("mlm", num_layers=1), iter((0.25, 0.5, 0.125))

    def program(batch):
        gap = next(gaps)
        return {name: array + gap for name, array in logits_of(saved, batch).items()}

    (found,) = compare(saved, [(ROWS[:2], 10)] * 3, program)
    assert found == pytest.approx({"hidden": 0.5, "mlm": 0.5, "pooled": 0.5}, rel=1e-5)
    with pytest.raises(ProofFailedError, match="has no output mlm, pooled"):
        compare(saved, [(ROWS[:2], 10)], lambda batch: {"hidden": np.zeros((2, 10, 16))})


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 21])
def test_every_row_is_in_a_batch_and_all_batches_are_of_one_size(count):
    batches = row_batches([[number] for number in range(count)])
    assert {len(rows) for rows, _ in batches} == {min(count, 8)}
    assert {number for rows, _ in batches for (number,) in rows} == set(range(count))

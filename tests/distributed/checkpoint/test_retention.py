import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.distributed.checkpoint.retention import Retention
from bert_jax.errors import UserError

LOSS = "eval/mlm_loss"


def left(retention, saved, verified=None, metrics=None, lowest_at=None):
    verified = saved if verified is None else verified
    gone = retention.superfluous(saved, verified, metrics or {}, lowest_at)
    return [step for step in saved if step not in gone]


def test_the_newest_stay():
    assert left(Retention(keep=2), [1, 2, 3, 4]) == [3, 4]
    assert left(Retention(keep=5), [1, 2, 3, 4]) == [1, 2, 3, 4]


def test_one_that_was_not_read_back_replaces_none():
    assert left(Retention(keep=1), [1, 2, 3], verified=[1]) == [1, 2, 3]
    assert left(Retention(keep=2), [1, 2, 3, 4], verified=[1, 2, 4]) == [2, 3, 4]
    assert left(Retention(keep=2), [1, 2], verified=[]) == [1, 2]


def test_every_mth_stays():
    steps = list(range(500, 5001, 500))
    assert left(Retention(keep=1, keep_every_steps=2000), steps) == [2000, 4000, 5000]


def test_the_newest_before_the_lowest_loss_stays():
    steps = [10, 20, 30, 40, 50]
    assert left(Retention(keep=1), steps, lowest_at=20) == [20, 50]
    assert left(Retention(keep=2), steps, lowest_at=29) == [20, 40, 50]
    assert left(Retention(keep=2), steps, lowest_at=47) == [40, 50]  # a healthy run: one of those
    assert left(Retention(keep=1), steps, lowest_at=60) == [50]
    assert left(Retention(keep=1), steps, lowest_at=5) == [10, 50]  # the nearest there is
    assert left(Retention(keep=1), steps, verified=[10, 30, 50], lowest_at=20) == [10, 50]


def test_the_best_stay():
    losses = {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.0, 5: 6.0}
    metrics = {step: {"eval/mlm_loss": loss} for step, loss in losses.items()}
    assert left(
        Retention(keep=1, keep_best=1, best_metric=LOSS), [1, 2, 3, 4, 5], None, metrics
    ) == [4, 5]
    assert left(
        Retention(keep=1, keep_best=2, best_metric=LOSS), [1, 2, 3, 4, 5], None, metrics
    ) == [2, 4, 5]
    accuracy = {n: {"eval/mlm_accuracy": -m["eval/mlm_loss"]} for n, m in metrics.items()}
    high = Retention(keep=1, keep_best=1, best_metric="eval/mlm_accuracy")
    assert left(high, [1, 2, 3, 4, 5], None, accuracy) == [4, 5]
    # One that was not read back is not the best of anything.
    assert left(
        Retention(keep=1, keep_best=1, best_metric=LOSS), [1, 2, 3, 4, 5], [1, 2, 3, 5], metrics
    ) == [2, 5]
    # Without an evaluation a checkpoint is not the best of anything.
    assert left(Retention(keep=1, keep_best=3, best_metric=LOSS), [1, 2, 3], None, {1: {}}) == [3]


@given(
    st.sets(st.integers(1, 60), min_size=1),
    st.sets(st.integers(1, 60)),
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(0, 3),
)
def test_nothing_goes_without_newer_ones_that_were_read_back(saved, verified, keep, every, best):
    saved = sorted(saved)
    verified = [step for step in saved if step in verified]
    metrics = {step: {"eval/mlm_loss": float(step % 7)} for step in saved}
    retention = Retention(keep=keep, keep_every_steps=every, keep_best=best, best_metric=LOSS)
    for step in retention.superfluous(saved, verified, metrics):
        assert sum(newer > step for newer in verified) >= keep


def test_an_evaluation_that_is_not_finite_is_never_the_best():
    retention = Retention(keep=1, keep_best=1, best_metric=LOSS)
    metrics = {step: {LOSS: loss} for step, loss in ((1, 2.0), (2, float("nan")), (3, 1.0))}
    assert left(retention, [1, 2, 3, 4], metrics=metrics) == [3, 4]


@pytest.mark.parametrize("field", ["keep", "keep_every_steps", "keep_best"])
def test_refused(field):
    with pytest.raises(UserError, match=f"checkpoint.{field} is -1; it must be at least"):
        Retention(**{field: -1})

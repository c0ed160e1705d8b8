"""Batches by length: every row once, few shapes, and the same rows whoever else is trained."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.errors import UserError
from bert_jax.tasks.rows import NO_LABEL, Rows, TrainBatches, choose_buckets, eval_batches

PAD = 9
LENGTHS = st.lists(st.integers(3, 60), min_size=1, max_size=60)


def make_rows(lengths, labels="single_label"):
    """Rows that can be told apart: the first token is the row's number plus 100."""
    tokens = [np.arange(n, dtype=np.int32) + 1000 for n in lengths]
    for i, ids in enumerate(tokens):
        ids[0] = 100 + i
    n = len(lengths)
    values = {
        "single_label": np.arange(n, dtype=np.int32),
        "multi_label": np.eye(n, 4, dtype=np.float32),
        "regression": np.arange(n, dtype=np.float32) / 7,
        "span": np.stack([np.arange(n), np.arange(n) + 1], 1).astype(np.int32),
        "tags": [np.where(np.arange(k) % 2, NO_LABEL, k).astype(np.int32) for k in lengths],
        None: None,
    }[labels]
    return Rows(tokens, np.array([n // 2 + 1 for n in lengths], np.int32), values)


def names(batch):
    """(M, B) which rows these are."""
    return batch["tokens"][..., 0] - 100


def real(batch):
    """Numbers of the rows that count, for each member."""
    return [
        row[weights > 0].tolist()
        for row, weights in zip(names(batch), batch["weights"], strict=True)
    ]


def padded(lengths, buckets):
    return sum(min(b for b in buckets if b >= n) for n in lengths)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 4))
@settings(max_examples=60)
def test_no_other_buckets_pad_less(lengths, max_buckets):
    found = choose_buckets(np.array(lengths), max_buckets)
    assert all(b % 8 == 0 for b in found)
    assert len(found) <= max_buckets
    assert list(found) == sorted(set(found))
    assert found[-1] >= max(lengths)
    last = -(-max(lengths) // 8) * 8
    best = min(
        padded(lengths, (*chosen, last))
        for k in range(max_buckets)
        for chosen in combinations(range(8, last, 8), k)
    )
    assert padded(lengths, found) == best


def test_buckets_stay_within_the_positions():
    assert choose_buckets(np.array([3, 20, 61]), 3, limit=62) == (8, 24, 62)
    assert choose_buckets(np.array([64]), 3, limit=64) == (64,)
    with pytest.raises(UserError, match="no rows"):
        choose_buckets(np.zeros(0, np.int64), 3)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=60)
def test_an_epoch_has_every_row_once(lengths, batch_size, max_buckets, epoch):
    rows = make_rows(lengths)
    buckets = choose_buckets(rows.lengths, max_buckets)
    batches = TrainBatches(rows, buckets, batch_size, PAD)
    seen = list(batches.epoch(epoch, [3, 11]))
    assert len(seen) == batches.num_batches == -(-len(rows) // batch_size)
    for member in range(2):
        assert sorted(i for batch in seen for i in real(batch)[member]) == list(range(len(rows)))
    ragged = [batch for batch in seen if not batch["weights"].all()]
    assert len(ragged) == (len(rows) % min(batch_size, len(rows)) > 0)
    found = sorted(batch["tokens"].shape[-1] for batch in seen)
    assert found == [n for n, count in batches.batches_of.items() for _ in range(count)]
    assert set(found) <= set(buckets)


def test_rows_move_up_only_for_want_of_a_batch():
    rows = make_rows([8] * 10 + [16] * 5 + [24] * 3)
    batches = TrainBatches(rows, (8, 16, 24, 32), 4, PAD)
    # 10 = 2 batches and 2 rows; 2 + 5 = 1 batch and 3 rows; 3 + 3 = 1 batch and 2 rows.
    assert batches.batches_of == {8: 2, 16: 1, 24: 2}
    moved = set()
    for epoch in range(100):
        for batch in batches.epoch(epoch, [0]):
            moved |= {(i, batch["tokens"].shape[-1]) for i in real(batch)[0] if i < 10}
    # Which ones is for the shuffle to say, not for their place in the file or for their length.
    assert moved == {(i, length) for i in range(10) for length in (8, 16, 24)}


def test_a_batch_is_at_most_all_rows():
    batches = TrainBatches(make_rows([5, 9, 16]), (8, 16), 10**12, PAD)
    (batch,) = batches.epoch(0, [0])
    assert batch["tokens"].shape == (1, 3, 16)
    assert batch["weights"].all()


def test_a_length_that_no_row_has():
    batches = TrainBatches(make_rows([8] * 4 + [24]), (8, 16, 24), 4, PAD)
    assert batches.batches_of == {8: 1, 24: 1}
    assert sorted(i for batch in batches.epoch(0, [0]) for i in real(batch)[0]) == list(range(5))


def test_a_batch_is_its_rows():
    for kind in ("single_label", "multi_label", "regression", "span", "tags", None):
        lengths = [5, 9, 16, 7, 30, 30, 12]
        rows = make_rows(lengths, kind)
        for batch in TrainBatches(rows, (16, 32), 3, PAD).epoch(0, [1, 2]):
            members, size, length = batch["tokens"].shape
            assert (members, size) == (2, 3)
            assert ("labels" in batch) == (kind is not None)
            dtypes = {name: array.dtype.name for name, array in batch.items() if name != "labels"}
            assert dtypes == {
                "tokens": "int32", "type_ids": "int32", "segment_ids": "int32",
                "weights": "float32", "row_index": "uint32",
            }  # fmt: skip
            assert (batch["row_index"] == np.arange(3)).all()
            for m, b in np.ndindex(2, 3):
                i = names(batch)[m, b]
                n = lengths[i]
                pad = length - n
                assert batch["tokens"][m, b].tolist() == [*rows.tokens[i], *[PAD] * pad]
                assert batch["segment_ids"][m, b].tolist() == [1] * n + [0] * pad
                second = rows.second_start[i]
                assert batch["type_ids"][m, b].tolist() == (
                    [0] * second + [1] * (n - second) + [0] * pad
                )
                if kind == "tags":
                    expected = [*rows.labels[i], *[NO_LABEL] * pad]
                    assert batch["labels"][m, b].tolist() == expected
                elif kind is not None:
                    assert (batch["labels"][m, b] == rows.labels[i]).all()
                    assert batch["labels"].dtype == rows.labels.dtype


def test_rows_of_an_example_stay_together():
    """Three rows an example, one of them missing here and there; the longest decides the length."""
    random = np.random.default_rng(0)
    lengths = random.integers(4, 30, (20, 3))
    lengths[::4, 2] = 0
    tokens = [np.full(n, 100 * i + g + 1, np.int32) for (i, g), n in np.ndenumerate(lengths)]
    rows = Rows(
        tokens, lengths.ravel().astype(np.int32), np.arange(20, dtype=np.int32), group=3,
        text_ids=np.arange(60, dtype=np.int32),
    )  # fmt: skip
    assert len(rows) == 20
    assert rows.lengths.tolist() == lengths.max(axis=1).tolist()
    batches = TrainBatches(rows, choose_buckets(rows.lengths, 3), 6, PAD)
    seen = []
    for batch in batches.epoch(0, [3, 11]):
        assert batch["tokens"].shape[:-1] == batch["text_ids"].shape == (2, 6, 3)
        assert batch["weights"].shape == batch["row_index"].shape == (2, 6)
        for m, b in np.ndindex(2, 6):
            example = batch["labels"][m, b]
            assert batch["text_ids"][m, b].tolist() == [3 * example + g for g in range(3)]
            for g in range(3):
                n = lengths[example, g]
                expected = [100 * example + g + 1] * n
                assert batch["tokens"][m, b, g, :n].tolist() == expected
                assert (batch["tokens"][m, b, g, n:] == PAD).all()
                assert batch["segment_ids"][m, b, g].sum() == n
        seen += batch["labels"][0][batch["weights"][0] > 0].tolist()
    assert sorted(seen) == list(range(20))
    index, batch = next(eval_batches(rows, (32,), 4, PAD))
    assert batch["tokens"].shape == (4, 3, 32)
    assert index.tolist() == batch["labels"].tolist()


def test_members_seeds_and_epochs():
    rows = make_rows(np.random.default_rng(0).integers(4, 40, 50).tolist())
    batches = TrainBatches(rows, (16, 24, 40), 8, PAD)
    alone = {seed: [names(b)[0].tolist() for b in batches.epoch(2, [seed])] for seed in (1, 2, 3)}
    together = list(batches.epoch(2, [3, 1, 2]))
    for member, seed in enumerate([3, 1, 2]):
        assert [names(b)[member].tolist() for b in together] == alone[seed]
    assert alone[1] != alone[2] != alone[3]
    again = list(TrainBatches(rows, (16, 24, 40), 8, PAD).epoch(2, [3]))
    assert [names(b)[0].tolist() for b in again] == alone[3]
    assert [names(b)[0].tolist() for b in batches.epoch(1, [3])] != alone[3]
    lengths = [[b["tokens"].shape[-1] for b in batches.epoch(e, [0])] for e in range(4)]
    assert sorted(lengths[0]) == sorted(lengths[1])
    assert any(order != lengths[0] for order in lengths)  # not from short to long each time


def test_an_epoch_goes_on_where_it_stopped():
    rows = make_rows([5, 9, 30, 12, 6, 28, 14])
    batches = TrainBatches(rows, (16, 32), 2, PAD)
    whole = list(batches.epoch(5, [7, 8]))
    for start in range(batches.num_batches + 1):
        rest = list(batches.epoch(5, [7, 8], start))
        assert len(rest) == len(whole) - start
        for one, other in zip(rest, whole[start:], strict=True):
            assert all((one[name] == other[name]).all() for name in one)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=60)
def test_evaluation_sees_every_row_once(lengths, batch_size, max_buckets):
    rows = make_rows(lengths, "tags")
    buckets = choose_buckets(rows.lengths, max_buckets)
    seen = list(eval_batches(rows, buckets, batch_size, PAD))
    assert len(seen) == -(-len(rows) // batch_size)
    assert sorted(i for index, _ in seen for i in index) == list(range(len(rows)))
    for index, batch in seen:
        assert batch["tokens"].shape == (batch_size, batch["labels"].shape[1])
        assert names(batch)[: len(index)].tolist() == index.tolist()
        assert batch["weights"].tolist() == [1] * len(index) + [0] * (batch_size - len(index))
    found = [batch["tokens"].shape[1] for _, batch in seen]
    assert found == sorted(found)


def test_evaluation_of_nothing():
    assert list(eval_batches(make_rows([]), (8,), 2, PAD)) == []


def test_what_is_refused():
    with pytest.raises(UserError, match="no rows to train on"):
        TrainBatches(make_rows([]), (8,), 2, PAD)
    with pytest.raises(ValueError, match="a row has 9 tokens"):
        TrainBatches(make_rows([9]), (8,), 2, PAD)


def test_rows_are_repeated_as_often_as_said():
    """By (seed, epoch): lengths are those of any epoch and trial, and no row is left out."""
    lengths = [8] * 12 + [16] * 7 + [8] * 2 + [16] * 3
    times = np.array([1.0] * 19 + [2.5] * 5)
    batches = TrainBatches(make_rows(lengths), (8, 16), 4, PAD, times)
    # Of the short rows 12 once and 2 five times together, of the long 7 once and 3 eight times.
    assert batches.num_batches == -(-(12 + 5 + 7 + 8) // 4)
    drawn = set()
    for epoch in range(6):
        seen = list(batches.epoch(epoch, [3, 4]))
        again = list(batches.epoch(epoch, [4]))
        for trial in range(2):
            held = [
                i
                for batch in seen
                for i, w in zip(names(batch)[trial], batch["weights"][trial], strict=True)
                if w
            ]
            counts = np.bincount(held, minlength=len(lengths))
            assert (counts[:19] == 1).all()
            assert set(counts[19:21]) | set(counts[21:]) <= {2, 3}
            assert (counts[19:21].sum(), counts[21:].sum()) == (5, 8)
            drawn.add(tuple(counts[19:]))
        for batch, alone in zip(seen, again, strict=True):
            np.testing.assert_array_equal(names(batch)[1], names(alone)[0])
            assert (batch["tokens"] != PAD).any(-1).all()
    assert len(drawn) > 2  # others in other epochs and trials


def test_rows_have_their_weights():
    rows = make_rows([5, 9, 16])
    weights = np.array([0.5, 0.25, 1], np.float32)
    rows = Rows(rows.tokens, rows.second_start, rows.labels, weights=weights)
    (batch,) = TrainBatches(rows, (16,), 4, PAD).epoch(0, [0])
    assert dict(zip(names(batch)[0].tolist(), batch["weights"][0].tolist(), strict=True)) == {
        0: 0.5, 1: 0.25, 2: 1.0
    }  # fmt: skip
    ((_, last),) = list(eval_batches(rows, (16,), 4, PAD))
    assert last["weights"].tolist() == [0.5, 0.25, 1.0, 0.0]

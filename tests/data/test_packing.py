import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_store import SPECIAL, document_of, make_shard

from bert_jax.data import packing
from bert_jax.data.packing import _pack, pack_histogram, plan_packing, segment_dtype
from bert_jax.errors import UserError
from bert_jax.hashing import hash_key

DOCUMENTS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=12)


def log_normal_store(mean_tokens, count, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(np.log(mean_tokens) - 0.5, 1.0, count).astype(int) + 1
    return make_shard([[n] for n in sizes.tolist()])


@settings(max_examples=80)
@given(DOCUMENTS, st.integers(3, 60), st.integers(1, 3), st.integers(0, 2**32))
def test_no_token_is_lost_or_doubled(documents, length, num_passes, seed):
    shard = make_shard(documents)
    plan = plan_packing(shard, length, seed=seed, num_passes=num_passes)
    sizes = plan.piece_len.astype(int) + 2
    assert sizes.min() >= 3
    assert np.add.reduceat(sizes, plan.row_offsets[:-1]).max() <= length
    assert (np.diff(plan.row_offsets) >= 1).all()
    assert plan.row_offsets[-1] == plan.piece_len.size
    ends = plan.piece_start + plan.piece_len.astype(int) - 1
    np.testing.assert_array_equal(document_of(shard, plan.piece_start), document_of(shard, ends))

    tokens = plan.batch(shard, np.arange(len(plan)))["tokens"]
    text = tokens[tokens >= 5]
    np.testing.assert_array_equal(np.bincount(text - 5), np.full(shard.tokens.size, num_passes))


@settings(max_examples=40)
@given(DOCUMENTS, st.integers(3, 60), st.integers(0, 2**32))
def test_gather_builds_rows(documents, length, seed):
    shard = make_shard(documents)
    plan = plan_packing(shard, length, seed=seed)
    rows = np.arange(len(plan))[::-1]
    batch = plan.batch(shard, rows)
    assert batch["tokens"].dtype == shard.tokens.dtype
    assert not batch["type_ids"].any()
    assert (batch["pair_labels"] == -1).all()
    for i, row in enumerate(rows):
        tokens, segments = [], []
        for number, p in enumerate(range(plan.row_offsets[row], plan.row_offsets[row + 1]), 1):
            start, size = int(plan.piece_start[p]), int(plan.piece_len[p])
            tokens += [SPECIAL.cls, *shard.tokens[start : start + size], SPECIAL.sep]
            segments += [number] * (size + 2)
        padding = length - len(tokens)
        assert batch["tokens"][i].tolist() == tokens + [SPECIAL.pad] * padding
        assert batch["segment_ids"][i].tolist() == segments + [0] * padding


def test_long_documents_are_consecutive_full_rows():
    shard = make_shard([[300], [7]])
    plan = plan_packing(shard, 102)
    assert len(plan) == 4  # 3 full rows and the document of 7
    batch = plan.batch(shard, np.arange(4))
    full = batch["tokens"][(batch["segment_ids"] == 1).all(axis=1)]
    assert sorted(full[:, 1].tolist()) == [5, 105, 205]
    assert (np.diff(full[:, 1:-1].astype(int), axis=1) == 1).all()


@pytest.mark.parametrize(("mean_tokens", "length"), [(60, 128), (60, 512), (400, 128), (400, 512)])
def test_efficiency(mean_tokens, length):
    plan = plan_packing(log_normal_store(mean_tokens, 20_000), length)
    batch = plan.batch(log_normal_store(mean_tokens, 20_000), np.arange(0, len(plan), 50))
    used = plan.piece_len.sum() + 2 * plan.piece_len.size  # with [CLS] and [SEP]
    efficiency = used / (len(plan) * plan.length)
    assert efficiency > 0.995
    assert abs((batch["segment_ids"] != 0).mean() - efficiency) < 0.01


def test_later_passes_cut_elsewhere():
    shard = make_shard([[1000], [20]])
    first = plan_packing(shard, 52, seed=1)
    both = plan_packing(shard, 52, seed=1, num_passes=2)
    np.testing.assert_array_equal(both.piece_start[: first.piece_start.size], first.piece_start)
    second = both.piece_start[first.piece_start.size :]
    assert len(set(first.piece_start.tolist()) & set(second.tolist())) <= 2  # documents' beginnings


def test_which_pieces_meet_depends_on_the_seed():
    shard = make_shard([[10]] * 100)
    plans = [plan_packing(shard, 64, seed=seed) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(plans[0].piece_start, plans[1].piece_start)
    assert (plans[0].piece_start != plans[2].piece_start).any()


@pytest.mark.parametrize(("length", "dtype"), [(767, np.uint8), (768, np.uint16)])
def test_a_row_of_the_shortest_documents_is_full(length, dtype):
    assert segment_dtype(length) == dtype
    # Twice what a row holds of documents of one token, which take three places.
    shard = make_shard([[1]] * (2 * (length // 3)))
    plan = plan_packing(shard, length)
    assert np.diff(plan.row_offsets).tolist() == [length // 3] * 2
    segment_ids = plan.batch(shard, np.arange(2))["segment_ids"]
    assert segment_ids.dtype == dtype
    numbers = np.repeat(np.arange(1, length // 3 + 1), 3)
    for row in segment_ids:
        np.testing.assert_array_equal(row[: numbers.size], numbers)
        assert not row[numbers.size :].any()


def test_rows_of_8192_take_short_and_empty_documents_and_a_book():
    # 1.6 thousand segments a row, and 700,000 tokens: a document of 3 MB.
    shard = make_shard([[700_000], [], *[[3]] * 10_000, [8190], [8191]])
    plan = plan_packing(shard, 8192)
    assert plan.piece_len.sum() == shard.tokens.size
    counts = np.diff(plan.row_offsets)
    assert counts.max() > 1500
    used = int(plan.piece_len.sum()) + 2 * plan.piece_len.size
    assert len(plan) == -(-used // 8192)
    book = plan.piece_start < 700_000
    lengths = sorted(plan.piece_len[book].tolist())
    assert lengths == [700_000 % 8190] + [8190] * (700_000 // 8190)
    batch = plan.batch(shard, np.flatnonzero(counts == counts.max())[:1])
    assert batch["segment_ids"].max() == counts.max()


def test_cost_depends_on_the_histogram_only():
    # A million times the pieces make the same rows: patterns stay few.
    histogram = np.zeros(511, int)
    histogram[1:] = np.random.default_rng(0).integers(0, 50, 510)
    small, large = pack_histogram(histogram, 512), pack_histogram(histogram * 10**6, 512)
    assert len(large) < 3 * 511
    for entries, scale in ((small, 1), (large, 10**6)):
        total = np.zeros(511, int)
        for rows, pieces in entries:
            assert sum(pieces) + 2 * len(pieces) <= 512
            np.add.at(total, list(pieces), rows)
        np.testing.assert_array_equal(total, histogram * scale)


def test_pieces_go_where_the_least_room_holds_them():
    # Three of the five short pieces go into the three rows begun. The other two fit there again.
    histogram = np.bincount([18] * 3 + [2] * 5)
    assert sum(rows for rows, _ in pack_histogram(histogram, 32)) == 3


def test_order_is_a_permutation():
    lengths = np.random.default_rng(0).integers(1, 63, 5000).astype(np.uint16)
    order, sizes = _pack(lengths, 64, hash_key(3))
    np.testing.assert_array_equal(np.sort(order), np.arange(5000))
    assert sizes.sum() == 5000


def test_ties_of_the_hash_do_not_depend_on_the_cpu(monkeypatch):
    monkeypatch.setattr(packing, "hash_u64", lambda key, counters: np.zeros(counters.shape, "u8"))
    lengths = np.random.default_rng(0).integers(40, 63, 5000).astype(np.uint16)  # one piece a row
    order, _ = _pack(lengths, 64, 0)
    for length in range(40, 63):
        assert (np.diff(order[lengths[order] == length]) > 0).all()


def test_bad_input():
    with pytest.raises(UserError, match="length is 2"):
        plan_packing(make_shard([[4]]), 2)
    with pytest.raises(UserError, match="no tokens"):
        plan_packing(make_shard([]), 16)

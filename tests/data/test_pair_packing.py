import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_store import SPECIAL, make_pair_shard, make_shard

from bert_jax.data.pair_packing import pack_pairs, plan_translations, some_pairs
from bert_jax.errors import UserError
from bert_jax.tokenization.special_ids import SpecialIds

MARIANS = SpecialIds(pad=0, unk=1, cls=0, sep=3, mask=0)
PAIRS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=60)


def pairs_of(tokens, segments):
    """The texts of a side's packed rows, by (row, segment)."""
    return {
        (row, int(number)): tokens[row][segments[row] == number].tolist()
        for row in range(len(tokens))
        for number in np.unique(segments[row][segments[row] > 0])
    }


@settings(max_examples=60)
@given(PAIRS, st.integers(22, 60), st.integers(21, 60), st.integers(1, 3), st.integers(0, 2**32))
def test_every_pair_is_whole_and_once_a_pass(sizes, length, target_length, num_passes, seed):
    shard = make_pair_shard(sizes)
    plan = plan_translations(shard, length, target_length, seed=seed, num_passes=num_passes)
    batch = plan.batch(shard, np.arange(len(plan))[::-1])
    assert batch["tokens"].shape == (len(plan), length)
    assert batch["target_tokens"].shape == (len(plan), target_length)
    assert batch["tokens"].dtype == batch["target_tokens"].dtype == shard.tokens.dtype
    assert not batch["type_ids"].any()
    sources = pairs_of(batch["tokens"], batch["segment_ids"])
    targets = pairs_of(batch["target_tokens"], batch["target_segment_ids"])
    assert sources.keys() == targets.keys()
    offsets = shard.sentence_offsets.tolist()
    found = []
    for name, source in sources.items():
        assert source[0] == targets[name][0] == SPECIAL.cls
        assert source[-1] == SPECIAL.sep
        pair = offsets.index(source[1] - 5) // 2
        edges = offsets[2 * pair : 2 * pair + 3]
        assert source[1:-1] == shard.tokens[edges[0] : edges[1]].tolist()
        assert targets[name][1:] == shard.tokens[edges[1] : edges[2]].tolist()
        found.append(pair)
    assert sorted(found) == sorted([*range(len(sizes))] * num_passes)
    for side in ("", "target_"):
        segments = batch[f"{side}segment_ids"].astype(int)
        assert (batch[f"{side}tokens"][segments == 0] == SPECIAL.pad).all()
        for row in segments:  # segments follow each other, then padding
            numbers = row[: np.count_nonzero(row)]
            assert set(np.diff(numbers, prepend=0)) <= {0, 1}
            assert numbers.all()
    real = np.mean(batch["segment_ids"] > 0), np.mean(batch["target_segment_ids"] > 0)
    assert plan.real_shares == pytest.approx(real)


def test_pairs_longer_than_a_row_are_left_out_and_told():
    sizes = [(5, 5), (6, 6), (7, 6), (6, 7), (1, 1)]
    shard = make_pair_shard(sizes * 40)
    plan = plan_translations(shard, 8, 7)  # 6 tokens and two special ones, 6 and one
    assert plan.num_left_out == 80
    assert (plan.source_len.max(), plan.target_len.max()) == (6, 6)
    clause, warning = plan.losses(shard)
    assert "80 pairs longer than a row left out" in clause
    assert warning.startswith("Warning: 40.0% of the pairs are longer than a row of 8 source and 7")
    clause, warning = plan_translations(shard, 9, 8).losses(shard)
    assert "left out" not in clause
    assert warning is None
    with pytest.raises(UserError, match=r"no pair .* fits a row of 8 source and 4 .* takes 9"):
        plan_translations(make_pair_shard([(7, 3), (7, 5)]), 8, 4)


def test_both_sides_are_full():
    rng = np.random.default_rng(0)
    source = np.round(rng.lognormal(2.6, 0.4, 20_000)).astype(int) + 1
    target = np.maximum(1, np.round(source * rng.normal(1.0, 0.2, source.size))).astype(int)
    for sizes in ((source, target), (target, source)):
        plan = plan_translations(make_pair_shard(np.stack(sizes, axis=1).tolist()), 128, 128)
        # The shorter side cannot be fuller than the longer one lets it be.
        assert max(plan.real_shares) > 0.98


def test_which_pairs_meet_depends_on_the_seed():
    shard = make_pair_shard([(4, 4)] * 60)
    plans = [plan_translations(shard, 32, 32, seed=seed) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(plans[0].source_start, plans[1].source_start)
    assert (plans[0].source_start != plans[2].source_start).any()
    both = plan_translations(shard, 32, 32, seed=1, num_passes=2)
    np.testing.assert_array_equal(both.source_start[:60], plans[0].source_start)
    assert (both.source_start[60:] != both.source_start[:60]).any()


def test_cost_depends_on_the_kinds_only():
    # A million times the pairs make hardly more different rows.
    rng = np.random.default_rng(0)
    source, target = np.divmod(rng.choice(40 * 40, 200, replace=False), 40)
    source, target, histogram = source + 3, target + 2, rng.integers(1, 50, 200)
    for scale in (1, 10**6):
        patterns = pack_pairs(source, target, histogram * scale, 128, 96)
        assert len(patterns) < 2 * 200
        total = np.zeros(200, int)
        for rows, kinds in patterns:
            assert source[list(kinds)].sum() <= 128
            assert target[list(kinds)].sum() <= 96
            np.add.at(total, list(kinds), rows)
        np.testing.assert_array_equal(total, histogram * scale)


@pytest.mark.parametrize(("length", "dtype"), [(511, np.uint8), (512, np.uint16)])
@pytest.mark.parametrize("special", [SPECIAL, MARIANS])
def test_a_row_of_the_shortest_pairs_is_full(length, dtype, special):
    count = length // (3 if special.opens else 2)
    shard = dataclasses.replace(make_pair_shard([(1, 1)] * count), special_ids=special)
    plan = plan_translations(shard, length, length)
    assert len(plan) == 1
    batch = plan.batch(shard, np.arange(1))
    for name in ("segment_ids", "target_segment_ids"):
        assert batch[name].dtype == dtype
        assert batch[name].max() == count


def test_marians_sources_begin_with_their_text():
    shard = dataclasses.replace(make_pair_shard([(2, 3), (1, 2)]), special_ids=MARIANS)
    plan = plan_translations(shard, 8, 8)
    batch, first = plan.batch(shard, np.arange(1)), [*range(5, 5 + 8)]  # tokens of the shard
    sources = pairs_of(batch["tokens"], batch["segment_ids"]).values()
    targets = pairs_of(batch["target_tokens"], batch["target_segment_ids"]).values()
    assert sorted(sources) == [[*first[:2], 3], [first[5], 3]]
    assert sorted(targets) == [[0, *first[2:5]], [0, *first[6:8]]]
    assert plan.real_shares == (5 / 8, 7 / 8)


def test_stores_and_lengths_that_cannot_be():
    with pytest.raises(UserError, match="is running text; pairing 'translation' needs"):
        plan_translations(make_shard([[3, 4]]), 32, 32)
    with pytest.raises(UserError, match=r"damaged: corpus\.json says that it holds pairs"):
        plan_translations(make_shard([[3], [4, 5, 6]], meta={"pairs": True}), 32, 32)
    for lengths, name in (((2, 32), "length is 2"), ((32, 1), "target_length is 1")):
        with pytest.raises(UserError, match=name):
            plan_translations(make_pair_shard([(1, 1)]), *lengths)


@pytest.mark.parametrize(("pairs", "most"), [(5, 3), (1014, 500), (3, 9), (4, 4)])
def test_some_pairs_are_as_many_as_asked_for(pairs, most):
    """Of 1,014 pairs there were 338 when 500 were asked for."""
    shard = make_pair_shard([(1, 2)] * pairs)
    found = some_pairs(shard, most)
    assert len(found) == min(pairs, most)
    assert {(source.size, target.size) for source, target in found} == {(1, 2)}
    places = [shard.tokens.tolist().index(source[0]) for source, _ in found]
    assert places == sorted({*places})
    assert places[-1] >= 3 * (pairs - -(-pairs // most))  # they are spread over the shard

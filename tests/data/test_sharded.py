"""Stores of several shards: every row comes equally often, whatever the hosts and the threads."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic_store import make_pairs, make_shard, random_shard, store_of

from bert_jax.data import pipeline
from bert_jax.data.kept import Kept
from bert_jax.data.mixture import ShardOrder
from bert_jax.data.pairings import DataConfig
from bert_jax.data.phases import Phase
from bert_jax.data.pipeline import EvalBatches, ExampleStream, TrainBatches, row_keys
from bert_jax.errors import UserError
from bert_jax.hashing import hash_key, permute

NONE = DataConfig(pairing="none")


def shard_of_ids(documents, first):
    """A shard whose token ids are no other shard's."""
    shard = make_shard(documents)
    return replace(shard, tokens=shard.tokens + first, vocab_size=10_000)


# Documents of one row of 22: which rows a batch has is read off its tokens.
SIZES = (9, 5, 7, 2)
SHARDS = [shard_of_ids([[20]] * n, 1000 * k) for k, n in enumerate(SIZES)]
STORE = store_of(*SHARDS)
RANDOM = store_of(*(random_shard(20 + 9 * n, seed=n) for n in range(5)))


def texts(batch):
    """Shard and document of each row of STORE."""
    first = batch["tokens"][:, 1].astype(int) - 5
    return [(n // 1000, n % 1000 // 20) for n in first]


def assert_equal_batches(first, second):
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)
        assert array.dtype == second[name].dtype


@pytest.mark.parametrize("window", [0, 1, 2, 3])
def test_an_epoch_reads_each_row_once_in_windows(window):
    total = sum(SIZES)
    stream = ExampleStream(STORE, replace(NONE, window=window), [Phase(22, 1, 3 * total)], seed=2)
    found = [texts(stream.batch(step))[0] for step in range(3 * total)]
    epochs = [found[n : n + total] for n in range(0, 3 * total, total)]
    everything = sorted((shard, row) for shard, n in enumerate(SIZES) for row in range(n))
    for epoch in epochs:
        assert sorted(epoch) == everything
        assert epoch != everything
    assert epochs[0] != epochs[1] != epochs[2]
    if window:
        orders = []
        for epoch in epochs:
            order = list(dict.fromkeys(shard for shard, _ in epoch))
            for begin in range(0, len(SIZES), window):
                together = order[begin : begin + window]
                rows = sum(SIZES[shard] for shard in together)
                assert {shard for shard, _ in epoch[:rows]} == set(together)
                epoch = epoch[rows:]
            orders.append(tuple(order))
        assert len(set(orders)) > 1


def test_wrong_estimates_still_show_every_row_equally_often():
    # Documents of 21 tokens take two pieces where those of 20 take one, so the quotas are wrong.
    shards = [SHARDS[0], shard_of_ids([[3]] * 40, 1000), shard_of_ids([[20]] * 4, 2000)]
    stream = ExampleStream(store_of(*shards), NONE, [Phase(22, 1, 6000)])
    order, rows = stream.corpora(0)[0].order, stream.corpora(0)[0].rows
    sizes = [len(rows.plan(n)) for n in range(3)]
    assert order.quotas.tolist() == [9, 9, 4]
    assert sizes[1] == 10
    shards_of, visits = order.places(np.arange(60 * order.num_rows))
    for shard, size in enumerate(sizes):
        counts = np.bincount(visits[shards_of == shard] % size, minlength=size)
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("pairing", ["nsp", "sop", "none"])
def test_hosts_threads_and_blocks_change_nothing(pairing, monkeypatch):
    config = DataConfig(pairing=pairing, window=2, num_passes=2)
    phases = [Phase(32, 16, 30, 6), Phase(64, 4, 10)]
    plain = ExampleStream(RANDOM, config, phases, seed=3)
    batches = [plain.batch(step) for step in range(40)]
    assert [len(batch["row_index"]) for batch in batches[:7]] == [2, 2, 4, 4, 8, 8, 16]
    other = ExampleStream(RANDOM, config, phases, seed=3)
    for step in (39, 11, 7, 29, 30):
        assert_equal_batches(other.batch(step), batches[step])
    halves = [other.batch(12, process, 2) for process in range(2)]
    joined = {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}
    assert_equal_batches(joined, batches[12])
    resumed = TrainBatches(other, 13)
    for step, batch in enumerate(resumed, 13):
        assert_equal_batches(batch, batches[step])
    monkeypatch.setattr(pipeline, "_BLOCK_POSITIONS", (1, 1, 1))  # a step at a time
    single = ExampleStream(RANDOM, config, phases, seed=3)
    for step in (0, 17, 39):
        assert_equal_batches(single.batch(step), batches[step])
    seeded = ExampleStream(RANDOM, config, phases, seed=4).batch(17)
    assert (seeded["tokens"] != batches[17]["tokens"]).any()


def test_one_shard_reads_as_a_flat_store():
    """What a window says about shards says nothing about one."""
    flat = store_of(RANDOM.shards[1])
    phases = [Phase(32, 8, 30)]
    first = ExampleStream(flat, DataConfig(), phases, seed=3)
    windowed = ExampleStream(flat, DataConfig(window=3), phases, seed=3)
    order = ShardOrder([len(first.plan(0))], 0, (3, 1, 0))
    numbers = np.arange(240)
    places = order.places(numbers)
    assert not places.shards.any()
    num_rows = len(first.plan(0))
    for epoch in range(240 // num_rows):
        rows = permute(np.arange(num_rows), num_rows, hash_key(3, 1, 0, epoch))
        mine = places.visits[epoch * num_rows :][:num_rows]
        np.testing.assert_array_equal(mine, rows + epoch * num_rows)
    for step in (0, 29):
        assert_equal_batches(first.batch(step), windowed.batch(step))


def test_few_plans_are_kept_and_the_next_window_is_planned_ahead():
    total = sum(SIZES)
    stream = ExampleStream(STORE, replace(NONE, window=1), [Phase(22, 1, 8 * total)], seed=2)
    rows = stream.corpora(0)[0].rows
    made = []
    rows.plan = Kept(lambda n: made.append(n) or rows._make_plan(n), 3)
    for step in range(4 * total):
        stream.batch(step)
    assert len(rows.plan._kept) <= 3
    assert len(set(made)) == 4


def test_held_out_rows_of_all_shards_are_read_once():
    parts = [
        list(EvalBatches(STORE, NONE, 22, 4, process_index=p, process_count=2)) for p in range(2)
    ]
    found = []
    for batches in zip(*parts, strict=True):
        for batch in batches:
            real = batch["segment_ids"].any(axis=1)
            found += [text for text, kept in zip(texts(batch), real, strict=True) if kept]
    assert sorted(found) == sorted((k, row) for k, n in enumerate(SIZES) for row in range(n))


def test_a_shard_that_cannot_serve_is_named():
    store = store_of(SHARDS[0], make_shard([[20]]))
    with pytest.raises(UserError, match="1 document"):
        ExampleStream(store, DataConfig(), [Phase(32, 8, 5)])
    bad = store_of(SHARDS[0], replace(SHARDS[1], tokens=SHARDS[1].tokens + 20_000))
    stream = ExampleStream(bad, NONE, [Phase(22, 14, 1)])
    with pytest.raises(UserError, match="damaged: it has the id"):
        stream.batch(0)
    pairs = store_of(make_pairs([(4, 4)] * 9).shards[0], make_pairs([(90, 4)] * 9).shards[0])
    stream = ExampleStream(pairs, DataConfig(pairing="translation"), [Phase(16, 9, 10)])
    with pytest.raises(UserError, match="shard 1 of 2: no pair"):
        [stream.batch(step) for step in range(10)]


def test_rows_beyond_32_bits_have_keys_of_their_own():
    assert row_keys(2**32 - 3, 3).tolist() == [2**32 - 3, 2**32 - 2, 2**32 - 1]
    border = row_keys(2**32 - 2, 4)
    assert border.dtype == np.uint32
    assert border[:2].tolist() == [2**32 - 2, 2**32 - 1]
    later = row_keys(2**32, 5000)
    assert np.unique(later).size == 5000
    assert (later != np.arange(5000)).all()
    assert (row_keys(2 * 2**32, 5000) != later).all()
    np.testing.assert_array_equal(border[2:], later[:2])


def test_a_stream_of_more_rows_than_32_bits():
    phases = [Phase(22, 2**20, 2**13), Phase(22, 4, 3)]
    stream = ExampleStream(STORE, NONE, phases)
    assert stream.first_row(2**13) == 2**33
    batch = stream.batch(2**13 + 2)
    np.testing.assert_array_equal(batch["row_index"], row_keys(2**33 + 8, 4))
    flat = ExampleStream(store_of(SHARDS[0]), NONE, phases)
    np.testing.assert_array_equal(flat.batch(2**13 + 2)["row_index"], row_keys(2**33 + 8, 4))


def test_what_fails_is_made_again():
    calls = []

    def make(key):
        calls.append(key)
        if len(calls) == 1:
            raise OSError("once")
        return key

    kept = Kept(make, 2)
    with pytest.raises(OSError, match="once"):
        kept(1)
    assert [kept(1), kept(1), kept(2), kept(3), kept(1)] == [1, 1, 2, 3, 1]
    assert calls == [1, 1, 2, 3, 1]


@pytest.mark.parametrize("pairing", ["nsp", "sop", "none"])
def test_quotas_know_that_short_documents_fill_more_rows(pairing):
    """Comments before books: once, each row of the books came ten times in an epoch."""
    shards = [make_shard([[15] * 3] * 400), make_shard([[20] * 600] * 4)]
    for order in (shards, shards[::-1]):
        stream = ExampleStream(store_of(*order), DataConfig(pairing=pairing), [Phase(128, 8, 10)])
        (corpus,) = stream.corpora(0)
        real = [len(corpus.rows.plan(n)) for n in range(2)]
        ratios = corpus.order.quotas / real
        assert ratios[0] == 1
        assert 1 / 3 < ratios[1] < 4

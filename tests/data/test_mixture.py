"""Mixtures: shares, rows of each corpus, phases."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from synthetic_store import make_shard, store_of

from bert_jax.data.mixture import (
    BLOCK,
    CorpusRows,
    Mixing,
    Mixture,
    PhaseRows,
    weights_of,
)
from bert_jax.data.pairings import DataConfig
from bert_jax.data.phases import Phase
from bert_jax.data.pipeline import ExampleStream, TrainBatches
from bert_jax.errors import UserError

CONFIG = DataConfig(pairing="none")


def store_of_ids(documents, first):
    shard = make_shard(documents)
    return store_of(replace(shard, tokens=shard.tokens + first, vocab_size=10_000))


ONE, TWO = store_of_ids([[20]] * 30, 0), store_of_ids([[20]] * 7, 5000)
MIXTURE = Mixture(("one", "two"), (ONE, TWO), (3.0, 1.0))


def mixtures():
    random = np.random.default_rng(0)
    yield [1.0, 1.0]
    yield [5.0, 3.0, 2.0]
    yield [1e-7, 1.0, 3e-5, 0.2]
    yield random.dirichlet(np.full(40, 0.05)).clip(1e-9).tolist()


@pytest.mark.parametrize("weights", list(mixtures()))
def test_shares_are_exact_within_one_row_per_thousand(weights):
    mixing = Mixing(weights, key=5)
    corpora, rows = mixing.split(np.arange(70 * BLOCK))
    shares = np.array(weights) / np.sum(weights)
    counts = np.stack(
        [np.bincount(block, minlength=shares.size) for block in corpora.reshape(70, BLOCK)]
    )
    assert np.abs(counts - BLOCK * shares).max() < 1
    # And of all blocks together: what one block lacks another has.
    drift = np.abs(counts.cumsum(axis=0) - BLOCK * shares * np.arange(1, 71)[:, None])
    assert drift.max() < 3
    for corpus in range(shares.size):  # each corpus's rows come in their order, none twice
        mine = rows[corpora == corpus]
        np.testing.assert_array_equal(mine, np.arange(mine.size))
    for n in (0, 1, 999, 1000, 1234, 69_999):
        assert mixing.counts(n) == np.bincount(corpora[:n], minlength=shares.size).tolist()


def test_corpora_come_in_another_order_in_each_block_and_with_another_key():
    first, second = Mixing([1.0, 1.0], key=5).split(np.arange(2 * BLOCK))[0].reshape(2, BLOCK)
    other, _ = Mixing([1.0, 1.0], key=6).split(np.arange(BLOCK))
    for one in (second, other):  # fair coins agree half the time
        assert abs(np.mean(first == one) - 0.5) < 0.08


def test_any_row_is_found_without_the_others():
    mixing = Mixing([4 / 7, 2 / 7, 1 / 7], key=5)  # whose ends are no multiples of a thousandth
    far = 10**13 + 777
    corpora, rows = mixing.split(np.arange(far, far + 3000))
    again, same = Mixing([4.0, 2.0, 1.0], key=5).split(np.array([far + 2999, far]))
    assert again.tolist() == corpora[[-1, 0]].tolist()
    assert same.tolist() == rows[[-1, 0]].tolist()
    for corpus, share in enumerate((4 / 7, 2 / 7, 1 / 7)):
        assert abs(rows[corpora == corpus][0] - share * far) < 1000
    assert sum(mixing.counts(far)) == far


def test_rows_of_one_time_come_from_the_windows_of_all_corpora():
    orders = [SimpleNamespace(window=window) for window in (2, 3)]
    corpora = [CorpusRows(f"{order.window}", None, order) for order in orders]
    assert PhaseRows(corpora, Mixing([1.0, 1.0], key=0)).most_shards == 5


def test_the_next_window_is_planned_ahead_once():
    planned = []
    order = SimpleNamespace(
        window=1, num_windows=3, places=lambda numbers: numbers,
        window_of=lambda number: number // 10, shards_of=lambda window: [f"shard {window}"],
    )  # fmt: skip
    rows = SimpleNamespace(prepare=planned.append, batch=lambda places: {})
    phase = PhaseRows([CorpusRows("", rows, order)], None)
    for first in range(0, 16, 4):
        phase.batch(np.arange(first, first + 4))
    assert planned == [["shard 1"], ["shard 2"]]


def test_weights_by_temperature():
    stores = (ONE, TWO)
    assert weights_of(stores, (2.0, 1.0), 0.0) == (2, 1)
    ratio = weights_of(stores, (1.0, 1.0), 0.3)
    assert ratio[0] / ratio[1] == pytest.approx((30 / 7) ** 0.3)
    doubled = weights_of(stores, (1.0, 2.0), 1.0)
    assert doubled[0] / doubled[1] == pytest.approx(30 / 14)


def of_one(batch):
    return batch["tokens"][:, 1] < 5000


def test_phases_have_their_own_mixtures_and_resume_across_the_border():
    phases = [Phase(22, 50, 40), Phase(22, 50, 40), Phase(22, 8, 4)]
    half = replace(MIXTURE, weights=(1.0, 1.0))
    stores = {0: MIXTURE, 1: half}
    stream = ExampleStream(ONE, CONFIG, phases, seed=1, stores=stores)
    batches = [stream.batch(step) for step in range(84)]
    shares = [np.mean([of_one(batches[step]).mean() for step in range(n, n + 40)]) for n in (0, 40)]
    assert shares == [0.75, 0.5]
    assert all(of_one(batch).all() for batch in batches[80:])
    resumed = TrainBatches(ExampleStream(ONE, CONFIG, phases, seed=1, stores=stores), 39, 1, 2)
    for step, batch in enumerate(resumed, 39):
        rows = len(batches[step]["row_index"]) // 2
        for name, array in batch.items():
            np.testing.assert_array_equal(array, batches[step][name][rows:], err_msg=name)
    # A corpus's rows come in its own epochs, whatever else is read between them.
    alone = ExampleStream(ONE, CONFIG, [Phase(22, 1500, 1)], seed=1).batch(0)["tokens"]
    mixed = np.concatenate([b["tokens"][of_one(b)] for b in batches[:40]])
    np.testing.assert_array_equal(mixed, alone)


def test_what_was_read_of_each_corpus():
    phases = [Phase(22, 50, 40), Phase(22, 50, 40)]
    stream = ExampleStream(ONE, CONFIG, phases, stores={0: MIXTURE})
    assert stream.progress(0) == []
    for step in (1, 20, 40):
        one, two = stream.progress(step)
        found = sum(int(of_one(stream.batch(n)).sum()) for n in range(step))
        assert (one.rows, two.rows) == (found, 50 * step - found)
        assert one.epochs == pytest.approx(one.rows / 30)
        assert two.tokens == 20 * two.rows
    one, two, rest = stream.progress(80)
    assert (one.name, two.name, rest.name) == ("one", "two", "")
    assert (rest.rows, rest.epochs) == (2000, pytest.approx(2000 / 30))


def test_tokens_of_phases_that_read_different_corpora_without_a_mixture():
    """Each phase counts the tokens of its own corpus."""
    phases = [Phase(22, 50, 40)] * 2
    stream = ExampleStream(ONE, CONFIG, phases, stores={1: TWO})
    found = [sum(each.tokens for each in stream.progress(step)) for step in (20, 40, 60, 80)]
    assert found == [20_000, 40_000, 60_000, 80_000]


def test_a_corpus_too_small_for_a_row_is_named():
    small = replace(MIXTURE, stores=(ONE, store_of_ids([[1], [1]], 0)))
    stream = ExampleStream(ONE, DataConfig(pairing="sop"), [Phase(22, 8, 4)], stores={0: small})
    with pytest.raises(UserError, match=r"two: .*makes no rows"):
        stream.plan(0)

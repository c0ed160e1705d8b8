import hashlib
from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest
from synthetic_store import (
    SPECIAL,
    make_pairs,
    make_store,
    random_shard,
    random_store,
    store_of,
)

from bert_jax.data.mixture import StoreRows
from bert_jax.data.pairings import PAIRINGS, DataConfig
from bert_jax.data.phases import Phase
from bert_jax.data.pipeline import (
    EvalBatches,
    ExampleStream,
    TrainBatches,
)
from bert_jax.errors import UserError

OBJECTIVES = ("nsp", "sop", "none")
STORE = random_store(60)
PAIRS = make_pairs([(1 + n * n % 19, 1 + n * n % 23) for n in range(300)])
TRANSLATION = DataConfig(pairing="translation", target_length=24)


def assert_equal_batches(first, second):
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)
        assert array.dtype == second[name].dtype


def row_keys(batch):
    return [row.tobytes() for row in batch["tokens"]]


@pytest.mark.parametrize("pairing", OBJECTIVES)
def test_batch_layout(pairing):
    stream = ExampleStream(STORE, DataConfig(pairing=pairing), [Phase(32, 8, 5)])
    batch = stream.batch(4)
    want = {
        "tokens": ((8, 32), np.uint32),
        "type_ids": ((8, 32), np.uint8),
        "segment_ids": ((8, 32), np.uint8),
        "pair_labels": ((8,), np.int32),
        "row_index": ((8,), np.uint32),
    }
    assert {name: (a.shape, a.dtype) for name, a in batch.items()} == want
    np.testing.assert_array_equal(batch["row_index"], np.arange(32, 40))
    assert (batch["tokens"][:, 0] == SPECIAL.cls).all()
    assert ((batch["segment_ids"] == 0) == (batch["tokens"] == SPECIAL.pad)).all()


def test_batch_layout_of_translations():
    stream = ExampleStream(PAIRS, TRANSLATION, [Phase(32, 8, 5)])
    batch = stream.batch(4)
    want = {
        "tokens": ((8, 32), np.uint32),
        "type_ids": ((8, 32), np.uint8),
        "segment_ids": ((8, 32), np.uint8),
        "target_tokens": ((8, 24), np.uint32),
        "target_segment_ids": ((8, 24), np.uint8),
        "row_index": ((8,), np.uint32),
    }
    assert {name: (a.shape, a.dtype) for name, a in batch.items()} == want
    square = ExampleStream(PAIRS, DataConfig(pairing="translation"), [Phase(32, 8, 5)]).batch(4)
    assert square["target_tokens"].shape == (8, 32)


@pytest.mark.parametrize("length", [32, 1024])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_columns_describe_batches(pairing, length):
    config = DataConfig(pairing=pairing)
    store = PAIRS if pairing == "translation" else STORE
    batch = ExampleStream(store, config, [Phase(length, 2, 1)]).batch(0)
    columns = PAIRINGS[pairing].columns(config, length, store.shards[0].tokens.dtype)
    assert {name: (a.shape[1:], a.dtype) for name, a in batch.items() if name != "row_index"} == (
        columns
    )


def test_every_pairing_has_its_name():
    assert get_args(get_type_hints(DataConfig)["pairing"]) == tuple(PAIRINGS)


def test_translations_are_a_pure_function_of_the_step():
    phases = [Phase(32, 8, 40), Phase(64, 4, 40)]
    whole = ExampleStream(PAIRS, TRANSLATION, phases, seed=1)
    batches = [whole.batch(step) for step in range(80)]
    again = ExampleStream(PAIRS, TRANSLATION, phases, seed=1)
    for step in reversed(range(80)):
        parts = [again.batch(step, process, 4) for process in range(4)]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        assert_equal_batches(joined, batches[step])
    other = ExampleStream(PAIRS, TRANSLATION, phases, seed=2)
    assert row_keys(other.batch(3)) != row_keys(batches[3])


@pytest.mark.parametrize("process_count", [1, 2])
def test_evaluation_reads_every_pair_once(process_count):
    config = replace(TRANSLATION, num_passes=3)
    parts = [
        EvalBatches(PAIRS, config, 32, 8, process_index=p, process_count=process_count)
        for p in range(process_count)
    ]
    batches = [batch for part in parts for batch in part]
    assert len(batches) == process_count * len(parts[0])
    for side in ("", "target_"):
        tokens = np.concatenate([batch[f"{side}tokens"].ravel() for batch in batches])
        segments = np.concatenate([batch[f"{side}segment_ids"].ravel() for batch in batches])
        assert ((tokens == SPECIAL.pad) == (segments == 0)).all()
        text = tokens[tokens >= 5] - 5
        assert np.unique(text).size == text.size
        assert (tokens == SPECIAL.cls).sum() == PAIRS.num_documents
    fillers = sum((~batch["segment_ids"].any(axis=1)).sum() for batch in batches)
    assert fillers == len(parts[0]) * 8 - parts[0].num_rows > 0


def test_pairings_refuse_stores_of_the_other_kind():
    for pairing in OBJECTIVES:
        with pytest.raises(UserError, match=r"holds pairs .* only data.pairing 'translation'"):
            ExampleStream(PAIRS, DataConfig(pairing=pairing), [Phase(32, 8, 5)])
        with pytest.raises(UserError, match="holds pairs"):
            EvalBatches(PAIRS, DataConfig(pairing=pairing), 32, 8)
    with pytest.raises(UserError, match="is running text"):
        ExampleStream(STORE, TRANSLATION, [Phase(32, 8, 5)])
    phases = [Phase(32, 8, 5), Phase(32, 8, 5)]
    with pytest.raises(UserError, match="is running text"):
        ExampleStream(PAIRS, TRANSLATION, phases, stores={1: STORE})


@pytest.mark.parametrize("pairing", OBJECTIVES)
def test_batch_is_a_pure_function_of_the_step(pairing):
    config, phases = DataConfig(pairing=pairing), [Phase(32, 8, 40), Phase(64, 4, 40)]
    forward = ExampleStream(STORE, config, phases, seed=1)
    backward = ExampleStream(STORE, config, phases, seed=1)
    batches = [forward.batch(step) for step in range(80)]
    for step in reversed(range(80)):
        assert_equal_batches(backward.batch(step), batches[step])
    other = ExampleStream(STORE, config, phases, seed=2)
    assert row_keys(other.batch(3)) != row_keys(batches[3])


@pytest.mark.parametrize("pairing", OBJECTIVES)
def test_an_epoch_visits_every_row_once(pairing):
    config = DataConfig(pairing=pairing)
    num_rows = len(ExampleStream(STORE, config, [Phase(32, 1, 1)]).plan(0))
    stream = ExampleStream(STORE, config, [Phase(32, 1, 3 * num_rows)])
    epochs = [
        [row_keys(stream.batch(step))[0] for step in range(e * num_rows, (e + 1) * num_rows)]
        for e in range(3)
    ]
    for epoch in epochs[1:]:
        assert sorted(epoch) == sorted(epochs[0])
        assert epoch != epochs[0]
    assert epochs[1] != epochs[2]


def test_batches_run_across_epochs_and_blocks(monkeypatch):
    monkeypatch.setattr("bert_jax.data.pipeline._BLOCK_POSITIONS", (512, 1, 512))
    config = DataConfig(pairing="none")
    num_rows = len(ExampleStream(STORE, config, [Phase(32, 1, 1)]).plan(0))
    size = num_rows + 7  # larger than an epoch, and than a block
    large = ExampleStream(STORE, config, [Phase(32, size, 3)])
    single = ExampleStream(STORE, config, [Phase(32, 1, 3 * size)])
    rows = [single.batch(step) for step in range(3 * size)]
    for step in range(3):
        part = rows[step * size : (step + 1) * size]
        want = {name: np.concatenate([row[name] for row in part]) for name in part[0]}
        assert_equal_batches(large.batch(step), want)


@pytest.mark.parametrize("process_count", [1, 2, 4, 8])
def test_local_batches_are_slices(process_count):
    stream = ExampleStream(STORE, DataConfig(), [Phase(32, 8, 3), Phase(64, 16, 2)])
    for step in range(5):
        parts = [stream.batch(step, p, process_count) for p in range(process_count)]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        assert_equal_batches(joined, stream.batch(step))


def test_phases_continue_the_row_stream():
    phases = [Phase(32, 8, 3), Phase(64, 4, 5), Phase(32, 2, 4)]
    stream = ExampleStream(STORE, DataConfig(), phases)
    assert stream.num_steps == 12
    batches = [stream.batch(step) for step in range(12)]
    assert [b["tokens"].shape for b in batches] == [(8, 32)] * 3 + [(4, 64)] * 5 + [(2, 32)] * 4
    index = np.concatenate([b["row_index"] for b in batches])
    np.testing.assert_array_equal(index, np.arange(24 + 20 + 8))
    assert stream.plan(1).length == 64
    assert stream.plan(0) is stream.plan(2)
    first, third = row_keys(batches[0])[:2], row_keys(batches[8])
    assert first != third
    for step in (-1, 12):
        with pytest.raises(IndexError, match="step"):
            stream.batch(step)


@pytest.mark.parametrize(
    ("pairing", "digest"),
    [
        ("nsp", "8e96dbde5a02f38e"),
        ("sop", "f68cafd2919ee0cb"),
        ("none", "c568693a54601da1"),
        ("translation", "6d574e0d6342a9b5"),
    ],
)
def test_batches_are_the_same_on_every_machine(pairing, digest):
    # A change of these numbers changes what a run that is resumed reads: say so in the changelog.
    lengths = [1 + n * n % 37 for n in range(3000)]
    if pairing == "translation":
        store = make_pairs([lengths[n : n + 2] for n in range(0, 3000, 2)])
    else:
        store = make_store([lengths[n : n + 1 + n % 11] for n in range(0, 3000, 7)])
    config = DataConfig(pairing=pairing, num_passes=2)
    stream = ExampleStream(store, config, [Phase(64, 16, 500), Phase(128, 8, 10)], seed=3)
    found = hashlib.sha256()
    for step in (0, 1, 499, 500, 509):
        for name, array in sorted(stream.batch(step).items()):
            # The digests were taken when the labels of pairs had this name.
            name = name.replace("pair_labels", "nsp_labels")
            found.update(name.encode() + array.astype("<i8").tobytes())
    assert found.hexdigest()[:16] == digest


@pytest.mark.parametrize("num_threads", [0, 1, 4])
def test_threads_change_nothing(num_threads):
    config = DataConfig(num_threads=num_threads, prefetch_batches=3)
    stream = ExampleStream(STORE, config, [Phase(32, 8, 10), Phase(64, 4, 10)])
    iterator = TrainBatches(stream)
    for step, batch in enumerate(iterator):
        assert_equal_batches(batch, stream.batch(step))
        assert iterator.next_step == step + 1
    assert iterator.next_step == 20
    iterator.close()


def test_resume_anywhere():
    stream = ExampleStream(STORE, DataConfig(), [Phase(32, 8, 10), Phase(64, 4, 10)])
    iterator = TrainBatches(stream)
    for _ in range(7):
        next(iterator)
    state = iterator.next_step
    iterator.close()
    with pytest.raises(StopIteration):
        next(iterator)
    again = ExampleStream(STORE, DataConfig(), [Phase(32, 8, 10), Phase(64, 4, 10)])
    rest = TrainBatches(again, state, process_index=1, process_count=2)
    assert rest.next_step == 7
    resumed = list(rest)
    assert len(resumed) == 13
    assert_equal_batches(resumed[0], stream.batch(7, 1, 2))
    assert_equal_batches(resumed[-1], stream.batch(19, 1, 2))
    assert list(TrainBatches(stream, 20)) == []


@pytest.mark.parametrize("pairing", OBJECTIVES)
@pytest.mark.parametrize("process_count", [1, 2])
def test_evaluation_reads_every_row_once(pairing, process_count):
    config = DataConfig(pairing=pairing, num_passes=3)
    num_rows = EvalBatches(STORE, config, 32, 2).num_rows
    # More passes of the same documents would count some rows more than once.
    assert num_rows == EvalBatches(STORE, replace(config, num_passes=1), 32, 2).num_rows
    for batch_size in (2, 8, num_rows - num_rows % 2 - 2, num_rows * 2):  # N = batch + 1 or + 2 too
        if batch_size % process_count:
            continue
        parts = [
            EvalBatches(STORE, config, 32, batch_size, process_index=p, process_count=process_count)
            for p in range(process_count)
        ]
        batches = [list(part) for part in parts]
        assert {len(b) for b in batches} == {len(parts[0])} == {-(-num_rows // batch_size)}
        seen, fillers = [], 0
        for part in batches:
            for batch in part:
                assert batch["tokens"].shape == (batch_size // process_count, 32)
                real = batch["segment_ids"].any(axis=1)
                seen += [batch["row_index"][i] for i in np.flatnonzero(real)]
                fillers += (~real).sum()
                assert (batch["tokens"][~real] == SPECIAL.pad).all()
                assert (batch["pair_labels"][~real] == -1).all()
                assert not batch["type_ids"][~real].any()
        assert sorted(seen) == list(range(num_rows))
        assert fillers == len(parts[0]) * batch_size - num_rows


def test_last_evaluation_batch_of_batch_plus_one_rows():
    store = make_store([[20]] * 9)
    config = DataConfig(pairing="none")
    batches = list(EvalBatches(store, config, 22, 8))
    assert len(batches) == 2
    real = np.concatenate([b["segment_ids"].any(axis=1) for b in batches])
    assert real.tolist() == [True] * 9 + [False] * 7
    text = np.concatenate([b["tokens"] for b in batches])[:9, 1:-1]
    np.testing.assert_array_equal(np.sort(text.ravel()), store.shards[0].tokens)
    # Process 1 of 2 has nothing in the last batch but takes part in it.
    last = list(EvalBatches(store, config, 22, 8, process_index=1, process_count=2))[-1]
    assert not last["segment_ids"].any()
    assert (last["pair_labels"] == -1).all()


def test_evaluation_again_and_sampled():
    config = DataConfig()
    whole = EvalBatches(STORE, config, 32, 4)
    for first, second in zip(whole, whole, strict=True):
        assert_equal_batches(first, second)
    some = list(EvalBatches(STORE, config, 32, 4, max_rows=6))
    assert len(some) == 2
    assert sum(b["segment_ids"].any(axis=1).sum() for b in some) == 6
    assert_equal_batches(some[0], next(iter(whole)))
    assert EvalBatches(STORE, config, 32, 4, max_rows=10**9).num_rows == whole.num_rows


def test_num_passes_lengthen_the_plan():
    once = StoreRows(STORE, DataConfig(), 32, 0, 1).plan(0)
    thrice = StoreRows(STORE, replace(DataConfig(), num_passes=3), 32, 0, 1).plan(0)
    assert abs(len(thrice) - 3 * len(once)) < 0.2 * len(once)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"short_rate": 1.5}, r"data\.short_rate is 1\.5"),
        ({"num_passes": 0}, r"data\.num_passes is 0"),
        ({"num_threads": -1}, r"data\.num_threads is -1"),
        ({"prefetch_batches": 0}, r"data\.prefetch_batches is 0"),
        ({"target_length": 64}, r"64, but data\.pairing 'nsp' makes rows without targets"),
        ({"pairing": "translation", "target_length": 1}, r"target_length is 1; .* in \[2, 65535\]"),
    ],
)
def test_bad_config(change, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**change)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], "phases is empty"),
        ([Phase(4, 8, 1)], r"phases\[0\]\.length is 4.*5 to 65,535"),
        ([Phase(32, 8, 1), Phase(32, 0, 1)], r"phases\[1\]\.batch_size is 0"),
        ([Phase(32, 8, 0)], r"phases\[0\]\.num_steps is 0"),
        ([Phase(32, 2**32 + 1, 1)], r"phases\[0\]\.batch_size is 4294967297"),
    ],
)
def test_bad_phases(phases, message):
    with pytest.raises(UserError, match=message):
        ExampleStream(STORE, DataConfig(), phases)


def test_bad_requests():
    stream = ExampleStream(STORE, DataConfig(), [Phase(32, 8, 3)])
    with pytest.raises(UserError, match="8 rows does not divide evenly among 3 processes"):
        TrainBatches(stream, 0, 0, 3)
    with pytest.raises(UserError, match="6 rows does not divide evenly among 4"):
        EvalBatches(STORE, DataConfig(), 32, 6, process_count=4)
    with pytest.raises(UserError, match="first step is 4"):
        TrainBatches(stream, 4)
    with pytest.raises(UserError, match="another document"):
        ExampleStream(make_store([[5, 5]]), DataConfig(), [Phase(32, 8, 3)])


def test_an_id_outside_the_vocabulary_is_not_handed_on():
    shard = random_shard(30)
    store = store_of(replace(shard, tokens=np.full_like(shard.tokens, shard.vocab_size)))
    stream = ExampleStream(store, DataConfig(), [Phase(32, 8, 3)])
    with pytest.raises(UserError, match=f"damaged: it has the id {store.vocab_size}, but"):
        stream.batch(2)
    with pytest.raises(UserError, match="damaged"):
        list(EvalBatches(store, DataConfig(), 32, 4))


def test_a_phase_may_read_another_text():
    other, config = random_store(40, seed=5), DataConfig(pairing="none")
    phases = [Phase(32, 4, 5)] * 3
    plain = ExampleStream(STORE, config, phases, seed=3)
    mixed = ExampleStream(STORE, config, phases, seed=3, stores={1: other})
    alone = ExampleStream(other, config, phases, seed=3)
    for step in range(15):
        expected = alone if 5 <= step < 10 else plain
        assert_equal_batches(mixed.batch(step), expected.batch(step))
    assert row_keys(alone.batch(7)) != row_keys(plain.batch(7))
    with pytest.raises(UserError, match="document"):  # found before the phase is reached
        ExampleStream(STORE, DataConfig(), phases, stores={2: make_store([[5, 5]])})


def test_a_batch_warm_up_reads_the_same_rows_in_smaller_batches():
    config, grown = DataConfig(pairing="none"), Phase(32, 16, 12, batch_warmup_steps=8)
    assert grown.stages == ((3, 2), (2, 4), (3, 8), (4, 16))
    stream = ExampleStream(STORE, config, [grown, Phase(32, 4, 2)], seed=3)
    plain = ExampleStream(STORE, config, [Phase(32, 1, grown.num_rows), Phase(32, 4, 2)], seed=3)
    batches = [stream.batch(step) for step in range(14)]
    sizes = [len(batch["row_index"]) for batch in batches]
    assert sizes == [2] * 3 + [4] * 2 + [8] * 3 + [16] * 4 + [4] * 2
    rows = [plain.batch(step) for step in range(grown.num_rows + 2)]
    for name in batches[0]:
        ours, theirs = (np.concatenate([each[name] for each in part]) for part in (batches, rows))
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    halves = [stream.batch(6, index, 2) for index in range(2)]
    np.testing.assert_array_equal(
        np.concatenate([half["tokens"] for half in halves]), batches[6]["tokens"]
    )
    with pytest.raises(UserError, match="2 rows does not divide evenly among 4 processes"):
        TrainBatches(stream, 0, 0, 4)
    for step in (3, 7):  # steps that are over need not divide, though one block has them
        quarters = [next(TrainBatches(stream, step, index, 4)) for index in range(4)]
        joined = np.concatenate([quarter["tokens"] for quarter in quarters])
        np.testing.assert_array_equal(joined, batches[step]["tokens"])

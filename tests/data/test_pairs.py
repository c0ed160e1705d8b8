import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_store import SPECIAL, document_of, make_shard, random_shard

from bert_jax.data import pairs
from bert_jax.data.pairs import plan_pairs, truncate
from bert_jax.errors import UserError
from bert_jax.hashing import hash_key, hash_u64

COLUMNS = ("a_start", "a_len", "b_start", "b_len", "label")
DOCUMENTS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=2, max_size=8)


def as_rows(plan):
    return [
        tuple(int(v) for v in row) for row in zip(*(getattr(plan, c) for c in COLUMNS), strict=True)
    ]


def plan_one_by_one(shard, length, short_rate, seed):
    """The published procedure, a sentence and a token at a time, on the same random numbers."""
    keys = [hash_key(seed, 0, purpose) for purpose in range(8)]

    def bits(purpose, counter):
        return int(hash_u64(keys[purpose], np.array([counter]))[0])

    def draw(purpose, counter, bound):
        return (bits(purpose, counter) >> 32) * bound >> 32

    sentence = shard.sentence_offsets.tolist()
    documents = shard.document_offsets.tolist()
    room = length - 3
    rows = []
    for d in range(len(documents) - 1):
        i = documents[d]
        while i < documents[d + 1]:
            target = room
            if bits(pairs._SHORT, i) < short_rate * 2**64:
                target = 2 + draw(pairs._TARGET, i, room - 1)
            chunk = [i]
            while sentence[chunk[-1] + 1] - sentence[i] < target and (
                chunk[-1] + 1 < documents[d + 1]
            ):
                chunk.append(chunk[-1] + 1)
            a_end = 1
            if len(chunk) >= 2:
                a_end = 1 + draw(pairs._SPLIT, i, len(chunk) - 1)
            a = list(range(sentence[i], sentence[i + a_end]))
            is_random = len(chunk) == 1 or bits(pairs._COIN, i) >> 63 == 1
            if is_random:
                other = [e for e in range(len(documents) - 1) if e != d][
                    draw(pairs._DOCUMENT, i, len(documents) - 2)
                ]
                j = documents[other] + draw(
                    pairs._SENTENCE, i, documents[other + 1] - documents[other]
                )
                b = []
                while j < documents[other + 1]:
                    b += range(sentence[j], sentence[j + 1])
                    j += 1
                    if len(b) >= target - len(a):
                        break
                following = i + a_end
            else:
                b = list(range(sentence[i + a_end], sentence[chunk[-1] + 1]))
                following = chunk[-1] + 1
            coins = [
                iter(f"{int(hash_u64(keys[p], hash_u64(keys[p], np.array([i])))[0]):064b}")
                for p in (pairs._FRONT_A, pairs._FRONT_B)
            ]
            while len(a) + len(b) > room:
                longer, coin = (a, coins[0]) if len(a) > len(b) else (b, coins[1])
                del longer[0 if next(coin) == "1" else -1]
            rows.append((a[0], len(a), b[0], len(b), int(is_random)))
            i = following
    return rows


@pytest.mark.parametrize("length", [16, 40, 64])
def test_plan_is_the_published_procedure(length):
    shard = random_shard(30)
    plan = plan_pairs(shard, length, short_rate=0.3, seed=5)
    assert sorted(as_rows(plan)) == sorted(plan_one_by_one(shard, length, 0.3, 5))
    assert plan.a_start.dtype == np.uint32
    assert plan.a_len.dtype == np.uint16


def test_pool_refills_change_nothing(monkeypatch):
    shard = random_shard(50)
    want = sorted(as_rows(plan_pairs(shard, 64)))
    monkeypatch.setattr(pairs, "_POOL", 4)
    assert sorted(as_rows(plan_pairs(shard, 64))) == want


@settings(max_examples=60)
@given(DOCUMENTS, st.integers(5, 60), st.integers(0, 2**32), st.sampled_from(["nsp", "sop"]))
def test_rows_lie_in_documents_and_fit(documents, length, seed, pairing):
    shard = make_shard(documents)
    try:
        plan = plan_pairs(shard, length, pairing=pairing, short_rate=0.5, seed=seed)
    except UserError:
        assert pairing == "sop"
        assert max(map(sum, documents)) == 1
        return
    rows = np.array(as_rows(plan))
    a_start, a_len, b_start, b_len, label = rows.T
    assert a_len.min() >= 1
    assert b_len.min() >= 1
    assert (a_len + b_len).max() <= length - 3
    a_document = document_of(shard, a_start)
    b_document = document_of(shard, b_start)
    np.testing.assert_array_equal(a_document, document_of(shard, a_start + a_len - 1))
    np.testing.assert_array_equal(b_document, document_of(shard, b_start + b_len - 1))
    if pairing == "nsp":
        np.testing.assert_array_equal(a_document != b_document, label == 1)
        assert (b_start >= a_start + a_len)[label == 0].all()
    else:
        np.testing.assert_array_equal(a_document, b_document)
        first_end = np.where(label, b_start + b_len, a_start + a_len)
        assert (first_end <= np.where(label, a_start, b_start)).all()


@settings(max_examples=60)
@given(DOCUMENTS, st.integers(5, 60), st.sampled_from(["nsp", "sop"]), st.integers(1, 2))
def test_unheld_rate_is_a_count_of_tokens(documents, length, pairing, num_passes):
    shard = make_shard([*documents, [2]])
    plan = plan_pairs(shard, length, pairing=pairing, short_rate=0.5, num_passes=num_passes)
    held = np.zeros(shard.num_tokens, bool)
    for a_start, a_len, b_start, b_len, _ in as_rows(plan):
        held[a_start : a_start + a_len] = True
        held[b_start : b_start + b_len] = True
    assert plan.unheld_rate(shard.num_tokens) == pytest.approx(1 - held.mean(), abs=1e-12)


def test_unheld_rate_beyond_32_bits():
    far = np.array([2**40, 2**40 + 7, 0])
    lens = np.array([10, 10, 60_000], np.uint16)
    plan = pairs.PairPlan(128, far, lens, far, lens, np.zeros(3, np.uint8))
    assert plan.unheld_rate(2**41) == pytest.approx(1 - (17 + 60_000) / 2**41, abs=1e-15)


def test_what_a_plan_leaves_out_is_said():
    def said(documents, pairing="nsp", length=64, **meta):
        shard = dataclasses.replace(make_shard(documents), meta=meta)
        return plan_pairs(shard, length, pairing=pairing).losses(shard)

    clause, warning = said([[9] * 300] * 4)
    assert re.fullmatch(r"\d\.\d% of the tokens in no row, 5\d\.\d% random pairs", clause)
    assert warning is None

    clause, warning = said([[300] * 50] * 4, splitter="lines")
    assert "100% lie in sentences longer than half a row: each line is a sentence;" in warning
    assert "% of the pairs are random (" in warning
    assert "`bert-jax corpus` cuts long sentences" in warning
    unheld = float(clause.partition("%")[0])
    assert f"{unheld:.0f}% of the corpus's tokens are in no row" in warning
    _, warning = said([[300] * 50] * 4, splitter="fast")
    assert "each line" not in warning
    _, warning = said([[60] * 50] * 4)
    assert "cuts long sentences" not in warning, "it would change nothing"

    clause, warning = said([[9]] * 40)
    assert clause.endswith("100.0% random pairs")
    assert "100% of the documents are one sentence" in warning
    assert "in no row" not in warning
    clause, warning = said([[9]] * 40, pairing="sop")
    assert "random" not in clause
    assert warning is None


@pytest.mark.parametrize("block_rows", [2, 256])
def test_every_sentence_is_used_once(block_rows, monkeypatch):
    # With sentences of one token nothing is cut off, so A and a following B tile the corpus. Small
    # blocks split the long documents into many lanes.
    monkeypatch.setattr(pairs, "_BLOCK_ROWS", block_rows)
    shard = make_shard([[1] * n for n in (1, 2, 700, 3000, 5, 64)])
    plan = plan_pairs(shard, 16, short_rate=0.2, seed=1)
    used = np.zeros(shard.tokens.size, int)
    for a_start, a_len, b_start, b_len, label in as_rows(plan):
        used[a_start : a_start + a_len] += 1
        if not label:
            used[b_start : b_start + b_len] += 1
    assert (used == 1).all()


def test_a_sentence_longer_than_a_block_is_one_lane(monkeypatch):
    monkeypatch.setattr(pairs, "_BLOCK_ROWS", 1)
    shard = make_shard([[100_000, 3, 3], [5, 90_000], [4]])
    starts, ends = pairs._lanes(shard, 50)
    assert (starts < ends).all()
    np.testing.assert_array_equal(starts[1:], ends[:-1])
    assert {0, 3, 5} <= set(starts.tolist())
    plan = plan_pairs(shard, 50)
    assert int(plan.a_len.max()) <= 47


def test_two_documents_10k_pairs_none_from_the_same():
    shard = make_shard([[7] * 40_000, [9] * 40_000])
    plan = plan_pairs(shard, 32)
    random = plan.label == 1
    assert random.sum() > 10_000
    a, b = document_of(shard, plan.a_start), document_of(shard, plan.b_start)
    assert (a != b)[random].all()
    assert (a == b)[~random].all()


def test_random_documents_and_sentences_are_uniform():
    shard = make_shard([[4] * 1000] * 11)
    plan = plan_pairs(shard, 16, num_passes=3)
    random = plan.label == 1
    a, b = document_of(shard, plan.a_start)[random], document_of(shard, plan.b_start)[random]
    shift = np.bincount((b - a) % 11, minlength=11)[1:]
    expected = random.sum() / 10
    assert ((shift - expected) ** 2 / expected).sum() < 28  # chi-square, 9 d.f., p = 0.001
    sentence = plan.b_start[random] // 4 % 1000 * 20 // 1000
    counts = np.bincount(sentence, minlength=20)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 44  # 19 d.f., p = 0.001


def test_labels_are_half_and_short_targets_a_tenth():
    shard = make_shard([[1] * 50_000] * 4)
    plan = plan_pairs(shard, 64, short_rate=0.1)
    total = plan.a_len.astype(int) + plan.b_len
    assert abs(plan.label.mean() - 0.5) < 0.02
    short = total < 61
    # One short length in 60 is the full one; documents' and blocks' ends add a little.
    assert abs(short.mean() - 0.1) < 0.02
    assert abs(total[short].mean() - 31) < 2.5
    plan = plan_pairs(shard, 64, short_rate=0.0)
    assert (plan.a_len.astype(int) + plan.b_len < 61).sum() < 60  # ends of documents and blocks


def test_single_sentence_documents_serve_with_a_random_partner():
    plan = plan_pairs(make_shard([[5]] * 20), 32)
    assert len(plan) == 20
    assert (plan.label == 1).all()


def test_plan_is_a_function_of_seed_and_pass():
    shard = random_shard(40)
    assert as_rows(plan_pairs(shard, 48, seed=3)) == as_rows(plan_pairs(shard, 48, seed=3))
    assert as_rows(plan_pairs(shard, 48, seed=3)) != as_rows(plan_pairs(shard, 48, seed=4))
    both = as_rows(plan_pairs(shard, 48, seed=3, num_passes=2))
    first = as_rows(plan_pairs(shard, 48, seed=3))
    assert both[: len(first)] == first
    assert len(set(both) & set(first)) < 1.5 * len(set(first))
    assert both[len(first) :] != first


@settings(max_examples=200)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(2, 400), st.integers(0, 2**40))
def test_truncation_is_token_by_token_of_the_longer(a_len, b_len, room, row):
    a, b = np.array([a_len]), np.array([b_len])
    a_front, a_new, b_front, b_new = (
        int(v[0]) for v in truncate(a, b, room, 11, 12, np.array([row]))
    )
    want_a, want_b = a_len, b_len
    while want_a + want_b > room:
        if want_a > want_b:
            want_a -= 1
        else:
            want_b -= 1
    assert (a_new, b_new) == (want_a, want_b)
    assert 0 <= a_front <= a_len - a_new
    assert 0 <= b_front <= b_len - b_new
    # The `ids[:-0]` trap: nothing to cut leaves everything.
    if a_len + b_len <= room:
        assert (a_front, a_new, b_front, b_new) == (0, a_len, 0, b_len)


@pytest.mark.parametrize("cut", [1, 10, 64, 65, 1000, 200_000])
def test_the_number_cut_at_the_front_is_binomial(cut):
    k = 4000 if cut <= 1000 else 30
    ones = np.ones(k, np.int64)
    front, length, _, _ = truncate(ones * (cut + 5), ones, 6, 1, 2, np.arange(k))
    assert (length == 5).all()
    assert abs(front.mean() - cut / 2) < 4.5 * np.sqrt(cut / 4 / k)
    assert 0.8 < front.var() / (cut / 4) < 1.2 or k < 100


@pytest.mark.parametrize("length", [5, 16, 64])
def test_gather_builds_rows(length):
    shard = random_shard(20)
    plan = plan_pairs(shard, length)
    rows = np.arange(len(plan))[::-1]
    batch = plan.batch(shard, rows)
    assert batch["tokens"].dtype == shard.tokens.dtype
    assert batch["type_ids"].dtype == batch["segment_ids"].dtype == np.uint8
    assert batch["pair_labels"].dtype == np.int32
    for i, row in enumerate(rows):
        a_start, a_len, b_start, b_len, label = (int(getattr(plan, c)[row]) for c in COLUMNS)
        a, b = shard.tokens[a_start : a_start + a_len], shard.tokens[b_start : b_start + b_len]
        real = [SPECIAL.cls, *a, SPECIAL.sep, *b, SPECIAL.sep]
        padding = length - len(real)
        assert batch["tokens"][i].tolist() == real + [SPECIAL.pad] * padding
        types = [0] * (a_len + 2) + [1] * (b_len + 1) + [0] * padding
        assert batch["type_ids"][i].tolist() == types
        assert batch["segment_ids"][i].tolist() == [1] * len(real) + [0] * padding
        assert batch["pair_labels"][i] == label


def test_one_document_is_refused_under_nsp():
    shard = make_shard([[5, 6, 7]])
    with pytest.raises(UserError, match=r"1 document.*another document"):
        plan_pairs(shard, 32)
    assert len(plan_pairs(shard, 32, pairing="sop")) == 1


@pytest.mark.parametrize(
    ("shards", "own", "advice"),
    [
        (1, "00000", "Separate documents in the text by blank"),
        (4, "00000", "a larger --shard-mb or --held"),
        (0, "00003", "a larger --shard-mb or --held"),
    ],
)
def test_what_helps_a_shard_of_one_document_depends_on_others(tmp_path, shards, own, advice):
    """Every corpus on disk has shards; blank lines help only if the whole text is one document.

    Shards of a corpus in a bucket come one after another.
    """
    for number in range(shards):
        (tmp_path / "shards" / f"{number:05}").mkdir(parents=True)
    shard = dataclasses.replace(make_shard([[5, 6, 7]]), path=tmp_path / "shards" / own)
    with pytest.raises(UserError, match=rf"shards/{own} has 1 document.*{advice}.*, or set data"):
        plan_pairs(shard, 32)


def test_no_rows_and_short_lengths_are_refused():
    with pytest.raises(UserError, match="makes no rows"):
        plan_pairs(make_shard([[1], [1]]), 32, pairing="sop")
    with pytest.raises(UserError, match="length is 4"):
        plan_pairs(random_shard(3), 4)

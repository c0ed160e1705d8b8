import re
from dataclasses import astuple
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.errors import UserError
from bert_jax.objectives.masking import MaskingConfig, mask_tokens
from bert_jax.tokenization.special_ids import SpecialIds

V, PAD, CLS, SEP, MASK = 1005, 0, 3, 100, 50
SPECIAL_IDS = SpecialIds(pad=PAD, unk=1004, cls=CLS, sep=SEP, mask=MASK)
SPECIALS = astuple(SPECIAL_IDS)
ORDINARY = np.setdiff1d(np.arange(V), SPECIALS)
CONTINUES = np.zeros(V, bool)
CONTINUES[ORDINARY[::3]] = True


KEYWORDS = {"vocab_size": V, "special_ids": SPECIAL_IDS, "continues_word": CONTINUES}


@cache
def compiled(config):
    return jax.jit(partial(mask_tokens, config=config, **KEYWORDS))


def masked(tokens, segment_ids=None, row_index=None, seed=0, config=None, **changes):
    tokens, config = np.asarray(tokens), config or MaskingConfig()
    if segment_ids is None:
        segment_ids = np.ones(tokens.shape, np.uint8)
    if row_index is None:
        row_index = np.arange(tokens.shape[0], dtype=np.uint32)
    function = (
        jax.jit(partial(mask_tokens, config=config, **(KEYWORDS | changes)))
        if changes
        else compiled(config)
    )
    result = function(tokens, segment_ids, row_index, seed=np.uint32(seed))
    return jax.tree.map(np.asarray, result)


def make_rows(real_lengths, length, seed=0, dtype=np.uint16):
    """[CLS] text [SEP] and padding; shorter than 3 tokens, the first of these."""
    tokens = np.random.default_rng(seed).choice(ORDINARY, (len(real_lengths), length)).astype(dtype)
    places, real = np.arange(length), np.asarray(real_lengths)[:, None]
    tokens[:, 0] = CLS
    tokens[places == real - 1] = SEP
    tokens[places >= real] = PAD
    return tokens, (places < real).astype(np.uint8)


def chosen_of(result, length):
    chosen = np.zeros((result.positions.shape[0], length), bool)
    row, slot = np.nonzero(result.weights)
    chosen[row, result.positions[row, slot]] = True
    return chosen


def check_invariants(tokens, segment_ids, result):
    chosen = chosen_of(result, tokens.shape[1])
    assert chosen.sum() == result.weights.sum()  # no position twice
    assert not (chosen & ((segment_ids == 0) | np.isin(tokens, SPECIALS))).any()
    np.testing.assert_array_equal(result.tokens[~chosen], tokens[~chosen])
    assert np.isin(result.tokens[chosen], [MASK, *ORDINARY]).all()
    row, slot = np.nonzero(result.weights)
    np.testing.assert_array_equal(
        result.labels[row, slot], tokens[row, result.positions[row, slot]]
    )
    unused = result.weights == 0
    assert not result.labels[unused].any()
    assert not result.positions[unused].any()
    assert np.isin(result.weights, [0, 1]).all()
    # Used slots come first, in ascending order of position.
    assert (np.diff(result.weights, axis=1) <= 0).all()
    both = result.weights[:, 1:] > 0
    assert (np.diff(result.positions, axis=1)[both] > 0).all()
    return chosen


def test_a_million_draws():
    # One ordinary id everywhere, so that a random replacement shows unless it is that id.
    original = int(ORDINARY[7])
    tokens = np.full((1024, 512), original, np.uint16)
    config = MaskingConfig(rate=0.5)
    replaced = np.concatenate(
        [
            result.tokens[chosen_of(result, 512)]
            for first in (0, 1024, 2048, 3072)
            for result in [masked(tokens, row_index=np.arange(first, first + 1024), config=config)]
        ]
    )
    n = replaced.size
    assert n == 4 * 1024 * 256 > 1_000_000
    hit = 0.1 / ORDINARY.size  # random and yet the original
    observed = np.array([(replaced == MASK).sum(), (replaced == original).sum(), 0])
    observed[2] = n - observed.sum()
    expected = n * np.array([0.8, 0.1 + hit, 0.1 - hit])
    assert ((observed - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 d.f., p = 0.001
    drawn = np.bincount(replaced[(replaced != MASK) & (replaced != original)], minlength=V)
    assert not drawn[list(SPECIALS)].any()
    assert drawn.size == V
    counts = drawn[np.setdiff1d(ORDINARY, [original])]
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 1142  # 998 d.f., p = 0.001


def test_replacements_reach_the_whole_vocabulary_and_no_further():
    config = MaskingConfig(rate=1.0, max_predictions=64, mask_rate=0.0, random_rate=1.0)
    tokens = np.full((64, 64), 6, np.uint16)
    ids = SpecialIds(pad=1, unk=3, cls=7, sep=7, mask=7)
    for vocab_size in (8, 9):
        result = masked(
            tokens, config=config, vocab_size=vocab_size, special_ids=ids, continues_word=None
        )
        assert set(result.tokens.ravel()) == set(range(vocab_size)) - {1, 3, 7}


def test_rows_may_have_rates_of_their_own():
    tokens, segment_ids = make_rows([40, 40, 40], 64)
    config, rates = MaskingConfig(rate=0.5), np.float32([0.1, 0.25, 0.5])
    result = masked(tokens, segment_ids, config=config, rates=rates)
    assert result.weights.sum(1).tolist() == [4, 10, 20]


@pytest.mark.parametrize("whole_word", [False, True])
def test_invariants_at_every_row_length(whole_word):
    tokens, segment_ids = make_rows(range(129), 128)
    result = masked(tokens, segment_ids, config=MaskingConfig(whole_word=whole_word))
    check_invariants(tokens, segment_ids, result)
    for row, real in enumerate(range(129)):
        wanted = min(max(round(np.float32(0.15) * np.float32(real)), 1), 20)
        wanted = min(wanted, max(real - 2, 0))
        if whole_word:
            assert result.weights[row].sum() <= wanted
        else:
            assert result.weights[row].sum() == wanted, real
    assert result.positions.shape == (129, 20)
    assert result.tokens.dtype == result.positions.dtype == result.labels.dtype == np.int32
    assert result.weights.dtype == np.float32


def test_rows_without_candidates():
    tokens = np.array([[PAD] * 8, [CLS, SEP] + [PAD] * 6, [CLS, 1004, MASK, SEP] + [PAD] * 4])
    for whole_word in (False, True):
        result = masked(
            tokens, (tokens != PAD).astype(np.uint8), config=MaskingConfig(whole_word=whole_word)
        )
        assert not result.weights.any()
        assert not result.labels.any()
        np.testing.assert_array_equal(result.tokens, tokens)
        assert np.isfinite(result.weights).all()


def test_padding_is_what_segment_ids_say():
    tokens = np.full((64, 32), 6)  # ordinary ids in the padding as well
    segment_ids = (np.arange(32) < 10).astype(np.uint8) * np.ones((64, 1), np.uint8)
    for whole_word in (False, True):
        result = masked(tokens, segment_ids, config=MaskingConfig(whole_word=whole_word))
        assert not check_invariants(tokens, segment_ids, result)[:, 10:].any()
        assert (result.weights.sum(axis=1) == 2).all()


@pytest.mark.parametrize("length", [1, 2, 31, 64, 127, 128, 129])
def test_odd_lengths(length):
    tokens = np.random.default_rng(0).choice(ORDINARY, (16, length))
    check_invariants(tokens, np.ones_like(tokens), masked(tokens))


def test_default_and_given_num_predictions():
    assert [MaskingConfig().num_predictions(n) for n in (1, 64, 128, 512)] == [1, 12, 20, 80]
    assert MaskingConfig(max_predictions=76).num_predictions(512) == 76
    assert MaskingConfig(max_predictions=76).num_predictions(64) == 64
    tokens = np.full((4, 128), 6)
    result = masked(tokens, config=MaskingConfig(max_predictions=5))
    assert result.positions.shape == (4, 5)
    assert (result.weights.sum(axis=1) == 5).all()


def test_positions_are_chosen_uniformly_and_independently():
    length, rows = 64, 20_000
    tokens = np.full((rows, length), 6, np.uint16)
    per_row = round(0.15 * length)
    chosen = chosen_of(masked(tokens), length)
    rate = per_row / length
    deviation = (chosen.mean(axis=0) - rate) / np.sqrt(rate * (1 - rate) / rows)
    assert np.abs(deviation).max() < 4
    # Chance overlap with the next row, the same row later, and the same row under another seed.
    later = chosen_of(masked(tokens, row_index=np.arange(rows) + 2**20), length)
    other = chosen_of(masked(tokens, seed=1), length)
    for second in (np.roll(chosen, 1, axis=0), later, other):
        overlap = (chosen & second).sum(axis=1)
        assert abs(overlap.mean() - per_row**2 / length) < 0.04  # 5 standard errors
    # Neighbours within a row: drawn without replacement.
    together = (chosen[:, 1:] & chosen[:, :-1]).mean()
    assert abs(together - per_row * (per_row - 1) / (length * (length - 1))) < 0.001


def test_replacement_is_independent_of_the_choice():
    tokens = np.full((4000, 64), 6, np.uint16)
    result = masked(tokens)
    chosen = chosen_of(result, 64)
    is_mask = (result.tokens == MASK).sum(axis=0) / chosen.sum(axis=0)
    assert np.abs(is_mask - 0.8).max() < 5 * np.sqrt(0.16 / chosen.sum(axis=0).min())


@pytest.mark.parametrize("whole_word", [False, True])
def test_row_is_masked_by_its_index_alone(whole_word):
    config = MaskingConfig(whole_word=whole_word)
    tokens, segment_ids = make_rows([60, 64, 10, 33, 64, 5, 50, 64], 64)
    row_index = np.array([9, 2**32 - 1, 5, 0, 77, 8, 2**31, 3], np.uint32)
    whole = masked(tokens, segment_ids, row_index, config=config)
    order = np.array([5, 1, 7, 0])
    part = masked(tokens[order], segment_ids[order], row_index[order], config=config)
    for first, second in zip(whole, part, strict=True):
        np.testing.assert_array_equal(first[order], second)
    other = masked(tokens, segment_ids, row_index + np.uint32(1), config=config)
    assert (whole.positions != other.positions).any()
    seeded = masked(tokens, segment_ids, row_index, seed=7, config=config)
    assert (whole.positions != seeded.positions).any()


@pytest.mark.parametrize(
    ("whole_word", "expected"),
    [
        (False, [
            [(1, 283, 12), (4, 15, 15), (7, 50, 18), (8, 443, 19), (10, 50, 21), (12, 27, 23)],
            [(3, 67, 306), (5, 308, 308), (6, 327, 309), (8, 50, 504), (9, 505, 505),
             (12, 844, 508)],
        ]),
        (True, [
            [(1, 283, 12), (4, 15, 15), (7, 50, 18), (8, 443, 19), (9, 367, 20), (10, 50, 21)],
            [(3, 67, 306), (4, 50, 307), (5, 308, 308), (6, 327, 309), (8, 50, 504),
             (9, 505, 505)],
        ]),
    ],
)  # fmt: skip
def test_a_batch_is_masked_as_in_every_version(whole_word, expected):
    """A run goes on, and `replay` shows its batches, with a later version too."""
    tokens = np.array(
        [[CLS, *ORDINARY[10:22], SEP, PAD, PAD],
         [CLS, *ORDINARY[300:306], SEP, *ORDINARY[500:507], SEP]]
    )  # fmt: skip
    segment_ids = np.array([[1] * 14 + [0] * 2, [1] * 8 + [2] * 8])
    config = MaskingConfig(0.4, None, 0.4, 0.4, whole_word=whole_word)
    row_index = np.array([3, 2**31 + 5], np.uint32)
    found = masked(tokens, segment_ids, row_index, seed=11, config=config)
    places = [
        positions[used > 0] for positions, used in zip(found.positions, found.weights, strict=True)
    ]
    assert [
        list(zip(at.tolist(), replaced[at].tolist(), row[at].tolist(), strict=True))
        for at, replaced, row in zip(places, found.tokens, tokens, strict=True)
    ] == expected


@pytest.mark.parametrize(("mask_rate", "random_rate"), [(0.5, 0.0), (0.0, 1.0)])
def test_actions_and_replacements_depend_on_seed_row_and_place(mask_rate, random_rate):
    # All tokens are chosen: the choice cannot hide what the other draws depend on.
    config = MaskingConfig(1.0, 32, mask_rate, random_rate)
    tokens = np.full((2, 32), ORDINARY[7])
    first, second = masked(tokens, config=config).tokens
    assert np.unique(first).size > 1
    assert (first != second).any()
    assert (first != masked(tokens, seed=1, config=config).tokens[0]).any()


@pytest.mark.parametrize("whole_word", [False, True])
def test_sharded_rows_need_no_collective(whole_word):
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    by_row = NamedSharding(mesh, PartitionSpec("data"))
    tokens, segment_ids = make_rows([64, 30] * 16, 64)
    row_index = np.arange(32, dtype=np.uint32)
    config = MaskingConfig(whole_word=whole_word)
    function = jax.jit(partial(mask_tokens, config=config, **KEYWORDS), out_shardings=by_row)
    arguments = [jax.device_put(a, by_row) for a in (tokens, segment_ids, row_index)]
    seed = jnp.uint32(0)
    text = function.lower(*arguments, seed=seed).compile().as_text()
    found = re.findall(r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter", text)
    assert not found
    sharded = function(*arguments, seed=seed)
    single = masked(tokens, segment_ids, row_index, config=config)
    for first, second in zip(sharded, single, strict=True):
        assert first.sharding.is_equivalent_to(by_row, first.ndim)
        np.testing.assert_array_equal(first, second)


def words_of(tokens, segment_ids):
    """Lists of positions, word by word, read off one token at a time."""
    words = []
    for i, token in enumerate(tokens):
        if segment_ids[i] == 0 or token in SPECIALS:
            continue
        joined = words and words[-1][-1] == i - 1 and segment_ids[i] == segment_ids[i - 1]
        if CONTINUES[token] and joined:
            words[-1].append(i)
        else:
            words.append([i])
    return words


# The same examples each time: words of more than four tokens could need more rounds than there are.
@settings(max_examples=60, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.15, 0.4]))
def test_whole_words_all_or_none(seed, rate):
    rng = np.random.default_rng(seed)
    tokens = rng.choice([*ORDINARY, *ORDINARY[::3], *ORDINARY[::3], CLS, SEP], (8, 48))
    segment_ids = np.sort(rng.integers(0, 4, (8, 48)), axis=1)[:, ::-1]
    segment_ids = np.where(segment_ids == 0, 0, 4 - segment_ids)
    tokens = np.where(segment_ids == 0, PAD, tokens)
    config = MaskingConfig(rate=rate, max_predictions=20, whole_word=True)
    result = masked(tokens, segment_ids, config=config, seed=seed)
    chosen = check_invariants(tokens, segment_ids, result)
    for row in range(8):
        words = words_of(tokens[row], segment_ids[row])
        real = (segment_ids[row] != 0).sum()
        wanted = min(max(round(np.float32(rate) * np.float32(real)), 1), 20)
        endless = [word for word in words if len(word) > max(wanted, 8)]  # their tokens are words
        words = [word for word in words if word not in endless]
        words += [[place] for word in endless for place in word]
        assert all(len(set(chosen[row, word])) == 1 for word in words)
        left = wanted - chosen[row].sum()
        assert left >= 0
        # What is left is too little for any word not chosen, as in the published data creation.
        assert all(len(word) > left for word in words if not chosen[row, word[0]])


def test_the_tokens_of_an_endless_word_are_chosen_one_by_one():
    """Chinese beside English: one language was never masked, and the other at 70%."""
    tokens, segment_ids = make_rows([128] * 64, 128)
    endless = np.arange(128) >= 40
    tokens[:, 1:-1] = np.where(endless, ORDINARY[0], ORDINARY[1])[1:-1]  # ORDINARY[0] continues
    result = masked(tokens, segment_ids, config=MaskingConfig(whole_word=True))
    chosen = check_invariants(tokens, segment_ids, result)
    for part in (endless, ~endless):
        assert 0.12 < chosen[:, part].mean() < 0.18


def test_whole_words_are_chosen_as_in_the_published_procedure():
    # Words of 1, 2 and 3 tokens over and over. Their shares differ: a long word fits less often
    # into what is left. The published loop over shuffled words gives the shares to expect.
    first, rest = ORDINARY[1], ORDINARY[0]
    assert CONTINUES[rest]
    assert not CONTINUES[first]
    row = [first, first, rest, first, rest, rest] * 16
    rows, length, wanted = 3000, len(row), 14
    chosen = chosen_of(masked(np.tile(row, (rows, 1)), config=MaskingConfig(whole_word=True)), 96)
    assert (chosen.sum(axis=1) == wanted).all()
    expected = np.zeros(length)
    words = words_of(row, [1] * length)
    rng = np.random.default_rng(0)
    for _ in range(rows):
        left = wanted
        for number in rng.permutation(len(words)):
            if len(words[number]) <= left:
                left -= len(words[number])
                expected[words[number]] += 1 / rows
    shares = chosen.mean(axis=0).reshape(16, 6).mean(axis=0)
    np.testing.assert_allclose(shares, expected.reshape(16, 6).mean(axis=0), atol=0.006)


def test_bad_config():
    for change, message in (
        ({"rate": 0.0}, r"masking\.rate is 0\.0"),
        ({"rate": 1.5}, r"masking\.rate is 1\.5"),
        ({"mask_rate": -0.1}, r"masking\.mask_rate is -0\.1"),
        ({"mask_rate": 0.9, "random_rate": 0.2}, "add up to more than 1"),
        ({"max_predictions": 0}, r"max_predictions is 0"),
    ):
        with pytest.raises(UserError, match=message):
            MaskingConfig(**change)
    tokens = np.full((1, 8), 6)
    with pytest.raises(UserError, match="whole_word is set, but this tokenizer"):
        masked(tokens, config=MaskingConfig(whole_word=True), continues_word=None)
    with pytest.raises(UserError, match="vocab_size is 5, but there are 5"):
        masked(tokens, vocab_size=5, special_ids=SpecialIds(*range(5)))

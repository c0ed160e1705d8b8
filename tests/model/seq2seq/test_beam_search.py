"""Beam search: against exhaustive search, against a search without a cache, and its edges."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from toy_networks import MemoryNetwork, TableNetwork, plain_search, toy_config

from bert_jax.errors import UserError
from bert_jax.model.seq2seq.network import Side
from bert_jax.model.seq2seq.search import Prefix, SearchConfig, continuations, search

BEGIN, END = 0, 1


def side(rows):
    """Sources of several lengths, padded with 0."""
    width = max(map(len, rows))
    tokens = np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int32)
    real = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows], np.int32)
    return Side(tokens, real)


def run(network, params, source, limit, prefix=None, **settings):
    limits = np.full(len(source.tokens), limit) if np.ndim(limit) == 0 else np.array(limit)
    found = search(
        network, params, source, limits, prefix, settings=SearchConfig(**settings),
        max_length=int(limits.max()), begin=BEGIN, end=END,
    )  # fmt: skip
    return jax.device_get(found)


def hypotheses(found, row=0):
    """Tokens, score and end of each hypothesis of a row."""
    return [
        (tokens[:length].tolist(), float(score), bool(ended))
        for tokens, length, score, ended in zip(*(part[row] for part in found), strict=True)
        if length
    ]


def outputs_of(vocab, limit):
    """All targets: those with an end token, and those cut at the limit; none begins again."""
    others = [token for token in range(vocab) if token not in (BEGIN, END)]
    for length in range(1, limit + 1):
        for begun in itertools.product(others, repeat=length - 1):
            yield (*begun, END)
    yield from itertools.product(others, repeat=limit)


@pytest.mark.parametrize(
    ("vocab", "limit", "alpha", "beta"),
    [(4, 4, 1.0, 0.0), (6, 3, 0.6, 5.0), (5, 3, 0.0, 0.0), (3, 4, 2.0, 1.0)],
)
def test_as_many_beams_as_outputs_is_exhaustive_search(vocab, limit, alpha, beta):
    models = 50
    network = TableNetwork(toy_config(vocab))
    prefixes = sum(vocab**n for n in range(limit))
    table = np.random.default_rng(vocab).normal(size=(models, prefixes, vocab)).astype(np.float32)
    logs = np.asarray(jax.nn.log_softmax(table.astype(np.float64), -1), np.float64)
    every = list(outputs_of(vocab, limit))
    settings = SearchConfig(num_beams=len(every), length_alpha=alpha, length_beta=beta)
    found = run(
        network, {"table": table}, side([[n] for n in range(models)]), limit,
        num_beams=len(every), length_alpha=alpha, length_beta=beta,
    )  # fmt: skip
    excused = 0
    for model in range(models):
        scores = []
        for output in every:
            prefix, total = 0, 0.0
            for token in output:
                total += logs[model, prefix, token]
                prefix = prefix * vocab + token + 1
            scores.append(total / settings.penalty(len(output)))
        order = np.argsort(-np.array(scores), kind="stable")
        ours = hypotheses(found, model)
        assert len(ours) == len(every)  # each output once, the best first
        assert {tuple(tokens) for tokens, _, _ in ours} == set(every)
        for place, (tokens, score, ended) in zip(order, ours, strict=True):
            assert score == pytest.approx(scores[place], abs=1e-5)
            assert ended == (tokens[-1] == END)
            if tuple(tokens) != every[place]:  # two scores closer than float32 tells
                assert scores[every.index(tuple(tokens))] == pytest.approx(scores[place], abs=1e-5)
                excused += 1
    assert excused <= len(every) * models // 100


def test_continuations_are_the_first_of_all_columns_sorted():
    random = np.random.default_rng(0)
    logits = random.integers(-3, 4, (4, 3, 384)).astype(np.float32)  # many are equal
    sums = np.array([[0, -np.inf, -np.inf], *np.sort(random.normal(size=(3, 3)))[:, ::-1]])
    logits[..., 7] = 9.0  # the begin token, which is left out
    sums = sums.astype(np.float32)
    found = jax.jit(continuations, static_argnums=(2, 3))(logits, sums, 6, 7)
    every = sums[..., None] + np.array(jax.nn.log_softmax(logits, -1), np.float64)
    every[..., 7] = -np.inf
    best = np.argsort(-every.reshape(4, -1), axis=-1, kind="stable")[:, :6]
    np.testing.assert_array_equal(found[1] * 384 + found[2], best)
    expected = np.take_along_axis(every.reshape(4, -1), best, -1)
    np.testing.assert_allclose(found[0], expected, atol=1e-5)


@pytest.fixture(scope="module")
def memory():
    network = MemoryNetwork(toy_config(11))
    return network, jax.device_get(network.init(jax.random.key(3)))


SOURCES = [[2, 5], [3, 4, 5, 6, 7], [9], [10, 2, 2], [4, 4, 4, 4], [8, 9], [6], [5, 3, 2, 7, 10]]


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 1}, {"num_beams": 4}, {"num_beams": 3, "length_alpha": 0.6, "length_beta": 5.0},
     {"num_beams": 8, "length_alpha": 0.0}],
)  # fmt: skip
def test_the_cache_gives_what_a_search_without_one_finds(memory, settings):
    found = run(*memory, side(SOURCES), 9, **settings)
    assert found.ended.any()
    for row, source in enumerate(SOURCES):
        expected = plain_search(
            *memory, np.array(source, np.int32), SearchConfig(**settings), 9, BEGIN, END
        )
        ours = hypotheses(found, row)
        assert [(tokens, ended) for tokens, _, ended in ours] == [
            (tokens, ended) for tokens, _, ended in expected
        ]
        np.testing.assert_allclose([h[1] for h in ours], [h[1] for h in expected], atol=1e-4)


def test_one_beam_takes_the_most_probable_token_each_time(memory):
    network, params = memory
    found = run(network, params, side(SOURCES), 9, num_beams=1)
    ours = [hypotheses(found, row)[0] for row in range(len(SOURCES))]
    given = side([[BEGIN, *tokens] for tokens, _, _ in ours])
    logits = np.array(jax.jit(network.logits)(params, side(SOURCES), given))
    logits[..., BEGIN] = -np.inf
    for (tokens, _, ended), best in zip(ours, logits.argmax(-1).tolist(), strict=True):
        assert best[: len(tokens)] == tokens
        assert ended == (END in tokens)
        assert END not in tokens[:-1]


def test_a_row_is_searched_as_if_it_were_alone(memory):
    together = run(*memory, side(SOURCES), [9, 3, 9, 5, 9, 1, 9, 9], num_beams=4)
    for row, limit in enumerate([9, 3, 9, 5, 9, 1, 9, 9]):
        padded = Side(*(part[row : row + 1] for part in side(SOURCES)))
        alone = run(*memory, padded, [limit], num_beams=4)
        ours, theirs = hypotheses(together, row), hypotheses(alone)
        assert [h[0] for h in ours] == [h[0] for h in theirs]
        np.testing.assert_allclose([h[1] for h in ours], [h[1] for h in theirs], atol=1e-6)
        assert max(len(h[0]) for h in ours) <= limit


def test_hypotheses_are_distinct_and_two_searches_equal(memory):
    found, again = (run(*memory, side(SOURCES), 9, num_beams=6) for _ in range(2))
    for row in range(len(SOURCES)):
        texts = [tuple(tokens) for tokens, _, _ in hypotheses(found, row)]
        assert len(set(texts)) == len(texts) == 6
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_more_beams_than_tokens_never_take_columns_that_stand_for_none():
    network = MemoryNetwork(toy_config(5))
    params = network.init(jax.random.key(0))
    found = run(network, params, side(SOURCES[:1] * 2), 4, num_beams=8)
    assert found.tokens.max() < 5
    assert found.lengths.min() > 0


def ending(network, probability):
    """Parameters of a table that ends with a probability, whatever came before."""
    vocab = network.model.vocab_size
    row = np.full(vocab, np.log((1 - probability) / (vocab - 1)))
    row[END] = np.log(probability)
    return {"table": np.broadcast_to(row, (1, vocab**4, vocab)).astype(np.float32)}


def test_a_model_that_ends_at_once_gives_an_empty_translation():
    network = TableNetwork(toy_config(5))
    for beams in (1, 3):
        found = run(network, ending(network, 0.999), side([[0]]), 4, num_beams=beams)
        assert hypotheses(found)[0][0] == [END]
        assert hypotheses(found)[0][1] == pytest.approx(np.log(0.999), abs=1e-6)
        assert found.ended[0, 0]


def test_a_model_that_never_ends_is_cut_and_flagged():
    network = TableNetwork(toy_config(5))
    found = run(network, ending(network, 1e-9), side([[0]]), 4, num_beams=3)
    assert found.lengths.tolist() == [[4, 4, 4]]
    assert not found.ended.any()
    found = run(network, ending(network, 0.4), side([[0]]), 1, num_beams=2)
    (first, second) = hypotheses(found)
    assert first[0] == [END]
    assert first[2]
    assert len(second[0]) == 1
    assert not second[2]


def test_a_forced_end_follows_the_prefix_and_costs_nothing(memory):
    network, params = memory
    prefix = Prefix(np.array([[4, 7, 3]] * 2, np.int32), np.array([3, 1], np.int32))
    forced = dataclasses.replace(network, forces_end=True)
    found = run(forced, params, side(SOURCES[:2]), [3, 5], prefix, num_beams=2, length_alpha=0.0)
    assert [tokens for tokens, _, _ in hypotheses(found)] == [[4, 7, 3]]
    assert not found.ended[0].any()
    free = run(network, params, side(SOURCES[:2]), [3, 4], prefix, num_beams=2, length_alpha=0.0)
    shorter = {tuple(tokens): score for tokens, score, _ in hypotheses(free, 1)}
    assert found.ended[1].all()
    for tokens, score, _ in hypotheses(found, 1):
        assert tokens[0] == 4
        assert score == pytest.approx(shorter[tuple(tokens[: 4 - (tokens[3:4] == [END])])])


@pytest.mark.parametrize(
    ("alpha", "beta", "expected"), [(0.6, 5.0, 1.7328621), (0.6, 0.0, 3.9810717), (0.0, 0.0, 1.0)]
)
def test_the_length_penalty_counts_the_end_token_alone(alpha, beta, expected):
    settings = SearchConfig(length_alpha=alpha, length_beta=beta)
    assert settings.penalty(10) == pytest.approx(expected, rel=1e-6)
    network = TableNetwork(toy_config(3))
    params = ending(network, 0.5)
    found = run(network, params, side([[0]]), 1, num_beams=1, length_alpha=alpha, length_beta=beta)
    assert found.scores[0, 0] == pytest.approx(np.log(0.5) / settings.penalty(1), abs=1e-6)


def test_a_forced_prefix_begins_each_hypothesis_and_costs_nothing(memory):
    prefix = Prefix(np.array([[4, 7], [9, 0], [0, 0]], np.int32), np.array([2, 1, 0], np.int32))
    source = side(SOURCES[:3])
    found = run(*memory, source, 8, prefix, num_beams=3)
    free = run(*memory, source, 8, num_beams=3)
    assert all(tokens[:2] == [4, 7] for tokens, _, _ in hypotheses(found, 0))
    assert all(tokens[:1] == [9] for tokens, _, _ in hypotheses(found, 1))
    assert len({tuple(tokens) for tokens, _, _ in hypotheses(found, 0)}) == 3
    assert [h[0] for h in hypotheses(found, 2)] == [h[0] for h in hypotheses(free, 2)]
    network, params = memory
    tokens, score, _ = hypotheses(found, 0)[0]
    logits = network.logits(params, side(SOURCES[:1]), side([[BEGIN, *tokens]]))[0]
    logs = np.asarray(jax.nn.log_softmax(logits, -1))
    total = sum(logs[place, token] for place, token in enumerate(tokens) if place >= 2)
    assert score == pytest.approx(total / (len(tokens) - 2), abs=1e-5)


def test_sums_of_many_log_probabilities_keep_their_digits():
    network = MemoryNetwork(toy_config(11))
    params = jax.device_get(network.init(jax.random.key(3)))
    params["write"] = params["write"] * (np.arange(11) != END)
    found = run(network, params, side([[2]]), 200, num_beams=1, length_alpha=0.0)
    ((tokens, score, ended),) = hypotheses(found)
    assert len(tokens) == 200
    assert not ended
    logits = network.logits(params, side([[2]]), side([[BEGIN, *tokens[:-1]]]))[0]
    logs = jax.nn.log_softmax(np.asarray(logits, np.float64), -1)
    total = sum(float(logs[place, token]) for place, token in enumerate(tokens))
    assert score == pytest.approx(total, abs=1e-3)


def test_limits_follow_the_source_and_the_model():
    lengths = np.array([3, 10, 200])
    assert SearchConfig().limits(lengths, 64).tolist() == [9, 30, 64]
    assert SearchConfig(max_length_rate=0.0, max_length=30).limits(lengths, 64).tolist() == [30] * 3
    assert SearchConfig(max_length_rate=0.5).limits(3, 64) == 2
    assert SearchConfig(max_length_rate=2.2).limits(25, 64) == 55


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_beams", 0), ("nbest", 6), ("length_alpha", -1.0), ("max_length_rate", float("nan")),
     ("max_length", -1)],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(UserError, match=f"{field} is {value}"):
        SearchConfig(**{field: value})

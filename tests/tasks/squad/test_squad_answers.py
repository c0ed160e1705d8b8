"""From logits to answers: against all spans one by one, all thresholds one by one, real texts."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from squad_examples import UNCASED, question, real_file

from bert_jax.tasks.config import WindowOptions
from bert_jax.tasks.squad.metrics import score
from bert_jax.tasks.squad.windows import (
    Candidate,
    Prediction,
    answer_files,
    best_threshold,
    build_windows,
    find_answers,
)
from bert_jax.tokenization.load import load_tokenizer

SMALL = WindowOptions(max_length=12, stride=3, max_question=4)
CONTEXT = "a b c d e f g h i j k l"  # windows abcdefg, defghij, ghijkl behind [CLS] x [SEP]


def rows(windows, **by_window):
    """Zeros, and where `w0=((position, logit), ...)` says so a logit; with padding of 99."""
    found = np.full((len(windows), 16), 99.0, np.float32)
    for w, window in enumerate(windows):
        found[w, : len(window.ids)] = 0
        for position, logit in by_window.get(f"w{w}", ()):
            found[w, position] = logit
    return found


def test_worked_out_by_hand():
    asked = question(CONTEXT, text="x y")
    windows = build_windows([asked], UNCASED, SMALL).windows
    # Positions: 0 [CLS], 1-2 question, 3 [SEP], 4 the first context token.
    starts = rows(windows, w0=((0, 3), (1, 50), (5, 2)), w1=((0, 1), (4, 9)), w2=((0, 4),))
    ends = rows(windows, w0=((0, 2), (3, 50), (7, 1)), w1=((0, 2.5),), w2=((0, -0.25), (5, 1.5)))
    [found] = find_answers([asked], windows, starts, ends, num_best=3)
    # 'd' has 9 in the second window, but more context in the first: there it has 0.
    assert found.candidates[0] == Candidate("b c d", 2, 7, 2, 1)
    # 'b' with any other end of its window has 2; 'h' ends with 1.5 where starts have 0.
    assert [each.text for each in found.candidates[1:]] == ["b", "b c"]
    # The second window has the least "no answer": 1 + 2.5.
    assert found.null == Candidate("", 0, 0, 1, 2.5)
    assert found.null_odds == 3.5 - 3
    assert (found.text(None), found.text(0.5), found.text(0.4)) == ("b c d", "b c d", "")


def test_shares_are_of_the_candidates_and_of_no_answer_where_that_counts():
    """exp(2 + 1) is three times exp(3 - ln 3), and so on: 3, 1 and 2 parts."""
    first, second = (Candidate("a", 0, 1, 2.0, 1.0), Candidate("b", 2, 3, 3.0, -np.log(3)))
    null = Candidate("", 0, 0, np.log(2), 3 - np.log(3))
    found = Prediction("x", (first, second), null)
    assert found.shares(with_null=False) == [
        (first, pytest.approx(0.75)), (second, pytest.approx(0.25)),
    ]  # fmt: skip
    assert found.shares(with_null=True) == [
        (first, pytest.approx(3 / 6)), (null, pytest.approx(2 / 6)), (second, pytest.approx(1 / 6)),
    ]  # fmt: skip


def test_long_answers_and_equal_texts():
    asked = question("ab x ab", text="x y")
    windows = build_windows([asked], UNCASED).windows
    at = windows[0].context_at
    starts = rows(windows, w0=((at, 2), (at + 3, 1)))
    ends = rows(windows, w0=((at + 1, 2), (at + 4, 3)))
    [found] = find_answers([asked], windows, starts, ends, max_answer_tokens=3)
    # From the first 'a' to the last 'b' would have 5, in five tokens.
    best = found.candidates[:2]
    assert best == (Candidate("ab", 0, 2, 2, 2), Candidate("x ab", 3, 7, 0, 3))
    texts = [each.text for each in found.candidates]
    assert len(texts) == len(set(texts))
    [longer] = find_answers([asked], windows, starts, ends, max_answer_tokens=5)
    assert longer.candidates[0].text == "ab x ab"


def test_a_text_that_fills_the_first_places():
    asked = question("a " * 50 + "b", text="x y")
    windows = build_windows([asked], UNCASED).windows
    starts = np.ones((1, 57), np.float32)
    starts[0, windows[0].context_at + 50] = 0
    [found] = find_answers([asked], windows, starts, 0 * starts, num_best=2, max_answer_tokens=1)
    assert [each.text for each in found.candidates] == ["a", "b"]


@given(st.integers(0, 2**32 - 1), st.text("ab ", min_size=1, max_size=40), st.integers(1, 6))
@settings(max_examples=60)
def test_equal_to_all_spans_one_by_one(seed, letters, max_tokens):
    context = "a" + letters  # few letters: many equal texts
    rng = np.random.default_rng(seed)
    asked = [question(context, text="x", id="1"), question("b" + letters, text="x y", id="2")]
    windows = build_windows(asked, UNCASED, SMALL).windows
    starts, ends = rng.integers(-3, 4, (2, len(windows), 12)).astype(np.float32)
    order = rng.permutation(len(windows))
    found = find_answers(
        asked, [windows[i] for i in order], starts[order], ends[order],
        num_best=5, max_answer_tokens=max_tokens,
    )  # fmt: skip
    for number, prediction in enumerate(found):
        best: dict[str, float] = {}
        nulls = []
        for window, start, end in zip(windows, starts, ends, strict=True):
            if window.question != number:
                continue
            nulls.append(start[0] + end[0])
            for i, (begin, _) in enumerate(window.spans):
                for j in range(i, min(i + max_tokens, len(window.spans))):
                    if window.has_most_context[i]:
                        text = asked[number].context[begin : window.spans[j, 1]]
                        value = start[window.context_at + i] + end[window.context_at + j]
                        best[text] = max(best.get(text, -np.inf), value)
        right = sorted(best.values(), reverse=True)[:5]
        assert [each.score for each in prediction.candidates] == right
        assert prediction.null.score == min(nulls)
        for each in prediction.candidates:
            assert each.text == asked[number].context[each.start : each.end]
            assert each.score == best[each.text]


def predicted(id, text, odds):
    return Prediction(
        id, (Candidate(text, 0, len(text), 0.0, 0.0),), Candidate("", 0, 0, odds, 0.0)
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "cat", "the cat", "The"]),  # the reference, empty for none
            st.sampled_from(["cat", "dog", "cat sat", "the"]),
            st.sampled_from([-2.5, -1.0, 0.0, 0.5, 3.0]),
        ),
        min_size=1,
        max_size=8,
    ),
)
@settings(max_examples=200)
def test_threshold_equal_to_all_thresholds_one_by_one(cases):
    context = "The the cat"
    asked = [
        question(context, *([reference] if reference else []), id=f"{i}")
        for i, (reference, *_) in enumerate(cases)
    ]
    predictions = [predicted(f"{i}", text, odds) for i, (_, text, odds) in enumerate(cases)]

    def scored(threshold):
        texts = {each.id: each.text(threshold) for each in predictions}
        return score(asked, texts)["f1"]

    found = best_threshold(asked, predictions)
    thresholds = [-9.0, *(odds for *_, odds in cases)]
    assert scored(found) == pytest.approx(max(map(scored, thresholds)))
    others = [value for value in thresholds if value < found and value != -9.0]
    assert all(scored(value) < scored(found) - 1e-9 for value in others)


def test_threshold_by_hand():
    context = "the cat sat"
    asked = [
        question(context, "cat", id="1"),
        question(context, id="2"),
        question(context, "sat", id="3"),
    ]
    predictions = [
        predicted("1", "cat", -1.0),
        predicted("2", "cat", 0.5),
        predicted("3", "cat sat", 2.0),
    ]
    assert best_threshold(asked, predictions) == -1.0
    # With answers that are all wrong, none at all is best, and the threshold says so.
    wrong = [predicted(str(i), "dog", float(i)) for i in (1, 2, 3)]
    none = best_threshold(asked, wrong)
    assert [each.text(none) for each in wrong] == ["", "", ""]


def test_files():
    asked = [question("The 猫 sat", "猫", id="é"), question("a b", id="2")]
    found = build_windows(asked, UNCASED)
    starts, ends = rows(found.windows, w1=((0, 3),)), rows(found.windows, w0=((9, 2),))
    predictions = find_answers(asked, found.windows, starts, ends, num_best=4)
    files = dict(answer_files(predictions, threshold=1.0))
    assert sorted(files) == ["nbest.json", "null_odds.json", "predictions.json"]
    assert json.loads(files["predictions.json"]) == {"é": predictions[0].text(1.0), "2": ""}
    assert "é" in files["predictions.json"]
    assert json.loads(files["null_odds.json"]) == {"é": -2.0, "2": 3.0}
    best = json.loads(files["nbest.json"])
    for prediction in predictions:
        listed = best[prediction.id]
        assert len(listed) == len(prediction.candidates) + 1
        scores = [each["start_logit"] + each["end_logit"] for each in listed]
        assert scores == sorted(scores, reverse=True)
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose([each["probability"] for each in listed], weights)
        assert [each["text"] for each in listed].count("") == 1
    # Without a threshold nothing speaks of "no answer".
    files = dict(answer_files(predictions))
    assert sorted(files) == ["nbest.json", "predictions.json"]
    best = json.loads(files["nbest.json"])
    assert all(each["text"] for listed in best.values() for each in listed)
    assert json.loads(files["predictions.json"])["2"] == predictions[1].candidates[0].text


@pytest.mark.parametrize("language", ["en", "zh", "ar", "hi"])
def test_real_answers_are_recovered(real_data, language):
    """Logits that point at the targets give the references back, letter for letter."""
    tokenizer = load_tokenizer(real_data / "vocab" / "bert-base-multilingual-cased")
    asked = real_file(real_data / "squad" / f"xquad.{language}.json").examples[::5]
    windows = build_windows(asked, tokenizer).windows
    starts, ends = [], []
    for window in windows:
        for logits, at in ((starts, window.target[0]), (ends, window.target[1])):
            row = np.zeros(384, np.float32)
            row[at] = 10.0
            logits.append(row)
    found = find_answers(asked, windows, starts, ends, max_answer_tokens=384)
    texts = {each.id: each.text(0.0) for each in found}
    # The few that the vocabulary cannot part from the rest of their word; see test_real_answers.
    wrong = [each for each in asked if texts[each.id] != each.answers[0].text]
    assert all(each.answers[0].text in texts[each.id] for each in wrong)
    assert len(wrong) <= 2
    assert score(asked, texts, rules="v1.1")["exact"] > 99

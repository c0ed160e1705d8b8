"""Windows: nothing of a context is lost, and answers are where their tokens are."""

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from squad_examples import UNCASED, question, real_file

from bert_jax.errors import UserError
from bert_jax.tasks.config import WindowOptions
from bert_jax.tasks.examples import Answer
from bert_jax.tasks.squad.windows import (
    build_windows,
    encode_context,
    most_context,
    token_range,
    window_begins,
)
from bert_jax.tokenization.load import load_tokenizer

SMALL = WindowOptions(max_length=12, stride=3, max_question=4)  # 5 to 8 tokens of context
LETTERS = "a b c d e f g h i j k l"


def tokens(ids):
    return [UNCASED.id_to_token(id) for id in ids]


def test_one_row():
    asked = question("A cab. Ok", "cab", text="b a?")
    [window] = build_windows([asked], UNCASED).windows
    assert tokens(window.ids) == [
        "[CLS]", "b", "a", "?", "[SEP]", "a", "c", "##a", "##b", ".", "o", "##k", "[SEP]",
    ]  # fmt: skip
    assert window.context_at == 5
    assert window.spans.tolist() == [[0, 1], [2, 3], [3, 4], [4, 5], [5, 6], [7, 8], [8, 9]]
    assert window.has_most_context.all()
    assert window.target == (6, 8)


def test_overlapping_windows():
    """Worked out by hand: 12 tokens, room for 7, so windows begin at 0, 3 and 6."""
    asked = question(LETTERS, "g h", text="x y")
    windows = build_windows([asked], UNCASED, SMALL).windows
    rows = [["[CLS]", "x", "y", "[SEP]", *letters, "[SEP]"]
            for letters in ("abcdefg", "defghij", "ghijkl")]  # fmt: skip
    assert [tokens(window.ids) for window in windows] == rows
    assert [window.target for window in windows] == [(0, 0), (7, 8), (4, 5)]
    across = build_windows([question(LETTERS, "f g", text="x y")], UNCASED, SMALL).windows
    assert [window.target for window in across] == [(9, 10), (6, 7), (0, 0)]
    # 'e' has 2 on its shorter side in the first and 1 in the second; 'f' 1 and 2; 'h' 2 and 1.
    chosen = ["".join(np.array(row[4:-1])[window.has_most_context])
              for row, window in zip(rows, windows, strict=True)]  # fmt: skip
    assert chosen == ["abcde", "fgh", "ijkl"]


def test_targets():
    def target(*answers, **fields):
        found = build_windows([question("The cab sat", *answers, **fields)], UNCASED)
        return found.windows[0].target, len(found.warnings)

    at = 6  # behind [CLS] w ##h ##o ? [SEP]
    assert target("The") == ((at, at + 2), 0)
    assert target("ab s") == ((at + 4, at + 6), 0)
    assert target("cab", "sat") == ((at + 3, at + 5), 0)
    assert target() == ((0, 0), 0)
    assert target(unknown=True) == (None, 0)
    # An answer that was kept although it is not at its offset is no "no answer".
    assert target(Answer("cab", 0)) == (None, 1)
    assert target(Answer("cab", 0), "sat") == ((at + 6, at + 8), 0)


def test_an_answer_without_a_token_has_no_target():
    asked = question("ab \u200b\u200b cd", "\u200b")
    found = build_windows([asked], UNCASED)
    assert found.windows[0].target is None
    assert "1 question is without a target" in found.warnings[0]
    assert "file.json, question 1 (id 'q')" in found.warnings[0]


def test_long_questions_are_cut_and_counted():
    asked = [question("a b", text="a b c d"), question("a b", text="a b c d e", id="long")]
    found = build_windows(asked, UNCASED, SMALL)
    assert found.cut_questions == (1,)
    assert all(tokens(window.ids)[:6] == ["[CLS]", *"abcd", "[SEP]"] for window in found.windows)
    assert (
        "1 question is longer than 4 tokens, cut there: file.json, question 1 (id 'long')"
        in (found.warnings[0])
    )


def test_marks_stay_with_their_character():
    """Normalisation drops the marks; a slice without them would be another word."""
    for context in ("cafe\u0301 x", "\u0915\u0941 x", "e\u0301\u0323 x", "x e\u0301"):
        ids, spans = encode_context(UNCASED, context)
        whole = {context[int(a) : int(b)] for a, b in spans}
        assert any("\u0301" in text or "\u0941" in text for text in whole), context
        assert len(ids) == len(spans)
    # Spaces, controls and marks of a following token are not taken.
    context = "a\u200b b"
    assert encode_context(UNCASED, context).offsets.tolist() == [[0, 1], [3, 4]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_length": 0}, "max_length is 0"),
        ({"stride": 0}, "stride is 0"),
        ({"max_question": 0}, "max_question is 0"),
        ({"max_length": 128}, "max_length 128 leaves 60 tokens .* at least 196"),
        ({"max_length": 64}, "leaves 0 tokens"),
        ({"stride": 317}, "max_length 384 leaves 316 tokens"),
    ],
)
def test_lengths_refused(fields, message):
    with pytest.raises(UserError, match=message):
        WindowOptions(**fields)


def test_a_context_without_tokens_is_refused():
    with pytest.raises(UserError, match=r"question 1 \(id 'q'\): the context .* has no token"):
        build_windows([question("\u200b")], UNCASED)


@given(n=st.integers(1, 60), room=st.integers(1, 20), stride=st.integers(1, 20))
@example(n=328, room=318, stride=128)  # the second window is so short that lengths decide
def test_every_token_is_judged_once_where_it_has_most_context(n, room, stride):
    stride = min(stride, room)
    begins = window_begins(n, room, stride)
    spans = [(begin, min(room, n - begin)) for begin in begins]
    # As BERT's run_squad.py makes them, and chooses among them.
    expected, begin = [], 0
    while True:
        expected.append((begin, min(n - begin, room)))
        if begin + expected[-1][1] == n:
            break
        begin += min(expected[-1][1], stride)
    assert spans == expected
    chosen = most_context(n, begins, room)
    for token in range(n):
        best, best_score = None, None
        for w, (start, length) in enumerate(spans):
            if not start <= token < start + length:
                continue
            score = min(token - start, start + length - 1 - token) + 0.01 * length
            if best_score is None or score > best_score:
                best, best_score = w, score
        assert chosen[token] == best


@given(st.text("ab .é\u0301\u200b京", min_size=1, max_size=60), st.data())
@settings(max_examples=200)
def test_an_answer_is_within_its_tokens(context, data):
    start = data.draw(st.integers(0, len(context) - 1))
    answer = context[start : data.draw(st.integers(start + 1, len(context)))]
    spans = encode_context(UNCASED, context).offsets
    found = token_range(spans, start, start + len(answer))
    inside = [
        i for i, (a, b) in enumerate(spans) if a < start + len(answer) and b > start and a < b
    ]
    assert found == ((inside[0], inside[-1]) if inside else None)


LANGUAGES = [
    # vocabulary, file, answers, answers wider in tokens than in characters
    ("bert-base-uncased", "dev-v2.0-16articles", 10052, 15),
    ("bert-base-cased", "xquad.en", 1190, 1),
    ("bert-base-multilingual-cased", "xquad.en", 1190, 1),
    ("bert-base-multilingual-cased", "xquad.zh", 1190, 0),
    ("bert-base-multilingual-cased", "xquad.ar", 1190, 3),
    ("bert-base-multilingual-cased", "xquad.hi", 1190, 2),
    ("bert-base-multilingual-uncased", "xquad.en", 1190, 1),
    ("bert-base-multilingual-uncased", "xquad.zh", 1190, 0),
    ("bert-base-multilingual-uncased", "xquad.ar", 1190, 5),
    ("bert-base-multilingual-uncased", "xquad.hi", 1190, 2),
]


@pytest.fixture(scope="module")
def vocabularies(real_data):
    names = {vocabulary for vocabulary, *_ in LANGUAGES}
    return {name: load_tokenizer(real_data / "vocab" / name) for name in names}


@pytest.mark.parametrize(("vocabulary", "file", "answers", "wider"), LANGUAGES)
def test_real_answers(real_data, vocabularies, vocabulary, file, answers, wider):
    """Each reference is the text of its tokens, and each window that holds it points there.

    The few that are wider begin or end inside a word of which the vocabulary has no such part:
    "Australia" of "Australians", "7,000,000 square kilometres (2,70" of "(2,700".
    """
    tokenizer = vocabularies[vocabulary]
    questions = real_file(real_data / "squad" / f"{file}.json").examples
    found = build_windows(questions, tokenizer)
    assert not any("without a target" in each for each in found.warnings)
    seen = unequal = 0
    spans = {
        context: encode_context(tokenizer, context).offsets
        for context in {each.context for each in questions}
    }
    for each in questions:
        for answer in each.answers:
            end = answer.start + len(answer.text)
            first, last = token_range(spans[each.context], answer.start, end)
            begin, stop = spans[each.context][first, 0], spans[each.context][last, 1]
            assert begin <= answer.start
            assert stop >= end
            seen += 1
            unequal += each.context[begin:stop] != answer.text
    assert (seen, unequal) == (answers, wider)
    held = set()
    for window in found.windows:
        asked = questions[window.question]
        first, last = window.target
        assert len(window.ids) <= 384
        if last:
            at = window.spans[[first - window.context_at, last - window.context_at]]
            answer = asked.answers[0]
            assert at[0, 0] <= answer.start < at[0, 1]
            assert at[1, 0] < answer.start + len(answer.text) <= at[1, 1]
            held.add(window.question)
    assert held == {i for i, each in enumerate(questions) if each.answers}


def test_rows_equal_those_of_tokenizers(real_data):
    """The library's own truncation, with the overlap that our stride makes."""
    tokenizer = load_tokenizer(real_data / "vocab" / "bert-base-multilingual-cased")
    questions = [
        each
        for each in real_file(real_data / "squad" / "xquad.hi.json").examples[::4]
        if len(tokenizer.encode(each.question).ids) <= 64
    ]
    windows = build_windows(questions, tokenizer).windows
    special = tokenizer.special_ids
    library = tokenizers.Tokenizer.from_str(tokenizer._fast.to_str())
    library.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", special.sep), ("[CLS]", special.cls)
    )
    own = iter(windows)
    several = 0
    for each in questions:
        asked = len(tokenizer.encode(each.question).ids)
        room = 384 - asked - 3
        library.enable_truncation(384, stride=room - 128, strategy="only_second")
        first = library.encode(each.question, each.context)
        rows = [first, *first.overflowing]
        several += len(rows) > 1
        for row in rows:
            window = next(own)
            assert row.ids == window.ids.tolist()
            assert row.type_ids.index(1) == window.context_at
            context = [s for s, t in zip(row.offsets, row.sequence_ids, strict=True) if t == 1]
            assert [(a, b) for a, b in window.spans.tolist()] == context
    assert several > 50
    assert next(own, None) is None

"""SQuAD's JSON: what is read, and what is said of files that are not sound."""

import json

import pytest
from squad_examples import entry, real_file, squad_file

from bert_jax.errors import UserError
from bert_jax.tasks.examples import Answer, Origin
from bert_jax.tasks.squad.sources import read_squad

WRONG = {"text": "sat", "answer_start": 4}


def test_reads_both_versions(tmp_path):
    path = squad_file(
        tmp_path,
        entry("1.1"),
        entry("2.0", is_impossible=False),
        entry("none", answers=[], is_impossible=True, plausible_answers=[WRONG]),
        entry("none said", answers=None, is_impossible=True),
        entry("test set", answers=[]),
        entry("to predict", answers=None),
        entry("to answer", answers=[], is_impossible=False),
    )
    file = read_squad(path)
    cat = (Answer("cat", 4),)
    assert [each.answers for each in file.examples] == [cat, cat, (), (), None, None, None]
    first = file.examples[0]
    assert (first.id, first.question, first.context) == ("1.1", "Who sat?", "The cat sat.")
    assert file.examples[2].origin == Origin(f"{path}", 3)
    assert all(each.context is first.context for each in file.examples)
    assert file.warnings == ()


def test_offsets_are_characters(tmp_path):
    context = "\U0001f408 e\u0301te\u0301 \u4e1c\u4eac \u0915\u0941"  # a cat is two in UTF-16
    answers = [{"text": text, "answer_start": context.index(text)} for text in context.split(" ")]
    [found] = read_squad(squad_file(tmp_path, entry(answers=answers), context=context)).examples
    assert [answer.text for answer in found.answers] == context.split(" ")


def misplaced(tmp_path, policy):
    return read_squad(
        squad_file(
            tmp_path,
            entry("right"),
            entry("half", answers=[WRONG, {"text": "cat", "answer_start": 4}]),
            entry("behind", answers=[{"text": "cat", "answer_start": 400}]),
            entry("before", answers=[{"text": ".", "answer_start": -1}]),
            entry("nowhere", answers=[{"text": "dog", "answer_start": 0}]),
        ),
        misplaced=policy,
    )


def test_misplaced_answers_fail(tmp_path):
    with pytest.raises(UserError) as caught:
        misplaced(tmp_path, "fail")
    message = str(caught.value)
    assert "squad.json: 4 answers not at the offset given" in message
    assert (
        "question 2 (id 'half'): 'sat' is said to be at character 4, where the context has 'cat'; "
        "it is at 8"
    ) in message
    assert "'cat' is said to be at character 400, but the context has 12 char" in message
    assert "characters; it is at 4" in message
    assert "(id 'before'): '.' is said to be at character -1" in message
    assert (
        "'dog' is said to be at character 0, where the context has 'The'; the context lacks it"
        in message
    )
    assert "set misplaced to skip or keep" in message


def test_misplaced_answers_are_skipped_and_counted(tmp_path):
    file = misplaced(tmp_path, "skip")
    assert [each.id for each in file.examples] == ["right", "half"]
    assert file.examples[1].answers == (Answer("cat", 4),)
    assert "4 answers not at the offset given, left out: question 2" in file.warnings[0]


def test_misplaced_answers_are_kept_and_counted(tmp_path):
    file = misplaced(tmp_path, "keep")
    assert [len(each.answers) for each in file.examples] == [1, 2, 1, 1, 1]
    assert "4 answers not at the offset given, kept only for scores" in file.warnings[0]
    assert "(id 'nowhere')" in file.warnings[0]


def test_nothing_left(tmp_path):
    path = squad_file(tmp_path, entry(answers=[WRONG]))
    with pytest.raises(UserError, match=r"squad.json has no question that can be used"):
        read_squad(path, misplaced="skip")
    with pytest.raises(UserError, match=r"squad.json has no question; give"):
        read_squad(squad_file(tmp_path))


def test_blank_questions_are_counted(tmp_path):
    file = read_squad(squad_file(tmp_path, entry("1"), entry("2", question=" ")))
    assert len(file.examples) == 2
    assert "1 question without text: question 2 (id '2')" in file.warnings[0]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(id=7)], r"qas\[0\]: 'id' is 7; expected a string"),
        ([{"question": "?"}], r"data\[0\].paragraphs\[0\].qas\[0\]: 'id' is missing"),
        ([{"id": "1"}], "'question' is missing; expected a string"),
        (["text"], r"qas\[0\] is 'text'; expected an object"),
        ([entry("a"), entry("a")], "question 2: the id 'a' is also the id of question 1"),
        ([entry(is_impossible="no")], "'is_impossible' is 'no'; expected true or false"),
        ([entry(is_impossible=True)], "'is_impossible' is true, but there are answers"),
        ([entry(answers={"text": ["cat"]})], "'answers' is an object of 1; expected a list"),
        ([entry(answers=["cat"])], r"answers\[0\] is 'cat'; expected an object"),
        ([entry(answers=[{"text": None, "answer_start": 4}])], "'text' is missing; expected a"),
        ([entry(answers=[{"text": "cat"}])], "'answer_start' is missing; expected a number of"),
        ([entry(answers=[{"text": "cat", "answer_start": True}])], "'answer_start' is True"),
        (
            [entry(answers=[{"text": "cat", "answer_start": 4.0}])],
            "is 4.0; expected a number of",
        ),
        ([entry(answers=[{"text": " ", "answer_start": 3}])], "an answer is empty; for a question"),
    ],
)
def test_refused(tmp_path, entries, message):
    with pytest.raises(UserError, match=message) as caught:
        read_squad(squad_file(tmp_path, *entries))
    assert "squad.json" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "the top level is a list"),
        ({"questions": [], "x": 1}, r"no list 'data' at the top level \(keys: 'questions', 'x'\)"),
        ({"k" * 41: 1}, rf"keys: '{'k' * 40}'\)"),
        ({"data": {}}, "no list 'data' at the top level"),
        ({"data": [1]}, r"data\[0\] is 1; expected an object"),
        ({"data": [{}]}, r"data\[0\]: 'paragraphs' is missing; expected a list"),
        ({"data": [{"paragraphs": [{}]}]}, r"paragraphs\[0\]: 'context' is missing"),
        ({"data": [{"paragraphs": [{"context": "a"}]}]}, r"paragraphs\[0\]: 'qas' is missing"),
        ({"data": [{"paragraphs": [{"context": " \n"}]}]}, "the context is empty"),
    ],
)
def test_layouts_refused(tmp_path, content, message):
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as caught:
        read_squad(path)
    assert str(path) in str(caught.value)


def test_all_that_is_wrong_is_counted(tmp_path):
    path = squad_file(tmp_path, *(entry(id=i) for i in range(9)))
    with pytest.raises(UserError, match=r"9 things to fix: .*qas\[4\].*; and 4 more$"):
        read_squad(path)


def test_real_files(real_data):
    expected = {
        "dev-v2.0-16articles": (6078, 3168, 0),
        "test-v2.0": (5915, 0, 5915),
        "train-v1.1-part": (7538, 0, 0),
        **{f"xquad.{language}": (1190, 0, 0) for language in ("ar", "en", "hi", "zh")},
    }
    for name, counts in expected.items():
        file = real_file(real_data / "squad" / f"{name}.json")
        impossible = sum(each.answers == () for each in file.examples)
        unknown = sum(each.answers is None for each in file.examples)
        assert (len(file.examples), impossible, unknown) == counts, name
        assert file.warnings == ()

# ruff: noqa: RUF001 (texts in many scripts)
"""Exact match and F1 against published scores and cases worked out by hand."""

import json

import pytest
from squad_examples import question, real_file

from bert_jax.errors import UserError
from bert_jax.tasks.examples import Answer
from bert_jax.tasks.squad.metrics import best_scores, normalized_words, score


def against(prediction, reference, rules):
    """Exact match and F1 with one reference."""
    return best_scores(prediction, question("", Answer(reference, 0)), rules=rules)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  The  Cat sat. ", "cat sat"),
        ("a an the", ""),
        ("Theatre, another; a-b", "theatre another ab"),
        ("the-end", "theend"),  # punctuation goes before articles
        ("U.S.A. $1,000.50", "usa 100050"),
        ("dog's “dog’s” – dash", "dogs “dog’s” – dash"),
        ("x\u00a0\u3000\t\ny\u200bz", "x y\u200bz"),
        ("a\u0301 \u00e1", "\u0301 \u00e1"),
        ("İß", "i\u0307ß"),
        ("巴黎。", "巴黎。"),
        ("क्या a है।", "क्या है।"),
        ("القاهرة؟", "القاهرة؟"),
        ("", ""),
    ],
)
def test_normalisation(text, expected):
    assert " ".join(normalized_words(text)) == expected


@pytest.mark.parametrize(
    ("prediction", "reference", "exact", "f1"),
    [
        ("The cat sat!", "cat  sat", 1.0, 1.0),
        ("the cat sat", "cat sat down", 0.0, 0.8),
        ("b b c", "b c c", 0.0, 2 / 3),
        ("sat cat", "cat sat", 0.0, 1.0),
        ("cat", "dog", 0.0, 0.0),
        # Without spaces an answer is one word: nearly right is wrong.
        ("北京市", "北京", 0.0, 0.0),
        ("北京。", "北京", 0.0, 0.0),
        ("2008 年", "2008年", 0.0, 0.0),
        ("2008 年", "2008 月", 0.0, 0.5),
        # With spaces words count; articles and marks of these languages do not go.
        ("नई दिल्ली", "दिल्ली", 0.0, 2 / 3),
        ("दिल्ली।", "दिल्ली", 0.0, 0.0),
        ("مدينة القاهرة", "القاهرة", 0.0, 2 / 3),
        ("القاهرة", "قاهرة", 0.0, 0.0),
        ("caf\u00e9", "cafe\u0301", 0.0, 0.0),
        ("１２", "12", 0.0, 0.0),
    ],
)
def test_two_texts(prediction, reference, exact, f1):
    for rules in ("v1.1", "v2.0"):
        assert against(prediction, reference, rules) == (exact, pytest.approx(f1, abs=1e-15))


def test_texts_without_a_word():
    assert against("the", "A.", "v2.0") == (1.0, 1.0)
    assert against("the", "A.", "v1.1") == (1.0, 0.0)
    assert against("the", "cat", "v2.0") == against("", "cat", "v1.1") == (0.0, 0.0)


def test_best_of_the_references():
    asked = question("The cat sat. A dog.", "cat sat", "dog", "The")
    assert best_scores("cat", asked) == (0.0, 2 / 3)
    assert best_scores("the dog", asked) == (1.0, 1.0)
    # The reference "The" has no word: 2.0 drops it, 1.1 compares with it.
    assert best_scores("a", asked, rules="v2.0") == (0.0, 0.0)
    assert best_scores("a", asked, rules="v1.1") == (1.0, 0.0)
    only = question("The cat", "The")
    assert best_scores("", only, rules="v2.0") == (1.0, 1.0)


def test_no_answer():
    asked = question("The cat sat.")
    assert best_scores("", asked) == best_scores("the", asked) == (1.0, 1.0)
    assert best_scores("cat", asked) == (0.0, 0.0)
    with pytest.raises(UserError, match=r"file.json, question 1 \(id 'q'\) has no answer, which"):
        best_scores("", asked, rules="v1.1")


def test_missing_predictions():
    context = "The cat sat."
    asked = [
        question(context, "cat", id="1"),
        question(context, "cat", id="2"),
        question(context, id="3"),
    ]
    found = score(asked, {"1": "cat", "3": "sat", "other": ""})
    assert found == {
        "exact": 50.0, "f1": 50.0, "total": 2,
        "HasAns_exact": 100.0, "HasAns_f1": 100.0, "HasAns_total": 1,
        "NoAns_exact": 0.0, "NoAns_f1": 0.0, "NoAns_total": 1,
    }  # fmt: skip
    assert score(asked[:2], {"1": "cat"}, rules="v1.1") == {
        "exact": 50.0, "f1": 50.0, "total": 2,
        "HasAns_exact": 50.0, "HasAns_f1": 50.0, "HasAns_total": 2,
    }  # fmt: skip


def test_refused():
    asked = question("The cat sat.", "cat", id="1")
    with pytest.raises(UserError, match=r"first id is '1', predictions have 'x'"):
        score([asked], {"x": "cat"})
    with pytest.raises(UserError, match="there are no predictions"):
        score([asked], {})
    with pytest.raises(UserError, match="no questions"):
        score([], {})
    with pytest.raises(UserError, match=r"\(id 'q'\) has no reference answers"):
        score([question("The cat", unknown=True)], {"q": "cat"})


def test_misplaced_references_are_scored_by_their_text():
    assert best_scores("cat", question("The cat sat.", Answer("cat", 0))) == (1.0, 1.0)


def test_published_scores(real_data):
    directory = real_data / "squad"
    expected = json.loads((directory / "predictions" / "expected_scores.json").read_text())
    assert len(expected) == 6
    for name, by_file in expected.items():
        predictions = json.loads((directory / "predictions" / f"{name}.json").read_text())
        for file, right in by_file.items():
            questions = real_file(directory / file).examples
            missing = sum(each.id not in predictions for each in questions)
            scores = score(questions, predictions) | {"missing": missing}
            other = right.pop("v1.1_rule", None)
            assert {key: scores[key] for key in right} == right, (name, file)
            if other is not None:
                strict = score(questions, predictions, rules="v1.1")
                assert tuple(strict.values())[:3] == tuple(other.values())

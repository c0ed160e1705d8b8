"""The linear model of words beside which a fine-tuned model of texts is shown."""

import math
import sys

import pytest
from task_examples import opened, put

from bert_jax.tasks.config import TableConfig
from bert_jax.tasks.text import task as linear


def scored(task) -> float | None:
    return task.dev_splits()[0].linear_score(task.train_split())


def rows(*pairs: str, times: int = 12) -> list[str]:
    return [pair for _ in range(times) for pair in pairs]


@pytest.fixture
def put_both(tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")

    def put_both(header: str, train: list[str], dev: list[str], **fields):
        paths = [put(tmp_path / f"{name}.csv", header, *lines)
                 for name, lines in (("train", train), ("dev", dev))]  # fmt: skip
        return opened(TableConfig(train=paths[0], dev=paths[1], **fields))

    return put_both


def test_words_decide_about_classes(put_both):
    train = rows("a good film,yes", "a bad film,no", "good and long,yes", "bad and long,no")
    task = put_both("text,label", train, ["so good,yes", "so bad,no", "good good,no", "bad,no"])
    assert scored(task) == 0.75


def test_the_memory_of_the_fit_is_bounded(put_both, monkeypatch):
    found = []
    fit = pytest.importorskip("sklearn.feature_extraction.text").TfidfVectorizer
    monkeypatch.setattr(
        "sklearn.feature_extraction.text.TfidfVectorizer",
        lambda max_features, **given: found.append(max_features) or fit(**given),
    )
    train = rows("red,a", "blue,b", "grey,c", "green,d")
    assert scored(put_both("text,label", train, train[:4])) == 1.0
    assert found == [500_000]


def test_words_of_both_texts_are_told_apart(put_both):
    train = rows("the cat the,the dog the,yes", "the dog the,the cat the,no")
    task = put_both("text,other,label", train, train[:2], text_pair="other")
    assert scored(task) == 1.0


def test_each_label_of_several_has_its_words(put_both):
    train = rows("red,warm", "blue,cold", "red blue,warm|cold", "grey,dull")
    task = put_both("text,label", train, ["red,warm", "blue red,cold|warm", "grey,dull"],
                    problem_type="multi_label", separator="|")  # fmt: skip
    assert (task.objective, scored(task)) == ("multi_label", 1.0)


def test_scores_are_predicted_from_words(put_both):
    train = rows("low,1.5", "middle,2.5", "high,3.5", "very high,4.5")
    task = put_both("text,label", train, ["low,1.0", "middle,2.1", "very high,5.0"],
                    problem_type="regression")  # fmt: skip
    assert task.objective == "regression"
    assert scored(task) == pytest.approx(1.0, abs=0.05)


def test_texts_without_words_or_with_one_class_have_no_score(put_both):
    proteins = rows("M K V,yes", "A A G,no")
    assert math.isnan(scored(put_both("text,label", proteins, proteins[:2])))
    one = put_both("text,label", rows("good,yes"), ["bad,no"], labels=("no", "yes"))
    assert math.isnan(scored(one))


def test_a_single_label_that_a_text_may_have(put_both):
    train = rows('good film,"yes"', 'bad film,""')
    assert scored(put_both("text,label", train, train[:2], problem_type="multi_label")) == 1.0


def test_large_tables_and_a_missing_library_have_no_score(put_both, monkeypatch):
    task = put_both("text,label", rows("good,yes", "bad,no"), ["good,yes", "bad,no"])
    monkeypatch.setattr(linear, "MAX_EXAMPLES", 23)
    assert math.isnan(scored(task))
    monkeypatch.setattr(linear, "MAX_EXAMPLES", 24)
    assert scored(task) == 1.0
    monkeypatch.setitem(sys.modules, "sklearn.pipeline", None)
    assert scored(task) is None

"""Sentence splitting: quality on a gold set, nothing lost, linear time."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bert_jax.data.corpus.sentences import (
    MAX_SENTENCE_CHARS,
    get_splitter,
    split_fast,
    split_lines,
)
from bert_jax.errors import UserError


def gold() -> list[list[str]]:
    text = (Path(__file__).parent / "sentences_gold.txt").read_text(encoding="utf-8")
    return [block.split("\n") for block in text.strip().split("\n\n")]


def solid(text: str) -> str:
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("sentences", gold(), ids=lambda sentences: sentences[0][:30])
def test_gold(sentences):
    # Chinese and Japanese put nothing between sentences.
    joint = "" if re.search(r"[\u3040-\u9fff]", sentences[0]) else " "
    assert split_fast(joint.join(sentences)) == sentences


@pytest.mark.parametrize("name", ["fast", "syntok"])
def test_boundary_scores(name):
    """F1 over the gold set: `fast` was made with it, syntok was not (0.89 when last measured)."""
    if name == "syntok":
        pytest.importorskip("syntok")
    split = get_splitter(name)
    right = wrong = missed = 0
    for sentences in gold():
        joint = "" if re.search(r"[\u3040-\u9fff]", sentences[0]) else " "
        expected, found = cuts(sentences), cuts(split(joint.join(sentences)))
        right += len(expected & found)
        wrong += len(found - expected)
        missed += len(expected - found)
    assert 2 * right / (2 * right + wrong + missed) > {"fast": 0.99, "syntok": 0.8}[name]


def cuts(sentences: list[str]) -> set[int]:
    ends, position = set(), 0
    for sentence in sentences[:-1]:
        position += len(solid(sentence))
        ends.add(position)
    return ends


@given(st.text(alphabet=st.sampled_from('aA1 .!?。」”")(\n\t…Mr[]»-'), max_size=80))
@example("11。 »? ")
def test_nothing_is_lost(text):
    sentences = split_fast(text)
    assert solid("".join(sentences)) == solid(text)
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)


@given(st.text(max_size=200))
def test_any_text(text):
    assert solid("".join(split_fast(text))) == solid(text)


@pytest.mark.parametrize(
    "unit", [".", ". ", "A. ", "A.\t", ".)", "。", "x", "[1].", ' ."', "Mr. ", "a.b.", "… "]
)
def test_long_runs_of_anything(unit):
    # Quadratic behaviour would be felt here: 16 MiB of the same are allowed on a line.
    sentences = split_fast(unit * (100_000 // len(unit)))
    assert max(map(len, sentences), default=0) <= MAX_SENTENCE_CHARS


@pytest.mark.parametrize(("excess", "rest"), [(0, ["y"]), (1, ["x y"])])
def test_a_piece_has_at_most_the_largest_number_of_characters(excess, rest):
    """A space after the last character that fits is a place to cut; a later space is not."""
    sentences = split_fast("x" * (MAX_SENTENCE_CHARS + excess) + " y")
    assert sentences == ["x" * MAX_SENTENCE_CHARS, *rest]


def test_long_stretches_are_cut_at_spaces():
    text = "word " * 10_000
    pieces = split_fast(text)
    assert len(pieces) > 1
    assert " ".join(pieces) == text.strip()
    assert len(split_fast("word " * 2000)) == 2  # little longer than one piece
    assert [len(piece) for piece in split_lines("x" * 20_000)] == [8192, 8192, 3616]


def test_lines():
    assert split_lines(" One. Two. ") == ["One. Two."]
    assert split_lines("  ") == []


def test_unknown_splitter():
    with pytest.raises(UserError, match=r"'fats'; use fast, lines or syntok"):
        get_splitter("fats")


def test_syntok_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "syntok", None)
    monkeypatch.setitem(__import__("sys").modules, "syntok.segmenter", None)
    with pytest.raises(UserError, match="pip install syntok"):
        get_splitter("syntok")

"""Schemes of tags: told apart, checked, converted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.errors import UserError
from bert_jax.tasks.examples import Origin, TaggedExample
from bert_jax.tasks.tagging.schemes import (
    Entity,
    convert,
    detect_scheme,
    entities,
    split_tag,
    strict_entities,
    tag_labels,
    to_tags,
)


def example(tags: str | None, line: int = 1) -> TaggedExample:
    found = None if tags is None else tuple(tags.split())
    words = tuple(f"word{place}" for place in range(len(found) if found else 1))
    return TaggedExample("0", words, found, Origin("a.txt", line))


@st.composite
def sentences(draw):
    """Entities of a sentence, in order, some of them side by side."""
    found, place = [], 0
    for _ in range(draw(st.integers(0, 4))):
        start = place + draw(st.integers(0, 2))
        place = start + draw(st.integers(1, 3))
        found.append(Entity(draw(st.sampled_from(["PER", "LOC", "a-b"])), start, place))
    return found, place + draw(st.integers(0 if place else 1, 2))


def in_scheme(found, length, scheme):
    """Tags of IOB1 and IOBES, from IOB2's."""
    tags = list(to_tags(found, length))
    ends = {(end, kind) for kind, _, end in found}
    for kind, start, end in found:
        if scheme == "iob1" and (start, kind) not in ends:
            tags[start] = f"I-{kind}"
        if scheme == "iobes":
            tags[end - 1] = f"{'S' if end == start + 1 else 'E'}-{kind}"
    return tags


@given(sentences())
def test_there_and_back(sentence):
    found, length = sentence
    sound = to_tags(found, length)
    assert len(sound) == length
    for scheme in ("iob2", "iob1", "iobes"):
        tags = in_scheme(found, length, scheme)
        assert entities(tags) == found
        assert scheme == "iob1" or strict_entities(tags) == found
        assert detect_scheme([example(" ".join(tags))]) == (scheme if found else "iob2")
        assert convert([example(" ".join(tags))])[0].tags == sound


def test_written_by_hand():
    found = [Entity("PER", 0, 2), Entity("PER", 2, 3), Entity("LOC", 3, 4)]
    assert to_tags(found, 5) == ("B-PER", "I-PER", "B-PER", "B-LOC", "O")
    assert to_tags([Entity("_", 1, 3)], 3) == ("O", "B", "I")
    assert strict_entities(["U-PER", "E-LOC", "O", "I-LOC"]) == [Entity("PER", 0, 1)]


def test_split():
    assert split_tag("O") == ("O", "")
    assert split_tag("B-a-b") == ("B", "a-b")
    assert [split_tag(tag) for tag in ("M-X", "L-X", "U-X", "I")] == [
        ("I", "X"), ("E", "X"), ("S", "X"), ("I", "_"),
    ]  # fmt: skip
    assert [split_tag(tag) for tag in ("", "B-", "-X", "o", "NN", "O-X")] == [None] * 6


def test_detected():
    assert detect_scheme([example("B-PER O"), example(None), example("O B-LOC I-LOC")]) == "iob2"
    assert detect_scheme([example("I-PER B-PER"), example("I-LOC O")]) == "iob1"
    assert detect_scheme([example("S-PER B-LOC E-LOC")]) == "iobes"
    assert detect_scheme([example("U-PER B-LOC L-LOC")]) == "iobes"
    assert detect_scheme([example("O O")]) == "iob2"
    assert detect_scheme([example("NN VB O"), example("PER")]) == "plain"


def test_letters_are_parts_of_speech_among_others():
    assert detect_scheme([example("NN CD M"), example("M O VB")]) == "plain"
    assert detect_scheme([example("N V S B A E R")]) == "plain"
    assert detect_scheme([example("B I O B")]) == "iob2"
    assert detect_scheme([example("B E S B M E")]) == "iobes"  # words of Chinese
    with pytest.raises(UserError, match=r"word 2 .*'PER'\): neither O .* set scheme=plain"):
        detect_scheme([example("B PER I O")])  # rather a slip of the pen
    with pytest.raises(
        UserError, match=r"no other scheme allows them\. .*letters are .* set scheme=plain"
    ):
        detect_scheme([example("S M O B")])
    with pytest.raises(UserError, match="set scheme=plain"):
        convert([example("NN M CD")], lenient=True)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        # Of two breaches of IOB1 and one of IOB2, the one is named.
        ("B-PER O B-PER I-LOC", r"word 4 \('word3', 'I-LOC'\): I continues nothing .*valid IOB2"),
        ("I-PER O I-PER B-LOC", r"word 4 \('word3', 'B-LOC'\): no entity of this .*valid IOB1"),
        ("B-PER O S-PER", r"word 1 \('word0', 'B-PER'\): the entity ends here; S would .*IOBES"),
        ("B-PER I-PER S-LOC", r"word 2 .*: the entity ends here; E would be right"),
        ("S-PER B-PER E-LOC", r"word 3 .*: E continues nothing here"),
        ("S-PER B-LOC", r"word 2 .*: the entity ends here; S would be right"),
        ("B-PER PER", r"word 2 \('word1', 'PER'\): neither O nor a prefix"),
    ],
)
def test_unsound(tags, expected):
    with pytest.raises(UserError, match=rf"^a\.txt, line 7, {expected}"):
        detect_scheme([example("O O", 1), example(tags, 7)])


def test_breaches_are_counted():
    many = [example("B-PER O B-PER", 1), *(example("O I-PER", line) for line in range(2, 9))]
    many += [example("B-PER", 10)] * 7
    with pytest.raises(UserError, match=r"line 2, .*line 3, .*line 4, .*; and 4 more\. .*IOB2"):
        detect_scheme(many)


def test_converted():
    given = [example("I-PER B-PER O"), example(None), example("O O")]
    found = convert(given)
    assert [each.tags for each in found] == [("B-PER", "B-PER", "O"), None, ("O", "O")]
    assert found[0].tokens == given[0].tokens
    with pytest.raises(UserError, match="not an entity tag"):
        convert([example(None), example("NN VB", 3)])


def test_a_message_shows_three_faults_and_counts_the_others():
    words = "; ".join(rf".*word {number} \('word\d', 'PER'\)" for number in (2, 3, 4))
    with pytest.raises(UserError, match=f"^{words}; and 2 more: neither O"):
        detect_scheme([example("B-PER PER PER PER PER PER I-LOC B-LOC B-LOC B-LOC B-LOC B-LOC")])


def test_lenient():
    mixed = [example("B-PER O I-PER I-LOC")]
    with pytest.raises(UserError, match="set lenient"):
        convert(mixed)
    (found,) = convert(mixed, lenient=True)
    assert found.tags == ("B-PER", "O", "B-PER", "B-LOC")
    with pytest.raises(UserError, match=r"line 1, word 2 \('word1', 'PER'\): neither O"):
        convert([example("O PER")], lenient=True)


def test_labels():
    assert tag_labels([example("O B-PER"), example("B-LOC I-LOC")]).names == (
        "O", "B-LOC", "I-LOC", "B-PER", "I-PER",
    )  # fmt: skip
    assert tag_labels([example("VB NN O")], plain=True).names == ("NN", "O", "VB")
    assert tag_labels([example("B-X O S NN")], plain=True).names == ("B-X", "NN", "O", "S")
    with pytest.raises(UserError, match="no labels"):
        tag_labels([example(None)])

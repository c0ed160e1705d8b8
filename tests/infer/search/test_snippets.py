"""Snippets: which part of a passage is shown, and which words are marked."""

import re

import pytest

from bert_jax.infer.search.snippets import snippet

LONG = "It rains. " * 30 + "Press the small button to reset\nthe router. " + "It snows. " * 30


def test_words_of_the_query_are_marked_in_any_case_but_no_parts_of_words():
    found = snippet("Reset  the\nrouters: RESET it, not preset.", "reset it?")
    assert found == "**Reset** the routers: **RESET** **it**, not preset."
    assert snippet("the cat", "zebra") == "the cat"
    assert snippet("", "a") == ""
    assert snippet("北京是中国的首都", "首都") == "北京是中国的**首都**"
    assert snippet("Ein schöner Straßenname", "SCHÖNER") == "Ein **schöner** Straßenname"


@pytest.mark.parametrize(("size", "words"), [(20, 2), (40, 3), (100, 3), (240, 3)])
def test_the_part_with_most_words_is_shown(size, words):
    found = snippet(LONG, "reset router button", size)
    assert len(re.findall(r"\*\*(?:button|reset|router)\*\*", found)) == words
    plain = found.removeprefix("... ").removesuffix(" ...").replace("**", "")
    assert found != plain
    assert plain in " ".join(LONG.split())
    assert len(plain) <= size
    assert re.search(rf"(^|\s){re.escape(plain)}", " ".join(LONG.split()))  # begins with a word


def test_a_text_without_the_words_is_shown_from_its_beginning():
    assert snippet(LONG, "zebra", 20) == "It rains. It rains. ..."
    han = "北" * 300 + "首都" + "南" * 300
    assert "**首都**" in snippet(han, "首都", 50)

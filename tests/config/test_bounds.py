"""What the bounds of fields refuse, and how they are described."""

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from bert_jax.config.bounds import (
    Above,
    AtLeast,
    AtMost,
    Below,
    Bounded,
    Count,
    Distinct,
    Given,
    Natural,
    Or,
    Positive,
    Rate,
    wanted,
)
from bert_jax.config.command_line import fields_help
from bert_jax.errors import UserError


@dataclass(frozen=True)
class Part:
    name: Annotated[str, Given("the name of a part")] = "a"
    weight: Positive = 1.0


@dataclass(frozen=True)
class Section(Bounded, section="section"):
    count: Count = 1
    share: Annotated[float, Above(0), Below(1)] = 0.5
    length: Annotated[int, AtLeast(8), Or(0, "the default")] = 0
    maybe: Rate | None = None
    sizes: Annotated[tuple[Natural, ...], Distinct(2)] = (1, 2)
    parts: tuple[Part, ...] = ()
    kind: Literal["a", "b"] = "a"
    plain: float = math.nan
    """A field without bounds."""


@dataclass(frozen=True)
class Narrower(Section):
    count: Annotated[int, AtLeast(3), AtMost(5)] = 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 0}, "section.count is 0; it must be at least 1"),
        ({"share": 0.0}, "section.share is 0.0; it must be in (0, 1)"),
        ({"share": 1.0}, "section.share is 1.0; it must be in (0, 1)"),
        ({"share": math.nan}, "section.share is nan; it must be in (0, 1)"),
        ({"length": 7}, "section.length is 7; it must be at least 8, or 0 for the default"),
        ({"maybe": 1.0}, "section.maybe is 1.0; it must be in [0, 1), or None"),
        (
            {"sizes": (1,)},
            "section.sizes is (1,); it must be at least 2 values, all different",
        ),
        ({"sizes": (1, 1, 2)}, "section.sizes is (1, 1, 2); it must be at least 2 values, all"),
        ({"sizes": (1, -2)}, "section.sizes[1] is -2; it must be at least 0"),
        ({"parts": (Part(), Part(""))}, "section.parts[1].name is ''; it must be the name of a"),
        ({"parts": (Part(weight=0.0),)}, "section.parts[0].weight is 0.0; it must be above 0"),
        (
            {"parts": (Part(weight=math.inf),)},
            "section.parts[0].weight is inf; it must be above 0 and finite",
        ),
        ({"kind": "c"}, "section.kind is 'c'; it must be one of a, b"),
    ],
)
def test_values_out_of_bounds_are_refused(fields, message):
    with pytest.raises(UserError) as raised:
        Section(**fields)
    assert str(raised.value).startswith(message)


def test_values_at_the_bounds_pass():
    Section(count=1, share=0.01, length=8, maybe=0.0, sizes=(0, 1), parts=(Part(),), kind="b")
    assert Section(length=0).plain is Section.plain


def test_a_subclass_has_the_section_and_may_change_bounds():
    for count in (3, 5):
        assert Narrower(count=count).count == count
    for count in (2, 6):
        with pytest.raises(UserError, match=rf"^section\.count is {count}; it must be in \[3, 5\]"):
            Narrower(count=count)


def test_fields_print_their_bounds():
    lines = fields_help(Section()).splitlines()
    after = dict(itertools.pairwise(lines))
    assert after["--config.count=1"] == "      at least 1"
    assert after["--config.maybe=None"] == "      in [0, 1), or None"
    assert lines[-1] == "      A field without bounds."
    assert wanted(float) == wanted(float | None) == wanted(tuple[int, ...]) == ""
    assert wanted(tuple[Count, ...]) == "each at least 1"

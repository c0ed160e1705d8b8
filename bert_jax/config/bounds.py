"""Bounds of configuration fields, written as annotations: `Annotated[int, AtLeast(2)]`.

A `Bounded` dataclass raises a UserError for values out of bounds. --fields prints the bounds.
"""

import dataclasses
import math
import operator
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from bert_jax.errors import UserError, suggestion


class Bound(NamedTuple):
    """One end of a range: `holds(value, limit)` checks a value; other fields are for messages."""

    words: str
    bracket: str
    holds: Callable[[float, float], bool]
    limit: float


AtLeast = partial(Bound, "at least", "[", operator.ge)
Above = partial(Bound, "above", "(", operator.gt)
AtMost = partial(Bound, "at most", "]", operator.le)
Below = partial(Bound, "below", ")", operator.lt)


@dataclass(frozen=True)
class Or:
    """A value that is allowed although it is outside the range, and its meaning."""

    value: Any
    meaning: str = ""

    def __str__(self) -> str:
        return f"or {self.value!r}" + (f" for {self.meaning}" if self.meaning else "")


@dataclass(frozen=True)
class Distinct:
    """A requirement that a tuple has at least `least` entries, all different."""

    least: int = 0

    def __str__(self) -> str:
        return f"at least {self.least} values, all different" if self.least else "all different"


@dataclass(frozen=True)
class Given:
    """A requirement that a string is not empty; `meaning` tells users what the string is."""

    meaning: str

    def __str__(self) -> str:
        return self.meaning


@dataclass(frozen=True, eq=False)
class KeyOf:
    """A requirement that a string is in a table, to which the module of a recipe may add names."""

    table: Mapping[str, Any]

    def __str__(self) -> str:
        own = "a name that the module of a recipe registers (docs/record.md)"
        return f"one of {', '.join(self.table)}, or {own}"


Count = Annotated[int, AtLeast(1)]
Natural = Annotated[int, AtLeast(0)]
Positive = Annotated[float, Above(0)]
NonNegative = Annotated[float, AtLeast(0)]
Fraction = Annotated[float, AtLeast(0), AtMost(1)]
Part = Annotated[float, Above(0), AtMost(1)]
"""Fraction in (0, 1]."""
Rate = Annotated[float, AtLeast(0), Below(1)]
"""Fraction in [0, 1)."""


class Bounded:
    """Base class of dataclasses that raise a UserError for values outside their fields' bounds."""

    SECTION: ClassVar[str] = ""
    """Name of the section of the configuration, for messages."""

    def __init_subclass__(cls, section: str | None = None) -> None:
        """Set the name of the section; None means the section name of the parent class."""
        cls.SECTION = cls.SECTION if section is None else section

    def __post_init__(self) -> None:
        """Raise a UserError for the first field out of bounds; subclasses add further rules."""
        _check(self.SECTION, self)


def wanted(hint: Any) -> str:
    """Describe the values that an annotation allows; return "" for a type without bounds."""
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if kind is Annotated:
        return " and ".join(filter(None, [_described(arguments[1:]), wanted(arguments[0])]))
    inner = wanted(arguments[0]) if arguments else ""
    return f"each {inner}" if inner and kind is tuple else inner and f"{inner}, or None"


def _described(bounds: tuple[Any, ...]) -> str:
    ends = [bound for bound in bounds if isinstance(bound, Bound)]
    words = [f"{end.words} {end.limit}" for end in ends]
    if len(ends) == 2:
        low, high = ends
        words = [f"in {low.bracket}{low.limit}, {high.limit}{high.bracket}"]
    return ", ".join([*words, *(f"{bound}" for bound in bounds if not isinstance(bound, Bound))])


def _check(section: str, config: Any) -> None:
    for name, hint in _hints(config.__class__).items():
        where = f"{section}.{name}" if section else name
        for wrong, value, right in faults(where, hint, getattr(config, name)):
            raise UserError(f"{wrong} is {value!r}; it must be {right}")


@cache
def _hints(cls: Hashable) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(typing.cast(Any, cls))}


def faults(where: str, hint: Any, value: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (field, value, allowed values) for each value that an annotation forbids."""
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind is Annotated:
        yield from faults(where, arguments[0], value)
        if not _holds(arguments[1:], value):
            more = " and finite" if isinstance(value, float) and math.isinf(value) else ""
            for bound in (each for each in arguments[1:] if isinstance(each, KeyOf)):
                more += suggestion(value, bound.table, ", nearest: {!r}")
            yield where, value, wanted(hint) + more
    elif kind is Literal:
        if value not in arguments:
            yield where, value, wanted(hint)
    elif kind is tuple:
        for number, each in enumerate(value):
            if dataclasses.is_dataclass(each):
                _check(f"{where}[{number}]", each)
            yield from faults(f"{where}[{number}]", arguments[0], each)
    elif arguments and value is not None:  # X | None
        for wrong, found, right in faults(where, arguments[0], value):
            yield wrong, found, f"{right}, or None"


def _holds(bounds: tuple[Any, ...], value: Any) -> bool:
    for bound in bounds:
        if isinstance(bound, Or) and value == bound.value:
            return True
        if isinstance(bound, Given) and not value:
            return False
        if isinstance(bound, KeyOf) and value not in bound.table:
            return False
        if isinstance(bound, Distinct) and len(set(value)) < max(bound.least, len(value)):
            return False
    ends = [bound for bound in bounds if isinstance(bound, Bound)]
    return not ends or (math.isfinite(value) and all(e.holds(value, e.limit) for e in ends))

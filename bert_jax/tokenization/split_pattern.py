r"""Check that the regular expressions which split texts before BPE take linear time.

The library matches by backtracking, which can take much longer. Accepted patterns look like
published patterns (GPT-2, Llama 3, GPT-4o): alternatives of characters, classes and short groups of
characters, each followed by at most one repetition mark, with no repetition inside a repetition.

In an alternative, one repetition `X+` may be followed by a part that can fail, as in `\s+(?!\S)`.
The library could then scan a run of X again from each of its characters. So a later alternative
must match the whole run and end there, as `\s+` does, and all alternatives between the two must
also begin with a repeated X. Each run is then scanned a constant number of times.
"""

import re
from typing import NamedTuple

MAX_PATTERN = 1000  # characters; GPT-4o's pattern has 300
_MAX_CHOICES = 3  # groups, optional and counted parts in an alternative; all multiply the time

_SET = r"\\[pP]\{\^?\w{1,30}\}|\\x\{[0-9a-f]{1,6}\}|\\[sSdDwWnrt]|\\[^\sA-Za-z0-9]"
_CHARACTER = rf"(?:{_SET}|\[\^?(?:{_SET}|[^\\\[\]&])+\]|[^\\\[\](){{}}*+?|^$])"
_TERM = re.compile(
    rf"(?:(?P<group>\((?:\?i?:)?(?:{_CHARACTER}|\|)+\))(?P<maybe>\??)"
    rf"|(?P<one>{_CHARACTER})(?P<repeat>[?*+]|\{{[0-9](?:,[0-9])?\}}|))(?![?*+{{])"
)
_LOOK = re.compile(rf"\(\?[!=](?:{_CHARACTER}(?:\{{[0-9]\}})?)+\)")


class _Term(NamedTuple):
    """A part of an alternative."""

    atom: str
    required: bool
    """Whether the alternative fails if this part does not match."""
    unbounded: bool
    has_choices: bool
    """Whether the part is a group, is optional (`?`), or has a range of counts (`{1,3}`)."""


def takes_linear_time(pattern: str) -> bool:
    """Return true if the form of a pattern ensures that matching a text takes linear time."""
    alternatives = _parse(pattern) if len(pattern) <= MAX_PATTERN else None
    return alternatives is not None and all(
        _is_bounded(alternatives, i) for i in range(len(alternatives))
    )


def _parse(pattern: str) -> list[list[_Term]] | None:
    """Return the parts of each alternative, or None if the pattern has a form not accepted here."""
    alternatives: list[list[_Term]] = [[]]
    at = 0
    while at < len(pattern):
        if pattern[at] == "|":
            alternatives.append([])
            at += 1
        elif look := _LOOK.match(pattern, at):
            alternatives[-1].append(_Term(look[0], True, False, False))
            at = look.end()
        elif term := _TERM.match(pattern, at):
            repeat = term["repeat"] if term["one"] else term["maybe"]
            required = repeat not in ("?", "*") and not repeat.startswith("{0")
            has_choices = not term["one"] or repeat == "?" or "," in repeat
            atom = term["one"] or term["group"]
            alternatives[-1].append(_Term(atom, required, repeat in ("*", "+"), has_choices))
            at = term.end()
        else:
            return None
    return alternatives


def _is_bounded(alternatives: list[list[_Term]], number: int) -> bool:
    """Return true if `alternatives[number]` has the form that the module's docstring describes."""
    terms = alternatives[number]
    if all(_LOOK.match(term.atom) for term in terms if term.required):
        return False  # can match the empty string, and therefore at every position
    if sum(term.has_choices for term in terms) > _MAX_CHOICES:
        return False
    risky = [
        term.atom
        for i, term in enumerate(terms)
        if term.unbounded and any(later.required for later in terms[i + 1 :])
    ]
    if len(risky) > 1:
        return False
    for atom in risky:
        for later in alternatives[number + 1 :]:
            first = next((term for term in later if term.required), None)
            if first is None or not first.unbounded or first.atom != atom:
                return False
            if sum(term.required for term in later) == 1:  # the run itself
                break
        else:
            return False
    return True

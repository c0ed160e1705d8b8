"""Entity tags: detection and check of the schemes IOB1, IOB2 and IOBES; conversion to IOB2.

A tag is `O`, or a prefix and a type such as `B-PER`. In IOB2, each entity begins with B. In IOB1,
an entity begins with I, or with B right after an entity of the same type. IOBES is IOB2 with E for
the last word and S for a single word. BILOU and BMES are read as IOBES: L as E, U as S, M as I.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from bert_jax.errors import UserError, first_few
from bert_jax.tasks.examples import LabelSet, TaggedExample

Scheme = Literal["iob2", "iob1", "iobes"]
SCHEMES: tuple[Scheme, ...] = ("iob2", "iob1", "iobes")
_PREFIXES = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S", "M": "I"}
_Breach = tuple[TaggedExample, int, str]  # sentence, word, what would be right
_SHOWN = 3
_PLAIN = "set scheme=plain"
_OUTSIDE = ("O", "")


class Entity(NamedTuple):
    """An entity: its type, and its words [start, end) in a sentence."""

    type: str
    """Type; `_` if tags are prefixes without types."""
    start: int
    end: int


@lru_cache(maxsize=4096)
def split_tag(tag: str) -> tuple[str, str] | None:
    """Split a tag into prefix (O, B, I, E or S) and type; None if the tag belongs to no scheme."""
    if tag == "O":
        return _OUTSIDE
    prefix, dash, kind = tag.partition("-")
    if prefix not in _PREFIXES or (dash and not kind):
        return None
    return _PREFIXES[prefix], kind or "_"


def entities(tags: Sequence[str]) -> list[Entity]:
    """Find entities by the rules of the CoNLL script, in tags of any scheme.

    An entity begins at B or S. I or E continues an entity if the previous tag is B or I with the
    same type; otherwise, I or E begins a new entity. Raise a ValueError if a tag is in no scheme.
    """
    found: list[Entity] = []
    start = 0
    before = _OUTSIDE
    for word, now in enumerate([*_split(tags), _OUTSIDE]):
        continues = before[0] in "BI" and now[0] in "IE" and before[1] == now[1]
        if not continues:
            if before != _OUTSIDE:
                found.append(Entity(before[1], start, word))
            start = word
        before = now
    return found


def strict_entities(tags: Sequence[str]) -> list[Entity]:
    """Find the entities that begin with B, S or U; leave out entities that begin with I or E.

    Raise a ValueError if a tag belongs to no scheme.
    """
    return [found for found in entities(tags) if tags[found.start][0] in "BSU"]


def to_tags(found: Iterable[Entity], length: int) -> tuple[str, ...]:
    """Return the IOB2 tags of a sentence of `length` words; the entities must not overlap."""
    tags = ["O"] * length
    for kind, start, end in found:
        suffix = "" if kind == "_" else f"-{kind}"
        tags[start:end] = [f"I{suffix}"] * (end - start)
        tags[start] = f"B{suffix}"
    return tuple(tags)


def detect_scheme(examples: Iterable[TaggedExample]) -> Scheme | Literal["plain"]:
    """Detect the scheme that all tags follow; `plain` if they are not entity tags.

    The scheme is `iob2` if there are no entities, and `plain` if no tag has a type and most
    distinct tags are not prefixes (M may mean numerals). Sentences without tags are skipped. Raise
    a UserError if the tags break every scheme (the message names the scheme with the fewest faults,
    and the first faults), or entity tags and other tags are mixed.
    """
    broken: dict[Scheme, list[_Breach]] = {scheme: [] for scheme in SCHEMES}
    other: list[tuple[TaggedExample, int]] = []
    met: set[str] = set()
    for example in examples:
        met.update(example.tags or ())
        parts = [split_tag(tag) for tag in example.tags or ()]
        for word, part in enumerate(parts):
            if part is None:
                other.append((example, word))
        for word, scheme, why in _breaches([part or _OUTSIDE for part in parts]):
            broken[scheme].append((example, word, f": {why}"))
    others = {tag for tag in met if split_tag(tag) is None}
    typed = {tag for tag in met - others if "-" in tag}
    if not typed and len(others) > len(met - others - {"O"}):
        return "plain"
    if other:
        raise UserError(
            f"{first_few([_word(*each) for each in other], _SHOWN)}: neither O nor a prefix (B, I, "
            "E, S) with a type, unlike other tags of these sentences. Fix the tags or name the "
            f"column of the tags; if tags do not mark entities (parts of speech), {_PLAIN}"
        )
    for scheme in SCHEMES:
        if not broken[scheme]:
            return scheme
    ends = any(prefix in "ES" for prefix, _ in _split(sorted(met)))
    nearest = min(SCHEMES[2:] if ends else SCHEMES[:2], key=lambda scheme: len(broken[scheme]))
    letters = "" if typed else f"; if the letters are parts of speech, {_PLAIN}"
    breaches = [_word(each, at) + why for each, at, why in broken[nearest]]
    raise UserError(
        f"{first_few(breaches, _SHOWN)}. The tags are not valid {nearest.upper()}, and no other "
        "scheme allows them. Fix the tags, or set lenient to read them as the CoNLL script does"
        f"{letters}"
    )


def convert(examples: Sequence[TaggedExample], *, lenient: bool = False) -> list[TaggedExample]:
    """Convert entity tags to IOB2; sentences without tags stay as they are.

    If `lenient`, tags that follow no scheme are read as the CoNLL script does (see `entities`).
    Raise a UserError if tags do not mark entities, or follow no scheme and `lenient` is false.
    """
    if lenient:
        for example in examples:
            for word, tag in enumerate(example.tags or ()):
                if split_tag(tag) is None:
                    raise UserError(
                        f"{_word(example, word)}: neither O nor a prefix with a type. Fix the tag. "
                        f"If tags do not mark entities, {_PLAIN} and leave lenient out"
                    )
    elif detect_scheme(examples) == "plain":
        first = next(each for each in examples if each.tags)
        raise UserError(f"{_word(first, 0)}: not an entity tag; expected O, or a tag like B-PER")
    return [
        example
        if example.tags is None
        else replace(example, tags=to_tags(entities(example.tags), len(example.tags)))
        for example in examples
    ]


def tag_labels(examples: Iterable[TaggedExample], *, plain: bool = False) -> LabelSet:
    """Return the tags to learn; for entities: O, then B and I of each type.

    Every type gets B and I, because a type that has only single words in training may have longer
    entities in other data. Plain tags are sorted. Raise a UserError if there are no tags.
    """
    met = {tag for example in examples for tag in example.tags or () if tag}
    if plain or not met:
        return LabelSet.of(met)
    kinds = sorted({kind for prefix, kind in _split(sorted(met)) if prefix != "O"})
    return LabelSet(("O", *(p if kind == "_" else f"{p}-{kind}" for kind in kinds for p in "BI")))


def _split(tags: Sequence[str]) -> list[tuple[str, str]]:
    parts = []
    for tag in tags:
        if (part := split_tag(tag)) is None:
            raise ValueError(f"{tag!r} is no tag; expected O, or B, I, E or S with a type")
        parts.append(part)
    return parts


def _breaches(parts: list[tuple[str, str]]) -> Iterator[tuple[int, Scheme, str]]:
    """Yield the faults of a sentence's tags: index of the word, scheme it breaks, explanation."""
    before = _OUTSIDE
    for word, (prefix, kind) in enumerate([*parts, _OUTSIDE]):
        inside = before[0] in "BI"
        same = inside and before[1] == kind
        if prefix in "ES":
            yield word, "iob1", f"{prefix} is no prefix of IOB1"
            yield word, "iob2", f"{prefix} is no prefix of IOB2"
        elif prefix == "I" and not same:
            yield word, "iob2", "I continues nothing here; B would begin an entity"
        elif prefix == "B" and not same:
            yield word, "iob1", "no entity of this type ends before it; I would begin one"
        if prefix in "IE" and not same:
            yield word, "iobes", f"{prefix} continues nothing here"
        elif prefix not in "IE" and inside:
            right = "S" if before[0] == "B" else "E"
            yield word - 1, "iobes", f"the entity ends here; {right} would be right"
        before = prefix, kind


def _word(example: TaggedExample, number: int) -> str:
    assert example.tags is not None
    word, tag = example.tokens[number][:40], example.tags[number][:40]
    return f"{example.origin}, word {number + 1} ({word!r}, {tag!r})"

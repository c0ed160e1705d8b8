"""Conversion of nested dicts to frozen dataclasses and back, and the notes of their fields."""

import ast
import dataclasses
import inspect
import itertools
import json
import math
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from bert_jax.config.bounds import KeyOf
from bert_jax.errors import UserError, nearest, suggestion

T = TypeVar("T")


def build(cls: type[T], mapping: Any, where: str = "config", path: tuple[str, ...] = ()) -> T:
    """Build a dataclass from a nested mapping and check the names and types of its fields.

    `where` names the source in messages. Fields may be dataclasses, scalars, `Literal`, `X | None`
    and `tuple[X, ...]`. A missing field takes its default. Whole numbers are accepted for floats
    and lists for tuples; nothing else is converted. Raise a UserError, which says what is allowed,
    if a field is unknown or its value is wrong. The dataclass may have these class attributes:

    - `RENAMED` maps former names of fields to new names.
    - `ELSEWHERE` maps names of fields in other classes to hints for the error message.
    - `CHOSEN_BY` names a field, and `VARIANTS` maps its values to the subclasses to build.
    - `FORMER` maps former values of the field `CHOSEN_BY` to hints for the error message.
    """
    if not isinstance(mapping, Mapping):
        raise _wrong_type(mapping, "a group of fields", where, path)
    cls = chosen(cls, mapping)
    hints = typing.get_type_hints(cls)
    names = _names(cls)
    for name in mapping:
        if name not in names:
            raise unknown_field(str(name), ".".join(path), names, where, cls)
    return cls(**{k: _convert(hints[k], v, where, (*path, k)) for k, v in mapping.items()})


def unknown_field(
    name: str, section: str, known: Sequence[str], where: str, cls: Any = None,
    places: Sequence[str] = (),
) -> UserError:  # fmt: skip
    """Make the UserError for a field that a section does not have.

    `section` is the section's dotted name, or "" at the top level. The message has one hint, the
    first that applies: the new name or place in `cls`; the variant of `cls` that has the field;
    `places` (dotted names of such fields in other sections); the most similar name in `known`.
    """
    prefix = f"{section}." if section else ""
    near = " or ".join(places) or (f"{prefix}{found}" if (found := nearest(name, known)) else "")
    hint = f"did you mean {near}? " if near else ""
    by, variants = getattr(cls, "CHOSEN_BY", ""), getattr(cls, "VARIANTS", {})
    if new := getattr(cls, "RENAMED", {}).get(name):
        hint = f"its new name is {prefix}{new}. "
    elif found := getattr(cls, "ELSEWHERE", {}).get(name):
        hint = f"{found}. "
    elif name in variants:
        moved = getattr(variants[name], "RENAMED", {}).items()
        names = [f"{prefix}FIELD", *(f"{old} as {prefix}{new}" for old, new in moved)]
        hint = f"fields of {prefix}{by}={name} are written {', '.join(names)}. "
    elif having := [each for each, kind in variants.items() if name in _names(kind)]:
        hint = f"{prefix}{by}={' or '.join(having)} has this field; set that value first. "
    return UserError(
        f"{where}: unknown field {prefix}{name}; {hint}"
        f"Known here: {', '.join(known) or 'no fields, since this is a single value'}"
    )


def to_dict(config: Any) -> dict[str, Any]:
    """Return a dataclass as nested dicts and lists for JSON; `build` is the inverse."""
    result: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return result


def diff(a: Any, b: Any, free: Sequence[str] = ()) -> list[tuple[str, Any, Any]]:
    """List fields that differ as (dotted name, value in a, value in b), except those in `free`."""
    left, right = dict(leaves(to_dict(a))), dict(leaves(to_dict(b)))
    return [
        (name, left.get(name), right.get(name))
        for name in [*left, *(name for name in right if name not in left)]
        if left.get(name) != right.get(name)
        and not any(name == each or name.startswith((f"{each}.", f"{each}[")) for each in free)
    ]


def changed(values: Any, defaults: Any) -> Any:
    """Return the entries of nested mappings that differ from their defaults."""
    if isinstance(values, list | tuple) and values and isinstance(values[0], dict):
        return [changed(each, defaults[0]) for each in values]
    if not isinstance(values, dict):
        return values
    return {n: changed(v, defaults.get(n)) for n, v in values.items() if v != defaults.get(n)}


def chosen(cls: Any, mapping: Mapping[str, Any]) -> Any:
    """Return the variant of `cls` that `mapping` selects, or `cls` if it has no variants.

    Raise a UserError if `cls` has variants, but no variant has the name that `mapping` selects.
    """
    by, variants = getattr(cls, "CHOSEN_BY", ""), getattr(cls, "VARIANTS", {})
    if not by:
        return cls
    name = mapping.get(by, getattr(cls, by))
    if isinstance(name, str) and (instead := getattr(cls, "FORMER", {}).get(name)):
        raise UserError(f"{cls.SECTION}.{by} is {name!r}; {instead}")
    if not isinstance(name, str) or name not in variants:
        hint = suggestion(str(name), variants, " (did you mean {!r}?)")
        raise UserError(f"{cls.SECTION}.{by} is {name!r:.80}{hint}; it must be {KeyOf(variants)}")
    return variants[name]


def notes(cls: type) -> dict[str, str]:
    """Return the notes of fields of a dataclass: the strings below the fields in the source."""
    found: dict[str, str] = {}
    for kind in reversed(cls.__mro__[:-1]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        for field, after in itertools.pairwise(typing.cast(ast.ClassDef, node).body):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                name = typing.cast(ast.Name, field.target).id
                found[name] = " ".join(str(ast.literal_eval(after.value)).split())
    return found


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of nested dicts and lists, as (dotted name, value)."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else name)
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        for number, item in enumerate(tree):
            yield from leaves(item, f"{prefix}[{number}]")
    else:
        yield prefix, tree


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _convert(hint: Any, value: Any, where: str, path: tuple[str, ...]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast(type, hint)):
            return value
        return build(typing.cast(type, hint), value, where, path)
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
        near = suggestion(str(value), map(str, arguments), " (nearest: {!r})")
        wanted = "one of " + ", ".join(repr(a) for a in arguments)
        raise _wrong_type(value, wanted + near, where, path)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in arguments if kind is not type(None)]
        if len(kinds) > 1 or len(kinds) == len(arguments):
            raise TypeError(f"{'.'.join(path)}: unions of several types are not supported: {hint}")
        if value is None:
            return None
        try:
            return _convert(kinds[0], value, where, path)
        except UserError as error:
            if dataclasses.is_dataclass(kinds[0]):
                raise
            raise UserError(f"{error}, or None") from None
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong_type(value, "a list", where, path)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        if len(arguments) != len(value):
            raise _wrong_type(value, f"a list of {len(arguments)} values", where, path)
        return tuple(
            _convert(kind, item, where, (*path[:-1], f"{path[-1]}[{number}]"))
            for number, (kind, item) in enumerate(zip(arguments, value, strict=True))
        )
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise _wrong_type(value, "a finite number", where, path)
        return float(value)
    if hint in _KINDS:
        if type(value) is hint and f"{value}".encode(errors="replace").decode() == f"{value}":
            return value
        raise _wrong_type(value, _KINDS[hint], where, path)
    raise TypeError(f"{'.'.join(path)}: fields of type {hint} are not supported")


_KINDS = {int: "a whole number", float: "a number", str: "text in UTF-8", bool: "True or False"}


def _wrong_type(value: Any, wanted: str, where: str, path: tuple[str, ...]) -> UserError:
    name = ".".join(path) or "the whole configuration"
    return UserError(f"{where}: {name} is {value!r} ({type(value).__name__}); it must be {wanted}")

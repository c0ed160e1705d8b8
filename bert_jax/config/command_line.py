"""Conversion of `--config=FILE --config.a.b=value` to a frozen dataclass.

A configuration file names only the fields that it sets; the other fields have the defaults of the
dataclass. The type of a field decides how its value on the command line is parsed.
"""

import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import logging
import os
import re
import shlex
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ml_collections import ConfigDict

from bert_jax.config.bounds import wanted
from bert_jax.config.mapping import build, chosen, leaves, notes, to_dict, unknown_field
from bert_jax.errors import UserError, suggestion

Config = TypeVar("Config")

_log = logging.getLogger("bert_jax")

_WHERE = "on the command line"
_EXAMPLES: dict[Any, str] = {float: "2e-5,3e-5", int: "1,2", str: "first,second"}
_QUOTED = ("(", "[", "'", '"')
_BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def load_config(cls: type[Config], spec: str, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file and apply overrides such as `--config.training.num_steps=100`.

    `spec` is PATH or PATH:ARG. PATH is a Python file that defines `get_config(arg) -> ConfigDict`.
    If the path does not exist, the package's configurations are searched. There, NAME_ARG can also
    stand for NAME.py with the argument ARG: ettin_17m stands for ettin.py:17m. Raise a
    UserError if the file is missing or raises an error, or a field is unknown or wrong.
    """
    path, argument = find_config(spec)
    given = _json(path) if path.suffix == ".json" else _unwrapped(_get_config(path, argument))
    if not isinstance(given, dict):
        raise UserError(
            f"{path}: the configuration is {given!r:.200}; it must be a ConfigDict, a dict or a "
            "JSON object"
        )
    named = build(cls, given, where=str(path))  # before the overrides, so that errors name the file
    return overridden(named, overrides)


def overridden(config: Config, overrides: Sequence[str], where: str = _WHERE) -> Config:
    """Apply overrides such as `--config.seed=1`; `where` names their source in a UserError."""
    values = to_dict(config)
    _override(type(config), values, overrides, where)
    return build(type(config), values, where=where)


def config_from(cls: type[Config], given: Any, fields: Mapping[str, Any]) -> Config:
    """Make a configuration from a file (as in `load_config`), dict or configuration; set `fields`.

    `fields` are nested or have dotted names. Raise a UserError if a field is unknown or wrong.
    """
    if isinstance(given, str | Path):
        given = load_config(cls, f"{given}")
    elif not isinstance(given, cls):
        given = build(cls, _unwrapped(given))
    # In `_unwrapped`, lists become tuples, which `leaves` yields in full.
    found = leaves(_unwrapped(fields)) if fields else ()
    texts = {name: str(value) for name, value in found}
    texts |= {name: os.path.expanduser(text) for name, text in texts.items() if "/" in text}
    overrides = [f"--config.{name}={text}" for name, text in texts.items()]
    return overridden(given, overrides, "in the arguments")


def fields_help(config: Any, prefix: str = "--config") -> str:
    """Return a text that lists the fields of a configuration with values, notes and bounds.

    The line of a field, such as `--config.seed=0`, can be copied to a command line.
    """
    cls = type(config)
    hints, texts = typing.get_type_hints(cls), notes(cls)
    bounded = typing.get_type_hints(cls, include_extras=True)
    lines = []
    for field in dataclasses.fields(config):
        value, hint, name = getattr(config, field.name), hints[field.name], field.name
        element = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
        indent = " " * 6
        text = textwrap.wrap(
            texts.get(name, ""), 88, initial_indent=indent, subsequent_indent=indent
        )
        if dataclasses.is_dataclass(hint):
            lines.append("\n" + fields_help(value, f"{prefix}.{name}"))
        elif dataclasses.is_dataclass(element):
            values = json.dumps([dataclasses.asdict(each) for each in value])
            lines += [shlex.quote(f"{prefix}.{name}={values}"), *text]
            lines += [fields_help(e, f"{prefix}.{name}[{n}]") for n, e in enumerate(value)]
        else:
            values = ",".join(map(str, value)) if element else value
            if element is str and any("," in each for each in value):
                values = json.dumps(value)
            lines += [shlex.quote(f"{prefix}.{name}={values}"), *text]
        if name == getattr(cls, "CHOSEN_BY", ""):
            kinds = getattr(cls, "VARIANTS", {})
            own = f"each NAME has its own fields, which --fields {prefix}.{name}=NAME lists"
            lines += [f"{indent}one of {', '.join(kinds)}", f"{indent}{own}"]
        if right := wanted(bounded[name]):
            lines.append(f"{indent}{right}")
        if element in (str, float, int):
            lines.append(f"{indent}several values are separated by commas: {_EXAMPLES[element]}")
    return "\n".join(lines)


def find_config(spec: str) -> tuple[Path, str]:
    """Return the configuration file and the argument that PATH, PATH:ARG or NAME_ARG stands for.

    Raise a UserError if there is no such file.
    """
    spec = os.path.expanduser(spec)
    named, _, given = (spec, "", "") if Path(spec).is_file() else spec.partition(":")
    package = Path(__file__).parents[1]
    shipped = [package / "configs", package.parent / "configs"]  # in a wheel, in a clone
    # All folders are searched: `bert_tiny` stands for pretrain/bert_tiny.py.
    folders = ["", *(folder.name for root in shipped for folder in root.glob("*/"))]
    stem, _, last = named.removesuffix(".py").rpartition("_")
    for name, argument in ((named, ""), (stem, last)):
        relative = name.removeprefix("configs/")
        below = [root / folder / relative for folder in folders for root in shipped]
        candidates = [*([named] if name == named else []), *map(str, below)]
        for path in [Path(c + suffix) for c in candidates for suffix in ("", ".py")]:
            if name and path.is_file():
                return path, given or argument
    known = sorted(f"{p.parent.name}/{p.stem}" for root in shipped for p in root.glob("*/*.py"))
    names = [name.rpartition("/")[2] for name in known]
    hint = suggestion(named.rpartition("/")[2], names, "; did you mean {}?") or "."
    raise UserError(
        f"--config: there is no file {named!r}{hint} Give the path of a configuration file, or "
        f"one of {', '.join(known)}"
    )


def _json(path: Path) -> Any:
    try:
        given = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--config: {path} cannot be read as JSON: {error}") from error
    return given.get("config", given) if isinstance(given, dict) else given


def _get_config(path: Path, argument: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"config {path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config: {path} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    if (folder := str(path.parent.absolute())) not in sys.path:
        sys.path.append(folder)  # a recipe may import a module beside it, which registers a name
    sys.modules[spec.name] = module  # here dataclasses and `inspect` look up the module of a class
    with _blaming(path):
        spec.loader.exec_module(module)
    function = getattr(module, "get_config", None)
    if not callable(function):
        raise UserError(f"{path} has no function get_config; a configuration file must define one")
    arguments = [argument] if argument else []
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise UserError(
            f"{path}: get_config cannot be called with the arguments that were given ({error}). To "
            f"give an argument, write --config={path}:ARGUMENT; get_config must have a parameter "
            "for the argument"
        ) from error
    with _blaming(path, argument):
        return function(*arguments)


@contextlib.contextmanager
def _blaming(path: Path, argument: str = "") -> Iterator[None]:
    """Turn an exception of `path` or a module beside it into a UserError that names the line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        places = [(at.filename, at.lineno) for at in traceback.extract_tb(error.__traceback__)]
        places += [(f"{error.filename}", error.lineno)] if isinstance(error, SyntaxError) else []
        where = f"{path}"
        for file, line in places:
            if Path(file).parent == path.absolute().parent:
                where = f"{path.with_name(Path(file).name)}, line {line}"
        culprit = f"the argument {argument!r} or " * bool(argument) + "the Python code of this file"
        advice = f"Correct {culprit} and try again"
        raise UserError(f"{where}: {type(error).__name__}: {error}. {advice}") from error


def _unwrapped(value: Any) -> Any:
    """Convert each ConfigDict to a dict, also in tuples, and NumPy's values to Python's."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, ConfigDict | dict):
        return {name: _unwrapped(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_unwrapped(item) for item in value)
    return value


def _override(cls: type, values: dict[str, Any], overrides: Sequence[str], where: str) -> None:
    """Apply overrides `--config.a.b=value` or `--config.a.b value` to nested dicts, in place."""
    arguments = iter(overrides)
    for argument in arguments:
        if not argument.startswith("-"):
            raise UserError(
                f"unexpected argument {argument!r}; fields of the configuration are set as "
                "--config.section.field=value"
            )
        name, equals, text = argument.partition("=")
        section, dot, fields = name.lstrip("-").partition(".")
        if section != "config" or not dot:
            raise UserError(
                f"unknown argument {argument!r}; fields of the configuration are set as "
                "--config.section.field=value (--fields lists them)"
            )
        group, holder, key, hint = _find_field(cls, values, fields, where)
        given: str | None = text
        if not equals:
            given = "True" if hint is bool else next(arguments, None)
        if given is None or (not equals and given.startswith("--config.")):
            raise UserError(f"{where}: missing value for {name}; write {name}=VALUE")
        before = chosen(group, holder)
        holder[key] = value = None if (hint, given) == (str, "None") else _value(hint, given)
        if (after := chosen(group, holder)) is before:
            continue
        # A field that differs from its default keeps its value if the other subclass has it.
        old, new = to_dict(before()), to_dict(after())
        kept = {name: v for name, v in holder.items() if name in new and v != old[name]}
        holder.clear()
        holder.update({**new, **kept, key: value})


def _find_field(cls: type, values: Any, fields: str, where: str) -> tuple[Any, Any, Any, Any]:
    """Find a field such as `training.phases[0].length`; return class, holder, key and type.

    `holder[key]` is the value of the field. The class is the declared type of the holder, even if
    the holder's values are for a subclass. If the holder is a list, the class is None.
    """
    group, holder, key, hint = None, None, None, typing.cast(Any, cls)
    value, seen = values, ""
    for part in re.findall(r"[^.\[\]]+|\[[^\]]*\]", fields):
        if isinstance(value, list) and part[0] == "[":
            if not (part[1:-1].isdecimal() and int(part[1:-1]) < len(value)):
                raise UserError(
                    f"{where}: there is no {seen}{part}; entries are counted from 0, and {seen} "
                    f"has length {len(value)}. To change the length, set the full list in the form "
                    f"that --fields shows for {seen}, or write a configuration file"
                )
            group, key, hint = None, int(part[1:-1]), typing.get_args(hint)[0]
            if dataclasses.is_dataclass(hint) and isinstance(value[key], dict):
                defaults = to_dict(typing.cast(Any, hint)())
                value[key] = defaults | value[key]  # an earlier override may lack fields
            seen += part
        else:
            known = sorted(value) if isinstance(value, dict) else []
            group, hint = hint, chosen(hint, value) if known else hint
            if part not in known:
                places = [
                    name for name, _ in leaves(values)
                    if name.rpartition(".")[2] == part and "[" not in name
                ]  # fmt: skip
                raise unknown_field(part, seen, known, where, hint, places)
            key, hint = part, typing.get_type_hints(hint)[part]
            seen = f"{seen}.{part}" if seen else part
        holder, value = value, value[key]
    if dataclasses.is_dataclass(hint):
        names = ", ".join(field.name for field in dataclasses.fields(hint))
        raise UserError(f"{where}: {seen or 'config'} is a group of fields; set one of {names}")
    return group, holder, key, hint


def _value(hint: Any, text: str) -> Any:
    """Parse text as a value of a type; return unparsable text as it is, for `build` to reject."""
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return None if text == "None" else _value(kinds[0], text)
    if typing.get_origin(hint) is tuple:
        if text[:1] in _QUOTED:
            for read in (json.loads, ast.literal_eval):  # JSON has null, Python None
                with contextlib.suppress(ValueError, SyntaxError):
                    found = read(text)
                    return list(found) if isinstance(found, list | tuple) else [found]
        return [_value(kinds[0], part.strip()) for part in text.split(",") if part.strip()]
    if hint is bool:
        return _BOOLEANS.get(text.lower(), text)
    if hint in (int, float):
        with contextlib.suppress(ValueError):
            return hint(text)
    return text

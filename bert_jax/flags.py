"""`--config=FILE --config.a.b=value` on the command line, to a frozen dataclass.

A configuration file names only what it sets; the dataclass has the rest. So that every field can
be overridden, the file's values are laid over the dataclass's defaults before the overrides are
parsed.
"""

import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import itertools
import re
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

from bert_jax.errors import UserError
from bert_jax.training.config import build, unknown_field

Config = TypeVar("Config")


def load_config(cls: type[Config], spec: str, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration file and applies overrides.

    Args:
        cls: The dataclass to build.
        spec: Path of a Python file with `get_config(arg) -> ConfigDict`, optionally `path:arg`. A
            path that does not exist is looked for among the package's own configurations.
        overrides: Arguments such as `--config.training.num_steps=100`. Others are refused.

    Raises:
        UserError: No such file, a file that fails or has no `get_config`, an unknown field, a value
            of the wrong type.
    """
    named, _, argument = spec.partition(":")
    path = _find(named)
    module = _run(path)
    given = _unwrapped(_get_config(module, path, argument))
    if not isinstance(given, dict):
        raise UserError(f"{path}: get_config gave {given!r}; it must return a ConfigDict or a dict")
    build(cls, given, where=str(path))  # names a wrong field as the file's, before any override
    merged = ConfigDict(_overlay(cls, given))
    return build(cls, _unwrapped(_override(merged, overrides)), where="config")


def fields_help(cls: type, prefix: str = "--config") -> str:
    """The fields that can be overridden, with their defaults and what the source says of them."""
    hints, notes = typing.get_type_hints(cls), _notes(cls)
    default = cls()
    lines = []
    for field in dataclasses.fields(cls):
        value, hint = getattr(default, field.name), hints[field.name]
        if dataclasses.is_dataclass(hint):
            lines.append("\n" + fields_help(typing.cast(type, hint), f"{prefix}.{field.name}"))
            continue
        lines.append(f"{prefix}.{field.name}={value}")
        if isinstance(value, tuple):
            lines[-1] = f"{prefix}.{field.name}[0].FIELD=...  (default: {value})"
        lines.extend(textwrap.wrap(notes.get(field.name, ""), 88, initial_indent="      ",
                                   subsequent_indent="      "))  # fmt: skip
        if typing.get_origin(hint) is typing.Literal:
            lines.append(f"      one of {', '.join(typing.get_args(hint))}")
    return "\n".join(lines)


def _notes(cls: type) -> dict[str, str]:
    """The strings that follow the fields in the source of a dataclass and its bases."""
    notes: dict[str, str] = {}
    for kind in reversed(cls.__mro__[:-1]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        for field, after in itertools.pairwise(typing.cast(ast.ClassDef, node).body):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                name = typing.cast(ast.Name, field.target).id
                notes[name] = " ".join(str(ast.literal_eval(after.value)).split())
    return notes


def _find(named: str) -> Path:
    shipped = [Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs"]
    relative = named.removeprefix("configs/")
    candidates = [named, *(str(root / relative) for root in shipped)]
    for path in [Path(c + suffix) for c in candidates for suffix in ("", ".py")]:
        if named and path.is_file():
            return path
    known = sorted(f"{p.parent.name}/{p.stem}" for root in shipped for p in root.glob("*/*.py"))
    raise UserError(
        f"--config: there is no file {named!r}. Give the path of a configuration file, or one of "
        f"{', '.join(known)}"
    )


def _run(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config: {path} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    with _blaming(path):
        spec.loader.exec_module(module)
    return module


def _get_config(module: types.ModuleType, path: Path, argument: str) -> Any:
    function = getattr(module, "get_config", None)
    if not callable(function):
        raise UserError(f"{path} has no function get_config; a configuration file must define one")
    arguments = [argument] if argument else []
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise UserError(
            f"{path}: get_config does not take what it was given ({error}). An argument comes "
            f"after a colon, --config={path}:ARGUMENT, where get_config has a parameter for it"
        ) from error
    with _blaming(path):
        return function(*arguments)


@contextlib.contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Turns whatever a configuration file raises into an error that names its line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename) == path.absolute():
                line = frame.lineno
        where = str(path) if line is None else f"{path}, line {line}"
        raise UserError(
            f"{where}: {type(error).__name__}: {error}. A configuration file is Python; mend it "
            "and try again"
        ) from error


def _overlay(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    """The defaults of `cls` with `given` on top; None becomes a placeholder that knows its type."""
    hints = typing.get_type_hints(cls)
    merged: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            merged[field.name] = _overlay(typing.cast(type, hint), given.get(field.name) or {})
            continue
        if field.name in given:
            value = given[field.name]
        elif field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            continue
        merged[field.name] = _placeholder(hint) if value is None else _plain(value)
    return merged


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return ConfigDict(value)
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return value


def _unwrapped(value: Any) -> Any:
    """Plain dicts, inside tuples too, which `ConfigDict.to_dict` leaves alone."""
    if isinstance(value, ConfigDict):
        return {name: _unwrapped(item) for name, item in value.to_dict().items()}
    if isinstance(value, dict):
        return {name: _unwrapped(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_unwrapped(item) for item in value)
    return value


def _placeholder(hint: Any) -> Any:
    kinds = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    kind = kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) else object
    return config_dict.placeholder(kind)


def _check_field(config: ConfigDict, argument: str) -> None:
    """Refuses a field that is not there, in the words of `build`; the value is not looked at."""
    name, dot, fields = argument.partition("=")[0].lstrip("-").partition(".")
    if not argument.startswith("-"):
        return  # the value of the argument before, or refused later
    if name != "config" or not dot:
        raise UserError(
            f"unknown argument {argument!r}; fields of the configuration are set as "
            "--config.section.field=value (bert-jax pretrain --fields lists them)"
        )
    value: Any = config
    seen = ""
    for part in re.findall(r"[^.\[\]]+|\[[^\]]*\]", fields):
        if isinstance(value, tuple) and part[0] == "[":
            if not (part[1:-1].isdecimal() and int(part[1:-1]) < len(value)):
                raise UserError(
                    f"on the command line: there is no {seen}{part}; the configuration has "
                    f"{seen}[0] to [{len(value) - 1}]. To have more, write them in a "
                    "configuration file"
                )
            value, seen = value[int(part[1:-1])], seen + part
            continue
        known = sorted(value) if isinstance(value, ConfigDict) else []
        if part not in known:
            raise unknown_field(part, seen, known, "on the command line")
        value, seen = value.get(part), f"{seen}.{part}" if seen else part


def _override(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    for argument in overrides:
        _check_field(config, argument)
    values = flags.FlagValues()
    program, sys.argv = sys.argv, ["bert-jax", *overrides]  # config_flags looks at sys.argv itself
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values)
        rest = values(sys.argv)
    except (flags.Error, AttributeError, KeyError, ValueError, TypeError) as error:
        message = re.sub(r"\\?['\"]|\\n|\s+", " ", str(error))  # it is a repr inside a repr
        raise UserError(f"on the command line: {' '.join(message.split())}") from error
    finally:
        sys.argv = program
    if len(rest) > 1:
        raise UserError(
            f"unexpected argument {rest[1]!r}; fields of the configuration are set as "
            "--config.section.field=value"
        )
    result: ConfigDict = values.config
    return result

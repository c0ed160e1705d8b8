"""`--config=FILE --config.a.b=value` on the command line, to a frozen dataclass.

A configuration file names only what it sets; the dataclass has the rest. So that every field can be
overridden, the file's values are laid over the dataclass's defaults before the overrides are parsed.
"""

import dataclasses
import importlib.util
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

from bert_jax.errors import UserError
from bert_jax.training.config import build

Config = TypeVar("Config")


def load_config(cls: type[Config], spec: str, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration file and applies overrides.

    Args:
        cls: The dataclass to build.
        spec: Path of a Python file with `get_config(arg) -> ConfigDict`, optionally `path:arg`. A path
            that does not exist is looked for among the configurations that come with the package.
        overrides: Arguments such as `--config.training.num_steps=100`. Other arguments are refused.

    Raises:
        UserError: No such file, a file without `get_config`, an unknown field, a value of the wrong
            type.
    """
    named, _, argument = spec.partition(":")
    path = _find(named)
    module = _run(path)
    if not hasattr(module, "get_config"):
        raise UserError(f"{path} has no function get_config; a configuration file must define one")
    given = module.get_config(argument) if argument else module.get_config()
    given = given.to_dict() if isinstance(given, ConfigDict) else dict(given)
    build(cls, given, where=str(path))  # names a wrong field as the file's, before any override
    merged = ConfigDict(_overlay(cls, given))
    return build(cls, _override(merged, overrides).to_dict(), where="config")


def fields_help(cls: type) -> str:
    """One line per field that can be overridden, with its default."""
    lines = []

    def walk(tree: ConfigDict, prefix: str) -> None:
        for name in tree:
            value = tree.get_ref(name).get() if name in tree else None
            if isinstance(value, ConfigDict):
                walk(value, f"{prefix}{name}.")
            else:
                if isinstance(value, tuple) and value and isinstance(value[0], ConfigDict):
                    value = tuple(item.to_dict() for item in value)
                lines.append(f"  --config.{prefix}{name}={value}")

    walk(ConfigDict(_overlay(cls, {})), "")
    return "\n".join(lines)


def _find(named: str) -> Path:
    shipped = [Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs"]
    relative = named.removeprefix("configs/")
    candidates = [Path(named), *(root / relative for root in shipped)]
    for path in [p for c in candidates for p in (c, c.with_name(c.name + ".py"))]:
        if path.is_file():
            return path
    known = sorted(p.stem for root in shipped for p in root.glob("pretrain/*.py"))
    raise UserError(
        f"--config: there is no file {named}. Give the path of a configuration file, or one of "
        f"{', '.join('pretrain/' + name for name in known)}"
    )


def _run(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config: {path} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def _placeholder(hint: Any) -> Any:
    kinds = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    kind = kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) else object
    return config_dict.placeholder(kind)


def _override(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values)
    program, sys.argv = sys.argv, ["bert-jax", *overrides]  # config_flags looks at sys.argv itself
    try:
        rest = values(sys.argv)
    except (flags.Error, AttributeError, KeyError, ValueError, TypeError) as error:
        message = " ".join(str(error).strip("'\"").replace("\\n", " ").replace("\\'", "'").split())
        raise UserError(f"on the command line: {message}") from error
    finally:
        sys.argv = program
    if len(rest) > 1:
        raise UserError(
            f"unexpected argument {rest[1]!r}; fields of the configuration are set as "
            "--config.section.field=value"
        )
    result: ConfigDict = values.config
    return result

"""Options of verbs. A frozen dataclass defines the parser, and the parsed arguments fill it.

    class Verify(OfRun, Json):
        \"\"\"Read all checkpoints of a run back and say which are intact.\"\"\"

        step: int | None = None
        \"\"\"Step of the only checkpoint to read.\"\"\"

Calling an instance runs the verb. `bert-jax --help` shows the first line of the docstring.
"""

import argparse
import inspect
import math
import os
import shlex
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, TypeVar

from typing_extensions import dataclass_transform

from bert_jax.config.bounds import faults
from bert_jax.config.mapping import notes
from bert_jax.errors import UserError, suggestion

T = TypeVar("T")
V = TypeVar("V", bound="Verb")

_POSITIONAL, _COMMAS = object(), object()
Given = Annotated[T, _POSITIONAL]
"""Annotation of a positional argument."""
Commas = Annotated[tuple[T, ...], _COMMAS]
"""Annotation of an option whose values are separated by commas. An option of another tuple type
takes several values after its flag, or may be repeated."""
Text = Annotated[str, "TEXT"]
"""Text whose leading ~ is not expanded. Here and below, the string is the metavar, which the help
shows in place of the value."""
ModelPlace = Annotated[str, "MODEL"]
RunPlace = Annotated[str, "WORKDIR"]
CorpusPlace = Annotated[str, "CORPUS"]
File = Annotated[Path, "FILE"]
Picture = Annotated[Path, "FILE.png"]
Directory = Annotated[Path, "DIR"]
_NEW = {
    "--png": "--plot", "bert-jax inspect --out": "--plot", "bert-jax mine --corpus": "--input",
    "--field": "--columns FIELD=COLUMN", "--text-column": "--columns text=COLUMN",
    "--table": "--columns header=False", "--by-field": "--by-column", "--layer": "--layers",
    "--licence": "--license", "--nbest": "--top", "--translation": "--recipe translation",
    "--fit": "--batch-per-chip fit", "--fast": "--batch-per-chip fast",
    "--no-cache": "--cache none", "--address": "--engine ray:HOST:PORT",
    "--language-threshold": "--language CODE:P",
    "--drop-duplicate-paragraphs": "--drop-duplicates paragraphs",
    "--drop-near-duplicates": "--drop-duplicates near=JACCARD",
}  # fmt: skip
"""Former options, each with its replacement."""
_METAVARS = {int: "N", float: "X"}
_NUMBERS = {int: "a whole number", float: "a finite number"}


@dataclass(frozen=True, kw_only=True)
@dataclass_transform(kw_only_default=True, frozen_default=True)
class Verb:
    """A verb with its options, or options that several verbs share; always a frozen dataclass."""

    command_line: str = ""
    """Full command line, for messages and records."""
    overrides: tuple[str, ...] = ()
    """Settings of configuration fields, such as --config.model.num_layers=12."""

    CONFIGURED: ClassVar[bool] = False
    """Whether the command line may set fields of a configuration."""

    def __init_subclass__(cls) -> None:
        """Make a frozen dataclass of every subclass."""
        dataclass(frozen=True, kw_only=True)(cls)

    def __call__(self) -> int:
        """Run the verb and return the exit code."""
        raise NotImplementedError

    def given(self, *groups: type["Verb"]) -> list[str]:
        """Return the flags of the options in `groups` whose values differ from the defaults."""
        found = (option for group in groups for option in options(group))
        return [each.flag for each in found if getattr(self, each.name) != each.default]

    def only_with(self, needed: str, there: object, *flags: str) -> None:
        """Raise a UserError if an option of `flags` is given, but its requirement is not met.

        `needed` names the requirement in the message. `there` is true if the requirement is met.
        """
        if not there and (wrong := [each for each in self.given(type(self)) if each in flags]):
            raise UserError(f"{wrong[0]} works only with {needed}")


class Option(NamedTuple):
    """An option or positional argument of a verb."""

    name: str
    hint: Any
    """Type annotation; `Annotated` adds metadata to the type, such as a metavar."""
    default: Any
    title: str
    """Heading of the option's group in the help."""

    @property
    def flag(self) -> str:
        """Spelling on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_positional(self) -> bool:
        """Whether the argument is positional."""
        return _POSITIONAL in _opened(self.hint)[1]

    @property
    def is_several(self) -> bool:
        """Whether the argument is positional and takes any number of values."""
        return self.is_positional and typing.get_origin(_opened(self.hint)[0]) is tuple

    def add_to(self, group: Any) -> None:
        """Add the option to a parser or to one of its groups."""
        kind, marks = _opened(self.hint)
        how: dict[str, Any] = {"default": argparse.SUPPRESS}
        is_list = typing.get_origin(kind) is tuple and _COMMAS not in marks
        if self.is_positional:
            how |= {"nargs": "+" if self.default is MISSING else "*"} if is_list else {}
        else:
            how["required"] = self.default is MISSING
            how |= {"action": "append"} if is_list and typing.get_args(kind)[-1] is ... else {}
        if _COMMAS in marks:
            marks += ("LIST",)
        elif is_list:
            parts = typing.get_args(kind)
            kind, more = _opened(parts[0])
            marks += more
            if parts[-1] is not ...:
                how["nargs"] = len(parts)
            elif typing.get_origin(kind) is tuple:
                how["nargs"] = "+"
                marks += _opened(typing.get_args(kind)[0])[1]
        if kind is bool:
            plain = self.default is False
            how["action"] = "store_true" if plain else argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Literal:
            how["choices"] = typing.get_args(kind)
        else:
            words = [each for each in marks if isinstance(each, str)]
            how["metavar"] = words[-1] if words else _METAVARS.get(kind, self.name.upper())
        group.add_argument(self.name if self.is_positional else self.flag, **how)


def options(verb: type[Verb]) -> list[Option]:
    """Return all options of a verb: first the named options, then the positional arguments.

    The verb's own named options come before inherited ones. Positional arguments are in reverse
    order, so inherited ones come first; an argument with any number of values is always last.
    """
    hints = typing.get_type_hints(verb, include_extras=True)
    defaults = {field.name: field.default for field in fields(verb)}
    found: dict[str, Option] = {}
    for kind in verb.__mro__[:-2]:  # without Verb and object
        below = (vars(each) for each in verb.__mro__ if issubclass(each, kind))
        title = next((each["TITLE"] for each in below if "TITLE" in each), "")
        for name in vars(kind).get("__annotations__", ()):
            if name in defaults and name not in found:
                found[name] = Option(name, hints[name], defaults[name], title)
    places = [option for option in reversed(found.values()) if option.is_positional]
    named = [option for option in found.values() if not option.is_positional]
    return [*named, *sorted(places, key=lambda option: option.is_several)]


class Parser(argparse.ArgumentParser):
    """A parser for one verb. It reads help texts from the source only when they are shown."""

    def __init__(self, verb: type[Verb] | None = None, lax: bool = False, **more: Any) -> None:
        """Add the options of a verb. If `lax` is true, required options may be missing."""
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **more)
        self.verb = verb
        groups: dict[str, Any] = {"": self}
        for option in options(verb) if verb else ():
            if lax and option.default is MISSING:
                option = option._replace(default=None)
            if option.title not in groups:
                groups[option.title] = self.add_argument_group(option.title)
            option.add_to(groups[option.title])

    def format_help(self) -> str:
        """Format the help from the strings below the verb's fields and from their defaults."""
        if self.verb is not None:
            self.description = inspect.cleandoc(self.verb.__doc__ or "")
            texts = notes(self.verb)
            defaults = {option.name: option.default for option in options(self.verb)}
            for action in self._actions:
                if text := texts.get(action.dest, ""):
                    default = defaults[action.dest]
                    if not isinstance(default, bool | tuple) and "default" not in text:
                        shown = default in (None, "", MISSING)
                        text = text if shown else f"{text.rstrip('.')} (default: {default})."
                    action.help = text.replace("%", "%%")
        return super().format_help()

    @property
    def flags(self) -> list[str]:
        """Flags of all options, with their dashes."""
        return [flag for action in self._actions for flag in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Raise a UserError of one line for wrong arguments."""
        raise UserError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Accept any value; `read` later checks choices and suggests the nearest one."""


def read(verb: type[V], name: str, argv: Sequence[str]) -> V:
    """Make a verb from the command-line arguments that follow its name.

    Raise a UserError if an option is unknown (the message suggests one), an argument is missing or
    unexpected, or a value has the wrong type or is out of bounds.
    """
    parser = Parser(verb, prog=f"bert-jax {name}")
    for argument in argv[: argv.index("--") if "--" in argv else None]:
        flag = argument.partition("=")[0]
        is_known = flag in parser.flags or (verb.CONFIGURED and flag.startswith("--config."))
        if flag[:2] == "--" and " " not in argument and not is_known:
            raise _unknown(flag, parser)
    namespace, rest = parser.parse_known_args(argv)
    found = vars(namespace)
    known = {option.name: option for option in options(verb)}
    for several in (each.name for each in known.values() if each.is_several):
        found[several] = found.get(several) or []
        # argparse takes only the values before the first option; add the values after it.
        at = rest.index("--") if "--" in rest else len(rest)
        before, after = rest[:at], rest[at + 1 :]
        rest = [each for each in before if each[:1] == "-" and each != "-" and " " not in each]
        found[several] += [] if rest else before + after
    if rest and not verb.CONFIGURED:
        raise UserError(f"unexpected argument {rest[0]!r} (see {parser.prog} --help)")
    values = {each: _value(known[each].flag, known[each].hint, found[each]) for each in found}
    parts = [each.partition("=") for each in rest]
    homes = tuple(_home(o) + equals + (_home(v) if "/" in v else v) for o, equals, v in parts)
    return verb(**values, command_line=shlex.join(["bert-jax", name, *argv]), overrides=homes)


def _unknown(flag: str, parser: Parser) -> UserError:
    new = _NEW.get(f"{parser.prog} {flag}", _NEW.get(flag, ""))
    if new.partition(" ")[0] in parser.flags:
        return UserError(f"{flag} is now {new}")
    hint = suggestion(flag[2:], [known[2:] for known in parser.flags], "; did you mean --{}?")
    return UserError(f"unknown option {flag}{hint} (see {parser.prog} --help)")


def _opened(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split an annotation into its plain type and its metadata, such as a metavar."""
    marks: tuple[Any, ...] = ()
    while True:
        if hasattr(hint, "__metadata__"):
            marks += hint.__metadata__
        elif typing.get_origin(hint) not in (typing.Union, types.UnionType):
            return hint, marks
        hint = typing.get_args(hint)[0]


def _value(option: str, hint: Any, text: Any) -> Any:
    """Convert a text, or a list of texts, to an option's value, or raise a UserError if wrong."""
    kind, marks = _opened(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = typing.get_args(hint)[0]
    value = text
    if typing.get_origin(kind) is tuple:
        texts = [each.strip() for each in text.split(",")] if _COMMAS in marks else text
        parts = typing.get_args(kind)
        kinds = parts[:1] * len(texts) if parts[-1] is ... else parts
        return tuple(_value(option, part, each) for part, each in zip(kinds, texts, strict=True))
    if kind in _NUMBERS:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(f"{option} is {text}; it must be {_NUMBERS[kind]}")
    elif kind in (str, Path) and "TEXT" not in marks:
        value = kind(_home(text))
    for wrong, found, right in faults(option, hint, value):
        near = suggestion(text, map(str, typing.get_args(kind)), "; did you mean {}?")
        raise UserError(f"{wrong} is {found!r}; it must be {right}{near}")
    return value


def _home(text: str) -> str:
    """Expand a ~ at the beginning of a path or of a field's value.

    A shell expands a ~ only at the beginning of a word, so it leaves `--out=~/x` unchanged.
    """
    return os.path.expanduser(text) if text.startswith("~") else text

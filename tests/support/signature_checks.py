"""jaxtyping's checks of every call of `bert_jax`, at a third of their cost.

Its import hook makes two checkers of each function as a module is imported, and again for a nested
function each time the outer one is called, and binds the arguments of every call. Here a checker is
made at the first call, that of a nested function once, and only functions whose signature names
an array pay for jaxtyping's part; beartype checks the others as before.
"""

import functools
import inspect
import threading
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from types import CodeType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

_jaxtyped = jaxtyping.jaxtyped
_typed = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))
_nested: dict[CodeType, Callable[..., Any]] = {}
_current = threading.local()


def check_signatures(package: str) -> None:
    """Check the arguments and results of all functions of a package that is yet to be imported."""
    jaxtyping.jaxtyped = _checked
    jaxtyping.install_import_hook(package, "beartype.beartype")


def _checked(what: Any = None, *, typechecker: Any) -> Any:
    if what is None:
        return functools.partial(_checked, typechecker=typechecker)
    if not inspect.isclass(what):
        return _at_first_call(what)
    if is_dataclass(what) and what.__init__.__globals__ is not globals():
        what.__init__ = _at_first_call(what.__init__)
    return what


def _at_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    if "<locals>" in function.__qualname__:
        return _nested_one(function)
    checked: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        nonlocal checked
        if checked is None:
            checked = _with_checks(function)
        return checked(*args, **options)

    return call


def _nested_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """All functions that one nested `def` makes share a checker, which calls the current one."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        code = function.__code__
        if code not in _nested:
            _nested[code] = _with_checks(_through(function))
        _current.function = function
        return _nested[code](*args, **options)

    return call


def _through(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def through(*args: Any, **options: Any) -> Any:
        return _current.function(*args, **options)

    return through


def _with_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        hints = typing.get_type_hints(function, include_extras=True).values()
    except NameError:  # a name that is imported for mypy alone; jaxtyping passes over it
        return _jaxtyped(function, typechecker=beartype)
    if any(map(_names_array, hints)):
        return _jaxtyped(function, typechecker=beartype)
    return _typed(function)


def _names_array(hint: Any) -> bool:
    own = inspect.isclass(hint) and hint.__module__.startswith("jaxtyping")
    return own or any(map(_names_array, typing.get_args(hint)))

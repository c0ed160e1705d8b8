"""Notes of fields: the strings under them in the source of a dataclass."""

import ast
import inspect
import itertools
import textwrap
import typing


def notes(cls: type) -> dict[str, str]:
    """Return the strings that follow the fields in the source of a dataclass and its bases."""
    found: dict[str, str] = {}
    for kind in reversed(cls.__mro__[:-1]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        for field, after in itertools.pairwise(typing.cast(ast.ClassDef, node).body):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                name = typing.cast(ast.Name, field.target).id
                found[name] = " ".join(str(ast.literal_eval(after.value)).split())
    return found

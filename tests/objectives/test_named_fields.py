"""Messages name fields of the section `objective` that exist."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import bert_jax
from bert_jax.objectives.config import ObjectiveConfig

PACKAGE = Path(bert_jax.__file__).parent


def messages(tree: ast.AST) -> Iterator[str]:
    """All strings and their parts, without docstrings and notes."""
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes:
            yield node.value


def test_messages_name_fields_of_the_section_that_exist():
    known = {field.name for each in ObjectiveConfig.VARIANTS.values() for field in fields(each)}
    named = {
        (path.name, name)
        for path in PACKAGE.rglob("*.py")
        for text in messages(ast.parse(path.read_text("utf-8")))
        for name in re.findall(r"\bobjective\.([a-z_]+)", text)
    }
    assert ("recurrent.py", "bidirectional") in named
    assert {(file, name) for file, name in named if name not in known} == set()

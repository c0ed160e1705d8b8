"""Docstrings and notes of fields name the thing, or say what a function does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import bert_jax

PACKAGE = Path(bert_jax.__file__).parent
DANGLING = re.compile(r"(Of|As|By|Those|Their|That|What|Whose|Which)\b")
NOTE = re.compile(r"^\s+\w+: (.*)", re.MULTILINE)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, notes of fields and constants, and notes of arguments, with their lines."""
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring
            for note in NOTE.finditer(docstring):
                line = docstring[: note.start()].count("\n")
                yield node.body[0].lineno + line, note[1]
        if isinstance(node, ast.Module | ast.ClassDef):
            for field, after in zip(node.body, node.body[1:], strict=False):
                match field, after:
                    case ast.AnnAssign() | ast.Assign(), ast.Expr(ast.Constant(str(note))):
                        yield after.lineno, note


def test_no_docstring_begins_with_a_dangling_word():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text[:60]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in texts(path.read_text(encoding="utf-8"))
        if DANGLING.match(text.lstrip())
    ]
    assert not found, "\n".join(found)


def test_the_check_sees_every_kind_of_text():
    source = '"""Of a module."""\nx: int = 1\n"""By name."""\ndef f(a):\n    """Do.\n\n    Args:\n'
    source += '        a: What it is.\n    """\n'
    assert [text for _, text in texts(source) if DANGLING.match(text)] == [
        "Of a module.", "By name.", "What it is.",
    ]  # fmt: skip

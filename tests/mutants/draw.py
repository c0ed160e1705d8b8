"""Draw one-line bugs at random, plant each, and say which share the tests do not find.

    PYTHONPATH=tests/mutants python -m pytest -p tracing --entered-by=entered -n 2
    python tests/mutants/draw.py --entered entered --number 200 --seed 1 --out drawn.jsonl

A bug changes an operator, a comparison, a condition, a constant or the order of two arguments, or
leaves a statement out. It stands in a line of a function that computes or decides: not in a text,
an error, a default or a constant of a module. Each line has the same chance, and in a line each
kind of syntax, however many bugs fit. The tests that enter the function run until one fails, first
those that enter few other functions. A bug that all of them let pass is a survivor, to be killed or
shown to be equivalent. `--out` is appended to: the same command goes on behind its last line.
"""

import argparse
import ast
import collections
import contextlib
import json
import os
import queue
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run import ROOT, copied, tested

FIRST = 25
"""Tests that run before all others that enter the function."""
_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.And: ast.Or,
    ast.Or: ast.And, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.MatMult: ast.Mult,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "argmin": "argmax",
          "argmax": "argmin", "floor": "ceil", "ceil": "floor", "sum": "max", "mean": "sum",
          "maximum": "minimum", "minimum": "maximum",
          "zeros": "ones", "ones": "zeros", "sorted": "list", "startswith": "endswith"}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A bug: one node of a function, written anew."""

    file: str
    function: str
    """Qualified name, as a test's list of functions has it."""
    line: int
    old: str
    new: str
    start: int
    """Offset of the old text in the file."""
    kind: str
    """Syntax that the bug changes, such as "Compare"."""

    def planted(self, text: str) -> str:
        """Put the bug into the text of its file."""
        assert text.startswith(self.old, self.start), f"{self.file} has changed"
        return text[: self.start] + self.new + text[self.start + len(self.old) :]


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every wrong form of a node."""
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            if type(operator) in _OPERATORS:
                operators = [*node.ops[:at], _OPERATORS[type(operator)](), *node.ops[at + 1 :]]
                yield ast.Compare(node.left, operators, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        texts = [x for x in (node.left, node.right) if isinstance(x, ast.JoinedStr | ast.Constant)
                 and isinstance(getattr(x, "value", ""), str)]  # fmt: skip
        if not texts:  # what puts texts together is a text
            yield ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
            if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod | ast.Pow):
                yield ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        yield ast.AugAssign(node.target, _OPERATORS[type(node.op)](), node.value)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(_OPERATORS[type(node.op)](), node.values)
        for at in range(len(node.values)):
            rest = node.values[:at] + node.values[at + 1 :]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)  # before int, for a bool is an int
        elif isinstance(node.value, int):
            yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
        elif isinstance(node.value, float) and node.value:
            yield ast.Constant(node.value * 2)
    elif isinstance(node, ast.Call):
        arguments = node.args
        for at in range(len(arguments) - 1):
            if not any(isinstance(x, ast.Starred) for x in arguments[at : at + 2]):
                swapped = [*arguments[:at], arguments[at + 1], arguments[at], *arguments[at + 2 :]]
                yield ast.Call(node.func, swapped, node.keywords)
        if isinstance(node.func, ast.Name) and node.func.id in _NAMES:
            yield ast.Call(ast.Name(_NAMES[node.func.id]), arguments, node.keywords)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _NAMES:
            function = ast.Attribute(node.func.value, _NAMES[node.func.attr])
            yield ast.Call(function, arguments, node.keywords)
    elif isinstance(node, ast.Slice) and node.upper is not None and node.lower is None:
        yield ast.Slice(node.upper, None, node.step)
    elif isinstance(node, ast.Continue | ast.Break) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()


def _sites(file: str, text: str) -> Iterator[Drawn]:
    """Yield every bug of a file."""
    raw = text.encode()
    lines = raw.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return len(raw[: starts[line - 1] + column].decode())

    def visit(node: ast.AST, names: tuple[str, ...], inside: bool) -> Iterator[Drawn]:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*names, node.name)
            inner = inside or not isinstance(node, ast.ClassDef)
            for child in node.body:
                yield from visit(child, names, inner)
            return
        if inside and hasattr(node, "lineno"):
            yield from written(node, names)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, names, inside)

    def written(node: Any, names: tuple[str, ...]) -> Iterator[Drawn]:
        first = offset(node.lineno, node.col_offset)
        old = text[first : offset(node.end_lineno, node.end_col_offset)]
        for change in _changes(node):
            new = ast.unparse(ast.fix_missing_locations(change))
            new = f"({new})" if isinstance(node, ast.expr) and not isinstance(
                node, ast.Constant | ast.Call | ast.Slice) else new  # fmt: skip
            yield Drawn(file, ".".join(names), node.lineno, old, new, first, type(node).__name__)

    yield from visit(ast.parse(text), (), False)


def draw(number: int, seed: int, root: Path = ROOT) -> list[Drawn]:
    """Draw bugs: a line at random, then a kind of syntax in the line, then a bug."""
    sites: dict[tuple[str, int], list[Drawn]] = collections.defaultdict(list)
    texts = {str(path.relative_to(root)): path.read_text()
             for path in sorted((root / "bert_jax").rglob("*.py"))}  # fmt: skip
    for file, text in texts.items():
        for bug in _sites(file, text):
            sites[file, bug.line].append(bug)
    chance = random.Random(seed)
    drawn: list[Drawn] = []
    for file, line in chance.sample(sorted(sites), len(sites)):
        if len(drawn) == number:
            break
        kinds: dict[str, list[Drawn]] = collections.defaultdict(list)
        for bug in sites[file, line]:
            with contextlib.suppress(SyntaxError):
                ast.parse(bug.planted(texts[file]))
                kinds[bug.kind].append(bug)
        if kinds:
            drawn.append(chance.choice(kinds[chance.choice(sorted(kinds))]))
    return drawn


def entering(directory: Path, seconds: float) -> dict[str, list[str]]:
    """Read the tests that enter each function, first those that enter the fewest functions.

    After the first `FIRST` tests, a function has those that together take `seconds` at most. A
    file's name has the tests of its functions, for functions that run when the file is imported.
    """
    rows = [json.loads(line) for path in sorted(directory.glob("*.jsonl"))
            for line in path.read_text().splitlines()]  # fmt: skip
    rows.sort(key=lambda row: (len(row["functions"]), row["seconds"]))
    tests: dict[str, list[str]] = collections.defaultdict(list)
    left: dict[str, float] = collections.defaultdict(lambda: seconds)
    for row in rows:
        for name in {*row["functions"], *(name.split(":")[0] for name in row["functions"])}:
            if len(tests[name]) >= FIRST:
                left[name] -= row["seconds"]
            if left[name] >= 0:
                tests[name].append(row["test"])
    return tests


def judge(bug: Drawn, tests: Sequence[str], tree: Path) -> str:
    """Plant a bug, run the tests that enter its function, and take the bug out again."""
    if not tests:
        return "SURVIVED: no test enters the file"
    path = tree / bug.file
    before = path.read_text()
    path.write_text(bug.planted(before))
    try:
        for some in (tests[:FIRST], tests[FIRST:]):
            verdict = tested(some, tree) if some else ""
            if verdict.startswith("pytest ended"):  # no test could be imported
                return "caught at the import"
            if verdict not in ("", "SURVIVED"):
                return verdict
        return "SURVIVED"
    finally:
        path.write_text(before)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw and plant bugs; 1 where one survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entered", type=Path, required=True, help="directory that tracing wrote")
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a line for each bug")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help=f"time of the tests after the first {FIRST}, as they were traced",
    )
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    given = parser.parse_args(argv)
    tests = entering(given.entered, given.seconds)
    done = given.out.read_text().splitlines() if given.out.exists() else []
    waiting = list(enumerate(draw(given.number, given.seed)))[len(done) :]
    verdicts = {number: json.loads(line) for number, line in enumerate(done)}
    with tempfile.TemporaryDirectory() as directory, given.out.open("a") as out:
        trees: queue.Queue[Path] = queue.Queue()
        for _ in range(given.workers):
            trees.put(copied(Path(directory)))

        def one(bug: Drawn) -> str:
            tree = trees.get()
            try:
                found = tests.get(f"{bug.file}:{bug.function}") or tests.get(bug.file, [])[:FIRST]
                return judge(bug, found, tree)
            finally:
                trees.put(tree)

        written = len(done)
        with ThreadPoolExecutor(given.workers) as pool:
            running = {pool.submit(one, bug): (number, bug) for number, bug in waiting}
            for future in as_completed(running):
                number, bug = running[future]
                row = {"verdict": future.result(), "file": bug.file, "line": bug.line,
                       "function": bug.function, "old": bug.old, "new": bug.new}  # fmt: skip
                verdicts[number] = row
                print(f"{len(verdicts)}/{given.number}  {row}", flush=True)
                while written in verdicts:  # in the order of the draw, so that a restart can go on
                    out.write(json.dumps(verdicts[written]) + "\n")
                    written += 1
                out.flush()
    rooms: dict[str, list[bool]] = collections.defaultdict(list)
    for row in verdicts.values():
        rooms[row["file"].split("/")[1]].append(not row["verdict"].startswith("caught"))
    for room, lost in sorted(rooms.items()):
        print(f"{room}: {sum(lost)} of {len(lost)} survive")
    survivors = sum(map(sum, rooms.values()))
    print(f"{survivors} of {len(verdicts)} survive")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())

"""The planted bugs of `tests/mutants` fit the code and the tests of today."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "mutants" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def planting() -> Iterator[ModuleType]:
    yield _script("run")
    del sys.modules["run"]


def test_each_bug_can_be_planted_and_names_a_test(planting):
    mutants = planting.read_mutants()
    assert len({mutant.name for mutant in mutants}) == len(mutants) > 200
    tests: dict[str, set[str]] = {}
    for mutant in mutants:
        assert not mutant.fault(), mutant.fault()
        for file, old, new in mutant.edits:
            text = (ROOT / file).read_text()
            ast.parse(text.replace(old, new))
        file, _, name = mutant.test.partition("::")
        tests.setdefault(file, set()).update({name} - {""})
    for file, names in tests.items():
        there = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text()))
                 if isinstance(node, ast.FunctionDef)}  # fmt: skip
        assert names <= there, (file, names - there)


def test_a_bug_is_caught_survives_or_is_said_not_to_fit(planting, tmp_path):
    (tmp_path / "ours.py").write_text("def double(x):\n    return 2 * x\n")
    found = "from ours import double\ndef test_double():\n    assert double(2) == 4\n"
    (tmp_path / "test_ours.py").write_text(found)

    def verdict(new: str, old: str = "2 * x", test: str = "test_ours.py::test_double") -> str:
        mutant = planting.Mutant("one", [("ours.py", old, new)], test)
        before = (tmp_path / "ours.py").read_text()
        said = planting.run_mutant(mutant, tmp_path)
        assert (tmp_path / "ours.py").read_text() == before
        return said

    assert verdict("3 * x") == "caught"
    assert verdict("x + 2") == "SURVIVED"
    assert "has it 0 times: '4 * x'" in verdict("3 * x", old="4 * x")
    assert "pytest ended with 4" in verdict("3 * x", test="test_ours.py::test_nothing")


def test_a_draw_takes_lines_that_compute_or_decide_and_judges_by_the_tests_that_enter_them(
    planting, tmp_path, monkeypatch
):
    drawing = _script("draw")
    (tmp_path / "bert_jax").mkdir()
    (tmp_path / "bert_jax" / "__init__.py").touch()
    ours = tmp_path / "bert_jax" / "ours.py"
    ours.write_text(
        "LIMIT = 3 + 4\n"
        "def larger(a, b, text='é' * 2):\n"
        "    if a < 0:\n"
        "        raise ValueError(f'{a + 1} ' + text)\n"
        "    def twice():\n"
        "        return 2 * max(a, b)\n"
        "    return twice()\n"
    )
    names = {(bug.line, bug.kind, bug.old, bug.new, bug.function)
             for seed in range(40) for bug in drawing.draw(2, seed, tmp_path)}  # fmt: skip
    assert names == {
        (3, "Compare", "a < 0", "(a <= 0)", "larger"),
        (3, "Constant", "0", "1", "larger"),
        (3, "Constant", "0", "-1", "larger"),
        (6, "BinOp", "2 * max(a, b)", "(2 / max(a, b))", "larger.twice"),
        (6, "Call", "max(a, b)", "min(a, b)", "larger.twice"),
        (6, "Call", "max(a, b)", "max(b, a)", "larger.twice"),
        (6, "Constant", "2", "3", "larger.twice"),
        (6, "Constant", "2", "1", "larger.twice"),
    }
    (tmp_path / "test_ours.py").write_text(
        "from bert_jax.ours import larger\ndef test_larger():\n    assert larger(3, 4) == 8\n"
    )
    (tmp_path / "entered").mkdir()
    (tmp_path / "entered" / "main.jsonl").write_text(
        '{"test": "test_ours.py::test_larger", "seconds": 1, "functions": ["a.py:f", "a.py:g"]}\n'
        '{"test": "test_ours.py::test_other", "seconds": 0, "functions": ["a.py:f"]}\n'
        '{"test": "test_b.py::test_slow", "seconds": 9, "functions": ["a.py:f"]}\n'
    )
    entering = drawing.entering(tmp_path / "entered", seconds=9)
    assert entering["a.py:g"] == ["test_ours.py::test_larger"]
    assert entering["a.py:f"] == [
        "test_ours.py::test_other",
        "test_b.py::test_slow",
        "test_ours.py::test_larger",
    ]
    monkeypatch.setattr(drawing, "FIRST", 1)
    shortened = drawing.entering(tmp_path / "entered", seconds=9)
    assert shortened["a.py:f"] == ["test_ours.py::test_other", "test_b.py::test_slow"]
    for new, verdict in (("(2 / max(a, b))", "caught"), ("max(b, a)", "SURVIVED")):
        sites = drawing._sites("bert_jax/ours.py", ours.read_text())
        bug = next(bug for bug in sites if bug.new == new)
        assert drawing.judge(bug, entering["a.py:g"], tmp_path) == verdict
    assert "no test enters" in drawing.judge(bug, [], tmp_path)

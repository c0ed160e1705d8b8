"""The planted bugs of `tests/mutants` fit the code and the tests of today."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def planting() -> ModuleType:
    path = ROOT / "tests" / "mutants" / "run.py"
    spec = importlib.util.spec_from_file_location("mutants_run", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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

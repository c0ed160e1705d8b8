"""The contract between the layers (pyproject.toml, [tool.importlinter])."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_imports_point_one_way() -> None:
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    # In a process of its own: it configures logging and with that disables our loggers.
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_names_are_compared_in_one_place() -> None:
    """`errors.nearest` bounds the work, which for difflib grows without end."""
    found = [p for p in (ROOT / "bert_jax").rglob("*.py") if "difflib" in p.read_text()]
    assert found == [ROOT / "bert_jax" / "errors.py"]


def test_no_file_has_a_name_that_says_nothing() -> None:
    names = {"utils", "util", "common", "base", "helpers", "misc"}
    files = [p for top in ("bert_jax", "configs", "benchmarks") for p in (ROOT / top).rglob("*.py")]
    assert files
    assert not [p for p in files if p.stem in names]

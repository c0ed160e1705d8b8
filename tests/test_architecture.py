"""The contract between the layers (pyproject.toml, [tool.importlinter])."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_imports_point_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = pytest.importorskip("importlinter.cli", reason="import-linter is not installed")
    monkeypatch.chdir(ROOT)
    assert cli.lint_imports(no_cache=True) == 0


def test_no_file_has_a_name_that_says_nothing() -> None:
    names = {"utils", "util", "common", "base", "helpers", "misc"}
    files = [p for top in ("bert_jax", "configs", "benchmarks") for p in (ROOT / top).rglob("*.py")]
    assert files
    assert not [p for p in files if p.stem in names]

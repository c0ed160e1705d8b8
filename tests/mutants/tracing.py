"""A plugin of pytest that notes the functions of `bert_jax` that each test enters.

    PYTHONPATH=tests/mutants python -m pytest -p tracing --entered-by=entered

Each worker writes a file below the named directory: a line for a test, with its seconds and its
functions as `file:qualified name`. `draw.py` plants a bug and runs the tests that enter its
function.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = str(ROOT / "bert_jax") + os.sep
_entered: set[CodeType] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--entered-by", type=Path, help="directory for the functions of each test")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse records of an earlier run, whose tests may be gone."""
    directory = config.getoption("--entered-by")
    is_first = "PYTEST_XDIST_WORKER" not in os.environ
    if directory is not None and is_first and any(directory.glob("*.jsonl")):
        raise pytest.UsageError(f"{directory} has the records of another run: name a new directory")


def _note(frame: FrameType, event: str, value: object) -> None:
    """Note the function of a frame; lines are not traced, for no local function is returned."""
    code = frame.f_code
    if code not in _entered and code.co_filename.startswith(_PACKAGE):
        _entered.add(code)


def _functions() -> list[str]:
    root = len(str(ROOT)) + 1
    named = {(code.co_filename[root:], code.co_qualname) for code in _entered}
    return sorted(f"{file}:{name.replace('.<locals>', '')}" for file, name in named)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    directory = item.config.getoption("--entered-by")
    if directory is None:
        return (yield)
    _entered.clear()
    began = time.perf_counter()
    sys.settrace(_note)
    threading.settrace(_note)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        row = {
            "test": item.nodeid,
            "seconds": round(time.perf_counter() - began, 2),
            "functions": _functions(),
        }
        directory.mkdir(parents=True, exist_ok=True)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        with (directory / f"{worker}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

"""The page of exits: each architecture, kind of task and format is proven, or refused in advance.

To write the page anew, prove all cells:

    BERT_JAX_WRITE=1 .venv/bin/python -m pytest -n 0 -m slow tests/artefacts/exchange/test_exits.py
"""

import os
from pathlib import Path

import pytest
from exits import ARCHITECTURES, planned, proven, section

pytest.importorskip("onnxruntime")
PAGE = Path(__file__).parents[3] / "docs" / "exits.md"


def test_the_page_says_what_refuses_a_run_before_it_trains(tmp_path):
    text = PAGE.read_text()
    for name in ARCHITECTURES:
        assert section(name, planned(name, tmp_path / name)) in text


@pytest.mark.parametrize(("name", "tasks"), [("BERT", ["class"]), ("Recurrent seq2seq", ["class"])])
def test_what_trains_leaves_by_every_exit(name, tasks, tmp_path):
    rows = proven(name, tmp_path, tasks)
    before = planned(name, tmp_path / "planned")
    assert rows == {row: before[row] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_page_says_what_was_proven(name, tmp_path):
    text = section(name, proven(name, tmp_path))
    if os.environ.get("BERT_JAX_WRITE"):
        page = PAGE.read_text()
        before, here, after = page.partition(f"## {name}\n")
        PAGE.write_text(f"{before}{text}\n{here and after[after.index('## ') :]}")
    assert text in PAGE.read_text()

"""The page of exits: each architecture, kind of task and format is proven, or refused in advance.

To write the page anew, and prove what it says:

    BERT_JAX_CHAOS=1 BERT_JAX_WRITE=1 .venv/bin/python -m pytest -n 0 -m "" \\
        tests/artefacts/exchange/test_exits.py

BERT_JAX_CHAOS=1 proves all rows. Otherwise the slow tests prove a third of them, always the same,
which has every architecture and every kind of task.
"""

import functools
import os
from pathlib import Path

import pytest
from exits import ARCHITECTURES, TASKS, finetuned, planned, pretrained, proven, section

pytest.importorskip("onnxruntime")
PAGE = Path(__file__).parents[3] / "docs" / "exits.md"
KINDS = ("pretraining", *TASKS)
ROWS = [(name, task) for name in ARCHITECTURES for task in KINDS]
DAILY = [
    (name, task) for name in ("BERT", "Recurrent seq2seq") for task in ("pretraining", "class")
]
if os.environ.get("BERT_JAX_CHAOS") != "1":
    third = [(name, task) for n, name in enumerate(ARCHITECTURES) for task in KINDS[n % 3 :: 3]]
    ROWS = [*DAILY, *(row for row in third if row not in DAILY)]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The table of an architecture, before anything has trained."""
    return functools.cache(lambda name: planned(name, tmp_path_factory.mktemp("plan")))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A pretrained model of an architecture."""
    return functools.cache(lambda name: pretrained(name, tmp_path_factory.mktemp("base")))


def test_the_page_says_what_refuses_a_run_before_it_trains(plan):
    sections = "\n".join(section(name, plan(name)) for name in ARCHITECTURES)
    if os.environ.get("BERT_JAX_WRITE"):
        text = PAGE.read_text()
        first, last = (text.index(f"## {title}\n") for title in (next(iter(ARCHITECTURES)), "Next"))
        PAGE.write_text(f"{text[:first]}{sections}\n{text[last:]}")
    assert sections in PAGE.read_text()


@pytest.mark.parametrize(
    ("name", "task"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (row not in DAILY)) for row in ROWS],
)
def test_each_run_leaves_as_the_page_says(name, task, plan, base, tmp_path):
    run = base(name) if task == "pretraining" else finetuned(task, base(name), tmp_path)
    rows = proven(run, base(name))
    assert rows
    assert rows == {row: plan(name)[row] for row in rows}

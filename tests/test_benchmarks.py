"""The benchmarks for accelerators run on a CPU, in their tiny form."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attention_says_that_it_needs_an_accelerator():
    assert "needs an accelerator" in run("attention.py")


def test_attention_smoke():
    rows = run("attention.py", "--smoke").splitlines()[2:]
    assert [row.split()[4:6] for row in rows] == [
        ["0.0", "xla"], ["0.0", "fused"], ["0.1", "xla"], ["0.1", "fused"],
    ]  # fmt: skip


@pytest.mark.slow
def test_gpu_train_step_smoke_of_our_side():
    rows = run("train_step.py", "--device=gpu", "--smoke", "--ours-only").splitlines()
    assert rows[0].startswith("bfloat16 matmul:")
    assert rows[2].split()[:4] == ["smoke", "32", "bert_jax", "2"]


@pytest.mark.parity
def test_gpu_train_step_smoke():
    rows = run("train_step.py", "--device=gpu", "--smoke").splitlines()[2:]
    assert [row.split()[2] for row in rows] == ["bert_jax", "transformers", "gathered"]

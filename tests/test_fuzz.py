"""Damaged files of every kind are read or refused, in bounded memory: nothing else happens.

Briefly by default, for some minutes where the environment has BERT_JAX_CHAOS=1.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_readers import READERS

LONG = os.environ.get("BERT_JAX_CHAOS") == "1"
EXAMPLES = 2000 if LONG else 150
OPTIONAL = {"parquet": "pyarrow"}


@pytest.mark.parametrize("name", READERS)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name], reason=f"{OPTIONAL[name]} is not installed")
    (tmp_path / "in").mkdir()
    child = subprocess.run(
        [sys.executable, "-W", "error", Path(__file__).parent / "support" / "fuzz_readers.py", name,
         tmp_path / "in", str(EXAMPLES)],
        capture_output=True,
        text=True,
        timeout=1200 if LONG else 300,
        # Allocators that reserve address space by the gigabyte would meet the limit at once.
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2",
             "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    what = f"exit status {child.returncode}; the input is {tmp_path / 'in' / READERS[name].file}"
    assert child.returncode == 0, f"{what}\n{child.stdout[-2000:]}\n{child.stderr[-6000:]}"

"""Damaged files of every kind are read or refused, in bounded memory: nothing else happens.

Briefly by default, for some minutes where the environment has BERT_JAX_CHAOS=1.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_readers import READERS

LONG = os.environ.get("BERT_JAX_CHAOS") == "1"
EXAMPLES = 2000 if LONG else 150
OPTIONAL = {"parquet": "pyarrow"}


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen]:
    """Process that forks one for each reader."""
    script = Path(__file__).parent / "support" / "fuzz_readers.py"
    with subprocess.Popen(
        [sys.executable, "-W", "error", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        # Allocators that reserve address space by the gigabyte would meet the limit at once.
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2",
             "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        yield process


@pytest.mark.parametrize("name", READERS)
def test_damaged_files(name: str, tmp_path: Path, server: subprocess.Popen) -> None:
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name], reason=f"{OPTIONAL[name]} is not installed")
    where = tmp_path / "in"
    where.mkdir()
    print(json.dumps([name, str(where), EXAMPLES]), file=server.stdin, flush=True)
    if not select.select([server.stdout], [], [], 1200 if LONG else 300)[0]:
        os.killpg(server.pid, signal.SIGKILL)
    status = server.stdout.readline().strip() or "none: it was stopped"
    what = f"exit status {status}; the input is {where / READERS[name].file}"
    assert status == "0", f"{what}\n{Path(f'{where}.output').read_text(errors='replace')[-8000:]}"

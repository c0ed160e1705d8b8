"""Memory that a step frees is reused by the next step, so that no page is cleared again."""

import os
import platform
import statistics
import subprocess
import sys
from itertools import pairwise

import pytest

CODE = """
import ctypes, resource, sys
from bert_jax.cli import kept_pages

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: faults count pages of one size

if sys.argv[1] == "accelerator":
    kept_pages._ACCELERATORS = ("/dev/null",)
else:
    kept_pages._ACCELERATORS = ()
kept_pages.keep_pages()

import jax
import jax.numpy as jnp

x, wide, narrow = (jnp.ones(shape) for shape in ((4096, 16), (16, 6000), (6000, 16)))
step = jax.jit(lambda x: jnp.tanh(x @ wide) @ narrow)  # 98 MB between the two products
counts = []
for _ in range(25):
    jax.block_until_ready(step(x))
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(*counts)
"""


def faults(machine: str, **settings: str) -> float:
    """Return the median number of page faults of the later steps.

    Now and then a step needs more: small arrays lie in the place of its large ones.
    """
    environment = {name: x for name, x in os.environ.items() if not name.startswith("MALLOC_")}
    environment |= {"JAX_PLATFORMS": "cpu", **settings}
    command = [sys.executable, "-c", CODE, machine]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    counts = list(map(int, done.stdout.split()))
    return statistics.median(after - before for before, after in pairwise(counts[5:]))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_step_takes_its_memory_from_earlier_steps() -> None:
    pages = 4096 * 6000 * 4 / os.sysconf("SC_PAGE_SIZE")
    assert faults("cpu") < 0.01 * pages
    assert faults("accelerator") > 0.9 * pages  # unchanged, which also shows the effect
    assert faults("cpu", MALLOC_TRIM_THRESHOLD_="131072") > 0.9 * pages

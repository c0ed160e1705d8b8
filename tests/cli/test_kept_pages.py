"""Memory that a step frees is reused by the next step, so that no page is cleared again."""

import os
import platform
import subprocess
import sys

import pytest

STEPS = 8
CODE = f"""
import resource, sys
from bert_jax.cli import kept_pages

if sys.argv[1] == "accelerator":
    kept_pages._ACCELERATORS = ("/dev/null",)
else:
    kept_pages._ACCELERATORS = ()
kept_pages.keep_pages()

import jax
import jax.numpy as jnp

wide, narrow = jnp.ones((16, 4096)), jnp.ones((4096, 16))
step = jax.jit(lambda x: jnp.tanh(x @ wide) @ narrow)  # 64 MB between the two products
for _ in range(20):  # in the first steps, small arrays find their places
    jax.block_until_ready(step(narrow))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    jax.block_until_ready(step(narrow))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(machine: str, **settings: str) -> float:
    """Return the number of page faults of a step."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("MALLOC_")}
    environment |= {"JAX_PLATFORMS": "cpu", **settings}
    command = [sys.executable, "-c", CODE, machine]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout) / STEPS


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_step_takes_its_memory_from_earlier_steps() -> None:
    pages = 4096 * 4096 * 4 / os.sysconf("SC_PAGE_SIZE")
    assert faults("cpu") < 0.01 * pages
    assert faults("accelerator") > 0.9 * pages  # unchanged, which also shows the effect
    assert faults("cpu", MALLOC_TRIM_THRESHOLD_="131072") > 0.9 * pages

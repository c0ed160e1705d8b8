"""Test set-up: fake devices, run-time shape checks, and where real data lies."""

import gc
import os
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Most of the tests' time is XLA's: unoptimised machine code takes half of it to make. What the
# tests look at (values, partitioning, donation) is decided before that stage.
jax.config.update("jax_disable_most_optimizations", True)

# Programs and their traces are a million objects that stay; looking through them for what may go
# took 6% of the time of the tests of model, finetune and checkpoint.
gc.set_threshold(100_000, 20, 100)

# Every public signature's shapes and dtypes are checked while tests run, and only then.
install_import_hook("bert_jax", "beartype.beartype")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Directory of real corpora, named by BERT_JAX_DATA; tests that need it skip without it."""
    where = os.environ.get("BERT_JAX_DATA", "")
    if not where or not Path(where).is_dir():
        pytest.skip("BERT_JAX_DATA does not name a directory of real data")
    return Path(where)

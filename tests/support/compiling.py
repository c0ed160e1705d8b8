"""Flags of XLA in the tests, here and in child processes."""

import os

import jax

_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def xla_flags() -> str:
    """Those of the environment; with an older jaxlib, which has them, two that compile faster.

    The older emitters of loops make less code; one module in place of 32 saves a tenth more.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{flags} {_FLAGS}".strip() if jax.__version_info__ < (0, 11) else flags


def same_bits() -> dict[str, str]:
    """Environment of a child process that computes what this process does, to the last bit."""
    return os.environ | {"XLA_FLAGS": xla_flags()}

"""Flags of XLA in the tests, here and in child processes."""

import os

import jax

_FLAG = "--xla_cpu_use_fusion_emitters=false"


def xla_flags() -> str:
    """Those of the environment, and the older emitters of loops where jaxlib still has them."""
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{flags} {_FLAG}".strip() if jax.__version_info__ < (0, 11) else flags


def same_bits() -> dict[str, str]:
    """Environment of a child process that computes what this process does, to the last bit."""
    return os.environ | {"XLA_FLAGS": xla_flags()}

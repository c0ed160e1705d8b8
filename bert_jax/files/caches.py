"""Directories of caches, for files that can be made or fetched again."""

import os
from pathlib import Path


def cache_directory(name: str) -> Path:
    """Return the default directory of a cache, which is under XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bert_jax" / name

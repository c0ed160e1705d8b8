"""A cache on disk for compiled programs, so that a command that starts again compiles nothing."""

import hashlib
import itertools
import os
import platform
from contextlib import suppress
from pathlib import Path

from bert_jax.files.caches import cache_directory

_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_MAX_BYTES = 4 << 30


def keep_programs(cpu_info: Path = Path("/proc/cpuinfo")) -> None:
    """Set the cache variables of JAX that are not set yet. Call this before JAX is imported.

    The cache is in a subdirectory of XDG_CACHE_HOME or ~/.cache for each set of processor features,
    since processors may share a home directory. It keeps the most recently used 4 GiB. To turn it
    off, set JAX_COMPILATION_CACHE_DIR to an empty string.

    XLA refuses its own cached programs, with an error message for each, on processors with gather
    data sampling ("gds"; https://github.com/jax-ml/jax/issues/38445), so the cache stays off there.
    """
    if _VARIABLE in os.environ:
        return
    features, bugs = platform.machine(), ""
    with suppress(OSError), cpu_info.open() as lines:
        for line in itertools.takewhile(str.strip, lines):  # the first processor
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                features = value
            elif name.strip() == "bugs":
                bugs = value
    if "gds" in bugs.split():
        return
    kind = hashlib.sha256(features.encode()).hexdigest()[:12]
    directory = cache_directory("programs") / kind
    with suppress(OSError):  # without a cache, programs are compiled again
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            os.environ[_VARIABLE] = str(directory)
            os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(_MAX_BYTES))

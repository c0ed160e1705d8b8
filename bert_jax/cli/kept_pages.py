"""Settings of glibc's allocator under which steps on a CPU reuse the memory of earlier steps."""

import ctypes
import glob
import os

_ACCELERATORS = "/dev/nvidia*", "/dev/kfd", "/dev/accel*", "/dev/vfio/*"
_SETTINGS = {-1: 2**31 - 1, -4: 0, -8: 1}
"""Values by the numbers of M_TRIM_THRESHOLD, M_MMAP_MAX and M_ARENA_MAX in malloc.h."""


def keep_pages() -> None:
    """Have glibc keep freed memory. Call this before JAX starts its threads.

    XLA on CPU allocates the temporary arrays of every step anew. By default, glibc gets the memory
    from the kernel and returns it, and the kernel clears each page again: 95 MB a step, a third of
    the time, with 2 layers of width 128 (docs/experiments.md). All three settings are needed.

    Nothing changes without glibc, or if the user has set variables of its allocator. Nothing
    changes with an accelerator either, because its steps do not use the host's memory.
    """
    given = [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    if given or any(map(glob.glob, _ACCELERATORS)):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        for number, value in _SETTINGS.items():
            libc.mallopt(number, value)

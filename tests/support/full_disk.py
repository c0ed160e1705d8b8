"""Full disks: a limit on the size of files in this process, and a small disk for another one."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_MOUNT = 'mount -t tmpfs -o size=256k tmpfs "$1" && exec "$2" "$3" "$1"'
_LIMIT = 'ulimit -S -f 64 && exec "$2" "$3" "$1"'  # blocks of 512 or 1024 bytes


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A write beyond it takes what fits, and the next one fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_on_small_disk(script: str, directory: Path) -> subprocess.CompletedProcess:
    """Runs Python code whose `sys.argv[1]` is a directory on a disk of 256 KiB.

    The disk is seen by that process alone. Where none can be mounted, files have a limit of 32 or
    64 KiB.
    """
    disk, file = directory / "disk", directory / "script.py"
    disk.mkdir()
    file.write_text(script)
    for prefix, shell in ((["unshare", "-rm"], _MOUNT), (["unshare", "-m"], _MOUNT), ([], _LIMIT)):
        tried = [*prefix, "sh", "-c", shell, "sh", str(disk), sys.executable]
        if prefix and not shutil.which(prefix[0]):
            continue
        if subprocess.run([*tried, "/dev/null"], capture_output=True).returncode == 0:
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            return subprocess.run(
                [*tried, str(file)], capture_output=True, text=True, timeout=300, env=environment
            )
    pytest.skip("neither a disk can be mounted nor the size of files limited here")

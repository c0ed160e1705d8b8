"""Servers that stand for a store of objects, each in a process of its own."""

import contextlib
import runpy
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

free_port = runpy.run_path(str(Path(__file__).parents[2] / "launch" / "local.py"))["_free_port"]
"""Return a port that stays free until it is used."""


@contextlib.contextmanager
def serving(
    script: str, log: Path, use: Callable[[pytest.MonkeyPatch, str], None], *options: str,
    probe: str = "",
) -> Iterator[str]:  # fmt: skip
    """Run a server, and let this process and its children use it; yield its address.

    Args:
        script: File to run, with a port of 127.0.0.1 and `options` as arguments.
        log: Where what it prints goes.
        use: Function that sets the environment for an address.
        probe: Path of a page that answers as soon as the server is ready.
    """
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with log.open("wb") as output, pytest.MonkeyPatch.context() as patch:
        use(patch, address)
        for name in ("no_proxy", "NO_PROXY"):
            patch.setenv(name, "127.0.0.1,localhost")
        process = subprocess.Popen(
            [sys.executable, script, str(port), *options], stdout=output, stderr=output
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"{address}{probe}").close()
                    break
                time.sleep(0.05)
            assert process.poll() is None, log.read_text()
            yield address
        finally:
            process.terminate()
            process.wait()

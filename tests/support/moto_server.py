"""S3 as moto emulates it, beside our own emulator: a judge that does not share our errors.

Usage: python moto_server.py PORT

Writes keep their conditions: moto 5.2.5 honours If-None-Match and If-Match. Listings come in pages
of three objects, so that no directory fits in one.
"""

import contextlib
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulators import serving
from s3_emulator import use_s3


@contextlib.contextmanager
def running_moto(log: Path) -> Iterator[str]:
    """Run moto's server in a process of its own, with an empty s3://bucket; yield its address."""
    pytest.importorskip("moto", reason="moto is not installed")
    with serving(__file__, log, use_s3, probe="/moto-api/") as address:
        bucket = urllib.request.Request(f"{address}/bucket", method="PUT")
        urllib.request.urlopen(bucket).close()
        yield address


if __name__ == "__main__":
    from moto.server import main

    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = "3"
    main(["--host=127.0.0.1", f"--port={sys.argv[1]}"])

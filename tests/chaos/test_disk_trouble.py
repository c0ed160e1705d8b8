"""A disk that is full, read-only or gone: training goes on, says so, and saves when it can."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chaos_run import child_environ
from small_run import write_corpus

_MOUNT = 'mount -t tmpfs -o size=16m tmpfs "$0" && exec "$@"'


@pytest.mark.slow
def test_the_disk_of_a_run(tmp_path, cache):
    disk = tmp_path / "disk"
    disk.mkdir()
    write_corpus(tmp_path / "corpus")
    script = Path(__file__).parents[1] / "support" / "disk_trouble.py"
    command = [sys.executable, script, disk, tmp_path / "corpus"]
    for own in (["unshare", "-rm"], ["unshare", "-m"]):
        inside = [*own, "sh", "-c", _MOUNT, disk]
        if shutil.which(own[0]) and subprocess.run([*inside, "true"]).returncode == 0:
            break
    else:
        pytest.skip("no disk can be mounted here")
    done = subprocess.run(
        [*inside, *command], env=child_environ(cache), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    print(done.stdout[-2000:])

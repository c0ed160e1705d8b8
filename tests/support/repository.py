"""Git repositories of tests, whatever the developer's configuration of git says."""

import os
import subprocess
from pathlib import Path


def commit_all(home: Path) -> None:
    """Make a repository of a directory, with one commit that has all files."""
    configuration = dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(home)]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "A page"]):
        subprocess.run([*git, *command], check=True, env=os.environ | configuration)

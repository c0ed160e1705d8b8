"""Headings of a demo, and commands that work in the shell that started the demo."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

NUM_PARTS = 5
"""Number of parts of every demo."""


def heading(number: int, title: str) -> None:
    """Print the heading of a part."""
    print(f"\n[{number}/{NUM_PARTS}] {title}", flush=True)


def print_commands(commands: Sequence[Sequence[str]]) -> None:
    """Print commands to try next: the arguments of `bert-jax`, one command a line."""
    print("\nNext, to try:\n")
    for line in command_lines(commands):
        print(f"  {line}")


def command_lines(commands: Sequence[Sequence[str]]) -> list[str]:
    """Return shell commands that work where the demo was started."""
    return [shlex.join([*_program(), *arguments]) for arguments in commands]


def _program() -> list[str]:
    """Name this environment's `bert-jax` for a shell that may not have activated it."""
    script = Path(sys.executable).with_name("bert-jax")
    found = shutil.which("bert-jax")
    if found is not None and script.exists() and Path(found).samefile(script):
        return ["bert-jax"]
    if script.exists():
        here = Path.cwd()
        return [str(script.relative_to(here) if script.is_relative_to(here) else script)]
    return [sys.executable, "-m", "bert_jax.cli"]

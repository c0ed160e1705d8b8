"""Run the commands of pages as they are written, and compare what they print with the page.

    python tests/pages/run.py docs/recipes/own_text.md             # make recipes: all of them
    python tests/pages/run.py docs/recipes/own_text.md --write     # put the new numbers on the page
    python tests/pages/run.py README.md --give my=DIR              # make walk

A page is run in a fresh clone of the last commit, in one shell, from top to bottom. Blocks marked
`bash` and `python` are run; a block marked `text` is what the block directly before it prints.
Printed lines are compared without their numbers; `...` stands for any lines. Other blocks are not
run, nor is a block below the comment `<!-- not run: REASON -->`. A page that says
`<!-- needs: data -->` is skipped where BERT_JAX_DATA is not set. `--give NAME=PATH` links PATH into
the clone first.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CLONES = ROOT / "work" / "pages"
FENCE = re.compile(
    r"(?P<skip><!-- not run: [^\n]*-->\n+)?^```(?P<kind>[^`\n]*)\n(?P<text>.*?)^```$", re.M | re.S
)
_BEGINS, _FAILED = "@@ block ", "@@ failed "
_NUMBER = r"[-+]?\d(?:[\d,.]*\d)?(?:e[-+]?\d+)?"
_TIME = rf"{_NUMBER} (?:h|min|s|ms|hours?|minutes?|seconds?)\b"
# What `make` and an environment that is on would hand to a page that makes its own environment.
_INHERITED = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHONHOME", "PYTHONPATH", "VENV", "VIRTUAL_ENV")


class Block(NamedTuple):
    """A command block of a page, and what the page says that it prints."""

    kind: str
    commands: str
    line: int
    """Line of the page on which the block's fence is."""
    prints: str = ""
    """Text of the block `text` that follows; empty: the page does not say."""
    place: int = 0
    """Where that text begins in the page."""


def blocks(page: str) -> list[Block]:
    """Find the blocks that are run."""
    found: list[Block] = []
    follows = False
    for match in FENCE.finditer(page):
        kind, text, place = match["kind"].strip(), match["text"], match.start("text")
        if kind == "text" and follows:
            found[-1] = found[-1]._replace(prints=text, place=place)
        follows = kind in ("bash", "python") and not match["skip"]
        if follows:
            found.append(Block(kind, text, page.count("\n", 0, place)))
    return found


def script(found: Sequence[Block]) -> str:
    """Write a shell script of all blocks, in which a mark precedes the output of each."""
    parts = ["set -eo pipefail", f"trap 'echo; echo \"{_FAILED}$BASH_COMMAND\"' ERR"]
    for number, block in enumerate(found):
        parts.append(f"echo '{_BEGINS}{number}'")
        python = f"python - <<'PYTHON_BLOCK'\n{block.commands}PYTHON_BLOCK"
        parts.append(python if block.kind == "python" else block.commands)
    return "\n".join(parts) + "\n"


def blind(line: str) -> str:
    """Replace times and numbers, and runs of spaces."""
    line = re.sub(rf"{_TIME}(?: {_TIME})*", "#", line)
    return re.sub(r"\s+", " ", re.sub(_NUMBER, "#", line)).strip()


def refreshed(expected: str, printed: str) -> tuple[str, list[str]]:
    """Put printed numbers into the expected lines; return the lines that were not printed, too.

    The first expected line may be anywhere. Each other line must follow directly after the one
    before it, or anywhere after `...`.
    """
    lines, at, anywhere, made, missing = printed.splitlines(), 0, True, [], []
    for line in expected.splitlines():
        if line.strip() == "...":
            made.append(line)
            anywhere = True
            continue
        end = len(lines) if anywhere else min(at + 1, len(lines))
        place = next((n for n in range(at, end) if blind(lines[n]) == blind(line)), None)
        if place is None:
            missing.append(line)
            made.append(line)
            anywhere = True  # only this line is missing; those after it are looked for
        else:
            made.append(lines[place].rstrip())
            at, anywhere = place + 1, False
    return "".join(f"{line}\n" for line in made), missing


def environment(found: Sequence[Block], clone: Path) -> dict[str, str]:
    """Return the variables of a page: this Python and the clone's package, unless it makes its own.

    A page with `make demo` installs an environment of its own, so nothing of this one is left.
    """
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for name in _INHERITED:
        variables.pop(name, None)
    if not any("make demo" in block.commands for block in found):
        variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables["PYTHONPATH"] = str(clone)
    return variables


def clone_to(name: str) -> Path:
    """Clone the last commit into a fresh directory."""
    clone = CLONES / name
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    return clone


def run_page(page: Path, gifts: dict[str, Path], write: bool) -> list[str]:
    """Run a page, report minutes, and return what is wrong with it."""
    text = page.read_text("utf-8")
    found = blocks(text)
    if "<!-- needs: data -->" in text and not os.environ.get("BERT_JAX_DATA"):
        print(f"{page.name}: skipped, BERT_JAX_DATA is not set")
        return []
    clone = clone_to(page.stem)
    for name, path in gifts.items():
        (clone / name).symlink_to(path.resolve(strict=True))
    outputs, problem = run_blocks(found, clone)
    if problem:
        return [f"{page}:{found[len(outputs) - 1].line}: {problem}"]
    new, missing = compared(text, list(zip(found, outputs, strict=True)))
    problems = [f"{page}:{block.line}: does not print {line!r}" for block, line in missing]
    if write and page.read_text("utf-8") != text:
        problems.append(f"{page}: it changed while it was run, and is not written")
    elif write:
        page.write_text(new, "utf-8")
    return problems


def run_blocks(found: Sequence[Block], clone: Path) -> tuple[list[str], str]:
    """Run blocks in a shell; return what each block printed, and the last block's failure."""
    began, failed = time.monotonic(), ""
    outputs: list[str] = []
    with subprocess.Popen(
        ["bash", "-c", script(found)], cwd=clone, env=environment(found, clone), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_FAILED):
                failed = line.removeprefix(_FAILED).strip()
                continue
            rest, mark, _ = line.partition(_BEGINS)  # the last line of a block may be without end
            if rest:
                outputs[-1] += rest
                print(f"    {rest.rstrip()}", flush=True)
            if mark:
                commands = found[len(outputs)].commands.rstrip()
                print(f"[{time.monotonic() - began:6.0f} s] {commands}", flush=True)
                outputs.append("")
    if process.returncode:
        return outputs, f"exit code {process.returncode}: {failed}"
    print(f"{clone.name}: {(time.monotonic() - began) / 60:.1f} minutes")
    return outputs, ""


def compared(
    text: str, printed: Sequence[tuple[Block, str]]
) -> tuple[str, list[tuple[Block, str]]]:
    """Return a page with the new numbers, and the lines of each block that were not printed."""
    problems: list[tuple[Block, str]] = []
    for block, output in reversed(printed):  # from the end, so that places stay
        new, missing = refreshed(block.prints, output)
        text = text[: block.place] + new + text[block.place + len(block.prints) :]
        problems[:0] = [(block, line) for line in missing]
    return text, problems


def main() -> int:
    """Run the pages; end with 1 if a command failed or a line was not printed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="put new numbers on the page")
    parser.add_argument("--give", action="append", default=[], metavar="NAME=PATH")
    options = parser.parse_args()
    gifts = {name: Path(path) for name, _, path in (each.partition("=") for each in options.give)}
    problems = []
    for page in options.pages:
        problems += run_page(page, gifts, options.write)
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

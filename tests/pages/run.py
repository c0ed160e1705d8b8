"""Run the commands of pages as they are written, and compare what they print with the page.

    python tests/pages/run.py docs/recipes/own_text.md             # make recipes: all of them
    python tests/pages/run.py docs/recipes/own_text.md --write     # put the new numbers on the page
    python tests/pages/run.py README.md --give my=DIR              # make walk

A page is run in a fresh clone of the last commit, in one shell, from top to bottom. Blocks marked
`bash` and `python` are run; a block marked `text` is what the block before it prints. Printed lines
are compared without their numbers; `...` stands for any lines. Other blocks are not run, nor is a
block below the comment `<!-- not run: REASON -->`. A page that says `<!-- needs: data -->` is
skipped where BERT_JAX_DATA is not set. `--give NAME=PATH` links PATH into the clone first.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"(?P<skip><!-- not run: [^\n]*-->\n+)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_MARK = "@@ block "
_NUMBER = r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?"
_TIME = rf"{_NUMBER} (?:h|min|s|ms|hours?|minutes?|seconds?)\b"


class Block(NamedTuple):
    """A command block of a page, and what the page says that it prints."""

    kind: str
    commands: str
    prints: str
    """Text of the block `text` that follows; empty: the page does not say."""
    line: int


def blocks(page: str) -> list[Block]:
    """Find the blocks that are run."""
    found: list[Block] = []
    previous = None
    for match in _FENCE.finditer(page):
        kind, text = match["kind"], match["text"]
        if kind in ("bash", "python"):
            previous = None
            if not match["skip"]:
                line = page.count("\n", 0, match.start("text"))
                previous = len(found)
                found.append(Block(kind, text, "", line))
        elif kind == "text" and previous is not None:
            found[previous] = found[previous]._replace(prints=text)
            previous = None
    return found


def script(found: list[Block]) -> str:
    """Write a shell script of all blocks, in which a mark precedes the output of each."""
    parts = ["set -eo pipefail"]
    for number, block in enumerate(found):
        parts.append(f"echo '{_MARK}{number}'")
        python = f"python - <<'PYTHON_BLOCK'\n{block.commands}PYTHON_BLOCK"
        parts.append(python if block.kind == "python" else block.commands)
    return "\n".join(parts) + "\n"


def blind(line: str) -> str:
    """Replace times and numbers, and runs of spaces."""
    line = re.sub(rf"{_TIME}(?: {_TIME})*", "#", line)
    return re.sub(r"\s+", " ", re.sub(_NUMBER, "#", line)).strip()


def refreshed(expected: str, printed: str) -> tuple[str, list[str]]:
    """Put printed numbers into the expected lines; return the lines that were not printed, too.

    Each expected line must follow, in order, directly after the one before it or after `...`.
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
        else:
            made.append(lines[place].rstrip())
            at, anywhere = place + 1, False
    return "".join(f"{line}\n" for line in made), missing


def run_page(page: Path, gifts: dict[str, Path], write: bool, keep: Path) -> list[str]:
    """Run a page, report minutes, and return what is wrong with it."""
    text = page.read_text("utf-8")
    found = blocks(text)
    if "<!-- needs: data -->" in text and not os.environ.get("BERT_JAX_DATA"):
        print(f"{page.name}: skipped, BERT_JAX_DATA is not set")
        return []
    shutil.rmtree(keep, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(keep)], check=True)
    for name, path in gifts.items():
        (keep / name).symlink_to(path.resolve())
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if not any("make demo" in block.commands for block in found):  # else the page installs
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment["PYTHONPATH"] = str(keep)
    began, outputs = time.monotonic(), [""] * len(found)
    process = subprocess.Popen(
        ["bash", "-c", script(found)], cwd=keep, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    number = 0
    for line in process.stdout:
        if line.startswith(_MARK):
            number = int(line[len(_MARK) :])
            print(f"[{time.monotonic() - began:6.0f} s] {found[number].commands.rstrip()}")
        else:
            outputs[number] += line
            print(f"    {line}", end="", flush=True)
    if code := process.wait():
        where = f"{page}:{found[number].line}"
        return [f"{where}: the commands end with exit code {code}"]
    print(f"{page.name}: {(time.monotonic() - began) / 60:.1f} minutes")
    problems = []
    for block, printed in zip(found, outputs, strict=True):
        new, missing = refreshed(block.prints, printed)
        problems += [f"{page}:{block.line}: does not print {line!r}" for line in missing]
        text = text.replace(f"```text\n{block.prints}```", f"```text\n{new}```")
    if write:
        page.write_text(text, "utf-8")
    return problems


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
        problems += run_page(page, gifts, options.write, ROOT / "work" / "pages" / page.stem)
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

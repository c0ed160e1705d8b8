"""Plant one-line bugs, one at a time, and require that a test finds each.

    python tests/mutants/run.py                           all of them
    python tests/mutants/run.py --since HEAD~1            in files that have changed since a commit
    python tests/mutants/run.py --files bert_jax/data/    in a file or below a folder

`mutants.jsonl` has a bug in each line: `name`, `edits` as [file, old text, new text], and `test`,
the test that must fail. Old text stands exactly once in its file (`tests/test_mutants.py`); whoever
changes that line changes the bug with it. Each bug is planted in a copy of the repository.
"""

import argparse
import atexit
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).parent / "mutants.jsonl"
_FAILED = 1
"""Exit code of pytest where a test failed; others say that nothing was tested."""
_servers = threading.local()
"""Server of forks of each thread."""


@dataclass(frozen=True)
class Mutant:
    """A bug of one line, or of lines that only together are one."""

    name: str
    edits: Sequence[tuple[str, str, str]]
    """File, old text and new text."""
    test: str
    """Node of pytest that must fail."""
    about: str = ""

    def fault(self, root: Path = ROOT) -> str:
        """Say why the bug cannot be planted below `root`; "" where it can."""
        for file, old, _ in self.edits:
            path = root / file
            count = path.read_text().count(old) if path.is_file() else None
            if count != 1:
                where = "does not exist" if count is None else f"has it {count} times"
                return f"{self.name}: {file} {where}: {old!r}; change the bug as its line changed"
        return ""


def read_mutants(path: Path = MUTANTS) -> list[Mutant]:
    """Read the bugs of a file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Mutant(**row | {"edits": [tuple(edit) for edit in row["edits"]]}) for row in rows]


def run_mutant(mutant: Mutant, tree: Path) -> str:
    """Plant a bug in a copy of the repository, run its test, and take the bug out again.

    Returns:
        "caught", "caught by a hang", "SURVIVED", or what kept the test from running.
    """
    if fault := mutant.fault(tree):
        return fault
    before = {file: (tree / file).read_text() for file, _, _ in mutant.edits}
    try:
        for file, old, new in mutant.edits:
            path = tree / file
            path.write_text(path.read_text().replace(old, new))
        return tested([mutant.test], tree)
    finally:
        for file, text in before.items():
            (tree / file).write_text(text)


def tested(tests: Sequence[str], tree: Path) -> str:
    """Run tests in a copy of the repository until one fails; for the answers see `run_mutant`."""
    server = getattr(_servers, "server", None)
    if server is None or server.poll() is not None:
        server = _servers.server = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "forks.py"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | {
                "PYTHONDONTWRITEBYTECODE": "1",
                # Most programs are those of the tests without the bug, left by the last test run.
                "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "d" / "compiled"),
            },
        )  # fmt: skip
        atexit.register(_end, server)
    print(json.dumps([str(tree), list(tests)]), file=server.stdin, flush=True)
    code, said = json.loads(server.stdout.readline() or '["nothing", "the server of forks died"]')
    if code is None:
        return "caught by a hang"
    if code == _FAILED:
        return "caught"
    if code == 0 and "passed" in said.splitlines()[-1]:
        return "SURVIVED"
    return f"pytest ended with {code}: {said}"


def _end(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.__exit__(None, None, None)  # closes the pipes


def copied(parent: Path) -> Path:
    """Copy what git knows, and what it would, to a folder of its own."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    tree = Path(tempfile.mkdtemp(dir=parent))
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def _changed_since(revision: str) -> list[str]:
    named = subprocess.run(
        ["git", "diff", "--name-only", revision], cwd=ROOT, capture_output=True, text=True
    )
    if named.returncode:
        raise SystemExit(f"--since {revision}: {named.stderr.strip()}")
    return named.stdout.splitlines()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bugs that the arguments choose; 1 where one survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--since", help="a commit: bugs in files that have changed since, or whose "
                        "test has")  # fmt: skip
    parser.add_argument("--files", nargs="+", help="files or folders")
    parser.add_argument("--names", nargs="+", help="names of bugs")
    parser.add_argument("--at-most", type=int, help="number of bugs that are drawn of them")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    given = parser.parse_args(argv)
    chosen = read_mutants()
    if given.since:
        changed = set(_changed_since(given.since))
        chosen = [
            each
            for each in chosen
            if changed & {each.test.partition("::")[0], *(file for file, _, _ in each.edits)}
        ]
    if given.files:
        folders = tuple(given.files)
        chosen = [each for each in chosen if each.edits[0][0].startswith(folders)]
    if given.names:
        chosen = [each for each in chosen if each.name in given.names]
    if given.at_most is not None and len(chosen) > given.at_most:
        print(f"{given.at_most} of {len(chosen)} bugs, drawn with seed {given.seed}")
        chosen = random.Random(given.seed).sample(chosen, given.at_most)
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        trees: queue.Queue[Path] = queue.Queue()
        for _ in range(min(given.workers, len(chosen))):
            trees.put(copied(Path(directory)))

        def one(mutant: Mutant) -> tuple[Mutant, str, float]:
            tree, began = trees.get(), time.monotonic()
            try:
                return mutant, run_mutant(mutant, tree), time.monotonic() - began
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(max(1, given.workers)) as pool:
            running = [pool.submit(one, mutant) for mutant in chosen]
            for number, done in enumerate(as_completed(running), 1):
                mutant, verdict, seconds = done.result()
                print(
                    f"{number}/{len(chosen)}  {mutant.name}  {verdict}, {seconds:.0f} s", flush=True
                )
                if not verdict.startswith("caught"):
                    wrong.append(f"{mutant.name}: {verdict} ({mutant.test}) {mutant.about}")
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} bugs were found")
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

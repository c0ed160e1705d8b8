"""Run pytest in forks of one process that has imported every library but this package.

    echo '["TREE", ["tests/test_x.py::test_y"]]' | python tests/mutants/forks.py

Each line is a copy of the repository and its tests; the answer is a line [exit code of pytest, last
characters of its output]. The code is null where the tests took longer than `SECONDS`. Imports of
libraries take most of the time of a short test; a fork has them from the start, and imports only
the package and the tests, as they lie in the tree.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

SECONDS = 900.0
"""Limit of a run; a test that hangs has found its bug."""
LIBRARIES = (
    "pytest", "jax", "jax.numpy", "flax.nnx", "optax", "orbax.checkpoint", "grain", "hypothesis",
    "jaxtyping", "beartype", "ml_collections", "tokenizers", "sentencepiece", "matplotlib.figure",
    "pyarrow.parquet", "psutil", "scipy.stats", "jax.experimental.pallas.tpu",
)  # fmt: skip
_POLL_SECONDS = 0.05


def _run(tree: str, tests: list[str], output: Path) -> int:
    """Run tests in this process, a fork."""
    os.setsid()
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = tree  # for children
    sys.path.insert(0, tree)
    pytest = importlib.import_module("pytest")
    # Plugins are imported already, which pytest warns of.
    options = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-x", "-q", "-m", ""]
    places = ["-p", "no:cacheprovider", "--override-ini=addopts=", f"--basetemp={output}.tests"]
    return int(pytest.main([*options, *places, *tests]))


def forked(tree: str, tests: list[str]) -> tuple[int | None, str]:
    """Run tests in a fork; return pytest's exit code (None: too late) and the end of its output."""
    directory = Path(tempfile.mkdtemp())
    output = directory / "output"
    child = os.fork()
    if not child:
        code = 3  # pytest's own, of an internal error
        try:
            code = _run(tree, tests, output)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end, code = time.monotonic() + SECONDS, None
    while code is None and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        ended, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
    if code is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = output.read_text(errors="replace")[-500:] if output.exists() else ""
    shutil.rmtree(directory, ignore_errors=True)
    return code, said


def main() -> None:
    """Answer each line of standard input."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(forked(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

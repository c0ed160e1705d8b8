"""No source unpickles, evaluates or runs what a file says."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
"""Objects for our own worker processes are pickled by `multiprocessing`, in pipes of its own."""
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [name.name for name in names]
            case ast.ImportFrom(module=str(module)):
                modules = [module]
            case _:
                modules = []
        found += [m for m in modules if m.partition(".")[0] in FORBIDDEN_MODULES]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name in FORBIDDEN_CALLS:
            found.append(name)
        if keywords.get("allow_pickle", "False") != "False":
            found.append(f"{name}(allow_pickle)")
        if name.startswith("torch.") and name.endswith("load") and (
            keywords.get("weights_only") != "True"
        ):  # fmt: skip
            found.append(f"{name} without weights_only=True")
        if name.startswith("yaml.") and "load" in name and not name.startswith("yaml.safe_load"):
            found.append(name)
        if name.endswith(("extractall", ".unpack_archive")):
            found.append(name)
    return found


def test_sources():
    files = [p for top in ("bert_jax", "configs", "launch") for p in (ROOT / top).rglob("*.py")]
    assert len(files) > 50
    bad = {str(p.relative_to(ROOT)): found for p in files if (found := offences(p.read_text()))}
    assert not bad


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import numpy, dill", "import marshal",
        "def f():\n    import shelve", "eval(x)", "exec(x)", "numpy.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)", "torch.load(f)", "torch.load(f, weights_only=False)",
        "yaml.load(f)", "yaml.unsafe_load(f)", "tar.extractall()", "shutil.unpack_archive(x)",
        "from joblib.externals import x",
    ],
)  # fmt: skip
def test_the_walk_sees(source):
    assert offences(source)


def test_ruff_sees_it_too(tmp_path):
    pytest.importorskip("ruff", reason="ruff is not installed")
    (tmp_path / "a.py").write_text(
        "import pickle\nimport marshal\nimport yaml\n\npickle.loads(x)\nmarshal.loads(x)\n"
        "eval(x)\nexec(x)\nyaml.load(x)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", ROOT / "pyproject.toml",
         "--output-format", "concise", tmp_path / "a.py"],
        capture_output=True, text=True,
    )  # fmt: skip
    for rule in ("S301", "S302", "S307", "S102", "S506"):
        assert rule in done.stdout, done.stdout + done.stderr

"""The wheel, used in an environment without the checkout."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, and the packages that it needs from this one."""
    here = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(here)]
    subprocess.run([*build, str(ROOT)], check=True)
    (wheel,) = here.glob("bert_jax-*.whl")
    venv = here / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = ["--python", str(venv / "bin" / "python")]
    subprocess.run([*pip, *python, "install", "--no-deps", str(wheel)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    # A path that is added so reads no .pth files: an editable installation stays out.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def run(environment: Path, cwd: Path, *command: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(environment / command[0]), *command[1:]],
        cwd=cwd, env=clean, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_is_that_of_the_wheel(environment, tmp_path):
    where = run(environment, tmp_path, "python", "-c", "import bert_jax; print(bert_jax.__file__)")
    package = Path(where.strip()).parent
    assert package.is_relative_to(environment.parent)
    assert (package / "py.typed").exists()
    assert not (package.parent / "tests").exists()
    for data in ROOT.glob("bert_jax/**/*"):
        if data.is_file() and "__pycache__" not in data.parts:
            assert (package / data.relative_to(ROOT / "bert_jax")).exists(), data


def test_the_command_and_its_configurations(environment, tmp_path):
    assert "--workdir" in run(environment, tmp_path, "bert-jax", "demo", "--help")
    assert "--config.model.num_layers" in run(environment, tmp_path, "bert-jax", "plan", "--fields")
    load = (
        "import sys; from bert_jax.config.command_line import load_config; "
        "from bert_jax.training.pretrain.config import PretrainConfig; "
        "print(load_config(PretrainConfig, sys.argv[1]).model.num_layers)"
    )
    for name in ("bert_tiny", "pretrain/bert_tiny", "configs/pretrain/bert_tiny.py"):
        assert run(environment, tmp_path, "python", "-c", load, name) == "2\n"


@pytest.mark.slow
def test_the_demo_runs_in_an_empty_folder(environment, tmp_path):
    """A model is trained and answers, with the files of the wheel and no others."""
    said = run(environment, tmp_path, "bert-jax", "demo", "--recipe=translation")
    assert "of 2,000 unseen numbers exact" in said
    assert [path.name for path in tmp_path.iterdir()] == ["work"]
    assert (tmp_path / "work" / "demo_translation" / "attention.html").exists()

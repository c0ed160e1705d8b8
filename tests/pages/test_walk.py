"""The walk through README.md, with a README of one command in place of an hour's."""

import csv
import lzma
import re
from pathlib import Path

import pytest
import run
import walk
from repository import commit_all

TABLE = """<table><tr><td>this model (on 60 examples of dev)<td>accuracy 0.583<td><meter></meter>
<tr><td>TF-IDF and a linear model, same rows<td>accuracy 0.630<td><meter></meter>
<tr><td>a constant<td>accuracy 0.510<td><meter></meter></table>"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A directory with an encyclopedia of 4 MB and 700 sentences."""
    home = tmp_path / "data"
    for name in ("pretrain", "glue/SST-2"):
        (home / name).mkdir(parents=True)
    with lzma.open(home / "pretrain" / "encyc-britannica1810-0000.txt.xz", "wb") as file:
        file.write("Encyclopædia.\n\n".encode() * 250_000)
    rows = [f'a "film , {number}\t{number % 2}' for number in range(700)]
    for name in ("train", "dev"):
        text = "\n".join(["sentence\tlabel", *rows])
        (home / "glue" / "SST-2" / f"{name}.tsv").write_text(text)
    monkeypatch.setenv("BERT_JAX_DATA", str(home))


def test_the_newcomer_has_text_and_labels(data, tmp_path):
    gifts = walk.prepare(tmp_path / "walk")
    assert list(gifts) == ["my", "reviews.csv"]
    assert 2_990_000 < (gifts["my"] / "text.txt").stat().st_size <= 3_000_000
    with gifts["reviews.csv"].open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 600
    assert {row["label"] for row in rows} == {"0", "1"}
    assert rows[0]["text"].startswith('a "film , ')


@pytest.mark.parametrize(
    ("page", "missing"),
    [
        (TABLE, []),
        (TABLE.replace("TF-IDF and", "Words and"), ["TF-IDF and a linear model"]),
        ("this model, a constant", list(walk.NAMED)),  # named, but not with scores
    ],
)
def test_the_page_must_have_the_scores_side_by_side(page, missing):
    assert walk.lacks(page) == missing


def readme(home: Path, commands: str) -> None:
    """Commit a README.md."""
    home.mkdir()
    (home / "README.md").write_text(f"```bash\n{commands}\n```\n\n```\nexit 1\n```\n")
    commit_all(home)


@pytest.mark.parametrize(
    ("row", "low", "code", "said"),
    [
        ("this model", 0.51, 0, "no problem"),
        ("this model", 0.49, 1, "does not beat a constant: accuracy 0.580 (0.490 to 0.620)"),
        ("no model", 0.51, 1, "no score of this model"),
    ],
)
def test_the_walk_runs_the_readme_and_reads_its_page(
    data, tmp_path, monkeypatch, capsys, row, low, code, said
):
    home = tmp_path / "home"
    (tmp_path / "page.html").write_text(TABLE.replace("this model", row))
    for module in (run, walk):
        monkeypatch.setattr(module, "ROOT", home)
        monkeypatch.setattr(module, "CLONES", tmp_path / "clones")
    report = {"scores": {"accuracy": 0.58}, "intervals": {"accuracy": (low, 0.62)}}
    monkeypatch.setattr(walk, "scored", lambda clone, rows: report)
    commands = f"test -s reviews.csv && ls my/*.txt\nmkdir -p work/start\ncp {tmp_path}/page.html"
    readme(home, f"{commands} work/start/start.html")
    assert walk.main() == code
    printed = capsys.readouterr().out
    assert said in printed
    assert re.search(r"README: \d+\.\d minutes", printed)


def test_a_failing_command_ends_the_walk(data, tmp_path, monkeypatch, capsys):
    home = tmp_path / "home"
    for module in (run, walk):
        monkeypatch.setattr(module, "ROOT", home)
        monkeypatch.setattr(module, "CLONES", tmp_path / "clones")
    readme(home, "exit 8")
    assert walk.main() == 1
    assert "README.md:1: exit code 8" in capsys.readouterr().out


def test_the_walk_follows_the_readme_but_not_its_tests():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    commands = "\n".join(block.commands for block in run.blocks(text))
    assert "make demo" in commands
    assert "make test" not in commands
    assert "--labels reviews.csv" in commands
    assert "--workdir" not in commands  # the page is in the default directory

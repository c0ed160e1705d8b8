"""The files that pages of docs/recipes begin with."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def files():
    """examples/files.py, which writes a tenth of the text and of the rows."""
    spec = importlib.util.spec_from_file_location("files", ROOT / "examples" / "files.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TEXT_BYTES //= 10
    module.ROWS //= 10
    module.TEST_ROWS //= 10
    return module


def test_files_have_the_columns_and_sizes_that_the_pages_name(files, tmp_path):
    files.main(tmp_path / "my")
    assert {path.name for path in (tmp_path / "my").iterdir()} == {
        "text.txt", "labels.csv", "test.csv"
    }  # fmt: skip
    text = (tmp_path / "my" / "text.txt").read_text("utf-8")
    assert files.TEXT_BYTES < len(text.encode()) < 1.5 * files.TEXT_BYTES
    assert len(text.split("\n\n")) > 50
    rows = []
    for name, count in (("labels", 60), ("test", 30)):
        with (tmp_path / "my" / f"{name}.csv").open(encoding="utf-8") as file:
            table = list(csv.DictReader(file))
        assert len(table) == count
        assert all(set(row) == {"text", "label"} for row in table)
        rows += table
    assert len({row["text"] for row in rows}) == 90  # no test row is a training row
    assert [sum(row["label"] == label for row in rows) for label in files.LABELS] == [30] * 3
    assert not any(row["label"] in row["text"].lower() for row in rows)


def test_the_script_says_which_files_there_are(files):
    assert re.findall(r"^    (\w+\.\w+) {4}", files.__doc__, re.M) == [
        "text.txt", "labels.csv", "test.csv"
    ]  # fmt: skip

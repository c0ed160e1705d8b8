"""Write small example files of every kind that `bert-jax` reads, from the documentation of Python.

    python examples/files.py my

makes, in the directory `my`, what the pages of docs/recipes use; your own files take their place:

    text.txt      about 3 MB of documentation, a blank line between documents
    labels.csv    600 rows: `text`, a piece of documentation, and `label`, the package that has it
    test.csv      300 more rows
"""

import ast
import contextlib
import csv
import importlib.util
import random
import re
import sys
from pathlib import Path

from bert_jax.data.corpus.kinds.pydocs import PythonDocs

TEXT_BYTES = 3_000_000
LABELS = ("jax", "numpy", "scipy")
ROWS, TEST_ROWS = 600, 300


def main(directory: Path) -> None:
    """Write all files."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "text.txt")
    rows = labelled()
    write_table(directory / "labels.csv", rows[:ROWS])
    write_table(directory / "test.csv", rows[ROWS : ROWS + TEST_ROWS])


def write_text(path: Path) -> None:
    """Read documents until the file has its size, and write them in a random order."""
    documents, size = [], 0
    # One worker: a quarter of the files is enough, and more processes would import JAX first.
    with contextlib.closing(PythonDocs(num_workers=1).texts()) as texts:
        for document in texts:
            documents.append(f"{document}\n\n")
            size += len(documents[-1].encode())
            if size > TEXT_BYTES:
                break
    random.Random(0).shuffle(documents)
    path.write_text("".join(documents), encoding="utf-8")


def labelled() -> list[tuple[str, str]]:
    """Pair first sentences of docstrings with the package that has them, equally often."""
    count = (ROWS + TEST_ROWS) // len(LABELS)
    rows = [(text, label) for label in LABELS for text in summaries(label, count)]
    random.Random(0).shuffle(rows)
    return rows


def summaries(package: str, count: int) -> list[str]:
    """Take first sentences, of 40 to 200 characters, from a package's docstrings.

    The files are read in a random order until there are four times as many sentences as needed. A
    sentence that names its package is left out.
    """
    choose = random.Random(0)
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    paths = sorted(Path(spec.origin).parent.rglob("*.py"))
    choose.shuffle(paths)
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = (ast.get_docstring(node) or "").partition("\n\n")[0]
                text = re.sub(r"\s+", " ", first)
                if 40 <= len(text) <= 200 and package not in text.lower():
                    found.add(text)
        if len(found) >= 4 * count:
            break
    return choose.sample(sorted(found), count)


def write_table(path: Path, rows: list[tuple[str, str]]) -> None:
    """Write rows as CSV, with the names of the columns first."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Write small example files of every kind that `bert-jax` reads, from the documentation of Python.

    python examples/files.py my

makes, in the directory `my`, what the pages of docs/recipes use; your own files take their place:

    text.txt      about 3 MB of documentation, a blank line between documents
    labels.csv    600 rows: `text`, a piece of documentation, and `label`, the package that has it
    test.csv      300 more rows
"""

import ast
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
    documents = list(PythonDocs().texts())
    write_text(directory / "text.txt", documents)
    rows = labelled()
    write_table(directory / "labels.csv", rows[:ROWS])
    write_table(directory / "test.csv", rows[ROWS : ROWS + TEST_ROWS])


def write_text(path: Path, documents: list[str]) -> None:
    """Write documents, in a random order, until the file has its size."""
    random.Random(0).shuffle(documents)
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            size += file.write(f"{document}\n\n")
            if size > TEXT_BYTES:
                break


def labelled() -> list[tuple[str, str]]:
    """Pair first sentences of docstrings with the package that has them, equally often."""
    choose = random.Random(0)
    rows = []
    for label in LABELS:
        texts = sorted(text for text in summaries(label) if label not in text.lower())
        count = (ROWS + TEST_ROWS) // len(LABELS)
        rows += [(text, label) for text in choose.sample(texts, count)]
    choose.shuffle(rows)
    return rows


def summaries(package: str) -> set[str]:
    """Return the first sentences of a package's docstrings, from 40 to 200 characters long."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    found = set()
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                doc := ast.get_docstring(node)
            ):
                text = re.sub(r"\s+", " ", doc.partition("\n\n")[0])
                if 40 <= len(text) <= 200:
                    found.add(text)
    return found


def write_table(path: Path, rows: list[tuple[str, str]]) -> None:
    """Write rows as CSV, with the names of the columns first."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Write small example files of every kind that `bert-jax` reads, from the documentation of Python.

    python examples/files.py my

makes, in the directory `my`, what the pages of docs/recipes use; your own files take their place:

    text.txt      about 3 MB of documentation, a blank line between documents
    labels.csv    600 rows: `text`, a piece of documentation, and `label`, the package that has it
    test.csv      300 more rows
    train.fr      20,000 numbers in French words, one a line; train.en has the English words
    test.fr       2,000 other numbers, and test.en
    tags.conll, tags_test.conll            summaries of functions; a word and a tag on each line
    questions.json, questions_test.json    questions about arguments, in the form of SQuAD
"""

import ast
import csv
import importlib.util
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.corpus.kinds.pydocs import PythonDocs
from bert_jax.data.corpus.numbers import draw_numbers, french_words

TEXT_BYTES = 3_000_000
LABELS = ("jax", "numpy", "scipy")
ROWS, TEST_ROWS = 600, 300
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
TYPES = {"array", "bool", "complex", "dict", "float", "int", "list", "ndarray", "str", "tuple"}


def main(directory: Path) -> None:
    """Write all files."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "text.txt")
    rows = labelled()
    write_table(directory / "labels.csv", rows[:ROWS])
    write_table(directory / "test.csv", rows[ROWS : ROWS + TEST_ROWS])
    train, test = draw_numbers(20_000, 2_000, seed=0, first=5_001)
    for name, numbers in (("train", train.tolist()), ("test", test.tolist())):
        write_lines(directory / f"{name}.fr", map(french_words, numbers))
        write_lines(directory / f"{name}.en", map(english_words, numbers))
    functions = [*documented("numpy"), *documented("scipy/signal"), *documented("scipy/stats")]
    for end, lines in zip(("", "_test"), parted(tagged(functions)), strict=True):
        (directory / f"tags{end}.conll").write_text("\n".join(lines), encoding="utf-8")
    for end, texts in zip(("", "_test"), parted(asked(functions)), strict=True):
        squad = {"version": "1.1", "data": [{"title": "numpy", "paragraphs": texts}]}
        (directory / f"questions{end}.json").write_text(json.dumps(squad, indent=1), "utf-8")


def write_text(path: Path) -> None:
    """Read documents until the file has its size, and write them in a random order."""
    documents, size = [], 0
    for document in PythonDocs(num_workers=1).texts():  # a quarter of the files: start no others
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
    home = Path(spec.origin).parent
    paths = sorted(each for each in home.rglob("*.py") if "tests" not in each.parts)
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


def english_words(number: int) -> str:
    """Spell a number below a million."""
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    count, rest = divmod(number, size)
    return f"{english_words(count)} {name}" + (f" {english_words(rest)}" if rest else "")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write texts, one a line."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def documented(package: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Read the functions of a package, with their docstrings."""
    for path in sorted(Path(np.__file__).parents[1].glob(f"{package}/**/*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())) if "tests" not in path.parts else ():
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                yield node, doc


def tagged(functions: list[tuple[ast.FunctionDef, str]]) -> list[str]:
    """Tag the words of summaries: arguments of the function, names of types, and numbers."""
    found = set()
    for node, doc in functions:
        known = dict.fromkeys(TYPES, "B-TYPE") | {a.arg: "B-ARGUMENT" for a in node.args.args}
        words = re.findall(r"\w+|[^\w\s`]", doc.partition("\n\n")[0])
        tags = ["B-NUMBER" if word.isdigit() else known.get(word, "O") for word in words]
        if set(tags) - {"O"} and len(words) <= 40:
            found.add("".join(f"{word} {tag}\n" for word, tag in zip(words, tags, strict=True)))
    return sorted(found)


def asked(functions: list[tuple[ast.FunctionDef, str]]) -> list[dict[str, object]]:
    """Ask for the first argument, and for the type of the last, that a docstring describes."""
    paragraphs: dict[str, Any] = {}
    for _, doc in functions:
        section = re.search(r"^Parameters\n-+\n(.+?)(?:\n\n|\Z)", doc, re.M | re.S)
        context = re.sub(r"\s+", " ", section[1])[:200].rpartition(" ")[0] if section else ""
        found = list(re.finditer(r"\b(\w+) : (\w+)", context))
        if len(found) >= 2 and context not in paragraphs:
            first = ("Which argument comes first?", found[0], 1)
            last = ("What type is the last argument?", found[-1], 2)
            paragraphs[context] = [
                {
                    "id": f"{len(paragraphs)}-{group}",
                    "question": question,
                    "answers": [{"text": match[group], "answer_start": match.start(group)}],
                }
                for question, match, group in (first, last)
            ]
    return [{"context": context, "qas": qas} for context, qas in paragraphs.items()]


def parted(examples: list[Any]) -> tuple[list[Any], list[Any]]:
    """Divide examples in a random order: four fifths to train on, and the rest."""
    random.Random(0).shuffle(examples)
    return examples[: len(examples) * 4 // 5], examples[len(examples) * 4 // 5 :]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

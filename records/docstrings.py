r"""Make the text of the track `docstrings`: the prose in the docstrings of pinned wheels.

    python -m pip download --no-deps --only-binary=:all: --dest my/wheels \
        $(python records/docstrings.py --pins)
    python records/docstrings.py my/wheels my/texts/docstrings.txt

Nothing is imported or installed: the files of a wheel are parsed. The wheels hold only Python, so
that every machine gets the same text. A docstring is a document; docstrings that came before are
left out.
"""

import ast
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

PINS = (
    "sympy==1.14.0", "networkx==3.6.1", "django==5.2.19", "nltk==3.10.4", "dask==2026.8.0",
    "distributed==2026.8.0", "docutils==0.23", "mpmath==1.4.1",
)  # fmt: skip


def docstrings(wheel: Path) -> Iterator[str]:
    """Yield the docstrings of a wheel in the order of its files' names."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith(".py") or "/tests/" in name:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about invalid escape sequences
                tree = ast.parse(archive.read(name))
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    yield ast.get_docstring(node, clean=False) or ""


def documents(wheels: Path) -> Iterator[str]:
    """Yield the prose of all docstrings."""
    from bert_jax.data.corpus.kinds.pydocs import prose_paragraphs

    seen: set[str] = set()
    for pin in PINS:
        name, _, version = pin.partition("==")
        found = list(wheels.glob(f"{name}-{version}-*.whl"))
        if len(found) != 1:
            sys.exit(f"{wheels} has {len(found)} wheels of {pin}; expected one")
        for text in docstrings(found[0]):
            prose = "\n".join(" ".join(paragraph) for paragraph in prose_paragraphs(text))
            if prose and prose not in seen:
                seen.add(prose)
                yield prose


def main() -> None:
    """Print the pins, or write the text."""
    if sys.argv[1:] == ["--pins"]:
        print(*PINS)
        return
    wheels, out = map(Path, sys.argv[1:])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n\n".join(documents(wheels)) + "\n", "utf-8")
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

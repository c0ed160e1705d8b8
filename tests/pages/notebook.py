"""Make a notebook of a page, with its commands as cells, and execute it.

    python tests/pages/notebook.py docs/recipes/own_text.md    # make recipes

The notebook is work/notebooks/own_text.ipynb. Blocks that tests/pages/run.py runs become cells:
`python` blocks as they are, `bash` blocks as cells of a shell (`%%bash`), each in a shell of its
own. All other blocks are text.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat
from run import FENCE, ROOT, blocks, clone_to, environment

_SECONDS = 3600
# Without the language, the blocks of a page that has only `bash` would become cells of Python.
_HEADER = """---
jupyter:
  jupytext: {main_language: python}
  kernelspec: {name: python3, display_name: Python 3}
---

"""


def as_notebook(page: str) -> Any:
    """Turn a page into a notebook."""

    def left(match: re.Match[str]) -> str:  # Jupytext leaves blocks with this mark in the text
        mark = f"```{match['kind']} .noeval\n" if match["skip"] else f"```{match['kind']}\n"
        return match[0].replace(f"```{match['kind']}\n", mark, 1)

    notebook = jupytext.reads(f"{_HEADER}{FENCE.sub(left, page)}", fmt="md")
    for cell in notebook.cells:
        cell.source = cell.source.replace(" .noeval\n", "\n")
        cell.source = re.sub(r"^%%bash\n", "%%bash -e\n", cell.source)
    return notebook


def main(page: Path) -> None:
    """Write the notebook of a page, execute it in a fresh clone, and write it with its outputs."""
    text = page.read_text("utf-8")
    notebook = as_notebook(text)
    path = ROOT / "work" / "notebooks" / f"{page.stem}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    clone = clone_to(f"{page.stem}_notebook")
    os.environ.update(environment(blocks(text), clone))
    place = {"metadata": {"path": str(clone)}}
    try:
        nbclient.NotebookClient(notebook, timeout=_SECONDS, resources=place).execute()
    finally:
        nbformat.write(notebook, path)
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    print(f"{path}: {cells} cells were executed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

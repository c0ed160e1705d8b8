"""A page becomes a notebook, whose cells are executed in a clone."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import commit_all

NEEDED = ("ipykernel", "jupytext", "nbclient")
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)), reason="the extra `docs` is not installed"
)
PAGE = """# A page

```bash
echo shell > made.txt
```

<!-- not run: it fails -->
```bash
exit 1
```

```python
print(open("made.txt").read() * 2)
```
"""


@pytest.fixture
def executed(tmp_path):
    """Return a function that commits a page and executes its notebook: (process, cells)."""
    home = tmp_path / "home"

    def execute(page: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
        (home / "tests" / "pages").mkdir(parents=True)
        for name in ("run.py", "notebook.py"):
            shutil.copy(Path(__file__).with_name(name), home / "tests" / "pages")
        (home / "page.md").write_text(page)
        commit_all(home)
        command = [sys.executable, "tests/pages/notebook.py", "page.md"]
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
        made = home / "work" / "notebooks" / "page.ipynb"
        assert not (home / "made.txt").exists()  # the commands ran in a clone
        return done, json.loads(made.read_text())["cells"]

    return execute


def test_cells_are_executed_and_other_blocks_stay_text(executed):
    done, cells = executed(PAGE)
    assert done.returncode == 0, done.stderr
    kinds = [cell["cell_type"] for cell in cells]
    assert kinds == ["markdown", "code", "markdown", "code"]
    assert "".join(cells[1]["source"]) == "%%bash -e\necho shell > made.txt"
    assert "```bash\nexit 1\n```" in "".join(cells[2]["source"])
    assert "".join(cells[3]["outputs"][0]["text"]).split() == ["shell", "shell"]
    assert "2 cells were executed" in done.stdout


def test_a_failing_cell_fails_the_notebook(executed):
    done, cells = executed("```bash\nfalse\necho after\n```\n")
    assert done.returncode == 1
    assert "CalledProcessError" in done.stderr
    assert [output["output_type"] for output in cells[0]["outputs"]] == ["error"]  # no `after`

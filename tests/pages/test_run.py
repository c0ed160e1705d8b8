"""Pages are run as they are written: the blocks, the comparison, and what a failure says."""

import os
import re
import sys
from pathlib import Path

import pytest
import run
from repository import commit_all

PAGE = """\
# A page

```bash
echo "step 1 of 2, 3 min 4 s"; printf 'no line end'
```

```text
step 7 of 9, 1 h
no line end
```

<!-- not run: it needs a bucket -->
```bash
exit 9
```

```text
never printed
```

```{eval-rst}
.. autofunction:: f
```

```
also not run
```

```python
import os
print("python", os.path.exists("page.md"))
for number in range(3):
    print("row", number)
```

```text
python True
...
row 5
```
"""


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Return a function that commits a page and runs it in a clone."""
    home = tmp_path / "home"
    monkeypatch.setattr(run, "ROOT", home)
    monkeypatch.setattr(run, "CLONES", tmp_path / "clones")
    monkeypatch.delenv("BERT_JAX_DATA", raising=False)

    def running(text: str, write: bool = False, **gifts: Path) -> list[str]:
        home.mkdir()
        page = home / "page.md"
        page.write_text(text)
        commit_all(home)
        return run.run_page(page, gifts, write)

    return running


def test_blocks_are_found_with_their_lines_and_what_they_print():
    first, second = run.blocks(PAGE)
    assert (first.kind, first.line, second.kind, second.line) == ("bash", 3, "python", 29)
    assert first.prints == "step 7 of 9, 1 h\nno line end\n"
    assert PAGE[second.place :].startswith("python True\n...\n")


RECIPES = sorted((Path(__file__).parents[2] / "docs" / "recipes").glob("*.md"))


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_has_commands_and_marks_every_block(page):
    text = page.read_text()
    assert run.blocks(text)
    assert "" not in [match["kind"] for match in run.FENCE.finditer(text)]  # it would not be run


def test_text_belongs_to_the_block_directly_before_it():
    page = "```bash\ntrue\n```\n```csv\na,b\n```\n```text\na\n```\n"
    assert [block.prints for block in run.blocks(page)] == [""]


def test_a_page_whose_lines_are_printed_has_no_problems(at, tmp_path, capsys):
    assert at(PAGE) == []
    assert (tmp_path / "home" / "page.md").read_text() == PAGE
    assert re.search(r"page: \d+\.\d minutes", capsys.readouterr().out)


def test_new_numbers_are_written(at, tmp_path):
    assert at(PAGE, write=True) == []
    text = PAGE.replace("step 7 of 9, 1 h", "step 1 of 2, 3 min 4 s").replace("row 5", "row 0")
    assert (tmp_path / "home" / "page.md").read_text() == text


def test_numbers_of_equal_blocks_are_written_each_in_its_place(at, tmp_path):
    block = "```bash\necho {0}\n```\n```text\n0\n```\n"
    assert at(block.format(1) + block.format(2), write=True) == []
    written = (tmp_path / "home" / "page.md").read_text()
    assert [each.prints for each in run.blocks(written)] == ["1\n", "2\n"]


def test_a_page_that_was_changed_meanwhile_is_not_written(at, tmp_path):
    page = tmp_path / "home" / "page.md"
    (problem,) = at(f"```bash\necho 1 > {page}\necho 2\n```\n```text\n1\n```\n", write=True)
    assert problem == f"{page}: it changed while it was run, and is not written"
    assert page.read_text() == "1\n"


def test_lines_that_are_not_printed_are_named(at, tmp_path):
    page = PAGE.replace("row 5", "line 5").replace("no line end\n```", "no end\n```")
    path = tmp_path / "home" / "page.md"
    assert at(page) == [
        f"{path}:3: does not print 'no end'", f"{path}:29: does not print 'line 5'"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "printed", "missing"),
    [
        ("a 1\nb 2", "x\na 7\nb 8\ny", []),
        ("a 1\nc 3", "a 1\nb 2\nc 3", ["c 3"]),  # directly after, unless `...` says otherwise
        ("a 1\n...\nc 3", "a 1\nb 2\nc 3", []),
        ("b\na", "a\nb", ["a"]),
        ("loss 2.31e-4, 12 min", "loss  -7, 3 s", []),
        ("lost 1", "loss 1", ["lost 1"]),
        ("a\nb\nc", "a\nc", ["b"]),
    ],
)
def test_lines_are_compared_in_order_without_numbers(expected, printed, missing):
    assert run.refreshed(expected, printed)[1] == missing


@pytest.mark.parametrize("last", ["false | cat", "(printf half; exit 3)"])
def test_a_failing_command_is_named_with_page_and_line(at, tmp_path, last):
    page = f"# A page\n\n```bash\necho begun\n```\n\n```bash\ncd .\n{last}\necho after\n```\n"
    (problem,) = at(page)
    code, failed = (1, "cat") if "cat" in last else (3, "( printf half; exit 3 )")
    assert problem == f"{tmp_path / 'home' / 'page.md'}:7: exit code {code}: {failed}"


def test_a_failing_python_block_fails_the_page(at, tmp_path):
    (problem,) = at("```python\nraise SystemExit(5)\n```\n")
    assert problem.startswith(f"{tmp_path / 'home' / 'page.md'}:1: exit code 5: python -")


def test_a_page_that_needs_data_is_skipped_without(at, capsys):
    assert at("<!-- needs: data -->\n```bash\nexit 1\n```\n") == []
    assert "skipped, BERT_JAX_DATA is not set" in capsys.readouterr().out


def test_gifts_lie_in_the_clone(at, tmp_path):
    (tmp_path / "gift").write_text("given\n")
    page = "```bash\ncat mine\n```\n```text\ngiven\n```\n"
    assert at(page, mine=tmp_path / "gift") == []


def test_a_page_uses_this_python_and_the_package_of_the_clone(at, tmp_path):
    page = "```bash\nwhich python\necho $PYTHONPATH\n```\n```text\nPYTHON\nCLONE\n```\n"
    page = page.replace("PYTHON\n", f"{Path(sys.executable).parent / 'python'}\n")
    assert at(page.replace("CLONE", str(tmp_path / "clones" / "page"))) == []


def test_a_page_with_make_demo_keeps_its_own_environment(at, monkeypatch):
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS"):
        monkeypatch.setenv(name, "/elsewhere")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}/usr/bin:/bin")
    page = "```bash\nmake() { echo made $1; }\nmake demo\n```\n```text\nmade demo\n```\n"
    page += '```bash\necho "${PYTHONPATH-}${VIRTUAL_ENV-}${MAKEFLAGS-}none"; echo "$PATH"\n```\n'
    assert at(f"{page}```text\nnone\n{os.environ['PATH']}\n```\n") == []


def test_the_command_line_ends_with_one_where_a_page_is_wrong(tmp_path, monkeypatch, capsys):
    ran = []

    def fake(page: Path, gifts: dict[str, Path], write: bool) -> list[str]:
        ran.append((page.name, gifts, write))
        return [f"{page}:1: wrong"] * (page.name == "b.md")

    monkeypatch.setattr(run, "run_page", fake)
    monkeypatch.setattr(sys, "argv", ["run.py", "b.md", "a.md", "--give", "my=there"])
    assert run.main() == 1
    assert ran == [(name, {"my": Path("there")}, False) for name in ("b.md", "a.md")]
    assert "b.md:1: wrong" in capsys.readouterr().out

"""The pages of the repository: links, next steps, and what the pages for beginners name.

`make docs` checks the links of the site again.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bert_jax.cli import main
from bert_jax.config.mapping import to_dict
from bert_jax.objectives.config import OBJECTIVES
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.glue import TASKS
from bert_jax.training.finetune import config as finetune
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.pretrain import config as pretrain
from bert_jax.training.pretrain.config import PretrainConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])
HISTORY = [DOCS / "decisions.md", DOCS / "experiments.md"]
PROBLEMS = DOCS / "guide" / "troubleshooting.md"
FORMER = ROOT / "bert_jax" / "cli" / "verbs" / "options.py"
"""File that names commands which no longer exist."""
FIRST = [ROOT / "README.md", DOCS / "index.md", DOCS / "recipes" / "own_text.md", PROBLEMS]
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site give the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if ":" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_the_api_page_names_what_there_is_in_the_order_of_tasks():
    text = (ROOT / "docs" / "site" / "api.md").read_text()
    parts = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    assert list(parts) == [
        "Pretrain", "Fine-tune", "Use", "Export and import", "Plan", "Data", "Errors", "Next",
    ]  # fmt: skip
    first = {title: re.findall(r"autofunction:: (\S+)", part) for title, part in parts.items()}
    assert [names for names in first.values() if names] == [
        [f"bert_jax.{name}"] for name in ("pretrain", "finetune", "load", "export", "plan")
    ]
    modules = re.findall(r"automodule:: (\S+)\n   :members:(.*)", text)
    named = [(module, each.strip()) for module, members in modules for each in members.split(",")]
    named += [("bert_jax", name.partition(".")[2]) for names in first.values() for name in names]
    for module, member in named:
        assert not member or callable(getattr(importlib.import_module(module), member)), member


def test_the_readme_is_short_and_begins_with_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    words = [line.partition(" #")[0].strip() for line in lines[:30]]
    assert [word for word in words if word.startswith("make ")] == ["make demo", "make test"]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *DOCS.glob("**/*.md")], ids=lambda page: page.stem
)
def test_no_link_is_named_like_a_file(page: Path) -> None:
    text = _CODE.sub("", page.read_text())
    assert not re.findall(r"\[[\w./-]+\.md\]\(", text)


ENDING = sorted({*DOCS.glob("**/*.md")} - {DOCS / "index.md", *HISTORY})


@pytest.mark.parametrize("page", ENDING, ids=lambda page: page.stem)
def test_a_page_ends_with_two_or_three_next_steps(page: Path) -> None:
    _, _, steps = page.read_text().partition("\n## Next\n\n")
    items = steps.splitlines()
    assert 2 <= len(items) <= 3
    assert all(item.startswith("- ") and _LINK.search(item) for item in items), items


@pytest.mark.parametrize("page", HISTORY, ids=lambda page: page.stem)
def test_history_is_not_in_the_search(page: Path) -> None:
    assert page.read_text().startswith("---\nnosearch: true\n---\n")


def test_terms_are_sorted_and_lead_to_a_page() -> None:
    page = DOCS / "guide" / "glossary.md"
    _, *terms = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    assert terms.pop().startswith("Next")
    names = [term.partition("\n")[0] for term in terms]
    assert names == sorted(names, key=str.casefold)
    assert [term for term in terms if not _LINK.search(term)] == []


def test_the_page_of_problems_has_each_exit_code() -> None:
    listed = re.findall(r"^ {4}(\d+) ", main.__doc__ or "", re.MULTILINE)
    assert re.findall(r"^\| (\d+) \|", PROBLEMS.read_text(), re.MULTILINE) == listed


@pytest.mark.parametrize("page", FIRST, ids=lambda page: page.stem)
def test_fields_and_options_exist(page: Path) -> None:
    text = page.read_text()
    for field in re.findall(r"--config\.([\w.\[\]]+)", text):
        assert any(has(to_dict(each()), field) for each in (PretrainConfig, FinetuneConfig)), field
    known = {"--json", "--help", "--fields", "--version", "--config"}
    for name in main.MODULES:
        known |= {
            f"--{each.replace('_', '-')}" for each in main.verb_class(name).__dataclass_fields__
        }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known


def test_options_and_fields_in_commands_exist() -> None:
    """Checks pages, and docstrings of programs and recipes."""
    tasks = [{"task": to_dict(kind())} for kind in TaskConfig.VARIANTS.values()]
    objectives = [{"objective": to_dict(kind())} for kind in OBJECTIVES.values()]
    own = [to_dict(kind()) for kind in (PretrainConfig, FinetuneConfig)]
    fields = [*own, *tasks, *objectives]
    places = ["bert_jax", "benchmarks", "configs", "examples", "launch", "records"]
    programs = {path for place in places for path in (ROOT / place).glob("**/*.py")}
    wrong, count = [], 0
    for page in sorted({*PAGES, *programs} - {*HISTORY, FORMER, ROOT / "CHANGELOG.md"}):
        for verb, command in commands(page.read_text()):
            known = main.verb_class(verb).__dataclass_fields__
            count += 1
            for name in re.findall(r"(?<![\w-])--([a-z][\w.\[\]-]*[\w\]])", command):
                if "." in name:
                    is_known = any(has(each, name.removeprefix("config.")) for each in fields)
                else:
                    is_known = name == "help" or name.replace("-", "_") in known
                if not is_known:
                    wrong.append(f"{page.relative_to(ROOT)}: bert-jax {verb} --{name}")
    assert wrong == []
    assert count > 500


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield the verb and the rest of each command, in backticks or on lines of its own."""
    for found in re.finditer(rf"bert-jax ({'|'.join(main.MODULES)})(?![\w-])", text):
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        rest = text[found.end() :]
        if line.count("`") % 2:
            rest = rest.partition("`")[0]
        else:
            rest = re.match(r"(?:.*\\\n)*.*", rest)[0]  # type: ignore[index]
        yield found[1], re.split(r" \| | && |; ", rest)[0]


def has(config: Any, field: str) -> bool:
    """Whether a configuration, as nested mappings and lists, has a field."""
    for name in re.findall(r"\w+", field):
        if isinstance(config, list | tuple):
            if len(config) <= int(name):  # a field of a phase that the command adds
                return True
            config = config[int(name)]
        elif name in config:
            config = config[name]
        else:
            return False
    return True


def test_the_page_of_fine_tuning_names_the_splits_of_the_leaderboard() -> None:
    page = (DOCS / "finetuning.md").read_text()
    (named,) = re.findall(r"MNLI needs (.*?)\.\n", page, re.DOTALL)
    assert re.findall(r"--data (\w+)", named) == [*TASKS["mnli"].submissions, "ax"]


@pytest.mark.parametrize(
    ("page", "begins", "ends", "free"),
    [
        ("pretraining", "may change only", "\n\n`bert-jax status", pretrain.FREE_FIELDS),
        ("finetuning", "It refuses changed data", "\n\n## Next", finetune.FREE_FIELDS),
    ],
)
def test_a_page_names_the_fields_that_a_restart_may_change(
    page: str, begins: str, ends: str, free: tuple[str, ...]
) -> None:
    text = (DOCS / f"{page}.md").read_text()
    told = text[text.index(begins) :].partition(ends)[0]
    named = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", told)}
    assert named == {name.rpartition(".")[2] for name in free}

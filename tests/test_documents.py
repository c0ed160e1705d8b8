"""Links between the pages of the repository; `make docs` checks those of the site again."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
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
        "Pretrain", "Fine-tune", "Use", "Export and import", "Plan", "Data", "Errors",
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

"""The table of docs/guide/costs.md and its script, with a stand-in for the compiler."""

import dataclasses
import re
from pathlib import Path

import cost_table
import pytest
from cost_table import Case, Cost
from made_plans import made_plan

from bert_jax.chips import CHIPS
from bert_jax.config.command_line import load_config
from bert_jax.errors import UserError
from bert_jax.planning import planner
from bert_jax.planning.prices import Price
from bert_jax.planning.topology import parse_topology
from bert_jax.training.pretrain.config import PretrainConfig

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "costs.md"
UNPRICED = dict.fromkeys(CHIPS)


@pytest.fixture
def compiled(monkeypatch):
    """The phases compiled so far; each step takes a second for every 1,000 rows."""
    phases = []

    def compile_step(config, phase, topology, *, cache):
        phases.append(phase)
        plan = made_plan(config, phase, topology, cache=cache)
        cost = plan.cost and dataclasses.replace(plan.cost, seconds=plan.rows / 1000)
        return dataclasses.replace(plan, cost=cost)

    monkeypatch.setattr(planner, "compile_step", compile_step)
    return phases


def costs(case):
    """A cost without a compiler: an hour on each slice."""
    return Cost(case, parse_topology(case.topology), 10**10, (0.1, 0.25), 2**32, 1.0)


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_hours_add_up_over_the_phases(compiled):
    cost = cost_table.cost(Case("bert_base", "v5e:4x4"), None)
    assert cost.step_seconds == (0.256, 0.256)
    assert cost.hours == pytest.approx(1_000_000 * 0.256 / 3600)
    assert cost.tokens == 900_000 * 256 * 128 + 100_000 * 256 * 512
    row = cells(cost_table.report([cost], UNPRICED).splitlines()[2])
    assert row[:4] == ["`bert_base`", "v5e:4x4", "43", "256.0, 256.0"]
    assert row[5:] == ["71.1", "1,138", cost_table.SCORES["bert_base"]]


def test_steps_of_a_batch_warmup_count_by_their_rows_and_equal_steps_are_compiled_once(compiled):
    case = next(case for case in cost_table.CASES if case.recipe == "modernbert_base")
    cost = cost_table.cost(case, None)
    assert compiled == [0, 1], "the last phase differs from the second in its learning rate alone"
    # 1,719, 250 and 50 billion, less 5.5 by which the warm-up's rows are rounded for the slice.
    assert cost.tokens == pytest.approx(2.0135e12, rel=1e-4)
    expected = (cost.tokens - 300e9) / 1024 / 1000 + 300e9 / 8192 / 1000
    assert cost.hours == pytest.approx(expected / 3600, rel=1e-3)


def test_a_step_that_does_not_fit_is_refused(compiled):
    with pytest.raises(UserError, match="bert_large does not fit on v5e:1x1"):
        cost_table.cost(Case("bert_large", "v5e:1x1"), None)


def test_dollars_stand_beside_their_date_and_source_if_any_chip_is_priced():
    some = [costs(Case("bert_base", name)) for name in ("v5e:4x4", "v5p:4x4x4")]
    without = cost_table.report(some, UNPRICED)
    assert "dollars" not in without
    assert "$" not in without
    text = cost_table.report(some, {**UNPRICED, "v5e": Price(1.5, "2026-01-31", "a page")})
    assert "v5e: $1.5 a chip-hour on demand on 2026-01-31 (a page)." in text.splitlines()
    column = cells(text.splitlines()[0]).index("dollars")
    assert [cells(line)[column] for line in text.splitlines()[2:4]] == ["24", cost_table.UNKNOWN]


def test_the_page_has_what_the_script_prints_for_its_rows(capsys, monkeypatch, tmp_path):
    text = PAGE.read_text()
    before, _, rest = text.partition(cost_table.BEGIN)
    table, _, after = rest.partition(cost_table.END)
    lines = table.strip().splitlines()
    rows = [cells(line) for line in lines[2 : lines.index("")]]
    recipes = [row[0].strip("`") for row in rows]
    monkeypatch.setattr(cost_table, "cost", lambda case, cache: costs(case))
    page = tmp_path / "costs.md"
    page.write_text(text)
    only = [argument for recipe in recipes for argument in ("--only", recipe)]
    monkeypatch.setattr("sys.argv", ["cost_table.py", *only, "--write", str(page)])
    assert cost_table.main() == 0
    printed = capsys.readouterr().out.strip()
    assert page.read_text() == f"{before}{cost_table.BEGIN}\n\n{printed}\n\n{cost_table.END}{after}"

    made = printed.splitlines()
    assert cells(lines[0]) == cells(made[0])
    assert lines[lines.index("") :] == made[made.index("") :], "prices and commands"
    for row, line in zip(rows, made[2:], strict=False):
        assert [*row[:2], row[-1]] == [*cells(line)[:2], cells(line)[-1]]
        assert all(re.fullmatch(r"[\d,. of]+", cell) for cell in row[2:-1]), row


def test_a_page_without_marks_is_refused_before_anything_is_compiled(
    capsys, compiled, monkeypatch, tmp_path
):
    page = tmp_path / "page.md"
    page.write_text("# Costs\n")
    monkeypatch.setattr("sys.argv", ["cost_table.py", "--write", str(page)])
    assert cost_table.main() == 2
    assert str(page) in capsys.readouterr().err
    assert page.read_text() == "# Costs\n"
    assert not compiled


def test_every_command_of_the_page_is_a_case_of_a_shipped_recipe():
    for case in cost_table.CASES:
        overrides = [f"--config.{each}" for each in case.overrides]
        assert load_config(PretrainConfig, f"pretrain/{case.recipe}", overrides)
        assert f"--config={case.recipe} --topology={case.topology} --phase=all" in case.command

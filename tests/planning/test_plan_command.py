"""`bert-jax plan` as its user meets it, with a stand-in for the compiler."""

import json
import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from made_plans import made_plan

from bert_jax.cli import main as cli
from bert_jax.errors import UserError
from bert_jax.planning import output, planner, search, topology


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Answer]


@pytest.fixture
def run(capsys, monkeypatch) -> Run:
    monkeypatch.setattr(planner, "compile_step", made_plan)
    monkeypatch.setattr(planner.Planner, "_mesh_is_possible", lambda self, settings: True)

    def run(*argv: object) -> Answer:
        capsys.readouterr()
        try:
            code = cli.main(["plan", "--config=pretrain/bert_base", *[str(a) for a in argv]])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        return Answer(code, *capsys.readouterr())

    return run


def test_a_plan_that_fits(run: Run):
    answer = run("--topology=v5e:4x4")
    assert answer.code == 0
    for part in (
        "30,522 tokens assumed", "v5e:4x4  16 chips", "mesh data 16 x fsdp 1 x tensor 1",
        "parameters", "all-reduce", "predicted step", "MFU", "model/layers.py:45",
        "how it is estimated", "█",
    ):  # fmt: skip
        assert part in answer.out
    assert "compiling v5e:4x4 phase 0" in answer.err


def test_a_hint_where_the_batch_is_small(run: Run):
    assert "--batch-per-chip=fast shows" in run("--topology=v5e:16x16").out
    assert "--batch-per-chip=fast shows" not in run("--topology=v5e:4x4").out


def test_json_is_one_object(run: Run):
    answer = run("--topology=v5e:4x4", "--topology=tpu7x:2x2x1", "--phase=all", "--json")
    assert answer.code == 0
    record = json.loads(answer.out)
    assert record["schema"] == 2
    assert [(p["topology"], p["length"]) for p in record["plans"]] == [
        ("v5e:4x4", 128), ("v5e:4x4", 512), ("tpu7x:2x2x1", 128), ("tpu7x:2x2x1", 512),
    ]  # fmt: skip
    for plan in record["plans"]:
        assert set(plan) == {
            "topology", "chips", "phase", "length", "batch_size", "accumulation", "rows_per_chip",
            "mesh", "model", "optimizer", "fits", "refused", "memory_per_chip", "hbm_per_chip",
            "usable_per_chip", "needs_per_chip", "collectives", "step_seconds", "cycles",
            "ideal_seconds", "tokens_per_second", "mfu", "parts", "hidden", "how", "top",
            "lowering_seconds", "compile_seconds", "cached", "configuration_fits",
        }  # fmt: skip
        memory = plan["memory_per_chip"]
        assert memory["peak"] == sum(v for k, v in memory.items() if k != "peak")
        assert 0 < plan["mfu"] < 1
        assert plan["tokens_per_second"] == pytest.approx(
            plan["batch_size"] * plan["length"] / plan["step_seconds"]
        )
        assert plan["collectives"] == [
            {
                "kind": "all-reduce", "network": "ici", "axes": ["data"],
                "group_size": plan["mesh"]["data"], "runs": 3, "bytes": 3 * 2**30,
            }
        ]  # fmt: skip
    # A chip of two devices: memory of both, rows of both.
    one, two = record["plans"][0], record["plans"][2]
    assert two["rows_per_chip"] == 256 / 4
    assert two["mesh"]["data"] == 8
    assert two["memory_per_chip"]["parameters"] == 2 * one["memory_per_chip"]["parameters"]


@pytest.mark.drawn
def test_comparison_and_picture(run: Run, tmp_path):
    where = tmp_path / "plan.png"
    answer = run("--topology=v5e:4x4", "--topology=v6e:16x16", f"--plot={where}")
    assert answer.code == 0
    table = answer.out.splitlines()[-3:]
    assert [row.split()[0] for row in table] == ["topology", "v5e:4x4", "v6e:16x16"]
    assert where.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_many_plans_hides_none(run: Run, tmp_path, monkeypatch):
    """Names do not overlap; the colours are explained below the bars."""
    figures: list[Any] = []
    monkeypatch.setattr(output, "write_picture", lambda figure, path: figures.append(figure))
    places = [f"--topology=v5e:{n}x{n}" for n in (4, 8, 16)]
    assert run(*places, "--phase=all", f"--plot={tmp_path / 'x.png'}").code == 0
    (figure,) = figures
    figure.draw_without_rendering()
    names = [each.get_window_extent() for each in figure.axes[0].get_yticklabels()]
    assert len(names) == 6
    assert all(upper.y0 > lower.y1 for upper, lower in pairwise(names))
    for axes in figure.axes:
        colours = axes.get_legend().get_window_extent()
        assert 0 <= colours.y0 < colours.y1 <= axes.get_window_extent().y0


def test_what_does_not_fit_and_what_does(run: Run):
    answer = run("--topology=v5e:2x2", "--batch-per-chip=1024", "--json")
    assert answer.code == 1
    (plan,) = json.loads(answer.out)["plans"]
    assert plan["configuration_fits"] is False
    assert plan["configured"]["fits"] is False
    assert plan["configured"]["needs_per_chip"] > plan["usable_per_chip"]
    assert plan["fits"] is True
    assert plan["batch_size"] == 4 * 1024, "the rows of a step stay"
    assert any("accumulation" in o or "remat" in o for o in plan["overrides"])
    again = run("--topology=v5e:2x2", "--batch-per-chip=1024")
    assert again.code == 1
    assert "does not fit" in again.out
    assert "more than the usable" in again.out
    assert shlex.join(plan["overrides"]) in again.out


def test_the_overrides_fit_when_given(run: Run):
    batch = "--config.training.phases[0].batch_size=4096"
    (plan,) = json.loads(run("--topology=v5e:2x2", batch, "--json").out)["plans"]
    overrides = plan["overrides"]
    again = run("--topology=v5e:2x2", batch, "--json", *overrides)
    assert again.code == 0
    assert json.loads(again.out)["plans"][0]["memory_per_chip"] == plan["memory_per_chip"]


def test_nothing_fits(run: Run, monkeypatch):
    monkeypatch.setattr(search, "candidates", lambda *a, **k: [])
    answer = run("--topology=v5e:2x2", "--batch-per-chip=4096")
    assert answer.code == 1
    assert "use more chips" in answer.out


def test_not_even_one_row_fits(run: Run, monkeypatch):
    monkeypatch.setattr(search, "candidates", lambda *a, **k: [])
    many = "--config.model.num_layers=4000"
    answer = run("--topology=v5e:1x1", "--batch-per-chip=fit", many)
    assert answer.code == 1
    assert "not even one row per chip fits; use more chips" in answer.out


def test_fit(run: Run):
    answer = run("--topology=v5e:4x4", "--batch-per-chip=fit", "--json")
    assert answer.code == 0
    (plan,) = json.loads(answer.out)["plans"]
    assert plan["fit"]["largest_rows_per_chip"] == plan["rows_per_chip"]
    assert plan["memory_per_chip"]["peak"] <= plan["usable_per_chip"]
    assert plan["memory_per_chip"]["peak"] > 0.9 * plan["usable_per_chip"]
    assert plan["overrides"] == [
        f"--config.training.phases[0].batch_size={int(plan['rows_per_chip']) * 16}"
    ]
    mfu = list(plan["fit"]["predicted_mfu_by_rows_per_chip"].values())
    assert mfu == sorted(mfu)
    assert mfu[-1] == pytest.approx(plan["mfu"], rel=0.01)
    people = run("--topology=v5e:4x4", "--batch-per-chip=fit")
    assert "largest batch that fits" in people.out


def test_the_accumulation_for_the_configured_rows_divides_them(run: Run):
    """9 rows a chip fit; 35 rows, of each of 4 micro-batches, are not 4 parts but 5 of 7 rows."""
    rows, parts = (f"--config.training.phases[0].{name}" for name in ("batch_size", "accumulation"))
    given = ["--topology=v5e:2x4", "--config.model.num_layers=400", f"{rows}=1120"]
    answer = run(*given, f"{parts}=4", "--batch-per-chip=fit")
    assert f"to keep the configured 1,120 rows per step: '{parts}=20'\n" in answer.out
    assert run(*given, f"{parts}=20").code == 0


def test_fast_leads_with_the_configured_batch_and_half_a_million_tokens(run: Run):
    answer = run("--topology=v5e:4x4", "--batch-per-chip=fast", "--json")
    assert answer.code == 0
    (plan,) = json.loads(answer.out)["plans"]
    configured, usual, fastest = plan["batches"]
    assert (configured["name"], configured["overrides"]) == ("configured", [])
    for name in ("batch_size", "accumulation", "rows_per_chip", "step_seconds", "mfu"):
        assert configured[name] == plan[name], "the report is of the configured batch"
    assert plan["batch_size"] == 256
    assert (usual["name"], usual["tokens"]) == ("0.5 M tokens", 2**19)
    assert usual["rows_per_chip"] == fastest["rows_per_chip"]
    assert usual["rows_per_chip"] * usual["accumulation"] * 16 == usual["batch_size"] == 4096
    assert configured["mfu"] < usual["mfu"] <= fastest["mfu"] * 1.05

    # The stand-in's micro-batches take the same time a row whatever their size, and 3 ms a step.
    table = plan["predicted_mfu_by_rows_and_micro_batches"]
    assert all(list(row.values()) == sorted(row.values()) for row in table.values())
    rows, parts = fastest["rows_per_chip"], fastest["accumulation"]
    assert fastest["mfu"] == pytest.approx(table[f"{rows:g}"][str(parts)])
    assert table[f"{rows:g}"][str(parts)] >= 0.97 * table[f"{rows:g}"]["16"]
    for batch in plan["batches"]:
        assert batch["tokens_per_second"] == pytest.approx(batch["tokens"] / batch["step_seconds"])
        again = run("--topology=v5e:4x4", "--json", *batch["overrides"])
        (there,) = json.loads(again.out)["plans"]
        assert (there["batch_size"], there["accumulation"]) == (
            batch["batch_size"], batch["accumulation"],
        )  # fmt: skip
        assert there["mfu"] == pytest.approx(batch["mfu"], rel=0.05)

    said = run("--topology=v5e:4x4", "--batch-per-chip=fast").out
    order = [said.index(part) for part in (
        "\nconfigured ", "\n0.5 M tokens ", "\nhighest MFU ", "256 rows per step, 16 per chip",
        "MFU by rows per chip and micro-batches",
    )]  # fmt: skip
    assert order == sorted(order)
    assert shlex.join(usual["overrides"]) in said


def test_a_batch_that_does_not_fit_has_no_numbers(run: Run):
    """It fits with the one and two layers that are compiled."""
    given = ["--topology=v5e:4x4", "--batch-per-chip=fast", "--config.model.num_layers=20"]
    (plan,) = json.loads(run(*given, "--json").out)["plans"]
    table = plan["predicted_mfu_by_rows_and_micro_batches"]
    assert {rows: len(row) for rows, row in table.items()} == {"32": 5, "64": 5, "128": 5, "256": 0}
    assert re.search(r"^ +256 +does not fit$", run(*given).out, re.MULTILINE)


def test_fast_splits_a_configured_batch_that_does_not_fit(run: Run):
    large = "--config.training.phases[0].batch_size=65536"
    answer = run("--topology=v5e:4x4", "--batch-per-chip=fast", "--json", large)
    assert answer.code == 1
    (plan,) = json.loads(answer.out)["plans"]
    assert plan["configuration_fits"] is False
    assert plan["configured"]["fits"] is False
    assert plan["batches"][0]["name"] == "configured, split"
    assert plan["batches"][0]["batch_size"] == plan["batch_size"] == 65536
    assert plan["accumulation"] > 1
    assert run("--topology=v5e:4x4", large, *plan["overrides"]).code == 0


@pytest.mark.parametrize("batch", ["fast", ""])
def test_advised_settings_leave_the_other_phase_as_it_is(run: Run, batch):
    """The other phase has one row for each chip, so that phase takes no second micro-batch."""
    sizes = (
        f"--config.training.phases[{n}].batch_size={rows}" for n, rows in ((0, 65536), (1, 16))
    )
    given = ["--topology=v5e:4x4", *sizes]
    (plan,) = json.loads(run(*given, f"--batch-per-chip={batch}", "--json").out)["plans"]
    advised = [each["overrides"] for each in plan.get("batches", [plan])]
    assert any("accumulation" in word for overrides in advised for word in overrides)
    for overrides in advised:
        assert run(*given, *overrides).code == 0


@pytest.mark.parametrize("topology", ["v5e:1x1", "v5e:16x16", "v5p:4x4x12", "tpu7x:4x4x4"])
@pytest.mark.parametrize("phase", [0, 1])
def test_half_a_million_tokens_on_any_slice(run: Run, topology, phase):
    answer = run(f"--topology={topology}", f"--phase={phase}", "--batch-per-chip=fast", "--json")
    (plan,) = json.loads(answer.out)["plans"]
    usual = plan["batches"][-2]
    assert plan["configuration_fits"] == (answer.code == 0)
    assert len(plan["batches"]) == 3 - (topology == "v5p:4x4x12"), "256 rows, 192 chips"
    assert 0.5 < usual["tokens"] / 2**19 < 1.5
    assert usual["mfu"] > 0


def test_fast_where_the_configured_mesh_holds_no_batch(run: Run):
    sizes = [f"--config.model.{name}" for name in ("num_layers=40000", "scan_unroll=1")]
    answer = run("--topology=v5e:2x2", "--batch-per-chip=fast", *sizes)
    assert answer.code == 1


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--topology=v5e:3x3"], ["v5e:3x3", "near it: v5e:"]),
        (["--topology=v5e:4x4", "--phase=2"], ["--phase is '2'", "0 to 1"]),
        (["--topology=v5e:4x4", "--batch-per-chip=0"], ["--batch-per-chip is 0"]),
        (["--topology=v5e:4x4", "--plot=no/such/place.png"], ["--plot", "no directory"]),
        (["--topology=v5e:4x4", "--config.mesh.fdsp=2"], ["mesh.fdsp", "fsdp"]),
        (["--topology=v5e:4x4", "--bogus=1"], ["unknown option --bogus"]),
    ],
)
def test_wrong_arguments(run: Run, arguments, parts):
    answer = run(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert "Traceback" not in answer.err
    for part in parts:
        assert part in answer.err


def test_no_topology(run: Run):
    answer = run()
    assert answer.code == 2
    assert "--topology" in answer.err


def test_no_libtpu(run: Run, monkeypatch):
    def refuse(*arguments: object, **options: object):
        raise UserError(topology._NO_LIBTPU)

    monkeypatch.setattr(planner, "compile_step", refuse)
    answer = run("--topology=v5e:4x4", "--json")
    assert answer.code == 2
    assert answer.out == ""
    assert "pip install 'bert_jax[plan]'" in answer.err


def test_help_has_an_example(run: Run):
    answer = run("--help")
    assert answer.code == 0
    assert "--topology=v5e:16x16 --batch-per-chip=fast" in answer.out

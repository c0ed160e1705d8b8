"""The benchmarks for accelerators run on a CPU, in their tiny form."""

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attention_says_that_it_needs_an_accelerator():
    assert "needs an accelerator" in run("attention.py")


def test_attention_smoke():
    rows = [json.loads(row) for row in run("attention.py", "--smoke", "--json").splitlines()]
    assert all(row["right"] for row in rows)
    assert [(row["case"], row["side"]) for row in rows] == [
        *(("2 x 128, bfloat16, window -, dropout 0.1", side) for side in ("xla", "fused")),
        *(
            ("2 x 128, float32, window 16, dropout 0.0", side)
            for side in ("xla", "banded", "fused")
        ),
    ]


def test_options_of_a_bar_in_percent_are_explained(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check_cost.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        importlib.import_module("check_cost").main()
    assert "--check" in capsys.readouterr().out


@pytest.fixture
def gpu(monkeypatch):
    """The driver of `make gpu` and its table."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "gpu"))
    import gpu_table
    import measure

    return SimpleNamespace(measure=measure, **vars(gpu_table))


DEVICE = {
    "device": "card", "matmul_flops": 1e12,
    "versions": {"torch": "2", "transformers": "5", "flash_attn": None},
}  # fmt: skip


def trained(case, side, milliseconds, rows=8, mfu=0.4):
    return {
        "part": "train", "case": case, "side": side, "rows": rows, "mfu": mfu,
        "milliseconds": milliseconds,
    }  # fmt: skip


def test_gpu_goals_compare_with_the_fastest_peer_on_as_many_rows(gpu):
    table, case = gpu.Table(DEVICE), "bert_large, L=128"
    assert all(goal["reached"] is None for goal in table.goals())
    table.add(trained(case, "bert_jax", 10.0))
    table.add(trained(case, "flex_attention", 18.0))
    table.add(trained(case, "sdpa", 14.0))
    table.add(trained(case, "flash_attention_2", 1.0, rows=4))
    short = [text for text in table.shortfalls() if case in text]
    assert short == [
        f"{case}: MFU: 0.4, goal 0.5",
        f"{case}: times the fastest peer: 1.4, goal 1.5",
    ]
    table.add(trained(case, "bert_jax", 8.0, mfu=0.5))
    assert not [text for text in table.shortfalls() if case in text]


def test_gpu_table_is_merged_and_a_failure_replaces_no_measurement(gpu, tmp_path):
    table, case = gpu.Table(DEVICE), "bert_base, L=512"
    table.add(trained(case, "bert_jax", 10.0))
    table.save(tmp_path)
    table = gpu.Table.load(tmp_path)
    for side in ("bert_jax", "sdpa"):
        table.add({"part": "train", "case": case, "side": side, "failed": "out of memory"})
    assert [record.get("failed") for record in table.records] == [None, "out of memory"]
    assert f"| {case} | sdpa | failed: out of memory |" in table.markdown()
    table.forget_failure({"part": "train", "case": case, "side": "sdpa"})
    table.add(trained(case, "sdpa", 30.0))
    assert f"| {case} | sdpa | 8 | 30 |  | 40.0% | 3 |" in table.markdown()


def test_gpu_parts_begin_with_the_cases_that_have_no_result(gpu):
    table = gpu.Table(DEVICE)
    for side in ("bert_jax", "sdpa"):
        table.add(trained("bert_large, L=128", side, 10.0))
    options = Namespace(part="train", case="", smoke=False)
    tasks = gpu.measure.in_order(gpu.measure.plan(table, options), table)
    cases = list(dict.fromkeys(task.case for task in tasks))
    assert (len(cases), cases[-1]) == (6, "bert_large, L=128")
    assert {task.side for task in tasks} == {"bert_jax", "sdpa", "flex_attention"}
    assert not any(task.missing for task in tasks)
    table.device = {**DEVICE, "versions": {**DEVICE["versions"], "torch": None}}
    tasks = gpu.measure.plan(table, options)
    assert {task.missing for task in tasks if task.side == "sdpa"} == {("torch",)}
    assert not [task for task in tasks if task.side == "bert_jax" and task.missing]


@pytest.mark.parametrize(
    ("script", "results", "failed"),
    [
        ("print('words'); print('{\"n\": 1}')", [{"n": 1}], ""),
        ("print('{\"n\": 1}', flush=True); import time; time.sleep(99)", [{"n": 1}], "stopped"),
        ("import no_such_package", [], "missing: no_such_package"),
        ("raise RuntimeError('RESOURCE_EXHAUSTED: 1 GiB')", [], "out of memory"),
        ("raise ValueError('odd')", [], "ValueError: odd"),
    ],
)
def test_gpu_measurements_are_bounded_and_what_they_print_is_kept(
    gpu, tmp_path, script, results, failed
):
    path = tmp_path / "script.py"
    path.write_text(script)
    outcome = gpu.measure.run_bounded((str(path),), 20.0 if failed == "stopped" else 60.0)
    assert outcome.results == results
    assert outcome.failed.startswith(failed)
    assert bool(outcome.failed) == bool(failed)


def test_gpu_measurements_need_one(gpu, monkeypatch, tmp_path, capsys):
    found = gpu.measure.Outcome([{**DEVICE, "platform": "cpu"}], "")
    monkeypatch.setattr(gpu.measure, "run_bounded", lambda command, seconds: found)
    monkeypatch.setattr(sys, "argv", ["measure.py", "--out", str(tmp_path / "out")])
    assert gpu.measure.main() == 2
    assert "JAX sees card alone" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def smoke(tmp_path, part):
    run("gpu/measure.py", "--smoke", f"--part={part}", f"--out={tmp_path}")
    content = json.loads((tmp_path / "results.json").read_text())
    return {(r["part"], r["side"]) for r in content["records"] if not r.get("failed")}


@pytest.mark.slow
def test_gpu_smoke_of_the_sweep(tmp_path):
    assert smoke(tmp_path, "sweep") == {("sweep", "together"), ("sweep", "alone")}


@pytest.mark.parity
def test_gpu_smoke_of_all_parts(tmp_path):
    found = smoke(tmp_path, "all")
    assert {part for part, _ in found} == {"numerics", "train", "sweep", "inference"}
    assert {side for part, side in found if part == "train"} == {"bert_jax", "sdpa"}
    assert ("inference", "pipeline, batch 2") in found


def test_a_search_for_near_duplicates_is_simulated(capsys):
    pytest.importorskip("rensa")
    import near_duplicates

    arguments = Namespace(input=[], documents=400, words=60, copies=0.3, threshold=0.8)
    sample = near_duplicates.Sample(arguments)
    capsys.readouterr()
    near_duplicates.report(1e9, sample, 11, {"scan": 0.5, "keys": 1.5}, edge=1e-6)
    said = [line[2:23].strip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert said == [
        "opened files", "signatures", "written, read", "candidates", "edges", "rounds",
        "memory of processes", "largest",
    ]  # fmt: skip

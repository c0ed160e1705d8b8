"""Real compilations for TPU slices, of models small enough for the test suite.

What they hold: the real train step compiles; and on more chips, at the same batch per chip, the
same collectives run and a chip needs the same memory. A change that makes every chip hold or move
what belongs to all of them shows here before it costs a pod.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from bert_jax.cli import main as cli
from bert_jax.config.command_line import load_config
from bert_jax.planning.command import with_rows_per_chip
from bert_jax.planning.compile import Plan, compile_step
from bert_jax.planning.topology import parse_topology
from bert_jax.training.pretrain.config import PretrainConfig

pytest.importorskip("libtpu", reason="libtpu is not installed: no TPU slice can be compiled for")

FIELDS = [
    f"--config.{field}"
    for field in (
        "model.vocab_size=1000", "model.num_positions=64", "model.hidden_dim=128",
        "model.num_layers=1", "model.num_heads=2", "model.mlp_dim=256",
        "training.phases[0].length=64", "training.phases[1].length=64",
    )
]  # fmt: skip
ROWS_PER_CHIP = 8


@pytest.fixture(autouse=True)
def optimised() -> Iterator[None]:
    """The suite switches optimisations off; here they are what is looked at."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """What one test has compiled, another reads."""
    return tmp_path_factory.mktemp("compiled")


def small_plan(name: str, cache: Path) -> Plan:
    topology = parse_topology(name)
    config = load_config(PretrainConfig, "pretrain/bert_base", FIELDS)
    config = with_rows_per_chip(config, 0, topology, ROWS_PER_CHIP)
    return compile_step(config, 0, topology, cache=cache)


@pytest.mark.slow
def test_a_chip_of_a_larger_slice_does_the_same(cache):
    small, large = small_plan("v5e:4x4", cache), small_plan("v5e:8x8", cache)
    assert small.fits
    assert large.fits
    exchanges = [
        {(e.kind, e.axes, e.runs, e.bytes) for e in plan.exchanges} for plan in (small, large)
    ]
    assert exchanges[0] == exchanges[1]
    a, b = small.memory, large.memory
    assert (a.parameters, a.optimizer, a.batch) == (b.parameters, b.optimizer, b.batch)
    assert b.peak == pytest.approx(a.peak, rel=0.03)
    assert small.program is not None
    assert large.program is not None
    assert large.program.cycles == pytest.approx(small.program.cycles, rel=0.03)
    # Plain data parallelism: the gradient is reduced, and nothing else moves.
    assert {(kind, axes) for kind, axes, _, _ in exchanges[0]} == {("all-reduce", ("data",))}
    size = sum(moved for *_, moved in exchanges[0])
    assert 0.45 * a.parameters < size < 1.05 * a.parameters, "each gradient once"


def test_the_command_compiles(capsys, cache):
    batch = f"--batch-per-chip={ROWS_PER_CHIP}"
    arguments = ["plan", "--config=pretrain/bert_base", "--topology=v5e:4x4", "--json", batch,
                 f"--cache={cache}", *FIELDS]  # fmt: skip
    assert cli.main(arguments) == 0
    (first,) = json.loads(capsys.readouterr().out)["plans"]
    assert first["fits"]
    assert 0 < first["mfu"] < 1
    assert any(".py:" in e["source"] for e in first["top"])
    assert cli.main(arguments) == 0
    (second,) = json.loads(capsys.readouterr().out)["plans"]
    assert second["cached"] is True
    for name in ("step_seconds", "memory_per_chip", "collectives", "top"):
        assert second[name] == first[name]

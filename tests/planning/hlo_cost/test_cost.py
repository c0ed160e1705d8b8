"""Seconds from cycles, bytes and kernels, checked by hand."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from bert_jax.chips import CHIPS
from bert_jax.planning.hlo_cost.cost import (
    MXU_SHARE,
    PRODUCT_CYCLES,
    STEP_CYCLES,
    Collective,
    Loop,
    Op,
    Program,
    Transfer,
    collective_seconds,
    estimate,
    op_seconds,
)
from bert_jax.planning.hlo_cost.hlo import parse_program
from bert_jax.planning.hlo_cost.kernels import work_of

GOLDEN = Path(__file__).with_name("golden")
V5E = CHIPS["v5e"]
OP = Op(
    name="fusion",
    kind="xla",
    cycles=1500,
    runs=1,
    bytes=0,
    hbm_bytes=0,
    source="model/encoder.py:1 f",
    phase="forward",
)
EXCHANGE = Collective(
    name="all-reduce",
    kind="all-reduce",
    network="ici",
    bytes=1_000_000,
    axes=("data",),
    group_size=16,
    runs=1,
    asynchronous=False,
    overlapped_cycles=0,
    source="model/encoder.py:2 g",
    phase="backward",
)


def program(ops=(), collectives=(), transfers=(), loops=(), devices=16):
    return Program(tuple(ops), tuple(collectives), tuple(transfers), tuple(loops), devices)


def test_cycles_become_seconds_by_the_clock_and_the_runs():
    cost = estimate(program([OP, replace(OP, runs=3, name="b")]), V5E)
    assert cost.seconds == pytest.approx(4 * 1500 / 1.5e9)
    assert cost.parts["xla"] == cost.seconds
    assert cost.top[0] == (pytest.approx(3e-6), "model/encoder.py:1 f [forward]", "b")
    assert cost.by_source == ((pytest.approx(4e-6), "model/encoder.py:1 f [forward]"),)
    assert "1.5 GHz" in cost.how["xla"]


def test_operations_without_cycles_cost_their_bytes():
    gather = replace(OP, cycles=None, bytes=819_000, runs=2)
    cost = estimate(program([gather]), V5E)
    assert cost.parts["unestimated"] == pytest.approx(2e-6)
    assert "xla" not in cost.parts


def test_the_parts_sum_to_the_step():
    for name, shape, torus in (
        ("sharded", {"data": 2, "fsdp": 4, "tensor": 1}, (2, 4)),
        ("slices", {"data": 8, "fsdp": 1, "tensor": 1}, (2, 2)),
        ("scans", {"data": 1, "fsdp": 1, "tensor": 1}, ()),
        ("kernel", {"data": 1, "fsdp": 1, "tensor": 1}, ()),
    ):
        cost = estimate(parse_program((GOLDEN / f"{name}.hlo").read_text(), shape), V5E, torus)
        assert cost.seconds == pytest.approx(sum(cost.parts.values()))
        assert sum(s for s, _ in cost.by_source) == pytest.approx(cost.seconds)
        assert set(cost.parts) <= set(cost.how)
        assert all(seconds >= 0 for seconds in (*cost.parts.values(), *cost.hidden.values()))


@pytest.mark.parametrize(
    ("kind", "group", "devices", "torus", "milliseconds"),
    [
        # 15/16 of 1 MB twice, over four links of 50 GB/s; without wrap-around half of that.
        ("all-reduce", 16, 16, (4, 4), 0.01875),
        ("all-reduce", 256, 256, (16, 16), 2 * 255 / 256 * 1e6 / 200e9 * 1e3),
        ("all-gather", 256, 256, (16, 16), 255 / 256 * 1e6 / 200e9 * 1e3),
        ("reduce-scatter", 16, 256, (16, 16), 15 / 16 * 1e6 / 100e9 * 1e3),
        ("reduce-scatter", 4, 16, (4, 4), 3 / 4 * 1e6 / 50e9 * 1e3),
        ("reduce-scatter", 8, 256, (16, 16), 7 / 8 * 1e6 / 50e9 * 1e3),
        ("collective-permute", 2, 16, (4, 4), 1e6 / 50e9 * 1e3),
    ],
)
def test_rings(kind, group, devices, torus, milliseconds):
    exchange = replace(EXCHANGE, kind=kind, group_size=group)
    seconds = collective_seconds(exchange, V5E, program(devices=devices), torus)
    assert seconds * 1e3 == pytest.approx(milliseconds)


def test_a_group_may_fill_several_dimensions():
    exchange = replace(EXCHANGE, kind="all-gather", group_size=64)
    seconds = collective_seconds(exchange, CHIPS["v5p"], program(devices=512), (8, 8, 8))
    assert seconds == pytest.approx(63 / 64 * 1e6 / 400e9)


def test_xla_may_use_fewer_links_than_there_are():
    one_ring = replace(EXCHANGE, colors=1)
    seconds = collective_seconds(one_ring, V5E, program(), (4, 4))
    assert seconds == pytest.approx(2 * 15 / 16 * 1e6 / 50e9)


def test_between_slices_the_data_centre_network_counts():
    exchange = replace(EXCHANGE, network="dcn", group_size=2)
    seconds = collective_seconds(exchange, V5E, program())
    assert seconds == pytest.approx(2 * 0.5 * 1e6 / V5E.dcn_bytes_per_s)


def test_asynchronous_collectives_count_for_what_outlasts_the_work():
    whole = collective_seconds(EXCHANGE, V5E, program(), (4, 4))
    beside = replace(EXCHANGE, asynchronous=True, overlapped_cycles=round(0.4 * whole * 1.5e9))
    cost = estimate(program(collectives=[beside]), V5E, (4, 4))
    assert cost.parts["collectives exposed"] == pytest.approx(0.6 * whole, rel=1e-3)
    assert cost.hidden["collectives"] == pytest.approx(0.4 * whole, rel=1e-3)
    longer = replace(beside, overlapped_cycles=10**9)
    assert estimate(program(collectives=[longer]), V5E, (4, 4)).seconds == 0


def test_copies_count_for_what_outlasts_everything():
    copies = [Transfer(819_000, 2)]
    assert estimate(program(transfers=copies), V5E).parts["copies exposed"] == pytest.approx(2e-6)
    hidden = estimate(program([replace(OP, cycles=15_000)], transfers=copies), V5E)
    assert hidden.seconds == pytest.approx(10e-6)
    assert hidden.hidden["copies"] == pytest.approx(2e-6)


def test_devices_of_a_chip_share_it():
    """tpu7x: two devices; bytes take twice as long on half of the chip, cycles do not."""
    gather = replace(OP, cycles=None, bytes=7_380_000)
    assert op_seconds(gather, CHIPS["tpu7x"].per_device) == pytest.approx(2e-6)
    assert estimate(program([gather]), CHIPS["tpu7x"]).seconds == pytest.approx(2e-6)


def test_loops_of_unknown_length_are_named():
    loop = Loop("while.3", None, 1, 100, "model/encoder.py:9 h")
    assert (
        "while.3 (model/encoder.py:9 h)"
        in estimate(program(loops=[loop]), V5E).how["unknown loops"]
    )
    assert "unknown loops" not in estimate(program(), V5E).how


def test_kernels_are_counted_in_their_own_program():
    """Splash, 2 rows x 4 heads x (256 / 128)^2 blocks of 128 x 128 scores, heads of 64."""
    body = re.search(r'"body":"([^"]*)"', (GOLDEN / "kernel.hlo").read_text()).group(1)
    work = work_of(body)
    assert work.exact
    assert work.steps == 2 * 4 * 2 * 2
    flops = 4 * (2 * 4) * 256 * 256 * 64
    assert sum(2 * m * k * n * times for m, k, n, times, _ in work.products) == flops
    assert work.mxu_flops(128) == 2 * flops
    assert work.mxu_flops(256) == 2 * 4 * flops  # 64 -> 256 and 128 -> 256
    scores = 2 * 4 * 256 * 256
    assert 5 * scores < work.vector < 20 * scores
    assert scores <= work.transcendentals
    op = replace(OP, kind="pallas", cycles=None, kernel=body)
    assert work.num_products == 2 * work.steps
    arrays = work.mxu_flops(128) / 197e12
    other = (work.vector / 4 + work.transcendentals) / 1024
    other += work.num_products * PRODUCT_CYCLES + work.steps * STEP_CYCLES
    assert op_seconds(op, V5E) == pytest.approx(MXU_SHARE * arrays + other / 1.5e9)
    assert op_seconds(replace(op, hbm_bytes=819 * 10**9), V5E) == pytest.approx(1)


@pytest.mark.parametrize("known", [True, False])
def test_loops_of_kernels_count_as_often_as_they_run(known):
    def kernel(x_ref, o_ref):
        def add(_, x):
            return x + 1.0

        o_ref[...] = jax.lax.fori_loop(0, 5 if known else pl.program_id(0), add, x_ref[...])

    def call(x):
        return pl.pallas_call(kernel, out_shape=x, grid=(3,))(x)

    x = jnp.zeros((8, 128))
    text = jax.jit(call).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    work = work_of(re.search(r"body\\22: \\22([\w+/=]+)", text).group(1))
    assert (work.steps, work.products) == (3, ())
    assert work.exact == known
    assert not known or work.vector == 3 * 5 * 8 * 128


def test_kernels_that_cannot_be_read_are_named_and_count_by_what_they_state():
    op = replace(OP, kind="pallas", cycles=None, kernel="AAAA", flops=197 * 10**9, bytes=819)
    cost = estimate(program([op]), V5E)
    assert work_of("AAAA") is None
    assert cost.parts["pallas"] == pytest.approx(2e-3)
    assert "fusion" in cost.how["kernels not counted"]
    silent = estimate(program([replace(op, kernel="", flops=None)]), V5E)
    assert silent.parts["pallas"] == pytest.approx(1e-9)

import dataclasses
import json
import time

import psutil
import pytest

from bert_jax.artefacts.saved.runs import (
    Start,
    down_seconds,
    read_starts,
    spent,
    total_seconds,
)
from bert_jax.training.run.goodput import Clock, Goodput, process_age


class FakeTime:
    """Both clocks of a machine."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1000.0 + self.now


@pytest.fixture
def now():
    return FakeTime()


def begun(path, now, restored_step, age=0.0) -> Goodput:
    return Goodput(path, Clock(now, age=age), restored_step, wall=now.wall)


def test_clock_tells_steps_from_the_rest(now):
    clock = Clock(now)
    now.now = 10.0
    with clock.spend("compile"):
        now.now = 30.0
    with clock.spend("input"):
        now.now = 35.0
    now.now = 50.0
    assert clock.stepping == 30.0  # of 50: all but the compilation
    assert clock.goodput == pytest.approx(0.5)  # waiting for input is not productive
    assert clock.seconds == {"productive": 25.0, "compile": 20.0, "input": 5.0}


def test_the_inner_of_two_reasons_counts(now):
    clock = Clock(now)
    with clock.spend("evaluation"):
        now.now = 1.0
        with clock.spend("compile"):
            now.now = 4.0
        now.now = 6.0
        assert clock.spent == {"evaluation": 3.0, "compile": 3.0}  # so far
    now.now = 7.0
    assert clock.spent == {"evaluation": 3.0, "compile": 3.0}
    assert sum(clock.seconds.values()) == clock.elapsed == 7.0


def test_what_came_before_the_first_step_is_start_up(now):
    clock = Clock(now, age=5.0)
    now.now = 2.0
    with clock.spend("restore"):
        now.now = 10.0
    now.now = 11.0
    clock.started()
    assert clock.seconds == {"startup": 8.0, "restore": 8.0, "productive": 0.0}
    now.now = 12.0
    assert clock.stepping == 1.0


def test_totals_are_kept_over_starts_and_repeated_steps_are_lost(tmp_path, now):
    path = tmp_path / "goodput.json"
    first = begun(path, now, 0, age=4.0)
    first.clock.started()
    now.now = 100.0
    first.record(50)  # two seconds a step; then it is killed

    now.now = 160.0
    second = begun(path, now, 30)
    assert second.shares() == {
        "perf/goodput": 60 / 104, "perf/badput_startup": 4 / 104, "perf/badput_lost": 40 / 104,
    }  # fmt: skip
    with second.clock.spend("compile"):
        now.now = 180.0
    now.now = 206.0
    second.record(40)
    shares = second.shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["perf/goodput"] == (60 + 26) / 150
    assert shares["perf/badput_compile"] == 20 / 150
    one, two = read_starts(path)
    assert (one.begin, one.last, one.first_step, one.last_step, one.kept_step) == (
        996.0, 1100.0, 0, 50, 30,
    )  # fmt: skip
    assert (two.begin, two.last, two.first_step, two.last_step, two.kept_step) == (
        1160.0, 1206.0, 30, 40, 40,
    )  # fmt: skip
    assert down_seconds([one, two]) == 60.0


def test_a_start_that_dies_before_its_first_step_was_start_up(tmp_path, now):
    path = tmp_path / "goodput.json"
    clock = Clock(now)
    now.now = 30.0
    Goodput(path, clock, 0, wall=now.wall)
    assert read_starts(path)[0].seconds == {"productive": 0.0, "startup": 30.0}


def test_a_start_that_saved_all_it_did_loses_nothing(tmp_path, now):
    path = tmp_path / "goodput.json"
    first = begun(path, now, 0)
    now.now = 10.0
    first.record(5)
    second = begun(path, now, 5)
    assert second.shares() == {"perf/goodput": 1.0}


def test_going_back_beyond_the_last_start_loses_of_those_before_too(tmp_path, now):
    path = tmp_path / "goodput.json"
    for step in (10, 20):  # a second a step
        goodput = begun(path, now, step - 10)
        now.now += 10.0
        goodput.record(step)
    assert begun(path, now, 4).shares() == {"perf/goodput": 4 / 20, "perf/badput_lost": 16 / 20}
    # And again from there: what is lost already is not lost twice.
    assert begun(path, now, 4).shares() == {"perf/goodput": 4 / 20, "perf/badput_lost": 16 / 20}
    assert begun(path, now, 2).shares() == {"perf/goodput": 2 / 20, "perf/badput_lost": 18 / 20}


def test_many_starts_are_added_up(tmp_path, now, monkeypatch):
    monkeypatch.setattr("bert_jax.training.run.goodput._MAX_STARTS", 5)
    path = tmp_path / "goodput.json"
    for step in range(12):
        goodput = begun(path, now, step)
        now.now += 2.0
        goodput.tick(step + 1, 10**9)
        goodput.record(step + 1)
        now.now += 1.0
    starts = read_starts(path)
    assert len(starts) == 5
    assert sum(start.count for start in starts) == 12
    assert (starts[0].first_step, starts[-1].last_step) == (0, 12)
    assert total_seconds(starts) == {"productive": 24.0}
    assert down_seconds(starts) == pytest.approx(11.0)
    assert sum(start.flops for start in starts) == 12 * 10**9


def test_hours_and_operations_of_all_starts(tmp_path, now):
    path = tmp_path / "goodput.json"
    assert spent(path) == {}
    begun(path, now, 0)  # as before devices were recorded
    Goodput(path, Clock(now), 0, "8 x cpu", wall=now.wall)
    assert spent(path) == {}
    path.unlink()
    for devices in ("8 x cpu", "4 x cpu"):
        goodput = Goodput(path, Clock(now), 0, devices, wall=now.wall)
        for step in (1, 2):
            now.now += 900.0
            goodput.tick(step, 5 * 10**9)
    assert spent(path) == {"hours": 1.0, "flops": 20 * 10**9, "devices": "4 x cpu"}


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", '{"starts": 3}', '{"starts": [{}]}', '{"starts": [{"begin": 1}]}',
        "[" * 100_000, '{"starts": [null]}', "\0" * 50,
    ],
)  # fmt: skip
def test_a_file_that_is_none_begins_anew(tmp_path, now, caplog, text):
    path = tmp_path / "goodput.json"
    path.write_text(text)
    goodput = begun(path, now, 3)
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    now.now = 1.0
    assert goodput.shares() == {"perf/goodput": 1.0}
    assert len(read_starts(path)) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("seconds", {"productive": "1"}), ("seconds", {"productive": float("nan")}), ("count", 1.5)],
)
def test_values_of_another_kind_begin_anew(tmp_path, name, value):
    path = tmp_path / "goodput.json"
    row = dataclasses.asdict(Start(1.0, 2.0, 0, 1, 1, {"productive": 1.0}))
    path.write_text(json.dumps({"starts": [row]}))
    assert len(read_starts(path)) == 1
    path.write_text(json.dumps({"starts": [row | {name: value}]}))
    assert read_starts(path) == []


def test_a_directory_that_vanishes_ends_nothing(tmp_path, now, caplog):
    here, away = tmp_path / "run", tmp_path / "away"
    here.mkdir()
    goodput = begun(here / "goodput.json", now, 0)
    here.rename(away)
    now.now = 1.0
    goodput.record(1)
    goodput.record(2)
    assert len(caplog.records) == 1
    away.rename(here)
    goodput.record(3)
    assert read_starts(here / "goodput.json")[0].last_step == 3
    assert [p.name for p in here.iterdir()] == ["goodput.json"]


def test_ticks_are_written_every_few_seconds(tmp_path, now):
    path = tmp_path / "goodput.json"
    goodput = begun(path, now, 0)
    seen = []
    for step in range(1, 31):
        now.now += 1.0
        goodput.tick(step)
        seen.append(read_starts(path)[0].last_step)
    assert sorted(set(seen)) == [0, 10, 20, 30]


def test_other_processes_write_nothing(tmp_path, now):
    goodput = begun(None, now, 7)
    now.now = 3.0
    goodput.tick(8)
    goodput.record(9)
    assert goodput.shares() == {"perf/goodput": 1.0}


def test_no_time_has_no_share(now):
    assert begun(None, now, 7).shares() == {"perf/goodput": 0.0}


def test_age_is_that_of_the_process(monkeypatch):
    created = psutil.Process().create_time()
    assert process_age() == pytest.approx(psutil.time.time() - created, abs=30)
    later = time.clock_gettime(time.CLOCK_BOOTTIME) + 1000
    age = process_age()
    monkeypatch.setattr(time, "clock_gettime", lambda clock: later)
    assert process_age() == pytest.approx(age + 1000, abs=30)

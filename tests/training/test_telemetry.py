import json
import math

import numpy as np
import pytest

from bert_jax.training.goodput import Clock
from bert_jax.training.loss_curve import draw_loss_curve, loss_figure, smooth
from bert_jax.training.telemetry import (
    Means,
    MetricsLog,
    Telemetry,
    duration,
    peak_flops,
    read_metrics,
)


class FakeTime:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_log_drops_rows_beyond_the_restored_step_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in (2, 4, 6):
        log.write(step, {"train/loss": step / 3})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "train/lo')  # killed while writing
    log = MetricsLog(path, 4)
    assert [row["step"] for row in read_metrics(path)] == [2, 4]
    log.write(6, {"train/loss": 2.0})
    log.sync()
    log.close()
    assert read_metrics(path) == [
        {"step": 2, "train/loss": 2 / 3},
        {"step": 4, "train/loss": 4 / 3},
        {"step": 6, "train/loss": 2.0},
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_log_writes_json_for_every_number(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.write(1, {"train/loss": math.nan, "train/x": math.inf})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1, "train/loss": None, "train/x": None,
    }  # fmt: skip


def test_means_start_anew_and_their_state_is_exact():
    means = Means()
    for value in (0.1, 0.7, 0.3):
        means.add({"loss": value})
    again = Means(**json.loads(json.dumps({"sums": means.sums, "count": means.count})))
    assert again == means
    assert means.take() == {"loss": (0.1 + 0.7 + 0.3) / 3}
    means.add({"loss": 5.0})
    assert means.take() == {"loss": 5.0}


def test_clock_tells_steps_from_the_rest():
    now = FakeTime()
    clock = Clock(now)
    now.now = 10.0
    with clock.spend("compile"):
        now.now = 30.0
    with clock.spend("input"):
        now.now = 35.0
    now.now = 50.0
    assert clock.stepping == 30.0  # of 50: all but the compilation
    assert clock.goodput == pytest.approx(0.5)  # waiting for input is not productive


def telemetry(tmp_path, now, said, **changes) -> Telemetry:
    arguments = {
        "num_steps": 100,
        "restored_step": 0,
        "flops_per_step": lambda step: 1000.0,
        "peak": 4000.0,
        "clock": Clock(now),
        "echo": said.append,
    }
    return Telemetry(tmp_path, **(arguments | changes))


def test_rates_count_what_was_done_since_they_were_asked_for(tmp_path):
    now, said = FakeTime(), []
    with telemetry(tmp_path, now, said) as out:
        for step in (1, 2):
            now.now += 0.5
            out.step_done(step, num_tokens=300.0, mlm_loss=1.0)
        assert out.rates() == {
            "perf/tokens_per_second": 600.0,
            "perf/steps_per_second": 2.0,
            "perf/mfu": 0.5,
            "perf/goodput": 1.0,
        }
        now.now += 1.0
        out.step_done(3, num_tokens=100.0, mlm_loss=1.0)
        rates = out.rates()
        assert rates["perf/tokens_per_second"] == 100.0
        out.progress_line(3, {"train/mlm_loss": 6.5, "train/nsp_accuracy": 0.61} | rates)
        out.write(3, {"train/mlm_loss": 6.5})
    assert said == [
        "step 3/100  mlm 6.500  nsp accuracy 0.610  100 tokens/s  1 min 37 s left  MFU 25.0%"
    ]
    assert list((tmp_path / "tensorboard").glob("events.*"))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 3, "train/mlm_loss": 6.5}]


def test_no_mfu_without_a_known_peak(tmp_path):
    assert peak_flops("cpu", "float32") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    now = FakeTime()
    with telemetry(tmp_path, now, [], peak=None) as out:
        now.now = 1.0
        out.step_done(1, 10.0, 1.0)
        assert "perf/mfu" not in out.rates()


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    said = []
    with telemetry(tmp_path, FakeTime(), said) as out:
        out.write(1, {"train/loss": 1.0})
        out.say("hello")
        out.sync()
        out.step_done(1, 10.0, 1.0)
        out.progress_line(1, {"train/mlm_loss": 1.0} | out.rates())
    assert said == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (59.6, "1 min 0 s"),
        (3599.0, "59 min 59 s"),
        (7500.0, "2 h 5 min"),
        (1e5, "1 d 3 h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_smooth_is_a_centred_mean():
    assert smooth(np.array([1.0, 2.0, 6.0, 3.0]), 3).tolist() == [1.5, 3.0, 11 / 3, 4.5]
    assert smooth(np.array([1.0, 2.0]), 1).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("with_pairs", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 200])
def test_loss_curve_is_a_picture_with_what_there_is(tmp_path, num_rows, with_pairs):
    rows = []
    for step in range(num_rows):
        row = {"step": step, "train/mlm_loss": 9.0 - step / 50}
        if step % 50 == 0:
            row["eval/mlm_loss"] = 9.1 - step / 50
        if with_pairs:
            row["train/nsp_accuracy"] = 0.5
        rows.append(row)
    draw_loss_curve(rows, 7.0, tmp_path / "loss.png", title="run", phase_ends=[(100, "length 512")])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]


def dashed_lines(axes):
    return [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"]


def test_dashed_lines_are_the_unigram_entropy_and_the_majority_label():
    rows = [
        {"step": 10, "train/mlm_loss": 7.5, "train/nsp_accuracy": 0.5},
        {"step": 10, "eval/mlm_loss": 7.4, "eval/nsp_accuracy": 0.55, "eval/nsp_majority": 0.53},
    ]
    loss, pairs = loss_figure(rows, 7.0).axes
    assert dashed_lines(loss) == [7.0]
    assert dashed_lines(pairs) == [0.53]
    _, pairs = loss_figure(rows[:1], 7.0).axes
    assert dashed_lines(pairs) == []  # without held-out rows nobody knows the share

import contextlib
import io
import itertools
import json
import math
import shutil

import numpy as np
import pytest
from full_disk import files_of_at_most, run_on_small_disk
from tensorboard_files import scalars

from bert_jax.data.phases import Phase
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.training.progress import Means
from bert_jax.training.run.goodput import Clock, Goodput
from bert_jax.training.run.loss_curve import draw_loss_curve, loss_figure, smooth
from bert_jax.training.run.telemetry import (
    MetricsLog,
    Telemetry,
    duration,
    peak_flops,
    read_metrics,
)
from bert_jax.training.run.trackers import Board
from bert_jax.training.run.trackers import scalars as finite


class FakeTime:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_log_drops_rows_beyond_the_restored_step_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in (2, 4, 6):
        log.add(step, {"train/loss": step / 3})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "train/lo')  # killed while writing
    log = MetricsLog(path, 4)
    assert [row["step"] for row in read_metrics(path)] == [2, 4]
    log.add(6, {"train/loss": 2.0})
    log.sync()
    log.close()
    assert read_metrics(path) == [
        {"step": 2, "train/loss": 2 / 3},
        {"step": 4, "train/loss": 4 / 3},
        {"step": 6, "train/loss": 2.0},
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    log = MetricsLog(path, 0)
    assert path.read_bytes() == b""
    for step in (0, 2):
        log.add(step, {"eval/loss": 3.0})
    log.close()
    MetricsLog(path, 0).close()  # a save from before the first step was restored
    assert read_metrics(path) == [{"step": 0, "eval/loss": 3.0}]


def test_rows_that_are_none_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_bytes(
        b'{"step": 1}\n\xff\xfe\n[1]\n{"step": true}\n{"step": "2"}\n\0\0\0\n'
        + b"[" * 100_000 + b'\n{"step": 3, "x": "a\xe2\x80\xa8b"}\n{"step": 4}'
    )  # fmt: skip
    assert read_metrics(path) == [{"step": 1}, {"step": 3, "x": "a\u2028b"}]


def test_a_run_continues_when_there_is_no_room(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(100)))
    with files_of_at_most(10):
        log = MetricsLog(path, 60)
        log.add(61, {"train/loss": 1.0})
    assert [row["step"] for row in read_metrics(path)] == list(range(61))
    log.close()
    assert [row["step"] for row in read_metrics(path)] == list(range(62))


def test_a_step_has_one_row(tmp_path):
    """Whatever is known of it before the next step is one line; what comes later is joined."""
    with telemetry(tmp_path, FakeTime(), []) as out:
        for step in (1, 2):
            out.step_done(step, 10.0, 1000, 1.0)
            out.write(step, {"train/loss": 0.5})
            out.write(step, {"eval/loss": 0.25 * step})
        assert read_metrics(tmp_path / "metrics.jsonl") == [
            {"step": 1, "train/loss": 0.5, "eval/loss": 0.25}
        ]
        out.sync()
        out.write(2, {"event/save_failed": 2})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert read_metrics(tmp_path / "metrics.jsonl")[1:] == [
        {"step": 2, "train/loss": 0.5, "eval/loss": 0.5, "event/save_failed": 2}
    ]
    (_, row, *_), *_ = [scalars(tmp_path / "tensorboard")]
    assert row == (1, {"train/loss": 0.5, "eval/loss": 0.25})


def test_log_writes_json_for_every_number(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    others = {"note": "a text", "good": True, "none": None, "rows": 3}
    log.add(1, {"train/loss": math.nan, "train/x": [math.inf, 0.5, ["a"]], **others})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1, "train/loss": None, "train/x": [None, 0.5, ["a"]], **others,
    }  # fmt: skip


def test_means_start_anew_and_their_state_is_exact():
    def add(*losses, bad=0):
        flags = {"bad": np.array([bad, 0]), "halted": np.zeros(2, int)}
        means.add({"loss": np.array(losses), **flags})

    means = Means(2)
    for value in (0.1, 0.7, 0.3):
        add(value, 2 * value)
    add(9.0, 0.2, bad=1)  # in the second mean alone
    again = Means(2)
    again.restore(json.loads(json.dumps(means.state())))
    whole = {"loss": [(0.1 + 0.7 + 0.3) / 3, (0.2 + 1.4 + 0.6 + 0.2) / 4]}
    assert means.take() == again.take() == whole
    add(9.0, 5.0, bad=1)
    assert means
    assert means.take() == {"loss": [None, 5.0]}
    assert not means


METRICS = MaskedLM.metrics_of(pairs=True)


def telemetry(tmp_path, now, said, **changes) -> Telemetry:
    arguments = {
        "num_steps": 100,
        "restored_step": 0,
        "peak": 4000.0,
        "metrics": METRICS,
        "goodput": Goodput(None, Clock(now), 0),
        "echo": said.append if said is not None else None,
    }
    return Telemetry(tmp_path, **(arguments | changes))


def test_rates_count_what_was_done_since_they_were_asked_for(tmp_path):
    now, said = FakeTime(), []
    with telemetry(tmp_path, now, said) as out:
        for step in (1, 2):
            now.now += 0.5
            out.step_done(step, num_tokens=300.0, flops=1000, value=1.0)
        assert out.rates() == {
            "perf/tokens_per_second": 600.0,
            "perf/steps_per_second": 2.0,
            "perf/mfu": 0.5,
            "perf/goodput": 1.0,
        }
        now.now += 1.0
        out.step_done(3, num_tokens=100.0, flops=1000, value=1.0)
        assert out.rates()["perf/tokens_per_second"] == 100.0
        out.progress_line(3, {"mlm_loss": 6.5, "nsp_accuracy": 0.61})
        out.write(3, {"train/mlm_loss": 6.5})
    assert said == [
        "step 3/100  mlm loss 6.500  nsp accuracy 0.610  350 tokens/s  1 min 5 s left  MFU 37.5%"
    ]
    assert list((tmp_path / "tensorboard").glob("events.*"))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 3, "train/mlm_loss": 6.5}]


def test_board_has_the_numbers(tmp_path):
    board = Board(tmp_path / "tensorboard", purge_step=8)
    others = {"train/nan": math.nan, "text": "no number"}
    board.log(finite({"train/loss": 0.5, "data/rows": 3, **others}), 8)
    board.log({"train/loss": 0.25, "perf/mfu": 1.0}, 9)
    board.sync()
    board.finish()
    board.log({"train/loss": 0.125}, 10)  # closed
    assert scalars(tmp_path / "tensorboard") == [
        (8, {}), (8, {"train/loss": 0.5, "data/rows": 3.0}),
        (9, {"train/loss": 0.25, "perf/mfu": 1.0}),
    ]  # fmt: skip


def test_board_is_given_up_with_one_warning(tmp_path, caplog):
    board = Board(tmp_path / "tensorboard", purge_step=1)
    with files_of_at_most(200):
        for step in range(20):  # more than the queue of tensorboardX's thread would hold
            board.log({"train/loss": 0.5}, step)
        board.sync()
    board.log({"train/loss": 0.5}, 20)
    board.finish()
    assert len(caplog.records) == 1
    assert "TensorBoard shows nothing more" in caplog.text


def test_board_whose_directory_vanishes_or_cannot_be_made(tmp_path, caplog):
    board = Board(tmp_path / "tensorboard", purge_step=1)
    shutil.rmtree(tmp_path / "tensorboard")
    board.log({"train/loss": 0.5}, 1)
    assert len(caplog.records) == 1
    (tmp_path / "file").write_text("")
    Board(tmp_path / "file" / "tensorboard", purge_step=1).log({"train/loss": 0.5}, 1)
    assert len(caplog.records) == 2


def test_output_to_a_full_disk_ends_nothing(tmp_path, monkeypatch):
    with open("/dev/full", "w") as full, telemetry(tmp_path, FakeTime(), None, echo=None) as out:
        monkeypatch.setattr("sys.stdout", full)
        out.say("a line")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_a_reader_of_the_output_that_ended_is_heard(tmp_path, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Gone())
    with (
        telemetry(tmp_path, FakeTime(), None, echo=None) as out,
        pytest.raises(BrokenPipeError),
    ):
        out.say("a line")


_ON_A_SMALL_DISK = """
import json, logging, resource, sys
from pathlib import Path

from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.training.run.events import Events, read_events
from bert_jax.artefacts.saved.runs import read_starts
from bert_jax.training.run.goodput import Clock, Goodput
from bert_jax.training.run.telemetry import Telemetry, read_metrics

logging.basicConfig(stream=sys.stderr, format="warning: %(message)s", force=True)
run = Path(sys.argv[1])
filler = run / "filler"
try:
    filler.write_bytes(bytes(150_000))
except OSError:
    pass
clock = Clock()
events = Events(run / "events.jsonl")
goodput = Goodput(run / "goodput.json", clock, 0)
told = []
with Telemetry(run, num_steps=600, restored_step=0, peak=None,
               metrics=MaskedLM.metrics_of(pairs=True),
               goodput=goodput, echo=told.append) as out:
    for step in range(1, 601):
        if step == 550:  # somebody makes room
            filler.unlink(missing_ok=True)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        out.step_done(step, 10.0, 1000, 1.0)
        out.write(step, {"train/mlm_loss": 1.0, "train/text": "x" * 250})
        if step % 100 == 0:
            events.write("save_failed", "x" * 250, step=step)
            out.sync()
        if step == 500:
            print(json.dumps([len(read_metrics(run / "metrics.jsonl")),
                              (run / "metrics.jsonl").read_bytes()[-1:] == b"\\n"]))
print(json.dumps({
    "steps": [row["step"] for row in read_metrics(run / "metrics.jsonl")],
    "lines": (run / "metrics.jsonl").read_bytes().count(b"\\n"),
    "events": [event["step"] for event in read_events(run / "events.jsonl")],
    "last": [start.last_step for start in read_starts(run / "goodput.json")],
    "left": [p.name for p in run.iterdir() if "tmp" in p.name],
}))
"""


def test_a_full_disk_ends_nothing_and_loses_no_row(tmp_path):
    done = run_on_small_disk(_ON_A_SMALL_DISK, tmp_path)
    assert done.returncode == 0, done.stderr
    (written, whole), found = map(json.loads, done.stdout.splitlines())
    assert 100 < written < 500
    assert whole
    assert found == {
        "steps": list(range(1, 601)), "lines": 600, "events": [100, 200, 300, 400, 500, 600],
        "last": [600], "left": [],
    }  # fmt: skip
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len([line for line in warnings if "metrics.jsonl cannot be written" in line]) == 1
    assert len([line for line in warnings if "metrics.jsonl can be written again" in line]) == 1
    assert len(warnings) <= 6  # those, and one or two each of TensorBoard's, the events', goodput's
    assert "Traceback" not in done.stderr


def test_each_step_counts_its_own_flops(tmp_path):
    now = FakeTime()
    with telemetry(tmp_path, now, []) as out:
        for step, flops in ((1, 200), (2, 1800)):
            now.now += 1.0
            out.step_done(step, 10.0, flops, 1.0)
        assert out.rates()["perf/mfu"] == (200 + 1800) / 2 / 4000


def test_the_board_keeps_the_row_of_the_restored_step(tmp_path):
    with telemetry(tmp_path, FakeTime(), [], restored_step=8) as out:
        out.write(9, {"train/loss": 0.5})
    assert scalars(tmp_path / "tensorboard") == [(9, {}), (9, {"train/loss": 0.5})]


@pytest.mark.timed
def test_the_first_line_comes_after_five_steps_and_later_lines_after_seconds(tmp_path):
    now, due = FakeTime(), []
    with telemetry(tmp_path, now, [], restored_step=20, num_steps=2000) as out:
        for step in range(21, 2000):
            now.now += 0.5
            out.step_done(step, num_tokens=300.0, flops=1000, value=1.0)
            if out.line_due(step):
                out.progress_line(step, {})
                due.append(step)
    assert due[:5] == [25, 30, 40, 50, 60]  # five steps, then every 5 seconds
    intervals = [0.5 * (after - before) for before, after in itertools.pairwise(due)]
    assert intervals == sorted(intervals)
    assert intervals[-1] == 60.0


def test_no_mfu_without_a_known_peak(tmp_path):
    assert peak_flops("cpu", "float32") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert peak_flops("TPU7x", "bfloat16") == 2307e12 / 2  # JAX shows two devices a chip
    now = FakeTime()
    with telemetry(tmp_path, now, [], peak=None) as out:
        now.now = 1.0
        out.step_done(1, 10.0, 1000, 1.0)
        assert "perf/mfu" not in out.rates()


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    said = []
    with telemetry(tmp_path, FakeTime(), said) as out:
        out.write(1, {"train/loss": 1.0})
        out.say("hello")
        out.sync()
        out.step_done(1, 10.0, 1000, 1.0)
        out.progress_line(1, {"mlm_loss": 1.0})
    assert said == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.0, "59 min 59 s"),
        (3600.0, "1 h 0 min"),
        (7500.0, "2 h 5 min"),
        (86_399.0, "23 h 59 min"),
        (86_400.0, "1 d 0 h"),
        (1e5, "1 d 3 h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_smooth_is_a_centred_mean():
    assert smooth(np.array([1.0, 2.0, 6.0, 3.0]), 3).tolist() == [1.5, 3.0, 11 / 3, 4.5]
    assert smooth(np.array([1.0, 2.0]), 1).tolist() == [1.0, 2.0]


@pytest.mark.drawn
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
    file, picture = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    phases = [Phase(128, 8, 100), Phase(512, 8, 100)]
    draw_loss_curve(file, METRICS, 7.0, picture, title="run", phases=phases)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def dashed_lines(axes):
    return [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"]


def test_dashed_lines_are_the_unigram_entropy_and_the_majority_label():
    rows = [
        {"step": 10, "train/mlm_loss": 7.5, "train/nsp_accuracy": 0.5},
        {"step": 10, "eval/mlm_loss": 7.4, "eval/nsp_accuracy": 0.55, "eval/nsp_majority": 0.53},
    ]
    loss, pairs = loss_figure(rows, METRICS, 7.0).axes
    assert dashed_lines(loss) == [7.0]
    assert dashed_lines(pairs) == [0.53]
    _, pairs = loss_figure(rows[:1], METRICS, 7.0).axes
    assert dashed_lines(pairs) == []  # without held-out rows nobody knows the share


def test_each_probe_has_an_axis():
    rows = [{"step": step, "train/mlm_loss": 7.0, "eval/probe/topics/accuracy": step / 40}
            for step in (10, 20)]  # fmt: skip
    _, probe = loss_figure(rows, METRICS, 7.0).axes
    assert probe.get_ylabel() == "topics\naccuracy"
    assert probe.lines[0].get_ydata().tolist() == [0.25, 0.5]

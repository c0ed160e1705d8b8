import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath
from small_run import VOCAB_SIZE, small_config, snapshot, write_corpus

from bert_jax.cli.inspection import diagnose
from bert_jax.cli.inspection import status as status_module
from bert_jax.cli.inspection.status import pretrain_status
from bert_jax.cli.inspection.status_lines import pretrain_lines
from bert_jax.cli.main import main
from bert_jax.config.mapping import to_dict
from bert_jax.errors import UserError
from bert_jax.files import bucket as bucket_module
from bert_jax.files.remote import _Mirror, open_workdir
from bert_jax.training.run.goodput import Clock, Goodput
from bert_jax.training.run.loss_curve import terminal_curve

BEGIN = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC
ENTROPY = 3.5


class FakeTime:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return BEGIN + self.now


def event(kind, message, time="2023-11-14T22:13:20+00:00", **values):
    return {"time": time, "process": 0, "kind": kind, "step": None, "message": message, **values}


def append(path, *rows):
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of 120 steps that was killed once and is at step 80, a step a second."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    config = small_config(
        training__num_steps=120, data__corpus=str(tmp_path / "corpus")
    ).with_vocabulary(VOCAB_SIZE)
    (workdir / "config.json").write_text(
        json.dumps({"bert_jax": "1.2.3", "format": 2, "config": to_dict(config)})
    )
    for step in (30, 60, 70):
        (workdir / "checkpoints" / str(step)).mkdir(parents=True)
    for step in (30, 60):
        (workdir / "checkpoints" / str(step) / "verified.json").write_text("{}")
    (workdir / "damaged" / "50").mkdir(parents=True)
    now = FakeTime()
    for restored, reached in ((0, 40), (30, 80)):
        goodput = Goodput(workdir / "goodput.json", Clock(now), restored, wall=now.wall)
        now.now += reached - restored
        goodput.record(reached)
        now.now += 100.0
    append(
        workdir / "events.jsonl",
        event("start", "begins"),
        event("save_failed", "no space\nleft", step=35),
        event("start", "begins again", step=30),
    )
    for step in range(2, 81, 2):
        append(
            workdir / "metrics.jsonl",
            {
                "step": step, "train/mlm_loss": 3.0 + 4 * math.exp(-step / 20),
                "train/nsp_accuracy": 0.6, "perf/steps_per_second": 1.0,
            },
        )  # fmt: skip
        if step % 20 == 0:
            loss = 3.1 + 4 * math.exp(-step / 20)
            append(
                workdir / "metrics.jsonl",
                {"step": step, "eval/mlm_loss": loss, "eval/nats_below_unigram": ENTROPY - loss},
            )
    return workdir


LAST = BEGIN + 40 + 100 + 50


def test_status_of_a_run_that_was_killed_once(run):
    before = snapshot(run)
    status = pretrain_status(open_workdir(run), now=LAST + 5)
    assert snapshot(run) == before
    assert (status.version, status.num_layers, status.vocab_size) == ("1.2.3", 2, VOCAB_SIZE)
    assert (status.step, status.num_steps, status.phase) == (80, 120, 1)
    assert (status.state, status.heard, status.silent_seconds) == ("running", LAST, 5.0)
    assert (status.steps_per_second, status.seconds_left) == (1.0, 40.0)
    assert (status.checkpoints, status.verified) == ([30, 60, 70], [30, 60])
    assert status.damaged == ["50"]
    assert status.unigram_entropy == pytest.approx(ENTROPY)
    assert (status.train["step"], status.evaluation["step"]) == (80, 80)
    assert (len(status.curve), len(status.heldout_curve)) == (40, 4)
    assert status.seconds == {"productive": 80.0, "lost": 10.0}
    assert (status.down_seconds, status.num_starts, status.num_killed) == (100.0, 2, 1)
    assert [e["kind"] for e in status.errors] == ["save_failed"]
    assert json.loads(json.dumps(dataclasses.asdict(status), allow_nan=False))["step"] == 80


def test_report(run):
    lines = pretrain_lines(pretrain_status(open_workdir(run), now=LAST + 5), width=200)
    text = "\n".join(lines)
    assert all(c.isascii() and (c.isprintable() or c == "\n") for c in text)
    for line in [
        f"run         {run}, by bert_jax 1.2.3: running (last sign of life 5 s ago)",
        "steps       72 of 16 rows of 32 tokens, then 48 of 16 rows of 64 tokens",
        "reached     step 80 of 120 (66.7%), phase 2 of 2; 1 steps/s, 40 s left at that rate",
        "training    mlm loss 3.073 nats, 0.427 below unigram entropy; nsp accuracy 0.600 "
        "(step 80)",
        "held-out    mlm loss 3.173 nats, 0.327 below unigram entropy (step 80)",
        "checkpoints step 60 is the newest that was read back; before it 30; not read back: 70",
        "damaged     put aside in damaged/: 50",
        "time of 2 starts: 1 min 30 s, and 1 min 40 s between them; 1 ended without a record",
        f"  {'steps (goodput)':24} {'1 min 20 s':>14}   88.9%",
        f"  {'steps that were lost':24} {'10 s':>14}   11.1%",
        "  2023-11-14 22:13:20  save_failed (step 35): no space left",
    ]:
        assert line in lines
    assert "masked-LM loss, nats by step: * training, o held-out, - unigram entropy" in text


@pytest.mark.parametrize(
    ("kind", "silent", "state"),
    [
        ("finished", 5, "finished"),
        ("stopped", 5, "stopped"),
        ("error", 5, "failed"),
        ("stalled", 5, "failed"),
        ("save_failed", 5, "running"),
        ("save_failed", 600, "silent"),
        ("save_failed", 1801, "killed"),
    ],
)
def test_states(run, kind, silent, state):
    append(run / "events.jsonl", event(kind, "the word"))
    status = pretrain_status(open_workdir(run), now=LAST + silent)
    assert status.state == state
    first = pretrain_lines(status, width=300)[0]
    assert (
        {"finished": "finished", "stopped": "stopped by a signal", "failed": "ended with an error",
         "running": "running", "silent": "seems to be running", "killed": "NOT running"}[state]
        in first
    )  # fmt: skip


def test_a_lease_in_a_bucket_is_a_sign_of_life(run):
    """Records are uploaded only with saves, which may be hours apart."""
    mirror = object.__new__(_Mirror)
    mirror.renewals = [LAST - 900, LAST + 7195]
    work = dataclasses.replace(open_workdir(run), mirror=mirror)
    status = pretrain_status(work, now=LAST + 7200)
    assert (status.state, status.silent_seconds) == ("running", 5.0)
    assert pretrain_status(work, now=LAST + 9000).state == "killed"


def test_a_slow_step_is_no_silence(run):
    append(
        run / "metrics.jsonl",
        {"step": 82, "train/mlm_loss": 3.0, "perf/steps_per_second": 0.01},
    )
    assert pretrain_status(open_workdir(run), now=LAST + 400).state == "running"


def test_a_run_that_ended_early_has_no_time_left_and_no_error(run):
    append(
        run / "events.jsonl", event("attention", "it is computed by a kernel"),
        event("recovered", "the loss is as low as before", step=70),
        event("early_stop", "3 were no better", step=80),
        event("finished", "step 80 of 120 reached", step=80),
    )  # fmt: skip
    status = pretrain_status(open_workdir(run), now=LAST + 5)
    assert (status.state, status.step, status.seconds_left) == ("finished", 80, 0.0)
    assert [each["kind"] for each in status.errors] == ["save_failed"]
    assert "reached     step 80 of 120 (66.7%), phase 2 of 2" in pretrain_lines(status, width=200)


def test_an_end_counts_until_the_next_start(run):
    append(run / "events.jsonl", event("stalled", "no step"), event("start", "again"))
    status = pretrain_status(open_workdir(run), now=LAST + 5)
    assert (status.state, status.num_killed) == ("running", 1)


def test_the_newest_errors_and_no_escape_sequences(run):
    for number in range(9):
        append(run / "events.jsonl", event("damaged", f"\x1b[2Jnumber {number}"))
    status = pretrain_status(open_workdir(run), now=LAST)
    assert [e["message"][-1] for e in status.errors] == list("45678")
    assert "\x1b" not in "\n".join(pretrain_lines(status))


def test_a_run_that_has_only_begun(run):
    for name in ("metrics.jsonl", "goodput.json", "events.jsonl"):
        (run / name).unlink()
    (run / "checkpoints").rename(run / "elsewhere")
    status = pretrain_status(open_workdir(run))
    assert (status.state, status.step, status.curve) == ("new", 0, [])
    assert status.unigram_entropy is None
    lines = pretrain_lines(status, width=200)
    assert "reached     step 0 of 120 (0.0%), phase 1 of 2" in lines
    assert "checkpoints none yet" in lines
    status = pretrain_status(
        dataclasses.replace(open_workdir(run), checkpoints=epath.Path(run / "elsewhere"))
    )  # as in a bucket
    assert status.verified == [30, 60]


def test_a_run_of_an_older_version_has_no_events(run):
    (run / "goodput.json").unlink()
    (run / "events.jsonl").unlink()
    os.utime(run / "metrics.jsonl", (BEGIN, BEGIN))
    status = pretrain_status(open_workdir(run), now=BEGIN + 3)
    assert (status.state, status.step, status.silent_seconds) == ("running", 80, 3.0)
    (run / "checkpoints" / "120").mkdir()
    append(run / "metrics.jsonl", {"step": 120, "train/mlm_loss": 3.0})
    assert pretrain_status(open_workdir(run), now=BEGIN + 10_000).state == "finished"


def test_foreign_values_do_not_matter(run):
    append(
        run / "metrics.jsonl",
        {"step": 82, "train/mlm_loss": "low", "perf/steps_per_second": None},
        {"step": 84, "eval/mlm_loss": None},
    )
    append(run / "events.jsonl", event("error", "odd", time="yesterday", step="?"))
    status = pretrain_status(open_workdir(run), now=LAST)
    assert len(status.curve) == 40
    assert "yesterday  error: odd" in "\n".join(pretrain_lines(status))


def test_the_corpus_says_its_entropy(run, tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    status = pretrain_status(open_workdir(run))
    assert status.unigram_entropy == corpus.train.unigram_entropy
    assert status.corpus_tokens == corpus.train.num_tokens


def test_no_run(tmp_path):
    with pytest.raises(UserError, match="so it is not a run; give the work directory of a"):
        pretrain_status(open_workdir(tmp_path))
    (tmp_path / "fold-1").mkdir()
    with pytest.raises(UserError, match=r"not a run; for one fold of this .*, give .*/fold-1$"):
        pretrain_status(open_workdir(tmp_path))


@pytest.mark.drawn
def test_command(run, tmp_path, capsys):
    before = snapshot(run)
    assert main(["status", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "reached     step 80 of 120" in printed
    assert "\x1b" not in printed  # no terminal
    after = snapshot(run)
    assert after.pop("loss.png").startswith(b"\x89PNG")
    assert after == before
    picture = tmp_path / "curve.png"
    assert main(["status", str(run), "--json", "--plot", str(picture)]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] == [30, 60]
    assert picture.exists()


def test_numbers_that_are_none_are_null_in_json(run, monkeypatch, capsys):
    found = {"diagnosis": {"loss": math.nan, "step": 80}}
    monkeypatch.setattr(diagnose, "diagnosis", lambda work: (found, []))
    assert main(["status", str(run), "--diagnose", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (printed["diagnosis"], printed["step"]) == ({"loss": None, "step": 80}, 80)


def test_a_picture_that_cannot_be_written_is_said(run, tmp_path, capsys):
    (tmp_path / "no").touch()
    for place, why in (
        ("no/curve.png", f"cannot write {tmp_path}/no/curve.png: a part of the path is a file"),
        (".", f"{tmp_path} is a directory; name a file"),
    ):
        assert main(["status", str(run), "--plot", str(tmp_path / place)]) == 0
        said = capsys.readouterr()
        assert "reached     step 80 of 120" in said.out
        assert f"bert-jax status: no picture: {why}" in said.err


def test_no_device_is_opened(run):
    script = (
        "import sys; from bert_jax.cli.main import main; code = main(['status', sys.argv[1]])\n"
        "from jax._src import xla_bridge\n"
        "sys.exit(code or 3 * xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(run)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("num_points", [1, 2, 500])
def test_curve_shows_the_entropy_as_a_line(num_points, capfd):
    points = [(float(i), 5.0 - i / num_points) for i in range(num_points)]
    lines = terminal_curve(points, points[:1], 4.37, width=70, plain=True)
    assert max(map(len, lines)) <= 70
    above_the_axis = lines[:-2]
    assert sum(line.count("-") > 40 for line in above_the_axis) == 1
    assert any("*" in line or "o" in line for line in above_the_axis)
    assert capfd.readouterr() == ("", "")  # plotext says what it does not like
    coloured = "\n".join(terminal_curve(points, [], 4.5, width=70, plain=False))
    assert "\x1b[" in coloured


def test_no_points_no_curve():
    assert terminal_curve([], [], 4.5, width=70, plain=True) == []


def test_a_corpus_in_a_bucket_that_does_not_answer_is_unknown(run, monkeypatch):
    """After ten minutes, there was an error that advised to continue the run."""

    class Away:
        def __getattr__(self, name):
            raise ConnectionResetError("gone")

    monkeypatch.setattr(bucket_module, "file_system", lambda url: Away())
    monkeypatch.setattr(status_module, "SHORT_TIMEOUT", 0.1)
    record = json.loads((run / "config.json").read_text())
    record["config"]["data"]["corpus"] = "gs://corpora/away"
    (run / "config.json").write_text(json.dumps(record))
    status = pretrain_status(open_workdir(run))
    assert (status.step, status.corpus_tokens) == (80, None)
    assert status.unigram_entropy == pytest.approx(ENTROPY)

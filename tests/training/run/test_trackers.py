"""Trackers receive the rows of metrics.jsonl; whatever happens to them, training goes on."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
from small_run import fingerprint, small_config, write_corpus
from tensorboard_files import scalars
from tracker_package import Package

from bert_jax.cli.main import main
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.pretrain.train import train
from bert_jax.training.run import trackers
from bert_jax.training.run.goodput import Clock, Goodput
from bert_jax.training.run.session import Session
from bert_jax.training.run.telemetry import Telemetry, read_metrics
from bert_jax.training.run.trackers import PackageTracker
from bert_jax.training.run_plan import Result

PACKAGES = ["wandb", "trackio"]
SHORT = {
    "training__num_steps": 4,
    "training__phases": [{"length": 32, "batch_size": 16}],
    "training__log_every_steps": 1,
    "training__eval_every_steps": 0,
    "checkpoint__save_every_steps": 2,
    "optimizer__warmup_steps": 1,
}


@pytest.fixture(params=PACKAGES)
def package(request, monkeypatch) -> Package:
    fake = Package(request.param)
    monkeypatch.setitem(sys.modules, request.param, fake)
    monkeypatch.delenv(f"{request.param.upper()}_PROJECT", raising=False)
    return fake


def place(path: Path) -> Path:
    """A work directory in which a run has begun."""
    path.mkdir(exist_ok=True)
    record = {"run_id": "0123abcd", "config": {"training": {"num_steps": 9}, "seed": 7}}
    (path / "config.json").write_text(json.dumps(record))
    return path


def telemetry(workdir: Path, *packages: str) -> Telemetry:
    return Telemetry(
        workdir, num_steps=9, restored_step=0, peak=None, metrics=MaskedLM.metrics_of(pairs=True),
        goodput=Goodput(None, Clock(), 0), echo=lambda _: None,
        trackers=[PackageTracker(each, open_workdir(workdir)) for each in packages],
    )  # fmt: skip


def test_a_tracker_receives_the_numbers_and_the_configuration(package, tmp_path, monkeypatch):
    workdir = place(tmp_path / "tiny")
    for project in ("bert_jax", "mine"):
        with telemetry(workdir, package.__name__) as out:
            out.write(1, {"train/loss": [0.5, math.inf], "perf/mfu": 0.25})
            out.write(1, {"eval/loss": 1.5, "train/text": "no number", "train/none": None})
            out.write(2, {"event/save_failed": 2})
        settings = package.opened.pop()
        assert (settings["project"], settings["name"]) == (project, "tiny-0123abcd")
        assert settings["resume"] == "allow"
        assert settings["config"] == {"training": {"num_steps": 9}, "seed": 7}
        assert settings.get("id") == ("0123abcd" if package.__name__ == "wandb" else None)
        assert package.rows[-2:] == [
            (1, {"train/loss/trial_0": 0.5, "perf/mfu": 0.25, "eval/loss": 1.5}),
            (2, {"event/save_failed": 2}),
        ]
        monkeypatch.setenv(f"{package.__name__.upper()}_PROJECT", "mine")
    assert package.finished == 2


def test_steps_that_wandb_has_are_not_sent_again(tmp_path, monkeypatch):
    fakes = {name: Package(name) for name in PACKAGES}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
        fake.newest = 3
    with telemetry(place(tmp_path), *PACKAGES) as out:
        for step in (1, 2, 3, 4):
            out.write(step, {"train/loss": 0.5})
    assert [step for step, _ in fakes["wandb"].rows] == [3, 4]
    assert [step for step, _ in fakes["trackio"].rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_a_tracker_that_fails_warns_once_and_stops_nothing(package, tmp_path, failing, caplog):
    package.failing = failing
    with telemetry(place(tmp_path), package.__name__) as out:
        for step in range(1, 9):
            out.write(step, {"train/loss": 0.5})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [*range(1, 9)]
    assert len(scalars(tmp_path / "tensorboard")) == 1 + 8
    (warning,) = caplog.messages
    assert f"{package.__name__} has failed (ConnectionError: no network in {failing})" in warning


def test_a_tracker_that_hangs_delays_nothing(package, tmp_path, monkeypatch, caplog):
    network, hung = threading.Event(), threading.Event()

    def init(**_):
        hung.set()
        network.wait()
        raise ConnectionError

    package.init = init
    monkeypatch.setattr(trackers, "_SECONDS", 0.01)
    before = set(threading.enumerate())
    with telemetry(place(tmp_path), package.__name__) as out:
        (thread,) = set(threading.enumerate()) - before
        assert hung.wait(60)
        out.write(1, {"train/loss": 0.5})
        out.write(2, {"train/loss": 0.5})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    network.set()
    thread.join()
    (warning,) = caplog.messages
    assert "no answer for 0.01 seconds" in warning


def test_a_missing_package_is_named_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    corpus = write_corpus(tmp_path / "corpus")
    with pytest.raises(UserError, match=r"pip install 'bert_jax\[wandb\]'"):
        train(small_config(**SHORT), tmp_path / "work", corpus=corpus, track=["wandb"])
    assert not (tmp_path / "work" / "config.json").exists()
    argv = ["pretrain", "--config=bert_tiny", f"--workdir={tmp_path / 'work'}", "--track=wandb"]
    for more in ([], ["--dry-run"]):
        assert main([*argv, *more]) == 2
        assert "pip install 'bert_jax[wandb]'" in capsys.readouterr().err
    assert main([*argv[:-1], "--track=wand"]) == 2
    assert "did you mean wandb?" in capsys.readouterr().err


def test_the_option_may_be_repeated(tmp_path, monkeypatch):
    seen = []

    def trained(*_, track, **__) -> Result:
        seen.append(track)
        return Result("", 1, finished=True)

    monkeypatch.setattr("bert_jax.training.pretrain.train.train", trained)
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, Package(name))
    argv = ["pretrain", "--config=bert_tiny", f"--workdir={tmp_path}"]
    for more in ([], ["--track=wandb", "--track=trackio"]):
        assert main([*argv, *more]) == 0
    assert seen == [(), ("wandb", "trackio")]


def test_a_restart_continues_the_tracked_run_and_may_change_the_tracker(tmp_path, monkeypatch):
    """And a run with a tracker is, bit for bit, the run without."""
    fakes = {name: Package(name) for name in PACKAGES}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    corpus, config = write_corpus(tmp_path / "corpus"), small_config(**SHORT)

    def stop(line: str) -> None:
        if line.startswith("step 2/"):
            os.kill(os.getpid(), 15)

    work = tmp_path / "work"
    assert not train(config, work, corpus=corpus, echo=stop, track=["wandb"]).finished
    assert train(config, work, corpus=corpus, echo=lambda _: None, track=PACKAGES).finished
    train(config, tmp_path / "plain", corpus=corpus, echo=lambda _: None)
    assert fingerprint(work, config, corpus) == fingerprint(tmp_path / "plain", config, corpus)
    record = json.loads((work / "config.json").read_text())
    other = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert record.pop("run_id") != (other.pop("run_id"))
    assert record == other
    assert [len(fake.opened) for fake in fakes.values()] == [2, 1]
    assert len({settings["id"] for settings in fakes["wandb"].opened}) == 1
    (again,) = fakes["trackio"].opened
    assert again["name"] == fakes["wandb"].opened[0]["name"]
    assert again["config"] == record["config"]
    assert [step for step, _ in fakes["wandb"].rows] == [1, 2, 3, 4]
    logged = {name for name, value in read_metrics(work / "metrics.jsonl")[-1].items()
              if name != "step" and value is not None}  # fmt: skip
    assert fakes["wandb"].rows[-1][1].keys() == logged


def test_only_process_0_tracks(package, tmp_path, monkeypatch):
    config = small_config(**SHORT)
    objective = step_config(config, write_corpus(tmp_path / "corpus")).objective
    for index in (1, 0):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        work = open_workdir(place(tmp_path / f"work{index}"))
        session = Session(work, stall_seconds=0.0, echo=print, track=[package.__name__])
        with session.telling(0, objective, num_steps=4, num_devices=1):
            pass
        assert len(package.opened) == 1 - index


_TRACKED = """
import sys
from bert_jax.files.remote import open_workdir
from bert_jax.training.run.trackers import PackageTracker

tracker = PackageTracker(sys.argv[1], open_workdir(sys.argv[2]))
for step in map(int, sys.argv[3:]):
    tracker.log({"train/loss": 1 / step}, step)
tracker.finish()
"""


def tracked(name: str, workdir: Path, *steps: int, **environment: str) -> None:
    """Two starts of a process that logs to the package itself, without a network."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed (pip install 'bert_jax[{name}]')")
    for some in (steps[:2], steps[2:]):
        done = subprocess.run(
            [sys.executable, "-c", _TRACKED, name, str(workdir), *map(str, some)],
            cwd=workdir, env={**os.environ, **environment}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "has failed" not in done.stderr


def test_wandb_itself_writes_the_run_offline(tmp_path):
    tracked("wandb", place(tmp_path / "tiny"), 1, 2, 3, 4, WANDB_MODE="offline")
    from wandb.proto import wandb_internal_pb2

    steps = []
    for file in sorted((tmp_path / "tiny" / "wandb").glob("offline-run-*/run-0123abcd.wandb")):
        data, records = file.read_bytes()[7:], []
        while len(data) > 7:  # a small file: each record whole, after its checksum and length
            end = 7 + int.from_bytes(data[4:6], "little")
            records.append(wandb_internal_pb2.Record.FromString(data[7:end]))
            data = data[end:]
        (run,) = (each.run for each in records if each.HasField("run"))
        assert (run.run_id, run.project, run.display_name) == (
            "0123abcd", "bert_jax", "tiny-0123abcd",
        )  # fmt: skip
        assert {item.key: json.loads(item.value_json) for item in run.config.update}["seed"] == 7
        for each in records:
            items = {item.nested_key[-1] if item.nested_key else item.key: item.value_json
                     for item in each.history.item}  # fmt: skip
            if "train/loss" in items:
                assert float(items["train/loss"]) == 1 / each.history.step.num
                steps.append(each.history.step.num)
    assert steps == [1, 2, 3, 4]


def test_trackio_itself_continues_the_run(tmp_path):
    home = tmp_path / "trackio"
    tracked("trackio", place(tmp_path / "tiny"), 1, 2, 3, 4, TRACKIO_DIR=str(home))
    script = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as storage\n"
        "(name,) = storage.get_runs('bert_jax')\n"
        "rows = storage.get_logs('bert_jax', name)\n"
        "seed = storage.get_run_config('bert_jax', name)['seed']\n"
        "print(json.dumps([name, seed, [(row['step'], row['train/loss']) for row in rows]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TRACKIO_DIR": str(home)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    name, seed, rows = json.loads(done.stdout.splitlines()[-1])
    assert (name, seed) == ("tiny-0123abcd", 7)
    assert rows == [[1, 1.0], [2, 1 / 2], [3, 1 / 3], [4, 1 / 4]]

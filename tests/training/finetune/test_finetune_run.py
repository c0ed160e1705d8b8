"""Fine-tuning runs as wholes: sweeps, stops, refusals, what diverges, and disks that fail.

More members and cases with BERT_JAX_CHAOS=1.
"""

import dataclasses
import errno
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_finetuning import (
    compile_once,
    fingerprint,
    small_config,
    use_devices,
    write_config,
    write_files,
    write_table,
)
from small_run import small_config as pretrain_config
from small_run import snapshot, write_corpus
from tensorboard_files import scalars
from tracker_package import Package

from bert_jax.artefacts.saved import reading, runs
from bert_jax.artefacts.saved.runs import finetuned_checkpoint
from bert_jax.cli.main import main
from bert_jax.distributed.checkpoint import storage
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.tasks.text.task import TextSplit
from bert_jax.training.finetune import folds, voice
from bert_jax.training.finetune import train as train_module
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.train import finetune
from bert_jax.training.finetune.voice import NoModelError
from bert_jax.training.run.events import read_events
from bert_jax.training.run.goodput import Clock
from bert_jax.training.run.session import StopRequest
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.run_plan import Result

LONG = os.environ.get("BERT_JAX_CHAOS") == "1"
RATES = (1e-2, 2e-2) if LONG else (1e-2,)
SEEDS = 2
SWEEP = {"seeds": SEEDS, "learning_rates": RATES, "baseline": "random"}
WAVES = {**SWEEP, "at_once": 3}
"""The last wave is not full: of 8 members it has 2, of 4 one."""
TOTAL = 54 if LONG else 36

long = pytest.mark.skipif(not LONG, reason="BERT_JAX_CHAOS=1")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    """One device, and each step traced and compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        compile_once(patch)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    return write_files(tmp_path_factory.mktemp("files"))


def quiet(_: str) -> None:
    pass


def done(config: FinetuneConfig, workdir: Path) -> dict[str, Any]:
    assert finetune(config, workdir, echo=quiet).finished
    return fingerprint(workdir)


def at_evaluation(number: int, act: Callable[[], None]) -> Callable[[str], None]:
    """An echo that acts when the run reports its evaluation of that number, from 1."""
    seen = 0

    def echo(line: str) -> None:
        nonlocal seen
        seen += line.startswith("epoch ")
        if line.startswith("epoch ") and seen == number:
            act()

    return echo


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class KilledError(BaseException):
    """Ends a run as a kill does: nothing is saved on the way out."""


def kill() -> None:
    raise KilledError


@pytest.fixture(scope="module")
def productive() -> list[float]:
    """Productive seconds at each line of `waves`, by a clock that moves as often as it is asked."""
    return []


@pytest.fixture(scope="module")
def waves(files, tmp_path_factory, productive) -> dict[str, Any]:
    """Three members at once."""
    workdir = tmp_path_factory.mktemp("waves") / "work"
    clock = Clock(now=map(float, itertools.count()).__next__)
    config = small_config(files, sweep=WAVES)
    said = lambda _: productive.append(clock.seconds["productive"])  # noqa: E731
    assert finetune(config, workdir, clock=clock, echo=said).finished
    return fingerprint(workdir)


@pytest.fixture(scope="module")
def one_run(files, tmp_path_factory) -> Path:
    """The work directory of a finished run; not to be changed."""
    workdir = tmp_path_factory.mktemp("one") / "work"
    assert finetune(small_config(files), workdir, echo=quiet).finished
    return workdir


# From a table to a classifier.


def test_a_table_to_a_classifier(files, tmp_path, capsys):
    """Only the work directory is needed afterwards."""
    table = write_table(tmp_path / "mine.csv", 64, 3)
    config = small_config(
        {**files, "train": table, "dev": ""}, table={"train": table, "dev_rate": 0.3}
    )
    file, work = write_config(tmp_path / "recipe.py", config), tmp_path / "work"
    assert main(["finetune", f"--config={file}", f"--workdir={work}", "--dry-run"]) == 0
    assert "best model, " in capsys.readouterr().out
    assert not work.exists()
    assert main(["finetune", f"--config={file}", f"--workdir={work}"]) == 0
    said = capsys.readouterr().out
    assert "accuracy x 100: best of the 3 evaluations of each run" in said
    assert f"the best of {files['init']} is in {work / 'checkpoints'}" in said
    best = json.loads((work / "statistics.json").read_text())["outcomes"][0]["best"]

    def evaluated(*arguments: str) -> float:
        assert main(["evaluate", str(work), *arguments]) == 0
        rows = dict(line.split() for line in capsys.readouterr().out.splitlines())
        return float(rows["accuracy"])

    assert evaluated() == float(f"{best:.6g}")
    assert evaluated("--data", files["dev"]) != evaluated()
    check_scores_apart(work, files["dev"], tmp_path, capsys)
    unlabelled = write_table(tmp_path / "new.csv", 9, 4, labels=False)
    for wrong, text in (
        (["--corpus", "x"], "--corpus does not apply to "),
        (["--data", unlabelled], "has no labels"),
    ):
        assert main(["evaluate", str(work), *wrong]) == 2
        assert text in capsys.readouterr().err
    assert main(["predict", str(work), "--data", unlabelled, "--out", str(tmp_path / "a")]) == 0
    first = (tmp_path / "a" / "predictions.jsonl").read_bytes()
    assert len(first.splitlines()) == 9
    assert {json.loads(line)["label"] for line in first.splitlines()} <= {"cat", "dog"}
    moved = work.rename(tmp_path / "elsewhere")
    Path(table).unlink()
    marked = tmp_path / "marked.csv"
    marked.write_text(Path(unlabelled).read_text().replace("\n", ",?\n").replace("?", "label", 1))
    assert main(["predict", str(moved), "--data", str(marked), "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "b" / "predictions.jsonl").read_bytes() == first
    assert main(["evaluate", str(moved)]) == 2  # its dev data were rows of the table
    assert "mine.csv" in capsys.readouterr().err


def check_scores_apart(work: Path, dev: str, tmp_path: Path, capsys) -> None:
    """Scores of seen and of clean examples add up; a report on other texts is refused."""
    texts = [line.rpartition(",")[0] for line in Path(dev).read_text().splitlines()[1:]]
    corpus, report = tmp_path / "corpus.txt", tmp_path / "report.json"
    corpus.write_text(" and ".join(sorted(set(texts))[::2]))
    assert main(["contamination", f"{corpus}", "--against", dev, f"--out={report}"]) == 0
    capsys.readouterr()
    assert main(["evaluate", f"{work}", "--data", dev, "--contamination", f"{report}"]) == 0
    rows = dict(line.split() for line in capsys.readouterr().out.splitlines())
    found = {name: float(value) for name, value in rows.items()}
    seen, clean = (found[f"{kind}/examples"] for kind in ("seen", "clean"))
    assert min(seen, clean) > 0
    assert seen + clean == len(texts)
    hits = seen * found["seen/accuracy"] + clean * found["clean/accuracy"]
    assert hits == pytest.approx(len(texts) * found["accuracy"], rel=1e-4)
    other = tmp_path / "other.csv"
    other.write_text("text,label\nthe dog sat down by the cat .,dog\n")
    assert main(["evaluate", f"{work}", "--data", f"{other}", "--contamination", f"{report}"]) == 2
    assert "so the report is on other texts" in capsys.readouterr().err


# Sweeps.


def test_a_sweep_is_the_runs_alone(files, waves, tmp_path):
    outcomes = waves["outcomes"]
    members = [
        (o["member"]["init"], o["member"]["learning_rate"], o["member"]["seed"]) for o in outcomes
    ]
    seeds = range(6, 6 + SEEDS)
    assert members == list(itertools.product((files["init"], "random"), RATES, seeds))
    assert len({json.dumps(outcome["scores"]) for outcome in outcomes}) > 2  # they differ
    last = len(members) - 1
    for number in range(last + 1) if LONG else (1, last):
        init, rate, seed = members[number]
        config = small_config(
            files, optimizer__learning_rate=rate, seed=seed, reinitialise=init == "random"
        )
        alone = done(config, tmp_path / f"{number}")
        assert alone["outcomes"] == [outcomes[number]]
        wave, place = divmod(number, 3)
        losses = [row["train/loss"][place] for row in waves["metrics"] if row["wave"] == wave]
        assert [r["train/loss"] for r in alone["metrics"]] == pytest.approx(losses, abs=1e-5)
    assert [row["step"] for row in waves["metrics"]] == list(range(6, TOTAL + 1, 6))
    assert len(waves["metrics"][-1]["train/loss"]) == (2 if LONG else 1)


@long
def test_all_at_once_are_the_same_runs(files, waves, tmp_path):
    sweep = done(small_config(files, sweep=SWEEP), tmp_path / "work")
    assert waves["outcomes"] == sweep["outcomes"]
    assert (waves["member"], waves["scores"]) == (sweep["member"], sweep["scores"])


def test_of_equal_models_the_first_in_time_is_saved(files, tmp_path, monkeypatch):
    """Whether the run was stopped in between or not; a later wave must be better."""
    scripted = iter([0.5, 0.9, 0.5, 0.9, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.9])
    monkeypatch.setattr(TextSplit, "score", lambda *_: {"accuracy": next(scripted)})
    rates = (1e-2, 2e-2, 3e-2, 4e-2)
    config = small_config(files, sweep={"learning_rates": rates, "at_once": 3})
    found = done(config, tmp_path / "work")
    assert [outcome["best"] for outcome in found["outcomes"]] == [0.9, 0.9, 0.5, 0.9]
    assert found["member"]["learning_rate"] == rates[1]
    assert found["scores"] == {"accuracy": 0.9}


@long
def test_a_better_model_comes_after_what_a_killed_run_left(files, tmp_path, monkeypatch):
    scripted = iter([0.5, 0.5, 0.6, 0.9, 0.5, 0.5])
    monkeypatch.setattr(TextSplit, "score", lambda *_: {"accuracy": next(scripted)})
    config, work = small_config(files), tmp_path / "work"
    with monkeypatch.context() as patch:
        patch.setattr(voice, "summarise", lambda *_: kill())
        with pytest.raises(KilledError):
            finetune(config, work, echo=quiet)
    assert saved_steps(work / "checkpoints") == [18]
    monkeypatch.setattr(train_module, "_SAVE_SECONDS", 0.0)
    assert done(config, work)["scores"] == {"accuracy": 0.9}


# Stops.


def test_the_steps_of_a_wave_stay_productive_in_the_next(waves, productive):
    assert productive == sorted(productive)
    assert len(set(productive)) > 6


def test_each_fold_has_a_clock_of_its_own(files, tmp_path, monkeypatch):
    """The clock of the process, start-up included, is the first fold's."""
    clocks: list[Clock | None] = []

    def ended(config: Any, workdir: Path, *, clock: Clock | None, echo: Any, track: Any) -> Result:
        assert echo is quiet
        assert track == ["trackio"]
        clocks.append(clock)
        return Result(workdir, 1, True, stopped_by="SIGTERM" if len(clocks) == 3 else "")

    monkeypatch.setattr(folds, "finetune", ended)
    config, clock = small_config(files, task__folds=3), Clock()
    options = {"clock": clock, "echo": quiet, "track": ["trackio"]}
    assert folds.finetune_folds(config, tmp_path / "work", **options).stopped_by == "SIGTERM"
    assert clocks == [clock, None, None]


def test_ctrl_c_ends_with_130_and_the_command_that_continues(files, tmp_path, capsys, monkeypatch):
    """One run and folds; SIGTERM keeps 0 or --stopped-code."""
    number = [signal.SIGINT]

    def stopped(config: Any, *args: Any, **kwargs: Any) -> Result:
        with StopRequest() as stop:
            os.kill(os.getpid(), number[0])
            assert stop.due()
            return Result("", 1, False, stopped_by=stop.name)

    monkeypatch.setattr(train_module, "finetune", stopped)
    monkeypatch.setattr(folds, "finetune", stopped)
    file, work = write_config(tmp_path / "recipe.py", small_config(files)), tmp_path / "my work"
    argv = ["finetune", f"--config={file}", f"--workdir={work}", "--stopped-code=75"]
    for more in ([], ["--config.task.folds=3"]):
        capsys.readouterr()
        assert main([*argv, *more]) == 130
        out, said = capsys.readouterr()
        assert (
            f"interrupted, saved. To continue:\n  {shlex.join(['bert-jax', *argv, *more])}" in said
        )
        assert "stopped after" not in out  # the run itself says so
    number[0] = signal.SIGTERM
    assert main(argv) == 75
    assert main(argv[:-1]) == 0
    begun = []

    def late(config: Any, *args: Any, **kwargs: Any) -> Result:
        begun.append(config.task.fold)
        unlearned = "nothing" if config.task.fold else ""
        return Result("", 1, True, stopped_by="SIGINT", unlearned=unlearned)

    monkeypatch.setattr(folds, "finetune", late)
    capsys.readouterr()
    assert main([*argv, "--config.task.folds=3"]) == 130
    said = capsys.readouterr().out
    assert said.endswith("SIGINT: stopped after fold 1; the same command continues\n")
    assert main(argv) == 0  # the only run is complete
    assert begun == [1, 0]


@pytest.mark.parametrize(
    "evaluation", [1, 4] if LONG else [4]
)  # then it stops at step 7, or 7 of the second wave
def test_stopped_and_continued_is_uninterrupted(files, waves, tmp_path, evaluation, monkeypatch):
    """Also if `init` is spelled otherwise; statistics are uploaded before resume/ is deleted."""
    config, work = small_config(files, sweep=WAVES), tmp_path / "work"
    result = finetune(config, work, echo=at_evaluation(evaluation, terminate))
    assert (result.finished, result.stopped_by) == (False, "SIGTERM")
    assert len(result.outcomes) == 3 * (evaluation > 1)
    total = 6 * evaluation
    assert saved_steps(work / "resume") == [total]
    said: list[str] = []
    uploads = []

    def upload(self: WorkDir, *, required: bool = False) -> None:
        uploads.append((required, (self.local / runs.STATISTICS).exists(), self.resume.exists()))

    monkeypatch.setattr(WorkDir, "sync", upload)
    config = dataclasses.replace(config, init=f"{config.init}/")
    assert finetune(config, work, echo=said.append).finished
    assert (True, True, True) in uploads
    assert said[0].endswith(f"continued at step {total} of {TOTAL}")
    found = fingerprint(work)
    assert {each["member"]["init"] for each in found["outcomes"]} == {config.init, "random"}
    assert json.loads(json.dumps(found).replace(config.init, files["init"])) == waves
    assert not (work / "resume").exists()
    assert [e["kind"] for e in read_events(work / "events.jsonl")] == [
        "start", "stopped", "start", "finished",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("save_seconds", "evaluation", "continued"),
    [
        pytest.param(60.0, 4, 0, id="never saved", marks=long),
        pytest.param(0.0, 5, 24, id="saved in the second wave", marks=long),
        pytest.param(0.0, 4, 18, id="saved after the last step of the first"),
    ],
)
def test_killed_and_continued_is_uninterrupted(
    files, waves, tmp_path, monkeypatch, save_seconds, evaluation, continued
):
    monkeypatch.setattr(train_module, "_SAVE_SECONDS", save_seconds)
    config, work = small_config(files, sweep=WAVES), tmp_path / "work"
    with pytest.raises(KilledError):
        finetune(config, work, echo=at_evaluation(evaluation, kill))
    said: list[str] = []
    assert finetune(config, work, echo=said.append).finished
    assert said[0].endswith(f"continued at step {continued} of {TOTAL}" if continued else str(work))
    assert fingerprint(work) == waves


@long
def test_killed_before_the_statistics(files, one_run, tmp_path, monkeypatch):
    """What was saved after the last step is not trained further."""
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "_SAVE_SECONDS", 0.0)
        patch.setattr(voice, "summarise", lambda *_: kill())
        with pytest.raises(KilledError):
            finetune(small_config(files), tmp_path / "work", echo=quiet)
    assert done(small_config(files), tmp_path / "work") == fingerprint(one_run)


def test_a_finished_run_says_so_again(files, one_run, tmp_path, capsys):
    """Also if `init` is spelled otherwise."""
    config = small_config({**files, "init": f"{files['init']}/"})
    file = write_config(tmp_path / "recipe.py", config)
    before = snapshot(one_run)
    assert main(["finetune", f"--config={file}", f"--workdir={one_run}"]) == 0
    said = capsys.readouterr().out
    assert said == f"{one_run} is finished\n{(one_run / 'statistics.txt').read_text()}"
    assert snapshot(one_run) == before


@long
def test_continued_on_other_devices(files, one_run, tmp_path, monkeypatch):
    """From a fine-tuned model, whose parameters are read onto one device."""
    config = small_config({**files, "init": str(one_run)}, sweep={"seeds": 2})
    with monkeypatch.context() as patch:
        use_devices(patch, 8)
        work = tmp_path / "work"
        assert not finetune(config, work, echo=at_evaluation(1, terminate)).finished
    found, whole = done(config, work), done(config, tmp_path / "whole")
    assert found["outcomes"] == whole["outcomes"]
    for row, expected in zip(found["metrics"], whole["metrics"], strict=True):
        np.testing.assert_allclose(row["train/loss"], expected["train/loss"], atol=1e-4)


# Refusals.


def test_other_work_directories_are_refused(files, one_run, tmp_path):
    other = write_files(tmp_path / "other")
    table = Path(files["train"]).read_text()
    (tmp_path / "bert_jax.csv").write_text(table.replace("dog", "cat", 1))
    changes = {
        r"seed: 6 there, 7 given": small_config(files, seed=7),
        r"what init names: fingerprint": small_config(files, reinitialise=True),
        r"task.train: .*bert_jax.csv": small_config(
            files, table={"train": str(tmp_path / "bert_jax.csv"), "dev": files["dev"]}
        ),
    }
    del other
    before = snapshot(one_run)
    for text, config in changes.items():
        with pytest.raises(UserError, match=text):
            finetune(config, one_run, echo=quiet)
    assert snapshot(one_run) == before
    pretrained = tmp_path / "pretrained"
    pretrained.mkdir()
    (pretrained / "config.json").write_text(
        json.dumps({"bert_jax": "0", "format": 2, "config": {}})
    )
    (tmp_path / "file").write_text("")
    (tmp_path / "unknown" / "checkpoints").mkdir(parents=True)
    before = snapshot(tmp_path)
    for name, text in (
        ("pretrained", "not a fine-tuning run"),
        ("file", "is a file"),
        ("unknown", "has checkpoints but no config.json"),
    ):
        with pytest.raises(UserError, match=text):
            finetune(small_config(files), tmp_path / name, echo=quiet)
    assert snapshot(tmp_path) == before


def test_what_a_run_came_from_is_verified(files, one_run, capsys):
    assert main(["lineage", str(one_run)]) == 0
    said = capsys.readouterr().out
    for role, kind in (
        ("init", "model"), ("task.train", "file"), ("task.dev", "file")
    ):  # fmt: skip
        assert f"{role}: " in said
        assert f"({kind}) - verified" in said
    assert "4 of 4 verified" in said


def test_a_file_that_changed_is_refused(files, tmp_path):
    """A run must not go on with other examples under the same name."""
    table = tmp_path / "train.csv"
    shutil.copy(files["train"], table)
    config = small_config({**files, "train": str(table)})
    with pytest.raises(KilledError):
        finetune(config, tmp_path / "work", echo=at_evaluation(1, kill))
    table.write_text(table.read_text().replace("dog", "cat", 1))
    with pytest.raises(UserError, match="what task names: fingerprint"):
        finetune(config, tmp_path / "work", echo=quiet)


def test_a_model_of_few_positions_reads_no_longer_rows(one_run, monkeypatch):
    """Where task.max_length was left out, the saved configuration does not know the model's."""
    restored = finetuned_checkpoint(one_run)
    record = restored.record
    record.config["task"]["max_length"] = 0
    record.extra["model"]["num_positions"] = 64
    monkeypatch.setattr(runs, "finetuned_checkpoint", lambda _: restored)
    assert reading.read_model(one_run).max_length == 64


def test_other_verbs_on_a_fine_tuned_model(one_run, tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus").train.path.parent
    recipe = write_config(tmp_path / "p.py", pretrain_config(data={"corpus": str(corpus)}))
    before = snapshot(one_run)
    work = str(one_run)
    assert main(["verify", work]) == 0
    assert "intact" in capsys.readouterr().out
    assert main(["status", work]) == 0
    said = capsys.readouterr().out
    assert "finished" in said
    assert (one_run / "statistics.txt").read_text().rstrip() in said
    assert main(["status", work, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    for arguments in (
        ["pretrain", f"--config={recipe}", f"--workdir={work}"],
        ["replay", work, "--step=0", "--corpus=x"],
        ["fill-mask", work, "the [MASK] sat"],
        ["status", work, f"--plot={tmp_path / 'x.png'}"],
    ):
        assert main(arguments) == 2, arguments
        assert "fine-tun" in capsys.readouterr().err
    assert snapshot(one_run) == before


def test_fine_tuned_verbs_on_other_directories(files, tmp_path, capsys):
    config = {"bert_jax": "0", "format": 2, "config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["predict", f"{tmp_path}", "--data=x", f"--out={tmp_path / 'out'}"]) == 2
    assert "not a fine-tuning run" in capsys.readouterr().err
    assert main(["evaluate", f"{tmp_path}", "--data", files["dev"]]) == 2
    assert "--data does not apply to " in capsys.readouterr().err


def test_status_of_a_run_that_stopped(files, tmp_path, capsys):
    work = tmp_path / "work"
    with pytest.raises(KilledError):
        finetune(small_config(files), work, echo=at_evaluation(1, kill))
    assert main(["status", str(work)]) == 0
    said = capsys.readouterr().out
    assert "failed" in said
    assert "step 6, epoch 1.00 of wave 0: train/" in said
    assert "eval/accuracy" in said
    assert "is not yet saved" in said
    assert main(["predict", str(work), "--data=x", f"--out={tmp_path / 'out'}"]) == 2
    assert "no checkpoint yet" in capsys.readouterr().err


# What diverges.


def test_a_member_that_diverges_is_alone(files, waves, tmp_path):
    config = small_config(files, sweep={"learning_rates": (1e30, 1e-2, 2e-2)})
    found = done(config, tmp_path / "work")
    wild, *tame = found["outcomes"]
    assert wild["failed"] == "no evaluation gave a finite score"
    assert tame[: len(RATES)] == waves["outcomes"][: SEEDS * len(RATES) : SEEDS]
    assert found["member"]["learning_rate"] in (1e-2, 2e-2)
    for row in (row for row in found["metrics"] if len(row) > 1):  # the halt is a row, too
        assert row["eval/accuracy"][0] is None
        assert row["eval/accuracy"][1] is not None
    (event,) = (e for e in read_events(tmp_path / "work" / "events.jsonl") if "trial" in e)
    assert (event["kind"], event["trial"], event["batch"]) == ("bad_step", 0, 1)
    assert (
        "run 1 of wave 0 (learning rate 1e+30, seed 6): the loss of batch 1 is nan"
        in (event["message"])
    )


def test_all_members_diverge(files, tmp_path, capsys):
    config = small_config(files, optimizer__learning_rate=1e30, sweep={"seeds": 2})
    file, work = write_config(tmp_path / "recipe.py", config), tmp_path / "work"
    for _ in range(2):  # and again; launchers do not start a run again that ends with 8
        assert main(["finetune", f"--config={file}", f"--workdir={work}"]) == 8
        said = capsys.readouterr()
        assert "all have diverged" in said.err
        assert "no evaluation gave a finite score" in said.out
        assert saved_steps(work / "checkpoints") == []
    for verb in (["predict", "--data", files["dev"], f"--out={tmp_path / 'out'}"], ["evaluate"]):
        assert main([verb[0], str(work), *verb[1:]]) == 2
        assert "all have diverged" in capsys.readouterr().err
    with pytest.raises(NoModelError):
        finetune(config, work, echo=quiet)


def test_a_run_that_learns_nothing(files, tmp_path, capsys):
    """Exit code 8, also of a second start; the model and its export warn who asks them."""
    dev = tmp_path / "dev.csv"
    dev.write_text("text,label\n" + "".join(f"number {n},cat\n" for n in range(9)))
    config = small_config({**files, "dev": f"{dev}"}, training__num_epochs=1.0)
    file, work = write_config(tmp_path / "recipe.py", config), tmp_path / "work"
    for _ in range(2):
        assert main(["finetune", f"--config={file}", f"--workdir={work}"]) == 8
        said = capsys.readouterr()
        assert "and a constant prediction has 1. Try other rates (sweep.learning_rates" in said.err
        assert "accuracy x 100" in said.out
    export = tmp_path / "export"
    assert main(["export", str(work), "--to=huggingface", f"--out={export}"]) == 0
    for model in (work, export):
        capsys.readouterr()
        assert main(["classify", str(model), "number 3"]) == 0
        warning = capsys.readouterr().err
        assert "has learned nothing: its score on dev is " in warning
        assert "and a constant prediction has 1\n" in warning


def test_one_run_that_diverges_stops(files, tmp_path, capsys):
    """As pretraining does: exit code 4, the cause, and nothing that pretends to be a result."""
    config = small_config(files, optimizer__learning_rate=1e30)
    file, work = write_config(tmp_path / "recipe.py", config), tmp_path / "work"
    for _ in range(2):
        assert main(["finetune", f"--config={file}", f"--workdir={work}"]) == 4
        said = capsys.readouterr()
        assert "the loss of batch 1 is nan" in said.err
        assert "the step gave the same result to the last bit" in said.err
        assert "The last good checkpoint: none was saved" in said.err
        assert f"See the batch with `bert-jax replay {work} --step 1`" in said.err
    assert not list(work.glob("statistics.*"))
    kinds = [event["kind"] for event in read_events(work / "events.jsonl")]
    assert kinds == ["start", "bad_step", "error"] * 2
    assert main(["status", str(work)]) == 0
    assert "the loss of batch 1 is nan" in capsys.readouterr().out


def test_a_run_of_a_sweep_that_diverges_fails_once_and_the_others_go_on(files, tmp_path):
    rates = {"learning_rates": (1e30, 3e-4)}
    config = small_config(files, sweep=rates, training__num_epochs=1.0)
    result = finetune(config, tmp_path / "work", echo=at_evaluation(1, terminate))
    assert (result.finished, result.stopped_by) == (True, "SIGTERM")  # after the last step
    bad = [e for e in read_events(tmp_path / "work" / "events.jsonl") if e["kind"] == "bad_step"]
    assert [(event["trial"], event["batch"]) for event in bad] == [(0, 1)]
    assert bad[0]["message"].endswith("this run has failed")


def test_a_run_that_skips_its_bad_steps_ends(files, tmp_path):
    config = small_config(
        files, optimizer__learning_rate=1e30, guard={"on_bad_step": "skip", "max_skips": 99}
    )
    with pytest.raises(NoModelError):  # the first update spoils the parameters
        finetune(config, tmp_path / "work", echo=quiet)
    kinds = [event["kind"] for event in read_events(tmp_path / "work" / "events.jsonl")]
    assert kinds == ["start", *["skipped_step"] * 17, "error"]


def test_a_run_says_where_its_time_went(files, tmp_path, capsys, monkeypatch):
    """TensorBoard, a tracker, rates and status, of a sweep that was stopped and continued."""
    tracker = Package("trackio")
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    config = small_config(files, sweep={"seeds": 2}, training__log_every_steps=4)
    work, said = tmp_path / "work", []
    stop = at_evaluation(1, terminate)
    assert not finetune(config, work, echo=stop, track=["trackio"]).finished
    assert main(["status", str(work)]) == 0
    text = capsys.readouterr().out
    assert "step 6 of 18 (33.3%)" in text
    assert "stopped by a signal" in text
    assert finetune(config, work, echo=said.append, track=["trackio"]).finished
    rows = read_metrics(work / "metrics.jsonl")
    assert [row["step"] for row in rows] == [4, 6, 8, 12, 16, 18]  # evaluations at 6, 12 and 18
    assert all(row["perf/tokens_per_second"] > 0 for row in rows)
    assert all(0 < row["perf/goodput"] <= 1 for row in rows)
    assert [len(row["train/loss"]) for row in rows] == [2] * 6
    assert ["eval/loss" in row for row in rows] == [False, True, False, True, False, True]
    assert any(line.startswith("step 8/18  loss ") for line in said)
    tags = {tag for _, values in scalars(work / "tensorboard") for tag in values}
    assert {"train/loss/trial_0", "train/loss/trial_1", "eval/loss/trial_1", "epoch"} <= tags
    assert {tag for _, values in tracker.rows for tag in values} == tags
    assert [step for step, _ in tracker.rows] == [row["step"] for row in rows]
    assert len({settings["name"] for settings in tracker.opened}) == 1
    assert main(["status", str(work), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["step"], status["num_steps"], status["num_starts"]) == (18, 18, 2)
    assert sum(status["seconds"].values()) > 0
    assert main(["status", str(work)]) == 0
    assert "time of 2 starts" in capsys.readouterr().out


def test_micro_batches_and_a_split_model_are_the_same_run(files, one_run, tmp_path, monkeypatch):
    """And a run may change both when it continues."""
    use_devices(monkeypatch, 4)
    split = {"mesh": {"fsdp": 2, "tensor": 2}, "training__accumulation": 2}
    config = small_config(files, **split)
    work = tmp_path / "work"
    assert not finetune(small_config(files), work, echo=at_evaluation(1, terminate)).finished
    found, whole = done(config, work), fingerprint(one_run)
    for row, expected in zip(found["metrics"], whole["metrics"], strict=True):
        assert row["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-4)


# Disks.


def fail_writes(patch: pytest.MonkeyPatch, below: str, times: int) -> list[str]:
    """The first writes of checkpoints below a directory fail as on a full disk; which did."""
    write, failed = storage.write_async, []

    def failing(checkpoint, *arguments):
        if below in str(checkpoint) and len(failed) < times:
            failed.append(checkpoint.name)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(checkpoint, *arguments)

    patch.setattr(storage, "write_async", failing)
    return failed


@pytest.mark.parametrize(("below", "times"), [("/resume/", 2), ("/checkpoints/", 4)])
def test_saves_that_fail_do_not_end_a_run(files, one_run, tmp_path, monkeypatch, below, times):
    """The best model is tried three times, and again after the second evaluation, its best."""
    monkeypatch.setattr(train_module, "_SAVE_SECONDS", 0.0)
    failed = fail_writes(monkeypatch, below, times)
    assert done(small_config(files), tmp_path / "work") == fingerprint(one_run)
    assert len(failed) == times
    kinds = [event["kind"] for event in read_events(tmp_path / "work" / "events.jsonl")]
    assert kinds.count("save_failed") == times


def test_a_full_disk_at_the_end(files, one_run, tmp_path, monkeypatch, capsys):
    """Nothing is claimed; once there is room the same command finishes."""
    file, work = write_config(tmp_path / "recipe.py", small_config(files)), tmp_path / "work"
    command = ["finetune", f"--config={file}", f"--workdir={work}"]
    with monkeypatch.context() as patch:
        failed = fail_writes(patch, "/checkpoints/", 99)
        assert main(command) == 3
    assert len(failed) == 3
    said = capsys.readouterr()
    assert "the disk is full" in said.err
    assert "of each run" not in said.out
    assert not list(work.glob("statistics.*"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(voice, "write_summary", full)
        assert main(command) == 3
    said = capsys.readouterr()
    assert "statistics cannot be written" in said.err
    assert "of each run" not in said.out
    assert main(command) == 0
    assert fingerprint(work) == fingerprint(one_run)


def test_a_full_disk_at_a_stop(files, tmp_path, monkeypatch):
    """Exit code 0 would say that the run is saved."""
    fail_writes(monkeypatch, "/resume/", 99)
    with pytest.raises(RuntimeError, match="the disk is full") as raised:
        finetune(small_config(files), tmp_path / "work", echo=at_evaluation(1, terminate))
    assert getattr(raised.value, "exit_code", None) == 3
    assert [row["step"] for row in read_metrics(tmp_path / "work" / "metrics.jsonl")] == [6]

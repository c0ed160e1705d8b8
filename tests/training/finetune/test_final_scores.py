"""What is said of the models of a run: test data, scored once; reports; data that have changed."""

import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from small_finetuning import (
    compile_once,
    fingerprint,
    small_config,
    write_config,
    write_files,
    write_table,
)

from bert_jax.artefacts.saved.reading import read_finetuned
from bert_jax.cli.main import main
from bert_jax.errors import UserError
from bert_jax.tasks.reports.lines import report_lines
from bert_jax.tasks.task import Task
from bert_jax.tasks.text.task import TextSplit
from bert_jax.training.finetune import report
from bert_jax.training.finetune import train as train_module
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.evaluate import Scored, differences, evaluate_finetuned
from bert_jax.training.finetune.train import finetune

SWEEP = {"seeds": 2, "baseline": "random", "at_once": 3}
"""Two waves, the second of one member."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        compile_once(patch)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("files")
    return {**write_files(directory), "test": write_table(directory / "test.csv", 24, 2)}


def with_test(files: dict[str, str], **changes: Any) -> FinetuneConfig:
    named = {name: files[name] for name in ("train", "dev", "test")}
    return small_config(files, table=named, **changes)


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def sweep(files, tmp_path_factory) -> Path:
    """The work directory of a finished sweep; not to be changed."""
    work = tmp_path_factory.mktemp("sweep") / "work"
    assert finetune(with_test(files, sweep=SWEEP), work, echo=quiet).finished
    return work


def lines_of(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in map(str.split, text.splitlines())}


def test_each_trial_is_scored_once_with_its_best_parameters(files, sweep, tmp_path, monkeypatch):
    """The training does not know of test data, and each trial has the scores of its run alone."""
    statistics = json.loads((sweep / "statistics.json").read_text())
    scored: list[str] = []
    score = TextSplit.score

    def counting(split, *arguments):
        scored.append(split.name)
        return score(split, *arguments)

    monkeypatch.setattr(TextSplit, "score", counting)
    without = tmp_path / "without"
    assert finetune(small_config(files, sweep=SWEEP), without, echo=quiet).finished
    assert {*scored} == {"dev"}
    for one, other in zip(
        fingerprint(sweep)["outcomes"], fingerprint(without)["outcomes"], strict=True
    ):
        assert {**one, "test": {}} == other
    scored.clear()
    for number in (3,):  # alone in the second wave
        member = statistics["outcomes"][number]["member"]
        alone = with_test(files, seed=member["seed"], reinitialise=member["init"] == "random")
        work = tmp_path / f"{number}"
        assert finetune(alone, work, echo=quiet).finished
        test = evaluate_finetuned(work, "test").scores
        assert test == pytest.approx(statistics["outcomes"][number]["test"])
        assert test == pytest.approx(evaluate_finetuned(work, files["test"]).scores)
    assert scored.count("test") == 1
    rows = statistics["test"]["groups"]
    for row in rows:
        own = [o["test"]["accuracy"] for o in statistics["outcomes"]
               if o["member"]["init"] == row["init"]]  # fmt: skip
        assert row["median"] == pytest.approx(np.median(own))
    [compared] = statistics["test"]["comparisons"]
    assert compared["pairs"] == 2
    text = (sweep / "statistics.txt").read_text()
    assert "on dev, the set that chose the epoch; below on test, not used for selection" in text
    assert "accuracy x 100 on test: each run scored once" in text
    assert "less random, on test" in text


def test_a_run_that_was_stopped_or_killed_scores_its_test_data(files, sweep, tmp_path, monkeypatch):
    expected, work = fingerprint(sweep), tmp_path / "work"
    config = with_test(files, sweep=SWEEP)
    write = report.write_reports

    def killed(*arguments, **named):
        os.kill(os.getpid(), signal.SIGTERM)  # in the second wave
        write(*arguments, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "_SAVE_SECONDS", 0.0)
        patch.setattr(report, "write_reports", killed)
        with pytest.raises(KeyboardInterrupt):
            finetune(config, work, echo=quiet)
    assert not (work / "statistics.json").exists()
    assert finetune(config, work, echo=quiet).finished
    assert fingerprint(work) == expected
    assert json.loads((work / "report.json").read_text()) == json.loads(
        (sweep / "report.json").read_text()
    )


def test_the_report_is_on_the_saved_model(files, sweep, tmp_path, capsys):
    record = json.loads((sweep / "report.json").read_text())
    model = read_finetuned(sweep)
    saved = fingerprint(sweep)
    assert record["member"] == saved["member"]
    assert record["splits"]["dev"]["scores"] == pytest.approx(saved["scores"])
    assert model.origin.reports == record["splits"]
    outcome = next(o for o in saved["outcomes"] if o["member"] == saved["member"])
    assert record["splits"]["test"]["scores"] == pytest.approx(outcome["test"])
    text = (sweep / "report.md").read_text()
    assert "## test, not used for selection: 24 examples" in text
    assert (sweep / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert main(["evaluate", str(sweep), "--json", f"--report={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert [record["splits"][name]["chose"] for name in ("dev", "test")] == [True, False]
    assert found["splits"] == record["splits"]
    assert found["accuracy"] == pytest.approx(saved["scores"]["accuracy"])
    assert found["test/accuracy"] == pytest.approx(outcome["test"]["accuracy"])
    assert "## dev, the set that chose the epoch: 24 examples" in said.err
    again = json.loads((tmp_path / "out" / "report.json").read_text())
    assert again["splits"] == record["splits"]
    assert main(["evaluate", str(sweep)]) == 0
    assert lines_of(capsys.readouterr().out)["test/accuracy"] == pytest.approx(
        outcome["test"]["accuracy"], rel=1e-5
    )


def test_a_file_with_the_name_of_dev_chose_nothing(files, sweep, tmp_path):
    data = shutil.copy(files["test"], tmp_path / "dev")
    found = evaluate_finetuned(sweep, f"{data}", columns={"format": "csv"}).reports
    assert found["dev"]["chose"] is False
    assert report_lines("dev", found["dev"])[0] == "## dev, not used for selection: 24 examples"


def test_a_report_on_another_model_is_left_out(sweep, tmp_path):
    work = shutil.copytree(sweep, tmp_path / "work")
    record = json.loads((work / "report.json").read_text())
    record["member"]["seed"] += 1
    (work / "report.json").write_text(json.dumps(record))
    assert read_finetuned(work).origin.reports == {}
    (work / "report.json").write_text("{}")
    with pytest.raises(UserError, match=r"report.json is not a report of a run"):
        read_finetuned(work)


def test_two_models_on_the_same_examples(files, sweep, tmp_path, capsys):
    other = tmp_path / "other"
    assert finetune(small_config(files, seed=9), other, echo=quiet).finished
    found = evaluate_finetuned(sweep, files["test"], versus=[other])
    mine, theirs = (evaluate_finetuned(work, files["test"]).scores for work in (sweep, other))
    for name, each in found.differences["test.csv"].items():
        assert each["difference"] == pytest.approx(mine[name] - theirs[name])
        assert each["interval"] is None  # of 24 examples
        assert each["no_interval"].startswith("only ")
    assert main(["evaluate", str(sweep), "--data=dev", f"--versus={other}", "--json"]) == 0
    said = capsys.readouterr()
    each = json.loads(said.out)["differences"]["dev"]["accuracy"]
    assert (each["interval"] is None) == ("units differ" in f"{each['no_interval']}")
    assert "95%, paired" in said.err
    assert "Intervals are over examples, with one run a side, not over seeds" in said.err
    assert main(["evaluate", str(sweep), f"--versus={other}"]) == 2  # it has no test data
    assert "was trained with other test data" in capsys.readouterr().err


def test_models_are_compared_over_seeds(files, tmp_path, capsys):
    """The differences of the pairs, in the order given, have Student's t with n - 1 degrees."""
    works = [tmp_path / name for name in ("a1", "a2", "b1", "b2")]
    for seed, work in enumerate(works):
        still = {"optimizer__learning_rate": 1e-9} if work.name == "a1" else {}
        assert finetune(small_config(files, seed=seed, **still), work, echo=quiet).finished
    ours, theirs = works[:2], works[2:]
    sides = [[evaluate_finetuned(work).scores["accuracy"] for work in side]
             for side in (ours, theirs)]  # fmt: skip
    each = np.subtract(*sides)
    assert np.ptp(each) > 0
    first, *more = ours
    command = ["evaluate", f"{first}", *(f"--other-seed={work}" for work in more)]
    assert main([*command, *(f"--versus={work}" for work in theirs), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)["differences"]["dev"]["accuracy"]
    assert (found["over"], found["by_seed"]) == ("seeds", pytest.approx(each))
    ends = scipy.stats.t.interval(0.95, 1, each.mean(), scipy.stats.sem(each))
    assert found["interval"] == pytest.approx(ends)
    assert found["difference"] == pytest.approx(each.mean())
    assert "a1, a2 minus b1, b2" in said.err
    assert "Differences are means over pairs of seeds" in said.err
    own = evaluate_finetuned(first, versus=theirs[::-1], other_seeds=more)
    assert own.differences["dev"]["accuracy"]["by_seed"] == pytest.approx(
        np.subtract(sides[0], sides[1][::-1])
    )
    for wrong, text in (
        ([f"--versus={theirs[0]}"], "--versus is given 1 times; give it 2 times"),
        ([], "--versus is given 0 times; give it 2 times"),
        ([f"--versus={theirs[0]}"] * 2, "a run is given twice"),
    ):
        assert main([*command, *wrong]) == 2
        assert text in capsys.readouterr().err


def test_equal_differences_have_no_interval_over_seeds():
    """A spread of zero says nothing of further seeds; a score that a run lacks is left out."""
    ours = [Scored({"accuracy": 0.9, "f1": value}, None) for value in (0.8, math.nan)]
    theirs = [Scored({"accuracy": 0.8, "f1": 0.5}, None)] * 2
    found = differences(ours, theirs, "seeds")
    assert found.keys() == {"accuracy"}
    assert found["accuracy"]["interval"] is None
    assert found["accuracy"]["no_interval"] == "all pairs differ by the same amount"


def test_data_that_have_changed_are_refused(files, tmp_path, capsys):
    """The training file is not read where dev data are named."""
    own = {name: str(tmp_path / f"{name}.csv") for name in ("train", "dev", "test")}
    for name, path in own.items():
        shutil.copy(files[name], path)
    work = tmp_path / "work"
    said: list[str] = []
    finetune(with_test({**files, **own}, training__num_epochs=1.0), work, echo=said.append)
    assert any("dev: " in line and "examples have the texts of" in line for line in said)
    Path(own["train"]).unlink()
    before = evaluate_finetuned(work).scores
    warned = capsys.readouterr().err
    assert "dev: " in warned
    assert "examples have the texts of training examples" in warned
    Path(own["test"]).unlink()
    assert evaluate_finetuned(work, "dev").scores["accuracy"] == before["accuracy"]
    assert main(["evaluate", str(work)]) == 2
    assert "test.csv" in capsys.readouterr().err
    shutil.copy(files["test"], own["test"])
    with open(own["dev"], "a") as file:
        file.write(Path(files["train"]).read_text().splitlines()[1] + "\nthe new ones .,cat\n")
    text = r"data of the split 'dev' of .* have changed .*: 26 examples now, 24 then; \d+ of them"
    with pytest.raises(UserError, match=text):
        evaluate_finetuned(work)
    capsys.readouterr()
    evaluate_finetuned(work, own["dev"])  # named, they are scored
    assert "examples have the texts of training examples" in capsys.readouterr().err
    table = Path(files["dev"]).read_text()
    Path(own["dev"]).write_text(table.replace("dog\n", "cat\n", 1))
    with pytest.raises(UserError, match="24 examples, as before, but with other texts or labels"):
        evaluate_finetuned(work, "dev")


def test_a_table_that_has_grown_is_refused(files, tmp_path, monkeypatch):
    """Other rows are held out of it: of 24 some were trained on."""
    table, work = tmp_path / "mine.csv", tmp_path / "work"
    lines = [f"number {n} {'cat' * (n % 3)},{'ab'[n % 2]}" for n in range(60)]
    table.write_text("\n".join(["text,label", *lines[:40]]) + "\n")
    config = small_config(
        files, table={"train": str(table), "dev_rate": 0.4}, training__num_epochs=1.0
    )
    assert finetune(config, work, echo=quiet).finished
    scores = evaluate_finetuned(work).scores
    assert scores.keys() == {"accuracy", "f1", "macro_f1", "matthews"}
    with monkeypatch.context() as patch:
        patch.setattr(Task, "test_splits", lambda task: pytest.fail("was not asked for"))
        assert evaluate_finetuned(work, "dev").scores == scores
    table.write_text("\n".join(["text,label", *lines]) + "\n")
    with pytest.raises(UserError, match=r"24 examples now, 16 then; [1-9]\d* of them are training"):
        evaluate_finetuned(work)


def test_relative_paths_are_found_from_elsewhere(files, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(files["train"]).parent)
    names = {name: f"{name}.csv" for name in ("train", "dev")}
    config, work = small_config({**files, **names}, training__num_epochs=1.0), tmp_path / "work"
    assert finetune(config, work, echo=quiet).finished
    record = json.loads((work / "config.json").read_text())
    assert record["config"]["task"]["train"] == files["train"]
    monkeypatch.chdir(tmp_path)
    (work / "report.json").unlink()
    assert evaluate_finetuned(work).scores


def test_a_report_that_cannot_be_written_is_written_later(files, sweep, tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    recipe, work = write_config(tmp_path / "r.py", with_test(files, sweep=SWEEP)), tmp_path / "work"
    command = ["finetune", f"--config={recipe}", f"--workdir={work}"]
    with monkeypatch.context() as patch:
        patch.setattr(report, "write_reports", full)
        assert main(command) == 3
    assert not list(work.glob("statistics.*"))
    assert main(command) == 0
    assert fingerprint(work) == fingerprint(sweep)


def test_the_report_of_a_run_is_not_replaced(files, sweep, capsys):
    before = (sweep / "report.json").read_bytes()
    assert main(["evaluate", f"{sweep}", f"--report={sweep}"]) == 2
    assert "holds a model, whose own report would be replaced" in capsys.readouterr().err
    assert (sweep / "report.json").read_bytes() == before


def test_the_results_of_a_cross_validation_are_not_replaced(files, sweep, tmp_path, capsys):
    (tmp_path / "folds.json").write_text("{}")
    assert main(["evaluate", f"{sweep}", f"--report={tmp_path}"]) == 2
    assert "whose own report would be replaced" in capsys.readouterr().err
    assert main(["predict", f"{sweep}", f"--data={files['test']}", f"--out={tmp_path}"]) == 2
    assert "is a file or a cross-validation; give another directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["folds.json"]


def test_options_of_other_verbs(sweep, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"bert_jax": "0", "format": 2, "config": {}}))
    for option in ("--report=x", "--versus=x", "--other-seed=x"):
        assert main(["evaluate", f"{tmp_path}", option]) == 2
        assert "does not apply to " in capsys.readouterr().err
    assert main(["evaluate", f"{tmp_path}", "--report=x", "--pairs", "a", "b"]) == 2
    assert "cannot be used with --pairs" in capsys.readouterr().err


def test_an_exported_model_is_scored(files, sweep, tmp_path, monkeypatch, capsys):
    out, data = tmp_path / "out", tmp_path / "new.csv"
    assert main(["export", str(sweep), "--to=huggingface", f"--out={out}"]) == 0
    table = Path(files["test"]).read_text()
    data.write_text(table.replace("text,label", "review,is", 1))
    expected = evaluate_finetuned(sweep, files["test"])
    capsys.readouterr()
    columns = "--columns=text=review,label=is"
    assert main(["evaluate", str(out), f"--data={data}", columns, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in expected.scores} == pytest.approx(expected.scores)
    assert found["splits"]["new.csv"]["classes"] == expected.reports["test.csv"]["classes"]
    assert evaluate_finetuned(sweep, str(data), columns={"text": "review", "label": "is"}).scores
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test").mkdir()  # is no file, so hides no data
    for wrong, said in (
        ([f"--data={data}"], "no column 'text'"),
        ([f"--data={data}", "--columns=txt=review"], "--columns: unknown field txt"),
        ([f"--data={data}", "--columns=review"], "write FIELD=COLUMN"),
        (["--data=test"], "names no test data"),
    ):
        assert main(["evaluate", str(out), *wrong]) == 2
        assert said in capsys.readouterr().err
    assert main(["evaluate", files["init"], f"--data={data}"]) == 2
    assert "has no task head" in capsys.readouterr().err

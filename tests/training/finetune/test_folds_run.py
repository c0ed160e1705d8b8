"""Cross-validation: runs in directories of their own, pooled predictions, one score, resume."""

import json
from pathlib import Path

import numpy as np
import pytest
from small_finetuning import small_config, write_config, write_files
from small_saved import small_saved
from squad_files import entry
from task_examples import pointing_at, read_json_lines

import bert_jax
from bert_jax.cli.main import main
from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.tasks.reports.lines import report_lines
from bert_jax.training.finetune import folds
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.evaluate import evaluate_finetuned
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.run_plan import Result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    home = tmp_path_factory.mktemp("folds")
    files = write_files(home)
    section = {"train": files["train"], "id": ""}
    config = small_config(
        files, task={"kind": "table", "max_length": 16, "folds": 2, **section},
        training__evals_per_epoch=2,
    )  # fmt: skip
    workdir = home / "run"
    command = ["finetune", f"--config={write_config(home / 'config.py', config)}",
               f"--workdir={workdir}"]  # fmt: skip
    assert not main(command)
    return config, command, workdir


def test_one_score_of_all_examples(runs):
    """The pooled accuracy is that of the examples of all folds, each predicted by another's run."""
    config, _, workdir = runs
    result = json.loads((workdir / "folds.json").read_text())
    counts = [fold["examples"] for fold in result["folds"]]
    assert sum(counts) == 44
    rows = (Path(config.task.train)).read_text().splitlines()[1:]
    predicted = read_json_lines(workdir / "predictions.jsonl")
    assert [entry["id"] for entry in predicted] == [f"{n}" for n in range(44)]
    hits = [row.split(",")[1] == entry["label"] for row, entry in zip(rows, predicted, strict=True)]
    assert result["scores"]["accuracy"] == pytest.approx(np.mean(hits))
    means = [fold["accuracy"] for fold in result["folds"]]
    assert result["scores"]["accuracy"] == pytest.approx(np.average(means, weights=counts))
    low, high = result["intervals"]["accuracy"]
    assert low < result["scores"]["accuracy"] < high
    assert "out of fold: 44 examples" in (workdir / "report.md").read_text()


def test_a_fold_is_scored_once_and_can_be_scored_again(runs):
    _, _, workdir = runs
    scores = []
    for number in (1, 2):
        rows = read_metrics(workdir / f"fold-{number}" / "metrics.jsonl")
        assert sum("eval/accuracy" in row for row in rows) == 1
        again = evaluate_finetuned(workdir / f"fold-{number}")
        scores.append(again.scores["accuracy"])
        (title, *_) = report_lines("dev", again.reports["dev"])
        assert title.startswith("## dev, not used for selection")
    found = json.loads((workdir / "folds.json").read_text())["folds"]
    assert [fold["accuracy"] for fold in found] == pytest.approx(scores)
    for file in ("report.md", "statistics.txt"):
        text = (workdir / "fold-1" / file).read_text()
        assert "not used for selection" in text
        assert "chose the epoch" not in text


def test_finished_folds_are_not_trained_again(runs, monkeypatch, capsys):
    """A start after the second fold was lost trains the second alone, and gives the same."""
    import shutil

    _, command, workdir = runs
    before = (workdir / "folds.json").read_bytes(), (workdir / "predictions.jsonl").read_bytes()
    kept = (workdir / "fold-1" / "metrics.jsonl").stat().st_mtime_ns
    shutil.rmtree(workdir / "fold-2")
    (workdir / "folds.json").unlink()
    assert not main(command)
    assert (workdir / "fold-1" / "metrics.jsonl").stat().st_mtime_ns == kept
    after = (workdir / "folds.json").read_bytes(), (workdir / "predictions.jsonl").read_bytes()
    assert after == before
    assert "fold 2 of 2" in capsys.readouterr().out


def test_the_result_has_the_scores_of_all_examples(runs):
    config, _, workdir = runs
    result = bert_jax.finetune(config, workdir)
    found = json.loads((workdir / "folds.json").read_text())["scores"]
    assert result.eval_metrics == {f"eval/{name}": value for name, value in found.items()}
    assert (result.workdir, result.finished, result.unlearned) == (str(workdir), True, "")


def test_what_is_refused(runs, tmp_path):
    config, _, workdir = runs
    import dataclasses

    sweep = dataclasses.replace(config.sweep, seeds=2)
    with pytest.raises(UserError, match="which trains one run per fold; leave sweep out"):
        folds.finetune_folds(dataclasses.replace(config, sweep=sweep), tmp_path)
    with pytest.raises(UserError, match=r"with task.folds, give a local directory"):
        folds.finetune_folds(config, "gs://bucket/run")
    with pytest.raises(UserError, match=r"contains a run without task.folds"):
        folds.finetune_folds(config, workdir / "fold-1")
    one = dataclasses.replace(config, task=dataclasses.replace(config.task, folds=0))
    with pytest.raises(UserError, match=r"contains folds of a run; give another directory"):
        folds.finetune_folds(one, workdir)
    task = dataclasses.replace(config.task, folds=3)
    with pytest.raises(UserError, match=r"task\.folds"):
        folds.finetune_folds(dataclasses.replace(config, task=task), workdir)


def test_a_dry_run_refuses_what_the_run_refuses(runs, tmp_path, capsys):
    _, command, workdir = runs
    for more, said in (
        (f"--config.sweep.seeds=2 --workdir={tmp_path / 'new'}", "trains one run per fold"),
        (f"--workdir={workdir / 'fold-1'}", "contains a run without task.folds"),
        ("--config.task.folds=0", "contains folds of a run"),
    ):
        assert main([*command, *more.split(), "--dry-run"]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_contradicted_labels_are_listed(runs):
    """The table agrees with the file and the predictions, and the report counts its rows."""
    config, _, workdir = runs
    head, *rows = (
        line.split("\t") for line in (workdir / "label_noise.tsv").read_text().splitlines()
    )
    assert head == ["line", "text", "label", "predicted", "label_probability",
                    "predicted_probability"]  # fmt: skip
    lines = Path(config.task.train).read_text().splitlines()
    predicted = read_json_lines(workdir / "predictions.jsonl")
    for line, text, label, guess, own, best in rows:
        assert lines[int(line) - 1] == f"{text},{label}"
        entry = predicted[int(line) - 2]
        assert entry["label"] == guess != label
        shares = [entry["probabilities"][name] for name in (label, guess)]
        assert shares == pytest.approx([float(own), float(best)], abs=1e-4)
    margins = [float(row[5]) - float(row[4]) for row in rows]
    assert margins == sorted(margins, reverse=True)
    assert rows
    assert f"The models contradict {len(rows)} labels" in (workdir / "report.md").read_text()


def zeros(_, split) -> list[np.ndarray]:
    return [np.zeros((len(ids), 2), np.float32) for ids in split.rows.tokens]


def pooled(monkeypatch, home: Path, task: dict, model, outputs=zeros, **ended) -> Result:
    """The result of a cross-validation (two folds by default) whose models nobody trains.

    Args:
        outputs: In place of `split_outputs`; zeros by default.
        **ended: Fields of the result of each fold.
    """
    done = Result(home, 1, finished=True, **ended)
    monkeypatch.setattr(folds, "finetune", lambda *_, **__: done)
    monkeypatch.setattr(folds, "read_finetuned", lambda _: model)
    monkeypatch.setattr(folds, "split_outputs", outputs)
    config = build(FinetuneConfig, {"init": f"{home}", "task": {"folds": 2, **task}})
    return folds.finetune_folds(config, home / "run", echo=lambda _: None)


def test_questions_without_a_target_are_scored_in_their_fold(monkeypatch, tmp_path):
    """They are not trained on, so that they have no row among the training rows."""
    paragraphs = [
        {"context": f"the cat {n}", "qas": [entry(f"{n}", "cat", start=4 if n else 0)]}
        for n in range(4)
    ]
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    task = {"kind": "squad", "train": f"{file}", "misplaced": "keep"}
    found = pooled(monkeypatch, tmp_path, task, small_saved("span")).eval_metrics
    assert found == {"eval/exact": 0.0, "eval/f1": 0.0}
    assert len(json.loads((tmp_path / "run" / "predictions.json").read_text())) == 4


def test_folds_of_rows_longer_than_those_of_pretraining(monkeypatch, tmp_path):
    """The runs lengthen rotary positions; the pooled scores need the positions of the runs."""
    trained = small_saved("tags", positions="rope", num_types=0, pooler=False, num_positions=512)
    file = tmp_path / "a.txt"
    file.write_text("a X\nb Y\n\nb Y\n\na X\n")
    task = {"kind": "tagging", "train": f"{file}", "max_length": 512}
    assert pooled(monkeypatch, tmp_path, task, trained).eval_metrics == {"eval/accuracy": 0.5}


@pytest.mark.parametrize("right", [True, False])
def test_what_was_learned_is_judged_by_all_examples(monkeypatch, tmp_path, right):
    """Each fold has one example, for which a constant is always right."""
    file = tmp_path / "a.csv"
    file.write_text("text,label\nthe cat,x\na cat,x\nthe dog,y\na dog,y\n")
    task = {"kind": "table", "train": f"{file}", "max_length": 16, "folds": 4}
    found = pooled(
        monkeypatch, tmp_path, task, small_saved("classification"),
        lambda _, split: pointing_at([y if right else 1 - y for y in split.truth()], 2),
        unlearned="no better than a constant" if right else "",
    )  # fmt: skip
    assert found.eval_metrics["eval/accuracy"] == right
    told = "accuracy of all folds is 0.0000, not above a constant's 0.5000"
    assert found.unlearned == ("" if right else told)

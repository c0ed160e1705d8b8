"""Every kind of task once from its files to predictions, by the command line."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import pytest
from small_finetuning import small_config, write_config, write_files
from task_examples import put

from bert_jax.cli.main import main
from bert_jax.distributed.parallel.sharding import make_trial_mesh
from bert_jax.training.finetune import evaluate
from bert_jax.training.finetune import train as train_module
from bert_jax.training.run.telemetry import read_metrics

pytestmark = pytest.mark.skipif(
    os.environ.get("BERT_JAX_CHAOS") != "1", reason="BERT_JAX_CHAOS=1"
)  # the step is compiled for each


def tagging(home: Path) -> dict[str, Any]:
    """20 sentences in which cats are persons and hills are places."""
    lines: list[str] = []
    for number in range(20):
        animal = ("cat", "dog")[number % 2]
        lines += ["the O", f"{animal} {'B-PER' if number % 2 == 0 else 'O'}", "ran O", "under O"]
        lines += ["a B-LOC", "hill I-LOC"] if number % 3 else ["mat O"]
        lines += [". O", ""]
    path = put(home / "words.txt", *lines)
    return {"kind": "tagging", "max_length": 16, "train": path, "dev": path}


def span(home: Path) -> dict[str, Any]:
    """20 questions; every fourth has no answer."""
    paragraphs = []
    for number in range(20):
        animal = ("cat", "dog")[number % 2]
        context = f"the {animal} sat on a {('mat', 'hill')[number % 3 == 0]} ."
        absent = number % 4 == 3
        answers = [] if absent else [{"text": animal, "answer_start": 4}]
        entry = {"id": f"{number}", "question": "a cat ran under the hill" if absent else "the dog",
                 "answers": answers, "is_impossible": absent}  # fmt: skip
        paragraphs.append({"context": context, "qas": [entry]})
    path = home / "questions.json"
    path.write_text(json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}))
    section = {"train": str(path), "dev": str(path), "max_question": 8, "stride": 4}
    return {"kind": "squad", "max_length": 24, **section}


def mnli(home: Path) -> dict[str, Any]:
    """Pairs with three labels, and two files to be scored on."""
    for split, rows in (("train", 20), ("dev_matched", 9), ("dev_mismatched", 10)):
        lines = [
            f"the {('cat', 'dog', 'mat')[n % 3]} sat\ta cat ran\t"
            f"{('entailment', 'neutral', 'contradiction')[n % 3]}"
            for n in range(rows)
        ]
        put(home / "MNLI" / f"{split}.tsv", "sentence1\tsentence2\tgold_label", *lines)
    return {"kind": "glue", "max_length": 16, "name": "mnli", "data": str(home)}


@pytest.mark.parametrize(
    ("task", "data", "written", "names"),
    [
        (tagging, "words.txt", "predictions.txt", {"f1", "precision", "recall", "accuracy"}),
        (span, "questions.json", "predictions.json", {"f1", "exact"}),
        (
            mnli,
            "MNLI/dev_mismatched.tsv",
            "predictions.jsonl",
            {"accuracy", "dev_mismatched/accuracy"},
        ),
    ],
)
def test_from_files_to_predictions(tmp_path, capsys, monkeypatch, task, data, written, names):
    for module in (train_module, evaluate):
        monkeypatch.setattr(
            module, "make_trial_mesh", lambda c, n: make_trial_mesh(c, n, jax.devices()[:1])
        )
    config = small_config(write_files(tmp_path), task=task(tmp_path), training__num_epochs=12.0)
    work = tmp_path / "work"
    recipe = write_config(tmp_path / "recipe.py", config)
    assert main(["finetune", f"--config={recipe}", f"--workdir={work}"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(work)]) == 0
    said = dict(line.split() for line in capsys.readouterr().out.splitlines())
    out = tmp_path / "out"
    assert main(["predict", str(work), "--data", str(tmp_path / data), f"--out={out}"]) == 0
    assert (out / written).stat().st_size
    outcome = json.loads((work / "statistics.json").read_text())["outcomes"][0]
    best = next(row for row in outcome["scores"] if row["step"] == outcome["best_step"])
    assert names <= said.keys()
    found = {name: float(value) for name, value in said.items()}
    assert found == pytest.approx({name: best[name] for name in found}, abs=1e-5)
    assert outcome["failed"] == ""  # it learns
    assert {f"eval/{name}" for name in names} <= read_metrics(work / "metrics.jsonl")[-1].keys()

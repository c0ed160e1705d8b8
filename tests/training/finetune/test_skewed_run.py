"""A run with every option for rare classes, probabilities and long texts, up to its answers."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from small_finetuning import small_config, write_files

import bert_jax
from bert_jax.artefacts.exchange.export import export
from bert_jax.artefacts.formats.huggingface_files import Reading, TaskOutputs
from bert_jax.artefacts.saved.reading import read_finetuned, read_model
from bert_jax.distributed.parallel.sharding import make_trial_mesh
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.tasks.config import WindowOptions
from bert_jax.training.finetune import evaluate
from bert_jax.training.finetune import train as train_module
from bert_jax.training.finetune.data import _implied_task
from bert_jax.training.finetune.evaluate import (
    evaluate_finetuned,
    predict_finetuned,
    split_outputs,
)
from bert_jax.training.finetune.train import finetune

pytestmark = pytest.mark.slow

OPTIONS = {
    "problem_type": "multi_label", "class_weights": "balanced", "focal_gamma": 1.0,
    "oversampling": 0.5, "long": "windows", "window_pooling": "max", "calibrate": True,
    "thresholds": "tuned",
}  # fmt: skip


def write_rows(path, num_rows, seed):
    """Texts of 6 to 40 words, most with cats; some have hills in their second half."""
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(num_rows):
        words = random.choice(["cat", "dog", "sat"], random.integers(6, 40)).tolist()
        labels = ["cat"]
        if random.random() < 0.25:
            words[-2] = "hill"
            labels.append("hill")
        lines.append(f"{' '.join(words)},{'|'.join(labels)}")
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return str(path)


@pytest.mark.drawn
def test_from_a_table_to_answers(tmp_path, monkeypatch):
    for module in (train_module, evaluate):
        monkeypatch.setattr(
            module, "make_trial_mesh", lambda c, n: make_trial_mesh(c, n, jax.devices()[:1])
        )
    files = write_files(tmp_path)
    table = {
        "train": write_rows(tmp_path / "long.csv", 60, 0),
        "dev": write_rows(tmp_path / "long_dev.csv", 30, 1),
        "separator": "|",
        **OPTIONS,
    }
    config = small_config(files, task={"kind": "table", "max_length": 16, **table})
    work = tmp_path / "work"
    (outcome,) = finetune(config, work, echo=lambda line: None).outcomes
    best = next(each for each in outcome.scores if each["step"] == outcome.best_step)
    assert best["ece"] <= best["ece_uncalibrated"]
    assert (work / "calibration.png").stat().st_size

    # The same texts as other data are scored with what was fitted, and so the same.
    model = read_finetuned(work)
    split = model.origin.task.open_split(table["dev"])
    scores = split.score(split_outputs(model, split), model.origin.metrics)
    assert scores == pytest.approx({name: best[name] for name in scores}, abs=1e-5)

    predict_finetuned(work, table["dev"], tmp_path / "out")
    lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    predicted = [json.loads(line) for line in lines]
    texts = [text for (text,) in split.texts()]
    export(work, "huggingface", tmp_path / "export")
    found = json.loads((tmp_path / "export" / "config.json").read_text())
    assert found["label_thresholds"] == {
        name: best[f"threshold/{name}"] for name in ("cat", "hill")
    }
    assert found["long_texts"] == {"how": "windows", "pooling": "max", "stride": 0}
    for directory in (work, tmp_path / "export"):
        answers = bert_jax.load(str(directory)).classify(texts)
        for answer, expected in zip(answers, predicted, strict=True):
            for name, share in expected["probabilities"].items():
                if abs(share - best[f"threshold/{name}"]) > 2e-3:
                    assert (name in answer["labels"]) == (name in expected["labels"])
            # A low temperature multiplies what other programs round.
            assert answer["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-3)

    # The export has the thresholds and windows of the run, so it has the run's scores.
    again = evaluate_finetuned(tmp_path / "export", table["dev"], columns={"separator": "|"})
    assert again.scores == pytest.approx({name: best[name] for name in again.scores}, abs=1e-5)
    assert again.scores.keys() >= {"f1", "macro_f1", "accuracy", "threshold/hill"}


@pytest.mark.drawn
def test_an_export_of_another_task_is_read_with_its_own_limits(tmp_path):
    model = read_model(write_files(tmp_path)["init"])

    def implied(network, kind, labels=(), reading=None):
        outputs = TaskOutputs(TaskHeadConfig(network, 2), kind, labels, reading=reading)
        task, scores = _implied_task(dataclasses.replace(model, outputs=outputs, max_length=32))
        return task.config, task.spec.rules, scores

    spans, rules, scores = implied("span", "span", reading=Reading(4, 6, 5, 1.5))
    assert (spans.windows, spans.max_answer_tokens) == (WindowOptions(32, 4, 6), 5)
    assert (rules, scores) == ("v2.0", {"null_threshold": 1.5})
    assert implied("span", "span", reading=Reading(4, 6, 5))[1:] == ("v1.1", {})
    tags, _, _ = implied("tagging", "tags", ("a", "b"), Reading(7))
    assert (tags.kind, tags.stride, tags.labels) == ("tagging", 7, ("a", "b"))
    assert implied("tagging", "tags", ("a", "b"))[0].stride == 0
    assert implied("classification", "choice")[0].kind == "choice"

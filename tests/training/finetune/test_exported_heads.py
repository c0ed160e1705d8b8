"""Exports without a pooler, which their heads do not read, are scored like the models."""

import dataclasses
import json

import numpy as np
import pytest
from asked_models import random_model

from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.errors import UserError
from bert_jax.training.finetune import evaluate
from bert_jax.training.finetune.data import read_scored, splits_of
from bert_jax.training.finetune.evaluate import evaluate_finetuned, split_outputs

QUESTION = {
    "id": "1", "question": "who sat ?", "answers": [{"text": "the cat", "answer_start": 0}],
}  # fmt: skip
DATA = {
    "tags": "the X O\ncat X B-PER\nsat X O\n\na X O\nhill X B-LOC\n",
    "span": json.dumps(
        {"data": [{"paragraphs": [{"context": "the cat sat .", "qas": [QUESTION]}]}]}
    ),
}


@pytest.mark.parametrize(
    ("kind", "columns"), [("tags", {"tag_column": "3", "lenient": "True"}), ("span", {})]
)
def test_an_export_is_scored(tmp_path, kind, columns):
    saved, path = random_model(kind, num_positions=128), tmp_path / "data.txt"
    path.write_text(DATA[kind])
    (tmp_path / "out").mkdir()
    write_huggingface(saved, tmp_path / "out")
    model = read_scored(tmp_path / "out", columns)
    assert saved.has_pooler
    assert not model.has_pooler
    (split,) = splits_of(tmp_path / "out", model, f"{path}")
    own = split_outputs(dataclasses.replace(saved, origin=model.origin), split)
    for ours, theirs in zip(own, split_outputs(model, split), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    found = evaluate_finetuned(tmp_path / "out", f"{path}", columns=columns).scores
    assert found == pytest.approx(split.score(own, model.origin.metrics or None))


def test_a_head_that_reads_a_pooler_is_not_scored_without_one(tmp_path):
    """The adapter of another program has none if its base had none; there was a traceback."""
    (tmp_path / "data.csv").write_text("text,label\nthe cat,a\n")
    saved = random_model("classes")
    saved = dataclasses.replace(
        saved, outputs=dataclasses.replace(saved.outputs, labels=("a", "b", "c"))
    )
    model = read_scored(exported(saved, tmp_path / "out")).without({"pooler"})
    (split,) = splits_of(tmp_path / "out", model, f"{tmp_path / 'data.csv'}")
    with pytest.raises(UserError, match="the head needs a pooler, but the model has none"):
        split_outputs(model, split)


def exported(saved, out, **outputs):
    """Write a model, with other outputs, in Hugging Face's format."""
    out.mkdir()
    write_huggingface(
        dataclasses.replace(saved, outputs=dataclasses.replace(saved.outputs, **outputs)), out
    )
    return out


def test_tags_of_iobes_are_scored_as_entities(tmp_path):
    """They were plain tags, which the data's tags, read as IOB2, could not equal."""
    labels = ("O", "B-PER", "I-PER", "E-PER", "S-PER")
    task = read_scored(exported(random_model("tags"), tmp_path / "out", labels=labels)).origin.task
    assert (task.spec.scheme, task.metric) == ("iob2", "f1")
    (tmp_path / "data.txt").write_text("kim S-PER\nmet O\n\nkim B-PER\nlee E-PER\n")
    split = task.open_split(f"{tmp_path / 'data.txt'}")
    best = np.array([[0, 4, 0, 0], [0, 1, 3, 0]])
    assert split.score(list(np.eye(5)[best])) == dict.fromkeys(task.metrics, 1.0)
    assert split.report(list(np.eye(5)[best]))["strict"]["micro"]["f1"] == 1


@pytest.mark.parametrize("field", ["max_length=16", "thresholds=tuned", "calibrate=True"])
def test_what_belongs_to_the_model_is_no_column(tmp_path, field):
    name, _, value = field.partition("=")
    out = exported(random_model("classes"), tmp_path / "out")
    named = read_scored(out, {"text": "body", "thresholds": "half"})  # as they are
    assert named.origin.task.config.text == "body"
    with pytest.raises(UserError, match=f"--columns cannot change task.{name} of a trained model"):
        read_scored(out, {name: value})


def test_a_file_with_the_name_of_a_split_is_other_data(tmp_path, monkeypatch):
    """It chose thresholds on itself, and the report said what the run had chosen on dev."""
    out = exported(random_model("classes"), tmp_path / "out", thresholds=(0.999,) * 3)

    def read(*given):
        model = read_scored(*given)
        origin = dataclasses.replace(model.origin, reports={"dev": {"chose": "the best"}})
        return dataclasses.replace(model, origin=origin)

    monkeypatch.setattr(evaluate, "read_scored", read)
    monkeypatch.chdir(tmp_path)
    found = []
    for name in ("dev", "data.csv"):
        (tmp_path / name).write_text("text,label\nthe cat sat,x;y\na dog ran,z\nkim met lee,x\n")
        columns = {"format": "csv", "separator": ";"}
        found.append(evaluate_finetuned(out, name, columns=columns))
    assert found[0].scores == found[1].scores
    assert found[0].reports["dev"]["chose"] is False

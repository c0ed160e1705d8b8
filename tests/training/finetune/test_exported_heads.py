"""Exports without a pooler, which their heads do not read, are scored like the models."""

import dataclasses
import json

import numpy as np
import pytest
from asked_models import random_model

from bert_jax.artefacts.exchange.exported_files import write_huggingface
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

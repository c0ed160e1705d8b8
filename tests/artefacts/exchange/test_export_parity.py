"""Exports as `transformers` reads them: every class, every kind of tokenizer, what must fail."""

import json

import pytest
import safetensors.numpy
from export_models import KINDS, TOKENIZERS, model_of

from bert_jax.artefacts.exchange.export import check_differences, export
from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.exchange.huggingface import load_theirs, prove
from bert_jax.artefacts.exchange.proof import (
    ProofFailedError,
    batch_of,
    compare,
    logits_of,
    proof_rows,
)

pytestmark = pytest.mark.parity
pytest.importorskip("transformers")
OUTPUTS = {
    "pretraining": {"hidden", "pooled", "mlm", "nsp"},
    "mlm": {"hidden", "mlm"},
    "encoder": {"hidden", "pooled"},
    "bare": {"hidden"},
    "tags": {"hidden", "head"},
    "span": {"hidden", "head"},
    "relu": {"hidden", "head"},
    "gelu": {"hidden", "head"},
}


def proven(saved, directory):
    write_huggingface(saved, directory)
    found = prove(saved, directory, proof_rows(saved))
    check_differences(found["differences"], 1e-4)
    theirs = found["proofs"]["transformers"]
    assert theirs["ran"]
    return theirs


@pytest.mark.parametrize("kind", KINDS)
def test_every_class(kind, tmp_path):
    theirs = proven(model_of(kind), tmp_path)
    assert theirs["differences"].keys() == OUTPUTS.get(kind, {"hidden", "pooled", "head"})


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_every_tokenizer(tokenizer, tmp_path):
    proven(model_of("mlm", tokenizer), tmp_path)


def test_their_labels_and_pipelines(tmp_path):
    import transformers

    saved = model_of("score")
    write_huggingface(saved, tmp_path)
    pipe = transformers.pipeline("text-classification", model=str(tmp_path))
    row = saved.tokenizer.encode("the river froze").ids.tolist()
    special = saved.tokenizer.special_ids
    ours = logits_of(saved, batch_of(saved, [[special.cls, *row, special.sep]]))["head"]
    assert pipe("the river froze")[0]["score"] == pytest.approx(float(ours[0, 0]), abs=1e-5)
    assert pipe.model.config.problem_type == "regression"


def test_an_export_names_both_proofs(tmp_path):
    (tmp_path / "source").mkdir()
    write_huggingface(model_of("class"), tmp_path / "source")
    parity = export(tmp_path / "source", "huggingface", tmp_path / "out")
    assert parity["proofs"]["transformers"]["missing_keys"] == 0
    assert {"transformers", "torch"} <= parity["versions"].keys()
    assert json.loads((tmp_path / "out" / "parity.json").read_text()) == parity


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("classifier.bias"), "missing_keys"),
        (lambda tensors: tensors.update(extra=tensors["classifier.bias"]), "unexpected_keys"),
    ],
)
def test_their_missing_and_unexpected_keys_fail(change, said, tmp_path):
    saved = model_of("class")
    write_huggingface(saved, tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ProofFailedError, match=said):
        load_theirs(saved, tmp_path)


def test_their_other_ids_fail(tmp_path):
    saved = model_of("mlm", "unigram")
    write_huggingface(saved, tmp_path)
    path = tmp_path / "tokenizer.json"
    whole = json.loads(path.read_text())
    whole["normalizer"]["normalizers"].append({"type": "Lowercase"})
    path.write_text(json.dumps(whole))
    with pytest.raises(ProofFailedError, match="transformers' tokenizer gives wrong token ids"):
        prove(saved, tmp_path, proof_rows(saved))  # our reading takes tokenizer.model


def test_their_other_outputs_are_above_the_tolerance(tmp_path):
    saved = model_of("mlm")
    write_huggingface(saved, tmp_path)
    theirs = load_theirs(saved, tmp_path)
    theirs.model.bert.encoder.layer[1].output.dense.bias.data[3] += 0.01
    (gaps,) = compare(saved, [(proof_rows(saved)[:4], 40)], theirs.outputs)
    with pytest.raises(ProofFailedError, match="mlm"):
        check_differences(gaps, 1e-4)

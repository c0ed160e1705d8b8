"""Modern encoders through files: imported, exported, loaded by Transformers, asked here."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
pytest.importorskip("transformers")

from modern_models import save_modern  # noqa: E402

import bert_jax  # noqa: E402
from bert_jax.exchange.export import export  # noqa: E402
from bert_jax.exchange.huggingface import load_theirs  # noqa: E402
from bert_jax.exchange.importing import import_model  # noqa: E402
from bert_jax.model.heads import layer_outputs  # noqa: E402
from bert_jax.saved.model import read_model  # noqa: E402

TASKS = ("ForMaskedLM", "Model", "ForSequenceClassification", "ForTokenClassification")
CASES = [
    *(("modernbert", task, {}) for task in (*TASKS, "ForQuestionAnswering")),
    ("modernbert", "ForSequenceClassification", {"classifier_pooling": "mean"}),
    ("biases", "ForSequenceClassification", {}),
    ("untied", "ForMaskedLM", {}),
    *(("eurobert", task, {}) for task in TASKS),
    ("eurobert", "ForSequenceClassification", {"classifier_pooling": "mean"}),
    ("eurobert", "ForSequenceClassification", {"classifier_pooling": "bos"}),
    *(("nomic", task, {}) for task in TASKS),
]


@pytest.mark.parametrize(("variant", "task", "fields"), CASES)
def test_what_comes_in_goes_out(tmp_path, variant, task, fields):
    """The same outputs, and the same file of weights to the last byte."""
    theirs = save_modern(tmp_path / "theirs", variant, task, num_hidden_layers=4, **fields)
    report = import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=2e-5)
    outputs = {"ForMaskedLM": {"mlm"}, "Model": set()}.get(task, {"head"})
    assert set(report["compared"]["differences"]) - {"pooled"} == {"hidden", *outputs}
    assert report["class"] == type(theirs).__name__
    assert report["dropped"] == []
    before, after = (tmp_path / name / "model.safetensors" for name in ("theirs", "ours"))
    assert before.read_bytes() == after.read_bytes()
    saved = read_model(tmp_path / "ours")
    model = load_theirs(saved, tmp_path / "ours")  # refuses missing and unexpected tensors
    assert model.name == type(theirs).__name__
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert all(config[name] == value for name, value in fields.items())


def test_an_export_of_an_import_is_proven_and_asked(tmp_path):
    save_modern(tmp_path / "theirs", "modernbert")
    parity = export(tmp_path / "theirs", "huggingface", tmp_path / "out")
    assert parity["class"] == "ModernBertForMaskedLM"
    assert parity["proofs"]["transformers"]["unexpected_keys"] == 0
    assert max(parity["differences"].values()) < 2e-5
    assert "A ModernBERT that was read" in (tmp_path / "out/README.md").read_text()
    model = bert_jax.load(tmp_path / "out")
    assert len(model.fill_mask("the cat [MASK] .")[0]["masks"][0]) > 0
    assert model.embed(["the cat", "a mat"]).shape == (2, 32)


def test_classifiers_are_asked_as_transformers_does(tmp_path):
    import torch
    import transformers

    for pooling in ("cls", "mean"):
        directory = tmp_path / pooling
        theirs = save_modern(
            directory, "modernbert", "ForSequenceClassification", classifier_pooling=pooling
        )
        texts = ["the cat sat", "a mat on the mat , paris ."]
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            expected = theirs(**inputs).logits.softmax(-1).numpy()
        answers = bert_jax.load(directory).classify(texts)
        found = [list(answer["probabilities"].values()) for answer in answers]
        np.testing.assert_allclose(np.sort(found), np.sort(expected), atol=1e-5)


@pytest.mark.parametrize("variant", ["modernbert", "eurobert"])
def test_attention_weights_are_those_of_transformers(tmp_path, variant):
    """Windows and shared keys included."""
    import torch

    theirs = save_modern(tmp_path, variant, num_hidden_layers=3)
    saved = read_model(tmp_path)
    ids = np.random.default_rng(0).integers(5, theirs.config.vocab_size, (1, 40))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids), output_attentions=True).attentions
    inputs = (jnp.asarray(array, jnp.int32) for array in (ids, 0 * ids, 0 * ids + 1))
    found = layer_outputs(saved.config, saved.params, *inputs, with_weights=True).weights
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-5)


def test_programs_of_stablehlo_compute_the_same(tmp_path):
    save_modern(tmp_path / "theirs", "modernbert", num_hidden_layers=4)
    parity = export(tmp_path / "theirs", "stablehlo", tmp_path / "out")
    assert max(parity["differences"].values()) < 1e-4


@pytest.mark.parametrize("variant", ["modernbert", "eurobert", "nomic"])
def test_graphs_of_onnx_compute_the_same_as_transformers(tmp_path, variant):
    import torch

    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    theirs = save_modern(tmp_path / "theirs", variant, num_hidden_layers=4)
    parity = export(tmp_path / "theirs", "onnx", tmp_path / "out")
    assert max(parity["differences"].values()) < 1e-4
    session = runtime.InferenceSession(
        tmp_path / "out/model.onnx", providers=["CPUExecutionProvider"]
    )
    ids = np.random.default_rng(0).integers(5, theirs.config.vocab_size, (2, 60))
    feeds = {each.name: np.zeros_like(ids) for each in session.get_inputs()}
    feeds |= {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    (found,) = session.run(["logits"], feeds)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5 * abs(expected).max())

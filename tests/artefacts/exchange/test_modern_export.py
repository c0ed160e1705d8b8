"""Modern encoders through files: imported, exported, loaded by Transformers, asked here."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
pytest.importorskip("transformers")

from modern_files import write_modern  # noqa: E402
from modern_models import modern_model, save_modern  # noqa: E402

import bert_jax  # noqa: E402
from bert_jax.artefacts.exchange.export import export  # noqa: E402
from bert_jax.artefacts.exchange.huggingface import load_theirs  # noqa: E402
from bert_jax.artefacts.exchange.importing import import_model  # noqa: E402
from bert_jax.artefacts.exchange.proof import ProofFailedError  # noqa: E402
from bert_jax.artefacts.saved import reading  # noqa: E402
from bert_jax.artefacts.saved.reading import read_model  # noqa: E402
from bert_jax.config.mapping import build  # noqa: E402
from bert_jax.data.corpus.build import build_corpus  # noqa: E402
from bert_jax.model.heads import layer_outputs  # noqa: E402
from bert_jax.tokenization.load import load_tokenizer  # noqa: E402
from bert_jax.training.pretrain.config import PretrainConfig  # noqa: E402
from bert_jax.training.pretrain.train import train  # noqa: E402

TASKS = ("ForMaskedLM", "Model", "ForSequenceClassification", "ForTokenClassification")
CASES = [
    *(("modernbert", task, {}) for task in (*TASKS, "ForQuestionAnswering")),
    ("modernbert", "ForSequenceClassification", {"classifier_pooling": "mean"}),
    ("biases", "ForSequenceClassification", {}),
    ("untied", "ForMaskedLM", {}),
    *(("eurobert", task, {}) for task in TASKS),
    ("eurobert", "ForSequenceClassification", {"classifier_pooling": "mean"}),
    ("eurobert", "ForSequenceClassification", {"classifier_pooling": "bos"}),
    ("eurobert", "ForMaskedLM", {"tie_word_embeddings": True}),  # the head has no tensor
    *(("modernbert", "ForMultipleChoice", {"classifier_pooling": p}) for p in ("cls", "mean")),
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


def test_a_head_of_a_class_that_is_not_known_is_dropped_with_a_note(tmp_path):
    """Though it begins as the masked-LM head does."""
    save_modern(tmp_path / "theirs", "modernbert", "ForSequenceClassification")
    path = tmp_path / "theirs/config.json"
    config = json.loads(path.read_text()) | {"architectures": ["ModernBertForThings"]}
    path.write_text(json.dumps(config))
    report = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert report["class"] == "ModernBertModel"
    assert {"head.dense.weight", "classifier.weight"} <= {*report["dropped"]}
    assert "not imported: classifier.bias" in report["notes"][0]


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


def test_layers_in_any_order_are_those_of_the_source(tmp_path):
    """The cycle of G L L G G is longer than what comes again."""
    types = [f"{'sliding' if letter == 'L' else 'full'}_attention" for letter in "GLLGG"]
    fields = {"num_hidden_layers": 5, "layer_types": types}
    save_modern(tmp_path / "theirs", "modernbert", local_attention=4, **fields)
    parity = export(tmp_path / "theirs", "huggingface", tmp_path / "out")
    assert parity["proofs"]["source_class"]["class"] == "ModernBertForMaskedLM"
    assert max(parity["proofs"]["source_class"]["differences"].values()) < 2e-5
    assert json.loads((tmp_path / "out/config.json").read_text())["layer_types"] == types


@pytest.mark.parametrize("format", ["huggingface", "orbax"])
def test_a_source_that_is_read_wrong_is_not_exported(tmp_path, monkeypatch, format):
    """What is read wrong and written wrong in the same way is equal to itself."""
    save_modern(tmp_path / "theirs", "modernbert", num_hidden_layers=3)
    right = reading.form_of

    def misread(found, *arguments, **named):
        types = ["full_attention"] * 3
        return right({**found, "layer_types": types}, *arguments, **named)

    monkeypatch.setattr(reading, "form_of", misread)
    with pytest.raises(ProofFailedError, match="has other outputs in Transformers"):
        export(tmp_path / "theirs", format, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


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


@pytest.mark.parametrize("kind", ["modernbert", "eurobert"])
def test_words_are_added_trained_and_exported(tmp_path, kind):
    """EuroBERT's decoder is a table of its own."""
    import torch
    import transformers

    directory, text = write_modern(tmp_path / "theirs", kind), tmp_path / "text.txt"
    tokenizer = load_tokenizer(directory)
    special = tokenizer.special_ids
    ids = {"pad": special.pad, "mask": special.mask, "bos": special.cls, "eos": special.sep}
    fields = {f"{name}_token_id": id for name, id in ids.items()}
    modern_model(
        kind, vocab_size=tokenizer.vocab_size, num_hidden_layers=2, **fields
    ).save_pretrained(directory)
    (tmp_path / "words.txt").write_text("stent\nangioplasty\nx-ray\n")
    report = import_model(directory, tmp_path / "in", add_tokens=tmp_path / "words.txt")
    assert report["added_tokens"] == 3
    text.write_text("\n\n".join(f"An angioplasty, a stent ({n}). No x-ray." for n in range(99)))
    build_corpus([f"{text}"], load_tokenizer(tmp_path / "in"), tmp_path / "corpus", num_workers=1)
    config = build(PretrainConfig, {
        "init": f"{tmp_path / 'in'}",
        "data": {"corpus": f"{tmp_path / 'corpus'}", "pairing": "none"},
        "training": {"num_steps": 2, "phases": [{"length": 32, "batch_size": 8}]},
        "optimizer": {"warmup_steps": 1, "learning_rate": 1e-2},
    })  # fmt: skip
    train(config, tmp_path / "run", echo=lambda _: None)
    parity = export(tmp_path / "run", "huggingface", tmp_path / "out")
    assert parity["proofs"]["transformers"]["missing_keys"] == 0

    ours, sentence = read_model(tmp_path / "out"), "A stent; angioplasty? consistent x-ray (stent)"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    found = ours.tokenizer.encode(sentence).ids
    assert theirs(sentence, add_special_tokens=False)["input_ids"] == found.tolist()
    assert sum(found >= tokenizer.vocab_size) == 4
    before = transformers.AutoModelForMaskedLM.from_pretrained(directory)
    rows = [each.get_output_embeddings().weight for each in (model, before)]
    new = tokenizer.vocab_size
    assert rows[0].shape[0] == new + 3
    assert not torch.equal(rows[0][:new], rows[1])  # trained
    fill = transformers.pipeline("fill-mask", model=model, tokenizer=theirs)
    answer = fill(f"A {theirs.mask_token} today")[0]
    (own,) = bert_jax.load(tmp_path / "out").fill_mask(["A [MASK] today"])[0]["masks"]
    assert (answer["token"], round(answer["score"], 4)) == pytest.approx(
        (own[0]["id"], own[0]["probability"]), abs=2e-4
    )

"""Vectors in other formats: sentence-transformers, ONNX and StableHLO; what their cards say."""

import contextlib
import dataclasses
import io
import json
import re
import runpy

import numpy as np
import pytest
from export_models import model_of
from small_saved import ROWS, small_saved
from vector_models import vector_model

import bert_jax
from bert_jax.artefacts.exchange import sentence_transformers, stablehlo, theirs
from bert_jax.artefacts.exchange.export import export, refusals
from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.exchange.onnx import runtime
from bert_jax.artefacts.exchange.proof import logits_of, proof_rows
from bert_jax.artefacts.saved.model import Origin
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import UserError
from bert_jax.model.embedding import EmbeddingConfig

PREFIXES = {"query_prefix": "query: ", "document_prefix": 'a "text": '}


@pytest.fixture(autouse=True)
def _without_transformers(monkeypatch):
    monkeypatch.setattr(theirs, "find_spec", lambda name: None)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    write_huggingface(vector_model("mean", **PREFIXES, dimensions=(8,)), directory)
    return directory


def run_card(directory, monkeypatch):
    """What the first snippet of a model card prints."""
    card = (directory / "README.md").read_text("utf-8")
    (code, *_) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(directory.parent)
    script = directory / "snippet.py"
    script.write_text(code.replace("DIR", directory.name))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(f"{script}")
    return printed.getvalue()


def test_an_encoder_without_vectors_has_the_mean(tmp_path):
    (tmp_path / "source").mkdir()
    write_huggingface(model_of("pretraining"), tmp_path / "source")
    parity = export(tmp_path / "source", "sentence-transformers", tmp_path / "out")
    assert parity["class"] == "BertModel"
    assert parity["left_out"] == ["mlm", "nsp"]
    assert parity["differences"].keys() == {"embedding", "hidden", "pooled"}
    assert not parity["proofs"]["sentence-transformers"]["ran"]
    back = read_model(tmp_path / "out")
    assert back.embedding == EmbeddingConfig("mean", normalize=False)
    texts = ["the river froze", "the ferry"]
    first, second = (bert_jax.load(tmp_path / name).embed(texts) for name in ("source", "out"))
    np.testing.assert_allclose(first, second, atol=1e-6)


def test_the_card_says_what_the_vectors_are(source, tmp_path):
    parity = export(source, "sentence-transformers", tmp_path / "out")
    assert "modules.json" in parity["sha256"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'library_name: "sentence-transformers"' in card
    assert 'pipeline_tag: "sentence-similarity"' in card
    assert (
        "vectors of 16 numbers: the mean of the tokens' states in the last layer, divided" in card
    )
    assert "Each query is prefixed with `query: `." in card
    assert "`truncate_dim=N` to sentence-transformers, or `dimensions=N` to bert_jax" in card


def test_the_proof_sees_other_vectors(source, tmp_path, monkeypatch):
    written = sentence_transformers.write

    def other(saved, out):
        written(saved, out)
        path = out / "1_Pooling" / "config.json"
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({**fields, "pooling_mode": "cls"}))

    monkeypatch.setattr(sentence_transformers, "write", other)
    with pytest.raises(RuntimeError, match=r"vectors are EmbeddingConfig\(pooling='cls'"):
        export(source, "sentence-transformers", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_learned_pooling_is_refused_where_no_module_computes_it():
    found = refusals(vector_model("weighted"))
    assert found.keys() == {"huggingface", "sentence-transformers", "cross-encoder", "peft"}
    assert "pooling weighted" in found["huggingface"]


def test_the_card_of_a_cross_encoder(tmp_path, monkeypatch):
    saved = model_of("classes")
    outputs = dataclasses.replace(saved.outputs, objective="single_label", labels=("no", "yes"))
    origin = Origin("finetune", 3, {"task": {"kind": "table"}})
    saved = dataclasses.replace(saved, outputs=outputs, origin=origin)
    monkeypatch.setattr("bert_jax.artefacts.exchange.export.read_model", lambda *_, **__: saved)
    export("run", "cross-encoder", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'library_name: "sentence-transformers"' in card
    assert 'pipeline_tag: "text-ranking"' in card
    assert 'model = CrossEncoder("DIR")' in card
    assert "The scores are the probabilities of the labels." in card
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["sentence_transformers"] == {"activation_fn": "torch.nn.Sigmoid"}
    assert config["id2label"] == {"0": "yes"}
    before, after = saved.params["head"], read_model(tmp_path / "out").params["head"]
    for part in ("kernel", "bias"):
        np.testing.assert_array_equal(
            after[part][..., 0], before[part][..., 1] - before[part][..., 0]
        )


def test_a_planned_model_of_two_classes_can_be_a_cross_encoder():
    """Before the first step a run has axes in place of parameters, and no labels."""
    saved = model_of("classes")
    outputs = dataclasses.replace(saved.outputs, objective="single_label", labels=())
    params = {**saved.params, "head": {"kernel": ("embed", None), "bias": (None,)}}
    origin = Origin("finetune")
    planned = dataclasses.replace(saved, outputs=outputs, params=params, origin=origin)
    assert set(refusals(planned)) == {"peft"}


@pytest.mark.parametrize(
    ("pooling", "maps"),
    [("mean", ()), ("cls", ("gelu", "silu")), ("last", ()), ("weighted", ()),
     ("max", ("tanh", "", "relu")), ("mean_sqrt_len", ())],
)  # fmt: skip
def test_programs_have_the_pooling_inside(pooling, maps, tmp_path):
    pytest.importorskip("onnxruntime", reason="the ONNX graph is run where onnxruntime is")
    saved = vector_model(pooling, normalize=pooling != "cls", maps=maps)
    for module in (runtime, stablehlo) if pooling in ("weighted", "max") else (runtime,):
        out = tmp_path / module.__name__
        out.mkdir()
        module.write(saved, out)
        found = module.prove(saved, out, ROWS)["differences"]
        assert found.keys() == {"hidden", "embedding"}
        assert max(found.values()) < 2e-5
    pooling = "mean" if pooling == "last" else "last"
    other = vector_model(pooling, normalize=saved.embedding.normalize, maps=maps)
    out = tmp_path / runtime.__name__
    assert runtime.prove(other, out, ROWS)["differences"]["embedding"] > 1e-3


def test_eight_bits_say_what_they_cost(source, tmp_path):
    pytest.importorskip("onnxruntime", reason="the ONNX graph is run where onnxruntime is")
    parity = export(source, "onnx", tmp_path / "out", quantize="int8")
    found = parity["quantized"]
    assert found["bytes"]["after"] < found["bytes"]["before"]
    assert found["bytes"]["after"] == (tmp_path / "out" / "model.onnx").stat().st_size
    assert 1e-4 < found["differences"]["embedding"] < 0.2
    assert 0.9 < found["cosine"]["embedding"] < 1
    assert 0.5 < found["equal_predictions"]["embedding"] <= 1
    assert {path.name for path in (tmp_path / "out").glob("*.onnx")} == {"model.onnx"}
    row = next(line for line in (tmp_path / "out" / "README.md").read_text().splitlines()
               if line.startswith("| embedding |") and "%" in line)  # fmt: skip
    assert f"{found['cosine']['embedding']:.5f}" in row
    with pytest.raises(UserError, match="'int8' and the format is stablehlo; quantize must be"):
        export(source, "stablehlo", tmp_path / "other", quantize="int8")


@pytest.mark.parametrize("kind", ["class", "classes", "score", "tags", "span", "pretraining"])
def test_the_share_of_equal_predictions_counts_each_kind(kind):
    saved, name = model_of(kind), "mlm" if kind == "pretraining" else "head"
    rows = proof_rows(saved)[:5]

    def same(batch):
        return logits_of(saved, batch)

    def turned(batch):
        found = dict(logits_of(saved, batch))
        found[name] = -found[name]
        return found

    equal = runtime.cost(saved, rows, same)
    assert set(equal["equal_predictions"].values()) <= {1.0}
    assert set(equal["differences"].values()) == {0.0}
    other = runtime.cost(saved, rows, turned)["equal_predictions"]
    assert (name in other) == (kind != "score")
    assert kind == "score" or other[name] < 0.5


PLACES = np.array([[3, 0], [0, 3], [1, 1]])  # scores of start and end


@pytest.mark.parametrize(
    ("kind", "ours", "theirs", "share"),
    [
        ("class", [[3, 1, 2], [1, 3, 2]], [[3, 1, 0], [1, 2, 3]], 1 / 2),
        ("classes", [[3, 1, -2], [1, 3, -2]], [[3, -1, -2], [1, 3, -2]], 5 / 6),
        ("span", [PLACES, PLACES], [PLACES, PLACES[[1, 0, 2]] + [[0, 0], [0, 9], [0, 0]]], 3 / 4),
    ],
)
def test_equal_predictions_are_counted_one_by_one(monkeypatch, kind, ours, theirs, share):
    monkeypatch.setattr(runtime.proof, "logits_of", lambda *_: {"head": np.float32(ours)})
    found = runtime.cost(
        model_of(kind), [[2, 5, 3], [2, 6, 3]], lambda _: {"head": np.float32(theirs)}
    )
    assert found["equal_predictions"] == {"head": pytest.approx(share)}


@pytest.mark.parametrize(("kind", "objective"), [("score", "choice"), ("tags", "arcs")])
def test_no_share_is_counted_where_a_row_alone_predicts_nothing(monkeypatch, kind, objective):
    """A choice has one logit a row, whose argmax is always 0."""
    saved = model_of(kind)
    saved = dataclasses.replace(
        saved, outputs=dataclasses.replace(saved.outputs, objective=objective)
    )
    logits = np.ones((2, 1) if objective == "choice" else (2, 3, 4), np.float32)
    monkeypatch.setattr(runtime.proof, "logits_of", lambda *_: {"head": logits})
    found = runtime.cost(saved, [[2, 5, 3], [2, 6, 3]], lambda _: {"head": -logits})
    assert (found["equal_predictions"], found["differences"]) == ({}, {"head": 2.0})
    assert runtime.table(found) == [("head", "2", "", "")]


def test_the_cost_of_eight_bits_is_that_of_the_worst_vector():
    saved = vector_model("mean")
    rows = proof_rows(saved)[:5]

    def turned(batch):
        found = {name: np.array(array) for name, array in logits_of(saved, batch).items()}
        found["hidden"][1, 2] *= -1  # a token of one row
        found["embedding"][1] *= -1
        return found

    found = runtime.cost(saved, rows, turned)
    assert found["cosine"] == {"hidden": pytest.approx(-1), "embedding": pytest.approx(-1)}
    assert found["differences"]["embedding"] > 0.1
    assert found["equal_predictions"]["embedding"] < 1  # its nearest is another one now


@pytest.mark.parametrize("format", ["onnx", "stablehlo"])
def test_the_cards_own_snippet_runs(format, source, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime", reason="the ONNX graph is run where onnxruntime is")
    export(source, format, tmp_path / "out")
    printed = run_card(tmp_path / "out", monkeypatch)
    name = "sentence_embedding" if format == "onnx" else "embedding"
    assert f"{name} (2, 16)" in printed
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'a \\"text\\": Another text.' in card


def test_a_snippet_of_a_model_without_types(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime", reason="the ONNX graph is run where onnxruntime is")
    saved = small_saved("mlm", num_types=0, norm_order="pre", positions="rope", gated=True,
                        pooler=False, first_norm=False)  # fmt: skip
    runtime.write(saved, tmp_path)
    (tmp_path / "README.md").write_text(runtime.loading(saved))
    assert "logits (2, " in run_card(tmp_path, monkeypatch)

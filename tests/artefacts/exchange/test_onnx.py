"""The ONNX graph computes what the model does, in onnxruntime."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from small_saved import FAMILIES, ROWS, small_saved
from vector_models import vector_model

from bert_jax.artefacts.exchange.exported_files import state_dict_of
from bert_jax.artefacts.exchange.onnx import runtime as onnx_export
from bert_jax.artefacts.exchange.onnx.runtime import prove, write
from bert_jax.artefacts.exchange.proof import ProofFailedError, batch_of, logits_of
from bert_jax.errors import UserError


@pytest.fixture
def runtime():
    reason = "the ONNX graph is run where onnx and onnxruntime are: pip install 'bert_jax[onnx]'"
    pytest.importorskip("onnx", reason=reason)
    return pytest.importorskip("onnxruntime", reason=reason)


@pytest.mark.parametrize("name", ["onnx", "onnxruntime"])
def test_a_missing_package_is_named_before_anything_is_written(monkeypatch, tmp_path, name):
    for other in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, other, sys)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"needs onnx and onnxruntime: pip install"):
        write(small_saved(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "changes", "outputs"),
    [
        ("pretraining", {}, {"hidden", "pooled", "mlm", "nsp"}),
        ("mlm", {"num_layers": 1, "activation": "gelu_tanh"}, {"hidden", "mlm"}),
        ("mlm", {"num_layers": 1, "embedding_dim": 8}, {"hidden", "mlm"}),
        ("rtd", {"num_layers": 1, "activation": "relu"}, {"hidden", "rtd"}),
        ("classification", {"num_layers": 1, "activation": "relu"}, {"hidden", "pooled", "head"}),
        ("classification", {"pooler_activation": "gelu"}, {"hidden", "pooled", "head"}),
        ("tagging", {"num_layers": 1}, {"hidden", "pooled", "head"}),
        ("span", {"num_layers": 1, "num_types": 1, "norm_eps": 0.01}, {"hidden", "pooled", "head"}),
    ],
)
def test_every_kind_of_model(runtime, tmp_path, kind, changes, outputs):
    saved = small_saved(kind, **changes)
    if "pooled" not in outputs:
        del saved.params["encoder"]["pooler"]
    write(saved, tmp_path)
    proof = prove(saved, tmp_path, ROWS)
    assert saved.name.encode() not in (tmp_path / "model.onnx").read_bytes()  # may be a path
    assert proof["differences"].keys() == outputs
    assert max(proof["differences"].values()) < 2e-5
    assert proof["shapes"] == [[4, 10], [2, 15], [1, 10]]
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    # A tokenizer of a model with a single type, such as DistilBERT's, gives no types.
    has_types = "token_type_ids" in [each.name for each in session.get_inputs()]
    assert has_types == (saved.config.num_types > 1)


def test_sparse_vectors(runtime, tmp_path):
    saved = vector_model("splade")
    write(saved, tmp_path)
    proof = prove(saved, tmp_path, ROWS)
    assert proof["differences"].keys() == {"hidden", "mlm", "embedding"}
    assert max(proof["differences"].values()) < 2e-5


@pytest.mark.parametrize(
    ("family", "kind", "changes"),
    [
        ("modernbert", "mlm", {}),
        ("modernbert", "mlm", {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
        ("modernbert", "classification", {"pooling": "mean"}),
        ("modernbert", "span", {}),
        ("eurobert", "mlm", {}),
        ("eurobert", "classification", {"pooling": "late"}),
        ("eurobert", "span", {}),
        ("neobert", "mlm", {}),
        ("nomic_bert", "mlm", {}),
        ("nomic_bert", "tagging", {}),
    ],
)
def test_every_modern_family(runtime, tmp_path, family, kind, changes):
    saved = small_saved(kind, **{**FAMILIES[family], **changes})
    if family == "nomic_bert":
        del saved.params["encoder"]["pooler"]
    write(saved, tmp_path)
    if kind == "span" and family == "eurobert":  # whose classes have no such head
        assert json.loads((tmp_path / "model.json").read_text())["outputs"]["objective"] == "span"
    else:
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family
    proof = prove(saved, tmp_path, ROWS)
    assert proof["differences"].keys() == {"hidden", "mlm" if kind == "mlm" else "head"}
    assert max(proof["differences"].values()) < 2e-5
    # Cards count the parameters by name, of heads without a class too.
    assert ({"classifier.weight", "head/kernel"} & state_dict_of(saved).keys() != set()) == (
        kind != "mlm"
    )
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    has_types = "token_type_ids" in [each.name for each in session.get_inputs()]
    assert has_types == (family == "nomic_bert")


def test_the_proof_sees_another_modern_model(runtime, tmp_path):
    saved = small_saved("mlm", **FAMILIES["modernbert"])
    changes = {
        "local_window": 2, "attention_pattern": "GGL", "rope_theta": 10_000.0,
        "activation": "gelu_tanh",
    }  # fmt: skip
    for name, value in changes.items():
        out = tmp_path / name
        out.mkdir()
        config = dataclasses.replace(saved.config, **{name: value})
        onnx_export.write(dataclasses.replace(saved, config=config), out)
        assert prove(saved, out, ROWS)["differences"]["mlm"] > 1e-4


def test_names_are_those_of_hugging_face(runtime, tmp_path):
    names = {
        "pretraining": ["prediction_logits", "seq_relationship_logits"],
        "mlm": ["logits"],
        "classification": ["logits"],
        "span": ["start_logits", "end_logits"],
    }
    for kind, expected in names.items():
        out = tmp_path / kind
        out.mkdir()
        write(small_saved(kind), out)
        session = runtime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
        assert [i.name for i in session.get_inputs()] == [
            "input_ids", "token_type_ids", "attention_mask",
        ]  # fmt: skip
        assert [i.shape for i in session.get_inputs()] == [["batch", "length"]] * 3
        found = [o.name for o in session.get_outputs()]
        assert found[0] == "last_hidden_state"
        assert [name for name in found[1:] if name != "pooler_output"] == expected


def test_weights_beyond_the_limit_lie_beside_the_graph(runtime, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "_MAX_INLINE_BYTES", 1000)
    saved = small_saved("classification", num_layers=1)
    write(saved, tmp_path)
    inside, beside = (
        (tmp_path / name).stat().st_size for name in ("model.onnx", "model.onnx.data")
    )
    assert inside < beside
    assert max(prove(saved, tmp_path, ROWS)["differences"].values()) < 1e-5


def test_the_proof_sees_another_model_and_a_damaged_graph(runtime, tmp_path):
    saved = small_saved("classification", num_layers=1)
    write(saved, tmp_path)
    saved.params["head"]["bias"][0] += 0.01
    assert prove(saved, tmp_path, ROWS)["differences"]["head"] > 5e-3
    (tmp_path / "model.onnx").write_bytes(b"\x08\x0a\xff")
    with pytest.raises(ProofFailedError, match=r"cannot load model\.onnx"):
        prove(saved, tmp_path, ROWS)


def test_padding_is_not_seen(runtime, tmp_path):
    saved = small_saved("classification", num_layers=1)
    write(saved, tmp_path)
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    batch = batch_of(saved, ROWS[:1], 20)
    tokens = np.where(batch.segment_ids > 0, batch.tokens, 9)  # anything may stand there
    feeds = dict(zip(onnx_export.INPUTS, (tokens, batch.type_ids, batch.segment_ids), strict=True))
    (found,) = session.run(["logits"], {k: v.astype(np.int64) for k, v in feeds.items()})
    np.testing.assert_allclose(
        found, logits_of(saved, batch_of(saved, ROWS[:1]))["head"], atol=1e-5
    )

"""Models that no class of Transformers computes: what refuses them, and the exits they have."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
import safetensors.numpy
from conformance_files import check_of
from flax.traverse_util import unflatten_dict
from small_saved import FAMILIES, OUTPUTS, small_saved

from bert_jax.artefacts.exchange.export import FORMATS, export
from bert_jax.artefacts.exchange.exported_files import has_class
from bert_jax.artefacts.formats.huggingface_files import TaskOutputs
from bert_jax.artefacts.saved.model import Origin
from bert_jax.config.mapping import build
from bert_jax.distributed.checkpoint.storage import read_tree
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params
from bert_jax.model.task_heads import TaskHeadConfig, TaskModel

POOLED = {**FAMILIES["modernbert"], "pooler": True, "num_layers": 1}
BARE = {"pooler": False, "num_layers": 1}
PARSING = TaskOutputs(TaskHeadConfig("parsing", 3), "arcs", ("det", "nsubj", "root"))
CHOICE = TaskOutputs(TaskHeadConfig("classification", 1, pooling="mean"), "choice")


def with_head(outputs, **changes):
    """A model with a head of any kind, of random numbers."""
    saved = small_saved("classification", **changes)
    shapes = jax.eval_shape(
        lambda: init_params(saved.config, jax.random.key(0), TaskModel, outputs.head)
    )
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda a: random.normal(0, 0.3, a.shape).astype(np.float32), shapes)
    return dataclasses.replace(saved, params=params, outputs=outputs)


MODELS = {
    "pairs, RMS norms": lambda: small_saved("pretraining", **POOLED, norm="rms"),
    "sinusoids": lambda: small_saved(
        "mlm", positions="sinusoidal", scale_embeddings=True, num_layers=1
    ),
    "pooler of a modern classifier": lambda: small_saved("classification", **POOLED),
    "tags of a modern encoder with a pooler": lambda: small_saved("tagging", **POOLED),
    "choice": lambda: with_head(CHOICE, **FAMILIES["eurobert"]),
    "parsing": lambda: with_head(PARSING, num_layers=1),
    "parsing without pooler": lambda: with_head(PARSING, **FAMILIES["eurobert"]),
    "BERT without pooler": lambda: small_saved("classification", **BARE, pooling="mean"),
    "relu": lambda: small_saved(
        "classification", num_layers=1, pooler_activation="relu", norm_eps=1e-6
    ),
    "narrow tables": lambda: small_saved("pretraining", num_layers=1, embedding_dim=8),
    "span of EuroBERT": lambda: small_saved("span", **FAMILIES["eurobert"]),
}


@pytest.fixture(params=MODELS)
def saved(request, monkeypatch):
    made = MODELS[request.param]()
    made = dataclasses.replace(made, origin=Origin("finetune", 3, {"task": {"kind": "table"}}))
    monkeypatch.setattr("bert_jax.artefacts.exchange.export.read_model", lambda *_, **__: made)
    return made


def test_a_message_names_formats_that_hold_the_model(saved, tmp_path):
    """Each format that the refusal recommends is written, proven and described in our words."""
    pytest.importorskip("onnxruntime")
    with pytest.raises(UserError) as caught:
        export("run", "huggingface", tmp_path / "huggingface")
    assert not list(tmp_path.iterdir())
    words = re.findall(r"[\w-]+", f"{caught.value}".partition("Export with --to ")[2])
    named = [word for word in words if word in FORMATS]
    assert named == ["onnx", "stablehlo", "orbax"]
    for name in named:
        parity = export("run", name, tmp_path / name)
        assert parity["class"] == "none"
        assert max(parity["differences"].values(), default=0) < 1e-4
        assert "No class of Transformers computes it" in (tmp_path / name / "README.md").read_text()
        said = json.loads((tmp_path / name / "model.json").read_text())
        assert build(ModelConfig, said["model"], "m") == saved.config
        assert not (tmp_path / name / "config.json").exists()
        if saved.head is not None and saved.head.kind == "parsing" and name != "orbax":
            assert check_of(tmp_path / name).main() == 0
        if saved.outputs is not None:
            assert build(TaskOutputs, said["outputs"], "o") == saved.outputs
    weights = unflatten_dict(
        safetensors.numpy.load_file(tmp_path / "stablehlo/model.safetensors"), sep="/"
    )
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), weights, saved.params)
    jax.tree.map(np.testing.assert_array_equal, read_tree(tmp_path / "orbax/params"), saved.params)


def test_what_transformers_computes_has_a_class():
    for family, fields in FAMILIES.items():
        for kind in ("mlm", *OUTPUTS):
            heads = {"neobert": [], "eurobert": ["classification", "tagging"]}
            heads["nomic_bert"] = heads["eurobert"]
            known = kind == "mlm" or kind in heads.get(family, OUTPUTS)
            pooling = {"pooling": "mean"} if kind == "classification" else {}
            assert has_class(small_saved(kind, **fields, **pooling)) == known, (family, kind)


def test_a_generator_that_no_class_computes_is_not_recommended():
    for fields, hinted in (({}, True), (FAMILIES["modernbert"], False)):
        config = {"objective": {"name": "replaced_tokens"}}
        saved = small_saved("rtd", **fields)
        saved = dataclasses.replace(saved, origin=Origin("pretrain", 1, config))
        with pytest.raises(UserError, match="no head for masked words") as caught:
            saved.require("fill-mask", "head for masked words")
        assert ("--to huggingface" in f"{caught.value}") == hinted


def test_what_is_recommended_instead_of_an_adapter_holds_the_model(monkeypatch, tmp_path):
    scored = "huggingface or cross-encoder or "
    for fields, others in ((POOLED, ""), (FAMILIES["modernbert"], scored)):
        made = small_saved("classification", **fields, pooling="mean")
        monkeypatch.setattr(
            "bert_jax.artefacts.exchange.export.read_model", lambda *_, made=made, **__: made
        )
        with pytest.raises(UserError, match=r"computes this|no adapter") as caught:
            export("run", "peft", tmp_path / "out")
        assert f"{caught.value}".endswith(f"Export with --to {others}onnx or stablehlo or orbax")

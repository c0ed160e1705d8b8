"""check.py with Transformers and sentence-transformers, and consumers broken on purpose."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from conformance_files import change, check_of, keep_case, written, wrong
from export_models import model_of
from small_saved import FAMILIES, small_saved
from translators import FORMS, translator_of
from vector_models import vector_model

from bert_jax.artefacts.formats.huggingface_files import TaskOutputs

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:.*longer than")]
pytest.importorskip("sentence_transformers")
WITHOUT_BERT_JAX = (
    "import runpy, sys; sys.modules['bert_jax'] = None; "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)


def feeding(check, monkeypatch, name, value):
    """Make a consumer that feeds `value` in place of an input."""
    load = check.by_huggingface

    def broken(directory, cases):
        tokenizer, run = load(directory, cases)

        def ignoring(batch):
            return run({**batch, name: np.full_like(batch[name], value).tolist()})

        return tokenizer, ignoring

    monkeypatch.setattr(check, "by_huggingface", broken)


def test_a_bert_in_transformers(tmp_path, capsys, monkeypatch):
    written(model_of("class"), "huggingface", tmp_path)
    program = [sys.executable, "-c", WITHOUT_BERT_JAX, f"{tmp_path}/conformance/check.py"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "token ids: equal for all texts" in done.stdout
    assert done.stdout.count("largest difference") == 16
    check = check_of(tmp_path)
    masks = json.loads((tmp_path / "conformance" / "cases.json").read_text())
    lengths = [sum(mask) for mask in masks["batches"]["mixed"]["attention_mask"]]
    longest = {f"mixed/{n}/logits" for n, length in enumerate(lengths) if length == max(lengths)}
    with monkeypatch.context() as patch:  # the padding mask dropped
        feeding(check, patch, "attention_mask", 1)
        assert check.main() == 1
        padded = {*wrong(capsys.readouterr().out)}
    assert len(padded) == 16 - len(longest) - 1  # without the long text
    assert not padded & {*longest, "long/0/logits"}
    with monkeypatch.context() as patch:  # token types ignored
        feeding(check, patch, "token_type_ids", 0)
        assert check.main() == 1
        assert wrong(capsys.readouterr().out) == ["mixed/13/logits"]
    keep_case(tmp_path)  # a tokenizer without lower-casing
    assert check.main() == 1
    assert wrong(capsys.readouterr().out) == ["token ids"]


def test_a_modernbert_in_transformers(tmp_path, capsys):
    check = written(small_saved("mlm", **FAMILIES["modernbert"]), "huggingface", tmp_path)
    assert check.main() == 0
    assert not wrong(capsys.readouterr().out)
    config = (tmp_path / "config.json").read_text()
    change(tmp_path / "config.json", local_attention=1000)  # the window ignored
    assert check.main() == 1
    assert "long/0/logits" in (found := wrong(capsys.readouterr().out))
    assert "mixed/0/logits" not in found  # which is shorter than a window
    rotary = json.loads(config)["rope_parameters"]
    rotary["full_attention"]["rope_theta"] = 10_000.0  # another base of rotations
    (tmp_path / "config.json").write_text(config)
    change(tmp_path / "config.json", rope_parameters=rotary, global_rope_theta=10_000.0)
    assert check.main() == 1
    assert "long/0/logits" in wrong(capsys.readouterr().out)


@pytest.mark.parametrize(
    "kind", ["pretraining", "bare", "tags", "span", "choice", "marian", "pair"]
)
def test_other_classes_of_transformers(kind, tmp_path, capsys):
    if kind == "choice":
        saved = model_of("score")
        saved = dataclasses.replace(saved, outputs=TaskOutputs(saved.head, "choice"))
    else:
        saved = translator_of(kind, "unigram") if kind in FORMS else model_of(kind)
    assert written(saved, "huggingface", tmp_path).main() == 0
    assert not wrong(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("pooling", "maps"), [("max", ("tanh", "")), ("mean_sqrt_len", ()), ("last", ("gelu",))]
)
def test_modules_of_vectors(pooling, maps, tmp_path, capsys):
    check = written(vector_model(pooling, maps=maps), "sentence-transformers", tmp_path)
    assert check.main() == 0
    assert "mixed/0/sentence_embedding" in capsys.readouterr().out
    if maps:  # another activation
        change(tmp_path / "2_Dense" / "config.json", activation_function="torch.nn.ReLU")
    else:  # another pooling; vectors of length 1 hide the number of tokens
        modes = {"pooling_mode_mean_sqrt_len_tokens": False, "pooling_mode_max_tokens": True}
        change(tmp_path / "1_Pooling" / "config.json", **modes)
    assert check.main() == 1
    assert len(wrong(capsys.readouterr().out)) > 10


def test_a_text_is_cut_where_the_expected_one_was(tmp_path, capsys):
    """Though the model reads more tokens."""
    saved = vector_model("mean")
    positions = {"num_positions": 700}
    encoder = small_saved("mlm", vocab_size=saved.config.vocab_size, **positions).params["encoder"]
    encoder = {name: part for name, part in encoder.items() if name != "pooler"}
    config = dataclasses.replace(saved.config, **positions)
    saved = dataclasses.replace(saved, config=config, params={"encoder": encoder}, max_length=700)
    check = written(saved, "sentence-transformers", tmp_path)
    assert json.loads((tmp_path / "conformance" / "cases.json").read_text())["max_length"] == 512
    assert check.main() == 0
    assert "long/0/sentence_embedding" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["score", "one of classes", "class"])
def test_scores_in_a_cross_encoder(kind, tmp_path, capsys):
    check = written(model_of(kind), "cross-encoder", tmp_path)
    assert check.main() == 0
    assert not wrong(said := capsys.readouterr().out)
    assert said.count("largest difference") == 14
    assert "long/0/scores" in said
    cases = json.loads((tmp_path / "conformance" / "cases.json").read_text())
    assert {len(text) for batch in cases["batches"].values() for text in batch["texts"]} == {2}
    assert sum(cases["batches"]["long"]["attention_mask"][0]) == cases["max_length"]
    before = (tmp_path / "config.json").read_text()
    other = "Identity" if kind == "one of classes" else "Sigmoid"  # another function of the logits
    change(tmp_path / "config.json", sentence_transformers={"activation_fn": f"torch.nn.{other}"})
    assert check.main() == 1
    assert len(wrong(capsys.readouterr().out)) > 10
    (tmp_path / "config.json").write_text(before)
    keep_case(tmp_path)  # a tokenizer without lower-casing
    assert check.main() == 1
    assert "token ids" in wrong(capsys.readouterr().out)


def test_vectors_in_sentence_transformers(tmp_path, capsys):
    saved = vector_model("mean", query_prefix="query: ", normalize=True)
    check = written(saved, "sentence-transformers", tmp_path)
    assert check.main() == 0
    assert not wrong(said := capsys.readouterr().out)
    assert "query/0/sentence_embedding" in said
    prompts = tmp_path / "config_sentence_transformers.json"
    known = prompts.read_text()
    change(prompts, prompts={"query": "other: ", "document": ""})  # another prompt
    assert check.main() == 1
    assert {key.split("/")[0] for key in wrong(capsys.readouterr().out)} == {"query"}
    prompts.write_text(known)
    pooling = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    change(tmp_path / "1_Pooling" / "config.json", **pooling)  # another pooling
    assert check.main() == 1
    assert len(wrong(capsys.readouterr().out)) > 10

"""The directory `conformance` of exports: its files, and check.py with jax and onnxruntime.

Transformers, sentence-transformers and the broken consumers are in test_conformance_parity.py.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
from conformance_files import keep_case, written, wrong
from export_models import model_of
from small_saved import FAMILIES, small_saved

from bert_jax.artefacts.exchange import huggingface, theirs
from bert_jax.artefacts.exchange.conformance import cases
from bert_jax.artefacts.exchange.export import export
from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.exchange.proof import ProofFailedError

WITHOUT_BERT_JAX = (
    "import runpy, sys; sys.modules['bert_jax'] = None; "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)
STATES = ("hidden", "pooled", "head")


def about(out):
    return json.loads((out / "conformance" / "cases.json").read_text())


def test_an_export_has_cases_of_all_kinds(tmp_path, monkeypatch):
    monkeypatch.setattr(theirs, "find_spec", lambda name: None)
    (tmp_path / "source").mkdir()
    write_huggingface(model_of("pretraining"), tmp_path / "source")
    parity = export(tmp_path / "source", "huggingface", tmp_path / "out")
    files = {f"conformance/{name}" for name in ("cases.json", "check.py", "expected.npz")}
    assert files <= parity["sha256"].keys()
    assert sum((tmp_path / "out" / name).stat().st_size for name in files) < 200_000
    found = about(tmp_path / "out")
    mixed, long = found["batches"]["mixed"], found["batches"]["long"]
    assert mixed["texts"][0] == [""]
    assert mixed["texts"][-1] == list(cases.PAIR)
    assert 1 in mixed["token_type_ids"][-1]
    assert len({sum(mask) for mask in mixed["attention_mask"]}) > 3
    assert sum(long["attention_mask"][0]) == found["max_length"] == 40
    assert sum(long["attention_mask"][1]) < 10
    assert found["outputs"].keys() == {"prediction_logits", "seq_relationship_logits"}


def test_the_long_text_fills_three_windows():
    tokenizer = model_of("mlm").tokenizer
    ((long, _),) = [texts for _, texts in [cases._texts(model_of("mlm"), 1200)["long"]]]
    assert len(tokenizer.encode(long[0]).ids) > 1200


def test_orbax_has_texts_and_outputs_only(tmp_path):
    saved = model_of("class")
    huggingface.write(saved, tmp_path)
    cases.write(saved, tmp_path, "orbax", {"differences": {}})
    found = {path.name for path in (tmp_path / "conformance").iterdir()}
    assert found == {"cases.json", "expected.npz"}
    assert about(tmp_path)["outputs"].keys() == {*STATES}


def test_a_class_that_transformers_lacks_has_no_check(tmp_path):
    saved = small_saved("mlm", **FAMILIES["neobert"])
    huggingface.write(saved, tmp_path)
    cases.write(saved, tmp_path, "huggingface", {"differences": {}})
    assert not (tmp_path / "conformance" / "check.py").exists()


def test_another_tokenizer_json_fails_the_export(tmp_path):
    saved = model_of("class")
    huggingface.write(saved, tmp_path)
    keep_case(tmp_path)
    with pytest.raises(ProofFailedError, match="gives other ids for 'Yes'"):
        cases.write(saved, tmp_path, "huggingface", {"differences": {}})


def test_tolerances_grow_with_outputs_and_with_the_cost_of_eight_bits(tmp_path):
    saved = model_of("class")
    saved.params["head"]["bias"][0] = 500.0
    huggingface.write(saved, tmp_path)
    proven = {"differences": {"head": 0.0}, "quantized": {"differences": {"head": 0.01}}}
    cases.write(saved, tmp_path, "onnx", proven)
    assert about(tmp_path)["outputs"]["logits"]["tolerance"] == pytest.approx(0.05, rel=0.1)
    (tmp_path / "conformance").rename(tmp_path / "before")
    proven["quantized"]["differences"]["head"] = 3.0
    cases.write(saved, tmp_path, "onnx", proven)
    assert about(tmp_path)["outputs"]["logits"]["tolerance"] == 6.0


def test_jax_passes_without_bert_jax(tmp_path):
    written(model_of("class"), "stablehlo", tmp_path, *STATES)
    program = [sys.executable, "-c", WITHOUT_BERT_JAX, f"{tmp_path}/conformance/check.py"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "token ids: equal for all texts" in done.stdout
    assert "WRONG" not in done.stdout
    assert done.stdout.count("largest difference") == 3 * 16  # outputs and texts


def test_answers_of_a_server(tmp_path, capsys):
    check = written(model_of("class"), "stablehlo", tmp_path, *STATES)
    _, run = check.by_stablehlo(tmp_path, about(tmp_path))
    answers = {
        name: {output: list(map(np.asarray, rows)) for output, rows in run(batch).items()}
        for name, batch in about(tmp_path)["batches"].items()
    }
    assert check.compare(answers)
    capsys.readouterr()
    for rows in answers.values():  # without padding, or a token short
        rows["hidden"] = [row[:39] for row in rows["hidden"]]
    assert not check.compare(answers)
    assert "long/0/hidden" in (found := wrong(capsys.readouterr().out))
    assert not any(key.endswith("head") or key == "mixed/0/hidden" for key in found)
    answers["mixed"]["head"][3] = np.full(3, np.nan)
    answers["mixed"]["head"][4] = answers["mixed"]["head"][4][:2]
    assert not check.compare(answers)
    assert {*wrong(capsys.readouterr().out)} == {*found, "mixed/3/head", "mixed/4/head"}


def test_another_model_is_seen(tmp_path, capsys):
    check = written(model_of("class"), "stablehlo", tmp_path / "model", *STATES)
    path = tmp_path / "model" / "model.safetensors"
    weights = safetensors.numpy.load_file(path)
    weights["classifier.bias"][1] += 0.01
    safetensors.numpy.save_file(weights, path)
    assert check.main() == 1
    assert {key.split("/")[-1] for key in wrong(capsys.readouterr().out)} == {"head"}


@pytest.mark.parametrize("kind", ["modernbert", "span"])
def test_onnxruntime_passes_and_fails_without_masks_and_lower_case(kind, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    modern = kind == "modernbert"
    saved = small_saved("mlm", **FAMILIES[kind]) if modern else model_of(kind)
    check = written(saved, "onnx", tmp_path, "hidden", "mlm" if modern else "head")
    assert check.main() == 0
    assert not wrong(capsys.readouterr().out)
    _, run = check.by_onnx(tmp_path, about(tmp_path))
    batches = about(tmp_path)["batches"]
    for batch in batches.values():
        batch["attention_mask"] = np.ones_like(batch["attention_mask"])
    assert not check.compare({name: run(batch) for name, batch in batches.items()})
    keep_case(tmp_path)
    capsys.readouterr()
    assert check.main() == 1
    assert wrong(capsys.readouterr().out) == ["token ids"]

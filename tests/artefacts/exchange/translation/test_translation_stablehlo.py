"""The search as a program gives the translations of the model, from its files alone."""

import ast
import dataclasses
import json
import runpy
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import safetensors.numpy
from marian_files import random_marian
from translators import translator, translator_of

from bert_jax.artefacts.exchange.proof import ProofFailedError, proof_rows
from bert_jax.artefacts.exchange.stablehlo import prove, write
from bert_jax.infer.loaded import LoadedModel
from bert_jax.model.seq2seq.recurrent import RecurrentNetwork
from bert_jax.model.seq2seq.recurrent_layers import RecurrentConfig

ROWS = 4
EXAMPLE = Path(__file__).parents[4] / "examples/run_stablehlo.py"


@pytest.fixture(scope="module")
def saved():
    return translator_of("marian", "unigram")


@pytest.fixture(scope="module")
def written(saved, tmp_path_factory):
    out = tmp_path_factory.mktemp("stablehlo")
    write(saved, out, rows=ROWS)
    return out


def test_programs_for_three_platforms(saved, written):
    proof = prove(saved, written, proof_rows(saved)[:6])
    assert proof["translations"] == {name: {"equal": 6, "ties": 0} for name in ("greedy", "beam")}
    assert proof["platforms"] == ["cpu", "cuda", "tpu"]
    programs = json.loads((written / "programs.json").read_text())
    assert programs["beam.stablehlo"] == {
        "rows": ROWS, "source_length": 40, "target_length": 40, "num_beams": 5, "length_alpha": 1.0
    }  # fmt: skip
    assert all((written / name).stat().st_size < 200_000 for name in programs)  # no weights in them


def test_the_documented_lines_translate(saved, written):
    """The code of the module's docstring, against `LoadedModel.translate`."""
    search = jax.export.deserialize(bytearray((written / "beam.stablehlo").read_bytes()))
    weights = safetensors.numpy.load_file(written / "model.safetensors")
    special = saved.tokenizer.special_ids
    text = "The river froze early."
    row = [special.cls, *saved.tokenizer.encode(text).ids.tolist(), special.sep]
    ids, mask = np.zeros((2, ROWS, 40), np.int32)
    ids[:, : len(row)], mask[:, : len(row)] = row, 1
    limits = np.full(ROWS, min(3 * len(row), 40), np.int32)
    tokens, lengths, scores = jax.jit(search.call)(weights, ids, mask, limits)
    (answer,) = LoadedModel(saved).translate(text)
    found = np.asarray(tokens)[0, : int(lengths[0])]
    assert saved.tokenizer.decode(found[found != special.sep]).strip() == answer["translation"]
    assert float(scores[0]) == pytest.approx(answer["score"], abs=1e-5)


@pytest.mark.parametrize("kind", ["unigram", "marian"])
def test_the_example_translates_from_the_files_alone(
    kind, written, saved, tmp_path, capsys, monkeypatch
):
    if kind == "marian":
        saved, written = random_marian(tmp_path / "tokenizer"), tmp_path / "out"
        written.mkdir()
        write(saved, written, rows=2)
    assert "bert_jax" not in EXAMPLE.read_text()
    texts = ["the dog sees Köln today.", "two men", "a cat hears the old river again."]
    texts += [">>deu<< two men"] * (kind == "marian")
    answers = [each["translation"] for each in LoadedModel(saved).translate(texts)]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(written), *texts])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert not ended.value.code
    printed = capsys.readouterr().out.splitlines()
    known = [at for at, text in enumerate(answers) if "<unk>" not in text]  # it has other names
    assert len(known) > 1
    assert [printed[at] for at in known] == [answers[at] for at in known]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [(">> a", ["<s>", ">> a"]), (">>x<< a", [">>x<<", "<s>", " a"]), (">a", ["<s>", ">a"])],
)
def test_the_example_takes_only_a_whole_code_from_a_text(text, tokens):
    """The function, without its file's imports; the stand-in's one piece is the text."""
    nodes = ast.walk(ast.parse(EXAMPLE.read_text()))
    (function,) = (each for each in nodes if getattr(each, "name", "") == "encode")
    source = SimpleNamespace(encode=lambda text, out_type: ["<s>", text])
    ids = defaultdict(lambda: 0, {token: token for token in ["</s>", *tokens]})
    names = {"source": source, "ids": ids}
    exec(compile(ast.Module([function], []), str(EXAMPLE), "exec"), names)  # noqa: S102
    assert names["encode"](text) == [*tokens, "</s>"]


def test_other_weights_are_found(saved, tmp_path):
    write(saved, tmp_path, rows=ROWS)
    weights = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    weights["decoder/layers/cross/key/kernel"][:] = 0
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ProofFailedError, match="greedy search translates"):
        prove(saved, tmp_path, proof_rows(saved)[:ROWS])


def test_recurrent_networks_have_programs_too(saved, tmp_path):
    model = dataclasses.replace(saved.config, positions="learned", num_layers=1)
    network = RecurrentNetwork(model, RecurrentConfig("gru", "additive"))
    recurrent = translator(network, saved.tokenizer)
    write(recurrent, tmp_path, rows=ROWS)
    found = prove(recurrent, tmp_path, proof_rows(recurrent)[:ROWS])["translations"]
    assert found == {name: {"equal": ROWS, "ties": 0} for name in ("greedy", "beam")}
    described = json.loads((tmp_path / "network.json").read_text())
    assert described["network"] == "RecurrentNetwork"
    assert described["settings"]["cell"] == "gru"

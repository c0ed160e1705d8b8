"""A larger model in a directory, made of a smaller one, and a run that starts from it."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from marian_files import random_marian
from small_run import TOKENIZER, small_config, write_corpus
from small_saved import FAMILIES, small_saved

from bert_jax.artefacts.exchange.exported_files import class_of, write_huggingface
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.main import main
from bert_jax.errors import UserError
from bert_jax.model.growth import grow_params
from bert_jax.training.pretrain import growing
from bert_jax.training.pretrain.growing import grow_model
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.telemetry import read_metrics

ONE_PHASE = [{"length": 32, "batch_size": 8}]
CONFIG = small_config(
    training__num_steps=1, training__phases=ONE_PHASE, training__accumulation=1,
    training__eval_every_steps=0, data__pairing="none", optimizer__warmup_steps=1,
)  # fmt: skip
DEEPER = ["--config.model.num_layers=3", "--config.model.mlp_dim=40"]


def write(directory: Path, saved: SavedModel) -> Path:
    directory.mkdir()
    write_huggingface(dataclasses.replace(saved, tokenizer=TOKENIZER), directory)
    return directory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("growing") / "corpus"
    write_corpus(path)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    saved = small_saved("mlm", vocab_size=TOKENIZER.vocab_size, num_positions=64)
    return write(tmp_path_factory.mktemp("growing") / "small", saved)


def test_a_run_starts_from_a_grown_model(source, corpus, tmp_path, capsys):
    out = tmp_path / "grown"
    assert main(["grow", f"{source}", "--out", f"{out}", *DEEPER, "--corpus", f"{corpus}"]) == 0
    said, report = capsys.readouterr().out, json.loads((out / "growth.json").read_text())
    losses = (report["loss"], report["source_loss"])
    assert "model.num_layers  2 -> 3" in said
    assert "before step 1: {:.3f} nats (source: {:.3f});".format(*losses) in said
    assert "the optimizer's moments start fresh" in said
    small, grown = read_model(source), read_model(out)
    assert (grown.config.num_layers, grown.config.mlp_dim) == (3, 40)
    expected = grow_params(small.params, small.config, grown.config)
    jax.tree.map(np.testing.assert_array_equal, grown.params, expected)

    lines: list[str] = []
    config = dataclasses.replace(CONFIG, init=f"{out}", data=dataclasses.replace(
        CONFIG.data, corpus=f"{corpus}"
    ))  # fmt: skip
    train(config, tmp_path / "run", read=lambda _: grown, echo=lines.append)
    assert any(each.startswith("starts from") for each in lines)
    (first, *_) = read_metrics(tmp_path / "run/metrics.jsonl")
    assert first["step"] == 0
    # Other rows of the same text; an untrained head's loss is nearly the same on all.
    assert first["eval/mlm_loss"] == pytest.approx(losses[0], rel=0.05)
    assert any(each.startswith("held-out text at step 0: ") for each in lines)


def test_a_head_without_parameters_goes_with_its_model(corpus, tmp_path):
    """The decoder of a tied EuroBERT without bias is the table: pretrained, exported, grown."""
    fields = {**FAMILIES["eurobert"], "tied": True, "num_heads": 2}
    small = dataclasses.replace(CONFIG.model, **fields)
    data = dataclasses.replace(CONFIG.data, corpus=f"{corpus}")
    config = dataclasses.replace(CONFIG, model=small, data=data)
    train(config, tmp_path / "run", echo=lambda _: None)
    saved = read_model(tmp_path / "run")
    (tmp_path / "out").mkdir()
    write_huggingface(saved, tmp_path / "out")
    report = grow_model(
        tmp_path / "out", tmp_path / "grown", preserve=True, corpus=f"{corpus}",
        wanted=lambda config: dataclasses.replace(
            config, hidden_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=128
        ),
    )  # fmt: skip
    assert report["loss"] == pytest.approx(report["source_loss"], abs=1e-3)
    for name in ("run", "out", "grown"):
        read = read_model(tmp_path / name)
        assert "fill-mask" in read.verbs
        assert class_of(read) == "EuroBertForMaskedLM"
    assert class_of(read_model(tmp_path / "out", encoder_only=True)) == "EuroBertModel"


def test_equal_sizes_are_the_same_file_and_loss(source, corpus, tmp_path):
    report = grow_model(source, tmp_path / "out", lambda config: config, corpus=f"{corpus}")
    assert report["loss"] == report["source_loss"]
    before, after = (each / "model.safetensors" for each in (source, tmp_path / "out"))
    assert before.read_bytes() == after.read_bytes()


def test_what_cannot_be_grown_leaves_nothing(source, corpus, tmp_path, capsys):
    def refused(directory: Path, *more: str) -> str:
        assert main(["grow", f"{directory}", "--out", f"{tmp_path / 'out'}", *more]) == 2
        return capsys.readouterr().err

    assert "model.gated is True, but the source has False" in refused(
        source, "--config.model.gated=true", *DEEPER
    )
    assert "unknown field training; Known here: model" in refused(
        source, "--config.training.num_steps=3"
    )
    assert "--rows is 0" in refused(source, "--rows=0")
    assert "--rows works only with --corpus" in refused(source, "--rows=8", *DEEPER)
    assert "--seed works only with --preserve" in refused(source, "--seed=8", *DEEPER)
    assert "model.norm_order is 'pre', but the source has 'post'" in refused(
        source, "--config=pretrain/modern_tiny"
    )
    tuned = write(tmp_path / "tuned", small_saved("classification", vocab_size=64))
    assert "has parts that cannot be grown (head); give a pretrained" in refused(tuned)
    headless = small_saved("mlm", vocab_size=64).without({"mlm"})
    bare = write(tmp_path / "bare", headless)
    assert "no masked-LM head whose loss" in refused(bare, "--corpus", f"{corpus}")
    other = tmp_path / "other"
    other.mkdir()
    write_huggingface(small_saved("mlm"), other)
    with pytest.raises(UserError, match=r"--corpus: the tokenizer of .* is not the tokenizer of"):
        grow_model(other, tmp_path / "out", lambda config: config, corpus=f"{corpus}")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bare", "other", "tuned"]


def test_parts_that_do_not_grow_are_named(tmp_path, monkeypatch):
    small = small_saved("mlm")
    pooled, weighted = (
        dataclasses.replace(small, params={**small.params, part: np.ones((16, 1), np.float32)})
        for part in ("pooling", "queries")
    )
    translator = random_marian(tmp_path / "tokenizer")
    for saved, parts in ((translator, "decoder"), (pooled, "pooling"), (weighted, "queries")):
        monkeypatch.setattr(growing, "read_model", lambda _, saved=saved: saved)
        with pytest.raises(UserError, match=rf"has parts that cannot be grown \({parts}.*\); give"):
            grow_model("source", tmp_path / "out", lambda config: config)
    assert not (tmp_path / "out").exists()


def test_a_model_in_hugging_faces_format_is_evaluated_on_a_corpus(source, corpus, tmp_path, capsys):
    report = grow_model(source, tmp_path / "out", lambda config: config, corpus=f"{corpus}")
    capsys.readouterr()
    assert main(["evaluate", f"{source}", "--corpus", f"{corpus}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval/mlm_loss"] == report["source_loss"]
    assert found["unigram_entropy"] == report["unigram_entropy"]
    for options, message in (
        ([], "records no corpus; give --corpus"),
        (["--corpus", f"{corpus}", "--step=3"], "--step is 3"),
        (["--corpus", f"{corpus}", "--length=65"], "--length is 65; .* takes rows of 8 to 64"),
    ):
        assert main(["evaluate", f"{source}", *options]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_rows_longer_than_the_default_number_of_positions_are_evaluated(corpus, tmp_path, capsys):
    long = small_saved("mlm", vocab_size=TOKENIZER.vocab_size, num_positions=1024)
    source = write(tmp_path / "long", long)
    assert main(["evaluate", f"{source}", "--corpus", f"{corpus}", "--length=600", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval/mlm_loss"] > 0

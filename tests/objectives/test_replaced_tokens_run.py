"""A run of replaced-token detection: stopped and continued, evaluated, drawn and replayed."""

import json
import os
import signal

import numpy as np
import pytest
from small_run import (
    fingerprint,
    small_config,
    write_corpus,
)

import bert_jax
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli import main as cli
from bert_jax.errors import UserError
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.telemetry import read_metrics

pytestmark = pytest.mark.usefixtures("reused_steps")

CONFIG = small_config(
    objective={"name": "replaced_tokens", "generator_size": 0.5},
    data__pairing="none",
    model__embedding_dim=24,
    training__num_steps=8,
    training__phases=[{"length": 32, "batch_size": 16}],
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    workdir = tmp_path_factory.mktemp("whole") / "work"
    said: list[str] = []
    assert train(CONFIG, workdir, corpus=corpus, echo=said.append).finished
    return workdir, said


def test_a_run_reports_both_models(whole):
    workdir, said = whole
    assert any("generator loss" in line and "rtd accuracy" in line for line in said)
    rows = [row for row in read_metrics(workdir / "metrics.jsonl") if "eval/rtd_loss" in row]
    last = rows[-1]
    assert 0.5 < last["eval/rtd_majority"] < 1
    assert last["eval/rtd_majority"] == pytest.approx(1 - last["eval/rtd_share_replaced"])
    assert last["eval/mlm_loss"] > 0
    assert (workdir / "loss.png").stat().st_size > 0


def test_stopped_and_continued_equals_uninterrupted(tmp_path, corpus, whole):
    def stop(line):
        if line.startswith("step 3/8"):
            os.kill(os.getpid(), signal.SIGTERM)

    workdir = tmp_path / "work"
    assert not train(CONFIG, workdir, corpus=corpus, echo=stop).finished
    assert train(CONFIG, workdir, corpus=corpus, echo=lambda line: None).finished
    assert fingerprint(workdir, CONFIG, corpus) == fingerprint(whole[0], CONFIG, corpus)


def test_verbs_take_the_run(whole, corpus, capsys):
    workdir, _ = whole
    where = str(corpus.train.path.parent)
    assert cli.main(["status", str(workdir)]) == 0
    assert "generator loss" in capsys.readouterr().out
    assert cli.main(["replay", str(workdir), "--step", "2", "--corpus", where]) == 0
    assert "to predict" in capsys.readouterr().out
    assert cli.main(["evaluate", str(workdir), "--corpus", where]) == 0
    assert "rtd_accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "made", "outputs"),
    [
        ("discriminator", "ElectraForPreTraining", {"hidden", "rtd"}),
        ("generator", "ElectraForMaskedLM", {"hidden", "mlm"}),
    ],
)
def test_both_halves_are_exported(whole, tmp_path, capsys, part, made, outputs):
    out = tmp_path / "out"
    arguments = ["--to", "huggingface", "--out", str(out), "--part", part]
    assert cli.main(["export", str(whole[0]), *arguments]) == 0
    assert made in capsys.readouterr().out
    source, back = read_model(whole[0], part=part), read_model(out)
    assert back.params.keys() == source.params.keys() == {"encoder", (outputs - {"hidden"}).pop()}
    assert back.config.hidden_dim == (32 if part == "discriminator" else 16)
    table = source.params["encoder"]["embeddings"]["token"]
    np.testing.assert_array_equal(back.params["encoder"]["embeddings"]["token"], table)
    assert outputs == set(json.loads((out / "parity.json").read_text())["differences"])
    if part == "generator":
        assert len(bert_jax.load(out).fill_mask("7 [MASK] 9")[0]["masks"][0]) == 5


def test_the_discriminator_is_what_the_run_is_for(whole):
    saved = read_model(whole[0])
    assert saved.params.keys() == {"encoder", "rtd"}
    assert not saved.has_pooler
    with pytest.raises(UserError, match=r"no masked-LM head; it supports embed.*--part generator"):
        bert_jax.load(whole[0]).fill_mask("[MASK]")
    with pytest.raises(UserError, match="has no part 'reader'; it holds discriminator and gener"):
        read_model(whole[0], part="reader")

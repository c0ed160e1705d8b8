"""A run over two corpora says of each what it has read and how well it is predicted."""

import json
from pathlib import Path

import pytest
from small_run import small_config, write_store

from bert_jax.cli.main import main
from bert_jax.files.remote import open_workdir
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.train import resolve_pretraining, train
from bert_jax.training.run.telemetry import read_metrics


def test_text_seen_and_held_out_loss_of_each_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, name in enumerate(("de", "en")):
        write_store(tmp_path / name / "train", 40 + 40 * seed, seed)
        write_store(tmp_path / name / "heldout", 12, 7 + seed)
    de, en = str(tmp_path / "de"), str(tmp_path / "en")
    phases = [
        {"length": 32, "batch_size": 16, "share": 0.5},
        {"length": 32, "batch_size": 16, "share": 0.5, "corpus": en},
    ]
    config = small_config(
        data__corpus=de, data__mixture=[{"corpus": de, "weight": 3.0}, {"corpus": en}],
        training__phases=phases, training__num_steps=4, training__log_every_steps=2,
        training__eval_every_steps=2, training__accumulation=1,
    )  # fmt: skip
    train(config, tmp_path / "run", echo=lambda text: None)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert [(each["role"], each["name"]) for each in record["lineage"]] == [
        ("data.corpus", "de"), ("data.mixture[0].corpus", "de"), ("data.mixture[1].corpus", "en"),
        ("training.phases[1].corpus", "en"),
    ]  # fmt: skip
    seen = [row for row in rows if "data/de/epochs" in row]
    assert [row["step"] for row in seen] == [2, 4]
    assert seen[0]["data/de/tokens"] > seen[0]["data/en/tokens"] > 0
    assert seen[1]["data/de/tokens"] == seen[0]["data/de/tokens"]
    assert seen[1]["data/en/epochs"] > 2 * seen[0]["data/en/epochs"]
    loss = config.metrics[0].name
    for row in rows:
        if f"eval/{loss}" in row:
            assert row[f"eval/{loss}/de"] != row[f"eval/{loss}/en"]
            assert abs(row[f"eval/{loss}/de"] - row[f"eval/{loss}"]) < 0.3  # of the same text
    assert main(["status", str(tmp_path / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "mixture de: " in said
    assert f"held-out {rows[-1][f'eval/{loss}/en']:.3f}" in said
    assert main(["status", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["corpora"]
    assert [each["label"] for each in found] == ["de", "en"]


def test_text_seen_by_a_phase_without_a_mixture_counts_in_a_mixture_after_it(tmp_path: Path):
    """The text of the first phase was forgotten at the first step of the second phase."""
    for seed, name in enumerate(("de", "en")):
        write_store(tmp_path / name / "train", 40, seed)
    de, en = str(tmp_path / "de"), str(tmp_path / "en")
    first = {"length": 32, "batch_size": 16, "share": 0.5}
    mixed = {**first, "mixture": [{"corpus": de}, {"corpus": en}]}
    config = small_config(
        data__corpus=de, training__phases=[first, mixed], training__num_steps=4,
        training__log_every_steps=1,
    )  # fmt: skip
    plan = resolve_pretraining(config, open_workdir(tmp_path / "run"), open_corpus(de))
    seen = [plan.voice.columns(0, step) for step in range(5)]
    assert [row["data/rows"] for row in seen] == [0, 16, 32, 48, 64]
    for row in seen[1:]:
        assert row["data/de/tokens"] + row.get("data/en/tokens", 0) == row["data/tokens"]
    epochs = [row.get("data/de/epochs", 0.0) for row in seen]
    assert epochs == sorted(set(epochs))

"""Directories that version 0.1.0 wrote still load and still mean the same.

`tests/golden/make_old_directories.py` made them; they are not made again.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_old_directories import MASKED, TEXTS, fingerprint, losses, pretraining
from make_stopped_finetuning import SWEEP
from make_stopped_finetuning import losses as finetuning_losses
from one_shard import StoreWriter

import bert_jax
from bert_jax.cli.main import main
from bert_jax.config.mapping import build
from bert_jax.data.store import open_store
from bert_jax.errors import UserError
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.train import finetune

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("old")
    for name in ("directories", "stopped_finetuning"):
        with tarfile.open(GOLDEN / f"{name}.tar.gz") as archive:
            archive.extractall(root, filter="data")
    for part in ("train", "heldout"):
        rewrite_store(root / "corpus" / part)
    return root


def rewrite_store(path: Path) -> None:
    """Give a store today's format, which the fingerprint outlives; version 1 is refused."""
    with pytest.raises(UserError, match="has version 1; this bert_jax reads 3"):
        open_store(path)
    header = json.loads((path / "corpus.json").read_text())
    with StoreWriter(path, load_tokenizer(path / "tokenizer")) as writer:
        writer.append(
            np.fromfile(path / "tokens.bin", "<u2"),
            np.diff(np.fromfile(path / "sentence_offsets.bin", "<i8")),
            np.diff(np.fromfile(path / "document_offsets.bin", "<i8")),
        )
        assert writer.store().fingerprint == header["fingerprint"]


@pytest.fixture(scope="module")
def expected(old: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((old / "expected.json").read_text())
    return content


@pytest.mark.parametrize("name", ["finetuned", "exported", "imported"])
def test_a_classifier_gives_the_probabilities_it_gave(old: Path, expected: Any, name: str) -> None:
    answers = bert_jax.load(old / name).classify(TEXTS)
    for answer, before in zip(answers, expected[name], strict=True):
        assert answer["label"] == before["label"]
        assert answer["probabilities"] == pytest.approx(before["probabilities"], abs=2e-6)


def test_a_mask_is_filled_as_it_was(old: Path, expected: Any, tmp_path: Path) -> None:
    out = tmp_path / "fills.jsonl"
    assert main(["fill-mask", str(old / "pretrained"), MASKED, "--out", str(out)]) == 0
    (mask,), (before,) = json.loads(out.read_text())["masks"], expected["pretrained"]["masks"]
    assert [each["token"] for each in mask] == [each["token"] for each in before]
    probabilities = [each["probability"] for each in before]
    assert [each["probability"] for each in mask] == pytest.approx(probabilities, abs=2e-6)


def test_checkpoints_are_found_intact(old: Path) -> None:
    assert main(["verify", str(old / "pretrained")]) == 0
    assert main(["verify", str(old / "finetuned")]) == 0


def test_a_stopped_run_goes_on_as_it_would_have(old: Path, expected: Any) -> None:
    assert main(pretraining(old / "corpus", old / "pretrained")) == 0
    after = losses(old / "pretrained", 7)
    assert after == pytest.approx(expected["losses"], rel=1e-5)


def test_a_stopped_sweep_goes_on_as_it_would_have(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state had no guard and no step of its own."""
    monkeypatch.chdir(old)
    expected = json.loads(Path("expected_finetuning.json").read_text())
    before, work = finetuning_losses(Path("stopped")), Path("stopped")
    assert list(before) == ["6"]
    said: list[str] = []
    assert finetune(build(FinetuneConfig, SWEEP), work, echo=said.append).finished
    assert said[0].endswith("continued at step 7 of 18")
    found = finetuning_losses(work)
    assert list(found) == ["6", "12", "18"]
    for step, values in found.items():
        assert values == pytest.approx(expected[step], rel=1e-4)
    assert len(set(found["18"])) == 2
    assert main(["verify", str(work)]) == 0


@pytest.mark.parametrize("name", ["tokenizer", "sentences"])
def test_a_text_becomes_the_token_ids_it_became(
    old: Path, expected: Any, tmp_path: Path, name: str
) -> None:
    assert fingerprint(old / name, tmp_path / "scratch") == expected[name]

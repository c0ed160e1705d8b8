"""Models that version 0.1.0 wrote still load and mean the same; its runs are refused by name.

`tests/golden/make_old_directories.py` made them; they are not made again.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from make_old_directories import MASKED, TEXTS, fingerprint, pretraining
from make_stopped_finetuning import SWEEP

import bert_jax
from bert_jax.cli.main import main
from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.train import finetune

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("old")
    for name in ("directories", "stopped_finetuning"):
        with tarfile.open(GOLDEN / f"{name}.tar.gz") as archive:
            archive.extractall(root, filter="data")
    return root


@pytest.fixture(scope="module")
def expected(old: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((old / "expected.json").read_text())
    return content


@pytest.mark.parametrize("name", ["exported", "imported"])
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


def test_a_stopped_run_is_refused(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(pretraining(old / "corpus", old / "pretrained")) == 2
    assert "unknown field data.objective; it is data.pairing now" in capsys.readouterr().err


def test_a_finetuned_run_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="fields of kind=glue are written FIELD"):
        bert_jax.load(old / "finetuned")
    monkeypatch.chdir(old)
    with pytest.raises(
        UserError, match=r"stopped/config\.json: unknown field task\.glue; fields of"
    ):
        finetune(build(FinetuneConfig, SWEEP), Path("stopped"))


@pytest.mark.parametrize("name", ["tokenizer", "sentences"])
def test_a_text_becomes_the_token_ids_it_became(
    old: Path, expected: Any, tmp_path: Path, name: str
) -> None:
    assert fingerprint(old / name, tmp_path / "scratch") == expected[name]

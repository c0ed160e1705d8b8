"""Directories of version 0.1.0: runs are refused with a reason; tokenizers and exports still load.

`tests/golden/make_old_directories.py` made them; they are not made again.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_old_directories import MASKED, TEXTS, fingerprint
from one_shard import StoreWriter

import bert_jax
from bert_jax.cli.main import main
from bert_jax.data.store import open_store
from bert_jax.errors import UserError
from bert_jax.tokenization.load import load_tokenizer

GOLDEN = Path(__file__).parent / "golden"
RECIPE = Path(__file__).parents[1] / "configs" / "pretrain" / "bert_tiny.py"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("old")
    with tarfile.open(GOLDEN / "directories.tar.gz") as archive:
        archive.extractall(root, filter="data")
    for part in ("train", "heldout"):
        rewrite_store(root / "corpus" / part)
    return root


def content(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {f"{path}": path.read_bytes() for path in files}


def rewrite_store(path: Path) -> None:
    """Give a store today's format, which the fingerprint outlives; version 1 is refused."""
    with pytest.raises(UserError, match="has version 1; this bert_jax reads version 3"):
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
    found: dict[str, Any] = json.loads((old / "expected.json").read_text())
    return found


@pytest.mark.parametrize("name", ["exported", "imported"])
def test_a_classifier_gives_the_probabilities_it_gave(old: Path, expected: Any, name: str) -> None:
    answers = bert_jax.load(old / name).classify(TEXTS)
    for answer, before in zip(answers, expected[name], strict=True):
        assert answer["label"] == before["label"]
        assert answer["probabilities"] == pytest.approx(before["probabilities"], abs=2e-6)


@pytest.mark.parametrize(
    "command",
    [
        lambda old: [
            "pretrain",
            f"--config={RECIPE}",
            f"--workdir={old / 'pretrained'}",
            f"--config.data.corpus={old / 'corpus'}",
        ],
        lambda old: ["fill-mask", f"{old / 'pretrained'}", MASKED],
        lambda old: ["classify", f"{old / 'finetuned'}", TEXTS[0]],
        lambda old: ["export", f"{old / 'finetuned'}", "--to=huggingface", f"--out={old / 'no'}"],
        lambda old: ["status", f"{old / 'finetuned'}"],
        lambda old: ["status", f"{old / 'pretrained'}"],
    ],
    ids=["pretrain", "fill-mask", "classify", "export", "status", "status of pretraining"],
)
def test_a_run_is_refused_and_stays_as_it_is(old: Path, capsys: Any, command: Any) -> None:
    runs = [old / "pretrained", old / "finetuned"]
    before = [content(run) for run in runs]
    assert main(command(old)) == 2
    said = capsys.readouterr().err
    assert "records a run in format 1 (version 0.1.0); this version reads format 2" in said
    assert [content(run) for run in runs] == before
    assert not (old / "no").exists()


@pytest.mark.parametrize("name", ["tokenizer", "sentences"])
def test_a_text_becomes_the_token_ids_it_became(
    old: Path, expected: Any, tmp_path: Path, name: str
) -> None:
    assert fingerprint(old / name, tmp_path / "scratch") == expected[name]

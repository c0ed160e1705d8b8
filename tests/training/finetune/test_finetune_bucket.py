"""Fine-tuning whose work directory is in a bucket is the fine-tuning that has it on disk."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from gcs_emulator import make_bucket, running_emulator
from small_finetuning import fingerprint, small_config, write_config, write_files, write_table

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.main import main
from bert_jax.training.finetune.train import finetune

URL = "gs://finetuning/runs/small"
pytestmark = pytest.mark.skipif(
    os.environ.get("BERT_JAX_CHAOS") != "1", reason="takes a minute; BERT_JAX_CHAOS=1 runs it"
)


@pytest.fixture(scope="module", autouse=True)
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    here = tmp_path_factory.mktemp("emulator")
    with running_emulator(here / "log"):
        make_bucket("finetuning")
        yield


def test_stopped_in_a_bucket_equals_uninterrupted_on_disk(tmp_path: Path, capsys):
    files = write_files(tmp_path / "files")
    config = small_config(files, sweep={"seeds": 2})
    assert finetune(config, tmp_path / "disk", echo=lambda _: None).finished

    def stop(line: str) -> None:
        if line.startswith("epoch 2"):
            os.kill(os.getpid(), signal.SIGTERM)

    assert not finetune(config, URL, echo=stop).finished
    bucket = fsspec.filesystem("gs", use_listings_cache=False)
    assert bucket.exists(f"{URL}/resume")
    assert main(["status", URL]) == 0
    said: list[str] = []
    assert finetune(config, URL, echo=said.append).finished
    assert "continued at step 13 of 18" in said[0]
    assert not bucket.exists(f"{URL}/resume")

    # A copy of the bucket is a work directory.
    bucket.get(f"{URL}/", f"{tmp_path / 'copy'}/", recursive=True, batch_size=1)
    assert fingerprint(tmp_path / "copy") == fingerprint(tmp_path / "disk")

    new = write_table(tmp_path / "new.csv", 9, 3, labels=False)
    for place, out in ((URL, "a"), (str(tmp_path / "disk"), "b")):
        assert main(["predict", place, "--data", new, "--out", str(tmp_path / out)]) == 0
    a, b = (tmp_path / out / "predictions.jsonl" for out in ("a", "b"))
    assert a.read_text() == b.read_text()
    assert read_model(URL).outputs == read_model(tmp_path / "disk").outputs

    # And it is something to start from.
    capsys.readouterr()
    again = write_config(tmp_path / "again.py", small_config({**files, "init": URL}))
    assert main(["finetune", f"--config={again}", f"--workdir={tmp_path / 'again'}"]) == 0

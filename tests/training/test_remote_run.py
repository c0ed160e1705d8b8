"""A run whose work directory is in a bucket is the run that has it on disk."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from compiling import same_bits
from gcs_emulator import make_bucket, running_emulator
from small_run import (
    fingerprint,
    small_config,
    write_corpus,
)

from bert_jax.cli.main import main
from bert_jax.config.mapping import to_dict
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.train import train

URL = "gs://pretraining/runs/small"
pytestmark = pytest.mark.skipif(
    os.environ.get("BERT_JAX_CHAOS") != "1",
    reason="takes a minute; BERT_JAX_CHAOS=1 runs it, and test_remote.py has its parts",
)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_emulator(tmp_path_factory.mktemp("emulator") / "log") as address:
        make_bucket("pretraining")
        yield address


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def config(corpus: Corpus) -> PretrainConfig:
    assert corpus.train.path is not None
    return small_config(data={"corpus": str(corpus.train.path.parent)})


@pytest.fixture(scope="module")
def on_disk(
    tmp_path_factory: pytest.TempPathFactory, corpus: Corpus, config: PretrainConfig
) -> dict[str, str]:
    workdir = tmp_path_factory.mktemp("disk") / "work"
    assert train(config, workdir, echo=lambda _: None).finished
    return fingerprint(workdir, config, corpus)


@contextlib.contextmanager
def pretraining(here: Path, config: PretrainConfig) -> Iterator[subprocess.Popen]:
    """`bert-jax pretrain` in a process of its own; its output is in here/log."""
    (here / "config.py").write_text(f"def get_config():\n    return {to_dict(config)!r}\n")
    environ = same_bits() | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = ["pretrain", f"--config={here / 'config.py'}", f"--workdir={URL}"]
    with (here / "log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "bert_jax.cli", *command],
            env=environ, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            yield child
        finally:
            child.kill()
            child.wait()


def kill_when(there: Callable[[], bool], child: subprocess.Popen, log: Path) -> None:
    while not there():
        assert child.poll() is None, log.read_text()
        time.sleep(0.01)
    child.kill()
    assert child.wait() == -signal.SIGKILL


def test_killed_in_a_bucket_equals_uninterrupted_on_disk(
    tmp_path, emulator, corpus, config, on_disk, capsys
):
    files = fsspec.filesystem("gs", use_listings_cache=False)
    with pretraining(tmp_path, config) as child:  # within the first save
        kill_when(lambda: files.exists(f"{URL}/checkpoints/5"), child, tmp_path / "log")
    with pretraining(tmp_path, config) as child:  # after the second, before the last
        committed = f"{URL}/checkpoints/10/commit_success.txt"
        kill_when(lambda: files.exists(committed), child, tmp_path / "log")
    with pretraining(tmp_path, config) as child:
        assert child.wait() == 0, (tmp_path / "log").read_text()
    assert "continues from step 1" in (tmp_path / "log").read_text()

    # A copy of the bucket is a work directory.
    files.get(f"{URL}/", f"{tmp_path / 'copy'}/", recursive=True, batch_size=1)
    assert fingerprint(tmp_path / "copy", config, corpus) == on_disk

    capsys.readouterr()
    assert main(["status", URL]) == 0
    said = capsys.readouterr().out
    assert "12" in said
    assert URL in said
    assert main(["verify", URL]) == 0
    assert "12" in capsys.readouterr().out

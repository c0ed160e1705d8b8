"""A whole run with Muon: on a mesh, stopped and continued."""

import os
import signal
from pathlib import Path

import pytest
from small_run import (
    fingerprint,
    small_config,
    write_corpus,
)

from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.train import train

pytestmark = pytest.mark.usefixtures("reused_steps")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def stop_after_step_3(line: str) -> None:
    if line.startswith("step 3/9"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_on_a_mesh_that_is_stopped_and_continued_equals_a_whole_one(tmp_path: Path, corpus):
    config = small_config(
        training__num_steps=9,
        training__phases=[{"length": 32, "batch_size": 16}],
        training__eval_every_steps=0,
        optimizer={"name": "muon", "schedule": "wsd", "learning_rate": 3e-3, "warmup_steps": 2},
        mesh={"data": 2, "fsdp": 2, "tensor": 2},
    )
    stopped = train(config, tmp_path / "parts", corpus=corpus, echo=stop_after_step_3)
    assert not stopped.finished
    assert 3 <= stopped.step < 9
    for workdir in (tmp_path / "parts", tmp_path / "whole"):
        assert train(config, workdir, corpus=corpus, echo=lambda _: None).finished
    # The interval of means that the stop cut in two is the one difference.
    parts, whole = (fingerprint(tmp_path / each, config, corpus) for each in ("parts", "whole"))
    parts.pop("metrics"), whole.pop("metrics")
    assert parts == whole
    assert any("nu" in path for path in whole)

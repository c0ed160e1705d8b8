"""A run that is stopped and continued is the run that was not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compiling import same_bits
from small_run import (
    fingerprint,
    small_config,
    write_corpus,
)

from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.pretrain.train import train
from bert_jax.training.run import session
from bert_jax.training.run.session import StopRequest
from bert_jax.training.run.telemetry import read_metrics

pytestmark = pytest.mark.usefixtures("reused_steps")

CONFIG = small_config()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_the_step_knows_where_phases_begin(corpus):
    config = CONFIG.with_vocabulary(corpus.train.vocab_size)
    assert step_config(config, corpus).phase_starts == CONFIG.training.phase_starts == (7,)
    three = [{"length": 32, "share": share} for share in (0.5, 0.25, 0.25)]
    changed = small_config(training__num_steps=100, training__phases=three)
    assert changed.training.phase_starts == (50, 75)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpus) -> dict[str, str]:
    workdir = tmp_path_factory.mktemp("whole") / "work"
    result = train(CONFIG, workdir, corpus=corpus, echo=lambda _: None)
    assert result.finished
    assert result.step == 12
    return fingerprint(workdir, CONFIG, corpus)


def stop_at(start_of_line: str, number: signal.Signals = signal.SIGTERM):
    """An echo that has this process signalled when the run says something."""
    said = []

    def echo(line: str) -> None:
        said.append(line)
        if line.startswith(start_of_line):
            os.kill(os.getpid(), number)

    return echo, said


def test_stopped_twice_and_continued_equals_uninterrupted(tmp_path, corpus, uninterrupted):
    workdir = tmp_path / "work"
    everything: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    # In the middle of an interval of means, then beyond the change of length at step 7.
    for line, number, at in (
        ("step 3/12", signal.SIGTERM, 4),
        ("held-out text at step 8", signal.SIGINT, 8),
    ):
        echo, said = stop_at(line, number)
        result = train(CONFIG, workdir, corpus=corpus, echo=echo)
        assert (result.finished, result.stopped_by) == (False, number.name)
        assert result.step == at
        assert said[-1].startswith(f"{number.name}: stopped after step {at} of 12, saved in ")
        assert saved_steps(workdir / "checkpoints")[-1] == at
        everything += said
    assert signal.getsignal(signal.SIGTERM) is before  # nothing is left installed
    result = train(CONFIG, workdir, corpus=corpus, echo=everything.append)
    assert (result.finished, result.stopped_by) == (True, "")
    assert fingerprint(workdir, CONFIG, corpus) == uninterrupted
    # 12 steps leave this model at the baseline, still falling: it is said at the end, and once.
    assert sum(line.startswith("Warning: the masked-LM loss") for line in everything) == 1
    steps = [row["step"] for row in read_metrics(workdir / "metrics.jsonl")]
    assert steps == [3, 4, 6, 7, 8, 9, 12]


_CHILD = """
import json, os, sys, time
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
sys.path.insert(0, sys.argv[1])
from small_run import small_config
from bert_jax.training.pretrain.train import train
def echo(line):
    print(line, flush=True)
    if "held-out text at step 8" in line:
        while not (Path(sys.argv[3]) / "checkpoints" / "5").exists():  # a save is asynchronous
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
train(small_config(data={"corpus": sys.argv[2]}), Path(sys.argv[3]), echo=echo)
"""


SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.slow
def test_killed_and_continued_equals_uninterrupted(tmp_path, corpus, uninterrupted):
    workdir, log = tmp_path / "work", tmp_path / "log"
    directory = corpus.train.path.parent
    with log.open("w") as output:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, SUPPORT, directory, workdir],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=same_bits(),
            check=False,
        )
    assert child.returncode == -signal.SIGKILL, log.read_text()
    assert 12 not in saved_steps(workdir / "checkpoints")
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "train/mlm_loss": 0.0}\n{"step": 11, "tr')
    said: list[str] = []
    result = train(CONFIG, workdir, corpus=corpus, echo=said.append)
    assert result.finished
    assert any(line.startswith("continues from step 5") for line in said), said
    assert fingerprint(workdir, CONFIG, corpus) == uninterrupted


def test_a_finished_run_says_so_again(tmp_path, corpus):
    config = small_config(
        training__num_steps=2,
        training__phases=[{"length": 32, "batch_size": 16}],
        optimizer__warmup_steps=1,
    )
    first = train(config, tmp_path / "work", corpus=corpus, echo=lambda _: None)
    before = (tmp_path / "work" / "metrics.jsonl").read_text()
    again = train(config, tmp_path / "work", corpus=corpus, echo=lambda _: None)
    assert (again.step, again.finished) == (2, True)
    assert again.train_metrics == first.train_metrics
    assert again.eval_metrics == first.eval_metrics != {}
    assert (tmp_path / "work" / "metrics.jsonl").read_text() == before
    assert json.loads(before.splitlines()[-1])["step"] == 2


def test_processes_agree_on_a_count_that_no_run_skips_or_repeats(monkeypatch):
    """A stand-in for JAX's service: it says yes to the number after the last one before SIGTERM."""
    agreed: list[int] = []
    asked: list[int] = []

    def reached(number: int) -> bool:
        asked.append(number)
        return number in agreed

    monkeypatch.setattr(session.jax, "process_count", lambda: 2)
    monkeypatch.setattr(session.multihost_utils, "reached_preemption_sync_point", reached)
    with StopRequest() as stop:
        assert not stop.due()
    with StopRequest() as stop:  # the next fold
        assert not stop.due()
        agreed.append(asked[-1] + 1)  # SIGTERM, in an evaluation that ends the wave
        assert stop.due()
        assert stop.due()
    assert stop.name == "SIGTERM"
    assert np.diff(asked).tolist() == [1] * (len(asked) - 1)


def test_second_signal_ends_at_once():
    code = """
import os, signal, time
from bert_jax.training.run.session import StopRequest
with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    assert stop.due() and stop.name == "SIGTERM"
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 128 + signal.SIGTERM
    assert "SIGTERM: saving after this step; a second signal exits at once" in done.stderr

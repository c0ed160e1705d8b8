"""The check before a run: in one process, and what a process tells the others."""

import dataclasses
import threading
import time
from types import SimpleNamespace
from typing import Any

import fsspec
import jax
import numpy as np
import pytest
import small_finetuning
from gcs_emulator import make_bucket, running_emulator
from small_run import VOCAB_SIZE, small_config, write_corpus

from bert_jax.cli.main import main
from bert_jax.distributed.parallel.sharding import MeshConfig
from bert_jax.errors import UserError
from bert_jax.training import check
from bert_jax.training.pretrain.saves import prepare_workdir
from bert_jax.training.run_plan import RunPlan
from bert_jax.training.start import Start


def test_pretraining_is_checked_up_to_a_step_and_saves_nothing(tmp_path, capsys):
    write_corpus(tmp_path / "corpus")
    config = small_config(data={"corpus": str(tmp_path / "corpus")}, training__accumulation=1)
    file = small_finetuning.write_config(tmp_path / "config.py", config)
    command = ["pretrain", f"--config={file}", f"--workdir={tmp_path / 'work'}", "--check"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].removeprefix("ok").strip() for line in lines] == [
        "versions", "chips", "work directory", "data", "step",
    ]  # fmt: skip
    assert f"jax {jax.__version__}" in lines[0]
    assert "chips: 8 (cpu), 8 in each process" in lines[1]
    assert "6,823 tokens in 150 documents" in lines[3]
    assert float(lines[4].split()[-1]) == pytest.approx(4.16, abs=0.1)  # ln 64
    assert list((tmp_path / "work").iterdir()) == []
    vocabulary = tmp_path / "corpus" / "train" / "tokenizer" / "vocab.txt"
    vocabulary.write_text(vocabulary.read_text() + "more\n")
    assert main(command) == 2  # every process reads the tokenizer's files
    assert "tokenizer/vocab.txt does not have the digest" in capsys.readouterr().err


def test_a_run_that_continues_on_a_larger_mesh_is_checked(tmp_path, capsys):
    """The first phase, which the run has done, had too few rows for all devices."""
    corpus, work = write_corpus(tmp_path / "corpus"), tmp_path / "work"
    phases = [{"length": 32, "batch_size": rows, "share": 0.5} for rows in (4, 8)]
    config = small_config(
        data={"corpus": str(tmp_path / "corpus")}, training__accumulation=1,
        training__phases=phases, mesh={"data": 4},
    )  # fmt: skip
    prepare_workdir(work, config.with_vocabulary(VOCAB_SIZE), corpus.train, Start())
    (work / "checkpoints" / "6").mkdir(parents=True)
    larger = dataclasses.replace(config, mesh=MeshConfig(data=8))
    file = small_finetuning.write_config(tmp_path / "config.py", larger)
    assert main(["pretrain", f"--config={file}", f"--workdir={work}", "--check"]) == 0
    assert "ok      step: mlm_loss 4." in capsys.readouterr().out


class TwoStages(RunPlan):
    """The parts of a plan that the check of a step reads; the state is the stage's number."""

    objective: Any = SimpleNamespace(metrics=[SimpleNamespace(name="loss")])

    def __init__(self, begins: int):
        stages = [SimpleNamespace(steps=range(n, n + 6), train=None, settings=()) for n in (0, 6)]
        batches = SimpleNamespace(stream=lambda at: iter([at]))
        saves = SimpleNamespace(begin=lambda n, stage: SimpleNamespace(state=n))
        vars(self).update(mesh=None, stages=stages, batches=batches, saves=saves, begins=begins)


@pytest.mark.parametrize(("begins", "loss"), [(0, 0), (6, 106), (7, 107), (12, 111)])
def test_the_step_that_comes_next_is_checked(monkeypatch, begins, loss):
    def step(state, batch):
        return state, {"bad": np.zeros(1), "loss": np.array(100 * state + batch)}

    monkeypatch.setattr(check, "make_train_step", lambda train, mesh: step)
    assert check._step(TwoStages(begins)) == f"loss {loss}"


def test_fine_tuning_is_checked_up_to_a_step(tmp_path, capsys):
    config = small_finetuning.small_config(
        small_finetuning.write_files(tmp_path / "files"), sweep={"seeds": 2, "at_once": 1}
    )
    file = small_finetuning.write_config(tmp_path / "config.py", config)
    assert main(["finetune", f"--config={file}", f"--workdir={tmp_path / 'work'}", "--check"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("ok      step: loss 0.")
    assert list((tmp_path / "work").iterdir()) == []


class Store(dict):
    """The key-value store of process 1, in which process 0 has answered "fine"."""

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self
        self[key] = value

    def blocking_key_value_get(self, key, timeout_in_ms):
        return "fine"

    def wait_at_barrier(self, key, timeout_in_ms):
        self["passed"] = key


def fails():
    raise UserError("it is broken.")


def has_a_bug():
    raise KeyError("a\nb")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: "fine", None),
        (lambda: "other", "other; process 0 has fine"),
        (fails, "it is broken"),
        (has_a_bug, r"KeyError('a\nb')"),
        (lambda: threading.Event().wait(), "no answer in 1 s (--join-timeout)"),
    ],
)
def test_what_a_process_tells_the_others(monkeypatch, act, said):
    store = Store()
    monkeypatch.setattr(
        check, "joined", SimpleNamespace(client=store, process_id=1, num_processes=2)
    )
    monkeypatch.setattr(check.socket, "gethostname", lambda: "b")
    # After a failure the process waits for its end.
    arguments = ("data", act, "Mend it", 1 if "no answer" in (said or "") else 60)
    threading.Thread(target=check._agree, args=arguments, daemon=True).start()
    for _ in range(600):
        if store:
            break
        time.sleep(0.05)
    if said is None:
        assert store == {"passed": "check/data"}
    else:
        assert store == {"check/ended": f"FAILED  data on b (process 1): {said}. Mend it"}
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert all(each.finished.is_set() for each in timers) or "no answer" in (said or "")


@pytest.mark.parametrize(("mine", "right"), [(8, True), (4, False)])
def test_chips_that_a_process_does_not_see(monkeypatch, mine, right):
    monkeypatch.setattr(jax, "local_device_count", lambda: mine)
    if right:
        assert check._chips() == "8 (cpu), 8 in each process"
    else:
        with pytest.raises(UserError, match="4 chips here and 8 in all, but 1 process"):
            check._chips()


def test_a_work_directory_in_a_bucket(tmp_path):
    with running_emulator(tmp_path / "log"):
        make_bucket("checked")
        assert check._write("gs://checked/run") == "gs://checked/run"
        assert fsspec.filesystem("gs", use_listings_cache=False).find("gs://checked") == []
        with pytest.raises(UserError, match="there is no bucket absent"):
            check._write("gs://absent/run")

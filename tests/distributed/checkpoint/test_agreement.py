"""Two processes, played by two threads, that see a shared directory differently."""

import json
import queue
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_states import CONFIG, abstract, assert_same, unmark, write
from small_run import TOKENIZER

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.config.mapping import build, to_dict
from bert_jax.distributed.checkpoint import agreement, reading, storage
from bert_jax.distributed.checkpoint.agreement import ElsewhereError, all_agree, by_first
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.reading import OutOfSightError, load_newest
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.errors import UserError, exit_code
from bert_jax.files.remote import open_workdir
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.saves import check_finetune_workdir, prepare_finetune_workdir
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.start import resolve_start
from bert_jax.training.workdir import look_into

SECONDS = 60  # for a process that the other one has left alone


class Pair:
    """What `jax` and `multihost_utils` are to two threads."""

    def __init__(self):
        self._here = threading.local()
        self.jax = SimpleNamespace(
            process_count=lambda: 2, process_index=lambda: self.index, numpy=jax.numpy
        )

    @property
    def index(self) -> int:
        return self._here.index

    def process_allgather(self, value: Any) -> np.ndarray:
        self._sent[self.index].put(np.asarray(value))
        theirs = self._sent[1 - self.index].get(timeout=SECONDS)
        if theirs is None:
            raise ConnectionError("the other process has ended")
        return np.stack([value, theirs] if self.index == 0 else [theirs, value])

    def broadcast_one_to_all(self, value: Any) -> np.ndarray:
        return self.process_allgather(value)[0]

    def run(self, *calls: Callable[[], Any]) -> list[Any]:
        """What each process returns or raises."""
        self._sent = queue.Queue(), queue.Queue()

        def call(index: int) -> Any:
            self._here.index = index
            try:
                return calls[index]()
            except Exception as error:
                return error
            finally:
                self._sent[index].put(None)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(call, range(2)))


@pytest.fixture
def pair(monkeypatch):
    """Two processes, as far as the modules that decide ask."""
    pair = Pair()
    monkeypatch.setattr(agreement, "jax", pair.jax)
    monkeypatch.setattr(agreement, "multihost_utils", pair)
    monkeypatch.setattr(reading, "_CACHED_SECONDS", 0.0)
    return pair


def test_all_processes_get_the_answer_of_the_first(pair):
    answers = [{"steps": [5, 10], "text": "ü" * 300}, [1]]
    assert (
        pair.run(*(lambda a=answer: by_first(lambda: a) for answer in answers)) == [answers[0]] * 2
    )
    assert pair.run(lambda: all_agree(True), lambda: all_agree(False)) == [False, False]
    assert pair.run(lambda: all_agree(True), lambda: all_agree(True)) == [True, True]


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError("no run"), 2), (PermissionError(13, "denied"), 2), (OutOfSightError("x"), 6),
     (ValueError("a bug"), 1)],
)  # fmt: skip
def test_an_error_of_the_first_process_ends_all_with_its_code(pair, error, code):
    def fail():
        raise error

    def call():
        try:
            by_first(fail)
        except Exception as raised:
            return raised

    first, other = pair.run(call, call)
    assert first is error
    assert isinstance(other, ElsewhereError)
    assert str(error) in str(other)
    assert exit_code(other) == code


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("saved")
    return workdir, write(workdir, [5, 10])


def restored_by(pair, directory, state) -> list[Any]:
    return pair.run(*[lambda: load_newest(directory, abstract(state))] * 2)


def stale(pair, monkeypatch, module, steps):
    """Process 1 sees the checkpoints of `steps` alone."""
    listed = module.saved_steps
    monkeypatch.setattr(module, "saved_steps", lambda path: steps if pair.index else listed(path))


@pytest.mark.parametrize("steps", [[5], []])
def test_with_a_stale_listing_both_restore_the_same_checkpoint(saved, pair, monkeypatch, steps):
    workdir, states = saved
    stale(pair, monkeypatch, reading, steps)
    for restored in restored_by(pair, workdir / "checkpoints", states[10]):
        assert (restored.step, restored.damaged) == (10, ())
        assert_same(restored.state, states[10])


def sees_no(pair, monkeypatch, name):
    """Process 1 cannot read the files of `name` anywhere."""
    fault = reading.file_fault

    def blind(path, *rest):
        return f"file {name} is missing" if pair.index and path.name == "10" else fault(path, *rest)

    monkeypatch.setattr(reading, "file_fault", blind)


def test_what_only_the_other_process_cannot_read_is_no_damage(saved, pair, monkeypatch):
    workdir, states = saved
    sees_no(pair, monkeypatch, "params/manifest.ocdbt")
    first, other = restored_by(pair, workdir / "checkpoints", states[10])
    assert isinstance(first, OutOfSightError)
    assert isinstance(other, OutOfSightError)
    assert "10 is intact when process 0 reads it, but another process cannot read it" in str(first)
    assert "(file params/manifest.ocdbt is missing)" in str(other)
    assert exit_code(first) == exit_code(other) == 6


def test_damage_that_only_the_other_process_finds_is_named_by_the_first(
    saved, tmp_path, pair, monkeypatch
):
    workdir, states = saved
    copy = tmp_path / "work"
    shutil.copytree(workdir, copy)
    (copy / "checkpoints" / "10" / "params" / "manifest.ocdbt").unlink()
    fault = reading.file_fault
    monkeypatch.setattr(  # its share of the files holds none that is damaged
        reading, "file_fault", lambda *given: fault(*given) if pair.index else ""
    )
    for restored in restored_by(pair, copy / "checkpoints", states[5]):
        assert restored.step == 5
        (damaged,) = restored.damaged
        assert (damaged.step, damaged.fault) == (10, "file params/manifest.ocdbt is missing")


def test_a_record_that_the_other_process_sees_as_it_was_decides_nothing(
    saved, tmp_path, pair, monkeypatch
):
    """As of a step that was set aside and saved anew."""
    workdir, states = saved
    copy = tmp_path / "work"
    shutil.copytree(workdir, copy)
    unmark(copy)
    read = reading.read_record

    def older(path):
        return read(path.with_name("5") if pair.index and path.name == "10" else path)

    monkeypatch.setattr(reading, "read_record", older)
    for restored in restored_by(pair, copy / "checkpoints", states[10]):
        assert (restored.step, restored.record.step, restored.damaged) == (10, 10, ())


def test_a_checkpoint_out_of_sight_is_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "10"
    naps = []

    def sleep(_):
        naps.append(path.exists())
        if len(naps) == 3:
            path.mkdir()

    monkeypatch.setattr(reading, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: len(naps)))
    monkeypatch.setattr(reading.jax, "process_index", lambda: 1)
    reading._await_sight(storage.as_path(path))
    assert naps == [False] * 3
    naps.clear()
    path.rmdir()
    monkeypatch.setattr(reading, "_CACHED_SECONDS", 2)
    reading._await_sight(storage.as_path(path))  # not for ever
    assert naps == [False] * 2


def views(tmp_path, workdir) -> list[Any]:
    """A work directory, and the same as process 1 sees it: without the newest checkpoint."""
    for number in range(2):
        shutil.copytree(workdir, tmp_path / f"{number}")
    shutil.rmtree(tmp_path / "1" / "checkpoints" / "10")
    return [tmp_path / "0", tmp_path / "1"]


def test_a_step_that_the_first_process_sees_saved_is_not_saved_again(saved, tmp_path, pair):
    workdir, states = saved
    here = views(tmp_path, workdir)

    def save(view):
        checkpoints = Checkpoints(view / "checkpoints")
        checkpoints.save(10, states[10], config=CONFIG, extra={})
        return checkpoints.wait()

    assert pair.run(*(lambda view=view: save(view) for view in here)) == [True, True]
    assert saved_steps(here[1] / "checkpoints") == [5]


def test_a_run_that_has_saved_reads_no_initial_model_in_any_process(saved, tmp_path, pair):
    workdir, _ = saved
    here = views(tmp_path, workdir)
    began = build(PretrainConfig, {"init": "elsewhere", "model": {"num_layers": 7}})
    (here[0] / "config.json").write_text(json.dumps({"config": to_dict(began)}))
    shutil.rmtree(here[1] / "checkpoints")
    given = build(PretrainConfig, {"init": "elsewhere"})

    def resolved(view):
        there = look_into(open_workdir(view), "pretrain")
        return resolve_start(given, read_model, there=there)

    for found in pair.run(*(lambda view=view: resolved(view) for view in here)):
        assert not isinstance(found, Exception), found
        config, start = found
        assert config.model.num_layers == 7
        assert start.initial is None


def test_the_first_process_says_what_run_a_work_directory_holds(saved, tmp_path, pair):
    """Process 1 sees checkpoints, and no config.json that says what they are of."""
    workdir, _ = saved
    here, config = views(tmp_path, workdir), FinetuneConfig()
    TOKENIZER.save(tmp_path / "files")

    def both(call, found):
        return pair.run(*(lambda view=view: call(view, found) for view in here))

    def begin(view, found):
        prepare_finetune_workdir(view, config, found, tmp_path / "files")

    def check(view, found):
        check_finetune_workdir(open_workdir(view), config, found)

    assert both(begin, {"task": "1"}) == [None, None]
    assert not (here[1] / "config.json").exists()  # the first process writes for all
    assert both(check, {"task": "1"}) == [None, None]
    for error in both(check, {"task": "2"}):
        assert isinstance(error, UserError)
        assert "what task names: fingerprint 1 there, 2 given" in str(error)

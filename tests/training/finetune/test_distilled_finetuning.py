"""Fine-tuning with a teacher: a sweep, stopped and continued, and a model that needs no teacher."""

import functools
import json
import os
import signal

import jax
import numpy as np
import pytest
from small_finetuning import fingerprint, small_config, write_files

from bert_jax.artefacts.saved.reading import read_finetuned
from bert_jax.distributed.checkpoint.reading import load_newest
from bert_jax.distributed.parallel.sharding import make_trial_mesh
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.objectives.distillation import Distilled
from bert_jax.training import loop
from bert_jax.training.finetune import report
from bert_jax.training.finetune import train as train_module
from bert_jax.training.finetune.saves import check_finetune_workdir
from bert_jax.training.finetune.setup import set_up
from bert_jax.training.finetune.train import finetune


@pytest.fixture(scope="module", autouse=True)
def small_programs():
    """One device, and each step traced and compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            train_module, "make_trial_mesh", lambda c, n: make_trial_mesh(c, n, jax.devices()[:1])
        )
        for module, name in ((loop, "make_train_step"), (report, "make_eval_step")):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files") / "files")


@pytest.fixture(scope="module")
def teacher(files, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("teacher") / "work"
    assert finetune(small_config(files), workdir, echo=lambda line: None).finished
    return workdir


def config_of(files, teacher, **distil):
    distil = {"teacher": str(teacher), "hidden_weight": 0.1, **distil}
    return small_config(files, sweep={"seeds": 2}, training__num_epochs=2.0, distil=distil)


@pytest.fixture(scope="module")
def whole(files, teacher, tmp_path_factory):
    workdir, said = tmp_path_factory.mktemp("whole") / "work", []
    assert finetune(config_of(files, teacher), workdir, echo=said.append).finished
    return workdir, said


def test_what_is_saved_is_the_student(whole, teacher):
    workdir, said = whole
    assert any(line.startswith(f"teacher  {teacher}") for line in said)
    assert load_newest(workdir / "checkpoints").state.keys() == {"encoder", "head"}
    student, expected = (read_finetuned(each) for each in (workdir, teacher))
    assert student.outputs == expected.outputs


def test_stopped_and_continued_is_uninterrupted(files, teacher, whole, tmp_path):
    def stop(line):
        if line.startswith("epoch 1.00"):
            os.kill(os.getpid(), signal.SIGTERM)

    config, work = config_of(files, teacher), tmp_path / "work"
    assert not finetune(config, work, echo=stop).finished
    state = load_newest(work / "resume").state
    assert state.keys() == {"encoder", "head"}  # the teacher is read again
    assert finetune(config, work, echo=lambda line: None).finished
    assert fingerprint(work) == fingerprint(whole[0])


def test_the_teacher_is_laid_out_by_the_labels_of_the_task(files, teacher):
    setup = set_up(config_of(files, teacher))
    objective = setup.step.objective
    assert isinstance(objective, Distilled)
    assert objective.teacher.config.dropout_rate == 0
    kept = setup.start.parts[0]["teacher"]
    np.testing.assert_array_equal(
        kept["head"]["kernel"], read_finetuned(teacher).params["head"]["kernel"]
    )
    assert setup.fingerprints.keys() == {"init", "distil.teacher", "task"}


def test_another_teacher_is_refused(files, whole):
    with pytest.raises(UserError, match=r"what distil.teacher names: fingerprint"):
        finetune(config_of(files, whole[0]), whole[0], echo=lambda line: None)


def test_a_run_does_not_go_on_without_its_teacher(files, whole):
    known = json.loads((whole[0] / "config.json").read_text())["fingerprints"]
    del known["distil.teacher"]
    with pytest.raises(UserError, match=r"what distil.teacher names: .* there, none given"):
        check_finetune_workdir(open_workdir(whole[0]), config_of(files, ""), known)


def test_teachers_that_do_not_fit(files, teacher, tmp_path):
    with pytest.raises(UserError, match=r"distil.teacher: .* has no task head; give a model"):
        set_up(config_of(files, files["init"]))
    other = tmp_path / "train.csv"
    other.write_text("text,label\nthe cat .,bird\nthe dog .,fish\n")
    table = {"train": str(other), "dev": str(other)}
    config = config_of(files, teacher)
    with pytest.raises(UserError, match=r"distil.teacher: the labels of .* lack bird; fish"):
        set_up(small_config(files, table=table, distil={"teacher": config.distil.teacher}))

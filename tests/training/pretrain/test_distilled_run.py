"""Pretraining with a teacher: begun from its layers, stopped and continued, read without it."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from small_run import small_config, write_corpus
from small_saved import small_saved

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli import main as cli
from bert_jax.distributed.checkpoint.reading import load_newest
from bert_jax.errors import UserError
from bert_jax.model.config import ARCHITECTURE
from bert_jax.training.pretrain.start import resolve_start
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.telemetry import read_metrics

pytestmark = pytest.mark.usefixtures("reused_steps")

SHORT = {
    "data__pairing": "none",
    "training__num_steps": 6,
    "training__phases": [{"length": 32, "batch_size": 16}],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, corpus):
    workdir = tmp_path_factory.mktemp("teacher") / "work"
    assert train(small_config(**SHORT), workdir, corpus=corpus, echo=lambda line: None).finished
    return workdir


def config_of(teacher, **changes):
    distil = {"teacher": str(teacher), "from_teacher": True, "hidden_weight": 0.1, **changes}
    return small_config(**SHORT, model__num_layers=1, distil=distil)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus, teacher):
    workdir, said = tmp_path_factory.mktemp("whole") / "work", []
    assert train(config_of(teacher), workdir, corpus=corpus, echo=said.append).finished
    return workdir, said


def saved(workdir):
    restored = load_newest(workdir / "checkpoints")
    rows = [
        {name: value for name, value in row.items() if not name.startswith("perf/")}
        for row in read_metrics(workdir / "metrics.jsonl")
    ]
    return restored.state, rows


def test_a_run_reports_what_it_learns_and_saves_the_student_alone(whole, teacher):
    workdir, said = whole
    assert any(line.startswith(f"learns from {teacher}") for line in said)
    assert any("starts from layers 2 of" in line for line in said)
    state, rows = saved(workdir)
    assert state.keys() == {"encoder", "mlm", "nsp"}
    assert {"train/soft_loss", "train/hidden_loss", "train/mlm_loss"} <= rows[-2].keys()
    assert not any("eval/soft_loss" in row for row in rows)
    record = json.loads((workdir / "config.json").read_text())
    assert len(record["teacher"]) == 64
    assert [each["role"] for each in record["lineage"]][-1] == "distil.teacher"
    first = next(row["eval/mlm_loss"] for row in rows if "eval/mlm_loss" in row)
    theirs = [row["eval/mlm_loss"] for row in saved(teacher)[1] if "eval/mlm_loss" in row]
    assert first < 2 * theirs[-1]


def test_stopped_and_continued_equals_uninterrupted(tmp_path, corpus, whole, teacher):
    def stop(line):
        if line.startswith("step 3/6"):
            os.kill(os.getpid(), signal.SIGTERM)

    workdir = tmp_path / "work"
    config = config_of(teacher)
    assert not train(config, workdir, corpus=corpus, echo=stop).finished
    moved = tmp_path / "moved"  # a directory may move, what it holds is compared
    moved.symlink_to(teacher)
    assert train(config_of(moved), workdir, corpus=corpus, echo=lambda line: None).finished
    (state, rows), (theirs, expected) = saved(workdir), saved(whole[0])
    for name in ("encoder", "mlm"):
        for a, b in zip(*(np_leaves(each[name]) for each in (state, theirs)), strict=True):
            np.testing.assert_array_equal(a, b)
    assert rows == expected


def np_leaves(tree):
    if not isinstance(tree, dict):
        return [np.asarray(tree)]
    return [leaf for name in sorted(tree) for leaf in np_leaves(tree[name])]


def test_another_teacher_is_refused(whole, corpus):
    """The student as its own teacher, which has the same sizes but for its layers."""
    message = r"contains a run with another configuration .*the teacher: fingerprint"
    with pytest.raises(UserError, match=message):
        train(config_of(whole[0]), whole[0], corpus=corpus, echo=lambda line: None)


def test_a_student_starts_from_one_model(teacher):
    """It started from init, and from_teacher was ignored."""
    config = replace(config_of(teacher), init=str(teacher))
    with pytest.raises(
        UserError, match=r"from_teacher is true, but init is '.*'; a student starts"
    ):
        resolve_start(config, read_model)


def test_verbs_read_the_student_without_the_teacher(whole, corpus, capsys):
    workdir, _ = whole
    where = str(corpus.train.path.parent)
    assert cli.main(["evaluate", str(workdir), "--corpus", where]) == 0
    assert "mlm_loss" in capsys.readouterr().out
    assert cli.main(["status", str(workdir)]) == 0
    assert "soft loss" in capsys.readouterr().out
    assert read_model(workdir).params.keys() == {"encoder", "mlm", "nsp"}


def test_teachers_that_do_not_fit(teacher):
    config = config_of(teacher)
    with pytest.raises(UserError, match=r"distil.teacher: the tokenizer of .* is not the token"):
        resolve_start(config, read_model, "0" * 64)
    with pytest.raises(UserError, match=r"distil.teacher is empty; set"):
        resolve_start(config_of(""), read_model)
    with pytest.raises(UserError, match=r"is 'distilled_masked_lm'; .*--config.distil.teacher=DIR"):
        small_config(**SHORT, objective={"name": "distilled_masked_lm", "teacher": str(teacher)})
    with pytest.raises(UserError, match=r"objective.name is 'replaced_tokens'; only masked_lm"):
        small_config(**SHORT, objective={"name": "replaced_tokens"}, distil={"teacher": "work"})
    long = replace(config.training.phases[0], length=128)
    training = replace(config.training, phases=(long,))
    model = replace(config.model, num_positions=128)
    with pytest.raises(UserError, match=r"has 64 positions, but training.phases have rows of 128"):
        resolve_start(replace(config, training=training, model=model), read_model)


@pytest.mark.parametrize(
    ("positions", "distance"), [("learned", 0), ("relative", 24), ("relative", 0)]
)
def test_a_student_may_have_fewer_positions_unless_buckets_depend_on_them(positions, distance):
    given = {"num_types": 0, "positions": positions, "relative_distance": distance}
    found = small_saved("mlm", pooler=False, num_layers=3, relative_buckets=8, **given)
    model = {f"model__{name}": getattr(found.config, name) for name in ARCHITECTURE}
    sizes = {"model__num_layers": 1, "model__num_positions": 20}
    short = {**SHORT, "training__phases": [{"length": 20}]}
    config = small_config(**short | model | sizes, distil={"teacher": "t", "from_teacher": True})
    if positions == "relative" and not distance:
        with pytest.raises(UserError, match=r"\(model.num_positions 20 and 24\)"):
            resolve_start(config, lambda _: found)
        return
    _, start = resolve_start(config, lambda _: found)
    if positions == "learned":
        assert start.initial.params["encoder"]["embeddings"]["position"].shape == (20, 16)


def test_a_student_of_other_sizes_starts_on_its_own(tmp_path, corpus, teacher):
    config = config_of(teacher)
    config = replace(config, model=replace(config.model, mlp_dim=32))
    with pytest.raises(UserError, match=r"student and teacher differ .*\(model.mlp_dim 32 and 64"):
        train(config, tmp_path / "work", corpus=corpus, echo=lambda line: None)
    assert not (tmp_path / "work").exists()

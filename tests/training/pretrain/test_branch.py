"""A branch goes on from a checkpoint of another run, which keeps that checkpoint."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from checkpoint_states import change_a_digest, unmark
from full_disk import files_of_at_most
from small_run import fingerprint, small_config, snapshot, write_store

from bert_jax.cli.inspection.replay import replay_batch
from bert_jax.cli.inspection.status import pretrain_status
from bert_jax.cli.inspection.status_lines import pretrain_lines
from bert_jax.cli.main import main
from bert_jax.config.mapping import to_dict
from bert_jax.distributed.checkpoint import manager, storage
from bert_jax.distributed.checkpoint.reading import load_newest
from bert_jax.distributed.checkpoint.retention import branches_of
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.checkpoint.verify import verify_checkpoint
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.training import workdir as workdir_module
from bert_jax.training.pretrain import branch as branch_module
from bert_jax.training.pretrain.branch import Branch, open_branch
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.train import resolve_pretraining, train
from bert_jax.training.run.session import hold_workdir
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.workdir import EMPTY

pytestmark = pytest.mark.usefixtures("reused_steps")

PHASE = {"length": 32, "batch_size": 16}


class Run(NamedTuple):
    """A finished run of six steps at a constant learning rate, with its checkpoints 2, 4 and 6."""

    workdir: Path
    config: PretrainConfig
    corpus: Corpus
    other: Path
    """Store of another text with the same tokenizer."""


def config_of(corpus: Path, **changes: Any) -> PretrainConfig:
    settings: dict[str, Any] = {
        "training__num_steps": 6, "training__phases": [PHASE], "training__accumulation": 1,
        "training__eval_every_steps": 0, "training__log_every_steps": 1,
        "optimizer": {"schedule": "constant", "warmup_steps": 1, "learning_rate": 1e-3},
        "checkpoint": {"save_every_steps": 2, "keep": 9}, "data": {"corpus": str(corpus)},
    }  # fmt: skip
    return small_config(**settings | changes)


def decay_of(run: Run, at: int, num_steps: int = 6, **phase: Any) -> PretrainConfig:
    """A configuration that is the run's up to step `at`, and then decays linearly."""
    share = at / num_steps
    decay = {**PHASE, "share": 1 - share, "decay": "linear", "end_rate": 0.0, **phase}
    return config_of(
        run.corpus.train.path,
        training__num_steps=num_steps,
        training__phases=[{**PHASE, "share": share}, decay],
    )


def branch(config: PretrainConfig, workdir: Path, name: str) -> list[str]:
    said: list[str] = []
    assert train(config, workdir, branch_from=name, echo=said.append).finished
    return said


def rows_of(workdir: Path, after: int = 0) -> list[dict[str, Any]]:
    rows = (row for row in read_metrics(workdir / "metrics.jsonl") if row["step"] > after)
    return [{n: v for n, v in row.items() if not n.startswith("perf/")} for row in rows]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Run:
    directory = tmp_path_factory.mktemp("run")
    corpus = Corpus(write_store(directory / "text", 100, seed=0), None)
    write_store(directory / "other", 40, seed=8)
    config = config_of(directory / "text")
    assert train(config, directory / "stable", echo=lambda _: None).finished
    for step in (2, 4, 6):  # a busy run reads the newest back alone
        path = directory / "stable" / "checkpoints" / str(step)
        assert verify_checkpoint(path, mark=True).intact
    return Run(directory / "stable", config, corpus, directory / "other")


@pytest.fixture
def run(made, tmp_path) -> Run:
    """A copy, whose marks are the test's own."""
    return made._replace(workdir=Path(shutil.copytree(made.workdir, tmp_path / "stable")))


@pytest.mark.parametrize("at", [2, 4])
def test_a_branch_of_the_same_configuration_is_the_run_bit_for_bit(run, tmp_path, at):
    new = tmp_path / "new"
    with hold_workdir(run.workdir):  # as while the run goes on
        said = branch(run.config, new, f"{run.workdir}@{at}")
    assert said.count(
        f"branch   of {run.workdir} from step {at}; learning rate 0.001 before, 0.001 after"
    ) == 1  # fmt: skip
    assert not any(line.startswith("continues") for line in said)
    found, wanted = (fingerprint(each, run.config, run.corpus) for each in (new, run.workdir))
    assert found.pop("metrics") != wanted.pop("metrics")  # the branch has rows of its own steps
    assert found == wanted
    assert rows_of(new) == rows_of(run.workdir, after=at) != []
    assert replay_batch(new, 5) == replay_batch(run.workdir, 5)


def test_a_branch_of_a_branch(run, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    branch(run.config, first, f"{run.workdir}@2")
    branch(run.config, second, f"{first}@4")
    found, wanted = (fingerprint(each, run.config, run.corpus) for each in (second, run.workdir))
    assert {**found, "metrics": ""} == {**wanted, "metrics": ""}
    text = " ".join(pretrain_lines(pretrain_status(open_workdir(second)), width=1000))
    assert f"branch of {first} from step 4, a branch of {run.workdir} from step 2" in text
    text = " ".join(pretrain_lines(pretrain_status(open_workdir(first)), width=1000))
    assert f"branches    from step 4: {second}" in text


def test_two_decays_of_one_run_with_texts_of_their_own(run, tmp_path):
    new = {name: tmp_path / name for name in "ab"}
    branch(decay_of(run, 4), new["a"], f"{run.workdir}@4")
    branch(decay_of(run, 4, corpus=str(run.other)), new["b"], f"{run.workdir}@4")
    for workdir in new.values():
        rows = rows_of(workdir)
        rates = [row["train/learning_rate"] for row in rows if "train/learning_rate" in row]
        np.testing.assert_allclose(rates, [1e-3, 0], rtol=1e-6)
        assert replay_batch(workdir, 3) == replay_batch(run.workdir, 3)
    assert replay_batch(new["a"], 4) != replay_batch(new["b"], 4)
    assert set(branches_of(run.workdir / "checkpoints")[4]) == set(map(str, new.values()))
    ends = [load_newest(path / "checkpoints").state for path in new.values()]
    kernels = [end["encoder"]["layers"]["mlp"]["up"]["kernel"] for end in ends]
    assert np.abs(kernels[0] - kernels[1]).max() > 0


def test_a_run_in_steps_is_extended_without_other_shares(run, tmp_path):
    """A phase behind the steps of the run, whose phases stay as they are."""
    first = config_of(run.corpus.train.path, training__phases=[{**PHASE, "steps": 6}])
    longer = config_of(
        run.corpus.train.path,
        training__num_steps=8,
        training__phases=[{**PHASE, "steps": 6}, {**PHASE, "steps": 2, "decay": "linear"}],
    )
    assert train(first, tmp_path / "in steps", corpus=run.corpus, echo=lambda _: None).finished
    assert fingerprint(tmp_path / "in steps", first, run.corpus) == fingerprint(
        run.workdir, run.config, run.corpus
    )
    result = train(
        longer, tmp_path / "longer", corpus=run.corpus, branch_from=f"{tmp_path / 'in steps'}@6",
        echo=lambda _: None,
    )  # fmt: skip
    assert (result.finished, result.step) == (True, 8)


def test_the_step_stays_when_the_run_goes_on(run, tmp_path):
    branch(run.config, tmp_path / "new", f"{run.workdir}@2")
    for step in ("4", "6"):
        shutil.rmtree(run.workdir / "checkpoints" / step)
    (run.workdir / "checkpoints" / "4.branch-kept.json").touch()  # no mark of ours
    one = dataclasses.replace(run.config.checkpoint, keep=1)
    assert train(
        dataclasses.replace(run.config, checkpoint=one), run.workdir, echo=lambda _: None
    ).finished
    assert saved_steps(run.workdir / "checkpoints") == [2, 6]


def stop_at_step_4(line: str) -> None:
    if line.startswith("step 3/6"):  # said while step 4 is computed
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_branch_that_has_saved_needs_the_run_no_more(run, tmp_path):
    new, name = tmp_path / "new", f"{run.workdir}@2"
    stopped = train(run.config, new, branch_from=name, echo=stop_at_step_4)
    assert (stopped.step, stopped.finished) == (4, False)
    wanted = fingerprint(run.workdir, run.config, run.corpus)
    shutil.rmtree(run.workdir)
    with pytest.raises(
        UserError, match=r"is a branch from step 2 of .*, but --branch-from is .*@4"
    ):
        train(run.config, new, branch_from=f"{run.workdir}@4")
    said: list[str] = []
    assert train(run.config, new, branch_from=name, echo=said.append).finished
    assert "continues from step 4" in said
    found = fingerprint(new, run.config, run.corpus)
    assert {**found, "metrics": ""} == {**wanted, "metrics": ""}
    assert train(run.config, new, echo=said.append).finished  # nor the option


def test_a_branch_killed_at_its_start_begins_again(run, tmp_path, monkeypatch):
    new = tmp_path / "new"

    def kill(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(branch_module, "restore_step", kill)
        with pytest.raises(KeyboardInterrupt):
            train(run.config, new, branch_from=f"{run.workdir}@4", echo=lambda _: None)
    assert not saved_steps(new / "checkpoints")
    assert branches_of(run.workdir / "checkpoints") == {4: [str(new)]}
    # Without @STEP, where step 6 is the newest, the branch keeps to the step that it began from.
    assert train(run.config, new, branch_from=str(run.workdir), echo=lambda _: None).finished


def test_the_newest_is_the_newest_that_was_read_back(run, tmp_path):
    (run.workdir / "checkpoints" / "6" / "verified.json").unlink()
    found = open_branch(str(run.workdir), open_workdir(tmp_path / "new"), EMPTY)
    assert found.record["step"] == 4
    unmark(run.workdir)
    with pytest.raises(UserError, match=r"has 0 verified checkpoints.* saved steps: 2, 4, 6"):
        open_branch(str(run.workdir), open_workdir(tmp_path / "new"), EMPTY)


@pytest.mark.slow
def test_a_branch_on_another_mesh(run, tmp_path):
    mesh = dataclasses.replace(run.config.mesh, fsdp=2, tensor=2)
    new = tmp_path / "new"
    branch(dataclasses.replace(run.config, mesh=mesh), new, f"{run.workdir}@4")
    ends = [load_newest(path / "checkpoints").state for path in (new, run.workdir)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), *ends)


def refused(run: Run, config: PretrainConfig, workdir: Path, name: str) -> str:
    """The message; neither work directory has changed."""
    before = snapshot(run.workdir)
    with pytest.raises(UserError) as error:
        train(config, workdir, branch_from=name, echo=lambda _: None)
    assert snapshot(run.workdir) == before
    assert workdir == run.workdir or not workdir.exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 8}, "seed: 7 there, 8 given"),
        ({"model__num_layers": 3}, "model.num_layers: 2 there, 3 given"),
        ({"optimizer__name": "lamb"}, 'optimizer.name: "adamw" there, "lamb" given'),
        ({"masking": {"rate": 0.3}}, "training.phases[0].masking_rate: 0.15 there, 0.3 given"),
        (
            {"training__phases": [{**PHASE, "batch_size": 32}]},
            "training.phases[0].batch_size: 16 there, 32 given",
        ),
        (
            {"training__phases": [{**PHASE, "share": 0.5}, {**PHASE, "share": 0.5}]},
            "training.phases: before the branch they have 4 steps there, 3 + 1 given (to begin "
            "a phase at the branch, make the shares of earlier phases sum to 0.6666666667)",
        ),
        (
            {"training__num_steps": 4},
            "training.num_steps is 4; it must exceed 4 for a branch from step 4 of {source}, "
            "because it counts the steps before the branch too",
        ),
    ],
)  # fmt: skip
def test_what_decides_the_steps_before_must_be_equal(run, tmp_path, changes, message):
    config = config_of(run.corpus.train.path, **changes)
    found = refused(run, config, tmp_path / "new", f"{run.workdir}@4")
    assert message.format(source=run.workdir) in found


def test_the_text_before_the_branch_must_be_equal(run, tmp_path):
    found = refused(run, config_of(run.other), tmp_path / "new", f"{run.workdir}@4")
    assert "training.phases[0].corpus: " in found
    record = json.loads((run.workdir / "config.json").read_text())
    record["tokenizer"] = "another"
    (run.workdir / "config.json").write_text(json.dumps(record))
    found = refused(run, run.config, tmp_path / "new", f"{run.workdir}@4")
    assert "the tokenizer: fingerprint another there, " in found


def test_the_teacher_before_the_branch_must_be_equal(run, tmp_path):
    """A branch went on with another teacher of the same architecture, without a word."""
    record = json.loads((run.workdir / "config.json").read_text())
    (run.workdir / "config.json").write_text(json.dumps(record | {"teacher": "another"}))
    found = refused(run, run.config, tmp_path / "new", f"{run.workdir}@4")
    assert "the teacher: fingerprint another there, none given" in found


def test_a_longer_phase_behind_the_branch_may_give_the_teacher_more_positions(run, tmp_path):
    """A rotary teacher has as many positions as the longest phase."""
    plan = resolve_pretraining(run.config, open_workdir(run.workdir), run.corpus)
    given = run.config.with_vocabulary(run.corpus.train.vocab_size)

    def taught(length: int, num_layers: int = 2) -> PretrainConfig:
        sizes = {"positions": "rope", "num_positions": length, "num_layers": num_layers}
        model = ModelConfig(**{n: getattr(given.model, n) for n in ARCHITECTURE} | sizes)
        distil = dataclasses.replace(given.distil, architecture=model)
        return dataclasses.replace(given, distil=distil)

    record = json.loads((run.workdir / "config.json").read_text())
    record["config"] = to_dict(taught(32))
    (run.workdir / "config.json").write_text(json.dumps(record))
    found = open_branch(f"{run.workdir}@4", open_workdir(tmp_path / "new"), EMPTY)
    for config, said in ((taught(64), ""), (taught(32, 3), "architecture.num_layers: 2 there")):
        with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
            found.check(config, run.corpus.train, {}, "", plan.saves.saved)


def test_a_branch_counts_its_patience_anew(run, tmp_path, monkeypatch):
    """The branch of a run that training.patience had ended was over without a step."""
    restore = Branch.restore

    def ended(found: Branch, abstract: Any) -> Any:
        restored = restore(found, abstract)
        progress = {"scores": [{"step": 2}, {"step": 4}], "best": 1.0, "best_step": 2}
        extra = restored.record.extra | {"progress": progress}
        record = dataclasses.replace(restored.record, extra=extra)
        return dataclasses.replace(restored, record=record)

    monkeypatch.setattr(Branch, "restore", ended)
    every = {"training__eval_every_steps": 1, "training__patience": 1}
    plan = resolve_pretraining(
        config_of(run.corpus.train.path, **every), open_workdir(tmp_path / "new"),
        run.corpus._replace(heldout=run.corpus.train), branch_from=f"{run.workdir}@4",
    )  # fmt: skip
    assert plan.begins == 4
    plan.saves.prepare(lambda *_: None)
    now = plan.saves.restore()
    assert now is not None
    assert (now.step, now.ended) == (4, False)


def test_the_newest_save_is_one_that_exists(run, monkeypatch):
    """Of a save that failed and of one that is gone, only the step was known."""
    plan = resolve_pretraining(run.config, open_workdir(run.workdir), run.corpus)
    plan.saves.prepare(lambda *_: None)
    now = plan.saves.restore()
    assert now is not None

    def fail(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(manager.storage, "write_async", fail)
    now.step += 1
    plan.saves.save(now, last=False, finished=False)
    plan.saves.close()
    assert plan.saves.newest() == f"{run.workdir}/checkpoints/6"
    shutil.rmtree(run.workdir / "checkpoints" / "6")
    assert plan.saves.newest() == f"{run.workdir}/checkpoints/4"
    monkeypatch.setattr(storage, "saved_steps", fail)
    assert plan.saves.newest() == ""


def test_names_that_lead_to_no_checkpoint(run, tmp_path):
    new, source = tmp_path / "new", run.workdir
    for name, message in {
        f"{source}@3": f"{source} has no checkpoint of step 3; saved steps: 2, 4, 6",
        f"{source}@last": f"'{source}@last' names no checkpoint; expected WORKDIR@STEP",
        "@3": "'@3' names no checkpoint",
        f"{tmp_path}/none@3": f"{tmp_path}/none has no config.json, so it is not a run",
    }.items():
        assert message in refused(run, run.config, new, name)


def test_a_run_that_began_otherwise_is_no_branch(run, tmp_path):
    found = refused(run, run.config, run.workdir, f"{tmp_path}/elsewhere@4")
    assert f"but the run in {run.workdir} is not a branch" in found
    found = refused(run, run.config, tmp_path / "fresh", f"{tmp_path / 'fresh'}/@4")
    assert "--branch-from and --workdir name the same directory, " in found


def test_damaged_steps_are_named(run, tmp_path):
    change_a_digest(run.workdir / "checkpoints" / "2", "opt_state/num_updates")
    found = refused(run, run.config, tmp_path / "new", f"{run.workdir}@2")
    assert "the checkpoint of step 2 in " in found
    assert "is damaged: file record/data.json " in found
    assert found.endswith("read back: 4, 6")
    unmark(run.workdir)
    found = refused(run, run.config, tmp_path / "new", f"{run.workdir}@2")
    assert "array opt_state/num_updates differs from its digest" in found


def test_a_mark_that_cannot_be_written_ends_the_branch(run, tmp_path):
    found = open_branch(f"{run.workdir}@4", open_workdir(tmp_path / "new"), EMPTY)
    with files_of_at_most(16), pytest.raises(UserError) as error:  # noqa: SIM117
        with found.keeping("new"):
            pass
    name = open_workdir(run.workdir).name
    what = f"cannot write the mark that keeps the checkpoint of step 4 in {name}: "
    assert str(error.value).startswith(what)
    assert str(error.value).count("cannot write the mark") == 1
    assert [path.name for path in (run.workdir / "checkpoints").iterdir() if path.is_file()] == []


@pytest.mark.parametrize("error", [OSError("no room"), UserError("no room")])
def test_an_error_of_the_mark_is_named_once(tmp_path, monkeypatch, error):
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(branch_module, "keep_for_branch", fail)
    found = Branch({"workdir": "a", "step": 4, "digest": "d"}, open_workdir(tmp_path), {})
    with pytest.raises(UserError) as raised, found.keeping("new"):
        pass
    what = "cannot write the mark that keeps the checkpoint of step 4 in"
    assert str(raised.value) == f"{what} {open_workdir(tmp_path).name}: no room"


@pytest.mark.parametrize("is_new", [True, False])
def test_only_a_new_mark_goes_where_the_run_cannot_be_begun(tmp_path, monkeypatch, is_new):
    """The mark of a run that was killed at its start and begins again is that run's own."""
    forgotten = []
    monkeypatch.setattr(branch_module, "keep_for_branch", lambda *_: is_new)
    monkeypatch.setattr(branch_module, "forget_branch", lambda *mark: forgotten.append(mark[1:]))
    found = Branch({"workdir": "a", "step": 4, "digest": "d"}, open_workdir(tmp_path), {})
    with pytest.raises(RuntimeError, match="of the body"), found.keeping("new"):
        raise RuntimeError("of the body")
    assert forgotten == [(4, "new")] * is_new
    with found.keeping("new"):
        pass
    assert len(forgotten) == is_new


def test_a_mark_goes_where_the_branch_cannot_be_begun(run, tmp_path):
    (tmp_path / "new").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workdir_module, "replace_file", lambda *_: (_ for _ in ()).throw(OSError(28)))
        with pytest.raises(UserError, match="cannot write to the work directory"):
            train(run.config, tmp_path / "new", branch_from=f"{run.workdir}@4")
    assert branches_of(run.workdir / "checkpoints") == {}


def test_a_record_that_names_no_checkpoint(run, tmp_path):
    record = json.loads((run.workdir / "config.json").read_text())
    for branch in ("x", {"workdir": "a"}, [1]):
        changed = json.dumps({**record, "branch": branch})
        (run.workdir / "config.json").write_text(changed)
        assert "branch is " in refused(run, run.config, run.workdir, "")
        assert pretrain_status(open_workdir(run.workdir)).origin.startswith("not known")


def test_on_the_command_line(run, tmp_path, capsys):
    text = json.dumps(to_dict(run.config))
    (tmp_path / "config.py").write_text(
        f"import json\ndef get_config():\n    return json.loads({text!r})\n"
    )
    command = ["pretrain", f"--config={tmp_path / 'config.py'}", f"--workdir={tmp_path / 'new'}"]
    name = f"--branch-from={run.workdir}@4"
    assert main([*command, name, "--config.seed=9"]) == 2
    assert "seed: 7 there, 9 given" in capsys.readouterr().err
    assert main([*command, name]) == 0
    assert main(["status", "--json", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert f"branch of {run.workdir} from step 4" in said


def test_a_branch_with_a_warm_up_gets_a_unit_of_its_own(run, tmp_path):
    """The run has no batch warm-up, so its unit says nothing."""
    config = decay_of(run, 4, 8, batch_size=32, batch_warmup_steps=2)
    mesh = dataclasses.replace(config.mesh, data=8, fsdp=1, tensor=1)
    work = open_workdir(tmp_path / "new")
    plan = resolve_pretraining(
        dataclasses.replace(config, mesh=mesh), work, run.corpus, branch_from=f"{run.workdir}@4"
    )
    assert plan.saves.config.training.batch_unit % 8 == 0

"""Averages of checkpoints against numpy, and what must not be averaged."""

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import change_a_digest
from full_disk import files_of_at_most
from small_run import TOKENIZER, small_config, snapshot, write_corpus

import bert_jax
from bert_jax.artefacts.saved.average import average
from bert_jax.artefacts.saved.lineage import ancestor_entry
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.artefacts.saved.runs import staged
from bert_jax.cli.inspection.evaluate import evaluate_run
from bert_jax.cli.main import main
from bert_jax.config.mapping import to_dict
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.reading import DamagedCheckpointError, load_newest
from bert_jax.distributed.checkpoint.record import named_leaves, read_record
from bert_jax.distributed.checkpoint.retention import Retention
from bert_jax.errors import UserError
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.settings import objective_of
from bert_jax.training.pretrain.train import train
from bert_jax.training.workdir import begin_workdir


class State(NamedTuple):
    """Parameters and one more array, as of an optimizer."""

    params: Any
    count: Any


class Runs(NamedTuple):
    """Two runs of one model and what they saved."""

    here: Path
    states: dict[str, Any]
    """Parameters by name, as numpy arrays."""


def write_run(
    workdir: Path, config: PretrainConfig, steps: tuple[int, ...], seed: int, tokenizer: Path
) -> dict[str, Any]:
    """A run that has saved random parameters at some steps; returns the parameters by name."""
    config = config.with_vocabulary(TOKENIZER.vocab_size)
    begin_workdir(workdir, config, tokenizer, corpus="text", tokenizer=TOKENIZER.fingerprint)
    shapes = jax.eval_shape(objective_of(config).init, jax.random.key(0))
    random, states = np.random.default_rng(seed), {}
    checkpoints = Checkpoints(workdir / "checkpoints", Retention(keep=9))
    for step in steps:
        params = jax.tree.map(lambda a: random.normal(0, 0.1, a.shape).astype(a.dtype), shapes)
        state = State(jax.tree.map(jnp.asarray, params), jnp.int32(step))
        checkpoints.save_last(step, state, read_back=True, config=to_dict(config), extra={})
        states[f"{workdir}@{step}"] = params
    checkpoints.close()
    return states


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    here = tmp_path_factory.mktemp("runs")
    write_corpus(here / "corpus")
    config = small_config(data={"corpus": str(here / "corpus")})
    files = here / "corpus" / "train" / "tokenizer"
    states = write_run(here / "a", config, (2, 4, 6), 1, files)
    return Runs(here, states | write_run(here / "b", config, (4, 5), 2, files))


def assert_average(runs: Runs, out: Path, names: list[str], weights: list[float]) -> None:
    found = load_newest(out / "checkpoints").state

    def check(array: Any, *sources: Any) -> None:
        total = sum(w * each.astype(np.float64) for w, each in zip(weights, sources, strict=True))
        np.testing.assert_array_equal(array, (total / sum(weights)).astype(np.float32))

    jax.tree.map(check, found, *(runs.states[name] for name in names))


def test_a_mean_of_checkpoints_of_two_runs(runs, tmp_path):
    names = [f"{runs.here}/a@2", f"{runs.here}/b@4", f"{runs.here}/a@6"]
    entry = average([*names[:2], f"{runs.here}/a"], tmp_path / "out")
    assert_average(runs, tmp_path / "out", names, [1.0, 1.0, 1.0])
    record = read_record(tmp_path / "out" / "checkpoints" / "6")
    assert record.extra == {"average": entry}
    assert entry["method"] == "mean"
    assert [f"{each['workdir']}@{each['step']}" for each in entry["sources"]] == names
    for each in entry["sources"]:
        path = Path(each["workdir"]) / "checkpoints" / str(each["step"])
        assert each["digest"] == read_record(path).digest
    assert len({each["digest"] for each in entry["sources"]}) == 3
    assert not any(name.startswith("count") for name in record.arrays)


def test_a_moving_average_of_the_last(runs, tmp_path):
    names = [f"{runs.here}/a@{step}" for step in (2, 4, 6)]
    average([f"{runs.here}/a"], tmp_path / "out", method="ema", decay=0.75, last=3)
    assert_average(runs, tmp_path / "out", names, [0.75 * 0.75, 0.25 * 0.75, 0.25])
    # By the definition: the average of all before, then the next.
    found, before = read_model(tmp_path / "out").params, runs.states[names[0]]
    for name in names[1:]:
        step = lambda old, new: 0.75 * old.astype(np.float64) + 0.25 * new  # noqa: E731
        before = jax.tree.map(step, before, runs.states[name])
    for name, array in named_leaves(found).items():
        np.testing.assert_allclose(array, named_leaves(before)[name], rtol=1e-6, atol=1e-7)


def test_equal_checkpoints_have_themselves_as_the_mean(runs, tmp_path):
    for copy in ("x", "y"):
        shutil.copytree(runs.here / "a", tmp_path / copy)
    average([f"{runs.here}/a@4", f"{tmp_path}/x@4", f"{tmp_path}/y@4"], tmp_path / "out")
    found = load_newest(tmp_path / "out" / "checkpoints").state
    jax.tree.map(np.testing.assert_array_equal, found, runs.states[f"{runs.here}/a@4"])


def test_an_average_is_a_pretrained_model(runs, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["average", f"{runs.here}/a@6", "--out", str(out), f"{runs.here}/b", "--evaluate"]
    assert main([*command, "--rows=20"]) == 0
    said = capsys.readouterr().out
    first, *lines = said.splitlines()
    assert first == f"{out}: mean of 2 checkpoints"
    assert [line.split()[0] for line in lines[2:]] == [
        f"{runs.here}/a@6", f"{runs.here}/b@5", str(out),
    ]  # fmt: skip
    losses = [float(line.split("nats")[0].split()[-1]) for line in lines[2:]]
    assert len(set(losses)) == 3
    values = evaluate_run(out, max_rows=20)
    assert values["eval/mlm_loss"] == pytest.approx(losses[-1], abs=1e-3)

    assert main(["evaluate", str(out), "--step=7"]) == 2
    assert "no checkpoint of step 7; saved steps: 6" in capsys.readouterr().err

    saved = read_model(out)
    assert saved.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert saved.origin.step == 6
    assert main(["verify", str(out)]) == 0
    capsys.readouterr()
    assert main(["status", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())  # long paths are broken into lines
    assert f"mean of {runs.here}/a at step 6" in said
    config = small_config(data={"corpus": str(runs.here / "corpus")})
    with pytest.raises(UserError, match=r"an average of checkpoints, which cannot be continued"):
        train(config, out)
    with pytest.raises(UserError, match=r"an average of checkpoints, which has no state"):
        train(config, tmp_path / "new", branch_from=str(out))
    average([str(out), f"{runs.here}/a@2"], tmp_path / "again")  # but can be averaged


def test_an_average_is_no_branch_and_has_ancestors_of_its_own(runs, tmp_path):
    """Whatever the record of the run says whose checkpoint is the newest."""
    copy = shutil.copytree(runs.here / "a", tmp_path / "copy")
    record = json.loads((copy / "config.json").read_text())
    record["branch"] = {"workdir": "elsewhere", "step": 3, "digest": "0"}
    record["bert_jax"] = "0.0.1"
    record["lineage"] = [ancestor_entry("branch", f"{runs.here}/b", 4)]
    (copy / "config.json").write_text(json.dumps(record))
    average([f"{runs.here}/b@4", f"{copy}@6"], tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "branch" not in found
    assert found["bert_jax"] == bert_jax.__version__
    assert [entry["role"] for entry in found["lineage"]] == ["average[0]", "average[1]"]
    assert found["config"] == record["config"]


def refused(names: list[str], out: Path, kind: type[Exception] = UserError, **more: Any) -> str:
    with pytest.raises(kind) as error:
        average(names, out, **more)
    assert not out.exists()
    assert not list(out.parent.glob("out*"))
    return str(error.value)


def test_what_cannot_be_averaged(runs, tmp_path):
    out, a = tmp_path / "out", f"{runs.here}/a"
    assert "is one checkpoint; an average takes two or more" in refused([a], out)
    (tmp_path / "link").symlink_to(a)
    for same in (f"{a}@6", f"{a}/@6", f"{a}/", f"{tmp_path}/link"):
        assert " is named twice; name it once" in refused([a, same], out)
    assert "no checkpoint of step 3; saved steps: 2, 4, 6" in refused([a, f"{a}@3"], out)
    assert "has 3 verified checkpoints" in refused([a], out, last=4)
    assert "names its step, so --last 2" in refused([f"{a}@6"], out, last=2)
    assert "--last is 0" in refused([a], out, last=0)
    assert "--decay is 0.5, but --method is mean" in refused([a], out, last=2, decay=0.5)
    assert "--decay is 1;" in refused([a], out, last=2, method="ema", decay=1.0)
    assert "is in a bucket" in refused([a], Path("gs://runs/out"), last=2)


def test_checkpoints_of_different_models(runs, tmp_path):
    a, files = f"{runs.here}/a@6", runs.here / "corpus" / "train" / "tokenizer"
    rope = {"model__positions": "rope", "model__num_types": 0, "data": {"pairing": "none"}}
    for number, theta in enumerate((1e4, 2e4)):
        config = small_config(**rope, model__rope_theta=theta)
        write_run(tmp_path / f"rope{number}", config, (3,), 1, files)
    names = [f"{tmp_path}/rope{number}@3" for number in range(2)]
    found = refused(names, tmp_path / "out")
    assert "of different models; an average needs one model: model.rope_theta: 1" in found
    found = refused([a, names[0]], tmp_path / "out")
    assert "model.positions: learned and rope" in found
    other = shutil.copytree(runs.here / "b", tmp_path / "other")
    shutil.rmtree(other / "tokenizer")
    WordPieceTokenizer(
        [*SPECIAL_TOKENS, *(str(n) for n in range(6, TOKENIZER.vocab_size + 1))]
    ).save(other / "tokenizer")
    assert "tokenizer: " in refused([a, f"{other}@5"], tmp_path / "out")


def test_damage_and_full_disks_leave_nothing(runs, tmp_path):
    copy = shutil.copytree(runs.here / "a", tmp_path / "copy")
    change_a_digest(copy / "checkpoints" / "4", "params/encoder/embeddings/token")
    names = [f"{copy}@2", f"{copy}@4"]
    found = refused(names, tmp_path / "out", DamagedCheckpointError)
    assert f"{copy}/checkpoints/4 is damaged: array params/encoder/embeddings/token" in found
    (copy / "checkpoints" / "2" / "record" / "data.json").write_text("{")
    assert "checkpoints/2 is damaged" in refused(names, tmp_path / "out", DamagedCheckpointError)
    before = snapshot(runs.here)
    with files_of_at_most(20_000):
        assert "cannot write" in refused([f"{runs.here}/a"], tmp_path / "out", last=2)
    assert snapshot(runs.here) == before


def test_threads_that_write_on_after_an_error_leave_nothing(tmp_path):
    """Orbax raises the first error of a save while its other threads still write."""

    def write_late(directory: Path) -> None:
        time.sleep(0.3)
        (directory / "checkpoints").mkdir(parents=True)

    def save() -> None:
        with staged(tmp_path / "out") as directory:
            threading.Thread(target=write_late, args=(directory,)).start()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        save()
    time.sleep(0.4)
    assert not list(tmp_path.iterdir())

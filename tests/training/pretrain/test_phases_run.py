"""A run of three phases that differ in everything a phase can set, stopped and continued."""

import dataclasses
import os
import re
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from small_run import (
    fingerprint,
    small_config,
    write_corpus,
    write_store,
)

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.inspection.evaluate import evaluate_run
from bert_jax.cli.inspection.replay import replay_batch
from bert_jax.config.mapping import build, to_dict
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.record import read_record
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.errors import UserError
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, open_corpus
from bert_jax.training.pretrain.evaluate import HeldOut
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.run_plan import Scores
from bert_jax.training.steps.state import TrainState, abstract_state


class Run(NamedTuple):
    """A finished run."""

    workdir: Path
    config: PretrainConfig
    corpus: Corpus
    evaluation: dict[str, float]


def config_of(corpus: Path, other: Path) -> PretrainConfig:
    """Return six steps of a small ModernBERT: short rows, long rows, and a decay."""
    later = {"rope_theta": 1000.0, "learning_rate": 3e-4, "length": 64, "batch_size": 16}
    phases = [
        {"length": 32, "batch_size": 64, "masking_rate": 0.5, "batch_warmup_steps": 1},
        {**later, "masking_rate": 0.3, "corpus": str(other), "decay": "constant"},
        {**later, "masking_rate": 0.1, "decay": "one_minus_sqrt", "end_rate": 3e-6},
    ]
    modern = {
        "norm_order": "pre", "first_norm": False, "positions": "rope", "attention_pattern": "GL",
        "local_window": 4, "gated": True, "num_types": 0, "pooler": False,
    }  # fmt: skip
    return small_config(
        **{f"model__{name}": value for name, value in modern.items()},
        training__num_steps=6,
        training__phases=[{**phase, "share": 1 / 3} for phase in phases],
        training__accumulation=1,
        training__eval_every_steps=0,
        training__log_every_steps=1,
        optimizer={"name": "stable_adamw", "schedule": "constant", "warmup_steps": 1, "b2": 0.98},
        optimizer__learning_rate=1e-3,
        checkpoint={"save_every_steps": 2, "keep": 9},
        data={"corpus": str(corpus), "pairing": "none"},
    )


def state_of(workdir: Path, config: PretrainConfig, corpus: Corpus) -> TrainState:
    """Return the newest state of a run, on the mesh of `config`."""
    config = config.with_vocabulary(corpus.train.vocab_size)
    checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint)
    mesh = make_mesh(config.mesh)
    restored = checkpoints.restore(abstract_state(step_config(config, corpus), mesh))
    checkpoints.close()
    return restored.state


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    directory = tmp_path_factory.mktemp("run")
    write_corpus(directory / "corpus")
    write_store(directory / "other", 40, seed=8)
    config = config_of(directory / "corpus", directory / "other")
    result = train(config, directory / "work", echo=lambda _: None)
    assert result.finished
    corpus = open_corpus(config.data.corpus)
    return Run(directory / "work", config, corpus, result.eval_metrics)


def test_each_phase_has_its_learning_rate_and_moments_go_on(run):
    rows = read_metrics(run.workdir / "metrics.jsonl")
    rates = [row["train/learning_rate"] for row in rows if "train/learning_rate" in row]
    np.testing.assert_allclose(rates, [1e-3, 1e-3, 3e-4, 3e-4, 3e-4, 3e-6], rtol=1e-5)
    assert [row["step"] for row in rows if "eval/mlm_loss" in row] == [2, 4, 6]
    records = [read_record(run.workdir / "checkpoints" / f"{step}") for step in (2, 4, 6)]
    assert [record.extra["judged_on"][0] for record in records] == [32, 64, 64]
    state = state_of(run.workdir, run.config, run.corpus)
    assert int(state.opt_state.num_updates) == 6
    assert all(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state.nu))


def test_each_phase_has_its_rows_text_and_masks(run):
    found = [replay_batch(run.workdir, step) for step in (0, 1, 2, 4)]
    sizes = [re.match(r"(\d+) rows of (\d+)", text).groups() for text in found]
    assert sizes == [("16", "32"), ("64", "32"), *[("16", "64")] * 2]
    for text, rate in zip(found, (0.5, 0.5, 0.3, 0.1), strict=True):
        counts = re.findall(r"(\d+) tokens, .*?(\d+) to predict", text)
        tokens, predicted = (sum(int(pair[at]) for pair in counts) for at in (0, 1))
        assert predicted / tokens == pytest.approx(rate, abs=0.03)
    with pytest.raises(UserError, match="the training corpus: fingerprint"):  # not that phase's
        replay_batch(run.workdir, 2, corpus=run.config.data.corpus)


def test_a_checkpoint_has_the_thetas_of_its_phase(run, tmp_path):
    assert read_model(run.workdir).config.rope_theta == 1000
    steps = [step_config(run.config.with_vocabulary(64), run.corpus, n) for n in range(3)]
    assert [step.objective.model.rope_theta for step in steps] == [10000, 1000, 1000]
    first = shutil.copytree(run.workdir, tmp_path / "first")
    for step in ("4", "6"):
        shutil.rmtree(first / "checkpoints" / step)
    assert read_model(first).config.rope_theta == 10000
    # A checkpoint is evaluated as the run did, with the thetas of the last phase and at 15%.
    again = evaluate_run(run.workdir)
    assert again["eval/num_masked"] == run.evaluation["eval/num_masked"]
    tokens = run.corpus.heldout.num_tokens
    assert again["eval/num_masked"] == pytest.approx(0.15 * tokens, rel=0.1)
    assert again["eval/mlm_loss"] == pytest.approx(run.evaluation["eval/mlm_loss"], rel=1e-5)


def test_a_run_that_ends_early_is_saved_with_the_thetas_of_its_last_step(
    run, tmp_path, monkeypatch
):
    """Longer rows have a higher loss, so a second phase ended the run at its first evaluation."""
    losses = iter([3.0, 2.0, 1.0, 5.0, 5.0])
    monkeypatch.setattr(HeldOut, "score", lambda *_: [Scores({"mlm_loss": next(losses)})])
    given = to_dict(run.config)
    given["training"] |= {"num_steps": 9, "eval_every_steps": 1, "patience": 1}
    given["training"]["phases"][2]["rope_theta"] = 5000.0
    given["checkpoint"] |= {"save_every_steps": 99}
    result = train(build(PretrainConfig, given), tmp_path / "work", echo=lambda _: None)
    assert result.finished
    assert result.step == 5  # in the second phase, which has the steps 4 to 6
    assert read_model(tmp_path / "work").config.rope_theta == 1000


def stop_at_the_border(line: str) -> None:
    if line.startswith("held-out text at step 4"):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_stopped_at_a_border_and_continued_on_this_and_on_another_mesh(run, tmp_path):
    workdir, other = tmp_path / "work", tmp_path / "other"
    stopped = train(run.config, workdir, echo=stop_at_the_border)
    assert stopped.step == 4
    shutil.copytree(workdir, other)
    assert train(run.config, workdir, echo=lambda _: None).finished
    whole = fingerprint(run.workdir, run.config, run.corpus)
    assert fingerprint(workdir, run.config, run.corpus) == whole

    mesh = dataclasses.replace(run.config.mesh, fsdp=2, tensor=2)
    elsewhere = dataclasses.replace(run.config, mesh=mesh)
    at_border = fingerprint(other, elsewhere, run.corpus)
    parts = tmp_path / "parts"
    shutil.copytree(run.workdir, parts)
    shutil.rmtree(parts / "checkpoints" / "6")
    same = fingerprint(parts, run.config, run.corpus)
    assert at_border.pop("metrics") != same.pop("metrics")  # the copy has the rows of all steps
    assert at_border == same
    assert train(elsewhere, other, echo=lambda _: None).finished
    ends = [state_of(each, run.config, run.corpus).params for each in (run.workdir, other)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), *ends)

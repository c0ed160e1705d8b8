"""An objective of our own, in this file alone: trained, continued, drawn, replayed and planned.

The number of different tokens of a row, modulo a small number: nothing that the package knows.
"""

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import (
    fingerprint,
    small_config,
    write_corpus,
)

from bert_jax.cli import main as cli
from bert_jax.distributed.checkpoint.reading import load_newest
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.model.flops import TRAIN_OVER_FORWARD, encoder_flops
from bert_jax.model.heads import encode, logical_axes
from bert_jax.model.task_heads import TaskHeadConfig, TaskModel, init_task_params
from bert_jax.objectives import config as objectives
from bert_jax.objectives.losses import cross_entropy, ratio
from bert_jax.objectives.objective import Forward, Metric, Objective
from bert_jax.planning.compile import compile_step
from bert_jax.planning.topology import parse_topology
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.steps.state import abstract_state

pytestmark = pytest.mark.usefixtures("reused_steps")

METRICS = (
    Metric("toy_loss", "counting loss", "toy_loss", "rows", "nats per row", short="toy loss",
           baseline="entropy of a guess"),
    Metric("toy_accuracy", "counting accuracy", "toy_correct", "rows", better="higher",
           short="toy accuracy", floor="toy_majority"),
)  # fmt: skip


@dataclass(frozen=True)
class Counting(Objective):
    """Number of different tokens of a row, modulo `modulus`."""

    modulus: int
    metrics = METRICS

    @property
    def head(self) -> TaskHeadConfig:
        return TaskHeadConfig("tagging", self.modulus)

    def init(self, key):
        return init_task_params(self.model, self.head, key)

    def axes(self):
        return logical_axes(self.model, TaskModel, self.head)

    def prepare(self, batch, seed):
        ordered = jnp.sort(jnp.asarray(batch["tokens"]).astype(jnp.int32), axis=1)
        different = 1 + jnp.sum(ordered[:, 1:] != ordered[:, :-1], axis=1)
        return {**batch, "answers": different % self.modulus}

    def counts(self, rows):
        return {"rows": jnp.sum(self._counted(rows))}

    def forward(self, params, rows, seed, layout):
        states = encode(self.model, params, *self.inputs(rows, seed), layout)
        head, counted = params["head"], self._counted(rows)
        logits = states.mean(axis=1) @ head["kernel"].astype(states.dtype) + head["bias"]
        loss, correct = cross_entropy(logits, rows["answers"])
        sums = {
            "toy_loss": jnp.sum(loss * counted),
            "toy_correct": jnp.sum(correct * counted),
            "rows": jnp.sum(counted),
        }
        answers = jax.nn.one_hot(rows["answers"], self.modulus) * counted[:, None]
        return Forward(sums | {f"answer_{n}": jnp.sum(answers[:, n]) for n in range(self.modulus)})

    def _counted(self, rows):
        return jnp.any(rows["segment_ids"] > 0, axis=1).astype(jnp.float32)

    def loss(self, sums, counts):
        return ratio(sums["toy_loss"], counts["rows"])

    def aside(self, sums: Mapping[str, float]):
        most = max(sums[f"answer_{n}"] for n in range(self.modulus))
        return {"toy_majority": most / max(sums["rows"], 1.0)}

    def flops(self, rows):
        return TRAIN_OVER_FORWARD * encoder_flops(self.model, rows["tokens"].shape[-1])


@dataclass(frozen=True)
class CountingConfig(objectives.ObjectiveConfig):
    """Different tokens of a row."""

    name: str = "counting"
    """Objective: counting."""
    modulus: int = 3
    """Number of answers."""
    frozen: str = ""
    """Entry that does not learn; empty: all learn."""

    def metrics(self, pairs):
        return METRICS

    def make(self, given):
        frozen = frozenset({self.frozen} - {""})
        baseline = float(np.log(self.modulus))
        return Counting(given.model, self.modulus, baseline=baseline, frozen=frozen)


@pytest.fixture(scope="module", autouse=True)
def _set_up() -> Iterator[None]:
    objectives.OBJECTIVES["counting"] = CountingConfig
    yield
    del objectives.OBJECTIVES["counting"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def config_of(**fields: Any):
    return small_config(
        objective={"name": "counting", **fields},
        data__pairing="none",
        training__num_steps=8,
        training__phases=[{"length": 32, "batch_size": 16}],
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    workdir = tmp_path_factory.mktemp("whole") / "work"
    said: list[str] = []
    assert train(config_of(), workdir, corpus=corpus, echo=said.append).finished
    return workdir, said


def test_a_run_reports_and_draws_its_metrics(whole):
    workdir, said = whole
    assert any("toy loss" in line and "toy accuracy" in line for line in said)
    assert any("entropy of a guess" in line for line in said)
    rows = read_metrics(workdir / "metrics.jsonl")
    assert any("train/toy_loss" in row for row in rows)
    last = [row for row in rows if "eval/toy_loss" in row][-1]
    assert 0 < last["eval/toy_loss"] < 3
    assert 1 / 3 <= last["eval/toy_majority"] <= 1
    assert (workdir / "loss.png").stat().st_size > 0


def test_stopped_and_continued_equals_uninterrupted(tmp_path, corpus, whole):
    def stop(line):
        if line.startswith("step 3/8"):
            os.kill(os.getpid(), signal.SIGTERM)

    workdir, config = tmp_path / "work", config_of()
    assert not train(config, workdir, corpus=corpus, echo=stop).finished
    assert train(config, workdir, corpus=corpus, echo=lambda line: None).finished
    assert fingerprint(workdir, config, corpus) == fingerprint(whole[0], config, corpus)


def test_verbs_take_the_run(whole, corpus, capsys):
    workdir, where = whole[0], str(corpus.train.path.parent)
    assert cli.main(["status", str(workdir)]) == 0
    assert "toy loss" in capsys.readouterr().out
    assert cli.main(["replay", str(workdir), "--step", "2", "--corpus", where]) == 0
    assert "rows of 32" in capsys.readouterr().out
    assert cli.main(["evaluate", str(workdir), "--corpus", where]) == 0
    assert "toy_accuracy" in capsys.readouterr().out


def test_a_frozen_entry_stays_and_has_no_moments(tmp_path, corpus):
    config, workdir = config_of(frozen="encoder"), tmp_path / "work"
    run = partial(train, config, workdir, corpus=corpus, echo=lambda line: None)
    assert run().finished
    found = load_newest(workdir / "checkpoints")
    assert found is not None
    settings = step_config(config.with_vocabulary(64), corpus)
    assert abstract_state(settings, make_mesh(config.mesh)).opt_state.mu.keys() == {"head"}
    fresh = settings.objective.init(jax.random.key(config.seed))
    for path, leaf in jax.tree_util.tree_leaves_with_path(found.state["encoder"]):
        begun = fresh["encoder"]
        for key in path:
            begun = begun[key.key]
        np.testing.assert_array_equal(leaf, begun, err_msg=jax.tree_util.keystr(path))
    assert np.any(found.state["head"]["kernel"] != fresh["head"]["kernel"])


def test_a_slice_of_tpus_is_planned(tmp_path):
    pytest.importorskip("libtpu", reason="libtpu is not installed: no slice can be compiled for")
    config = config_of().with_vocabulary(64)
    plan = compile_step(config, 0, parse_topology("v5e:2x2"), cache=tmp_path)
    assert plan.fits
    assert plan.mfu is not None

"""Bad steps: what is said of them, the second run, and a whole run that stops or goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from bad_batches import poison
from small_run import (
    fingerprint,
    small_config,
    write_corpus,
)

from bert_jax.config.mapping import to_dict
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.errors import report_error
from bert_jax.training import loop
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.train import train
from bert_jax.training.progress import DivergedError
from bert_jax.training.run.events import read_events
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.steps.bad_step import (
    BadStep,
    BadStepError,
    Comparison,
    compute_again,
    find_bad_step,
    skipped_message,
)
from bert_jax.training.steps.guard import GUARD_METRICS, GuardConfig, judge
from bert_jax.training.steps.guard import fresh_guard as make_guard

WORKDIR = Path("work")
LOOK = "bert-jax replay work --step 1234"


def metrics_of(loss=3.0, grad_norm=1.0, **changes):
    values = {
        "loss": loss, "grad_norm": grad_norm,
        "guard_mean": 3.21, "guard_std": 0.05, "guard_limit": 4.21,
    }  # fmt: skip
    whole = {"bad": 1, "halted": 1, "guard_skipped": 0} | changes
    return {name: np.array(value, np.float32) for name, value in values.items()} | {
        name: np.array(value, np.int32) for name, value in whole.items()
    }


def test_only_bad_metrics_are_a_bad_step():
    assert find_bad_step(7, metrics_of(bad=0)) is None
    bad = find_bad_step(7, metrics_of(loss=np.nan))
    assert bad is not None
    assert (bad.batch, bad.halted, bad.in_a_row) == (7, True, 0)


def test_what_is_said_of_a_bad_step():
    spike = BadStep(1234, metrics_of(loss=9.5, halted=0, guard_skipped=1))
    assert skipped_message(spike, LOOK) == (
        "batch 1,234 was skipped: the loss of batch 1,234 is 9.5000, a spike (recent losses: mean "
        "3.2100, standard deviation 0.0500; limit 4.2100). See it with `bert-jax replay work "
        "--step 1234`"
    )
    third = BadStep(8, metrics_of(loss=np.nan, grad_norm=np.inf, halted=0, guard_skipped=3))
    assert "batch 8 was skipped, 3 in a row: the loss of batch 8 is nan and its gradient norm " in (
        skipped_message(third)
    )
    assert "gradient norm inf (" in third.describe()
    early = BadStep(0, metrics_of(loss=np.nan) | {"guard_limit": np.array(np.inf, np.float32)})
    assert early.describe().endswith("limit not set)")


SAME = Comparison(differing={}, devices="cpu, device ids 0 of process 0", platform="cpu")
OTHER = Comparison(
    differing={"bad": (1.0, 0.0), "loss": (np.nan, 3.25)},
    devices="TPU v5 lite, device ids 0, 1 of process 0",
    platform="tpu",
)


def test_what_is_said_when_a_run_stops(capsys):
    bad = BadStep(37, metrics_of(loss=np.nan))
    error = BadStepError(bad, SAME, f"{WORKDIR}/checkpoints/30", LOOK.replace("1234", "37"))
    message = str(error)
    assert error.step == 37
    assert "the loss of batch 37 is nan" in message
    assert "mean 3.2100, standard deviation 0.0500; limit 4.2100" in message
    assert "the same result to the last bit: the cause is the data, the learning" in message
    assert "`bert-jax replay work --step 37`" in message
    assert f"The last good checkpoint: {WORKDIR / 'checkpoints' / '30'}." in message
    assert "skipped" not in message
    assert report_error(error, "pretrain") == BadStepError.exit_code == 4
    assert message in capsys.readouterr().err

    message = str(BadStepError(bad, OTHER, ""))
    assert "a different result (bad 1, then 0; loss nan, then 3.25): suspect the" in message
    assert "hardware (TPU v5 lite, device ids 0, 1 of process 0)" in message
    assert "add in a different order" not in message
    assert "The last good checkpoint: none was saved." in message

    row = BadStep(37, metrics_of(loss=np.nan, guard_skipped=10))
    assert "the 10 batches before it had to be skipped" in str(
        BadStepError(row, SAME, "checkpoints/1")
    )


def test_a_gpu_may_differ_in_last_digits_without_a_fault():
    devices = "NVIDIA H100, device ids 0 of process 0"
    comparison = Comparison({"loss": (3.0, 3.0000002)}, devices, "gpu")
    assert "if only the last digits differ, the hardware is not at fault" in comparison.describe()


class _State:
    """As a halted step returns it, as far as a second run looks."""

    def __init__(self, guard):
        self.guard = guard

    def _replace(self, guard):
        return _State(guard)


def second_run(faulty):
    """Judged by a step whose first execution a transient fault may have spoilt."""
    whole = jax.sharding.NamedSharding(make_mesh(small_config().mesh), jax.sharding.PartitionSpec())
    executed = []

    @jax.jit
    def compute(guard, loss):
        comparison = judge(GuardConfig(), guard, loss, loss)
        return comparison.guard, comparison.metrics | {"loss": loss, "grad_norm": loss}

    def step(state, batch):
        assert int(state.guard.halted) == 0
        spoilt = faulty and not executed
        executed.append(batch)
        loss = np.float32(np.nan) if spoilt else batch
        guard, metrics = compute(state.guard, jax.device_put(loss, whole))
        return _State(guard), metrics

    batch = np.float32(3.5 if faulty else np.nan)
    state, metrics = step(_State(jax.device_put(make_guard(), whole)), batch)
    bad = find_bad_step(5, metrics)
    assert bad is not None
    assert bad.halted
    assert int(state.guard.halted) == 1
    comparison = compute_again(step, state, batch, bad.metrics)
    assert len(executed) == 2
    return comparison


def test_bad_data_is_bad_again():
    comparison = second_run(faulty=False)
    assert comparison.differing == {}


def test_a_transient_fault_is_not_there_again():
    comparison = second_run(faulty=True)
    assert set(comparison.differing) == {"bad", "halted", "loss", "grad_norm"}
    assert comparison.differing["halted"] == (1, 0)
    assert comparison.devices == "cpu, device ids 0, 1, 2, 3, 4, 5, 6, 7 of process 0"
    assert "suspect the hardware" in comparison.describe()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (np.float32(np.nan), -np.float32(np.nan), True),
        (np.float32(0.0), np.float32(-0.0), False),
        (np.float32(1), np.nextafter(np.float32(1), np.float32(2)), False),
        (np.float32(np.nan), np.float32(1), False),
        (np.float32(1), np.int32(1), False),
        (np.float32(np.inf), np.float32(np.inf), True),
    ],
)
def test_bits_are_compared(a, b, same):
    def step(state, batch):
        return state, {"loss": jax.device_put(b)}

    guard = jax.device_put(make_guard())
    found = compute_again(step, _State(guard), None, {"loss": np.asarray(a)})
    assert (not found.differing) == same


# Whole runs: 16 rows a batch, so batch n has the rows from 16 * n on.

BATCH = 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def short_config(**guard):
    return small_config(
        training__num_steps=9,
        training__phases=[{"length": 32, "batch_size": BATCH}],
        training__eval_every_steps=0,
        checkpoint={"save_every_steps": 3},
        guard=guard,
    )


def test_a_run_stops_at_a_bad_batch(tmp_path, corpus, monkeypatch):
    poison(monkeypatch, {7 * BATCH + 3: "nan"})
    workdir, config = tmp_path / "work", short_config()
    with pytest.raises(BadStepError) as error:
        train(config, workdir, corpus=corpus, echo=lambda _: None)
    message = str(error.value)
    assert error.value.step == 7
    assert "the loss of batch 7 is nan and its gradient norm nan (recent losses: mean 4." in message
    assert "the same result to the last bit" in message
    assert f"`bert-jax replay {workdir} --step 7`" in message
    assert f"The last good checkpoint: {workdir / 'checkpoints' / '6'}." in message
    assert saved_steps(workdir / "checkpoints")[-1] == 6
    assert read_metrics(workdir / "metrics.jsonl")[-1] == {"step": 8, "event/bad_step": 7}
    [event] = [e for e in read_events(workdir / "events.jsonl") if e["kind"] == "bad_step"]
    assert (event["step"], event["batch"], event["message"]) == (8, 7, message)
    for line in (workdir / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    # The same command stops there again; with another setting it goes on from the checkpoint.
    with pytest.raises(BadStepError):
        train(config, workdir, corpus=corpus, echo=lambda _: None)
    skip = short_config(on_bad_step="skip")
    assert train(skip, workdir, corpus=corpus, echo=lambda _: None).finished


def test_a_bad_batch_at_the_end_of_a_phase_is_computed_again_in_that_phase(
    tmp_path, corpus, monkeypatch
):
    """Without held-out text, nothing but the end of a phase lets the loop wait for a step."""
    poison(monkeypatch, {BATCH: "nan"})
    phases = [{"length": 32, "batch_size": BATCH, "share": 0.5, "learning_rate": rate}
              for rate in (1e-3, 1e-4)]  # fmt: skip
    config = small_config(training__num_steps=4, training__phases=phases, training__accumulation=1)
    with pytest.raises(BadStepError, match="the same result to the last bit") as error:
        train(config, tmp_path, corpus=corpus._replace(heldout=None), echo=lambda _: None)
    assert error.value.step == 1


def test_a_fault_that_passes_is_told_from_bad_data(tmp_path, corpus, monkeypatch):
    """The first execution of a step comes out bad, on data that are good."""
    make = loop.make_train_step

    def make_faulty(config, mesh):
        good, bad, executed = make(config, mesh), make(config, mesh), []

        def step(state, batch):
            number = int(batch["row_index"][0]) // BATCH
            executed.append(number)
            if number != 4 or executed.count(4) > 1:
                return good(state, batch)
            with pytest.MonkeyPatch.context() as patch:
                poison(patch, {4 * BATCH: "nan"})  # while the step is traced
                return bad(state, batch)

        return step

    monkeypatch.setattr(loop, "make_train_step", make_faulty)
    with pytest.raises(BadStepError, match="suspect the hardware") as error:
        train(short_config(), tmp_path / "work", corpus=corpus, echo=lambda _: None)
    assert error.value.step == 4
    first, second = error.value.comparison.differing["loss"]
    assert np.isnan(first)
    assert 4 < second < 6
    assert "cpu, device ids 0, 1" in str(error.value)


@pytest.fixture(scope="module")
def skipped(tmp_path_factory, corpus):
    """A whole run that skips two batches: work directory, configuration, lines."""
    workdir = tmp_path_factory.mktemp("skipped") / "work"
    config, said = short_config(on_bad_step="skip"), []
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, {4 * BATCH + 1: "nan", 5 * BATCH: "gradient"})
        result = train(config, workdir, corpus=corpus, echo=said.append)
    assert result.finished
    return workdir, config, said


def test_a_run_that_skips_goes_on_and_says_so(skipped):
    workdir, _, said = skipped
    rows = read_metrics(workdir / "metrics.jsonl")
    skips = [(row["step"], row.get("event/skipped_step")) for row in rows]
    assert [skip for skip in skips if skip[1] is not None] == [(5, 4), (6, 5)]
    trained = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in trained] == [3, 6, 9]
    assert all(4 < row["train/loss"] < 6 for row in trained)  # what was skipped is in no mean
    assert not any(name.endswith(GUARD_METRICS) for row in trained for name in row)
    events = [e for e in read_events(workdir / "events.jsonl") if e["kind"] == "skipped_step"]
    assert [(event["step"], event["batch"]) for event in events] == [(5, 4), (6, 5)]
    assert "2 in a row" in events[1]["message"]
    assert any(f"`bert-jax replay {workdir} --step 4`" in line for line in said)


def test_a_run_that_skips_is_the_same_after_an_end_in_between(
    tmp_path, corpus, monkeypatch, skipped
):
    """Stopped dead between the two, then after both, with all since the last save lost."""
    poison(monkeypatch, {4 * BATCH + 1: "nan", 5 * BATCH: "gradient"})
    whole, config, _ = skipped
    workdir = tmp_path / "work"

    class Killed(BaseException):
        pass

    def killed_at(start):
        def echo(line):
            if line.startswith(start):
                raise Killed

        return echo

    for start in ("Warning: batch 4 was skipped", "Warning: batch 5 was skipped"):
        with pytest.raises(Killed):
            train(config, workdir, corpus=corpus, echo=killed_at(start))
        assert saved_steps(workdir / "checkpoints")[-1] == 3
    with pytest.raises(Killed):
        train(config, workdir, corpus=corpus, echo=killed_at("step 6/9"))
    assert train(config, workdir, corpus=corpus, echo=lambda _: None).finished
    assert fingerprint(workdir, config, corpus) == fingerprint(whole, config, corpus)


def test_too_many_skips_in_a_row_stop_a_run(tmp_path, corpus, monkeypatch):
    poison(monkeypatch, {n * BATCH: "nan" for n in (2, 5, 6, 7)})
    workdir = tmp_path / "work"
    with pytest.raises(BadStepError, match="the 2 batches before it had to be skipped") as error:
        train(
            short_config(on_bad_step="skip", max_skips=2),
            workdir,
            corpus=corpus,
            echo=lambda _: None,
        )
    assert error.value.step == 7
    kinds = [e["kind"] for e in read_events(workdir / "events.jsonl")]
    assert kinds.count("skipped_step") == 3
    assert kinds.count("bad_step") == 1


def diverging_config(on_divergence):
    """A learning rate that grows until the loss rises, which no single step is stopped for."""
    return small_config(
        training__num_steps=8,
        training__phases=[{"length": 32, "batch_size": BATCH}],
        training__accumulation=1,
        training__eval_every_steps=0,
        optimizer={"learning_rate": 0.4, "warmup_steps": 8},
        checkpoint={"save_every_steps": 2, "keep": 1},
        guard={"spike_sigmas": 0.0, "on_divergence": on_divergence},
    )


def test_a_run_that_diverges_says_so_and_keeps_what_was_good(tmp_path, corpus):
    workdir, said = tmp_path / "work", []
    assert train(diverging_config("report"), workdir, corpus=corpus, echo=said.append).finished
    [event] = [e for e in read_events(workdir / "events.jsonl") if e["kind"] == "diverged"]
    assert event["step"] < 8
    assert "The newest checkpoint of step 3 or earlier is kept" in event["message"]
    assert f"Warning: {event['message']}" in said
    rows = read_metrics(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows if "event/diverged" in row] == [event["step"]]
    assert saved_steps(workdir / "checkpoints") == [2, 8]

    stopped = tmp_path / "stopped"
    with pytest.raises(DivergedError) as error:
        train(diverging_config("stop"), stopped, corpus=corpus, echo=lambda _: None)
    assert (str(error.value), error.value.exit_code) == (event["message"], 4)
    assert max(saved_steps(stopped / "checkpoints")) < event["step"]


@pytest.mark.slow
def test_several_processes_compute_a_bad_step_again_together(tmp_path):
    """A learning rate that no model bears, so nothing is patched; both end with code 4."""
    write_corpus(tmp_path / "corpus")
    config = small_config(
        training__num_steps=7,
        training__phases=[{"length": 32, "batch_size": BATCH}],
        training__accumulation=1,
        training__eval_every_steps=0,
        optimizer={"learning_rate": 1e38, "warmup_steps": 0},
        data={"corpus": str(tmp_path / "corpus")},
    )
    (tmp_path / "config.py").write_text(
        f"import json\ndef get_config():\n    return json.loads({json.dumps(to_dict(config))!r})\n"
    )
    workdir, local = tmp_path / "work", Path(__file__).parents[2] / "launch" / "local.py"
    done = subprocess.run(
        [
            sys.executable, str(local), "--processes=2", "--logs", str(tmp_path / "logs"),
            "--", "bert-jax", "pretrain", f"--config={tmp_path / 'config.py'}",
            f"--workdir={workdir}",
        ],
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    logs = [(tmp_path / "logs" / f"process_{i}.log").read_text() for i in range(2)]
    assert done.returncode == 4, done.stderr + "\n".join(logs)
    for log in logs:
        assert "the step gave the same result to the last bit" in log
        assert f"`bert-jax replay {workdir} --step " in log
    kinds = [event["kind"] for event in read_events(workdir / "events.jsonl")]
    assert kinds.count("bad_step") == 1
